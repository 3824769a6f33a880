"""Jumps of the gradients: what saturates is counted under the scale that is used."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import fpemu
from experiments import harness, jump, paired, runs, studies, verdicts

TINY = replace(
    studies.QUICK,
    gpt={"width": 32, "layers": 1, "heads": 1, "context": 32},
    steps=24, batch=2, warmup=2, held_out=1 << 10,
)  # fmt: skip
pytestmark = pytest.mark.usefixtures("one_thread")


def run(arm: str, jumps: str = "none", k: int = 0) -> paired.Metrics:
    return jump.train(paired.point(TINY, "jump", arm, 5, jumps=jumps, log2_jump=k))


def seen(metrics: paired.Metrics, offset: int) -> dict[str, float]:
    return jump.at(metrics, offset)


def test_without_rounding_a_jump_changes_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the loss, nor of the gradients' norms: clipping and Adam would hide a factor."""
    norms: dict[str, list[float]] = {}
    clip = torch.nn.utils.clip_grad_norm_
    for how in ("none", "once", "often"):
        seen_: list[float] = norms.setdefault(how, [])

        def spy(parameters: Any, most: float, seen_: list[float] = seen_) -> Any:
            seen_.append(float(clip(parameters, most)))

        monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", spy)
        assert run("fp32", how, 8)["held_out"] == run("fp32")["held_out"]
    assert norms["none"][:24] == norms["once"][:24] == norms["often"][:24] != []


def test_current_scaling_does_not_see_a_jump() -> None:
    """Scales are quotients: a power of two moves them and nothing else."""
    calm, jumping = run("current"), run("current", "often", 8)
    assert calm == jumping
    assert max(look["worst"] for look in calm["around"]) < 1e-3


def test_delayed_scaling_clips_once_and_the_newest_amax_again() -> None:
    once, often, newest = (
        run(*words, 8) for words in (("delayed", "once"), ("delayed", "often"), ("newest", "often"))
    )
    for metrics in (once, often, newest):
        assert seen(metrics, -1)["saturated"] < 1e-3
        assert seen(metrics, 0)["saturated"] > 0.05 and seen(metrics, 0)["left"] < 0.5
    assert seen(often, 10)["left"] > 0.6 > 0.4 > seen(newest, 10)["left"]
    assert seen(newest, 11)["left"] == pytest.approx(1, abs=0.1)


def test_a_jump_is_made_when_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the gradients in front of the optimizer: all of one size, those of the loss unscaled."""
    p = paired.point(TINY, "jump", "fp32", 5, jumps="often", log2_jump=6)
    assert [s for s in range(24) if jump.is_multiplied(s, p)] == [12, 22]
    assert [s for s in range(24) if jump.is_multiplied(s, {**p, "jumps": "once"})] == [
        *range(12, 24)
    ]
    factors = []
    whole = paired.passes

    def spy(net: Any, point: Any, scale: Any) -> Any:
        def noted(loss: torch.Tensor) -> torch.Tensor:
            factors.append(float((scale(loss) / loss).detach()))
            return scale(loss)

        return whole(net, point, noted)

    monkeypatch.setattr(paired, "passes", spy)
    jump.train(p)
    assert [s for s, f in enumerate(factors) if f != 1] == [12, 22]
    assert {f for f in factors if f != 1} == {2.0**6}


def test_saturation_by_hand() -> None:
    """A layer that has seen an amax of 1 in dY: what is larger than 1 saturates."""
    net = torch.nn.Sequential(torch.nn.Linear(4, 8, bias=False))
    fpemu.nn.convert(net, jump.ARMS["delayed"], verbose=False)
    x, dy = torch.randn(3, 4), torch.full((3, 8), 0.5)
    dy[0, 0] = 1
    for _ in range(2):  # the scale moves with the next forward pass
        net(x).backward(dy)
    net.zero_grad()
    look = jump.Look(net)
    dy[1, :] = 4
    net(x).backward(dy)
    found = look.result()
    assert found["saturated"] == found["worst"] == 8 / 24
    exact = dy.clamp(max=1).t() @ x
    kept = float((exact * (dy.t() @ x)).sum() / (dy.t() @ x).square().sum())
    assert found["left"] == pytest.approx(kept, rel=0.05)  # X and W are E4M3
    net(x).backward(dy)
    assert look.counts["size"] == 24  # its hooks are gone


def test_looks_end_before_the_run_does() -> None:
    for budget in jump.BUDGETS.values():
        assert budget.steps // 2 + max(jump.AROUND) < budget.steps


def test_what_is_clipped_above_leaves_small_amaxes_below() -> None:
    """Why the step after a jump still saturates: the lower layer never saw the whole jump."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(*(torch.nn.Linear(32, 32, bias=False) for _ in range(2)))
    fpemu.nn.convert(net, jump.ARMS["delayed"], verbose=False)
    x, dy = torch.randn(8, 32), torch.randn(8, 32)
    for _ in range(2):
        net(x).backward(dy)
    calm = [float(layer.dy_amax) for layer in net]
    net(x).backward(256 * dy)
    net(x)  # the histories move
    lower, upper = (float(layer.dy_amax) / was for layer, was in zip(net, calm, strict=True))
    assert upper == 256 and lower < 4


def test_a_run_fills_its_record(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, pool: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(jump.BUDGETS, "quick", TINY)
    monkeypatch.setattr(runs, "pool", pool)
    assert jump.main(["--quick", "--out", str(tmp_path)]) == 0
    metrics = harness.read_record(tmp_path / "jump.json")["metrics"]
    rows = {row["cell"]: row for row in metrics["cells"]}
    of = {(jump.cell(r), r["seed"]): r for r in metrics["runs"]}
    cell = "delayed once 2^8"
    lefts = [seen(of[cell, s], 0)["left"] for s in TINY.seeds]
    assert jump.at(rows[cell], 0)["left"] == pytest.approx(verdicts.interval(lefts), rel=1e-5)
    gaps = [of[cell, s]["held_out"] - of["delayed", s]["held_out"] for s in TINY.seeds]
    assert rows[cell]["gap"] == pytest.approx(sum(gaps) / 2, abs=1e-6)
    assert {p.name for p in tmp_path.glob("*.pdf")} == {"jump_around.pdf", "jump_gaps.pdf"}
    said = capsys.readouterr().out
    assert "…" not in said
