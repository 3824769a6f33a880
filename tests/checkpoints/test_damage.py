"""Files that are cut, mislabelled or inconsistent: one clear error that names tensor and file."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from checkpoints.foreign import CASES, ct_nvfp4, deepseek_fp8, modelopt_nvfp4, te_nvfp4, write
from safetensors.torch import save_file

from fpemu import FileFormatError, checkpoints

torch = pytest.importorskip("torch")
FP8 = torch.float8_e4m3fn


def opened_with_error(folder: Path, *words: str) -> None:
    with pytest.raises(FileFormatError) as caught:
        checkpoints.open(folder)
    for word in words:
        assert word in str(caught.value), str(caught.value)
    assert "\n" not in str(caught.value)


# Cut and damaged files ---------------------------------------------------------------------------


def raw_file(path: Path, header: Any, data: bytes = b"", length: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + data)
    return path


def row(dtype: str, shape: list[Any], begin: int, end: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


HEADERS = {
    "empty file": (None, b"", "no safetensors header"),
    "header length": ({}, b"", "ends in its header"),
    "no json": (b"{hello", b"", "damaged header"),
    "a list": (b"[1, 2]", b"", "damaged header"),
    "no shape": ({"w": {"dtype": "F32", "data_offsets": [0, 4]}}, b"abcd", "damaged header"),
    "unknown dtype": ({"w": row("F7", [1], 0, 4)}, b"abcd", "'w'.*dtype 'F7'"),
    "wrong size": ({"w": row("F32", [2], 0, 4)}, b"abcd", "'w'.*has 4 bytes, but F32.*needs 8"),
    "negative shape": ({"w": row("U8", [-2, -2], 0, 4)}, b"abcd", "'w'.*whole numbers"),
    "fraction": ({"w": row("U8", [4.0], 0, 4)}, b"abcd", "'w'.*whole numbers"),
    "cut": ({"a": row("U8", [2], 0, 2), "w": row("U8", [4], 2, 6)}, b"abcd", "'w'.*truncated"),
    "hole": (
        {"a": row("U8", [2], 0, 2), "w": row("U8", [2], 3, 5)},
        b"abcde",
        "'w'.*byte 3.*not 2",
    ),
    "overlap": ({"a": row("U8", [2], 0, 2), "w": row("U8", [2], 1, 3)}, b"abcd", "'w'.*byte 1"),
    "too long": ({"w": row("U8", [2], 0, 2)}, b"abcd", "2 bytes after its last tensor"),
    "twice": (
        b'{"w":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},'
        b'"w":{"dtype":"U8","shape":[2],"data_offsets":[0,2]}}',
        b"ab",
        "names 'w' twice",
    ),
}


@pytest.mark.parametrize("case", HEADERS)
def test_damaged_header(case: str, tmp_path: Path) -> None:
    header, data, message = HEADERS[case]
    path = tmp_path / "c" / "model.safetensors"
    if header is None:
        path.parent.mkdir()
        path.write_bytes(data)
    else:
        raw_file(path, header, data, 50 if case == "header length" else None)
    with pytest.raises(FileFormatError, match=message) as caught:
        checkpoints.open(path.parent)
    assert "model.safetensors" in str(caught.value)


@pytest.mark.parametrize("share", [0.001, 0.3, 0.9, 0.999])
def test_truncated_file(share: float, tmp_path: Path) -> None:
    foreign = deepseek_fp8()
    folder = write(tmp_path / "d", foreign.tensors, foreign.block)
    file = folder / "model.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[: int(len(whole) * share)])
    opened_with_error(folder, "model.safetensors", "truncated")
    if share > 0.2:
        opened_with_error(folder, "'m.a.weight")


def test_file_cut_after_it_was_opened(tmp_path: Path) -> None:
    foreign = deepseek_fp8()
    folder = write(tmp_path / "d", foreign.tensors, foreign.block)
    entry = checkpoints.open(folder)["m.a.weight"]
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-5000])
    with pytest.raises(FileFormatError, match=r"'m.a.weight.*' of .*model.safetensors.* bytes"):
        entry.values()
    with pytest.raises(FileFormatError):
        checkpoints.convert(folder, tmp_path / "out", fmt="bf16")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["d"]


# Tensors that do not belong together -------------------------------------------------------------


def change(case: str, **changes: Any) -> Callable[[], tuple[dict[str, Any], Any]]:
    """A case's tensors with some replaced (or left out: None), by the end of their names."""

    def make() -> tuple[dict[str, Any], Any]:
        foreign = CASES[case][1]()
        tensors = dict(foreign.tensors)
        for end, tensor in changes.items():
            name = next((n for n in tensors if n.endswith(end)), f"m.a.{end}")
            tensors.pop(name, None)
            if tensor is not None:
                tensors[name] = tensor
        return tensors, foreign.block

    return make


def u8(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.uint8)


def f8(*shape: int) -> torch.Tensor:
    return u8(*shape).view(FP8)


MISFITS = {
    "no scales": (change("modelopt-nvfp4", weight_scale=None), "m.a.weight'", "no 'm.a.weight_scale'"),
    "no number": (change("ct-nvfp4", weight_global_scale=None), "weight_packed", "weight_global_scale"),
    "no codes": (change("ct-mxfp4", weight_packed=None), "m.a.weight_scale", "no 'm.a.weight_packed'"),
    "no blocks": (change("gpt-oss", _blocks=None), "up_proj_scales", "no 'm.experts.up_proj_blocks'"),
    "no amax": (change("te-nvfp4", amax_rowwise=None), "rowwise_data", "amax_rowwise"),
    "scale dtype": (change("ct-nvfp4", weight_scale=u8(8, 3)), "weight_packed", "dtype U8, not F8_E4M3"),
    "code dtype": (
        change("ct-nvfp4", weight_packed=torch.zeros(8, 24)), "weight_packed", "dtype F32, not U8",
    ),
    "number dtype": (
        change("ct-nvfp4", weight_global_scale=torch.zeros(1).half()), "weight_packed", "F16",
    ),
    "two numbers": (change("ct-nvfp4", weight_global_scale=torch.ones(2)), "(2,)", "not one F32"),
    "scale columns": (change("modelopt-nvfp4", weight_scale=f8(8, 4)), "(8, 4)", "(8, 48)", "(8, 3)"),
    "scale rows": (change("modelopt-nvfp4", weight_scale=f8(9, 3)), "(9, 3)", "(8, 3)"),
    "transposed scales": (change("ct-mxfp4", weight_scale=u8(2, 8)), "(2, 8)", "(8, 2)"),
    "odd padding": (change("te-nvfp4", rowwise_scale_inv=u8(256, 7)), "(256, 7)", "(256, 8)"),
    "not padded": (change("te-nvfp4", rowwise_scale_inv=u8(130, 6)), "(130, 6)", "(256, 8)"),
    "padded where it should not be": (
        change("modelopt-nvfp4", weight_scale=f8(128, 4)), "(128, 4)", "(8, 3)",
    ),
    "block bytes": (change("gpt-oss", _blocks=u8(3, 10, 2, 8)), "16 bytes", "up_proj_blocks"),
    "block count": (change("gpt-oss", _scales=u8(3, 10, 3)), "(3, 10, 3)", "(3, 10, 2)"),
    "FP8 grid": (change("deepseek-fp8", weight_scale_inv=torch.ones(2, 3)), "(2, 3)", "(2, 2)"),
    "FP8 scale dtype": (
        change("deepseek-fp8", weight_scale_inv=torch.ones(2, 2).double()), "dtype F64",
    ),
    "no axis": (change("modelopt-fp8", weight=f8()), "no axis"),
}  # fmt: skip


@pytest.mark.parametrize("case", MISFITS)
def test_tensors_that_do_not_fit(case: str, tmp_path: Path) -> None:
    make, *words = MISFITS[case]
    tensors, block = make()
    opened_with_error(write(tmp_path / "c", tensors, block), "model.safetensors", *words)


@pytest.mark.parametrize(
    "case", ["no number", "scale columns", "odd padding", "block count", "FP8 grid", "no codes"]
)
def test_they_do_not_fit_without_a_configuration_either(case: str, tmp_path: Path) -> None:
    make, *words = MISFITS[case]
    tensors, _ = make()
    extra = ct_nvfp4().tensors if case == "no codes" else {}
    folder = write(tmp_path / "c", {**tensors, **{f"n.{k}": v for k, v in extra.items()}})
    if case == "no codes":  # scales alone are plain bytes unless the layout is in use
        tensors = {"b.weight_scale_inv": torch.ones(1, 1), **deepseek_fp8().tensors}
        folder = write(tmp_path / "d", tensors)
        words = ["b.weight_scale_inv", "no 'b.weight'"]
    opened_with_error(folder, "model.safetensors", *words)


# Names -------------------------------------------------------------------------------------------


def test_one_weight_stored_twice(tmp_path: Path) -> None:
    foreign = ct_nvfp4()
    tensors = {**foreign.tensors, "m.a.weight": torch.ones(8, 48)}
    folder = write(tmp_path / "c", tensors, foreign.block)
    opened_with_error(folder, "'m.a.weight' a second time", "m.a.weight_packed")


def test_a_tensor_that_two_weights_claim(tmp_path: Path) -> None:
    """FP8 and FP4 codes that share the word weight_scale."""
    tensors = {
        "a.weight_packed": u8(8, 32), "a.weight": f8(8, 64), "a.weight_scale": u8(8, 2),
    }  # fmt: skip
    folder = write(tmp_path / "c", tensors)
    with pytest.raises(FileFormatError, match=r"'a\.weight"):
        checkpoints.open(folder)


def test_a_name_that_two_layouts_fit(tmp_path: Path) -> None:
    """The configuration decides; without one the first row; layout= overrules both."""
    foreign = CASES["ct-fp8-tensor"][1]()
    declared = write(tmp_path / "declared", foreign.tensors, foreign.block)
    silent = write(tmp_path / "silent", foreign.tensors)
    assert checkpoints.open(declared).layouts == ("float-quantized",)
    assert checkpoints.open(silent).layouts == ("modelopt-fp8",)
    forced = checkpoints.open(declared, layout="modelopt-fp8")
    assert forced.layouts == ("modelopt-fp8",)


def test_stacked_experts_of_modelopt_are_refused(tmp_path: Path) -> None:
    """Their numbers are one for each expert; read as plain bytes they would be lost on the way."""
    tensors = {
        "m.experts.gate_up_proj": u8(2, 8, 24),
        "m.experts.gate_up_proj_weight_scale": f8(2, 8, 3),
        "m.experts.gate_up_proj_weight_scale_2": torch.ones(2),
    }
    folder = write(tmp_path / "c", tensors, modelopt_nvfp4().block)
    opened_with_error(folder, "'m.experts.gate_up_proj'", "stack of experts")


def test_plain_names_that_only_look_quantized(tmp_path: Path) -> None:
    tensors = {
        "building_blocks": torch.ones(4, 4),
        "time_scales": torch.ones(4),
        "logit.weight_scale": torch.ones(1),
        "mask.weight": u8(4, 4),
        "cache.weight": f8(4, 4),
        "reweight": torch.ones(4),
    }
    assert checkpoints.open(write(tmp_path / "c", tensors)).layouts == ()


def test_padding_of_another_layout_is_not_swizzled_by_guess(tmp_path: Path) -> None:
    """Nothing in the bytes tells swizzled scales: without a word they are read as linear."""
    foreign = CASES["te-nvfp4-swizzled"][1]()
    folder = write(tmp_path / "c", foreign.tensors)
    assert checkpoints.open(folder).layouts == ("te-nvfp4",)
    swizzled = checkpoints.open(folder, layout="te-nvfp4-swizzled")["m.a.weight"]
    linear = write(tmp_path / "l", te_nvfp4().tensors)
    assert (swizzled.scales() == checkpoints.open(linear)["m.a.weight"].scales()).all()


# Configurations ----------------------------------------------------------------------------------

BLOCKS = {
    "unknown method": ({"quant_method": "gptq", "bits": 4}, "'gptq'", "not read here"),
    "unknown format": (
        {"quant_method": "compressed-tensors", "format": "pack-quantized"}, "pack-quantized",
    ),
    "unknown algorithm": ({"quant_method": "modelopt", "quant_algo": "W4A16_AWQ"}, "W4A16_AWQ"),
    "other layout": ({"quant_method": "modelopt", "quant_algo": "FP8"}, "modelopt-fp8", "dtype U8"),
    "bad block": ({"quant_method": "fp8", "weight_block_size": ["a", None]}, "block sizes"),
}  # fmt: skip


@pytest.mark.parametrize("case", BLOCKS)
def test_declarations_that_do_not_fit(case: str, tmp_path: Path) -> None:
    block, *words = BLOCKS[case]
    folder = write(tmp_path / "c", modelopt_nvfp4().tensors, block)
    opened_with_error(folder, "config.json", *words)


def test_a_declaration_can_be_overruled(tmp_path: Path) -> None:
    folder = write(tmp_path / "c", modelopt_nvfp4().tensors, {"quant_method": "gptq"})
    assert checkpoints.open(folder, layout="modelopt-nvfp4").layouts == ("modelopt-nvfp4",)


def test_modelopts_own_file_declares(tmp_path: Path) -> None:
    folder = write(tmp_path / "c", modelopt_nvfp4().tensors)
    beside = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8"}}
    (folder / "hf_quant_config.json").write_text(json.dumps(beside))
    opened_with_error(folder, "hf_quant_config.json", "modelopt-fp8")


@pytest.mark.parametrize("name", ["config.json", "hf_quant_config.json"])
@pytest.mark.parametrize("text", ["{", "[1]"])
def test_damaged_configuration(name: str, text: str, tmp_path: Path) -> None:
    folder = write(tmp_path / "c", modelopt_nvfp4().tensors)
    (folder / name).write_text(text)
    opened_with_error(folder, name)


def test_paths_that_hold_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no file or folder '.*nowhere'"):
        checkpoints.open(tmp_path / "nowhere")
    opened_with_error(tmp_path, "holds no .safetensors file")
    (tmp_path / "model.bin").write_bytes(b"x")
    with pytest.raises(FileFormatError, match=r"no \.safetensors file"):
        checkpoints.open(tmp_path / "model.bin")
    with pytest.raises(ValueError, match=r"unknown layout 'modelop-nvfp4'.*Did you mean 'modelopt"):
        checkpoints.open(write(tmp_path / "c", {"a": torch.ones(1)}), layout="modelop-nvfp4")


# Shards ------------------------------------------------------------------------------------------


def shards(folder: Path, files: dict[str, dict[str, Any]], block: Any = None) -> Path:
    folder.mkdir(parents=True)
    mapped = {}
    for name, tensors in files.items():
        save_file(tensors, folder / name, {"format": "pt"})
        mapped.update(dict.fromkeys(tensors, name))
    index = {"metadata": {}, "weight_map": mapped}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text(json.dumps({"quantization_config": block} if block else {}))
    return folder


def test_index_that_does_not_fit(tmp_path: Path) -> None:
    one, two = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
    folder = shards(tmp_path / "s", {one: {"a": torch.ones(2)}, two: {"b": torch.ones(2)}})
    assert set(checkpoints.open(folder)) == {"a", "b"}
    index = folder / "model.safetensors.index.json"
    good = json.loads(index.read_text())

    def with_map(**changes: Any) -> None:
        mapped = {k: v for k, v in {**good["weight_map"], **changes}.items() if v is not None}
        index.write_text(json.dumps({"weight_map": mapped}))

    with_map(c=two)
    opened_with_error(folder, "index.json", "'c'", two, "does not have it")
    with_map(a=two)
    opened_with_error(folder, "index.json", "'a'", two)
    with_map(b="model-00003.safetensors")
    opened_with_error(folder, "'b'", "model-00003.safetensors", "not in")
    with_map(b="../model.safetensors")
    opened_with_error(folder, "'b'", "../model.safetensors")
    save_file({"a": torch.ones(2), "x": torch.ones(1)}, folder / one)
    with_map()
    opened_with_error(folder, "'x'", one, "not in")
    index.write_text('{"weight_map": [1]}')
    opened_with_error(folder, "weight_map")
    index.unlink()
    save_file({"a": torch.ones(2)}, folder / two)
    opened_with_error(folder, "'a'", one, two)


def test_a_weight_whose_parts_lie_in_different_shards(tmp_path: Path) -> None:
    foreign = modelopt_nvfp4()
    names = list(foreign.tensors)
    files = {
        "model-00001-of-00002.safetensors": {n: foreign.tensors[n] for n in names[:1]},
        "model-00002-of-00002.safetensors": {n: foreign.tensors[n] for n in names[1:]},
    }
    folder = shards(tmp_path / "s", files, foreign.block)
    entry = checkpoints.open(folder)["m.a.weight"]
    assert torch.equal(entry.values("float32"), torch.from_numpy(foreign.values))
    (folder / "model-00002-of-00002.safetensors").unlink()
    opened_with_error(folder, "model-00002-of-00002.safetensors")
