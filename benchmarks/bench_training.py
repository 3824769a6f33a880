"""What does a training step cost in each recipe, and where does the time go?

A GPT over bytes (4 layers, width 256, batch 8 of 256 tokens) trains on random bytes, AdamW
included. The recipes take their steps in turns in one process, and each step is compared with the
float32 step of the same turn: a machine that slows down slows all of them down. Peak memory is
measured in a process of its own per recipe, above what importing takes (on Linux).

    python benchmarks/bench_training.py                        every recipe, some minutes
    python benchmarks/bench_training.py --quick                few rounds, no memory
    python benchmarks/bench_training.py nvfp4 mxfp8            some recipes
    python benchmarks/bench_training.py --json FILE            the numbers as a record
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # run as a script: this checkout's fpemu and benchmarks

from experiments.model import GPT, Shape, Training, next_byte_loss, optimizer  # before torch: OMP

# isort: split

import torch
from rich.console import Console
from rich.progress import track

import fpemu
from benchmarks.bench_core import table
from fpemu.nn import layer
from fpemu.recipes import RECIPES

console = Console(highlight=False, width=80)
SHAPE = Shape(width=256, layers=4, heads=4, context=256)
BATCH = 8
#: Goals: times the float32 step.
GOALS = {"nvfp4": 1.6, "fp8_delayed": 1.4, "fp8_current": 1.4, "fp8_block": 1.4, "mxfp8": 1.4}


def make_step(recipe: str, keep: Any) -> Callable[[], None]:
    """One training step of a fresh model; "torch" is the model with plain `nn.Linear` layers."""
    torch.manual_seed(0)
    model = GPT(SHAPE, torch.Generator().manual_seed(0))
    if recipe != "torch":
        fpemu.nn.convert(model, recipe, keep=keep, verbose=False)
    adamw = optimizer(model, Training())
    tokens = torch.randint(0, 256, (BATCH, SHAPE.context + 1))

    def step() -> None:
        next_byte_loss(model, tokens[:, :-1], tokens[:, 1:]).backward()
        adamw.step()
        adamw.zero_grad(set_to_none=True)

    return step


# Time by phase -----------------------------------------------------------------------------------

_spent: dict[str, float] = defaultdict(float)


@contextmanager
def phases() -> Iterator[dict[str, float]]:
    """Seconds in the layers' `cast` and `multiply`, while this lasts."""

    def timed(phase: str, function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                _spent[phase] += time.perf_counter() - start

        return call

    _spent.clear()
    cast, multiply = layer.cast, layer.multiply
    layer.cast, layer.multiply = timed("quantize", cast), timed("gemm", multiply)
    try:
        yield _spent
    finally:
        layer.cast, layer.multiply = cast, multiply


def measure(recipes: list[str], rounds: int, keep: Any) -> list[dict[str, Any]]:
    """Seconds of a step, times the float32 step, and the share of each phase."""
    steps = {name: make_step(name, keep) for name in ("torch", *recipes)}
    for step in steps.values():
        step()  # compiles kernels, fills caches
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    split: dict[str, list[dict[str, float]]] = {name: [] for name in steps}
    for _ in track(range(rounds), "rounds", console=Console(stderr=True), transient=True):
        for name, step in steps.items():
            with phases() as spent:
                start = time.perf_counter()
                step()
                seconds[name].append(time.perf_counter() - start)
            split[name].append(dict(spent))
    records = []
    for name, taken in seconds.items():
        ratio = statistics.median(
            t / reference for t, reference in zip(taken, seconds["torch"], strict=True)
        )
        median = statistics.median(taken)
        record: dict[str, Any] = {"recipe": name, "seconds": median, "ratio": ratio}
        record["tokens_per_s"] = BATCH * SHAPE.context / median
        for phase in ("quantize", "gemm"):
            record[phase] = statistics.median(s.get(phase, 0.0) for s in split[name])
        record["rest"] = median - record["quantize"] - record["gemm"]
        records.append(record)
    return records


def peak_memory(recipe: str, keep: Any) -> float:
    """MB that two steps take at their peak, in a process of their own."""
    command = [
        sys.executable,
        __file__,
        "--peak",
        recipe,
        "--threads",
        str(torch.get_num_threads()),
    ]
    command += ["--keep-none"] if keep == () else []
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return float(done.stdout)


def print_peak(recipe: str, keep: Any) -> None:
    fpemu.quantize(torch.ones(64, 64), "nvfp4")  # loads the kernels
    before = resident("VmRSS")
    step = make_step(recipe, keep)
    step(), step()
    print(resident("VmHWM") - before)


def resident(field: str) -> float:
    """MB of this process now ("VmRSS") or at most so far ("VmHWM"); Linux has them."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) / 1024


# The script --------------------------------------------------------------------------------------


def show(records: list[dict[str, Any]]) -> None:
    made = table("A training step", "recipe", "ms", "x fp32", "goal", "tokens/s", "quantize", "GEMM", "rest", "peak MB")  # fmt: skip
    for r in records:
        goal = GOALS.get(r["recipe"])
        layers = r["quantize"] + r["gemm"] > 0
        made.add_row(
            r["recipe"], f"{1e3 * r['seconds']:.0f}", f"{r['ratio']:.2f}",
            f"{goal:.1f}" if goal else "", f"{r['tokens_per_s']:.0f}",
            f"{1e3 * r['quantize']:.0f}" if layers else "", f"{1e3 * r['gemm']:.0f}" if layers else "",
            f"{1e3 * r['rest']:.0f}" if layers else "",
            f"{r['peak_mb']:.0f}" if "peak_mb" in r else "",
        )  # fmt: skip
    console.print(made)
    console.print(
        f"GPT {SHAPE.layers} layers, width {SHAPE.width}, batch {BATCH} x {SHAPE.context} tokens,"
        f" {torch.get_num_threads()} threads, torch {torch.__version__}. quantize, GEMM: ms in the"
        " linear layers; rest: attention, norms, AdamW."
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("recipes", nargs="*", help="names of fpemu.recipes.RECIPES (default: all)")
    parser.add_argument("--quick", action="store_true", help="3 rounds, no memory")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--keep-none", action="store_true", help="quantize every linear layer")
    parser.add_argument("--json", type=Path, help="write the numbers there")
    parser.add_argument("--peak", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    fpemu.set_num_threads(arguments.threads)
    keep = () if arguments.keep_none else None
    if arguments.peak:
        print_peak(arguments.peak, keep)
        return
    recipes = arguments.recipes or list(RECIPES)
    records = measure(recipes, 3 if arguments.quick else arguments.rounds, keep)
    if not arguments.quick and sys.platform == "linux":
        for record in records:
            record["peak_mb"] = peak_memory(record["recipe"], keep)
    show(records)
    if arguments.json:
        partial = arguments.json.with_suffix(".partial")
        partial.write_text(json.dumps(records, indent=1) + "\n")
        partial.rename(arguments.json)


if __name__ == "__main__":
    main()
