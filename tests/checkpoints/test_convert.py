"""Writing checkpoints: what is quantized, what stays, how they appear, and how much memory it takes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints.foreign import CASES, modelopt_nvfp4, raw, write
from checkpoints.test_damage import shards
from helpers import assert_same_bits
from safetensors import safe_open
from safetensors.torch import load_file

import fpemu
from fpemu import checkpoints

torch = pytest.importorskip("torch")
ROOT = Path(__file__).resolve().parents[2]


def model() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).bfloat16()

    return {
        "model.embed_tokens.weight": normal(32, 64),
        "model.layers.0.self_attn.q_proj.weight": normal(64, 64),
        "model.layers.0.self_attn.k_proj.weight": normal(32, 64) * 3,
        "model.layers.0.self_attn.o_proj.weight": normal(64, 64),
        "model.layers.0.mlp.gate.weight": normal(4, 64),
        "model.layers.0.mlp.experts.up_proj": normal(4, 64, 96),
        "model.layers.0.norm.weight": normal(64),
        "model.layers.0.conv.weight": normal(4, 4, 3, 3),
        "model.layers.0.q_norm.weight": normal(8, 8),
        "lm_head.weight": normal(32, 64),
        "rope": torch.arange(4),
    }


QUANTIZED = {
    "model.layers.0.self_attn.q_proj.weight",
    "model.layers.0.self_attn.k_proj.weight",
    "model.layers.0.self_attn.o_proj.weight",
}


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    folder = write(tmp_path / "plain", model())
    (folder / "tokenizer.json").write_text("{}")
    (folder / "pytorch_model.bin").write_bytes(b"old weights")
    return folder


def test_what_is_quantized_and_what_stays(plain: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = checkpoints.convert(plain, out, fmt="nvfp4")
    assert set(done.computed) == QUANTIZED
    assert set(done.kept) == model().keys() - QUANTIZED
    opened = checkpoints.open(out)
    assert opened.layouts == ("modelopt-nvfp4",)
    for name, tensor in model().items():
        if name not in QUANTIZED:
            assert raw(opened[name].values()) == raw(tensor), name
    want = fpemu.encode(model()["model.layers.0.self_attn.o_proj.weight"], "nvfp4")
    entry = opened["model.layers.0.self_attn.o_proj.weight"]
    assert_same_bits(entry.encoded().codes, want.codes)
    assert_same_bits(entry.encoded().scales, want.scales)
    assert entry.global_scale == want.tensor_scale.item()
    assert sorted(p.name for p in out.iterdir()) == [
        "config.json", "hf_quant_config.json", "model.safetensors", "tokenizer.json",
    ]  # fmt: skip
    config = json.loads((out / "config.json").read_text())
    assert config["model_type"] == "tiny"
    assert config["quantization_config"]["quant_method"] == "modelopt"
    assert {"lm_head", "model.embed_tokens"} <= set(config["quantization_config"]["ignore"])
    assert "model.layers.0.norm" not in config["quantization_config"]["ignore"]


def test_keep_and_input_in_other_dtypes(tmp_path: Path) -> None:
    tensors = {
        f"{kind}.weight": torch.randn(32, 64).to(kind) for kind in (torch.float16, torch.float64)
    }
    tensors["b.c.weight"] = torch.randn(32, 64)
    folder = write(tmp_path / "plain", tensors)
    done = checkpoints.convert(folder, tmp_path / "out", fmt="mxfp4", keep=["b.*", "nothing"])
    assert set(done.computed) == {"torch.float16.weight", "torch.float64.weight"}
    opened = checkpoints.open(tmp_path / "out")
    assert opened.layouts == ("mxfp4-pack-quantized",)
    for name in done.computed:
        want = fpemu.encode(tensors[name], "mxfp4")
        assert_same_bits(opened[name].encoded().codes, want.codes)
    ignored = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert ignored["ignore"] == ["b.c"]


FORMATS = {
    "nvfp4": "modelopt-nvfp4",
    "nvfp4/modelopt": "modelopt-nvfp4",
    "nvfp4/compressed-tensors": "nvfp4-pack-quantized",
    "nvfp4/te-unfused": "te-nvfp4",
    "mxfp4": "mxfp4-pack-quantized",
    "mxfp4/rceil": "mxfp4-pack-quantized",
    "mxfp8_e4m3/te": "te-mxfp8",
    "mxfp8_e4m3": "te-mxfp8",
    "fp8_tensor_e4m3": "modelopt-fp8",
    "fp8_channel_e4m3": "modelopt-fp8",
    "fp8_block_e4m3/2d": "deepseek-fp8",
    "fp8_block_e4m3/2d/fp32": "deepseek-fp8",
    "fp8_block_e4m3/2d/e8m0": "deepseek-fp8-ue8m0",
}


@pytest.mark.parametrize("fmt", FORMATS)
def test_every_format_in_its_layout(fmt: str, tmp_path: Path) -> None:
    """The file holds what `fpemu.encode` gives, code for code and scale for scale."""
    x = torch.randn(160, 192).bfloat16()
    folder = write(tmp_path / "plain", {"a.weight": x})
    checkpoints.convert(folder, tmp_path / "out", fmt=fmt)
    entry = checkpoints.open(tmp_path / "out")["a.weight"]
    assert entry.layout is not None and entry.layout.name == FORMATS[fmt]
    row = entry.format if fmt not in fpemu.list_formats() else fmt
    want = fpemu.encode(x, row)  # type: ignore[arg-type]
    got = entry.encoded()
    assert_same_bits(got.codes, want.codes)
    if want.scales is not None:
        assert_same_bits(got.scales, want.scales)
    if want.tensor_scale is not None:
        assert_same_bits(got.tensor_scale, want.tensor_scale)


@pytest.mark.parametrize("layout", checkpoints.LAYOUTS)
def test_every_layout_from_plain_weights(layout: str, plain: Path, tmp_path: Path) -> None:
    """Each takes the plain model with its own format, and gives values near the weights."""
    done = checkpoints.convert(plain, tmp_path / "out", layout=layout)
    opened = checkpoints.open(tmp_path / "out")
    assert opened.layouts == (layout,)
    want = {"model.layers.0.mlp.experts.up_proj"} if layout == "gpt-oss" else QUANTIZED
    assert set(done.computed) == want
    for name in want:
        x, got = model()[name].float(), opened[name].values("float32")
        assert got.shape == x.shape
        assert ((got - x).square().sum() / x.square().sum()).item() < 0.03
    again = checkpoints.convert(tmp_path / "out", tmp_path / "again", layout=layout)
    assert set(again.moved) == want
    a, b = (load_file(tmp_path / d / "model.safetensors") for d in ("out", "again"))
    assert {k: raw(v) for k, v in a.items()} == {k: raw(v) for k, v in b.items()}


def test_weights_of_one_gemm_share_a_number(plain: Path, tmp_path: Path) -> None:
    """q and k run as one GEMM in a server, which has room for one number."""
    checkpoints.convert(plain, tmp_path / "out", fmt="nvfp4/modelopt")
    opened = checkpoints.open(tmp_path / "out")
    q, k, o = (opened[f"model.layers.0.self_attn.{n}_proj.weight"] for n in "qko")
    assert q.global_scale == k.global_scale != o.global_scale
    x = model()["model.layers.0.self_attn.q_proj.weight"]
    amax = model()["model.layers.0.self_attn.k_proj.weight"].abs().max().item()
    want = fpemu.encode(x, "nvfp4/modelopt", amax=amax)
    assert_same_bits(q.encoded().codes, want.codes)
    checkpoints.convert(plain, tmp_path / "te", layout="te-nvfp4")  # one weight, one GEMM
    q, k = (checkpoints.open(tmp_path / "te")[e.name] for e in (q, k))
    assert q.global_scale != k.global_scale


def test_a_nan_weight_keeps_its_number_to_itself(tmp_path: Path) -> None:
    q, k = torch.randn(16, 32), torch.randn(16, 32)
    q[3, 4] = float("nan")
    folder = write(tmp_path / "plain", {"m.q_proj.weight": q, "m.k_proj.weight": k})
    checkpoints.convert(folder, tmp_path / "out", fmt="nvfp4")
    got = checkpoints.open(tmp_path / "out")["m.k_proj.weight"].encoded()
    assert_same_bits(got.codes, fpemu.encode(k, "nvfp4").codes)


def test_quantized_anew(tmp_path: Path) -> None:
    """Other codes are computed from the values that the first library decodes, in float32."""
    foreign = CASES["deepseek-fp8"][1]()
    folder = write(
        tmp_path / "d", {**foreign.tensors, "lm_head.weight": torch.ones(4, 16)}, foreign.block
    )
    with pytest.raises(
        ValueError, match=r"'m\.a\.weight' is stored as 'fp8_block.*Pass fmt='nvfp4/mod"
    ):
        checkpoints.convert(folder, tmp_path / "out", layout="modelopt-nvfp4")
    done = checkpoints.convert(folder, tmp_path / "out", fmt="nvfp4")
    assert done.computed == ("m.a.weight",) and done.kept == ("lm_head.weight",)
    want = fpemu.encode(torch.from_numpy(np.ascontiguousarray(foreign.values)), "nvfp4")
    assert_same_bits(checkpoints.open(tmp_path / "out")["m.a.weight"].encoded().codes, want.codes)


def test_experts_keep_their_blocks_along_the_same_axis(tmp_path: Path) -> None:
    """gpt-oss stores the transpose of its plain weight: blocks run along the inputs, always."""
    x = torch.randn(2, 64, 96).bfloat16()
    folder = write(tmp_path / "plain", {"m.experts.up_proj": x})
    checkpoints.convert(folder, tmp_path / "oss", layout="gpt-oss", fmt="mxfp4")
    stored = load_file(tmp_path / "oss" / "model.safetensors")
    assert stored["m.experts.up_proj_blocks"].shape == (2, 96, 2, 16)
    entry = checkpoints.open(tmp_path / "oss")["m.experts.up_proj"]
    assert_same_bits(entry.encoded().codes.contiguous(), fpemu.encode(x, "mxfp4", axis=1).codes)
    assert_same_bits(entry.values().contiguous(), fpemu.quantize(x, "mxfp4", axis=1))
    checkpoints.convert(tmp_path / "oss", tmp_path / "bf16", fmt="bf16")
    back = load_file(tmp_path / "bf16" / "model.safetensors")
    assert_same_bits(back["m.experts.up_proj"], fpemu.quantize(x, "mxfp4", axis=1))


@pytest.mark.parametrize("fmt", ["bf16", "fp16", "fp32"])
def test_written_plain(fmt: str, tmp_path: Path) -> None:
    foreign = modelopt_nvfp4()
    folder = write(tmp_path / "q", {**foreign.tensors, "n.weight": torch.ones(3)}, foreign.block)
    done = checkpoints.convert(folder, tmp_path / "out", fmt=fmt)
    assert done.decoded == ("m.a.weight",) and done.kept == ("n.weight",)
    assert done.dropped == ("m.a.input_scale",)
    kind = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[fmt]
    got = load_file(tmp_path / "out" / "model.safetensors")
    assert set(got) == {"m.a.weight", "n.weight"} and got["n.weight"].dtype == torch.float32
    assert_same_bits(got["m.a.weight"], torch.from_numpy(foreign.values).to(kind))
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())


def test_kept_weights_of_a_quantized_checkpoint_become_plain(tmp_path: Path) -> None:
    foreign = modelopt_nvfp4()
    tensors = {**foreign.tensors}
    tensors.update({k.replace("m.a", "m.b"): v.clone() for k, v in foreign.tensors.items()})
    folder = write(tmp_path / "q", tensors, foreign.block)
    done = checkpoints.convert(
        folder, tmp_path / "out", layout="nvfp4-pack-quantized", keep=["m.b.*"]
    )
    assert (done.moved, done.decoded) == (("m.a.weight",), ("m.b.weight",))
    assert checkpoints.open(tmp_path / "out")["m.b.weight"].layout is None
    part = checkpoints.convert(folder, tmp_path / "part", fmt="bf16", keep=["m.b.*"])
    assert (part.moved, part.decoded) == (("m.b.weight",), ("m.a.weight",))
    assert checkpoints.open(tmp_path / "part").layouts == ("modelopt-nvfp4",)


def test_kv_cache_scales_and_scheme_go_along(tmp_path: Path) -> None:
    foreign = modelopt_nvfp4()
    block = {**foreign.block, "kv_cache_scheme": {"num_bits": 8, "type": "float", "dynamic": False}}
    tensors = {**foreign.tensors, "m.k_scale": torch.tensor(0.5)}
    folder = write(tmp_path / "q", tensors, block)
    checkpoints.convert(folder, tmp_path / "ct", layout="nvfp4-pack-quantized")
    assert "m.k_scale" in checkpoints.open(tmp_path / "ct")
    config = json.loads((tmp_path / "ct" / "config.json").read_text())
    assert config["quantization_config"]["kv_cache_scheme"] == block["kv_cache_scheme"]
    checkpoints.convert(tmp_path / "ct", tmp_path / "mo", layout="modelopt-nvfp4")
    beside = json.loads((tmp_path / "mo" / "hf_quant_config.json").read_text())
    assert beside["quantization"]["kv_cache_quant_algo"] == "FP8"


# Files -------------------------------------------------------------------------------------------


def sharded(tmp_path: Path) -> Path:
    names = [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
    tensors = {f"l.{i}.up.weight": torch.randn(32, 64).bfloat16() for i in range(6)}
    tensors["l.norm.weight"] = torch.ones(64)
    keys = list(tensors)
    files = {name: {k: tensors[k] for k in keys[i::3]} for i, name in enumerate(names)}
    return shards(tmp_path / "s", files)


def test_shards_stay_shards(tmp_path: Path) -> None:
    folder = sharded(tmp_path)
    checkpoints.convert(folder, tmp_path / "out", fmt="nvfp4")
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    files = sorted(p.name for p in (tmp_path / "out").glob("*.safetensors"))
    assert files == sorted(p.name for p in folder.glob("*.safetensors"))
    total = 0
    for file in files:
        stored = load_file(tmp_path / "out" / file)
        assert {k for k, f in index["weight_map"].items() if f == file} == set(stored)
        total += sum(t.numel() * t.element_size() for t in stored.values())
    assert index["metadata"]["total_size"] == total
    assert checkpoints.open(tmp_path / "out").nbytes == total
    want, got = (checkpoints.open(p) for p in (folder, tmp_path / "out"))
    assert list(got) and set(got) == set(want)


def test_shards_become_one_file_and_a_file_a_folder(tmp_path: Path) -> None:
    folder = sharded(tmp_path)
    one = tmp_path / "one.safetensors"
    checkpoints.convert(folder, one, layout="te-nvfp4-swizzled")
    opened = checkpoints.open(one)  # the swizzle is declared in the file's own metadata
    assert opened.layouts == ("te-nvfp4-swizzled",) and len(opened) == 7
    checkpoints.convert(one, tmp_path / "again", layout="te-nvfp4")
    assert left(tmp_path / "again") == ["config.json", "model.safetensors"]
    with safe_open(tmp_path / "again" / "model.safetensors", "pt") as file:
        assert "quantization_config" not in file.metadata()
    assert not any(not row.same for row in checkpoints.diff(one, tmp_path / "again"))


def test_what_the_safetensors_package_reads(plain: Path, tmp_path: Path) -> None:
    """Files are whole and aligned for the package: it loads every tensor, zero-size ones too."""
    tensors = {**model(), "empty.weight": torch.zeros(0, 32), "none": torch.zeros(3, 0)}
    folder = write(tmp_path / "c", tensors)
    done = checkpoints.convert(folder, tmp_path / "out", fmt="nvfp4")
    assert "empty.weight" in done.kept
    got = load_file(tmp_path / "out" / "model.safetensors")
    assert got["empty.weight"].shape == (0, 32) and got["none"].shape == (3, 0)
    with (tmp_path / "out" / "model.safetensors").open("rb") as file:
        assert int.from_bytes(file.read(8), "little") % 8 == 0


def test_zero_size_quantized_weights_are_read_and_moved(tmp_path: Path) -> None:
    tensors = {
        "a.weight_packed": torch.zeros(0, 16, dtype=torch.uint8),
        "a.weight_scale": torch.zeros(0, 1, dtype=torch.uint8),
        "b.weight_packed": torch.zeros(4, 0, dtype=torch.uint8),
        "b.weight_scale": torch.zeros(4, 0, dtype=torch.uint8),
    }
    folder = write(tmp_path / "c", tensors)
    opened = checkpoints.open(folder)
    assert opened["a.weight"].values().shape == (0, 32)
    assert opened["b.weight"].encoded().decode().shape == (4, 0)
    checkpoints.convert(folder, tmp_path / "oss", layout="gpt-oss-original")
    checkpoints.convert(tmp_path / "oss", tmp_path / "back", layout="mxfp4-pack-quantized")
    got = load_file(tmp_path / "back" / "model.safetensors")
    assert {k: raw(v) for k, v in got.items()} == {k: raw(v) for k, v in tensors.items()}


# Failing -----------------------------------------------------------------------------------------


def left(tmp_path: Path) -> list[str]:
    return sorted(p.name for p in tmp_path.iterdir())


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "nothing asked": ({}, "neither fmt nor layout"),
    "unknown format": ({"fmt": "nvfp5"}, "unknown format 'nvfp5'.*Did you mean 'nvfp4'"),
    "unknown layout": ({"layout": "gptoss"}, "unknown layout 'gptoss'.*Did you mean 'gpt-oss'"),
    "no layout": ({"fmt": "mxint8"}, "no layout holds 'mxint8'"),
    "element": ({"fmt": "e4m3"}, "'e4m3' is an element format.*take fp8_tensor_e4m3"),
    "plain layout": ({"fmt": "bf16", "layout": "gpt-oss"}, "'bf16' is an element format"),
    "do not go together": ({"fmt": "mxfp4", "layout": "modelopt-nvfp4"}, "does not hold 'mxfp4'"),
    "all kept": ({"fmt": "nvfp4", "keep": ["*"]}, "has no weight to write as modelopt-nvfp4"),
}


@pytest.mark.parametrize("case", WRONG)
def test_mistakes(case: str, plain: Path, tmp_path: Path) -> None:
    options, message = WRONG[case]
    with pytest.raises(ValueError, match=message):
        checkpoints.convert(plain, tmp_path / "out", **options)
    assert left(tmp_path) == ["plain"]


@pytest.mark.parametrize(
    ("shape", "fmt"), [((4, 24), "nvfp4"), ((4, 40), "mxfp4"), ((4, 33), "nvfp4")]
)
def test_weights_that_are_not_whole_blocks(shape: Any, fmt: str, tmp_path: Path) -> None:
    folder = write(tmp_path / "c", {"a.weight": torch.ones(shape), "b.weight": torch.ones(4, 64)})
    with pytest.raises(ValueError, match=rf"'a.weight'.* rows of {shape[1]} are not whole blocks"):
        checkpoints.convert(folder, tmp_path / "out", fmt=fmt)
    assert left(tmp_path) == ["c"]
    done = checkpoints.convert(folder, tmp_path / "out", fmt=fmt, keep=["a.weight"])
    assert done.computed == ("b.weight",)


def test_two_weights_of_one_stored_name(tmp_path: Path) -> None:
    tensors = {"a.weight": torch.ones(4, 64), "a.weight_scale": torch.ones(3)}
    folder = write(tmp_path / "c", tensors)
    with pytest.raises(
        ValueError, match=r"'a\.weight' and 'a\.weight_scale' would both be stored as"
    ):
        checkpoints.convert(folder, tmp_path / "out", fmt="nvfp4")


def test_nothing_is_left_of_a_conversion_that_fails(
    plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever fails, whenever: the result is absent, or the old one, and no other file remains."""
    from fpemu.checkpoints import storage

    checkpoints.convert(plain, tmp_path / "old", fmt="mxfp4")
    before = (tmp_path / "old" / "model.safetensors").read_bytes()
    real, count = storage.Writer.write, 0

    def failing(self: Any, name: str, data: np.ndarray) -> None:
        nonlocal count
        count += 1
        if count == 5:
            raise error
        real(self, name, data)

    monkeypatch.setattr(storage.Writer, "write", failing)
    for error in (OSError("disk full"), KeyboardInterrupt()):
        for out, options in (("new", {}), ("old", {"force": True}), ("new.safetensors", {})):
            count = 0
            with pytest.raises(type(error)):
                checkpoints.convert(plain, tmp_path / out, fmt="nvfp4", **options)
            assert left(tmp_path) == ["old", "plain"]
    assert (tmp_path / "old" / "model.safetensors").read_bytes() == before


def test_nothing_is_overwritten_unless_forced(plain: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    checkpoints.convert(plain, out, fmt="mxfp4")
    (out / "stale.json").write_text("{}")
    checkpoints.convert(plain, tmp_path / "out.safetensors", fmt="mxfp4")
    for other in (out, tmp_path / "out.safetensors"):
        with pytest.raises(FileExistsError, match="exists; it is not overwritten"):
            checkpoints.convert(plain, other, fmt="nvfp4")
        assert checkpoints.open(other).layouts == ("mxfp4-pack-quantized",)
        checkpoints.convert(plain, other, fmt="nvfp4", force=True)
        assert checkpoints.open(other).layouts == ("modelopt-nvfp4",)
    assert not (out / "stale.json").exists()
    assert left(tmp_path) == ["out", "out.safetensors", "plain"]


def test_force_replaces_checkpoints_alone(plain: Path, tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    (home / "thesis.tex").write_text("x")
    with pytest.raises(FileExistsError, match="is no checkpoint"):
        checkpoints.convert(plain, home, fmt="nvfp4", force=True)
    with pytest.raises(ValueError, match="is the source itself"):
        checkpoints.convert(plain, plain, fmt="nvfp4", force=True)
    with pytest.raises(FileNotFoundError, match="no folder"):
        checkpoints.convert(plain, tmp_path / "no" / "out", fmt="nvfp4")
    assert left(tmp_path) == ["home", "plain"] and (home / "thesis.tex").exists()


# Memory ------------------------------------------------------------------------------------------

MEMORY = """
import re, sys
from pathlib import Path
from fpemu import checkpoints
folder = Path(sys.argv[1])
def memory(what):
    return int(re.search(what + r":\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) * 1024
def work(name):
    checkpoints.convert(folder / name, folder / f"{name}-q", fmt="nvfp4/modelopt")
    checkpoints.convert(folder / f"{name}-q", folder / f"{name}-c", layout="nvfp4-pack-quantized")
    checkpoints.convert(folder / f"{name}-q", folder / f"{name}-p", fmt="bf16")
    checkpoints.diff(folder / f"{name}-q", folder / f"{name}-c")
work("small")  # compiles and imports what is needed
Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew from here
before = memory("VmRSS")
work("large")
print(memory("VmHWM") - before)
"""


@pytest.mark.skipif(
    not Path("/proc/self/clear_refs").exists(), reason="peak memory is measured by Linux's /proc"
)
@pytest.mark.slow
def test_one_weight_is_in_memory_at_a_time(tmp_path: Path) -> None:
    """Peak memory over 20 weights of 4 MB is that of a few float32 copies of one of them."""
    one = 1024 * 2048
    for name, shape, count in (("small", (16, 32), 1), ("large", (1024, 2048), 10)):
        files = {
            f"model-{shard}.safetensors": {
                f"l.{shard}.{i}.up.weight": torch.full(shape, 1.5, dtype=torch.bfloat16)
                for i in range(count)
            }
            for shard in range(2)
        }
        shards(tmp_path / name, files)
    done = subprocess.run(
        [sys.executable, "-c", MEMORY, str(tmp_path)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"},  # freed arrays go back at once
    )
    assert done.returncode == 0, done.stderr
    # float32 values of one weight take 4 bytes an element; all weights take 40 as stored.
    per_element = int(done.stdout) / one
    print(f"{per_element:.1f} bytes an element of one weight")
    assert per_element < 16


# Configurations ----------------------------------------------------------------------------------


def test_a_copy_keeps_its_configuration(tmp_path: Path) -> None:
    """What a library said of activations stays, as long as every weight is copied."""
    foreign = CASES["ct-fp8-channel"][1]()
    foreign.block["config_groups"]["group_0"]["input_activations"] = {"strategy": "token"}
    folder = write(tmp_path / "c", foreign.tensors, foreign.block)
    checkpoints.convert(folder, tmp_path / "out", layout="float-quantized")
    assert (tmp_path / "out" / "config.json").read_bytes() == (folder / "config.json").read_bytes()
    mixed = {
        **foreign.tensors,
        **{k.replace("m.a", "n"): v.clone() for k, v in foreign.tensors.items()},
    }
    folder = write(tmp_path / "d", mixed, foreign.block)
    checkpoints.convert(folder, tmp_path / "part", layout="float-quantized", keep=["n.*"])
    config = json.loads((tmp_path / "part" / "config.json").read_text())["quantization_config"]
    assert config["ignore"] == ["n"]


def test_older_name_of_the_block(tmp_path: Path) -> None:
    foreign = CASES["ct-nvfp4"][1]()
    folder = write(tmp_path / "c", foreign.tensors)
    (folder / "config.json").write_text(json.dumps({"compression_config": foreign.block}))
    assert checkpoints.open(folder).declared.layouts == (
        checkpoints.LAYOUTS["nvfp4-pack-quantized"],
    )
    checkpoints.convert(folder, tmp_path / "out", layout="modelopt-nvfp4")
    assert list(json.loads((tmp_path / "out" / "config.json").read_text())) == [
        "quantization_config"
    ]


def test_several_granularities_have_a_group_each(tmp_path: Path) -> None:
    a, b = CASES["ct-fp8-channel"][1](), CASES["ct-fp8-block"][1]()
    tensors = {**a.tensors, **{k.replace("m.a", "m.b"): v for k, v in b.tensors.items()}}
    folder = write(tmp_path / "c", tensors)
    checkpoints.convert(folder, tmp_path / "te", layout="float-quantized")
    groups = json.loads((tmp_path / "te" / "config.json").read_text())["quantization_config"]
    groups = groups["config_groups"]
    assert [group["targets"] for group in groups.values()] == [["m.a"], ["m.b"]]
    assert [group["weights"]["strategy"] for group in groups.values()] == ["channel", "block"]


def test_a_failed_swap_puts_the_old_one_back(
    plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints.convert(plain, tmp_path / "out", fmt="mxfp4")
    real = os.replace

    def failing(src: Any, dst: Any) -> None:
        if Path(src).name == "new":
            raise OSError("no")
        real(src, dst)

    monkeypatch.setattr(os, "replace", failing)
    with pytest.raises(OSError, match="no"):
        checkpoints.convert(plain, tmp_path / "out", fmt="nvfp4", force=True)
    assert checkpoints.open(tmp_path / "out").layouts == ("mxfp4-pack-quantized",)
    assert left(tmp_path) == ["out", "plain"]
