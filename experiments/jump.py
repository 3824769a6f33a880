"""What does delayed scaling clip when gradients jump, and does the loss notice?

Delayed scaling takes a tensor's scale from the largest values (amaxes) of earlier steps. A step
whose values are larger than any it remembers saturates. Here the jump is made: from the middle of a
run on, the loss is multiplied by 2^j, and every gradient divided by it again before the optimizer
sees it, so that nothing but rounding can make a difference. The jump is made

  once     and stays: all later steps are multiplied
  often    in every tenth step alone

The byte-level GPT, X and W in E4M3, dY in E5M2, one scale a tensor:

  delayed  TransformerEngine's default: the largest amax of the last 1024 steps
  newest   its other rule, "most_recent": the amax of the step before
  current  the amax of the tensor itself

Around the first jump, and around the one ten steps later: which share of dY saturates, what is left
of the weight gradient (its projection on the exact dY^T X, relative; 1 is all) and its cosine. At
the end: held-out loss against the same arm without a jump. Claims, seeds and grid are in this file;
the tests are those of docs/analysis_plan.md: paired t, Holm's correction over all claims here, and
no verdict below the chaos floor (one ulp in one initial weight).

Runs are kept one file each: stop it at any time and start it again. With --full the record goes to
results/full, else to results/local, or to --out DIR.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

# Run from a checkout, installed or not.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from experiments import model  # before torch: sets how its threads wait

# isort: split

from torch import Tensor, nn

import fpemu
from experiments import harness, paired, studies, verdicts
from fpemu.recipes import RECIPES, Delayed, Operand, Recipe, linear_recipe

NAME = "jump"

# What runs ---------------------------------------------------------------------------------------


def hybrid(name: str, scaling: Delayed) -> Recipe:
    """TransformerEngine's delayed recipe with a rule of one's own."""
    forward, backward = (Operand(f"fp8_tensor_{fmt}", scaling=scaling) for fmt in ("e4m3", "e5m2"))
    return linear_recipe(name, forward, forward, backward)


ARMS: dict[str, Recipe] = {
    "delayed": RECIPES["fp8_delayed"],
    "newest": hybrid("newest", Delayed(algo="most_recent")),
    "current": RECIPES["fp8_current"],
    "bf16": RECIPES["bf16"],
    "fp32": RECIPES["fp32"],
}
EVERY = 10  # steps between the jumps of "often"
#: Of each FP8 arm: how often it jumps, and log2 of how far.
JUMPS: dict[str, tuple[tuple[str, int], ...]] = {
    "delayed": (
        ("none", 0), ("once", 1), ("once", 2), ("once", 4), ("once", 8), ("often", 8),
    ),
    "newest": (("none", 0), ("often", 2), ("often", 4), ("often", 8)),
    "current": (("none", 0), ("often", 8)),
}  # fmt: skip
#: Steps that are looked at, counted from the first jump: it, its neighbours, and the next one.
AROUND = (-1, 0, 1, 2, EVERY - 1, EVERY, EVERY + 1)
BUDGETS = {
    "quick": replace(studies.QUICK, steps=40),
    "default": replace(studies.DEFAULT, steps=80),
    "full": replace(studies.FULL, steps=120),
}
CLAIMS = tuple(
    studies.Claim(NAME, arm, says, reference)
    for arm, says, reference in (
        ("delayed", "equal", "bf16"),
        ("delayed once 2^8", "equal", "delayed"),
        ("delayed often 2^8", "equal", "delayed"),
        ("newest often 2^4", "worse", "newest"),
        ("newest often 2^8", "worse", "newest"),
        ("newest often 2^8", "worse", "delayed often 2^8"),
    )
)


def points(budget: studies.Budget) -> list[paired.Point]:
    rows = [
        {"arm": arm, "jumps": how, "log2_jump": k} for arm, of in JUMPS.items() for how, k in of
    ]
    rows = [{"arm": "bf16"}, *studies.FLOOR, *rows]
    return paired.grid(budget, NAME, rows, jumps="none", log2_jump=0)


def cell(p: paired.Point) -> str:
    """What runs of several seeds have in common.

    >>> cell({"arm": "newest", "jumps": "often", "log2_jump": 4, "perturb": "none"})
    'newest often 2^4'
    """
    words = [p["arm"]]
    words += [f"{p['jumps']} 2^{p['log2_jump']}"] if p["jumps"] != "none" else []
    return " ".join(words) + (", one ulp" if p["perturb"] == "ulp" else "")


def is_multiplied(step: int, p: paired.Point) -> bool:
    """Whether the loss of a step is multiplied.

    >>> [s for s in range(40) if is_multiplied(s, {"jumps": "often", "steps": 40})]
    [20, 30]
    """
    since = step - p["steps"] // 2
    return since >= 0 and (p["jumps"] == "once" or (p["jumps"] == "often" and since % EVERY == 0))


# A run -------------------------------------------------------------------------------------------


class Look:
    """Watches one step: dY's saturation under the scale that is used, and the weight gradients."""

    def __init__(self, net: nn.Module) -> None:
        self.layers = {n: m for n, m in net.named_modules() if isinstance(m, fpemu.nn.Linear)}
        self.inputs: dict[str, Tensor] = {}
        self.gradients: dict[str, Tensor] = {}
        self.counts = {"size": 0, "saturated": 0}
        self.shares: list[float] = []
        self.handles = [
            m.register_forward_hook(lambda _, x, y, n=n: self._forward(n, x[0], y))
            for n, m in self.layers.items()
        ]

    def _forward(self, name: str, x: Tensor, y: Tensor) -> None:
        self.inputs[name] = x.detach().flatten(0, -2)
        y.register_hook(lambda dy: self._backward(name, dy.detach().flatten(0, -2)))

    def _backward(self, name: str, dy: Tensor) -> None:
        """Before the layer's own backward pass: its history is still what will be used."""
        layer = self.layers[name]
        step = layer.core.plan.steps["dgrad.dy"]
        amax = float(layer.core.history("dy").amax) if step.scaling is not None else None
        if step.fmt is not None:
            found = fpemu.stats(dy, step.fmt, amax=amax)
            self.counts["size"] += found.size
            self.counts["saturated"] += found.saturated
            self.shares.append(found.saturated / found.size)
        self.gradients[name] = dy.t() @ self.inputs[name]

    def result(self) -> dict[str, float]:
        """After the backward pass, before gradients are touched. Removes the hooks."""
        for handle in self.handles:
            handle.remove()
        dot = exact = noisy = 0.0
        for name, g in self.gradients.items():
            w = self.layers[name].weight.grad
            assert w is not None
            a, b = w.double().flatten(), g.double().flatten()
            dot, exact, noisy = dot + float(a @ b), exact + float(b @ b), noisy + float(a @ a)
        return {
            "saturated": self.counts["saturated"] / max(1, self.counts["size"]),
            "worst": max(self.shares, default=0.0),
            "left": dot / exact,
            "cosine": dot / math.sqrt(exact * noisy),
        }


def train(p: paired.Point) -> paired.Metrics:
    """Train as a point says; returns its metrics, the same ones every time."""
    first = p["steps"] // 2
    net, adamw = paired.build(p, ARMS[p["arm"]])
    factor = 2.0 ** p["log2_jump"]
    wanted = {first + offset: offset for offset in AROUND} if p["arm"] in JUMPS else {}
    losses: list[float] = []
    around: list[dict[str, float]] = []
    look: Look | None = None
    current = 0

    def scale(loss: Tensor) -> Tensor:
        return loss * factor if is_multiplied(current, p) else loss

    for step, loss in paired.passes(net, p, scale):
        losses.append(loss)
        if not math.isfinite(loss):
            break
        if look is not None:
            around.append({"offset": wanted[step], **look.result()})
        if is_multiplied(step, p):
            for q in net.parameters():
                if q.grad is not None:
                    q.grad /= factor  # a power of two: exact
        nn.utils.clip_grad_norm_(net.parameters(), model.Training().clip)
        paired.set_rate([adamw], step, p)
        adamw.step()
        current = step + 1
        look = Look(net.blocks) if current in wanted else None
    return {**paired.outcome(net, p, losses), "around": around}


# What runs say -----------------------------------------------------------------------------------


def judge(points: Sequence[paired.Point], metrics: Sequence[paired.Metrics]) -> paired.Metrics:
    """A row per arm and jump, with the mean over seeds of what was seen around it; claims."""
    cells = paired.by_cell(points, metrics, cell)
    losses = verdicts.losses_of(cells)
    floor = verdicts.floor_of(losses)
    about = {cell(p): p for p in points}
    rows = []
    for name, seeds in cells.items():
        of = list(seeds.values())
        arm = about[name]["arm"]
        row = paired.gap_row(losses, name, arm if name.startswith(f"{arm} ") else "bf16")
        row |= {key: about[name][key] for key in ("arm", "jumps", "log2_jump")}
        row |= {"diverged": sum(m["diverged"] for m in of), "around": []}
        for looks in zip(*(m["around"] for m in of), strict=False):  # a diverged run has fewer
            seen: dict[str, Any] = {"offset": looks[0]["offset"]}
            for key in ("saturated", "left", "cosine"):
                seen[key] = list(verdicts.interval([look[key] for look in looks]))
            seen["worst"] = max(look["worst"] for look in looks)
            row["around"].append(seen)
        rows.append(row)
    return {
        "margin": verdicts.MARGIN,
        "chaos_floor": floor,
        "cells": rows,
        "claims": verdicts.claims(CLAIMS, losses, floor),
        "losses": losses,
        "every": EVERY,
    }


def at(row: dict[str, Any], offset: int) -> dict[str, Any]:
    """What was seen so many steps after the first jump."""
    return next(seen for seen in row["around"] if seen["offset"] == offset)


def tables(found: paired.Metrics) -> list[Any]:
    """The record for the terminal."""
    rows = []
    for r in found["cells"]:
        if not r["around"]:
            continue
        row = [r["cell"]]
        for offset in (0, 1, EVERY):
            seen = at(r, offset)
            row += [harness.percent(seen["saturated"][0]), f"{seen['left'][0]:.2f}"]
        rows.append([*row, f"{r['gap']:+.4f}"])
    heads = ["arm", "jump", "left", "after", "left", f"+{EVERY}", "left", "gap"]
    title = "dY that saturates, %, and what is left of the weight gradient; gap in held-out loss"
    return [harness.table(title, heads, rows), paired.claims_table(found)]


# The script --------------------------------------------------------------------------------------

EXAMPLES = """
python experiments/jump.py --quick                       # under two minutes on two cores
python experiments/jump.py                               # under ten
python experiments/jump.py --full --workers 2            # a quarter of an hour; start it again to go on
python figures/jump.py results/full/jump.json
"""
EXPERIMENT = paired.Experiment(
    NAME, __doc__ or "", EXAMPLES, BUDGETS, points, train, judge, tables
)  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    return paired.main(EXPERIMENT, argv)


if __name__ == "__main__":
    sys.exit(main())
