"""Weights without a master: what counts as unchanged, which weights are rounded when."""

from __future__ import annotations

import math
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch

from experiments import harness, learning, masters, paired, runs, studies, verdicts

TINY = replace(
    studies.QUICK,
    gpt={"width": 32, "layers": 1, "heads": 1, "context": 32},
    steps=10, batch=2, warmup=2, held_out=1 << 10,
)  # fmt: skip


pytestmark = pytest.mark.usefixtures("one_thread")


def tiny(arm: str, **fields: Any) -> paired.Point:
    return paired.point(TINY, "masters", arm, 5, **fields)


def weights_of(arm: str, monkeypatch: pytest.MonkeyPatch) -> dict[int, dict[str, torch.Tensor]]:
    """Every parameter in front of each step, and (key -1) at the end."""
    found: dict[int, dict[str, torch.Tensor]] = {}
    nets = []
    whole = paired.passes

    def spy(net: Any, p: paired.Point, scale: Any) -> Any:
        nets.append(net)
        for step, loss in whole(net, p, scale):
            found[step] = {n: q.detach().clone() for n, q in net.named_parameters()}
            yield step, loss

    monkeypatch.setattr(paired, "passes", spy)
    masters.train(tiny(arm))
    found[-1] = {n: q.detach().clone() for n, q in nets[0].named_parameters()}
    return found


def is_stored(weights: dict[str, torch.Tensor], dtype: torch.dtype) -> set[str]:
    return {n for n, w in weights.items() if torch.equal(w, w.to(dtype).float())}


# Which weights are rounded -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arm", "dtype", "early", "late"),
    [
        ("bf16_rne", torch.bfloat16, "all", "all"),
        ("bf16_sr", torch.bfloat16, "all", "all"),
        ("fp16_rne", torch.float16, "all", "all"),
        ("fp16_sr", torch.float16, "all", "all"),
        ("bf16_rne_early", torch.bfloat16, "all", "none"),
        ("bf16_rne_late", torch.bfloat16, "none", "all"),
        ("bf16_rne_matrices", torch.bfloat16, "matrices", "matrices"),
        ("bf16_master", torch.bfloat16, "none", "none"),
    ],
)  # fmt: skip
def test_weights_are_stored_as_the_arm_says(
    arm: str, dtype: torch.dtype, early: str, late: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = weights_of(arm, monkeypatch)
    decay = learning.decay_start(TINY.steps)
    assert decay == 8
    names = set(found[0])
    matrices = {n for n, w in found[0].items() if w.ndim == 2}
    for step, want in ((decay - 1, early), (-1, late)):
        stored = is_stored(found[step], dtype)
        assert stored == {"all": names, "matrices": matrices, "none": set()}[want], step


def test_an_optimizer_apart_changes_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Norms in an optimizer of their own: without rounding, the run of the masters."""
    plain = masters.train(tiny("bf16_master"))
    monkeypatch.setitem(masters.ARMS, "apart", masters.Arm("bf16", norms=False))
    assert masters.train(tiny("apart"))["held_out"] == plain["held_out"]


# What counts as unchanged ------------------------------------------------------------------------


def test_binades_of_the_ratio_are_exact() -> None:
    w = torch.tensor([1.0, -1.0, 0.75, 2.0**-10, 3.0, 1e-45, 0.0, 2.0**30])
    bins = masters.binades(2.0**-10, w) + masters.LOWEST
    for x, k in zip(w.tolist(), bins.tolist(), strict=True):
        if x == 0:
            assert k == masters.HIGHEST
            continue
        ratio = Fraction(2.0**-10) / abs(Fraction(x))
        exact = next(e for e in range(-60, 200) if Fraction(2) ** (e + 1) > ratio)
        assert k == min(max(exact, masters.LOWEST), masters.HIGHEST), x


def test_moves_are_counted_by_hand() -> None:
    net = torch.nn.Module()
    net.linear = torch.nn.Linear(4, 2, bias=False)
    net.norm = torch.nn.RMSNorm(3)
    net.bytes = torch.nn.Embedding(2, 2)
    with torch.no_grad():
        net.linear.weight.copy_(torch.tensor([[1.0, 1, 1, 1], [0.25, 0.25, 0.25, 0.25]]))
        net.norm.weight.fill_(1)
    moves = masters.Moves(net)
    moves.remember()
    with torch.no_grad():
        net.linear.weight[0, 0] += 1
        net.linear.weight[1] += 1
        net.norm.weight[1] = 2
        net.bytes.weight += 1
    moves.compare(7, 2.0**-10)
    found = moves.metrics()
    assert found["look_at"] == [7]
    assert found["unchanged"] == {"matrices": [3 / 8], "norms": [2 / 3], "embeddings": [0.0]}
    assert found["norms_at_one"] == [2 / 3]
    of = {i + masters.LOWEST: n for i, n in enumerate(found["of_bin"]) if n}
    same = {i + masters.LOWEST: n for i, n in enumerate(found["unchanged_in"]) if n}
    assert of == {-10: 4 + 3, -8: 4}
    assert same == {-10: 3 + 2}


def test_below_half_a_step_nothing_moves_to_nearest_and_something_does_stochastically() -> None:
    nearest, stochastic = (masters.train(tiny(arm)) for arm in ("bf16_rne", "bf16_sr"))
    edge = -11 - masters.LOWEST  # Adam's first updates are at most a few times the rate
    for run, moves in ((nearest, False), (stochastic, True)):
        of, same = sum(run["of_bin"][:edge]), sum(run["unchanged_in"][:edge])
        assert of > 50
        assert (same < of) == moves
    assert nearest["norms_at_one"] == [1.0]
    assert stochastic["norms_at_one"][0] < 1


# The whole ---------------------------------------------------------------------------------------


def test_a_run_fills_its_record(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, pool: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(masters.BUDGETS, "quick", replace(TINY, steps=12))
    monkeypatch.setattr(runs, "pool", pool)
    assert masters.main(["--quick", "--out", str(tmp_path)]) == 0
    metrics = harness.read_record(tmp_path / "masters.json")["metrics"]
    assert {row["cell"] for row in metrics["cells"]} == {*masters.ARMS, "bf16_master, one ulp"}
    of = {(r["arm"], r["seed"]): r for r in metrics["runs"] if r["perturb"] == "none"}
    row = next(c for c in metrics["claims"] if c["arm"] == "bf16_rne" + masters.DECAY)
    falls = [
        (of["bf16_rne", s]["held_out"] - of["bf16_rne", s]["at_decay"])
        - (of["bf16_master", s]["held_out"] - of["bf16_master", s]["at_decay"])
        for s in TINY.seeds
    ]
    assert row["mean"] == pytest.approx(verdicts.interval(falls)[0], abs=1e-6)
    assert math.isfinite(row["low"])
    for name in ("moves", "gaps"):
        assert (tmp_path / f"masters_{name}.pdf").read_bytes().startswith(b"%PDF")
        assert (tmp_path / f"masters_{name}.png").read_bytes().startswith(b"\x89PNG")
    assert "…" not in capsys.readouterr().out
