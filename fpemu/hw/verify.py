"""Run the emulator and the GPU on the same inputs, count the bits that differ, write it down.

`verify` yields a `Row` per instruction, format or product; `Session` is the GPU that they run on, so
that tests can put the emulator with planted errors in its place. ``fpemu verify`` prints the rows.

A row *must* be equal where fpemu claims the bits: casts, single matrix instructions, its own Triton
kernels. What a library builds from instructions is reported, and where it differs the row names the
first other model that gives its bits.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from fnmatch import fnmatchcase
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

import fpemu
from fpemu.casting import ROUNDING_NAMES
from fpemu.cvt import FORMS, rs_words
from fpemu.dialects import dialect_of
from fpemu.encoded import write_atomically
from fpemu.errors import BackendError
from fpemu.formats import BlockFormat, Format, get_format, list_formats
from fpemu.hw import gemms, replay
from fpemu.hw.device import Gpu
from fpemu.hw.instructions import INSTRUCTIONS, ROUNDINGS, Instruction
from fpemu.selfcheck import block_values, element_values

if TYPE_CHECKING:
    import torch

PARTS = ("casts", "gemm", "quantize")  # the longest last
SCHEMA = 1
_CHUNK = 1 << 24
#: Of every chunk, what is emulated on the CPU as well.
_SAMPLE = 1 << 14
#: Odd, so that multiplying by it mixes indices without losing any.
_ODD = 0x9E3779B1


class Budget(NamedTuple):
    """How much is tried: 2**`cast_bits` float32 patterns an instruction, `values` numbers a format
    and rounding, `outputs` results an instruction and family of operands, how many library shapes,
    seconds for the quantizers (0: no limit)."""

    cast_bits: int
    values: int
    outputs: int
    shapes: int
    seconds: float


BUDGETS = {
    "quick": Budget(20, 1 << 12, 1 << 14, 1, 60),
    "default": Budget(28, 1 << 16, 1 << 20, 3, 150),
    "full": Budget(32, 1 << 20, 1 << 22, 3, 0),
}


@dataclass
class Row:
    """What one comparison gave.

    Parameters
    ----------
    part, path, name : str
        ``casts``; ``cvt``; the PTX name, say.
    inputs, different : int
        Results compared, and those whose bits differ.
    first : str
        The first difference in hex.
    must : bool
        Whether a difference is a failure.
    why : str
        Why it did not run (all of it), or what explains the difference.
    failed : bool
        Whether it broke instead of running.
    unit, recipe : str
        What replays it.
    nan : int
        Differences that are in the bits of a NaN alone.
    """

    part: str
    path: str
    name: str
    inputs: int = 0
    different: int = 0
    first: str = ""
    must: bool = True
    why: str = ""
    failed: bool = False
    unit: str = ""
    recipe: str = ""
    nan: int = 0
    seconds: float = 0.0

    @property
    def bad(self) -> bool:
        """Whether it makes the whole fail."""
        return self.must and (self.failed or self.different > 0)

    def count(self, got: np.ndarray, want: np.ndarray, where: Callable[[int], str]) -> None:
        """Add a comparison of unsigned integers; ``where(i)`` names flat input i in words."""
        self.inputs += want.size
        if got.shape != want.shape or got.dtype != want.dtype:
            self.different += want.size
            self.first = self.first or f"{got.dtype}{got.shape}, want {want.dtype}{want.shape}"
            return
        wrong = np.flatnonzero(got.ravel() != want.ravel())
        if wrong.size and not self.first:
            i = int(wrong[0])
            digits = 2 * want.dtype.itemsize
            g, w = int(got.ravel()[i]), int(want.ravel()[i])
            self.first = f"{where(i)}: 0x{g:0{digits}x}, emulator 0x{w:0{digits}x}"
        self.different += int(wrong.size)


class Session:
    """A GPU to run on.

    Parameters
    ----------
    gpu : Gpu
    device : str or torch.device
        Where its tensors are.
    show : callable
        Told the name of what runs.
    """

    def __init__(
        self, gpu: Gpu, device: Any = "cuda", show: Callable[[str], None] = lambda name: None
    ) -> None:
        self.gpu = gpu
        self.device = device
        self.show = show

    def cast(self, name: str, bits: torch.Tensor, rbits: torch.Tensor | None) -> torch.Tensor:
        """What the instruction gives."""
        from fpemu.hw import run

        return run(name, bits, rbits)

    def multiply(self, row: gemms.Gemm, x: gemms.Operands) -> np.ndarray:
        """The bits of a product."""
        return gemms.tensor_bits(row.run(row, x, self.device))

    def quantize(
        self, x: torch.Tensor, fmt: Format | BlockFormat, options: dict[str, Any]
    ) -> list[np.ndarray]:
        """Codes, scales, tensor scale, decoded and quantized values of fpemu's Triton kernels."""
        return _outputs(x.to(self.device), fmt, {**options, "backend": "triton"})

    def emulate_product(self, row: gemms.Gemm, x: gemms.Operands) -> np.ndarray:
        """The bits of the Triton emulation of a product."""
        return gemms.replay(row, x, backend="triton")


# Casts -------------------------------------------------------------------------------------------


def casts(session: Session, budget: Budget, pattern: str, seed: int) -> Iterator[Row]:
    """Every ``cvt`` that the GPU has: all 16-bit and narrower sources; float32 patterns evenly over
    all exponents and mantissas, their lowest bits random."""
    for name, row in INSTRUCTIONS.items():
        if not fnmatchcase(name, pattern):
            continue
        result = Row("casts", "cvt", name)
        if not row.runs_on(session.gpu.capability):
            result.why = f"needs {row.needs}"
            yield result
            continue
        yield timed(session, result, partial(_cast, session, row, budget, seed, result))


def _cast(session: Session, row: Instruction, budget: Budget, seed: int, result: Row) -> None:
    width = np.dtype(f"u{1 if row.result_bits <= 8 else 2 if row.result_bits <= 16 else 4}")
    for bits, words in sources(row, budget.cast_bits, seed, session.device):
        try:
            got = _integers(session.cast(row.ptx, bits, words))
        except Exception as error:
            if type(error).__name__ != "PTXASError" or float(row.since_ptx) < 9:
                raise
            result.why = f"needs PTX ISA {row.since_ptx}, which this Triton's ptxas does not know"
            result.must = False
            return
        want = _integers(emulate(row, bits, words))
        wrong = (got != want).nonzero().ravel()
        result.inputs += got.numel()
        result.different += wrong.numel()
        if wrong.numel() and not result.first:
            result.first = _first_cast(row, bits, words, got, want, int(wrong[0]))
        sample = slice(0, _SAMPLE)
        part = None if words is None else words[: _SAMPLE // row.lanes].cpu().numpy()
        again = replay(row.ptx, bits[sample].cpu().numpy(), part)
        if not np.array_equal(want[sample].cpu().numpy().view(width), again):
            result.failed = True
            result.why = "the emulator gives other bits on the GPU than on the CPU"


def _first_cast(
    row: Instruction, bits: torch.Tensor, words: torch.Tensor | None,
    got: torch.Tensor, want: torch.Tensor, i: int,
) -> str:  # fmt: skip
    digits, mask = -(-row.result_bits // 4), (1 << row.result_bits) - 1
    source = int(bits[i]) & ((1 << row.source_bits) - 1)
    text = f"0x{source:0{-(-row.source_bits // 4)}x}"
    if words is not None:
        text += f" with 0x{int(words[i // row.lanes]) & 0xFFFFFFFF:08x} in lane {i % row.lanes}"
    return f"{text}: 0x{int(got[i]) & mask:0{digits}x}, emulator 0x{int(want[i]) & mask:0{digits}x}"


def sources(
    row: Instruction, cast_bits: int, seed: int, device: Any, chunk: int = _CHUNK
) -> Iterator[tuple[torch.Tensor, torch.Tensor | None]]:
    """Chunks of flat source bits, and the random words of ``.rs``.

    A float32 source gets 2**`cast_bits` patterns: every value of the top `cast_bits` bits once, the
    rest hashed. A packed one gets all values in each lane, beside others in the next; all pairs
    where a value has at most 8 bits.
    """
    import torch

    if row.packed:
        yield _packed_sources(row, device), None
        return
    generator = torch.Generator(device=device).manual_seed(seed)
    shift = 32 - cast_bits
    for start in range(0, 1 << cast_bits, chunk):
        size = min(chunk, (1 << cast_bits) - start)
        index = torch.arange(start, start + size, dtype=torch.int64, device=device)
        low = (index * _ODD + seed >> 7) & ((1 << shift) - 1)
        bits = _int32(index << shift | low)
        words = None
        if row.random:
            words = torch.randint(
                0, 1 << 32, (size // row.lanes,), generator=generator, device=device
            )
            words[1::61], words[2::61] = 0, 0xFFFFFFFF
            single = words[3::61]
            single[:] = 1 << (torch.arange(single.numel(), device=device) % 32)
            assert row.form is not None
            words = _int32(words & FORMS[row.form].used)
        yield bits, words


def _packed_sources(row: Instruction, device: Any) -> torch.Tensor:
    """All pairs of narrow values; each 16-bit value in both lanes, beside 16 others."""
    import torch

    width = row.source_format.bits
    all_of_it = torch.arange(1 << width, dtype=torch.int64, device=device)
    if width <= 8:
        pairs = torch.cartesian_prod(all_of_it, all_of_it)
        return pairs.ravel().to(torch.uint8)
    beside = [(all_of_it * _ODD + 4099 * k) % (1 << width) for k in range(16)]
    pairs = torch.cat([torch.stack([all_of_it, other], 1) for other in beside])
    return (pairs.ravel() - ((pairs.ravel() >> 15) << 16)).to(torch.int16)


def _int32(x: torch.Tensor) -> torch.Tensor:
    """int64 holding 32-bit patterns as int32 with the same bits."""
    import torch

    return (x - ((x >> 31) << 32)).to(torch.int32)


def _integers(codes: torch.Tensor) -> torch.Tensor:
    """A result as signed integers, which torch can compare."""
    import torch

    return codes.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[codes.element_size()])


def emulate(
    row: Instruction, bits: torch.Tensor, words: torch.Tensor | None = None
) -> torch.Tensor:
    """`fpemu.hw.replay` where the bits are: the same steps on a tensor's device."""
    import torch

    element = row.destination_format
    values = _values(row, bits)
    if element.name == "e8m0":
        values = values.abs()
    random: dict[str, Any] = {}
    if row.form is not None:
        random = {"random_bits": rs_words(row.form, words), "sr_bits": FORMS[row.form].bits}
    overflow = "sat" if row.satfinite else "nonsat"
    codes = fpemu.encode(
        values, element, rounding=ROUNDINGS[row.rounding], overflow=overflow, **random
    ).codes
    codes = _integers(codes)
    if row.relu:
        sign = bits.to(torch.int64) & row.source_format.sign_bit != 0
        codes = torch.where(sign & ~values.isnan(), torch.zeros_like(codes), codes)
    if element.name == "tf32":
        low = 32 - element.bits
        nan = torch.full_like(codes, 0x7FFFFFFF)
        if row.rounding == "rna":  # written out in integers by ptxas; see `replay`
            nan = (bits & ~((1 << low) - 1)) - (row.satfinite << low)
        codes = torch.where(values.isnan(), nan, codes << low)
    return codes


def _values(row: Instruction, bits: torch.Tensor) -> torch.Tensor:
    import torch

    source = row.source_format
    if source.name == "fp32":
        return bits.view(torch.float32)
    if source.name == "fp16":
        return bits.view(torch.float16)
    if source.name == "bf16":
        return (bits.to(torch.int32) << 16).view(torch.float32)
    table = torch.from_numpy(source.values().astype(np.float32)).to(bits.device)
    return table[bits.to(torch.int64) & ((1 << source.bits) - 1)]


# Quantizers --------------------------------------------------------------------------------------


def quantizers(session: Session, budget: Budget, pattern: str, seed: int) -> Iterator[Row]:
    """fpemu's Triton kernels beside its CPU kernels: every format, rounding and input type."""
    deadline = time.perf_counter() + budget.seconds if budget.seconds else float("inf")
    formats = [get_format(name) for name in _formats(pattern)]
    _compile(session, formats, seed, deadline - budget.seconds / 3)
    for fmt in formats:
        result = Row("quantize", "triton", fmt.name)

        def compare(fmt: Any = fmt, result: Row = result) -> None:
            for rounding, kind in _points():
                if time.perf_counter() > deadline:
                    result.why = f"time is up: from {rounding} on not tried"
                    return
                _quantize(session, fmt, rounding, kind, budget, seed, result)

        yield timed(session, result, compare)


def _formats(pattern: str) -> list[str]:
    """Matching formats; dialects, which the kernels leave to others, only by name."""
    names = list_formats(pattern)
    return [n for n in names if pattern != "*" or dialect_of(get_format(n)) is None]


def _compile(session: Session, formats: list[Any], seed: int, deadline: float) -> None:
    """Run every kernel once on little, several at a time: compiling is what takes long."""
    if str(session.device) == "cpu":
        return
    session.show("compiling the quantizers")

    def once(job: tuple[Any, tuple[str, str]]) -> None:
        fmt, (rounding, kind) = job
        if time.perf_counter() < deadline:
            with suppress(Exception):  # the comparison that follows says what is wrong
                x, options = _inputs(fmt, rounding, kind, 1 << 10, seed)
                session.quantize(x, fmt, options)
                _outputs(x, fmt, options)  # the CPU's kernels are compiled, too

    jobs = [(fmt, point) for point in _points() for fmt in formats]
    if jobs:
        once(jobs[0])  # what Triton sets up once, before there are several threads
        with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
            list(pool.map(once, jobs))


def _points() -> Iterator[tuple[str, str]]:
    """Roundings and input types: the usual rounding and the stochastic one first."""
    for rounding in ("rne", "sr", *(r for r in ROUNDING_NAMES if r not in ("rne", "sr"))):
        for kind in ("float32", "bfloat16", "float16") if rounding == "rne" else ("float32",):
            yield rounding, kind


def _inputs(
    fmt: Format | BlockFormat, rounding: str, kind: str, count: int, seed: int
) -> tuple[torch.Tensor, dict[str, Any]]:
    """Hard values in a type of torch, and the options of the call."""
    import torch

    rng = np.random.default_rng([seed, len(rounding)])
    element = fmt.element if isinstance(fmt, BlockFormat) else fmt
    if isinstance(fmt, BlockFormat):
        x = block_values(count, rng)
    else:
        x = element_values(fmt, count, rng)
    if element.is_integer:
        x[np.isnan(x)] = 0  # integers refuse NaN
    options = {"rounding": rounding, "seed": seed if rounding == "sr" else None}
    return torch.from_numpy(x).to(getattr(torch, kind)), options


def _quantize(
    session: Session, fmt: Format | BlockFormat, rounding: str, kind: str,
    budget: Budget, seed: int, result: Row,
) -> None:  # fmt: skip
    tensor, options = _inputs(fmt, rounding, kind, budget.values, seed)
    want = _outputs(tensor, fmt, options)
    try:
        got = session.quantize(tensor, fmt, options)
    except BackendError as error:
        result.why, result.must = str(error), False
        return
    names = ("code", "scale", "tensor scale")[: len(want) - 2] + ("decoded", "value")
    for what, g, w in zip(names, got, want, strict=True):
        same = what in ("code", "decoded", "value")

        def where(i: int, what: str = what, same: bool = same) -> str:
            source = gemms.tensor_bits(tensor).ravel()[i] if same else i
            text = f"0x{source:0{2 * tensor.element_size()}x}" if same else f"[{i}]"
            return f"{rounding} {what} of {text}"

        result.count(g, w, where)


def _outputs(
    x: torch.Tensor, fmt: Format | BlockFormat, options: dict[str, Any]
) -> list[np.ndarray]:
    """Bits of codes, scales, tensor scale, decoded and quantized values."""
    encoded = fpemu.encode(x, fmt, **options)
    parts = [encoded.codes, encoded.scales, encoded.global_scale]
    parts = [part for part in parts if part is not None]
    parts += [encoded.decode(), fpemu.quantize(x, fmt, **options)]
    return [gemms.tensor_bits(_integers(part)) for part in parts]


# Products ----------------------------------------------------------------------------------------


def products(session: Session, budget: Budget, pattern: str, seed: int) -> Iterator[Row]:
    """Matrix instructions and libraries beside the emulator, then its Triton kernels beside the
    others."""
    found = gemms.rows(session.gpu.capability)
    for row in found:
        if fnmatchcase(row.name, pattern):
            result = Row("gemm", row.path, row.name, must=row.single, unit=row.unit)
            result.recipe = (
                row.recipe if isinstance(row.recipe, str) else getattr(row.recipe, "name", "")
            )
            yield timed(session, result, partial(_product, session, row, budget, seed, result))
    for row in {(r.unit, r.out): r for r in found if r.single}.values():
        result = Row("gemm", "emulated, triton", f"{row.unit} -> {row.out}", unit=row.unit)
        if fnmatchcase(row.name, pattern) or fnmatchcase(row.unit, pattern):
            yield timed(session, result, partial(_emulated, session, row, budget, seed, result))


def _cases(row: gemms.Gemm, budget: Budget) -> Iterator[tuple[tuple[int, int, int], int, str]]:
    """Shapes, batches and families of operands. NaN and Inf would fill a long sum's results."""
    for shape in row.shapes[: budget.shapes]:
        batch = max(1, budget.outputs // (shape[0] * shape[1])) if row.single else 1
        for family in gemms.FAMILIES:
            if family != "special" or shape[2] <= 512:
                yield shape, batch, family


def _product(session: Session, row: gemms.Gemm, budget: Budget, seed: int, result: Row) -> None:
    for shape, batch, family in _cases(row, budget):
        x = gemms.operands(row, family, shape, batch, seed)
        try:
            got = session.multiply(row, x)
        except (NotImplementedError, AttributeError, TypeError) as error:
            result.why, result.must = _sentence(error), False
            return
        want = gemms.replay(row, x)
        before = result.different
        _count_product(result, got, want, shape, family, row.out)
        if result.different > before and not row.single and not result.why:
            result.why = _explained(row, x, got, shape, family)


def _count_product(
    result: Row, got: np.ndarray, want: np.ndarray, shape: Any, family: str, out: str
) -> None:
    size = "x".join(map(str, shape))

    def where(i: int) -> str:
        at = ", ".join(map(str, np.unravel_index(i, want.shape)))
        return f"{family} {size} [{at}]"

    result.count(got, want, where)
    if got.shape == want.shape:
        nan = _is_nan(got, out) & _is_nan(want, out)
        result.nan += int(np.count_nonzero(nan & (got != want)))


def _is_nan(bits: np.ndarray, out: str) -> np.ndarray:
    fmt = get_format(out)
    assert isinstance(fmt, Format)
    mag = bits & np.array(fmt.sign_bit - 1, bits.dtype)
    if fmt.inf_code is None:
        return mag == fmt.nan_code
    return mag > fmt.inf_code


def _explained(row: gemms.Gemm, x: gemms.Operands, got: np.ndarray, shape: Any, family: str) -> str:
    """The first alternative that gives the library's bits, in words."""
    for label, changes in row.alternatives:
        try:
            other = gemms.replay(row, x, **changes)
        except ValueError:
            continue  # more splits than tiles, say
        if np.array_equal(other, got):
            size = "x".join(map(str, shape))
            return f"equal with {label} ({family} {size})"
    return ""


def _emulated(session: Session, row: gemms.Gemm, budget: Budget, seed: int, result: Row) -> None:
    for shape, batch, family in _cases(row, budget):
        x = gemms.operands(row, family, shape, batch, seed)
        try:
            got = session.emulate_product(row, x)
        except BackendError as error:
            result.why, result.must = str(error), False
            return
        _count_product(result, got, gemms.replay(row, x), shape, family, row.out)


# All of it ---------------------------------------------------------------------------------------

_RUN: dict[str, Callable[[Session, Budget, str, int], Iterator[Row]]] = {
    "casts": casts,
    "quantize": quantizers,
    "gemm": products,
}


def verify(
    session: Session, parts: tuple[str, ...] = PARTS, budget: Budget = BUDGETS["default"],
    pattern: str = "*", seed: int = 0,
) -> Iterator[Row]:  # fmt: skip
    """Compare, one row at a time.

    Parameters
    ----------
    session : Session
    parts : tuple of {"casts", "quantize", "gemm"}
    budget : Budget
    pattern : str
        Shell-style, of instructions, formats and calls.
    seed : int

    Yields
    ------
    Row
    """
    for part in parts:
        yield from _RUN[part](session, budget, pattern, seed)
        if part == "quantize":
            from fpemu.hw.peers import rows

            yield from rows(session, budget, pattern, seed)


def timed(session: Session, result: Row, work: Callable[[], None]) -> Row:
    """Run; what breaks ends this row alone."""
    session.show(result.name)
    started = time.perf_counter()
    try:
        work()
    except Exception as error:
        result.failed = True
        result.why = _sentence(error)
    result.seconds = round(time.perf_counter() - started, 2)
    return result


def _sentence(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"[:300]


# Printing ----------------------------------------------------------------------------------------

WIDTH = 80
HEADING = f"{'':<54} {'inputs':>13} {'different':>11}"


def lines(row: Row) -> Iterator[str]:
    """A row as text of at most 80 columns: name, inputs tried, bits different; then what is to say
    about it."""
    if row.inputs:
        numbers = f"{row.inputs:>13,} {row.different:>11,}"
    else:
        numbers = f"{'failed' if row.failed else 'not run':>25}"
    name = [row.name] if len(row.name) <= 52 else textwrap.wrap(row.name, 52)
    yield from (f"  {part}" for part in name[:-1])
    yield f"  {name[-1]:<52} {numbers}"
    nan = f"; {row.nan:,} in the bits of a NaN alone" if row.nan else ""
    notes = [f"first: {row.first}{nan}"] if row.first else []
    notes += [row.why] if row.why else []
    for note in notes:
        yield from textwrap.wrap(note, WIDTH, initial_indent="    ", subsequent_indent="      ")


# What would run ----------------------------------------------------------------------------------


def plan(parts: tuple[str, ...], pattern: str = "*") -> Iterator[str]:
    """Lines that say what `verify` would run, and what each instruction needs."""
    if "casts" in parts:
        by_need: dict[str, list[str]] = {}
        for name, row in INSTRUCTIONS.items():
            if fnmatchcase(name, pattern):
                by_need.setdefault(row.needs, []).append(name)
        for needs, names in by_need.items():
            yield f"cvt: {needs}"
            yield from (f"  {name}" for name in names)
    if "quantize" in parts:
        names = _formats(pattern)
        yield "Triton quantizers beside the CPU's, every rounding: any GPU that Triton has"
        yield from _wrapped(names)
    if "gemm" in parts:
        for capability in ((9, 0), (10, 0)):
            rows = [r for r in gemms.rows(capability) if fnmatchcase(r.name, pattern)]
            yield f"matrix products: compute capability {capability[0]}.{capability[1]}"
            yield from (f"  {row.name}" for row in rows)


def _wrapped(names: list[str], width: int = 78) -> Iterator[str]:
    line = ""
    for name in names:
        if line and len(line) + len(name) + 1 > width:
            yield f"  {line}"
            line = ""
        line = f"{line} {name}".strip()
    if line:
        yield f"  {line}"


# The record --------------------------------------------------------------------------------------


@dataclass
class Report:
    """All rows of a run, and how it came about."""

    gpu: Gpu
    parts: tuple[str, ...]
    budget: Budget
    pattern: str = "*"
    seed: int = 0
    rows: list[Row] = field(default_factory=list)
    complete: bool = False
    started: float = field(default_factory=time.time)

    @property
    def bad(self) -> list[Row]:
        return [row for row in self.rows if row.bad]

    @property
    def compared(self) -> list[Row]:
        return [row for row in self.rows if row.inputs]

    def as_dict(self) -> dict[str, Any]:
        when = datetime.fromtimestamp(self.started, timezone.utc)
        return {
            "schema": SCHEMA,
            "status": "ok" if self.complete and not self.bad else "differs" if self.bad else "part",
            "date": when.date().isoformat(),
            "seconds": round(time.time() - self.started, 1),
            "gpu": asdict(self.gpu),
            "git": _git(),
            "versions": {"fpemu": fpemu.__version__, "python": platform.python_version(),
                         "numpy": np.__version__},
            "point": {"parts": list(self.parts), "pattern": self.pattern, "seed": self.seed,
                      **self.budget._asdict()},
            "argv": sys.argv[1:],
            "rows": [{k: v for k, v in asdict(row).items() if v not in ("", False, 0.0) or k in
                      ("inputs", "different")} for row in self.rows],
        }  # fmt: skip

    def write(self, path: Path) -> None:
        """One row a line; the file appears whole or not at all."""
        data = self.as_dict()
        rows = ",\n  ".join(json.dumps(row) for row in data.pop("rows"))
        head = ",\n ".join(f"{json.dumps(k)}: {json.dumps(v)}" for k, v in data.items())
        text = "{\n " + head + f',\n "rows": [\n  {rows}\n ]\n}}\n'
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, text.encode())

    def default_path(self) -> Path:
        """``results/hardware/<gpu>-<date>.json`` in the checkout, or from here."""
        root = _checkout() or Path.cwd()
        name = self.gpu.name.lower().replace("nvidia ", "").replace(" ", "-")
        date = datetime.fromtimestamp(self.started, timezone.utc).date().isoformat()
        return root / "results" / "hardware" / f"{name}-{date}.json"


def _checkout() -> Path | None:
    """The folder of fpemu's repository, where it runs from one."""
    root = Path(__file__).resolve().parents[2]
    return root if (root / "pyproject.toml").exists() else None


@lru_cache(maxsize=1)
def _git() -> dict[str, Any]:
    """Commit, and whether the code differs from it; None outside a checkout."""
    root = _checkout()

    def git(*words: str) -> str | None:
        try:
            done = subprocess.run(
                ["git", "-C", os.fspath(root or "."), *words],
                capture_output=True, text=True, timeout=30,
            )  # fmt: skip
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    if root is None:
        return {"commit": None, "dirty": None}
    changed = git("status", "--porcelain", "--", ".", ":!results")
    return {"commit": git("rev-parse", "HEAD"), "dirty": None if changed is None else changed != ""}
