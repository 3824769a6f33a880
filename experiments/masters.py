"""What do weights without a float32 master lose?

Trains the byte-level GPT with weights that are stored in 16 bits between steps. The optimizer (AdamW)
and its state stay float32: it computes w + update, and every parameter is then rounded. GEMMs are
BF16's, or FP16's with a dynamic loss scale, with the same references:

  master        float32 weights
  rne           rounded to nearest
  sr            rounded stochastically
  rne_early     to nearest until the decay of the learning rate, float32 in it
  rne_late      float32 until the decay, the last fifth of the steps, to nearest in it
  rne_matrices  matrices to nearest, norms float32

A weight moves only if its update reaches half a step of its format: |w| * 2^-9 to |w| * 2^-8 in
BF16, 2^-12 to 2^-11 in FP16. Adam's updates are about the learning rate, so lr / |w| decides.
Measured, at every tenth step and at the last: which share of the weights comes out of the step as it
went in, by kind of weight, and by the binade of lr / |w|; which share of the norms' weights is
exactly 1, where they began. And the held-out loss where the decay begins and at the end.

Compared is that loss within each seed. Claims and seeds are in this file; the tests are those of
docs/analysis_plan.md: paired t, Holm's correction over all claims here, and no verdict below the
chaos floor (one ulp in one initial weight).

Runs are kept one file each: stop it at any time and start it again. With --full the record goes to
results/full, else to results/local, or to --out DIR.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Run from a checkout, installed or not.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from experiments import model  # before torch: sets how its threads wait

# isort: split

import torch
from torch import Tensor, nn

import fpemu
from experiments import harness, learning, paired, studies, verdicts
from fpemu.recipes import RECIPES, Operand

NAME = "masters"

# What runs ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Arm:
    """How weights are stored.

    Parameters
    ----------
    recipe : str
        Of the GEMMs.
    stored : Operand or None
        What parameters are rounded to; None: float32.
    when : {"always", "before", "after"}
        In which part of the run they are: before or after the decay begins.
    norms : bool
        Whether the norms' weights are rounded too.
    """

    recipe: str
    stored: Operand | None = None
    when: str = "always"
    norms: bool = True


STOCHASTIC = {
    "bf16": RECIPES["bf16_sr_weights"].weights,
    "fp16": Operand("fp16", rounding="sr"),
}
ARMS = {
    f"{fmt}_{how}": arm
    for fmt in ("bf16", "fp16")
    for how, arm in {
        "master": Arm(fmt),
        "rne": Arm(fmt, Operand(fmt)),
        "sr": Arm(fmt, STOCHASTIC[fmt]),
    }.items()
} | {
    "bf16_rne_early": Arm("bf16", Operand("bf16"), "before"),
    "bf16_rne_late": Arm("bf16", Operand("bf16"), "after"),
    "bf16_rne_matrices": Arm("bf16", Operand("bf16"), norms=False),
}
BUDGETS = {"quick": studies.QUICK, "default": studies.DEFAULT, "full": studies.FULL}
DECAY = ", decay"  # of a cell: how much its loss falls there, not the loss itself
CLAIMS = tuple(
    studies.Claim(NAME, arm, says, reference)
    for arm, says, reference in (
        ("bf16_rne", "worse", "bf16_master"),
        ("bf16_rne" + DECAY, "worse", "bf16_master" + DECAY),
        ("bf16_rne_early", "better", "bf16_rne"),
        ("bf16_rne_late", "worse", "bf16_master"),
        ("bf16_rne_matrices", "better", "bf16_rne"),
        ("bf16_sr", "better", "bf16_rne"),
        ("bf16_sr", "equal", "bf16_master"),
        ("fp16_rne", "worse", "fp16_master"),
        ("fp16_sr", "equal", "fp16_master"),
    )
)


def points(budget: studies.Budget) -> list[paired.Point]:
    rows = [*({"arm": arm} for arm in ARMS), {"arm": "bf16_master", "perturb": "ulp"}]
    return paired.grid(budget, NAME, rows)


def cell(p: paired.Point) -> str:
    return p["arm"] + (", one ulp" if p["perturb"] == "ulp" else "")


# What moves --------------------------------------------------------------------------------------

LOOK = 10  # steps between looks
LOWEST, HIGHEST = -24, 8  # binades of lr / |w|; the first and the last take what lies beyond


def kinds_of(net: nn.Module) -> dict[str, list[nn.Parameter]]:
    """Parameters by kind."""
    kinds: dict[str, list[nn.Parameter]] = {"matrices": [], "norms": [], "embeddings": []}
    for layer in net.modules():
        kind = (
            "matrices" if isinstance(layer, nn.Linear)
            else "embeddings" if isinstance(layer, nn.Embedding) else "norms"
        )  # fmt: skip
        kinds[kind] += layer.parameters(recurse=False)
    return kinds


def binades(rate: float, w: Tensor) -> Tensor:
    """Bins, int64 from 0: the exponent of ``rate / |w|``, the quotient rounded to float64."""
    bits = (rate / w.detach().double().abs()).view(torch.int64)
    return ((bits >> 52) - 1023).clamp(LOWEST, HIGHEST) - LOWEST


class Moves:
    """Counts weights that a step leaves as they were."""

    def __init__(self, net: nn.Module) -> None:
        self.kinds = kinds_of(net)
        self.steps: list[int] = []
        self.unchanged: dict[str, list[float]] = {kind: [] for kind in self.kinds}
        self.ones: list[float] = []
        size = HIGHEST - LOWEST + 1
        self.of_bin, self.unchanged_in = (torch.zeros(size, dtype=torch.int64) for _ in range(2))
        self.before: dict[str, Tensor] = {}

    def flat(self, kind: str) -> Tensor:
        return torch.cat([p.detach().flatten() for p in self.kinds[kind]])

    def remember(self) -> None:
        """Call before the optimizer's step."""
        self.before = {kind: self.flat(kind) for kind in self.kinds}

    def compare(self, step: int, rate: float) -> None:
        """Call after it."""
        self.steps.append(step)
        for kind, old in self.before.items():
            same = self.flat(kind) == old
            self.unchanged[kind].append(float(same.double().mean()))
            if kind != "embeddings":  # those of bytes that a batch lacks have no gradient
                bins = binades(rate, old).cpu()
                size = len(self.of_bin)
                self.of_bin += torch.bincount(bins, minlength=size)
                self.unchanged_in += torch.bincount(bins[same.cpu()], minlength=size)
        self.ones.append(float((self.flat("norms") == 1).double().mean()))

    def metrics(self) -> dict[str, Any]:
        return {
            "look_at": self.steps,
            "unchanged": self.unchanged,
            "norms_at_one": self.ones,
            "lowest": LOWEST,
            "of_bin": self.of_bin.tolist(),
            "unchanged_in": self.unchanged_in.tolist(),
        }


# A run -------------------------------------------------------------------------------------------


def train(p: paired.Point) -> paired.Metrics:
    """Train as a point says; returns its metrics, the same ones every time."""
    arm, steps = ARMS[p["arm"]], p["steps"]
    net, adamw = paired.build(p, RECIPES[arm.recipe])
    optimizers = [adamw]
    if not arm.norms:  # an optimizer of their own, which no rounding follows
        optimizers.append(torch.optim.AdamW([adamw.param_groups.pop()]))
    scaler = torch.amp.GradScaler(
        p["device"], init_scale=learning.FIRST_SCALE, growth_interval=learning.GROWTH_INTERVAL,
        enabled=arm.recipe == "fp16",
    )  # fmt: skip
    decay = learning.decay_start(steps)
    handle: Any = None
    if arm.stored is not None and arm.when != "after":
        handle = fpemu.nn.round_weights(adamw, arm.stored, seed=p["rounding"])
    moves, losses, at_decay = Moves(net), [], math.nan
    for step, loss in paired.passes(net, p, scaler.scale):
        losses.append(loss)
        if not math.isfinite(loss):
            break
        if step == decay:
            at_decay = paired.judge(net, p)
            if arm.when == "before":
                handle.remove()
            if arm.stored is not None and arm.when == "after":
                fpemu.nn.round_weights(adamw, arm.stored, seed=p["rounding"])
        for optimizer in optimizers:
            scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(net.parameters(), model.Training().clip)
        rate = paired.set_rate(optimizers, step, p)
        looked_at = step % LOOK == LOOK - 1 or step == steps - 1
        if looked_at:
            moves.remember()
        for optimizer in optimizers:
            scaler.step(optimizer)
        if looked_at:
            moves.compare(step, rate)
        scaler.update()
    return {
        **paired.outcome(net, p, losses),
        "at_decay": at_decay if math.isfinite(at_decay) else None,
        **moves.metrics(),
    }


# What runs say -----------------------------------------------------------------------------------


def judge(points: Sequence[paired.Point], metrics: Sequence[paired.Metrics]) -> paired.Metrics:
    """A row per arm; claims; pooled counts by binade of lr / |w|."""
    cells = paired.by_cell(points, metrics, cell)
    losses = verdicts.losses_of(cells)
    for name in ("bf16_master", "bf16_rne"):
        losses[name + DECAY] = {s: fall(m) for s, m in cells[name].items()}
    floor = verdicts.floor_of(losses)
    steps, rows = points[0]["steps"], []
    for name, seeds in cells.items():
        of = list(seeds.values())
        row = paired.gap_row(
            losses, name, "fp16_master" if name.startswith("fp16") else "bf16_master"
        )
        row |= {"diverged": sum(m["diverged"] for m in of), "decay": learning.decay_start(steps)}
        for kind in of[0]["unchanged"]:
            row[f"unchanged_{kind}"] = [mean(v) for v in zip(*(m["unchanged"][kind] for m in of), strict=True)]  # fmt: skip
        row["norms_at_one"] = [mean(v) for v in zip(*(m["norms_at_one"] for m in of), strict=True)]
        for key in ("of_bin", "unchanged_in"):
            row[key] = [sum(v) for v in zip(*(m[key] for m in of), strict=True)]
        rows.append(row)
    return {
        "margin": verdicts.MARGIN,
        "chaos_floor": floor,
        "lowest": LOWEST,
        "look_at": metrics[0]["look_at"],
        "losses": losses,
        "cells": rows,
        "claims": verdicts.claims(CLAIMS, losses, floor),
    }


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def fall(m: paired.Metrics) -> float:
    """Loss at the end less that where the decay begins: negative where the decay helps."""
    started = learning.NOTHING if m["at_decay"] is None else m["at_decay"]
    return float(verdicts.loss_of(m) - started)


def tables(found: paired.Metrics) -> list[Any]:
    """The record for the terminal."""
    rows = []
    for r in found["cells"]:
        first = sum(step < r["decay"] for step in found["look_at"])  # looks before the decay
        share = [*(mean(r["unchanged_matrices"][part]) for part in (slice(first), slice(first, None))),
                 r["norms_at_one"][-1]]  # fmt: skip
        rows.append(
            [
                r["cell"],
                f"{r['loss']:.4f}",
                f"{r['gap']:+.4f}",
                *(harness.percent(s) for s in share),
            ]
        )
    heads = ["weights", "loss", "gap", "still, %", "in the decay", "norms at 1, %"]
    title = "Held-out loss, gap to the masters; matrix weights that a step leaves unchanged"
    return [
        harness.table(title, heads, rows),
        paired.claims_table(found),
    ]


# The script --------------------------------------------------------------------------------------

EXAMPLES = """
python experiments/masters.py --quick                    # under two minutes on two cores
python experiments/masters.py                            # under fifteen
python experiments/masters.py --full --workers 2         # an hour; start it again to go on
python figures/masters.py results/full/masters.json
"""
EXPERIMENT = paired.Experiment(
    NAME, __doc__ or "", EXAMPLES, BUDGETS, points, train, judge, tables
)  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    return paired.main(EXPERIMENT, argv)


if __name__ == "__main__":
    sys.exit(main())
