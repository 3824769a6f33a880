"""How fast is fpemu? Against a memory copy, against its peers, against its goals.

Everything that is compared runs in one process, in turns, and the medians are compared: a machine
that slows down slows everything down. The unit is ``np.copyto`` on the same arrays (one thread,
32-bit elements in and out): 1.0 means that rounding costs what copying costs. Before a case is
timed, its bits are checked: against the torch backend on 2^18 values and the oracle on 2^11.

    python benchmarks/bench_core.py                    all of it, about ten minutes
    python benchmarks/bench_core.py --quick            a minute: smaller arrays, fewer rounds
    python benchmarks/bench_core.py speed small        some sections
    python benchmarks/bench_core.py --cpfloat DIR      with CPFloat from its checkout
    python benchmarks/bench_core.py --json FILE        the numbers as a record
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # run as a script: this checkout's fpemu and benchmarks

import fpemu
from benchmarks import peers as libraries

console = Console(highlight=False)
note = Console(highlight=False, stderr=True)


class Case(NamedTuple):
    """One thing that fpemu does, and the speed it should have (a fraction of np.copyto)."""

    name: str
    fmt: str
    verb: str = "quantize"
    options: dict[str, Any] = {}  # noqa: RUF012 (never changed)
    goal: float | None = None


SR = {"rounding": "sr", "seed": 1}
CASES = [
    Case("bf16", "bf16", goal=1.3),
    Case("fp16", "fp16", goal=1.3),
    Case("e4m3", "e4m3", goal=1.3),
    Case("e5m2", "e5m2", goal=1.3),
    Case("mxfp4", "mxfp4", goal=1.0),
    Case("mxfp8_e4m3", "mxfp8_e4m3", goal=1.0),
    Case("nvfp4", "nvfp4", goal=0.9),
    Case("e4m3, stochastic", "e4m3", options=SR, goal=0.5),
    Case("encode to nvfp4", "nvfp4", verb="encode", goal=0.8),
    Case("e2m1", "e2m1"),
    Case("mxfp6_e3m2", "mxfp6_e3m2"),
    Case("mxint8", "mxint8"),
    Case("mxfp4/rceil", "mxfp4/rceil"),
    Case("nvfp4, amax given", "nvfp4", options={"amax": 6.0}),
    Case("nvfp4, stochastic", "nvfp4", options=SR),
    Case("nvfp4/2d", "nvfp4/2d"),
    Case("fp8_tensor_e4m3", "fp8_tensor_e4m3"),
    Case("fp8_block_e4m3", "fp8_block_e4m3"),
    Case("int8_tensor", "int8_tensor"),
    Case("e4m3, toward zero", "e4m3", options={"rounding": "rtz"}),
    Case("encode to e4m3", "e4m3", verb="encode"),
    Case("encode to mxfp4", "mxfp4", verb="encode"),
]

# Measuring ---------------------------------------------------------------------------------------


def in_turns(
    runs: dict[str, Callable[[], Any]], rounds: int, seldom: Iterable[str] = ()
) -> dict[str, float]:
    """Median seconds of each run; those in `seldom` take part in every third round only."""
    slow = set(seldom)
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for i in range(rounds + 1):  # the first round warms up and does not count
        for name, run in runs.items():
            if name in slow and i % 3 and i != rounds:
                continue
            start = time.perf_counter()
            run()
            taken = time.perf_counter() - start
            if i:
                seconds[name].append(taken)
        if note.is_terminal:
            note.print(f"  round {i}/{rounds}", end="\r")
    if note.is_terminal:
        note.print(" " * 20, end="\r")
    return {name: statistics.median(taken) for name, taken in seconds.items()}


def data(count: int, columns: int = 4096) -> np.ndarray:
    """float32 normal values in rows, a scale per row as activations and gradients have."""
    rng = np.random.default_rng(0)
    x = np.empty((max(1, count // columns), min(columns, count)), np.float32)
    for row in x:  # row by row: no temporary as large as x
        rng.standard_normal(dtype=np.float32, out=row)
        row *= np.float32(2.0) ** np.float32(rng.integers(-8, 8))
    return x


def runner(case: Case, x: np.ndarray, out: np.ndarray) -> Callable[[], Any]:
    if case.verb == "encode":
        return lambda: fpemu.encode(x, case.fmt, **case.options)
    return lambda: fpemu.quantize(x, case.fmt, out=out, **case.options)


def check_bits(case: Case, x: np.ndarray) -> int:
    """Check a case against the other backends; returns how many results were compared."""
    compared = 0
    for other, size in (("torch", 1 << 18), ("oracle", 1 << 11)):
        part = x[: max(1, size // x.shape[1])]
        for got, want in zip(outputs(case, part, None), outputs(case, part, other), strict=True):
            if not np.array_equal(got.view(f"u{got.itemsize}"), want.view(f"u{want.itemsize}")):
                raise SystemExit(f"{case.name}: bits differ from the {other} backend's; not timed")
            compared += got.size
    return compared


def outputs(case: Case, x: np.ndarray, backend: str | None) -> list[np.ndarray]:
    if case.verb == "encode":
        encoded = fpemu.encode(x, case.fmt, backend=backend, **case.options)
        parts = (encoded.codes, encoded.scales, encoded.tensor_scale)
        return [np.atleast_1d(np.asarray(part)) for part in parts if part is not None]
    return [fpemu.quantize(x, case.fmt, backend=backend, **case.options)]


# Printing ----------------------------------------------------------------------------------------


def table(title: str, *columns: str) -> Table:
    made = Table(title=title, title_justify="left", title_style="bold", box=SIMPLE_HEAD)
    made.show_edge, made.pad_edge, made.padding = False, False, (0, 1, 0, 0)
    for i, column in enumerate(columns):
        made.add_column(column, justify="right" if i else "left")
    return made


def verdict(value: float, goal: float | None, below: bool = False) -> tuple[str, str]:
    """The goal's column and whether it is met."""
    if goal is None:
        return "", ""
    met = value <= goal if below else value >= goal
    return f"{'<=' if below else '>='} {goal:g}", "yes" if met else "NO"


# Sections ----------------------------------------------------------------------------------------


def speed(args: argparse.Namespace) -> dict[str, Any]:
    """Throughput as a fraction of np.copyto, and against the peers in the same turns."""
    count = 1 << (20 if args.quick else 24)
    x = data(count)
    out = np.empty_like(x)
    compared = sum(check_bits(case, x) for case in CASES)
    runs: dict[str, Callable[[], Any]] = {"np.copyto": lambda: np.copyto(out, x)}
    runs |= {case.name: runner(case, x, out) for case in CASES}
    peers = [] if args.no_peers else libraries.load(x, args.cpfloat)
    others = {f"{peer.name} {fmt}": run for peer in peers for fmt, run in peer.runs.items()}
    seconds = in_turns(runs | others, args.rounds, others)
    rates = {name: count / taken for name, taken in seconds.items()}
    copy = rates["np.copyto"]

    threads = fpemu.get_num_threads()
    shown = table(
        f"Speed: 2^{count.bit_length() - 1} float32, {threads} threads, out= reused",
        "case", "M elem/s", "x np.copyto", "goal", "met",
    )  # fmt: skip
    shown.add_row("np.copyto (1 thread)", f"{copy / 1e6:,.0f}", "1.00")
    for case in CASES:
        ratio = rates[case.name] / copy
        rate = f"{rates[case.name] / 1e6:,.0f}"
        shown.add_row(case.name, rate, f"{ratio:.2f}", *verdict(ratio, case.goal))
    console.print(shown)
    console.print(
        f"bits checked first: {compared:,} results equal to the torch backend and oracle\n"
    )

    against = table(
        "Peers, in the same turns", "library", "format", "M elem/s", "fpemu is", "goal", "met"
    )
    best = {"nvfp4": 25.0, "mxfp4": 25.0}
    fastest = {
        fmt: max((n for n in others if n.endswith(f" {fmt}")), key=rates.__getitem__, default="")
        for fmt in best
    }
    for peer in peers:
        for fmt in peer.runs:
            name = f"{peer.name} {fmt}"
            times = rates[fmt] / rates[name]
            goal = best[fmt] if fastest.get(fmt) == name else None
            goal = 2.0 if name == "CPFloat e4m3" else goal
            rate = f"{rates[name] / 1e6:,.1f}"
            library = f"{peer.name} {peer.version}"
            against.add_row(library, fmt, rate, f"{times:.1f} x", *verdict(times, goal))
        if not peer.runs:
            against.add_row(peer.name, "skipped")
    if peers:
        console.print(against)
        for peer in peers:
            if peer.skipped:
                console.print(f"  {peer.name} skipped: {peer.skipped}")
        console.print()
    return {
        "elements": count,
        "threads": threads,
        "elements_per_second": rates,
        "peer_versions": {p.name: p.version for p in peers},
        "peers_skipped": {p.name: p.skipped for p in peers if p.skipped},
    }


def small(args: argparse.Namespace) -> dict[str, Any]:
    """Microseconds of a warm call on 1,024 elements."""
    import torch

    x = data(1024, 1024)
    t = torch.from_numpy(x)
    shown = table("Small tensors: 1,024 float32", "call", "us", "goal", "met")
    found = {}
    calls = 300 if args.quick else 2000
    for container, value, goal in (("numpy", x, 15.0), ("torch, no gradient", t, 30.0)):
        for fmt in ("bf16", "e4m3", "mxfp4", "nvfp4"):
            for _ in range(50):
                fpemu.quantize(value, fmt)
            taken = []
            for _ in range(calls):
                start = time.perf_counter()
                fpemu.quantize(value, fmt)
                taken.append(time.perf_counter() - start)
            us = statistics.median(taken) * 1e6
            found[f"{container} {fmt}"] = us
            shown.add_row(
                f"quantize, {container}, {fmt}", f"{us:.1f}", *verdict(us, goal, below=True)
            )
    console.print(shown, "")
    return found


def child(code: str, **environment: str) -> str:
    """What a fresh Python prints."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    if done.returncode:
        raise SystemExit(f"the child process failed:\n{done.stderr[-2000:]}")
    return done.stdout.strip()


IMPORT = """
import sys, time
start = time.perf_counter()
import fpemu
taken = time.perf_counter() - start
assert not {"torch", "numba", "triton"} & set(sys.modules), "import fpemu loads too much"
print(taken)
"""
FIRST = """
import time
import numpy as np, fpemu
x = np.ones(1024, np.float32)
start = time.perf_counter()
fpemu.quantize(x, FMT)
print(time.perf_counter() - start)
"""


def start_up(args: argparse.Namespace) -> dict[str, Any]:
    """Seconds to import, and of the first call, in a fresh process."""
    shown = table("Start-up, in a fresh process", "what", "s", "goal", "met")
    imports = statistics.median(float(child(IMPORT)) for _ in range(3 if args.quick else 7))
    shown.add_row(
        "import fpemu (no torch, no numba)", f"{imports:.2f}", *verdict(imports, 0.3, True)
    )
    found = {"import": imports}
    for fmt in ("e4m3", "nvfp4"):
        code = FIRST.replace("FMT", repr(fmt))
        with tempfile.TemporaryDirectory() as cache:
            for state, goal in (("empty", 5.0), ("warm", None)):
                taken = float(child(code, NUMBA_CACHE_DIR=cache))
                found[f"first call, {fmt}, {state} cache"] = taken
                shown.add_row(
                    f"first quantize to {fmt}, {state} cache",
                    f"{taken:.2f}",
                    *verdict(taken, goal, True),
                )
    console.print(shown, "")
    return found


def growth(args: argparse.Namespace) -> dict[str, Any]:
    """Nanoseconds per element from small to large."""
    top = 30 if args.large else 22 if args.quick else 28
    sizes = [1 << n for n in range(20, top + 1, 2)]
    formats = ("e4m3", "mxfp4", "nvfp4")
    shown = table("Growth: ns per element, out= reused", "elements", "np.copyto", *formats)
    found: dict[str, dict[str, float]] = {}
    whole = data(sizes[-1])
    target = np.empty_like(whole)
    for size in sizes:
        rows = max(1, size // whole.shape[1])
        x, out = whole[:rows], target[:rows]
        runs: dict[str, Callable[[], Any]] = {"np.copyto": lambda x=x, out=out: np.copyto(out, x)}  # type: ignore[misc]
        runs |= {fmt: runner(Case(fmt, fmt), x, out) for fmt in formats}
        seconds = in_turns(runs, 3 if size > 1 << 26 else 9)
        found[str(size)] = {name: taken / size * 1e9 for name, taken in seconds.items()}
        shown.add_row(f"2^{size.bit_length() - 1}", *(f"{found[str(size)][n]:.3f}" for n in runs))
    last, first = found[str(sizes[-1])], found[str(sizes[1])]
    ratios = (f"{last[name] / first[name]:.2f} x" for name in last)
    shown.add_row(f"last / 2^{sizes[1].bit_length() - 1}", *ratios)
    console.print(shown, "")
    return found


PEAK = """
import resource
import numpy as np, fpemu

def peak():  # MiB of this process since reset()
    try:
        lines = open("/proc/self/status").read().splitlines()
        return int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) / 1024
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024

def reset():  # where the system can: what importing and compiling took must not hide anything
    try:
        open("/proc/self/clear_refs", "w").write("5")
    except OSError:
        pass

options = OPTIONS
x = np.ones(SHAPE, np.float32)
fpemu.quantize(x[:512, :512], FMT, **options)
fpemu.quantize(x[:512, :512].copy(), FMT, **options)
fpemu.encode(x[:512, :512].copy(), FMT, **options)
out = np.ones(SHAPE, np.float32) if VERB == "out" else None
reset()
before = peak()
if VERB == "out":
    fpemu.quantize(x, FMT, out=out, **options)
    made = 0
elif VERB == "quantize":
    made = fpemu.quantize(x, FMT, **options).nbytes
else:
    e = fpemu.encode(x, FMT, **options)
    made = e.codes.nbytes + (0 if e.scales is None else e.scales.nbytes)
print(peak() - before - made / 2**20)
"""


def memory(args: argparse.Namespace) -> dict[str, Any]:
    """Peak memory beyond input and output."""
    count = 1 << (24 if args.quick else 27)
    shown = table(
        f"Peak memory beyond in- and output, {count * 4 >> 20} MiB in", "call", "MiB", "goal", "met"
    )
    found = {}
    for fmt, verb, options in (
        ("e4m3", "out", {}),
        ("e4m3", "quantize", {}),
        ("e4m3", "out", SR),
        ("nvfp4", "out", {}),
        ("nvfp4", "quantize", {}),
        ("nvfp4", "encode", {}),
        ("nvfp4", "out", SR),
        ("nvfp4/2d", "out", {}),
        ("mxfp4", "out", {"axis": 0}),
        ("fp8_tensor_e4m3", "encode", {}),
    ):
        code = PEAK.replace("FMT", repr(fmt)).replace("VERB", repr(verb))
        code = code.replace("SHAPE", repr((count // 4096, 4096))).replace("OPTIONS", repr(options))
        mib = float(child(code))
        what = {"out": "quantize, out=", "quantize": "quantize", "encode": "encode"}[verb]
        extra = "".join(f", {k}={v}" for k, v in options.items() if k != "seed")
        found[f"{what} {fmt}{extra}"] = mib
        shown.add_row(f"{what}, {fmt}{extra}", f"{mib:.1f}", *verdict(mib, 64, below=True))
    console.print(shown, "")
    return found


def layouts(args: argparse.Namespace) -> dict[str, Any]:
    """Time of other layouts and axes, relative to contiguous data blocked along the last axis."""
    side = 1 << (10 if args.quick else 12)
    big = data(4 * side * side, 2 * side)
    x = np.ascontiguousarray(big[:side, :side])
    views: dict[str, tuple[np.ndarray, int]] = {
        "contiguous": (x, -1),
        "axis=0": (x, 0),
        "transposed view": (x.T, -1),
        "transposed view, axis=0": (x.T, 0),
        "part of a larger array": (big[:side, :side], -1),
        "every second column": (big[:side, ::2], -1),
        "every second row": (big[::2, :side][:side], -1),
        "reversed": (x[::-1, ::-1], -1),
        "middle axis of three": (x.reshape(side // 32, 32, side), 1),
    }
    formats = ("e4m3", "mxfp4", "nvfp4", "nvfp4/2d")
    shown = table(
        f"Layouts: time relative to contiguous, {side} x {side} (goal: at most 2)",
        "layout",
        *formats,
    )
    runs: dict[str, Callable[[], Any]] = {}
    for name, (view, axis) in views.items():
        out = np.empty_like(view)  # keeps the layout
        for fmt in formats:
            runs[f"{name}|{fmt}"] = lambda view=view, fmt=fmt, axis=axis, out=out: fpemu.quantize(  # type: ignore[misc]
                view, fmt, axis=axis, out=out
            )
    seconds = in_turns(runs, args.rounds)
    found = {}
    for name in views:
        row = []
        for fmt in formats:
            ratio = seconds[f"{name}|{fmt}"] / seconds[f"contiguous|{fmt}"]
            found[f"{name}, {fmt}"] = ratio
            row.append(f"{ratio:.2f}" if ratio <= 2 else f"[red]{ratio:.2f}[/]")
        shown.add_row(name, *row)
    console.print(shown, "")
    return found


SECTIONS = {
    "speed": speed,
    "small": small,
    "startup": start_up,
    "growth": growth,
    "memory": memory,
    "layouts": layouts,
}


def machine() -> dict[str, Any]:
    cpu = platform.processor() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        cpu = next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        pass
    packages = {name: version(name) for name in ("numpy", "numba", "llvmlite", "torch")}
    return {
        "cpu": cpu,
        "cores": os.cpu_count(),
        "load": round(os.getloadavg()[0], 2),  # processes running in the last minute
        "python": platform.python_version(),
        "fpemu": fpemu.__version__,
        **packages,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("sections", nargs="*", metavar="SECTION", help=", ".join(SECTIONS))
    parser.add_argument("--quick", action="store_true", help="smaller arrays, fewer rounds")
    parser.add_argument("--large", action="store_true", help="growth up to 2^30 (8 GiB of memory)")
    parser.add_argument("--rounds", type=int, help="turns that count (9; 5 with --quick)")
    parser.add_argument("--threads", type=int, help="of fpemu and torch (all cores)")
    parser.add_argument("--no-peers", action="store_true", help="leave other libraries out")
    parser.add_argument("--cpfloat", metavar="DIR", help="a CPFloat checkout, built with gcc")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers there")
    args = parser.parse_args()
    args.rounds = args.rounds or (5 if args.quick else 9)
    for name in args.sections:
        if name not in SECTIONS:
            parser.error(f"unknown section {name!r}; there are {', '.join(SECTIONS)}")
    if args.threads:
        import torch

        fpemu.set_num_threads(args.threads)
        torch.set_num_threads(args.threads)

    record: dict[str, Any] = {"machine": machine(), "arguments": sys.argv[1:]}
    about = record["machine"]
    console.print(f"{about['cpu']}, {about['cores']} cores, load {about['load']}")
    if about["load"] > 0.5:
        console.print(
            "Others are computing here: np.copyto needs one core, fpemu all; wait for quiet."
        )
    console.print()
    for name in args.sections or SECTIONS:
        record[name] = SECTIONS[name](args)
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(record, indent=1) + "\n")
        console.print(f"written: {args.json}")


if __name__ == "__main__":
    main()
