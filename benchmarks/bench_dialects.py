"""How fast are the dialects? Each against `nvfp4`, in turns in one process.

python benchmarks/bench_dialects.py               every NVFP4 and MXFP4 dialect, minutes
python benchmarks/bench_dialects.py 'nvfp4/t*'    some
python benchmarks/bench_dialects.py --quick       smaller arrays
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # run as a script: this checkout's fpemu

import fpemu
from fpemu.dialects import dialect_of
from fpemu.formats import TABLE

#: Times of `nvfp4` that a dialect may take: two candidates are searched, or one rule applied.
GOAL, GOAL_OF_TWO = 3.0, 6.0


def ratio(ours: Callable[[], Any], unit: Callable[[], Any], rounds: int) -> float:
    """Median time of `ours` over that of `unit`, measured in turns after one call each."""
    times: tuple[list[float], list[float]] = ([], [])
    for k in range(rounds + 1):
        for function, kept in zip((ours, unit), times, strict=True):
            start = time.perf_counter()
            function()
            if k:
                kept.append(time.perf_counter() - start)
    return statistics.median(times[0]) / statistics.median(times[1])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("pattern", nargs="?", help="such as 'mxfp8*/*'")
    parser.add_argument("--quick", action="store_true", help="smaller arrays, fewer rounds")
    args = parser.parse_args()
    patterns = [args.pattern] if args.pattern else ["nvfp4/*", "mxfp4/*"]
    names = [n for p in patterns for n in fpemu.list_formats(p) if dialect_of(TABLE[n]) is not None]
    if not names:
        sys.exit(f"bench_dialects: no dialect matches {args.pattern!r}; try 'nvfp4/*'.")
    rows, rounds = (1024, 5) if args.quick else (4096, 9)
    x = np.random.default_rng(0).standard_normal((rows, 4096)).astype(np.float32)
    out = np.empty_like(x)
    print(f"{x.size:,} float32 values; times of nvfp4 (median of {rounds} rounds, in turns)")
    print(f"{'dialect':<36}{'quantize':>10}{'encode':>10}{'goal':>8}")
    missed = 0
    warm = partial(fpemu.quantize, x, "nvfp4", out=out)
    ratio(warm, warm, rounds)  # what is measured first in a process is measured slow
    for name in names:
        dialect = dialect_of(TABLE[name])
        goal = GOAL if dialect is None or dialect.four is None else GOAL_OF_TWO
        fill = partial(fpemu.quantize, x, out=out)
        quantize = ratio(partial(fill, fmt=name), partial(fill, fmt="nvfp4"), rounds)
        code = partial(fpemu.encode, x)
        encode = ratio(partial(code, fmt=name), partial(code, fmt="nvfp4"), rounds)
        late = max(quantize, encode) > goal
        missed += late
        print(f"{name:<36}{quantize:>10.2f}{encode:>10.2f}{goal:>8.0f}{'  missed' if late else ''}")
    print(f"{len(names) - missed} of {len(names)} within their goal")


if __name__ == "__main__":
    main()
