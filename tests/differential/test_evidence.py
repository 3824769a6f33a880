"""The evidence table claims what the records show, and nothing beyond."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import BF16, BLOCKS, ELEMENTS, all16

import fpemu
from fpemu import labels
from fpemu.cvt import FORMS
from fpemu.formats import E2M1, BlockFormat
from fpemu.gemm import get_unit, list_recipes, list_units
from fpemu.hw.instructions import INSTRUCTIONS

ROOT = Path(__file__).resolve().parents[2]


def _load(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


make = _load(ROOT / "docs" / "make_evidence.py")


@pytest.fixture(scope="module")
def record() -> dict[str, Any]:
    return json.loads(make.RECORD.read_text(encoding="utf-8"))


def test_table_and_page_are_made_from_the_record(record: dict[str, Any]) -> None:
    table = make.rows(record)
    assert make.DATA.read_text(encoding="utf-8") == make.as_json(table), "run make evidence"
    assert make.PAGE.read_text(encoding="utf-8") == make.as_page(table, record), "run make evidence"
    assert labels.table() == table


def test_every_name_has_evidence() -> None:
    names = {*fpemu.list_formats(), *list_units(), *list_recipes()}
    names |= {name for name, row in INSTRUCTIONS.items() if not row.random}
    names |= {f"cvt.rs.{form}" for form in FORMS}
    assert set(labels.table()) == names
    for row in labels.table().values():
        assert row.label in labels.LABELS and row.what
        assert not row.count or row.of in ("blocks", "inputs", "outputs")


def test_library_claims_are_in_the_record(record: dict[str, Any]) -> None:
    """Counted again here, from the record alone."""
    metrics = record["metrics"]
    for name in BLOCKS:
        row = fpemu.evidence(name)
        live = {lib: rows[name] for lib, rows in metrics["live"].items() if name in rows}
        replayed = [r for key, r in metrics["recorded"].items() if key.startswith(f"{name} < ")]
        formula = (" model", "re-expressed")  # nvidia-modelopt is no model
        ran = [r for r in replayed if not any(word in r["version"] for word in formula)]
        if row.label == "library-verified":
            numbers = [n for families in live.values() for n in families.values()]
            assert all(n[3::2] == [0, 0, 0] for n in numbers)
            assert row.count == (
                sum(n[0] for n in numbers) if live else sum(r["blocks"] for r in ran)
            )
            for library in live:
                assert metrics["libraries"][library]["version"] in row.what
        else:
            assert not live and not ran, f"{name} was run and is labelled {row.label}"
        assert row.label != "hardware-verified"


def test_unrun_dialects_are_models() -> None:
    unrun = [f"nvfp4/{name}" for name in ("te-unfused", "te-fast", "vllm-ref", "flashinfer-ref")]
    for name in (*unrun, "nvfp4/1level", *fpemu.list_formats("*-cuda")):
        assert fpemu.evidence(name).label == "model"
    for name in ("mxfp4/qutlass-absmax", "mxfp8_e4m3/te", "mxfp4/triton-kernels-up"):
        assert fpemu.evidence(name).label == "model"
    row = fpemu.evidence("mxint8/torchao-floor")
    assert (row.label, row.count) == ("model", 0) and "no such element" in row.what
    assert fpemu.evidence("fp8_block_e4m3").label == "model"


def test_element_counts_are_those_of_the_exhaustive_test() -> None:
    for name in ELEMENTS:
        row = fpemu.evidence(name)
        sizes = [all16(dtype) for dtype in (np.float16, BF16)]
        kept = sum(int((~np.isnan(x.astype(np.float32))).sum()) for x in sizes)
        assert row.label == "spec-verified"
        assert row.count == (kept if name == "int8" else 2 * 65536)


def test_hardware_claims_are_the_recorded_sets() -> None:
    from gemm.test_recordings import sets, unit_of

    recorded: dict[str, int] = {}
    for gpu, fmt, out in sets():
        recorded[unit_of(gpu, fmt, out)] = recorded.get(unit_of(gpu, fmt, out), 0) + 1000
    runs = make.hardware()
    for name in list_units():
        row = fpemu.evidence(name)
        run = [r for _, r in runs.get(name, [])]
        equal = not any(r["different"] or r.get("failed") for r in run)
        assert row.count == recorded.get(name, 0) + sum(r["inputs"] for r in run if equal)
        assert (row.label == "hardware-verified") == (name in recorded or bool(run and equal))
        assert get_unit(name).evidence.startswith(row.label) or run
    assert sum(recorded.values()) == 44_000


def test_a_record_of_a_gpu_turns_labels(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Equal rows make a name hardware-verified with counts; one that differs only adds a remark."""
    cast, unit = "cvt.rn.satfinite.e4m3x2.f32", "blackwell.tcgen05.e4m3"
    assert fpemu.evidence(cast).label == "model"
    assert "assembled, not run" in fpemu.evidence("cvt.rn.satfinite.e2m1x2.f32").what
    equal = {"different": 0, "inputs": 1000}
    rows = [
        {"part": "casts", "path": "cvt", "name": cast, **equal},
        {"part": "casts", "path": "cvt", "name": "cvt.rn.f16.f32", "different": 2, "inputs": 9},
        {"part": "casts", "path": "cvt", "name": "cvt.rs.satfinite.e2m1x4.f32", **equal},
        {"part": "casts", "path": "cvt", "name": "cvt.rn.bf16.f32", "different": 0, "inputs": 0},
        {"part": "gemm", "path": "tl.dot", "name": "x", "unit": unit, **equal},
        {"part": "gemm", "path": "mma.sync", "name": "y", "unit": "hopper.mma_sync.e4m3", **equal},
        {"part": "gemm", "path": "torch.mm", "name": "z", "unit": "hopper.wgmma.fp16", **equal},
    ]
    (tmp_path / "b200.json").write_text(json.dumps({"gpu": {"name": "NVIDIA B200"}, "rows": rows}))
    monkeypatch.setattr(make, "HARDWARE", tmp_path)
    table = make.rows(json.loads(make.RECORD.read_text(encoding="utf-8")))
    assert (table[cast].label, table[cast].what) == ("hardware-verified", "cvt on B200")
    assert (table[cast].count, table[cast].of) == (1000, "inputs")
    assert table[unit].label == "hardware-verified" and table[unit].count == 1000
    assert table["cvt.rs.e2m1x4"].label == "hardware-verified"
    differs = table["cvt.rn.f16.f32"]
    assert differs.label == "model" and "B200, cvt.rn.f16.f32: 2 of 9 differ" in differs.note
    assert table["cvt.rn.bf16.f32"] == fpemu.evidence("cvt.rn.bf16.f32")  # did not run
    before = fpemu.evidence("hopper.mma_sync.e4m3")
    assert table["hopper.mma_sync.e4m3"].count == before.count + 1000
    assert table["hopper.wgmma.fp16"] == fpemu.evidence("hopper.wgmma.fp16")  # a library's product


def test_rows_and_aliases_are_accepted() -> None:
    assert fpemu.evidence(fpemu.get_format("nvfp4")) == fpemu.evidence("nvfp4")
    assert fpemu.evidence(get_unit("ampere.hmma.fp16")).name == "ampere.hmma.fp16"
    assert fpemu.evidence("rtx_blackwell.mma_sync.nvfp4").name == "rtx_blackwell.omma.nvfp4"


def test_unknown_names_raise_the_usual_error() -> None:
    with pytest.raises(ValueError, match=r"^evidence: unknown name 'nvfp5'; known: .*'nvfp4'\?$"):
        fpemu.evidence("nvfp5")
    mine = BlockFormat("mine", E2M1, (16,), fpemu.get_format("e8m0"), "mx_floor")
    with pytest.raises(ValueError, match="evidence: unknown name 'mine'"):
        fpemu.evidence(mine)
    with pytest.raises(ValueError, match="evidence: unknown name 3"):
        fpemu.evidence(3)
    with pytest.raises(ValueError, match=r"evidence: unknown unit 'rtx_blackwell.mma_sync.e9m9'"):
        fpemu.evidence("rtx_blackwell.mma_sync.e9m9")


def test_a_record_of_differences_is_refused(record: dict[str, Any]) -> None:
    with pytest.raises(AssertionError, match="no evidence"):
        make.rows(dict(record, status="failed"))
    planted = json.loads(json.dumps(record))
    next(iter(planted["metrics"]["live"]["torchao"]["nvfp4/torchao"].values()))[0] += 1
    assert make.as_json(make.rows(planted)) != make.DATA.read_text(encoding="utf-8")


def test_evidence_is_light() -> None:
    code = (
        "import sys, fpemu; fpemu.evidence('nvfp4');"
        "print(callable(fpemu.evidence), [m for m in ('torch', 'numba') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout.strip() == "True []", done.stderr
