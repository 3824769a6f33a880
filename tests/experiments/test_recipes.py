"""The verdicts of experiments/recipes.py, and that a run of seconds fills its record."""

from __future__ import annotations

from pathlib import Path

import pytest

from experiments import harness, model, recipes


@pytest.mark.parametrize(
    ("says", "low", "high", "want"),
    [
        ("worse", 0.1, 0.2, "supported"), ("worse", -0.1, 0.2, "not resolved"),
        ("worse", -0.2, -0.1, "contradicted"), ("better", -0.2, -0.1, "supported"),
        ("better", 0.1, 0.2, "contradicted"), ("equal", -0.009, 0.01, "supported"),
        ("equal", 0.002, 0.02, "not resolved"), ("equal", 0.011, 0.02, "contradicted"),
        ("equal", -0.02, -0.011, "contradicted"),
    ],
)  # fmt: skip
def test_verdicts(says: str, low: float, high: float, want: str) -> None:
    assert recipes.verdict(says, low, high, margin=0.01) == want


def test_a_hypothesis_needs_all_its_claims() -> None:
    assert recipes.together(["supported", "supported"]) == "supported"
    assert recipes.together(["supported", "not resolved"]) == "not resolved"
    assert recipes.together(["not resolved", "contradicted"]) == "contradicted"


def test_intervals_are_students_and_hold_together() -> None:
    """t(0.975, 2) = 4.303 for one claim of three seeds; wider for more claims."""
    mean, low, high = recipes.interval([1.0, 2.0, 3.0], 1)
    assert mean == 2 and high - mean == pytest.approx(4.3027 / 3**0.5, rel=1e-4)
    assert mean - low == pytest.approx(high - mean)
    assert recipes.interval([1.0, 2.0, 3.0], 7)[2] > high


def test_a_run_fills_its_record(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    tiny = recipes.Budget(
        model.Shape(width=32, layers=1, heads=2, context=32),
        model.Training(steps=2, batch=2, warmup=1),
        seeds=2,
        held_out=256,
    )
    monkeypatch.setattr(recipes, "QUICK", tiny)
    assert recipes.main(["--quick", "--out", str(tmp_path)]) == 0
    metrics = harness.read_record(tmp_path / "recipes.json")["metrics"]
    assert set(metrics["losses"]) == set(recipes.ARMS)
    assert all(len(losses) == 2 for losses in metrics["losses"].values())
    assert set(metrics["hypotheses"]) == {"underflow", "placement", "mxfp8", "fp4"}
    assert set(metrics["hypotheses"].values()) <= set(recipes.VERDICTS)
    assert (tmp_path / "recipes.pdf").read_bytes().startswith(b"%PDF")
    assert (tmp_path / "recipes.png").read_bytes().startswith(b"\x89PNG")
