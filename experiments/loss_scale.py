"""How does the loss that a model reaches depend on the loss scale?

Trains the byte-level GPT with the loss multiplied by S = 2^k, k from -16 up, and every gradient
divided by S before the optimizer sees it. Nothing but rounding can make a difference. In all three
GEMMs of every linear layer of the blocks:

  fp16    X, W, dY and the results in FP16, as under autocast. What is too large becomes infinite
  e5m2    FP8 without scales of its own: X and W in E4M3, dY in E5M2. What is too large saturates
  e4m3    the same with dY in E4M3

A step whose gradients hold Inf or NaN is skipped and counted, as torch.amp.GradScaler does; with a
fixed S nothing else happens. Beside the fixed scales, GradScaler's dynamic one, from starts of 2^32,
which overflows, 2^16, torch's own, and 1: doubled after 40 steps without overflow, halved at one.

Compared is the held-out loss at the end, within each seed, with BF16's (no scale). Claims, seeds
and grid are in this file; the tests are those of docs/analysis_plan.md: paired t, Holm's correction
over all claims here, and no verdict below the chaos floor (one ulp in one initial weight). Beside
the loss, from the last step: which share of the non-zero dY becomes zero, which saturates.

Runs are kept one file each: stop it at any time and start it again. With --full the record goes to
results/full, else to results/local, or to --out DIR.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

# Run from a checkout, installed or not.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from experiments import model  # before torch: sets how its threads wait

# isort: split

import torch
from torch import nn

import fpemu
from experiments import harness, paired, studies, verdicts
from fpemu.recipes import RECIPES, Recipe, linear_recipe

NAME = "loss_scale"

# What runs ---------------------------------------------------------------------------------------

ARMS: dict[str, Recipe] = {
    "fp16": RECIPES["fp16"],
    "e5m2": linear_recipe("unscaled e5m2", "e4m3", "e4m3", "e5m2"),
    "e4m3": linear_recipe("unscaled e4m3", "e4m3", "e4m3", "e4m3"),
    "bf16": RECIPES["bf16"],
    "fp32": RECIPES["fp32"],
}
SWEPT = ("fp16", "e5m2", "e4m3")
#: log2 of the fixed scales, by budget. Claims need -16, 0, 10, 14, 18 and 28.
GRID = (-16, -8, 0, 5, 10, 14, 18, 20, 24, 28)
EXPONENTS = {"quick": (-16, 0, 10, 14, 18, 28), "default": GRID, "full": GRID}
#: log2 of the scale that a dynamic one starts at, by arm.
STARTS = {"fp16": (32, 16, 0), "e5m2": (32, 16), "e4m3": (32, 16)}
GROWTH_INTERVAL = 40  # torch's default of 2000 is longer than these runs
BUDGETS = {
    "quick": studies.QUICK,
    "default": replace(studies.DEFAULT, steps=120),
    "full": replace(studies.FULL, steps=120),
}
CLAIMS = tuple(
    studies.Claim(NAME, arm, says, reference)
    for arm, says, reference in (
        ("fp16 2^-16", "worse", "bf16"),
        ("fp16 2^10", "equal", "bf16"),
        ("fp16 2^28", "worse", "bf16"),
        ("e5m2 2^0", "worse", "bf16"),
        ("e5m2 2^14", "better", "e5m2 2^0"),
        ("e5m2 2^14", "equal", "bf16"),
        ("e4m3 2^14", "worse", "e5m2 2^14"),
        ("e4m3 2^28", "worse", "e4m3 2^18"),
        ("fp16 dynamic 2^32", "better", "fp16 2^28"),
        ("fp16 dynamic 2^32", "worse", "fp16 dynamic 2^16"),
        ("fp16 dynamic 2^16", "equal", "bf16"),
    )
)


def points(budget: studies.Budget) -> list[paired.Point]:
    """Every arm and scale with every seed, the references first."""
    rows = [
        {"arm": "bf16"}, *studies.FLOOR,
        *({"arm": arm, "scaler": "dynamic", "log2_scale": k} for arm in SWEPT for k in STARTS[arm]),
        *({"arm": arm, "log2_scale": k} for k in EXPONENTS[budget.name] for arm in SWEPT),
    ]  # fmt: skip
    return paired.grid(budget, NAME, rows, scaler="fixed", log2_scale=0)


def cell(p: paired.Point) -> str:
    """What runs of several seeds have in common.

    >>> cell({"arm": "fp16", "scaler": "dynamic", "log2_scale": 32})
    'fp16 dynamic 2^32'
    """
    if p["arm"] not in SWEPT:
        return p["arm"] + (", one ulp" if p["perturb"] == "ulp" else "")
    return f"{p['arm']} {'dynamic ' if p['scaler'] == 'dynamic' else ''}2^{p['log2_scale']}"


# A run -------------------------------------------------------------------------------------------


def watch(net: nn.Module, fmt: str) -> dict[str, int]:
    """Count, from now on, what casting every linear layer's dY to a format does to it."""
    counts = dict.fromkeys(("size", "zeros", "underflow", "saturated", "nan", "inf"), 0)

    def count(module: nn.Module, grad_input: Any, grad_output: Any) -> None:
        found = fpemu.stats(grad_output[0], fmt)
        for key in counts:
            counts[key] += int(getattr(found, key))

    for layer in net.modules():
        if isinstance(layer, fpemu.nn.Linear):
            layer.register_full_backward_hook(count)
    return counts


def train(p: paired.Point) -> paired.Metrics:
    """Train as a point says; returns its metrics, the same ones every time."""
    recipe, steps = ARMS[p["arm"]], p["steps"]
    net, adamw = paired.build(p, recipe)
    dynamic = p["scaler"] == "dynamic"
    scaler = torch.amp.GradScaler(
        p["device"], init_scale=2.0 ** p["log2_scale"], growth_interval=GROWTH_INTERVAL
    )
    losses: list[float] = []
    scales: list[int] = []
    skipped: list[int] = []
    counts: dict[str, int] = {}
    for step, loss in paired.passes(net, p, scaler.scale):
        losses.append(loss)
        if not math.isfinite(loss):
            break
        scales.append(round(math.log2(scaler.get_scale())))  # a power of two: exact
        scaler.unscale_(adamw)
        gradients = [q.grad for q in net.parameters() if q.grad is not None]
        if not all(bool(g.isfinite().all()) for g in gradients):
            skipped.append(step)  # the scaler sees the same, and skips
        nn.utils.clip_grad_norm_(net.parameters(), model.Training().clip)
        paired.set_rate([adamw], step, p)
        scaler.step(adamw)
        scaler.update(None if dynamic else scaler.get_scale())
        if step == steps - 2 and recipe.dgrad.a.fmt is not None:
            counts = watch(net.blocks, str(recipe.dgrad.a.fmt))
    return {
        **paired.outcome(net, p, losses),
        "skipped": len(skipped),
        "skipped_at": skipped if dynamic else [],
        "dy": counts,
        "log2_scale_by_step": scales if dynamic else [],
        "backoffs": sum(b < a for a, b in pairwise(scales)),
        "growths": sum(b > a for a, b in pairwise(scales)),
    }


# What runs say -----------------------------------------------------------------------------------


def judge(points: Sequence[paired.Point], metrics: Sequence[paired.Metrics]) -> paired.Metrics:
    """A row per arm and scale; claims; the scales at which an arm equals BF16."""
    cells = paired.by_cell(points, metrics, cell)
    losses = verdicts.losses_of(cells)
    floor = verdicts.floor_of(losses)
    about = {cell(p): p for p in points}
    rows = []
    for name, seeds in cells.items():
        of = list(seeds.values())
        row = paired.gap_row(losses, name, "bf16")
        row |= {key: about[name][key] for key in ("arm", "scaler", "log2_scale")}
        row |= {key: sum(m[key] for m in of) for key in ("diverged", "backoffs", "growths")}
        row["skipped_share"] = sum(m["skipped"] for m in of) / sum(
            p["steps"] for p in points if cell(p) == name
        )
        row |= shares([m["dy"] for m in of])
        rows.append(row)
    plateau = {
        arm: [
            r["log2_scale"] for r in rows
            if r["arm"] == arm and r["scaler"] == "fixed"
            and -verdicts.MARGIN <= r["low"] and r["high"] <= verdicts.MARGIN
        ]
        for arm in SWEPT
    }  # fmt: skip
    return {
        "margin": verdicts.MARGIN,
        "chaos_floor": floor,
        "cells": rows,
        "claims": verdicts.claims(CLAIMS, losses, floor),
        "plateau": plateau,
        "losses": losses,
        "growth_interval": GROWTH_INTERVAL,
    }


def shares(counts: Sequence[dict[str, int]]) -> dict[str, float | None]:
    """Of the last step's dY, layers and seeds pooled: non-zero that becomes zero; that saturates."""
    if not all(counts):
        return {"underflow_share": None, "saturated_share": None}
    total = {key: sum(c[key] for c in counts) for key in counts[0]}
    return {
        "underflow_share": total["underflow"] / max(1, total["size"] - total["zeros"]),
        "saturated_share": total["saturated"] / total["size"],
    }


def tables(found: paired.Metrics) -> list[Any]:
    """The record for the terminal."""
    fixed = [r for r in found["cells"] if r["arm"] in SWEPT and r["scaler"] == "fixed"]
    cell_of = {(r["arm"], r["log2_scale"]): r for r in fixed}
    rows = []
    for k in dict.fromkeys(r["log2_scale"] for r in fixed):
        row = [f"2^{k}"]
        for arm in SWEPT:
            r = cell_of[arm, k]
            row += [f"{r['gap']:+.3f}", harness.percent(r["underflow_share"])]
            row += [harness.percent(r["skipped_share"] if arm == "fp16" else r["saturated_share"])]
        rows.append(row)
    heads = ["S"]
    for arm in SWEPT:
        heads += [arm, "zero", "skip" if arm == "fp16" else "over"]
    title = "Gap to BF16, nats per byte; dY at the end: % zero, % over; % of steps skipped"
    made = [harness.table(title, heads, rows)]
    rows = [
        [r["cell"], f"{r['gap']:+.4f}", str(r["backoffs"]), str(r["growths"]),
         harness.percent(r["skipped_share"]), harness.percent(r["saturated_share"])]
        for r in found["cells"] if r["scaler"] == "dynamic"
    ]  # fmt: skip
    heads = ["dynamic scale", "gap", "backoffs", "growths", "skip %", "over %"]
    made.append(harness.table("torch.amp.GradScaler, all seeds", heads, rows))
    made.append(paired.claims_table(found))
    return made


# The script --------------------------------------------------------------------------------------

EXAMPLES = """
python experiments/loss_scale.py --quick                 # under two minutes on two cores
python experiments/loss_scale.py                         # under fifteen
python experiments/loss_scale.py --full --workers 2      # an hour; start it again to go on
python figures/loss_scale.py results/full/loss_scale.json
"""
EXPERIMENT = paired.Experiment(
    NAME, __doc__ or "", EXAMPLES, BUDGETS, points, train, judge, tables
)  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    return paired.main(EXPERIMENT, argv)


if __name__ == "__main__":
    sys.exit(main())
