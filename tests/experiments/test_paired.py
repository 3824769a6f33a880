"""Experiments of short paired runs: what all of them promise, and what a run's end says."""

from __future__ import annotations

import math
from dataclasses import replace
from types import ModuleType

import pytest

from experiments import jump, learning, loss_scale, masters, paired, runs, studies

TINY = replace(
    studies.QUICK,
    gpt={"width": 32, "layers": 1, "heads": 1, "context": 32},
    steps=2, batch=2, warmup=1, held_out=1 << 10,
)  # fmt: skip
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("budget", ["quick", "default", "full"])
@pytest.mark.parametrize("experiment", [jump, loss_scale, masters], ids=lambda m: m.NAME)
def test_every_claim_has_its_runs(experiment: ModuleType, budget: str) -> None:
    points, seeds = experiment.points(experiment.BUDGETS[budget]), experiment.BUDGETS[budget].seeds
    assert len({runs.canonical(p) for p in points}) == len(points)
    cells = {experiment.cell(p) for p in points}
    for claim in experiment.CLAIMS:
        of = {name.removesuffix(masters.DECAY) for name in (claim.arm, claim.reference)}
        assert of <= cells, claim
    for cell in cells:
        assert [p["seed"] for p in points if experiment.cell(p) == cell] == list(seeds)
    assert not set(seeds) & set(studies.TUNING)
    assert len(experiment.BUDGETS["full"].seeds) >= 6


def test_a_grid_lets_a_row_speak_before_the_fields() -> None:
    points = paired.grid(TINY, "task", [{"arm": "a"}, {"arm": "b", "k": 3}], k=1)
    assert [(p["arm"], p["k"], p["seed"]) for p in points] == [
        ("a", 1, 21), ("b", 3, 21), ("a", 1, 22), ("b", 3, 22),
    ]  # fmt: skip


def test_how_a_run_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    point = paired.point(TINY, "jump", "fp32", 5)
    for held_out, losses, diverged, train in (
        (2.0, [3.0, 2.5], False, [2.75]),
        (2.0, [3.0, math.nan], True, [3.0]),
        (2.0, [math.inf], True, []),
        (learning.NOTHING + 0.1, [3.0, 2.5], True, [2.75]),
    ):
        monkeypatch.setattr(paired, "judge", lambda *_, value=held_out: value)
        assert paired.outcome(None, point, losses) == {
            "held_out": None if diverged else held_out, "diverged": diverged, "train": train,
        }  # fmt: skip
