"""Experiments that are one list of short paired runs: passes, command line, store, record.

A seed fixes initial weights, data order and held-out text, those of experiments/learning.py; only
the arm differs. Sizes, learning rate, seeds and endpoint are those of experiments/loss_curves.py
(docs/analysis_plan.md); the tests are those of experiments/verdicts.py. Runs lie in the store of
experiments/runs.py, one file each, so a run that is killed is resumed by the same command.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any

from experiments import model  # before torch: sets how its threads wait

# isort: split

import torch
from torch import Tensor

import fpemu
from experiments import harness, learning, runs, studies, verdicts
from fpemu.recipes import Recipe

Point = dict[str, Any]
Metrics = dict[str, Any]

# A run -------------------------------------------------------------------------------------------


def point(budget: studies.Budget, task: str, arm: str, seed: int, **fields: Any) -> Point:
    """A run of normal length; `fields` are the experiment's own keys."""
    return {
        "version": 1, "task": task, "arm": arm, "seed": seed, "rounding": seed, "perturb": "none",
        "model": budget.gpt, "rate": budget.rate, "steps": budget.steps, "batch": budget.batch,
        "warmup": budget.warmup, "held_out": budget.held_out, "device": "cpu", **fields,
    }  # fmt: skip


def grid(
    budget: studies.Budget, task: str, rows: Sequence[dict[str, Any]], **fields: Any
) -> list[Point]:
    """Every row with every seed; `fields` are what a row says unless it says otherwise."""
    return [
        point(budget, task, seed=seed, **{**fields, **row}) for seed in budget.seeds for row in rows
    ]


def build(p: Point, recipe: Recipe) -> tuple[Any, torch.optim.AdamW]:
    """The model of a point, the linear layers of its blocks in a recipe; and its optimizer."""
    net: Any = learning.build({**p, "task": "gpt", "arm": "fp32", "sums": "library"})
    fpemu.nn.convert(net.blocks, recipe, seed=p["rounding"], verbose=False)
    return net, model.optimizer(net, plan_of(p))


def plan_of(p: Point) -> model.Training:
    return model.Training(steps=p["steps"], batch=p["batch"], rate=p["rate"])


def passes(
    net: Any, p: Point, scale: Callable[[Tensor], Tensor] = lambda loss: loss
) -> Iterator[tuple[int, float]]:
    """Forward and backward passes; yields step and loss, and the caller moves the weights.

    Parameters
    ----------
    scale : callable
        From the loss to what is differentiated.
    """
    order = torch.Generator().manual_seed(p["seed"] + (1 << 32))
    data, context = learning.texts()[0], p["model"]["context"]
    for step in range(p["steps"]):
        starts = torch.randint(len(data) - context, (p["batch"],), generator=order)
        inputs, targets = (t.to(p["device"]) for t in model.windows(data, starts, context))
        loss = model.next_byte_loss(net, inputs, targets)
        scale(loss).backward()
        yield step, float(loss.detach())
        net.zero_grad(set_to_none=True)


def set_rate(optimizers: Sequence[torch.optim.Optimizer], step: int, p: Point) -> float:
    """Set the learning rate of a step, and return it."""
    rate = learning.rate_at(step, p["rate"], p["steps"], p["warmup"])
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = rate
    return rate


def outcome(net: Any, p: Point, losses: Sequence[float]) -> Metrics:
    """How a run ended, from its training losses; the last may be no number.

    A run diverges when a training loss is not finite or the held-out loss at the end is above that
    of knowing nothing; the loss is then None.
    """
    held_out = judge(net, p)
    whole = len(losses) == p["steps"] and math.isfinite(losses[-1])
    diverged = not (whole and held_out <= learning.NOTHING)
    return {
        "held_out": None if diverged else held_out,
        "diverged": diverged,
        "train": learning.binned(list(losses if whole else losses[:-1])),
    }


def judge(net: Any, p: Point) -> float:
    """Held-out loss, nats per byte, in the model's own recipe."""
    context = p["model"]["context"]
    return float(learning.judge(net, context, p["held_out"], p["device"])["loss"])


# An experiment -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Experiment:
    """What `main` needs to know.

    Parameters
    ----------
    about, examples : str
        For ``--help``.
    budgets : dict
        Of ``"quick"``, ``"default"`` and ``"full"``.
    points : callable
        From a budget to its points.
    compute : callable
        From a point to its metrics; a function of a module.
    judge : callable
        From points and their metrics to what they say together.
    tables : callable
        From that to tables.
    """

    name: str
    about: str
    examples: str
    budgets: dict[str, studies.Budget]
    points: Callable[[studies.Budget], list[Point]]
    compute: Callable[[Point], Metrics]
    judge: Callable[[Sequence[Point], Sequence[Metrics]], Metrics]
    tables: Callable[[Metrics], list[Any]]


def parse(experiment: Experiment, argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = harness.arguments(
        experiment.about, experiment.examples, full="the budget of the paper"
    )
    runs.add_arguments(parser)
    return harness.parse(parser, argv)


def main(experiment: Experiment, argv: Sequence[str] | None = None) -> int:
    """Run, collect, print, draw. Returns the exit status: 1 where runs failed or are missing."""
    args = parse(experiment, argv)
    budget = experiment.budgets[args.budget]
    budget = replace(budget, seeds=tuple(seed + 1000 * args.seed for seed in budget.seeds))
    home = harness.home(args)
    folder = home / "runs"
    points = [{**p, "device": args.device} for p in experiment.points(budget)]
    out = harness.console()
    if args.retry:
        runs.forget_failures(folder, points)
    if not args.collect:
        runs.pool(
            folder, points, experiment.compute, experiment.name, args.argv, args.device, args.workers
        )  # fmt: skip
    asked = {"budget": budget.name, "seeds": list(budget.seeds)}
    record = runs.collect(experiment.name, points, folder, args.argv, asked, experiment.judge)
    if record is None:
        runs.say_what_lacks(out, experiment.name, folder, points)
        return 1
    path = home / f"{experiment.name}.json"
    harness.write_record(path, record)
    for table in experiment.tables(record["metrics"]):
        out.print(table)
    # Not before: figures load matplotlib.
    drawn = import_module(f"figures.{experiment.name}").draw(path, harness.drawings(args))
    out.print("\n".join(f"  {harness.shown(p)}" for p in [path, *drawn]), markup=False)
    return 0


# What runs say -----------------------------------------------------------------------------------


def by_cell(
    points: Sequence[Point], metrics: Sequence[Metrics], cell: Callable[[Point], str]
) -> dict[str, dict[int, Metrics]]:
    """Metrics by cell and seed."""
    found: dict[str, dict[int, Metrics]] = {}
    for p, m in zip(points, metrics, strict=True):
        found.setdefault(cell(p), {})[p["seed"]] = m
    return found


def gap_row(losses: dict[str, verdicts.Losses], cell: str, reference: str) -> dict[str, Any]:
    """Mean loss, and the paired gap to a reference with its 95 % interval."""
    mean = sum(losses[cell].values()) / len(losses[cell])
    gap, low, high = verdicts.interval(verdicts.paired(losses[cell], losses[reference]))
    return {
        "cell": cell,
        "n": len(losses[cell]),
        "loss": mean,
        "gap": gap,
        "low": low,
        "high": high,
    }


WORDS = {"worse": ">", "better": "<", "equal": "="}


def claims_table(found: Metrics) -> Any:
    """The claims of a record, of at most 80 columns."""
    rows = [
        [f"{c['arm']} {WORDS[c['says']]} {c['reference']}",
         *(f"{c[key]:+.4f}" for key in ("mean", "low", "high")), c["verdict"]]
        for c in found["claims"]
    ]  # fmt: skip
    title = f"Claims about the loss; chaos floor {found['chaos_floor']:.5f}"
    return harness.table(title, ["claim", "gap", "low", "high", "verdict"], rows)
