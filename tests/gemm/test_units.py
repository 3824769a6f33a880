"""The table of units against numbers typed from the sources, and every name of the contract."""

from __future__ import annotations

import ast
import dataclasses
from pathlib import Path

import pytest

from fpemu.gemm import Unit, get_unit, list_units, numba_, oracle, torch_

_FLOATS = ("fp16", "bf16", "tf32")
_LOW = ("e4m3", "e5m2", "e3m2", "e2m3", "e2m1")
_SCALED = ("mxfp8_e4m3", "mxfp8_e5m2", "mxfp6_e3m2", "mxfp6_e2m3", "mxfp4", "nvfp4")
CONTRACT = [
    "volta.hmma.fp16", "turing.hmma.fp16",
    *(f"{x}.{f}" for x in ("ampere.hmma", "ada.hmma", "hopper.wgmma", "blackwell.hmma", "blackwell.tcgen05",
                           "rtx_blackwell.hmma") for f in _FLOATS),
    *(f"{x}.{f}" for x in ("ada.qmma", "hopper.wgmma", "hopper.mma_sync", "blackwell.mma_sync") for f in ("e4m3", "e5m2")),
    *(f"{x}.{f}" for x in ("blackwell.tcgen05", "rtx_blackwell.tcgen05", "rtx_blackwell.mma_sync") for f in (*_LOW, *_SCALED)),
    "hopper.wgmma.e4m3xe5m2", "hopper.wgmma.e5m2xe4m3", "blackwell.tcgen05.e4m3xe2m1",
    "exact", "fp32.sequential", "fp32.pairwise", "fp32.fma",
]  # fmt: skip

#: name: L, F, rho, clamp of FP32 and FP16 outputs, group (arXiv 2512.07004, 2511.10909).
SHEET = {
    "volta.hmma.fp16": (4, 23, "rz32", None, -19, 1),
    "turing.hmma.fp16": (8, 24, "rz32", None, -20, 1),
    "ampere.hmma.fp16": (8, 24, "rz32", -132, -20, 1),
    "ampere.hmma.tf32": (4, 24, "rz32", -132, None, 1),
    "ada.hmma.bf16": (8, 24, "rz32", -132, None, 1),
    "ada.qmma.e4m3": (16, 13, "rz_e8m13", None, None, 1),
    "hopper.wgmma.bf16": (16, 25, "rz32", -133, None, 1),
    "hopper.wgmma.fp16": (16, 25, "rz32", -133, -21, 1),
    "hopper.wgmma.tf32": (8, 25, "rz32", -133, None, 1),
    "hopper.wgmma.e5m2": (32, 13, "rz_e8m13", None, None, 1),
    "hopper.mma_sync.e4m3": (16, 25, "rz32", -133, -21, 1),
    "blackwell.tcgen05.tf32": (8, 25, "rz32", -133, None, 1),
    "blackwell.tcgen05.e2m3": (32, 25, "rz32", None, None, 1),
    "blackwell.tcgen05.mxfp6_e3m2": (32, 25, "rz32", None, None, 1),
    "blackwell.tcgen05.mxfp4": (64, 35, "rz32", None, None, 16),
    "blackwell.tcgen05.nvfp4": (64, 35, "rz32", None, None, 16),
}


@pytest.mark.parametrize("name", CONTRACT)
def test_every_name_of_the_contract(name: str) -> None:
    assert isinstance(get_unit(name), Unit)


@pytest.mark.parametrize("name", SHEET)
def test_numbers_of_the_sheet(name: str) -> None:
    u = get_unit(name)
    assert (u.L, u.F, u.rho, u.clamp_fp32, u.clamp_fp16, u.group) == SHEET[name]


@pytest.mark.parametrize("name", list_units())
def test_rows_are_consistent(name: str) -> None:
    u = get_unit(name)
    assert u.name == name
    assert u.evidence.split(":")[0] in ("model", "hardware-verified", "spec-verified")
    assert u.source != "user"
    assert numba_.supports(u) is None
    assert (torch_.supports(u) is None) == (u.order not in ("exact", "fma"))
    assert (u.clamp_fp16 is None) or "fp16" in u.outputs
    assert (u.scale is None) == (u.scale_block == ())


def test_a_unit_beyond_the_kernels_says_so() -> None:
    wide = dataclasses.replace(get_unit("hopper.wgmma.fp16"), F=29)
    assert "32-bit" in (numba_.supports(wide) or "")
    assert "odd" in (numba_.supports(dataclasses.replace(wide, L=3, F=20)) or "")


def test_unknown_units() -> None:
    with pytest.raises(ValueError, match=r"unknown unit 'hopper.wgmma.e4m4'.*Did you mean"):
        get_unit("hopper.wgmma.e4m4")
    with pytest.raises(TypeError, match="unit must be a name"):
        get_unit(7)  # type: ignore[arg-type]


def test_the_documented_table_is_the_table() -> None:
    """Every line of docs/tensor_cores.md says what the row says."""
    text = (Path(__file__).resolve().parents[2] / "docs" / "tensor_cores.md").read_text()
    lines = [line for line in text.splitlines() if line.startswith("| `") and line.count("|") == 9]
    assert len(lines) >= 30
    for line in lines:
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        u = get_unit(cells[0].strip("`"))
        clamps = " / ".join("none" if x is None else str(x) for x in (u.clamp_fp32, u.clamp_fp16))
        order = u.order if u.group == 1 else f"groups of {u.group}"
        row = [str(u.L), str(u.F), u.rho, ", ".join(u.outputs), clamps, order, u.evidence]
        assert cells[1:] == row, cells[0]


def test_the_oracle_shares_tables_only() -> None:
    source = Path(oracle.__file__).read_text()
    ours = {
        node.module
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("fpemu")
    }
    assert ours == {"fpemu.formats", "fpemu.gemm.units"}
