"""How fast does fpemu compute as tensor cores do? In multiply-adds a second, beside its peer.

Every unit multiplies the same two normal matrices, cast to its format; splitting operands and
making the result are included. Rounds go in turns through all cases, and medians are reported.
Before a case is timed, some of its outputs are compared with the exact oracle, bit for bit.

    python benchmarks/bench_gemm.py                  512 x 512 x 2048, about a minute
    python benchmarks/bench_gemm.py --quick          256 x 256 x 1024
    python benchmarks/bench_gemm.py --units 'hopper.*'
    python benchmarks/bench_gemm.py --json FILE      the numbers as a record

The peer is mmaemu (FP8 with per-tensor scales); where it is not installed it is left out.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # run as a script: this checkout's fpemu

import fpemu
from fpemu.gemm import get_unit, matmul

console = Console(highlight=False)
note = Console(highlight=False, stderr=True)
PEER = "mmaemu, hopper FP8"


class Case(NamedTuple):
    """A unit, the block format of its operands (None: values), and the speed it should have."""

    unit: str
    fmt: str | None = None
    goal: float = 1e9
    recipe: str | None = None

    @property
    def name(self) -> str:
        return self.unit if self.recipe is None else f"{self.unit}, {self.recipe}"


CASES = [
    Case("hopper.wgmma.e4m3", goal=3e9),
    Case("hopper.wgmma.e4m3", goal=3e9, recipe="cublaslt.fp8_slow"),
    Case("hopper.wgmma.e5m2", goal=3e9),
    Case("hopper.wgmma.fp16"),
    Case("hopper.wgmma.bf16"),
    Case("hopper.wgmma.tf32"),
    Case("ampere.hmma.fp16"),
    Case("volta.hmma.fp16"),
    Case("ada.qmma.e4m3"),
    Case("blackwell.mma_sync.e4m3"),
    Case("blackwell.tcgen05.e4m3"),
    Case("blackwell.tcgen05.e2m3"),
    Case("blackwell.tcgen05.mxfp8_e4m3", "mxfp8_e4m3"),
    Case("blackwell.tcgen05.mxfp4", "mxfp4", goal=4e9),
    Case("blackwell.tcgen05.nvfp4", "nvfp4", goal=4e9),
    Case("fp32.sequential", goal=0),
    Case("fp32.fma", goal=0),
    Case("fp32.pairwise", goal=0),
    Case("exact", goal=0),
]


def operands(case: Case, x: np.ndarray, y: np.ndarray) -> tuple[Any, Any]:
    """The matrices in the unit's formats (bf16 values for the references)."""
    unit = get_unit(case.unit)
    if case.fmt is not None:
        return fpemu.encode(x, case.fmt), fpemu.encode(y, case.fmt, axis=0)
    formats = ("bf16", "bf16") if unit.is_reference else (unit.a, unit.b)
    return fpemu.quantize(x, formats[0]), fpemu.quantize(y, formats[1])


def check(case: Case, a: Any, b: Any, d: np.ndarray) -> None:
    """Two outputs against the oracle."""
    if case.recipe is not None or case.fmt == "nvfp4":
        return  # an epilogue on top of a unit that another case checks
    for i, j in ((0, 0), (d.shape[0] - 1, d.shape[1] - 1)):
        row, column = (slice(i, i + 1), slice(None)), (slice(None), slice(j, j + 1))
        if case.fmt is None:
            want = matmul(a[row], b[column], unit=case.unit, backend="oracle")
        else:
            parts = (
                fpemu.Encoded(e.codes[at], e.scales[at], None, e.format, e.axis, e.dtype)
                for e, at in ((a, row), (b, column))
            )
            want = matmul(*parts, unit=case.unit, backend="oracle")
        if want.view(np.uint32)[0, 0] != d.view(np.uint32)[i, j]:
            raise SystemExit(f"{case.name}: output ({i}, {j}) differs from the oracle's")


def peer(x: np.ndarray, y: np.ndarray, expected: np.ndarray) -> Callable[[], Any] | str:
    """mmaemu's Hopper FP8 accumulation of the same operands, or why it is left out."""
    try:
        import mmaemu  # type: ignore[import-not-found]
    except ImportError:
        return "mmaemu is not installed (pip install mmaemu)"
    import torch

    a = torch.from_numpy(fpemu.quantize(x, "e4m3")).to(torch.float8_e4m3fn)
    columns = np.ascontiguousarray(fpemu.quantize(y, "e4m3").T)  # [N, K], as mmaemu wants it
    b = torch.from_numpy(columns).to(torch.float8_e4m3fn)

    def run() -> Any:
        return mmaemu.accumulate(a, b, use_fast_accum=True, profile="hopper", splitk=1)

    rows = mmaemu.accumulate(a[:16], b, use_fast_accum=True, profile="hopper", splitk=1)
    if not np.array_equal(np.asarray(rows).view(np.uint32), expected[:16].view(np.uint32)):
        raise SystemExit("mmaemu and fpemu give different bits for Hopper FP8")
    return run


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="256 x 256 x 1024, fewer rounds")
    parser.add_argument("--units", default="*", help="shell-style pattern (default: all)")
    parser.add_argument("--rounds", type=int, default=None, help="default 9, --quick 3")
    parser.add_argument("--json", type=Path, default=None, help="write the numbers to this file")
    args = parser.parse_args(argv)
    m, n, k = (256, 256, 1024) if args.quick else (512, 512, 2048)
    rounds = args.rounds or (3 if args.quick else 9)

    rng = np.random.default_rng(0)
    x = rng.standard_normal((m, k)).astype(np.float32)
    y = rng.standard_normal((k, n)).astype(np.float32)
    runs: dict[str, Callable[[], Any]] = {}
    chosen = [case for case in CASES if fnmatch.fnmatchcase(case.unit, args.units)]
    if not chosen:
        raise SystemExit(
            f"--units {args.units!r} matches none of {', '.join(c.unit for c in CASES)}"
        )
    expected = None
    for case in chosen:
        a, b = operands(case, x, y)
        runs[case.name] = lambda case=case, a=a, b=b: matmul(
            a, b, unit=case.unit, recipe=case.recipe
        )  # type: ignore[misc]
        d = runs[case.name]()
        check(case, a, b, d)
        expected = d if case.name == "hopper.wgmma.e4m3" else expected
    skipped = "the Hopper FP8 unit was not chosen"
    if expected is not None:
        other = peer(x, y, expected)
        if callable(other):
            runs[PEER] = other
        else:
            skipped = other

    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            if name == PEER and times[name]:
                continue  # once is enough of a minute
            start = time.perf_counter()
            run()
            times[name].append(time.perf_counter() - start)
    rate = {name: m * n * k / statistics.median(t) for name, t in times.items()}

    table = Table(box=SIMPLE_HEAD, title=f"{m} x {n} x {k}, {fpemu.get_num_threads()} threads")
    for column in ("unit", "10^9 multiply-adds/s", "goal", "ms"):
        table.add_column(column, justify="left" if column == "unit" else "right")
    goals = {case.name: case.goal for case in chosen}
    for name, r in rate.items():
        goal = goals.get(name, 0)
        shown = (
            "" if not goal else f"{goal / 1e9:g} " + ("met" if r >= goal else "[bold red]missed[/]")
        )
        table.add_row(name, f"{r / 1e9:.2f}", shown, f"{statistics.median(times[name]) * 1e3:.1f}")
    console.print(table)
    if PEER in rate:
        console.print(
            f"Hopper FP8: {rate['hopper.wgmma.e4m3'] / rate[PEER]:.0f} times mmaemu (goal: 30)"
        )
    else:
        note.print(f"peer skipped: {skipped}")
    if args.json is not None:
        record = {
            "shape": [m, n, k], "threads": fpemu.get_num_threads(), "cpu": platform.processor() or platform.machine(),
            "versions": {name: _version(name) for name in ("fpemu", "numpy", "numba", "mmaemu")},
            "multiply_adds_per_second": rate, "goals": goals,
        }  # fmt: skip
        args.json.write_text(json.dumps(record, indent=1) + "\n")


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


if __name__ == "__main__":
    main()
