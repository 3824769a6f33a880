"""`fpemu.compare`: where two formats part on the same data, and at which operation.

Both formats encode x; blocks whose scale bytes or codes differ are counted, and the first few are
taken apart: every float32 number from the amax to the quotient before the cast, side by side, with
its distance to the value where the rounding would have gone the other way.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import Any, NamedTuple

import numpy as np

from fpemu import ops
from fpemu.backends import Parts, Request
from fpemu.backends.pieces import block_steps
from fpemu.casting import value_table
from fpemu.dialects import dialect_of, to_bfloat16
from fpemu.formats import BlockFormat, Format, get_format
from fpemu.scaling import (
    NUMPY,
    Array,
    Ops,
    Scales,
    TensorScale,
    decode_mag,
    encode_rne,
    exponent_rule,
    multiplier_rule,
    no_tensor_scale,
)
from fpemu.statistics import stats

WIDTH = 80


class Step(NamedTuple):
    """One intermediate number; `boundary` is the nearest value where its rounding turns, if any."""

    label: str
    value: float
    boundary: float | None = None

    @property
    def ulps(self) -> float | None:
        """Distance to the boundary in units of the last place of the float32 value."""
        if self.boundary is None or not np.isfinite(self.value):
            return None
        step = float(np.spacing(np.float32(abs(self.value))))
        return (self.value - self.boundary) / step


@dataclass(frozen=True)
class Explained:
    """One block in both formats.

    `block` indexes the scales, `element` the first element whose codes differ (None: only the
    scales do). `steps` has for each format its numbers in the order in which they arise; `codes`
    and `scale` are what it stores.
    """

    block: tuple[int, ...]
    element: tuple[int, ...] | None
    x: float | None
    steps: tuple[tuple[Step, ...], tuple[Step, ...]]
    scales: tuple[str, str]
    codes: tuple[str, str]
    names: tuple[str, str]

    def __str__(self) -> str:
        head = f"block {_spell(self.block)}"
        if self.element is not None:
            head += f", element {_spell(self.element)}, x = {self.x!r}"
        lines = [head]
        cells = [_column(steps) for steps in self.steps]
        count = max(map(len, cells))
        for k, column in enumerate(cells):
            column += [""] * (count - len(column))
            column += [f"scale  {self.scales[k]}", f"codes  {self.codes[k]}"]
        wide = WIDTH // 2 - 1
        names = [name[:wide] for name in self.names]
        lines.append(f"  {names[0]:<{wide}}{names[1]}".rstrip())
        for a, b in zip(*cells, strict=True):
            lines.append(f"  {a:<{wide}}{b}".rstrip())
        return "\n".join(lines)


@dataclass(frozen=True)
class Comparison:
    """Two formats on the same data.

    ====================== ==========================================================
    blocks                 number of blocks (0 where the formats' blocks are unlike)
    scales_differ          share of blocks with different scale bytes; NaN scales of
                           either sign are equal
    blocks_differ          share of blocks with any different scale byte or code
    codes_differ           share of elements with different codes
    sqnr_db                SQNR of each, dB (`fpemu.stats`)
    examples               the first few differing blocks, `Explained`
    note                   why bits were not compared, where they were not
    ====================== ==========================================================
    """

    names: tuple[str, str]
    blocks: int
    scales_differ: float | None
    blocks_differ: float | None
    codes_differ: float | None
    sqnr_db: tuple[float, float]
    examples: tuple[Explained, ...]
    note: str = ""

    def __str__(self) -> str:
        lines = [f"{self.names[0]}  against  {self.names[1]}"]
        if self.note:
            lines.append(self.note)
        else:
            lines += [
                f"blocks               {self.blocks:,}",
                f"scale bytes differ   {_share(self.scales_differ)}",
                f"codes differ         {_share(self.codes_differ)} of elements",
                f"blocks that differ   {_share(self.blocks_differ)}",
            ]
        lines.append(f"SQNR dB              {self.sqnr_db[0]:.4f}  {self.sqnr_db[1]:.4f}")
        return "\n".join([*lines, *("\n" + str(example) for example in self.examples)])


def compare(
    x: Any,
    fmt_a: str | BlockFormat,
    fmt_b: str | BlockFormat,
    *,
    axis: int = -1,
    amax: float | None = None,
    examples: int = 3,
    backend: str | None = None,
) -> Comparison:
    """Count the bits in which two formats differ on `x`, and explain the first blocks that do.

    Parameters
    ----------
    x : ndarray or Tensor, any shape
        As for `fpemu.quantize`.
    fmt_a, fmt_b : str or BlockFormat
        Bits are compared where both have the same element format, scale format and block.
    axis, amax, backend
        As for `fpemu.quantize`; `amax` serves the formats that have a tensor scale.
    examples : int
        How many differing blocks are explained.

    Returns
    -------
    Comparison
        Prints as a table of at most 80 columns.

    Raises
    ------
    ValueError, TypeError
        As `fpemu.encode`.

    Examples
    --------
    >>> import numpy as np, fpemu
    >>> x = np.zeros((1, 16), np.float32)
    >>> x[0, :2] = [0.08642578125, -0.0771484375]
    >>> print(fpemu.compare(x, "nvfp4/te-ref", "nvfp4/torchao", amax=0.4609375))
    nvfp4/te-ref  against  nvfp4/torchao
    blocks               1
    scale bytes differ   100 %
    codes differ         0 % of elements
    blocks that differ   100 %
    SQNR dB              18.3486  24.8849
    <BLANKLINE>
    block 0, 0
      nvfp4/te-ref                           nvfp4/torchao
      A = amax of the block    0.086425781   A = amax of the block    0.086425781
      S                          5831.5933   T = fl(G/2688)         0.00017147973
      fl(A*fl(S*fl(1/6)))        84.000008   scale before E4M3                 84
        turns at 84, +1 ulp                    turns at 84, +0 ulp
      scale  0x6b = 88                       scale  0x6a = 80
      codes  7f00000000000000                codes  7f00000000000000
    """
    rows: list[BlockFormat] = []
    for fmt in (fmt_a, fmt_b):
        row = get_format(fmt, "compare")
        if not isinstance(row, BlockFormat):
            raise TypeError(
                f"compare: {row.name!r} is an element format; block formats are compared, such as"
                " 'nvfp4'. For element formats compare fpemu.encode(x, fmt).codes."
            )
        rows.append(row)
    a, b = rows
    amaxes = [amax if row.tensor_scaled else None for row in rows]
    quality = tuple(
        stats(x, row, axis=axis, amax=g, backend=backend).sqnr_db
        for row, g in zip(rows, amaxes, strict=True)
    )
    names = (a.name, b.name)
    if not alike(a, b):
        note = "Bits are not compared: element, scale format or block differ."
        return Comparison(names, 0, None, None, None, quality, (), note)  # type: ignore[arg-type]
    sides = [_Side(x, row, axis, g, backend) for row, g in zip(rows, amaxes, strict=True)]
    return _compared(sides, names, quality, examples)  # type: ignore[arg-type]


def alike(a: BlockFormat, b: BlockFormat) -> bool:
    """Whether codes and scales of two formats mean the same things in the same places."""
    return (a.element, a.block, a.scale) == (b.element, b.block, b.scale)


class _Side:
    """x in one format: the request on the host and what it encodes to."""

    def __init__(
        self, x: Any, fmt: BlockFormat, axis: int, amax: float | None, backend: str | None
    ) -> None:
        request, box = ops._request(
            "compare", x, fmt, "rne", None, axis, amax, None, 0, 0, 32, None
        )
        host, module = box.on_host(request, backend)
        if not host.x.ndim:
            host.x = host.x.reshape(1)
        self.request: Request = host
        self.fmt = fmt
        self.parts: Parts = module.encode(host)
        self.steps = block_steps(fmt, host.x.shape, host.axis)

    def scale_bytes(self) -> np.ndarray:
        """Scale codes with every NaN alike (float32 scales as their bits)."""
        scales = np.asarray(self.parts.scales)
        scales = scales.reshape(
            [ceil(n / step) for n, step in zip(self.request.x.shape, self.steps, strict=True)]
        )
        if scales.dtype != np.uint8:
            return scales.view(np.uint32)
        assert self.fmt.scale is not None
        nan = np.isnan(value_table(self.fmt.scale))[scales]
        return np.where(nan, np.uint8(self.fmt.scale.nan_code or 0), scales)


def _compared(
    sides: list[_Side], names: tuple[str, str], quality: tuple[float, float], examples: int
) -> Comparison:
    a, b = sides
    if a.fmt.scale is None:
        different_scale = np.zeros((), bool)
    else:
        different_scale = a.scale_bytes() != b.scale_bytes()
    different_code = np.asarray(a.parts.codes) != np.asarray(b.parts.codes)
    per_block = _any_in_block(different_code, a.steps)
    different = per_block | different_scale
    count = max(different.size, 1)
    found = []
    for where in np.argwhere(different)[:examples]:
        block = tuple(int(k) for k in where)
        found.append(_explain(sides, names, block, different_code))
    return Comparison(
        names,
        different.size,
        float(np.count_nonzero(different_scale)) / count,
        float(np.count_nonzero(different)) / count,
        float(np.count_nonzero(different_code)) / max(different_code.size, 1),
        quality,
        tuple(found),
    )


def _any_in_block(mask: np.ndarray, steps: tuple[int, ...]) -> np.ndarray:
    for axis, step in enumerate(steps):
        if step > 1:
            starts = np.arange(0, mask.shape[axis], step)
            mask = np.logical_or.reduceat(mask, starts, axis=axis) if len(starts) else mask
    return mask


# One block, step by step -------------------------------------------------------------------------


def _explain(
    sides: list[_Side], names: tuple[str, str], block: tuple[int, ...], different: np.ndarray
) -> Explained:
    a = sides[0]
    index = tuple(
        slice(k * step, min((k + 1) * step, n))
        for k, step, n in zip(block, a.steps, a.request.x.shape, strict=True)
    )
    inside = np.argwhere(different[index])
    element = None
    if len(inside):
        element = tuple(int(s.start + k) for s, k in zip(index, inside[0], strict=True))
    steps, scales, codes = [], [], []
    for side in sides:
        steps.append(tuple(trace(side.request, side.fmt, index, element)))
        scales.append(_scale_text(side, block))
        digits = -(-side.fmt.element.bits // 4)
        part = np.asarray(side.parts.codes)[index].reshape(-1)
        shown = 28 // digits
        text = "".join(f"{int(code):0{digits}x}" for code in part[:shown])
        codes.append(text + ("..." if part.size > shown else ""))
    x = None if element is None else float(_float32(a.request, element))
    return Explained(
        block, element, x, (steps[0], steps[1]), (scales[0], scales[1]), (codes[0], codes[1]), names
    )


def _scale_text(side: _Side, block: tuple[int, ...]) -> str:
    if side.fmt.scale is None:
        return "none"
    raw = np.asarray(side.parts.scales).reshape(-1)
    grid = [ceil(n / s) for n, s in zip(side.request.x.shape, side.steps, strict=True)]
    value = raw[np.ravel_multi_index(block, grid)]
    if raw.dtype != np.uint8:
        return f"{float(value):.9g}"
    return f"0x{int(value):02x} = {side.fmt.scale.values()[int(value)]:.9g}"


def _float32(request: Request, index: Any) -> np.ndarray:
    part = np.asarray(request.x[index])
    if request.kind == "bfloat16":
        return (part.astype(np.uint32) << np.uint32(16)).view(np.float32)
    with np.errstate(over="ignore"):
        return part.astype(np.float32)


def trace(
    request: Request, fmt: BlockFormat, index: tuple[slice, ...], element: tuple[int, ...] | None
) -> list[Step]:
    """The numbers that decide one block, in order, as the format's rule computes them.

    Parameters
    ----------
    request : Request
        On numpy arrays.
    fmt : BlockFormat
    index : tuple of slice
        The block.
    element : tuple of int, or None
        An element of it whose quotient is wanted.
    """
    steps: list[Step] = []
    boundaries = None if fmt.scale is None else _boundaries(fmt.scale)

    def note(label: str, value: Array) -> Array:
        steps.append(Step(label, float(np.asarray(value).reshape(-1)[0])))
        return value

    def scale(scale_format: Format, p: Array) -> tuple[Array, Array]:
        value = float(np.asarray(p).reshape(-1)[0])
        turn = _nearest(boundaries, value)
        if steps and steps[-1].value == value:
            steps[-1] = steps[-1]._replace(boundary=turn)
        else:
            steps.append(Step(f"before {scale_format.name.upper()}", value, turn))
        code = encode_rne(NUMPY, scale_format, p)
        return code, decode_mag(NUMPY, scale_format, code)

    spy = NUMPY._replace(kind=request.kind, note=note, fast_scale=scale)
    values = _float32(request, index).reshape(-1)
    with np.errstate(all="ignore"):
        x = None if element is None else np.float32(_float32(request, element))
        p = _follow(spy, fmt, request, values, x, note)
    if p is not None:
        steps.append(
            Step("element before the cast", float(p), _nearest(_boundaries(fmt.element), float(p)))
        )
    return steps


def _follow(
    spy: Ops, fmt: BlockFormat, request: Request, values: np.ndarray, x: Any, note: Any
) -> Any:
    """Run the rule on one block; the element's quotient, or None."""
    dialect = dialect_of(fmt)
    if dialect is not None and dialect.narrow:
        values = to_bfloat16(NUMPY, values)
        x = None if x is None else to_bfloat16(NUMPY, x)
    size = np.abs(values)
    skip = dialect.skip_nan if dialect is not None else exponent_rule(fmt) is None
    amax = np.nanmax(size, initial=0) if skip else size.max(initial=0)
    amax = note("A = amax of the block", np.asarray([amax], np.float32))
    if dialect is None and exponent_rule(fmt) is not None:
        return _follow_exponent(fmt, amax, x, note)
    tensor = _tensor_scale(spy, fmt, request)
    if dialect is None:
        rule = multiplier_rule(fmt)
        if rule.block is None or fmt.block is None:
            return None if x is None else np.float32(x * tensor.encode)
        return _quotient(rule.block(spy, fmt, amax, tensor), x, "multiply")
    scales = dialect.block(spy, fmt, amax, tensor)
    if dialect.four is not None:
        from fpemu.backends.numba_dialects import block_error

        four = dialect.four(spy, fmt, amax, tensor)
        e6 = note("error, amax at 6", block_error(dialect, values, scales, tensor))
        e4 = note("error, amax at 4", block_error(dialect, values, four, tensor))
        scales = four if e4 < e6 else scales
    return _quotient(scales, x, dialect.apply)


def _follow_exponent(fmt: BlockFormat, amax: np.ndarray, x: Any, note: Any) -> Any:
    """An MX rule reads the amax's bits: its mantissa against the threshold."""
    threshold = exponent_rule(fmt)
    assert threshold is not None
    bits = int(np.float64(amax[0]).view(np.uint64))
    exponent, mantissa = bits >> 52, bits & (1 << 52) - 1
    if not 0 < exponent < 0x7FF:
        return None
    note("A / 2^floor(log2 A)", 1 + mantissa / 2.0**52)
    note("goes up beyond", 1 + threshold / 2.0**52)
    shared = exponent - 1023 - fmt.element.emax + (mantissa > threshold)
    return None if x is None else float(x) / 2.0 ** min(max(shared, -127), 127)


def _tensor_scale(spy: Ops, fmt: BlockFormat, request: Request) -> TensorScale:
    dialect = dialect_of(fmt)
    if not fmt.tensor_scaled:
        if dialect is not None:
            return dialect.tensor(NUMPY, fmt, np.float32(1))
        return no_tensor_scale(NUMPY, fmt, np.float32(1))
    if request.amax is not None:
        amax = np.float32(request.amax)
    else:
        whole = np.abs(_float32(request, tuple(slice(None) for _ in request.x.shape)))
        keep_nan = dialect is not None and not dialect.skip_nan
        amax = np.float32(whole.max(initial=0) if keep_nan else np.nanmax(whole, initial=0))
    if dialect is not None:
        return dialect.tensor(spy, fmt, amax)
    return multiplier_rule(fmt).tensor(spy, fmt, amax)


def _quotient(scales: Scales, x: Any, apply: str) -> Any:
    if x is None:
        return None
    operand = np.float32(scales.multiplier[0])
    if apply == "multiply":
        return np.float32(x * operand)
    quotient = np.float32(x / operand)
    return np.float32(quotient * np.float32(3)) if apply == "divide-times-3" else quotient


def _boundaries(fmt: Format) -> np.ndarray:
    """Values half-way between neighbours of a format, where rounding to nearest turns."""
    values = fmt.values() if fmt.bits <= 16 else np.empty(0)
    values = np.unique(np.abs(values[np.isfinite(values)]))
    return (values[1:] + values[:-1]) / 2


def _nearest(boundaries: np.ndarray | None, value: float) -> float | None:
    if boundaries is None or not boundaries.size or not np.isfinite(value):
        return None
    turn = float(boundaries[np.argmin(np.abs(boundaries - abs(value)))])
    return -turn if value < 0 else turn


# Text --------------------------------------------------------------------------------------------


def _column(steps: tuple[Step, ...]) -> list[str]:
    """A line for each step, and one more where it has a boundary."""
    lines = []
    for step in steps:
        lines.append(f"{step.label:<23}{step.value:>13.8g}")
        if step.ulps is not None:
            lines.append(f"  turns at {step.boundary:.6g}, {step.ulps:+.4g} ulp")
    return lines


def _spell(index: tuple[int, ...]) -> str:
    return ", ".join(map(str, index))


def _share(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.4g} %"


__all__ = ["Comparison", "Explained", "Step", "compare"]
