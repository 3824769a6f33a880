"""What does each low-precision recipe do to learning, and what is too small to tell?

Trains small models in every recipe of fpemu.recipes with paired seeds: a seed fixes initial
weights, data order and held-out text, and only the recipe differs. Studies:

  recipes       every recipe against BF16 (and FP8), loss curves and the loss at the end
  ablations     NVFP4's recipe less one ingredient, SR on the forward too, one GEMM at a time
  tokens        how much more data MXFP4 needs than NVFP4 for the same loss
  chaos         how far runs part whose start differs by one ulp, or whose GEMMs are BF16
  switch        NVFP4 that goes on in BF16 when the rate decays: forward, backward, both
  accumulation  E4M3 GEMMs with float32 sums, Hopper's, and Hopper's promoted every 128
  hybrid        the same on a Mamba-2, attention and feed-forward hybrid (few seeds)
  parts         what the parts of both models feed their GEMMs, and the error of weight gradients
  proxy         MX instability in a residual MLP, layer-norm weights quantized or not
  tune          learning rates, on tuning seeds that no other study uses
  predict       a ranking by quantization noise, made on a tuning seed

docs/analysis_plan.md, written before the seeds of --full ran, says what is claimed and how it is
judged. Runs are kept one file each: stop it at any time, start it again, start it twice; finished
runs stay. When a study's runs are complete they are collected into one record, and drawn.

With --full the records go to results/full, else to results/local (--out DIR: to DIR); the runs
themselves to runs/ there. Under torchrun every rank works on the same list.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

# Run from a checkout, installed or not.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from experiments import harness, learning, runs, studies, verdicts

NAME = "loss_curves"
BUDGETS = {"quick": studies.QUICK, "default": studies.DEFAULT, "full": studies.FULL}

EXAMPLES = """
python experiments/loss_curves.py --quick                 # under two minutes on two cores
python experiments/loss_curves.py                         # under fifteen
python experiments/loss_curves.py --full --workers 2      # hours; start it again to go on
python experiments/loss_curves.py --full --study recipes tokens
python experiments/loss_curves.py --full --status         # what is done; runs nothing
python experiments/loss_curves.py --full --collect        # records of complete studies only
torchrun --nproc-per-node 4 experiments/loss_curves.py --full --device cuda
"""


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = harness.arguments(__doc__ or "", EXAMPLES, full="the budget of the paper: hours")
    parser.add_argument(
        "--study", nargs="+", choices=tuple(studies.STUDIES), default=tuple(studies.STUDIES),
        metavar="NAME", help="only these (default: all)",
    )  # fmt: skip
    runs.add_arguments(parser)
    parser.add_argument("--status", action="store_true", help="run nothing; say what is done")
    return harness.parse(parser, argv)


def budget_of(args: argparse.Namespace) -> studies.Budget:
    """The budget, with seeds shifted by 1000 for every unit of ``--seed``."""
    budget = BUDGETS[args.budget]
    return replace(budget, seeds=tuple(seed + 1000 * args.seed for seed in budget.seeds))


def points_of(
    names: Sequence[str], budget: studies.Budget, device: str
) -> dict[str, list[dict[str, Any]]]:
    """The points of each study, in the order of `studies.STUDIES`."""
    return {
        name: [{**point, "device": device} for point in make(budget)]
        for name, make in studies.STUDIES.items()
        if name in names
    }


def unique(points: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The points without repetitions, in order."""
    return list({runs.canonical(point): point for point in points}.values())


# Collecting --------------------------------------------------------------------------------------


def collect(
    study: str, points: Sequence[dict[str, Any]], folder: Path, budget: studies.Budget,
    argv: Sequence[str],
) -> dict[str, Any] | None:  # fmt: skip
    """The record of a study whose runs are all there and went well; else None."""
    return runs.collect(
        NAME, points, folder, argv, {"study": study, "budget": asdict(budget)},
        lambda points, metrics: verdicts.judge(study, points, metrics, budget),
    )  # fmt: skip


# The script --------------------------------------------------------------------------------------


def main(argv: Sequence[str] | None = None) -> int:
    """Run, collect, print, draw. Returns the exit status: 1 where runs failed or are missing."""
    args = parse(argv)
    budget = budget_of(args)
    home = harness.home(args)
    folder = home / "runs"
    chosen = points_of(args.study, budget, args.device)
    points = unique([point for some in chosen.values() for point in some])
    out = harness.console()
    if args.status:
        rows = [
            [name, *(str(n) for n in runs.tally(folder, unique(some)).values())]
            for name, some in chosen.items()
        ]
        out.print(harness.table("Runs", ["study", "ok", "failed", "missing"], rows))
        return 0
    if args.retry:
        runs.forget_failures(folder, points)
    if not args.collect:
        if args.device == "cuda":
            os.environ["CUDA_VISIBLE_DEVICES"] = own_device()
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        runs.pool(folder, points, learning.compute, NAME, args.argv, args.device, args.workers)
        if os.environ.get("RANK", "0") != "0":
            return 0  # rank 0 collects
    return report(args, chosen, folder, home, budget, out)


def own_device() -> str:
    """The GPU of this rank; all that are visible, where there are no ranks."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    rank = os.environ.get("LOCAL_RANK")
    if rank is None:
        return visible if visible is not None else "0"
    return visible.split(",")[int(rank)] if visible else rank


def report(
    args: argparse.Namespace, chosen: dict[str, list[dict[str, Any]]], folder: Path, home: Path,
    budget: studies.Budget, out: Any,
) -> int:  # fmt: skip
    """Collect, print and draw each study; the exit status."""
    from figures import loss_curves as drawing

    status = 0
    for study, points in chosen.items():
        points = unique(points)
        record = collect(study, points, folder, budget, args.argv)
        if record is None:
            runs.say_what_lacks(out, study, folder, points)
            status = 1
            continue
        path = home / f"{NAME}_{study}.json"
        harness.write_record(path, record)
        for table in verdicts.tables(study, record["metrics"]):
            out.print(table)
        drawn = drawing.draw(path, harness.drawings(args))
        out.print("\n".join(f"  {harness.shown(p)}" for p in [path, *drawn]), markup=False)
    return status


if __name__ == "__main__":
    sys.exit(main())
