"""Loss scales: nothing but rounding makes a difference, overflows are skipped and counted."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from experiments import harness, loss_scale, paired, runs, studies
from figures import loss_scale as drawing

TINY = replace(
    studies.QUICK,
    gpt={"width": 32, "layers": 1, "heads": 1, "context": 32},
    steps=6, batch=2, warmup=2, held_out=1 << 10,
)  # fmt: skip


pytestmark = pytest.mark.usefixtures("one_thread")


def tiny(arm: str, k: int = 0, scaler: str = "fixed", **fields: Any) -> paired.Point:
    return paired.point(
        TINY, "loss_scale", arm, 5, log2_scale=k, scaler=scaler, **fields
    )  # fmt: skip


def test_without_rounding_of_gradients_a_scale_changes_no_bit() -> None:
    losses = {loss_scale.train(tiny("fp32", k))["held_out"] for k in (-16, 0, 20)}
    assert len(losses) == 1


def test_a_small_scale_flushes_and_a_large_one_overflows() -> None:
    small, fit, large = (loss_scale.train(tiny("fp16", k)) for k in (-16, 10, 40))
    assert loss_scale.shares([small["dy"]])["underflow_share"] > 0.3
    assert loss_scale.shares([fit["dy"]])["underflow_share"] < 0.05
    assert (small["skipped"], fit["skipped"], large["skipped"]) == (0, 0, 6)
    assert fit["held_out"] < small["held_out"]


def test_a_skipped_step_moves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """All six steps are skipped: the held-out loss is that of the untrained model."""
    untrained, _ = paired.build(tiny("fp16"), loss_scale.ARMS["fp16"])
    monkeypatch.setattr("experiments.learning.NOTHING", math.inf)  # it may be above ln 256
    assert loss_scale.train(tiny("fp16", 40))["held_out"] == paired.judge(untrained, tiny("fp16"))


def test_saturating_formats_never_overflow() -> None:
    for arm in ("e5m2", "e4m3"):
        run = loss_scale.train(tiny(arm, 40))
        assert run["skipped"] == 0
        assert loss_scale.shares([run["dy"]])["saturated_share"] > 0.1
        assert run["dy"]["nan"] == run["dy"]["inf"] == 0


def test_the_dynamic_scale_backs_off_and_grows(monkeypatch: pytest.MonkeyPatch) -> None:
    run = loss_scale.train(tiny("fp16", 32, "dynamic"))
    assert run["log2_scale_by_step"] == [32, 31, 30, 29, 28, 27]
    assert run["skipped_at"] == [0, 1, 2, 3, 4, 5]
    assert (run["backoffs"], run["growths"], run["skipped"]) == (5, 0, 6)
    monkeypatch.setattr(loss_scale, "GROWTH_INTERVAL", 2)
    run = loss_scale.train(tiny("fp16", 4, "dynamic"))
    assert run["log2_scale_by_step"] == [4, 4, 5, 5, 6, 6]
    assert (run["backoffs"], run["growths"], run["skipped"]) == (0, 2, 0)


def test_a_fixed_scale_stays_after_an_overflow() -> None:
    assert loss_scale.train(tiny("fp16", 40))["backoffs"] == 0


def test_the_paper_takes_six_seeds_and_the_whole_range() -> None:
    assert len(loss_scale.BUDGETS["full"].seeds) >= 6
    assert {-16, 20} <= set(loss_scale.EXPONENTS["full"])


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory, pool: Any) -> Path:
    """A whole run of seconds, in this process."""
    out = tmp_path_factory.mktemp("loss_scale")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(loss_scale.BUDGETS, "quick", TINY)
        patch.setattr(runs, "pool", pool)
        assert loss_scale.main(["--quick", "--out", str(out)]) == 0
    return out


def test_a_run_fills_its_record(done: Path) -> None:
    record = harness.read_record(done / "loss_scale.json")
    assert record["provenance"]["argv"][0] == "experiments/loss_scale.py"
    metrics = record["metrics"]
    assert len(metrics["claims"]) == len(loss_scale.CLAIMS)
    rows = {row["cell"]: row for row in metrics["cells"]}
    assert rows["bf16"]["gap"] == rows["bf16"]["low"] == 0
    assert rows["fp16 dynamic 2^32"]["backoffs"] > 0
    assert rows["fp16 2^28"]["skipped_share"] == 1
    assert rows["fp16 2^-16"]["n"] == 2
    # Gaps and shares again, from the runs.
    of = {(loss_scale.cell({"perturb": "none", **r}), r["seed"]): r for r in metrics["runs"]}
    for cell in ("e5m2 2^0", "fp16 2^10"):
        gaps = [of[cell, s]["held_out"] - of["bf16", s]["held_out"] for s in TINY.seeds]
        assert rows[cell]["gap"] == pytest.approx(sum(gaps) / 2, abs=1e-6)
        dy = [of[cell, s]["dy"] for s in TINY.seeds]
        zero = sum(d["underflow"] for d in dy) / sum(d["size"] - d["zeros"] for d in dy)
        assert rows[cell]["underflow_share"] == pytest.approx(zero, rel=1e-6)


def test_a_second_call_computes_nothing_and_gives_the_same_bytes(
    done: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(loss_scale.BUDGETS, "quick", TINY)
    monkeypatch.setattr(runs, "pool", lambda *_: pytest.fail("ran again"))
    before = {p.name: p.read_bytes() for p in done.glob("loss_scale.p*")}
    assert loss_scale.main(["--quick", "--collect", "--out", str(done)]) == 0
    assert {p.name: p.read_bytes() for p in done.glob("loss_scale.p*")} == before
    assert set(before) == {"loss_scale.pdf", "loss_scale.png"}
    said = capsys.readouterr().out
    assert max(map(len, said.splitlines())) <= max(80, 2 + len(str(done / "loss_scale.json")))
    assert "…" not in said


def test_missing_and_failed_runs_are_said(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(loss_scale.BUDGETS, "quick", TINY)
    assert loss_scale.main(["--quick", "--collect", "--out", str(tmp_path)]) == 1
    assert f"0 runs failed, {len(loss_scale.points(TINY))} missing" in capsys.readouterr().out
    assert not (tmp_path / "loss_scale.json").exists()


def test_other_records_are_not_drawn(done: Path, tmp_path: Path) -> None:
    record = json.loads((done / "loss_scale.json").read_text())
    path = tmp_path / "loss_scale.json"
    path.write_text(json.dumps({**record, "experiment": "masters"}))
    with pytest.raises(ValueError, match="is a record of 'masters'"):
        drawing.draw(path, tmp_path)


def test_budgets_exclude_each_other(capsys: pytest.CaptureFixture[str]) -> None:
    for words, message in (
        (["--quick", "--full"], "two budgets"),
        (["--workers", "0"], "at least"),
    ):
        with pytest.raises(SystemExit):
            loss_scale.main(words)
        assert message in capsys.readouterr().err
