"""What does rotating cost? Hadamard transforms alone and fused, against plain quantization.

Tokens-by-features matrices, along the tokens (axis 0) and along the features (axis 1), one process,
in turns, one thread unless told otherwise. The unit is the time of plain `fpemu.quantize` with the
same format and axis.

    python benchmarks/bench_hadamard.py
    python benchmarks/bench_hadamard.py --quick --threads 2
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # run as a script: this checkout's fpemu

import fpemu
from fpemu.rotation import quantize_rotated

SHAPES = ((2048, 256), (2048, 1024), (4096, 4096))
CASES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("nvfp4", {}),
    ("nvfp4", {"rounding": "sr", "seed": 1}),
    ("mxfp4", {}),
)


def best(runs: dict[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """Fastest of `rounds` for each, in turns; the first round warms up."""
    seconds = {name: float("inf") for name in runs}
    for i in range(rounds + 1):
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            if i:
                seconds[name] = min(seconds[name], time.perf_counter() - start)
    return seconds


def row(
    shape: tuple[int, int], fmt: str, options: dict[str, Any], axis: int, rounds: int
) -> list[str]:
    x = np.random.default_rng(0).standard_normal(shape, np.float32)

    def two_steps() -> np.ndarray:
        return fpemu.quantize(fpemu.hadamard(x, signs="te", axis=axis), fmt, axis=axis, **options)

    # Each makes its result anew: the pages of a large one cost as much as the arithmetic.
    runs: dict[str, Callable[[], Any]] = {
        "plain": lambda: fpemu.quantize(x, fmt, axis=axis, **options),
        "hadamard": lambda: fpemu.hadamard(x, signs="te", axis=axis),
        "two steps": two_steps,
        "fused": lambda: quantize_rotated(x, fmt, signs="te", axis=axis, **options),
    }
    if not np.array_equal(runs["fused"]().view(np.uint32), two_steps().view(np.uint32)):
        raise SystemExit(f"{fmt}, axis {axis}: the fused bits differ; not timed")
    seconds = best(runs, rounds)
    name = fmt + (" sr" if options else "")
    times = [f"{1e3 * seconds[n]:.2f}" for n in runs]
    return [f"{shape[0]}x{shape[1]}", name, str(axis), *times,
            f"{seconds['fused'] / seconds['plain']:.2f}"]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--quick", action="store_true", help="the smaller shapes, fewer rounds")
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    fpemu.set_num_threads(arguments.threads)
    heads = ("format", "axis", "plain ms", "hadamard", "two steps", "fused", "ratio")
    table = Table("shape", *heads, box=box.SIMPLE_HEAD)
    for shape in SHAPES[: 2 if arguments.quick else 3]:
        rounds = 15 if shape == SHAPES[2] else 60
        for fmt, options in CASES:
            for axis in (0, 1):
                table.add_row(
                    *row(shape, fmt, options, axis, rounds // (3 if arguments.quick else 1))
                )
    Console().print(table)


if __name__ == "__main__":
    main()
