"""How fast is fpemu on this GPU? Against a copy on the device, and against the casts of others.

Everything that is compared runs in one process, in turns, and the medians are compared. A cast's
speed is the bytes that it must move (input once, result once) a second, over those of
``out.copy_(x)`` on arrays of the same size in the same run: 1.0 means that rounding costs what
copying costs. Before a case is timed its bits are compared with the CPU's.

    python benchmarks/bench_gpu.py                   all of it, about three minutes
    python benchmarks/bench_gpu.py --quick           under a minute: smaller arrays, fewer cases
    python benchmarks/bench_gpu.py casts             or gemm: some sections
    python benchmarks/bench_gpu.py --json FILE       the numbers as a record

Peers, where they are installed: torch's own casts, torchao, TransformerEngine. Without a GPU it
says so and ends with exit code 3.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from dataclasses import asdict
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
from fpemu.encoded import write_atomically
from fpemu.hw import device

console = Console(highlight=False, width=80)
GOAL, BLOCK_GOAL = 0.85, 0.75  # of a copy: elementwise; mxfp4 and nvfp4
GEMM_GOAL = 1e12  # multiply-adds a second, for an H200


class Case(NamedTuple):
    """A verb, a format and an input type; `goal` is a share of a copy's speed."""

    verb: str
    fmt: str
    dtype: str = "bfloat16"
    goal: float = 0.0
    options: dict[str, Any] = {}  # noqa: RUF012 (never changed)

    @property
    def name(self) -> str:
        extra = ", stochastic" if self.options else ""
        return f"{self.verb} {self.fmt}, {self.dtype}{extra}"


SR = {"rounding": "sr", "seed": 1}
CASES = [
    *(Case("quantize", f, d, GOAL) for f in ("e4m3", "e5m2", "e2m1") for d in ("bfloat16", "float32")),
    Case("quantize", "bf16", "float32", GOAL), Case("quantize", "fp16", "float32", GOAL),
    *(Case("quantize", f, d, BLOCK_GOAL) for f in ("mxfp4", "nvfp4") for d in ("bfloat16", "float32")),
    Case("quantize", "mxfp8_e4m3", goal=BLOCK_GOAL), Case("quantize", "nvfp4/2d", goal=BLOCK_GOAL),
    Case("quantize", "fp8_block_e4m3"), Case("quantize", "fp8_tensor_e4m3"),
    Case("quantize", "e4m3", options=SR), Case("quantize", "nvfp4", options=SR),
    *(Case("encode", f, d, GOAL) for f in ("e4m3",) for d in ("bfloat16", "float32")),
    *(Case("encode", f, goal=BLOCK_GOAL) for f in ("mxfp4", "nvfp4", "mxfp8_e4m3")),
    *(Case("decode", f) for f in ("e4m3", "mxfp4", "nvfp4")),
]  # fmt: skip
QUICK = ("quantize e4m3, bfloat16", "quantize mxfp4, bfloat16", "quantize nvfp4, bfloat16",
         "encode e4m3, float32", "encode nvfp4, bfloat16", "quantize nvfp4, bfloat16, stochastic")  # fmt: skip


def moved(case: Case, x: Any, encoded: Any) -> int:
    """Bytes that a case cannot do without: read once, written once."""
    codes = 0
    if case.verb != "quantize":
        codes = encoded.codes.numel() * encoded.codes.element_size()
        if encoded.scales is not None:
            codes += encoded.scales.numel() * encoded.scales.element_size()
    values = x.numel() * x.element_size()
    return values + (values if case.verb == "quantize" else codes)


def runner(case: Case, x: Any) -> tuple[Callable[[], Any], int]:
    """What is timed, and its bytes."""
    import torch

    encoded = fpemu.encode(x, case.fmt, backend="triton", **case.options)
    size = moved(case, x, encoded)
    if case.verb == "encode":
        return lambda: fpemu.encode(x, case.fmt, backend="triton", **case.options), size
    if case.verb == "decode":
        return encoded.decode, size
    out = torch.empty_like(x)
    return lambda: fpemu.quantize(x, case.fmt, out=out, backend="triton", **case.options), size


def check(case: Case, x: Any) -> None:
    """The bits of some rows against the CPU's, before they are timed."""
    rows = x[:128].contiguous()
    host = rows.cpu()

    def bits(t: Any) -> np.ndarray:
        from fpemu.hw import gemms

        return gemms.tensor_bits(t)

    options = case.options
    if case.verb == "quantize":
        pairs = [(fpemu.quantize(rows, case.fmt, backend="triton", **options),
                  fpemu.quantize(host, case.fmt, **options))]  # fmt: skip
    else:
        on, off = (fpemu.encode(t, case.fmt, backend=b, **options)
                   for t, b in ((rows, "triton"), (host, None)))  # fmt: skip
        pairs = [(on.codes, off.codes), (on.decode(), off.decode())]
        if on.scales is not None:
            pairs.append((on.scales, off.scales))
    for got, want in pairs:
        if not np.array_equal(bits(got), bits(want)):
            raise SystemExit(f"{case.name}: the GPU's bits are not the CPU's; nothing is timed")


def in_turns(runs: dict[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """Median seconds of each run on the device's own clock; the L2 cache is overwritten between."""
    import torch

    flush = torch.empty(1 << 28, dtype=torch.uint8, device="cuda")
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for i in range(rounds + 2):  # two rounds warm up
        for name, run in runs.items():
            flush.zero_()
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            run()
            end.record()
            end.synchronize()
            if i >= 2:
                seconds[name].append(start.elapsed_time(end) / 1e3)
    return {name: statistics.median(taken) for name, taken in seconds.items()}


# Sections ----------------------------------------------------------------------------------------


def casts(args: argparse.Namespace) -> dict[str, Any]:
    import torch

    count = 1 << (26 if args.quick else 28)
    cases = [case for case in CASES if not args.quick or case.name in QUICK]
    found: dict[str, Any] = {}
    table = _table(
        f"Casts of 2^{count.bit_length() - 1} values", "case", "GB/s", "of a copy", "goal"
    )
    for dtype in ("bfloat16", "float32"):
        kind = getattr(torch, dtype)
        x = torch.randn(count // 4096, 4096, device="cuda", dtype=kind)
        out = torch.empty_like(x)
        runs: dict[str, Callable[[], Any]] = {"copy": lambda x=x, out=out: out.copy_(x)}  # type: ignore[misc]
        sizes = {"copy": 2 * x.numel() * x.element_size()}
        goals: dict[str, float] = {}
        for case in (case for case in cases if case.dtype == dtype):
            check(case, x)
            runs[case.name], sizes[case.name] = runner(case, x)
            goals[case.name] = case.goal
        for name, (run, size) in peers(x).items():
            runs[name], sizes[name] = run, size
        seconds = in_turns(runs, args.rounds)
        speed = {name: sizes[name] / taken for name, taken in seconds.items()}
        for name, bytes_a_second in speed.items():
            share, goal = bytes_a_second / speed["copy"], goals.get(name, 0)
            key = f"copy, {dtype}" if name == "copy" else name
            found[key] = {"gb_per_s": bytes_a_second / 1e9, "of_copy": share, "goal": goal}
            met = f"{goal:.2f} {'met' if share >= goal else 'missed'}" if goal else ""
            table.add_row(key, f"{bytes_a_second / 1e9:,.0f}", f"{share:.2f}", met)
        del x, out, runs
    console.print(table)
    return found


def peers(x: Any) -> dict[str, tuple[Callable[[], Any], int]]:
    """Casts of other libraries: what each reads and writes counts."""
    import torch

    values = x.numel() * x.element_size()
    kind = str(x.dtype).removeprefix("torch.")
    found: dict[str, tuple[Callable[[], Any], int]] = {
        f"torch .to(float8_e4m3fn), {kind}": (
            lambda: x.to(torch.float8_e4m3fn), values + x.numel()),
        f"torch .to(float8_e5m2), {kind}": (lambda: x.to(torch.float8_e5m2), values + x.numel()),
    }  # fmt: skip
    try:
        from torchao.prototype.mx_formats.mx_tensor import to_mx  # type: ignore[import-not-found]

        size = values + x.numel() + x.numel() // 32
        found[f"torchao to_mx mxfp8, {kind}"] = (
            lambda: to_mx(x, torch.float8_e4m3fn, 32), size)  # fmt: skip
    except ImportError:
        pass
    try:
        import transformer_engine.pytorch as te  # type: ignore[import-not-found]
        import transformer_engine_torch as tex  # type: ignore[import-not-found]

        quantizer = te.Float8BlockQuantizer(
            fp8_dtype=tex.DType.kFloat8E4M3, rowwise=True, columnwise=False, amax_epsilon=0.0,
            force_pow_2_scales=True, block_scaling_dim=1,
        )  # fmt: skip
        size = values + x.numel() + x.numel() // 128 * 4
        found[f"TE Float8BlockQuantizer 1x128, {kind}"] = (lambda: quantizer(x), size)
    except ImportError:
        pass
    return found


#: Unit and side of the square product.
GEMMS = (
    ("hopper.wgmma.e4m3", None), ("hopper.wgmma.e4m3", "cublaslt.fp8_slow"),
    ("hopper.wgmma.bf16", None), ("hopper.wgmma.fp16", None), ("hopper.wgmma.tf32", None),
    ("blackwell.tcgen05.e4m3", None), ("blackwell.tcgen05.nvfp4", None),
)  # fmt: skip


def gemm(args: argparse.Namespace) -> dict[str, Any]:
    """The emulated product: multiply-adds a second, operands on the GPU."""
    import torch

    side = 1024 if args.quick else 4096
    table = _table(f"Emulated products, {side}^3", "unit", "10^9 multiply-adds/s", "of 10^12", "ms")
    found: dict[str, Any] = {}
    for unit, recipe in GEMMS[:2] if args.quick else GEMMS:
        x, y = (torch.randn(side, side, device="cuda") for _ in range(2))
        row = fpemu.gemm.get_unit(unit)
        a: Any
        b: Any
        if row.scale is not None:
            a, b = fpemu.encode(x, "nvfp4/1level"), fpemu.encode(y, "nvfp4/1level", axis=0)
        else:
            a, b = fpemu.quantize(x, row.a), fpemu.quantize(y, row.b)

        def run(a: Any = a, b: Any = b, unit: str = unit, recipe: str | None = recipe) -> Any:
            return fpemu.matmul(a, b, unit=unit, recipe=recipe, backend="triton")

        d = run()
        if row.scale is None:  # some of the result against the CPU
            want = fpemu.matmul(a[:32].cpu(), b[:, :64].cpu(), unit=unit, recipe=recipe)
            if not torch.equal(d[:32, :64].cpu().view(torch.int32), want.view(torch.int32)):
                raise SystemExit(f"{unit}: the GPU's bits are not the CPU's; nothing is timed")
        taken = in_turns({unit: run}, max(3, args.rounds // 3))[unit]
        rate = side**3 / taken
        name = unit if recipe is None else f"{unit}, {recipe}"
        found[name] = {"multiply_adds_per_s": rate, "goal": GEMM_GOAL, "side": side}
        table.add_row(name, f"{rate / 1e9:,.0f}", f"{rate / GEMM_GOAL:.2f}", f"{taken * 1e3:.1f}")
    console.print(table)
    return found


SECTIONS = {"casts": casts, "gemm": gemm}


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, box=SIMPLE_HEAD, title_justify="left", padding=(0, 1, 0, 0))
    for i, column in enumerate(columns):
        table.add_column(column, justify="right" if i else "left")
    return table


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("sections", nargs="*", metavar="SECTION", help=", ".join(SECTIONS))
    parser.add_argument("--quick", action="store_true", help="smaller arrays, fewer cases")
    parser.add_argument("--rounds", type=int, help="turns that count (21; 7 with --quick)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers there")
    args = parser.parse_args(argv)
    args.rounds = args.rounds or (7 if args.quick else 21)
    for name in args.sections:
        if name not in SECTIONS:
            parser.error(f"unknown section {name!r}; there are {', '.join(SECTIONS)}")
    gpu = device.gpu()
    if gpu is None:
        print(f"Nothing was measured: {device.why_none()}", file=sys.stderr)
        return 3
    console.print(f"{gpu}: driver {gpu.driver}, CUDA {gpu.cuda}, PyTorch {gpu.torch},")
    console.print(f"Triton {gpu.triton}, fpemu {fpemu.__version__}\n")
    record: dict[str, Any] = {
        "gpu": asdict(gpu),
        "versions": {n: _version(n) for n in ("fpemu", "numpy", "torchao", "transformer-engine")},
        "argv": sys.argv[1:],
    }
    for name in args.sections or SECTIONS:
        record[name] = SECTIONS[name](args)
        if args.json is not None:  # after each section, should the next be cut short
            args.json.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(args.json, (json.dumps(record, indent=1) + "\n").encode())
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
