"""`diff`: counts by bytes, distances by values."""

from __future__ import annotations

from math import inf, log10
from pathlib import Path

import numpy as np
import pytest
from checkpoints.foreign import CASES, ct_nvfp4, modelopt_nvfp4, write

from fpemu import checkpoints

torch = pytest.importorskip("torch")


def only(a: Path, b: Path) -> checkpoints.Difference:
    (row,) = checkpoints.diff(a, b)
    return row


@pytest.mark.parametrize("case", CASES)
def test_a_checkpoint_and_itself(case: str, tmp_path: Path) -> None:
    foreign = CASES[case][1]()
    folder = write(tmp_path / "a", {**foreign.tensors, "count": torch.arange(3)}, foreign.block)
    rows = checkpoints.diff(folder, folder)
    assert all(row.same for row in rows) and {foreign.name, "count"} <= {row.name for row in rows}
    row = next(row for row in rows if row.name == foreign.name)
    assert row.codes is not None and row.codes[0] == 0 and row.codes[1] == foreign.values.size
    assert row.scales is not None and row.scales[0] == 0
    assert (row.sqnr_db, row.max_difference) == (inf, 0.0)


def test_one_code_and_one_scale(tmp_path: Path) -> None:
    foreign = ct_nvfp4()
    a = write(tmp_path / "a", foreign.tensors, foreign.block)
    packed = foreign.tensors["m.a.weight_packed"].clone()
    packed[2, 3] ^= 0x30
    b = write(tmp_path / "b", {**foreign.tensors, "m.a.weight_packed": packed}, foreign.block)
    row = only(a, b)
    assert (row.same, row.codes, row.scales) == (False, (1, 8 * 48), (0, 24))
    va, vb = (checkpoints.open(p)["m.a.weight"].values("float32").double().numpy() for p in (a, b))
    assert row.max_difference == np.abs(va - vb).max() > 0
    assert row.sqnr_db == 10 * log10((va**2).sum() / ((va - vb) ** 2).sum())
    scale = foreign.tensors["m.a.weight_scale"].view(torch.uint8).clone()
    scale[0, 0] ^= 1
    tensors = {**foreign.tensors, "m.a.weight_scale": scale.view(torch.float8_e4m3fn)}
    row = only(a, write(tmp_path / "c", tensors, foreign.block))
    assert (row.same, row.codes, row.scales) == (False, (0, 384), (1, 24))


def test_a_code_under_a_scale_of_zero_differs(tmp_path: Path) -> None:
    """Values alone would not tell."""
    tensors = {
        "a.weight_packed": torch.full((1, 16), 0x11, dtype=torch.uint8),
        "a.weight_scale": torch.zeros((1, 2), dtype=torch.uint8).view(torch.float8_e4m3fn),
        "a.weight_global_scale": torch.ones(1),
    }
    a = write(tmp_path / "a", tensors)
    packed = torch.full((1, 16), 0x12, dtype=torch.uint8)
    row = only(a, write(tmp_path / "b", {**tensors, "a.weight_packed": packed}))
    assert (row.same, row.codes, row.max_difference) == (False, (16, 32), 0.0)


def test_layouts_that_say_the_same(tmp_path: Path) -> None:
    """Codes move; a global scale that divides gives other last bits than one that multiplies."""
    foreign = modelopt_nvfp4()
    a = write(tmp_path / "a", foreign.tensors, foreign.block)
    checkpoints.convert(a, tmp_path / "b", layout="nvfp4-pack-quantized")
    row = only(a, tmp_path / "b")
    assert row.codes == (0, 384) and row.scales == (0, 24)
    assert row.number_differs and not row.same and 120 < row.sqnr_db < 160
    checkpoints.convert(tmp_path / "b", tmp_path / "c", layout="modelopt-nvfp4")
    assert only(a, tmp_path / "c").same


def test_equal_parts_with_other_values_differ(tmp_path: Path) -> None:
    """FP8 products are rounded to the dtype that scales are stored in: the same scales, wider."""
    foreign = CASES["ct-fp8-bf16-scales"][1]()
    a = write(tmp_path / "a", foreign.tensors, foreign.block)
    wide = {**foreign.tensors, "m.a.weight_scale": foreign.tensors["m.a.weight_scale"].float()}
    row = only(a, write(tmp_path / "b", wide, foreign.block))
    assert row.codes is not None and row.scales is not None
    assert (row.codes[0], row.scales[0], row.number_differs) == (0, 0, False)
    assert not row.same and 40 < row.sqnr_db < 70


def test_formats_that_do_not_compare(tmp_path: Path) -> None:
    x = torch.randn(32, 64)
    a = write(tmp_path / "plain", {"a.weight": x})
    for fmt in ("nvfp4", "mxfp4"):
        checkpoints.convert(a, tmp_path / fmt, fmt=fmt)
    row = only(tmp_path / "nvfp4", tmp_path / "mxfp4")
    assert row.codes is None and row.scales is None and 5 < row.sqnr_db < 30
    row = only(a, tmp_path / "nvfp4")
    assert row.codes is None and 15 < row.sqnr_db < 30 and row.formats == ("fp32", "nvfp4/modelopt")


PLAIN = {
    "minus zero": (torch.tensor([0.0, 1.0]), torch.tensor([-0.0, 1.0]), (1, 2), inf, 0.0),
    "nan": (torch.tensor([float("nan"), 1.0]), torch.tensor([float("nan"), 1.0]), (0, 2), inf, 0.0),
    "nan and not": (torch.tensor([float("nan")]), torch.tensor([1.0]), (1, 1), -inf, None),
    "infinite": (torch.tensor([inf, 1.0]), torch.tensor([inf, 2.0]), (1, 2), 0.0, 1.0),
    "other sign": (torch.tensor([inf]), torch.tensor([-inf]), (1, 1), -inf, inf),
    "from zero": (torch.zeros(2), torch.tensor([0.0, 2.0]), (1, 2), -inf, 2.0),
    "wide": (torch.ones(1).double(), torch.ones(1).double() + 2**-50, (1, 1), None, 2**-50),
    "integers": (torch.tensor([2**53, 1]), torch.tensor([2**53, 3]), (1, 2), None, 2.0),
    "nothing": (torch.zeros(0, 3), torch.zeros(0, 3), (0, 0), inf, 0.0),
}  # fmt: skip


@pytest.mark.parametrize("case", PLAIN)
def test_plain_tensors(case: str, tmp_path: Path) -> None:
    a, b, codes, sqnr, largest = PLAIN[case]
    row = only(write(tmp_path / "a", {"w": a}), write(tmp_path / "b", {"w": b}))
    assert row.codes == codes and row.same == (codes[0] == 0)
    assert sqnr is None or row.sqnr_db == sqnr
    assert largest is None or row.max_difference == largest


def test_other_names_shapes_and_dtypes(tmp_path: Path) -> None:
    a = write(tmp_path / "a", {"x": torch.ones(3), "y": torch.ones(2, 3), "z": torch.ones(2)})
    b = write(
        tmp_path / "b", {"y": torch.ones(3, 2), "z": torch.ones(2).half(), "w": torch.ones(1)}
    )
    rows = {row.name: row for row in checkpoints.diff(a, b)}
    assert list(rows)[-1] == "w" and not any(row.same for row in rows.values())
    assert {name: row.where for name, row in rows.items()} == {
        "x": "a", "y": "both", "z": "both", "w": "b",
    }  # fmt: skip
    assert rows["y"].shapes == ((2, 3), (3, 2))
    assert rows["z"].codes is None and rows["z"].max_difference == 0.0
