"""Checkpoints against the libraries: they open what fpemu writes, fpemu reads what they write.

Values are compared by their bits. The libraries live in an environment of their own: set
FPEMU_PEERS_PYTHON to its python, or run ``make peers``.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import assert_same_bits, bits_of

torch = pytest.importorskip("torch")

from safetensors import safe_open  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402

from fpemu import checkpoints  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
PEER = Path(__file__).with_name("checkpoint_peer.py")
pytestmark = pytest.mark.slow


def peers_python() -> str:
    named = os.environ.get("FPEMU_PEERS_PYTHON")
    python = Path(named) if named else ROOT / ".venv-peers" / "bin" / "python"
    if not python.exists():
        pytest.skip(f"no {python}: the other libraries are not installed; run make peers")
    return str(python)


def run_peer(*args: Any) -> None:
    done = subprocess.run(
        [peers_python(), "-W", "ignore", str(PEER), *map(str, args)],
        capture_output=True,
        text=True,
        timeout=540,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
    )
    last = (done.stderr.strip() or " ").splitlines()[-1]
    if done.returncode and last.startswith("ModuleNotFoundError"):
        pytest.skip(f"a library is not installed there: {last}; run make peers")
    assert done.returncode == 0, done.stderr[-4000:]


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Plain models, and checkpoints that the libraries wrote, with their values."""
    folder = tmp_path_factory.mktemp("theirs")
    run_peer("make", folder)
    return folder


def random_bytes(path: Path, seed: int) -> None:
    """Put random codes and scales into a written checkpoint: a library must take any byte.

    Scales that are NaN are left out: their tables differ, and `test_layouts` has those. The sign of
    an E4M3 scale is left out too.
    """
    rng = np.random.default_rng(seed)
    file = path / "model.safetensors"
    with safe_open(file, "pt") as handle:
        metadata = handle.metadata()
    tensors = load_file(file)
    for name, tensor in tensors.items():
        if tensor.itemsize > 1:
            continue
        data = rng.integers(0, 256, tensor.shape, dtype=np.uint8)
        if "scale" in name:
            data = data % 127 if tensor.dtype == torch.float8_e4m3fn else data % 255
        elif tensor.dtype == torch.float8_e4m3fn:
            data[(data & 0x7F) == 0x7F] = 3
        tensors[name] = torch.from_numpy(data).view(tensor.dtype)
    save_file(tensors, file, metadata)


#: checkpoint -> source, layout, format
WRITTEN = {
    "modelopt-nvfp4": ("llama", "modelopt-nvfp4", None),
    "modelopt-nvfp4-te": ("llama", "modelopt-nvfp4", "nvfp4"),
    "modelopt-fp8": ("llama", "modelopt-fp8", None),
    "ct-nvfp4": ("llama", "nvfp4-pack-quantized", None),
    "ct-mxfp4": ("llama", "mxfp4-pack-quantized", None),
    "ct-fp8-tensor": ("llama", "float-quantized", "fp8_tensor_e4m3"),
    "ct-fp8-channel": ("llama", "float-quantized", "fp8_channel_e4m3"),
    "ct-fp8-block": ("llama", "float-quantized", "fp8_block_e4m3/2d/fp32"),
    "ct-from-modelopt": ("modelopt-nvfp4", "nvfp4-pack-quantized", None),
    "ct-fp8-from-modelopt": ("modelopt-fp8", "float-quantized", None),
    "modelopt-from-ct": ("ct-NVFP4A16", "modelopt-nvfp4", None),
    "gpt-oss-mxfp4": ("gpt-oss-plain", "gpt-oss", None),
    "deepseek-fp8": ("llama", "deepseek-fp8", None),
    "deepseek-fp8-pow2": ("llama", "deepseek-fp8", "fp8_block_e4m3/2d"),
    "deepseek-ue8m0": ("llama", "deepseek-fp8-ue8m0", None),
    "deepseek-from-ct": ("ct-FP8_BLOCK", "deepseek-fp8", None),
}
#: Written again with random codes and scales.
RANDOM = ("modelopt-nvfp4", "ct-nvfp4", "ct-mxfp4", "gpt-oss-mxfp4", "deepseek-ue8m0")


@pytest.fixture(scope="module")
def ours(theirs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints that fpemu wrote, with the values that the libraries read from them."""
    folder = tmp_path_factory.mktemp("ours")
    for name, (source, layout, fmt) in WRITTEN.items():
        checkpoints.convert(theirs / source, folder / name, layout=layout, fmt=fmt)
        if name in RANDOM:
            again = folder / f"{name}-random"
            checkpoints.convert(theirs / source, again, layout=layout, fmt=fmt)
            random_bytes(again, len(name))
    run_peer("open", folder, folder)
    return folder


def compare(folder: Path, name: str) -> int:
    """Compare every value that the library gave with fpemu's; how many weights were quantized."""
    mine = checkpoints.open(folder / name)
    quantized = 0
    with safe_open(folder / f"{name}.values.safetensors", "pt") as theirs:
        for key in theirs.keys():  # noqa: SIM118 (it is no mapping)
            dtype, weight = key.split("|")
            got = mine[weight].values(dtype)
            assert_same_bits(got.contiguous(), theirs.get_tensor(key), note=f"{name} {key}")
            quantized += mine[weight].layout is not None
    return quantized


@pytest.mark.parametrize("name", [*WRITTEN, *(f"{name}-random" for name in RANDOM)])
def test_libraries_open_what_we_write(ours: Path, name: str) -> None:
    assert compare(ours, name) >= 2


READ = {
    "modelopt-nvfp4": "modelopt-nvfp4",
    "modelopt-fp8": "modelopt-fp8",
    "ct-NVFP4A16": "nvfp4-pack-quantized",
    "ct-MXFP4A16": "mxfp4-pack-quantized",
    "ct-FP8_DYNAMIC": "float-quantized",
    "ct-FP8_BLOCK": "float-quantized",
}


@pytest.mark.parametrize("name", READ)
def test_we_read_what_libraries_write(theirs: Path, name: str) -> None:
    mine = checkpoints.open(theirs / name)
    assert mine.layouts == (READ[name],)
    assert compare(theirs, name) >= 7


@pytest.mark.parametrize("name", READ)
def test_their_checkpoints_survive_every_way_round(theirs: Path, tmp_path: Path, name: str) -> None:
    """Through every layout that can hold them and back: every stored byte is the library's."""
    source = theirs / name
    own = checkpoints.LAYOUTS[READ[name]]
    fmt = next(e.format for e in checkpoints.open(source).values() if e.layout is not None)
    ways = 0
    for layout in checkpoints.LAYOUTS.values():
        if layout.name in ("gpt-oss", "gpt-oss-original", own.name) or not _holds(layout, fmt):
            continue
        there, back = tmp_path / f"{layout.name}", tmp_path / f"{layout.name}-back"
        checkpoints.convert(source, there, layout=layout.name)
        checkpoints.convert(there, back, layout=own.name)
        want = load_file(source / "model.safetensors")
        got = load_file(back / "model.safetensors")
        inputs = ("input_scale", "input_global_scale")
        dropped = {k for k in want if layout.input_number is None and k.endswith(inputs)}
        assert got.keys() == want.keys() - dropped
        for key, tensor in got.items():
            assert tensor.dtype == want[key].dtype and tensor.shape == want[key].shape, key
            raw = (t.reshape(-1).view(torch.uint8) for t in (tensor, want[key]))
            assert_same_bits(*raw, note=f"{layout.name}: {key}")
        ways += 1
    assert ways or name == "ct-MXFP4A16"


def _holds(layout: checkpoints.Layout, fmt: Any) -> bool:
    from fpemu.checkpoints.layouts import holds

    return holds(layout, fmt)


def test_our_conversion_is_compressed_tensors_own(theirs: Path, tmp_path: Path) -> None:
    """Its converter from ModelOpt gives the same tensors, byte for byte."""
    checkpoints.convert(theirs / "modelopt-nvfp4", tmp_path / "ct", layout="nvfp4-pack-quantized")
    want = load_file(theirs / "modelopt-as-ct.safetensors")
    got = load_file(tmp_path / "ct" / "model.safetensors")
    assert got.keys() == want.keys()
    for name, tensor in want.items():
        assert tensor.dtype == got[name].dtype, name
        same = bits_of(got[name].reshape(-1).view(torch.uint8))
        assert_same_bits(same, tensor.reshape(-1).view(torch.uint8), note=name)


def test_our_quantization_is_modelopts_own(theirs: Path, tmp_path: Path) -> None:
    """The plain model by its dialect: every scale, code and number of the library's own export."""
    checkpoints.convert(theirs / "llama", tmp_path / "q", fmt="nvfp4/modelopt")
    rows = checkpoints.diff(theirs / "modelopt-nvfp4", tmp_path / "q")
    assert sum(row.scales is not None for row in rows) == 7
    assert [row.name for row in rows if not row.same] == []


def test_our_config_is_modelopts_own(theirs: Path, tmp_path: Path) -> None:
    """Block and file say what ModelOpt's export says, but for who wrote them."""
    import json

    checkpoints.convert(theirs / "modelopt-fp8", tmp_path / "ct", layout="float-quantized")
    checkpoints.convert(tmp_path / "ct", tmp_path / "fp8", layout="modelopt-fp8")
    for name in ("config.json", "hf_quant_config.json"):
        want, got = (
            json.loads((folder / name).read_text())
            for folder in (theirs / "modelopt-fp8", tmp_path / "fp8")
        )
        for value in (want, got):
            value.get("quantization_config", value).pop("producer", None)
        assert got == want
