"""Every layout: read to the library's values, and written so that every stored byte survives."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from checkpoints.foreign import CASES, NUMBER, Foreign, modelopt_nvfp4, raw, rng, write
from helpers import assert_same_bits
from safetensors.torch import load_file

import fpemu
from fpemu import checkpoints
from fpemu.checkpoints.layouts import holds

torch = pytest.importorskip("torch")
#: Decoded by a library's table that differs from `Encoded.decode` in one code.
OWN_ZERO = ("modelopt-nvfp4",)


def made(case: str, folder: Path, declared: bool = True) -> tuple[Foreign, Path]:
    foreign = CASES[case][1]()
    extra = {"lm_head.weight": torch.ones(4, 8, dtype=torch.bfloat16), "step": torch.tensor(3)}
    block = foreign.block if declared else None
    return foreign, write(folder / case, {**foreign.tensors, **extra}, block)


@pytest.mark.parametrize("case", CASES)
def test_values_are_the_librarys(case: str, tmp_path: Path) -> None:
    foreign, folder = made(case, tmp_path)
    opened = checkpoints.open(folder)
    entry = opened[foreign.name]
    assert entry.layout is not None and entry.layout.name == CASES[case][0]
    assert opened.layouts == (CASES[case][0],)
    assert entry.shape == foreign.values.shape
    assert_same_bits(entry.values("float32").contiguous(), np.ascontiguousarray(foreign.values))
    # Every stored tensor is part of an entry, and none twice.
    parts = [part.name for e in opened.values() for part in e.parts.values()]
    assert sorted(parts) == sorted(load_file(folder / "model.safetensors"))


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_narrow_values_are_rounded_as_the_library_does(
    case: str, dtype: str, tmp_path: Path
) -> None:
    foreign, folder = made(case, tmp_path)
    kind = getattr(torch, dtype)
    want = torch.from_numpy(np.ascontiguousarray(foreign.values)).to(kind)
    if case.startswith("modelopt-fp8"):  # both factors are rounded before they are multiplied
        scale = foreign.tensors["m.a.weight_scale"].to(kind)
        scale = scale[:, None] if scale.ndim else scale
        want = foreign.tensors["m.a.weight"].to(kind) * scale
    got = checkpoints.open(folder)[foreign.name].values(dtype)
    assert_same_bits(got.contiguous(), want)


@pytest.mark.parametrize("case", CASES)
def test_encoded_holds_the_stored_codes(case: str, tmp_path: Path) -> None:
    foreign, folder = made(case, tmp_path)
    entry = checkpoints.open(folder)[foreign.name]
    encoded = entry.encoded()
    assert isinstance(encoded, fpemu.Encoded)
    assert encoded.format == entry.format and encoded.shape == entry.shape
    assert encoded.dtype == torch.bfloat16
    if "bf16-scales" in case:
        return  # the library rounds each product to bfloat16, Encoded does not
    want = foreign.values if case not in OWN_ZERO else foreign.values + np.float32(0)
    got = encoded.decode(torch.float32).contiguous()
    got = got + 0.0 if case in OWN_ZERO else got  # -0 + 0 is +0, as in ModelOpt's table
    assert_same_bits(got, np.ascontiguousarray(want))
    number = entry.global_scale
    if number is not None:
        part = entry.parts["number"].name
        assert number.tobytes() == foreign.tensors[part].numpy().tobytes()
        assert encoded.global_scale.numpy().tobytes() == number.tobytes()


@pytest.mark.parametrize("case", [c for c in CASES if "swizzled" not in c and "64x32" not in c])
def test_a_layout_is_found_without_a_configuration(case: str, tmp_path: Path) -> None:
    foreign, folder = made(case, tmp_path, declared=False)
    entry = checkpoints.open(folder)[foreign.name]
    assert entry.layout is not None
    assert_same_bits(
        entry.values("float32").contiguous(), np.ascontiguousarray(foreign.values), note=case
    ) if "bf16-scales" not in case else None


@pytest.mark.parametrize("case", CASES)
def test_round_trip_through_every_layout_that_holds_it(case: str, tmp_path: Path) -> None:
    """There and back: codes, scales, numbers, their dtypes and shapes have the same bytes."""
    foreign, folder = made(case, tmp_path)
    fmt = checkpoints.open(folder)[foreign.name].format
    own = CASES[case][0]
    want = {name: raw(tensor) for name, tensor in foreign.tensors.items()}
    ways = [row for row in checkpoints.LAYOUTS.values() if holds(row, fmt)]  # type: ignore[arg-type]
    assert own in {row.name for row in ways}
    for row in ways:
        there, back = tmp_path / f"to-{row.name}", tmp_path / f"from-{row.name}"
        done = checkpoints.convert(folder, there, layout=row.name)
        assert done.moved == (foreign.name,) and "step" in done.kept
        assert checkpoints.open(there).layouts == (row.name,)
        checkpoints.convert(there, back, layout=own)
        got = load_file(back / "model.safetensors")
        for name in want.keys() - set(done.dropped):
            assert raw(got[name]) == want[name], f"{name} through {row.name}"
        assert raw(got["step"]) == raw(torch.tensor(3))


PAIRS = {
    ("modelopt-nvfp4", "nvfp4-pack-quantized"): {
        "m.a.weight_packed": "m.a.weight",
        "m.a.weight_scale": "m.a.weight_scale",
    },
    ("ct-nvfp4", "modelopt-nvfp4"): {
        "m.a.weight": "m.a.weight_packed",
        "m.a.weight_scale": "m.a.weight_scale",
    },
    ("ct-fp8-block", "deepseek-fp8"): {
        "m.a.weight": "m.a.weight",
        "m.a.weight_scale_inv": "m.a.weight_scale",
    },
    ("modelopt-fp8", "float-quantized"): {
        "m.a.weight": "m.a.weight",
        "m.a.input_scale": "m.a.input_scale",
    },
}


@pytest.mark.parametrize(("case", "layout"), PAIRS)
def test_moved_bytes_are_the_same_under_the_other_names(
    case: str, layout: str, tmp_path: Path
) -> None:
    foreign, folder = made(case, tmp_path)
    checkpoints.convert(folder, tmp_path / "out", layout=layout)
    got = load_file(tmp_path / "out" / "model.safetensors")
    for new, old in PAIRS[case, layout].items():
        assert raw(got[new])[2] == raw(foreign.tensors[old])[2], new


def test_numbers_change_kind_by_one_rounding(tmp_path: Path) -> None:
    _, folder = made("modelopt-nvfp4", tmp_path)
    checkpoints.convert(folder, tmp_path / "ct", layout="nvfp4-pack-quantized")
    checkpoints.convert(folder, tmp_path / "te", layout="nvfp4-pack-quantized")
    got = load_file(tmp_path / "ct" / "model.safetensors")
    one = np.float32(1)
    assert_same_bits(got["m.a.weight_global_scale"], np.float32([one / NUMBER]))
    assert_same_bits(got["m.a.input_global_scale"], np.float32([one / np.float32(0.0003)]))
    back = checkpoints.open(tmp_path / "ct")["m.a.weight"]
    assert back.global_scale == one / NUMBER
    assert back.tensor_scale == one / (one / NUMBER) != NUMBER


def test_a_note_of_the_first_number_dies_with_the_number(tmp_path: Path) -> None:
    """Who changes a converted file's number gets the number, not the one that was there first."""
    from safetensors import safe_open
    from safetensors.torch import save_file

    _, folder = made("modelopt-nvfp4", tmp_path)
    checkpoints.convert(folder, tmp_path / "ct", layout="nvfp4-pack-quantized")
    file = tmp_path / "ct" / "model.safetensors"
    with safe_open(file, "pt") as handle:
        metadata = handle.metadata()
    tensors = load_file(file)
    tensors["m.a.weight_global_scale"] = torch.tensor([4.0])
    save_file(tensors, file, metadata)
    checkpoints.convert(tmp_path / "ct", tmp_path / "back", layout="modelopt-nvfp4")
    got = load_file(tmp_path / "back" / "model.safetensors")
    assert got["m.a.weight_scale_2"].item() == 0.25


def test_nan_scales(tmp_path: Path) -> None:
    """Byte 255 is NaN where the library's table says so, and infinity where it only shifts."""
    tensors = {
        "a.weight_packed": torch.full((1, 16), 0x10, dtype=torch.uint8),
        "a.weight_scale": torch.tensor([[255]], dtype=torch.uint8),
    }
    folder = write(tmp_path / "ct", tensors)
    values = checkpoints.open(folder)["a.weight"].values("float32")
    assert values[0, 1].item() == np.inf and values[0, 0].isnan()
    foreign = CASES["te-mxfp8"][1]()
    foreign.tensors["m.a.weight.rowwise_scale_inv"][0, 1] = 255
    folder = write(tmp_path / "te", foreign.tensors, foreign.block)
    values = checkpoints.open(folder)["m.a.weight"].values("float32")
    assert values[0, 32:64].isnan().all() and not values[0, :32].isnan().any()


def test_a_layout_of_ones_own_with_high_nibbles_first(tmp_path: Path) -> None:
    """Nibble order, names and the kind of number are data: a new row needs no new code."""
    row = replace(
        checkpoints.LAYOUTS["modelopt-nvfp4"],
        name="mine", codes="qweight", scales="qscale", number="qamax", number_kind="divides",
        low_first=False, input_number=None,
    )  # fmt: skip
    foreign, folder = made("modelopt-nvfp4", tmp_path)
    checkpoints.convert(folder, tmp_path / "mine", layout=row)
    got = load_file(tmp_path / "mine" / "model.safetensors")
    packed = foreign.tensors["m.a.weight"]
    assert_same_bits(got["m.a.qweight"], (packed << 4) | (packed >> 4))
    again = checkpoints.open(tmp_path / "mine", layout=row)
    assert again.layouts == ("mine",)
    checkpoints.convert(folder, tmp_path / "there.safetensors", layout=row)
    a, b = (checkpoints.open(folder)["m.a.weight"], again["m.a.weight"])
    assert_same_bits(a.codes(), b.codes())


def test_values_do_not_depend_on_flushed_subnormals(tmp_path: Path) -> None:
    tensors = {
        "a.weight_packed": torch.arange(16, dtype=torch.uint8).reshape(1, 16) * 17,
        "a.weight_scale": torch.tensor([[1]], dtype=torch.uint8),
    }
    entry = checkpoints.open(write(tmp_path / "ct", tensors))["a.weight"]
    want = entry.values("bfloat16")
    torch.set_flush_denormal(True)
    try:
        got = entry.values("bfloat16")
    finally:
        torch.set_flush_denormal(False)
    assert_same_bits(got, want)
    assert 0 < want[want > 0].double().min() < 2.0**-126


def test_many_pieces_are_one_tensor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Decoding row by row in pieces changes nothing."""
    from fpemu.checkpoints import coding

    for case in ("ct-fp8-block", "te-nvfp4", "gpt-oss", "ct-fp8-channel"):
        foreign, folder = made(case, tmp_path)
        for size in (1, 1000):
            monkeypatch.setattr(coding, "PIECE", size)
            got = checkpoints.open(folder)[foreign.name].values("float32")
            assert_same_bits(got.contiguous(), np.ascontiguousarray(foreign.values))


def test_stacks_of_matrices_have_their_own_blocks(tmp_path: Path) -> None:
    """FP8 blocks of a stack start anew in every matrix."""
    codes = rng().integers(0, 0x7F, (3, 130, 5), dtype=np.uint8)
    scales = np.random.default_rng(1).random((3, 2, 1), np.float32)
    tensors = {
        "a.weight": torch.from_numpy(codes).view(torch.float8_e4m3fn),
        "a.weight_scale_inv": torch.from_numpy(scales),
    }
    entry = checkpoints.open(write(tmp_path / "d", tensors))["a.weight"]
    table = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().numpy()
    want = table[codes] * scales.repeat(128, 1)[:, :130].repeat(5, 2)
    assert_same_bits(entry.values("float32"), want)


def test_entries_of_plain_tensors(tmp_path: Path) -> None:
    tensors = {
        "half": torch.randn(3, 4).half(),
        "eight": torch.randn(3, 4).to(torch.float8_e5m2),
        "count": torch.arange(5),
        "wide": torch.randn(3).double(),
        "truth": torch.tensor([True, False]),
        "empty": torch.zeros(0, 7),
        "number": torch.tensor(1.5),
    }
    opened = checkpoints.open(write(tmp_path / "plain", tensors))
    assert opened.layouts == () and set(opened) == set(tensors)
    for name, tensor in tensors.items():
        entry = opened[name]
        assert entry.layout is None and entry.shape == tuple(tensor.shape)
        assert raw(entry.values()) == raw(tensor)
    assert raw(opened["half"].encoded().decode()) == raw(tensors["half"])
    assert opened["eight"].format == fpemu.get_format("e5m2")
    assert_same_bits(opened["eight"].values("float32"), tensors["eight"].float())
    with pytest.raises(TypeError, match="'count' is a plain I64 tensor"):
        opened["count"].encoded()
    with pytest.raises(TypeError, match="dtype 'float7' is unknown"):
        opened["half"].values("float7")


def test_numbers_of_either_shape_are_read(tmp_path: Path) -> None:
    for shape in ((), (1,)):
        foreign = modelopt_nvfp4()
        foreign.tensors["m.a.weight_scale_2"] = torch.full(shape, float(NUMBER))
        folder = write(tmp_path / f"n{len(shape)}", foreign.tensors, foreign.block)
        got = checkpoints.open(folder)["m.a.weight"].values("float32")
        assert_same_bits(got, foreign.values)
