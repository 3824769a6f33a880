"""Dialects on the CPU: pieces of whole blocks through reduce, rule, scaling and cast.

A piece stays in the cache from one step to the next. The rules are numpy array operations on block
amaxes (`fpemu.dialects`); everything that touches elements is a compiled loop.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from math import ceil, prod
from typing import Any, NamedTuple

import numpy as np

from fpemu.backends import NARROW_KINDS, Parts, Request, dialect_loops, loops, scales_shape
from fpemu.backends.dialect_loops import RUN
from fpemu.backends.kernels import bias_params, clamp_params, fits_fast, tie_params
from fpemu.backends.pieces import block_steps, pieces
from fpemu.backends.threads import parallel, split
from fpemu.casting import value_table
from fpemu.dialects import (
    DECODE,
    ERRORS,
    KIND_BITS,
    Dialect,
    dialect_of,
    element_nan,
    log2_slack,
    zero_sign,
)
from fpemu.formats import E4M3, E8M0, BlockFormat, Format
from fpemu.rng import signed64
from fpemu.scaling import NUMPY, Array, Ops, Scales, TensorScale, decode_mag, encode_rne

PIECE = 1 << 18  # elements: the larger, the less threads wait for each other's Python
_NO_BITS = np.empty(0, np.uint32)
SHARE = 1 << 16  # blocks whose scales a thread works out at a time
_ZERO = {
    "keep": dialect_loops.ZERO_KEEP,
    "never": dialect_loops.ZERO_KEEP,  # seen to after the cast
    "plus": dialect_loops.ZERO_PLUS,
    "minus": dialect_loops.ZERO_MINUS,
}
_HOW = {
    "multiply": dialect_loops.MULTIPLY,
    "divide": dialect_loops.DIVIDE,
    "divide-times-3": dialect_loops.DIVIDE_TIMES_3,
    "microxcaling": dialect_loops.DIVIDE,
}
_MEASURE = {"mae": dialect_loops.MAE, "mse": dialect_loops.MSE, "max": dialect_loops.MAX}
#: Exponents whose entries of `log2_slack` stand for all that an element can have.
_REACH = (1, -1, -2, -4, -8, -16)


def _fast_scale(fmt: Format, p: Array) -> tuple[Array, Array]:
    if fmt != E4M3 or p.ndim != 1:
        code = encode_rne(NUMPY, fmt, p)
        return code, decode_mag(NUMPY, fmt, code)
    code, value = np.empty(p.shape, np.int32), np.empty(p.shape, np.float32)
    dialect_loops.scale_e4m3(p, code, value)
    return code, value


@lru_cache(maxsize=16)
def _numpy_ops(kind: str) -> Ops:
    return NUMPY._replace(kind=kind, fast_scale=_fast_scale)


class Rule(NamedTuple):
    """What depends on the kind of call only: the arguments of `dialect_loops.cast_runs`."""

    dialect: Dialect
    ops: Ops
    params: tuple[int, ...]
    safe_params: tuple[int, ...]
    how: int
    zero: int
    nan: tuple[np.float32, np.float32, bool, bool, bool, np.float32]
    own: tuple[Any, ...] | None
    nan_code: int
    bit: int
    flush: np.float32 | None  # what rounds to zero, where zeros are +0
    minus: Any  # -0 as a code or value, where no result may have it


@lru_cache(maxsize=512)
def _rule(
    fmt: BlockFormat, kind: str, rounding: str, overflow: str, sr_bits: int, values: bool
) -> Rule:
    dialect, element = dialect_of(fmt), fmt.element
    assert dialect is not None
    safe = bias_params(element, rounding, overflow, values, sr_bits)
    if dialect.rounds_itself:
        rounding = "rne"  # of values that are on the grid already
    nan, zero = element_nan(dialect, element, kind), zero_sign(dialect, element)
    # To nearest even, what is at most half the smallest value rounds to zero.
    flushes = zero == "never" and rounding == "rne"
    own = _microxcaling_rule(fmt, kind) if dialect.rounds_itself else None
    return Rule(
        dialect,
        _numpy_ops(kind),
        _fast_params(element, rounding, overflow, values) or safe,
        safe,
        _HOW[dialect.apply],
        _ZERO[zero],
        (
            np.float32(0.0 if nan.value is None else nan.value), np.float32(nan.made_value),
            nan.value is not None, nan.signed, dialect.apply != "multiply",
            np.float32(np.inf if nan.inf is None else nan.inf),
        ),
        own,
        element.nan_code or 0,
        element.sign_bit if element.has_nan and not values else 0,
        np.float32(element.min_subnormal / 2) if flushes else None,
        None
        if zero != "never" or flushes
        else np.float32(0)
        if values
        else element.sign_bit,
    )  # fmt: skip


def _fast_params(
    element: Format, rounding: str, overflow: str, values: bool
) -> tuple[int, ...] | None:
    """Parameters of a cast whose argument is no NaN, by the float path; None: not served."""
    if overflow != "sat" or not fits_fast(element, "rne", overflow):
        return None
    if rounding == "rne":
        return clamp_params(element, values)
    return tie_params(element, rounding, values) if rounding in ("rna", "rnz") else None


def _microxcaling_rule(fmt: BlockFormat, kind: str) -> tuple[Any, ...]:
    """The arguments of `dialect_loops.microxcaling` between `operand` and `out`."""
    element = fmt.element
    below = log2_slack(KIND_BITS.get(kind, 23))[1]
    reach = None if element.is_integer else tuple(int(below[k + 150]) for k in _REACH)
    largest = int(np.float32(element.max).view(np.uint32))
    return (
        (element.man_bits - element.is_integer, element.emin, largest),
        reach,
        _flag(fmt.rounding != "rtz"),
        _flag(fmt.rounding == "rne"),
        {"bfloat16": 1, "float16": (1,)}.get(kind),
    )


def _flag(on: bool) -> int | None:
    """A switch that the kernels see by its type."""
    return 1 if on else None


@lru_cache(maxsize=256)
def mx_table(fmt: BlockFormat, kind: str) -> np.ndarray | None:
    """An MX rule as a table, uint32 ``(4, 514)``; None where it is none.

    Such a rule is a step function of the amax with at most one step between two powers of two.
    Column ``2e`` (``2e + 1``) has, for amaxes with exponent field e up to (beyond) the mantissa in
    row 0: stored scale, bits of the multiplier, bits of the factor. Field 256 stands for zero. The
    steps are found by bisection with the rule itself, the array function of `fpemu.dialects`.
    """
    dialect = dialect_of(fmt)
    if dialect is None or fmt.scale != E8M0 or fmt.tensor_scaled or dialect.four is not None:
        return None
    ops = _numpy_ops(kind)
    tensor = dialect.tensor(ops, fmt, np.float32(1))

    def rule(bits: np.ndarray) -> np.ndarray:
        with np.errstate(all="ignore"):
            scales = dialect.block(ops, fmt, bits.astype(np.uint32).view(np.float32), tensor)
        rows = (scales.stored, scales.multiplier.view(np.int32), scales.factor.view(np.int32))
        return np.stack([np.asarray(row).astype(np.int64) & 0xFFFFFFFF for row in rows])

    fields = np.arange(257, dtype=np.int64)
    base = np.where(fields == 256, 0, fields << 23)
    low = np.where(fields == 0, 1, 0)
    high = np.select([fields == 255, fields == 256], [0x400000, 0], 0x7FFFFF)
    first, last = rule(base + low), rule(base + high)
    below, above = low.copy(), high.copy()  # the rule is as at `low` at `below`, not at `above`
    step = (first != last).any(0)
    below[~step] = above[~step]
    while (above - below > 1).any():
        middle = (below + above) // 2
        same = (rule(base + middle) == first).all(0)
        below, above = np.where(same, middle, below), np.where(same, above, middle)
    if (rule(base + np.minimum(below + 1, high))[:, step] != last[:, step]).any():
        return None
    table = np.zeros((4, 514), np.uint32)
    table[0, ::2] = table[0, 1::2] = below
    table[1:, ::2], table[1:, 1::2] = first, last
    return table


class Blocks(NamedTuple):
    """Scales of some blocks, an entry each."""

    stored: np.ndarray
    operand: np.ndarray  # what multiplies or divides x
    scale: np.ndarray  # the value of `stored`
    factor: np.ndarray  # what multiplies an element value when it is decoded

    def part(self, first: int, last: int) -> Blocks:
        return Blocks(*(array[first:last] for array in self))


def _no_blocks(count: int) -> Blocks:
    return Blocks(np.empty(count, np.uint8), *(np.empty(count, np.float32) for _ in range(3)))


class Call:
    """One call: where its pieces lie and what they share.

    An MX rule is looked up piece by piece, in one pass over x. An NVFP4 rule needs the tensor's amax
    first, so a first pass keeps every block's; the rule then runs on large arrays, since threads
    that hand small ones to numpy would wait for each other.
    """

    def __init__(self, request: Request, values: bool) -> None:
        fmt = request.fmt
        assert isinstance(fmt, BlockFormat)
        x, words, random = request.x, request.random_bits, request.random
        if not x.ndim:
            x = x.reshape(1)
            words = None if words is None else words.reshape(1)
        if random is not None and random.global_shape is None:
            random = replace(random, global_shape=x.shape, start=(0,) * x.ndim)
        self.request = replace(request, x=x, random=random, random_bits=words)
        self.fmt: BlockFormat = fmt
        self.rule = _rule(
            fmt, request.kind, request.rounding, request.overflow, request.sr_bits, values
        )
        self.steps = block_steps(fmt, x.shape, request.axis)
        self.size = ceil(prod(self.steps) / RUN) * RUN  # of a block, padded to whole runs
        self.cuts = pieces(x.shape, self.steps, PIECE) if x.size else []
        counts = [_block_count(cut, self.steps) for cut in self.cuts]
        self.first = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
        self.table = mx_table(fmt, request.kind)
        self.amax, self.true_amax = _NO_BITS, _NO_BITS
        self.six: Blocks | None = None
        self.four: Blocks | None = None
        amax = np.float32(1)
        if self.table is None:
            amax = self._reduce()
        ops, dialect = self.rule.ops, self.rule.dialect
        if request.amax is not None:
            amax = np.float32(request.amax)
        with np.errstate(all="ignore"):
            self.tensor = dialect.tensor(ops, fmt, amax if fmt.tensor_scaled else np.float32(1))
        self.number = np.float32(self.tensor.decode)
        if self.table is None:
            self.six = self._scales(dialect.block)
            self.four = None if dialect.four is None else self._scales(dialect.four)

    def run(self, piece: Any) -> None:
        """``piece(k, index)`` for every piece."""
        parallel(piece, list(enumerate(self.cuts)))

    # Scales --------------------------------------------------------------------------------------

    def _reduce(self) -> np.float32:
        """Block amaxes into `amax` (what the rule sees) and `true_amax` (NaN above infinity);
        returns the tensor's."""
        skip = self.rule.dialect.skip_nan
        self.true_amax = np.zeros(int(self.first[-1]), np.uint32)
        self.amax = np.zeros_like(self.true_amax) if skip else self.true_amax

        def piece(k: int, index: tuple[slice, ...]) -> None:
            runs, part = self.runs(index), slice(*self.first[k : k + 2])
            self._block_amaxes(runs, self.true_amax[part], self.amax[part])

        self.run(piece)
        if self.rule.dialect.narrow:  # rounding is monotone: the amax of what is rounded
            amax = self.amax.view(np.float32)
            dialect_loops.round_bfloat16(amax, amax)
        top = dialect_loops.largest(self.amax)
        return np.uint32(top).view(np.float32)

    def _block_amaxes(self, runs: np.ndarray, true: np.ndarray, seen: np.ndarray) -> None:
        geometry = (0, 1, 0, runs.size, 1, runs.size, 1, self.size)
        loops.amax_strips(runs, true, *geometry, False)
        if self.rule.dialect.skip_nan:
            if dialect_loops.any_nan(true):
                loops.amax_strips(runs, seen, *geometry, True)
            else:
                seen[...] = true

    def _scales(self, block: Any) -> Blocks:
        ops, order = self.rule.ops, DECODE[self.fmt.decode]
        all_blocks, amax = _no_blocks(self.amax.size), self.amax.view(np.float32)

        def some(first: int, last: int) -> None:
            part = all_blocks.part(first, last)
            with np.errstate(all="ignore"):
                stored, operand, scale = block(ops, self.fmt, amax[first:last], self.tensor)
                part.stored[...], part.operand[...], part.scale[...] = stored, operand, scale
                if order.factor is not None:
                    scale = order.factor(ops, scale, self.number)
                part.factor[...] = scale

        parallel(some, split(amax.size, 1, SHARE // 8, SHARE))
        return all_blocks

    def scaled(self, k: int, index: tuple[slice, ...]) -> tuple[np.ndarray, np.ndarray, Blocks]:
        """Elements of a piece (float32, blocks padded to whole runs), true amaxes, scales."""
        runs = self.runs(index)
        first, last = self.first[k : k + 2]
        if self.table is not None:
            true, seen = np.empty(last - first, np.uint32), np.empty(last - first, np.uint32)
            self._block_amaxes(runs, true, seen)
            blocks = _no_blocks(true.size)
            bits = seen if self.rule.dialect.skip_nan else true
            dialect_loops.mx_lookup(bits, self.table, *blocks[:3])
            factor = DECODE[self.fmt.decode].factor
            if factor is not None:
                with np.errstate(all="ignore"):
                    scale = factor(self.rule.ops, blocks.scale, self.number)
                return runs, true, blocks._replace(factor=scale)
            return runs, true, blocks._replace(factor=blocks.scale)
        assert self.six is not None
        blocks = self.six.part(first, last)
        if self.four is not None:
            self._choose(runs, blocks, self.four.part(first, last))
        return runs, self.true_amax[first:last], blocks

    def _choose(self, runs: np.ndarray, six: Blocks, four: Blocks) -> None:
        dialect_loops.choose_four(
            runs, self.size // RUN, six, four, self.number, np.float32(self.tensor.encode),
            *error_arguments(self.rule.dialect),
        )  # fmt: skip

    # Elements ------------------------------------------------------------------------------------

    def runs(self, index: tuple[slice, ...]) -> np.ndarray:
        """A piece of x as float32, flat."""
        part, kind = self.request.x[index], self.request.kind
        if kind == "bfloat16":
            bits = np.ascontiguousarray(to_runs(part, self.steps)).reshape(-1)
            values = np.empty(bits.size, np.float32)
            dialect_loops.widen_bfloat16(bits, values)
            return values
        if kind not in NARROW_KINDS:
            with np.errstate(over="ignore"):
                part = part.astype(np.float32)
        return np.ascontiguousarray(to_runs(part, self.steps), np.float32).reshape(-1)

    def words(self, index: tuple[slice, ...]) -> np.ndarray | None:
        request = self.request
        if request.rounding != "sr":
            return None
        if request.random_bits is not None:
            words = request.random_bits[index]
        else:
            assert request.random is not None
            part = request.random.shard(index)
            shape = tuple(s.stop - s.start for s in index)
            bases = part.row_bases(shape)
            assert bases is not None
            words = np.empty(prod(shape), np.uint32)
            seed, stream = signed64(part.seed), signed64(part.stream)
            loops.shard_words(words, shape[-1], 0, bases, seed, stream)
            words = words.reshape(shape)
        return np.ascontiguousarray(to_runs(words, self.steps)).reshape(-1)

    def cast(self, k: int, index: tuple[slice, ...], out: np.ndarray, order: Any = None) -> Blocks:
        """Codes, or float32 values of the element format (decoded by `order`), into `out`."""
        rule = self.rule
        runs, true_amax, blocks = self.scaled(k, index)
        direct = out.flags.c_contiguous and out.size == runs.size and _in_place(self.steps)
        flat = out.reshape(-1) if direct else np.empty(runs.size, out.dtype)
        operand, wraps = blocks.operand, rule.dialect.wraps
        if rule.own is not None:
            operand, careful = np.float32(1) / operand, False  # exact: see `microxcaling16`
        else:
            careful = dialect_loops.needs_care(true_amax, operand, rule.how, wraps)
        dialect_loops.cast_blocks(
            runs, operand, self.size, flat, rule.params, rule.safe_params, careful,
            rule.dialect.narrow, rule.how, rule.zero, wraps, rule.nan, rule.own,
            self.words(index), rule.nan_code, rule.bit, rule.flush, rule.minus,
            None if order is None else blocks.factor, order,
        )  # fmt: skip
        if not direct:
            from_runs(flat, self.steps, out)
        return blocks


def error_arguments(dialect: Dialect) -> tuple[Any, ...]:
    """The last arguments of `dialect_loops.choose_four` and `block_error`."""
    assert dialect.error is not None
    error = ERRORS[dialect.error]
    return (
        np.float32(error.top), _MEASURE[error.measure], _flag(error.measure == "max"),
        _flag(error.measure == "mse"), _flag(error.fast), _flag(not dialect.wraps),
        _flag(dialect.wraps and error.measure != "max"),
    )  # fmt: skip


def block_error(
    dialect: Dialect, values: np.ndarray, scales: Scales, tensor: TensorScale
) -> np.float32:
    """The error of one block (float32) under one candidate's scales."""
    padded = np.zeros(ceil(values.size / RUN) * RUN, np.float32)
    padded[: values.size] = values
    return dialect_loops.block_error(
        padded, np.float32(scales.multiplier[0]), np.float32(scales.factor[0]),
        np.float32(tensor.decode), np.float32(tensor.encode), *error_arguments(dialect),
    )  # fmt: skip


def _block_count(index: tuple[slice, ...], steps: tuple[int, ...]) -> int:
    return prod(ceil((s.stop - s.start) / step) for s, step in zip(index, steps, strict=True))


# The verbs ---------------------------------------------------------------------------------------


def encode(request: Request) -> Parts:
    """Codes, scales and the number that the library stores for the tensor."""
    call = Call(request, values=False)
    x, fmt = call.request.x, call.fmt
    codes = np.empty(x.shape, fmt.element.code_dtype)
    shape = scales_shape(fmt, x.shape, request.axis)
    assert shape is not None
    scales = np.empty(shape, np.uint8)

    def piece(k: int, index: tuple[slice, ...]) -> None:
        blocks = call.cast(k, index, codes[index])
        where = block_index(index, call.steps)
        scales[where] = blocks.stored.reshape(scales[where].shape)

    call.run(piece)
    stored = np.array(call.number) if fmt.tensor_scaled else None
    final = scales_shape(fmt, request.x.shape, request.axis)
    return Parts(codes.reshape(request.x.shape), scales.reshape(final), stored)


def quantize(request: Request, out: np.ndarray, store: Any) -> None:
    """Values into `out`; `store` writes float64 values into an output of any dtype."""
    call = Call(request, values=True)
    target = out if out.ndim else out.reshape(1)
    order = decode_order(call.fmt, call.number, target.dtype)

    def piece(k: int, index: tuple[slice, ...]) -> None:
        part = target[index]
        if order is not None and part.dtype == np.float32:
            call.cast(k, index, part, order)
            return
        values = np.empty(part.shape, np.float32)
        blocks = call.cast(k, index, values, order)
        if order is None:
            store(_exact(values, call.steps, blocks.scale, call.number), part)
        else:
            narrow(values, part)

    call.run(piece)


def within(request: Request) -> np.ndarray:
    """Where the value that is cast lies within +-max; False under a NaN scale."""
    top = np.float32(request.fmt.max)
    call = Call(request, values=True)
    inside = np.empty(call.request.x.shape, np.bool_)
    rule = call.rule

    def piece(k: int, index: tuple[slice, ...]) -> None:
        runs, _, blocks = call.scaled(k, index)
        p = np.empty_like(runs)
        if rule.dialect.narrow:
            dialect_loops.round_bfloat16(runs, p)
            runs = p
        dialect_loops.scaled(runs, blocks.operand, call.size, rule.how, rule.zero, p)
        ok = np.abs(p) <= top
        ok &= np.repeat(blocks.scale == blocks.scale, call.size)
        from_runs(ok, call.steps, inside[index])

    call.run(piece)
    return inside.reshape(request.x.shape)


def decode_piece(
    fmt: BlockFormat, parts: Parts, axis: int, out: np.ndarray, index: tuple[slice, ...], store: Any
) -> None:
    """A piece of ``decode``, in the dialect's order of products."""
    codes = parts.codes[index]
    steps = block_steps(fmt, parts.codes.shape, axis)
    values = value_table(fmt.element)[to_runs(codes, steps)].reshape(-1)
    assert fmt.scale is not None
    stored = parts.scales[block_index(index, steps)].reshape(-1)
    scale = stored if stored.dtype == np.float32 else value_table(fmt.scale)[stored]
    number = np.float32(1) if parts.tensor_scale is None else np.float32(parts.tensor_scale)
    order, factor = decode_order(fmt, number, out.dtype), DECODE[fmt.decode].factor
    assert order is not None and factor is not None
    with np.errstate(all="ignore"):
        by = np.ascontiguousarray(factor(NUMPY, scale, number))
    dialect_loops.decoded(values, by, values.size // by.size, *order)
    shaped = np.empty(codes.shape, np.float32)
    from_runs(values, steps, shaped)
    narrow(shaped, out[index])


# Values ------------------------------------------------------------------------------------------


def decode_order(fmt: BlockFormat, number: np.float32, dtype: Any) -> tuple[Any, ...] | None:
    """The last arguments of `dialect_loops.decoded`; None: through float64.

    One float32 product per value is exact for MX and one-level formats (a code has few bits), and
    the rounding for those orders that libraries compute in float32. Only the exact order with a
    tensor scale, and its float64 results, need float64.
    """
    order = DECODE[fmt.decode]
    if order.factor is None and (dtype == np.float64 or fmt.tensor_scaled):
        return None
    divisor = np.float32(1.0 if order.divisor is None else order.divisor)
    return number, order.amax, divisor, order.divisor is not None, order.plus_zero


def _exact(
    values: np.ndarray, steps: tuple[int, ...], scale: np.ndarray, number: np.float32
) -> np.ndarray:
    """float64 products of element values (shaped) with their scales, NaN canonical."""
    grid = [ceil(n / step) for n, step in zip(values.shape, steps, strict=True)]
    with np.errstate(all="ignore"):
        factor = (scale.astype(np.float64) * np.float64(number)).reshape(grid)
        for axis, (n, step) in enumerate(zip(values.shape, steps, strict=True)):
            if step > 1:
                factor = np.repeat(factor, step, axis)[(slice(None),) * axis + (slice(n),)]
        product = values * factor
    product[np.isnan(product)] = np.nan
    return product


def narrow(values: np.ndarray, out: np.ndarray) -> None:
    """float32 values into an output of any float dtype (uint16: bfloat16 bits), rounded once."""
    if out.dtype != np.uint16:
        with np.errstate(all="ignore"):
            out[...] = values
    elif out.flags.c_contiguous:
        dialect_loops.narrow_bfloat16(values.reshape(-1), out.reshape(-1))
    else:
        bits = np.empty(out.shape, np.uint16)
        dialect_loops.narrow_bfloat16(values.reshape(-1), bits.reshape(-1))
        out[...] = bits


# Layout ------------------------------------------------------------------------------------------


def to_runs(part: np.ndarray, steps: tuple[int, ...]) -> np.ndarray:
    """The blocks of a piece one after the other, short ones padded with zeros, whole runs each."""
    size = prod(steps)
    blocks = _to_blocks(part, steps)
    if size % RUN == 0:
        return blocks
    blocks = np.ascontiguousarray(blocks).reshape(-1, size)
    return np.pad(blocks, [(0, 0), (0, -size % RUN)])


def _to_blocks(part: np.ndarray, steps: tuple[int, ...]) -> np.ndarray:
    if any(n % step for n, step in zip(part.shape, steps, strict=True)):
        pad = [(0, -n % step) for n, step in zip(part.shape, steps, strict=True)]
        part = np.pad(part, pad)
    if prod(steps[:-1]) == 1:
        return part
    split = [k for n, step in zip(part.shape, steps, strict=True) for k in (n // step, step)]
    rank = part.ndim
    return part.reshape(split).transpose(*range(0, 2 * rank, 2), *range(1, 2 * rank, 2))


def _in_place(steps: tuple[int, ...]) -> bool:
    """Whether blocks lie one after the other in C order, in whole runs."""
    return prod(steps[:-1]) == 1 and steps[-1] % RUN == 0


def from_runs(flat: np.ndarray, steps: tuple[int, ...], out: np.ndarray) -> None:
    """The inverse of `to_runs`, into `out`."""
    size = prod(steps)
    if size % RUN:
        flat = flat.reshape(-1, ceil(size / RUN) * RUN)[:, :size].reshape(-1)
    grid = [ceil(n / step) for n, step in zip(out.shape, steps, strict=True)]
    rank = out.ndim
    if prod(steps[:-1]) == 1:
        whole = flat.reshape(*out.shape[:-1], grid[-1] * steps[-1])
    else:
        order = [a for k in range(rank) for a in (k, rank + k)]
        whole = flat.reshape(*grid, *steps).transpose(order)
        whole = whole.reshape([n * step for n, step in zip(grid, steps, strict=True)])
    out[...] = whole[tuple(slice(n) for n in out.shape)]


def block_index(index: tuple[slice, ...], steps: tuple[int, ...]) -> tuple[slice, ...]:
    """Where the scales of a piece lie."""
    return tuple(
        slice(s.start // step, ceil(s.stop / step)) for s, step in zip(index, steps, strict=True)
    )
