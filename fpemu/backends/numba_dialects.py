"""Dialects on the CPU: pieces of whole blocks through reduce, rule, scaling and cast.

A piece stays in the cache from one step to the next. The rules are numpy array operations on block
amaxes (`fpemu.dialects`); everything that touches elements is a compiled loop.
"""

from __future__ import annotations

from dataclasses import replace
from math import ceil, prod
from typing import Any, NamedTuple

import numpy as np

from fpemu.backends import Parts, Request, dialect_loops, element_format, loops, scales_shape
from fpemu.backends.kernels import bias_params, clamp_params, fits_fast
from fpemu.backends.pieces import block_steps, pieces
from fpemu.backends.threads import parallel
from fpemu.casting import value_table
from fpemu.dialects import DECODE, ERRORS, Dialect, dialect_of, element_nan, log2_slack, to_bfloat16
from fpemu.formats import E4M3, BlockFormat, Format
from fpemu.scaling import NUMPY, Array, Ops, Scales, TensorScale

PIECE = 1 << 16  # elements: piece and scratch together fit a core's second-level cache
_ZERO = {
    "keep": dialect_loops.ZERO_KEEP,
    "never": dialect_loops.ZERO_KEEP,  # seen to after the cast
    "plus": dialect_loops.ZERO_PLUS,
    "minus": dialect_loops.ZERO_MINUS,
}
_MEASURE = {"mae": dialect_loops.MAE, "mse": dialect_loops.MSE, "max": dialect_loops.MAX}
_ROUNDING = {"rna": dialect_loops.NEAREST, "rne": dialect_loops.EVEN, "rtz": dialect_loops.FLOOR}


def _fast_scale(fmt: Format, p: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    if fmt != E4M3 or p.ndim != 1:
        from fpemu.scaling import decode_mag, encode_rne

        code = encode_rne(NUMPY, fmt, p)
        return code, decode_mag(NUMPY, fmt, code)
    code, value = np.empty(p.shape, np.int32), np.empty(p.shape, np.float32)
    dialect_loops.scale_e4m3(p, code, value)
    return code, value


def numpy_ops(kind: str) -> Ops:
    return NUMPY._replace(kind=kind, fast_scale=_fast_scale)


class Blocks(NamedTuple):
    """A piece as whole blocks: float32 ``(count * wide,)``, padded with zeros."""

    values: np.ndarray
    count: int
    wide: int


class Scaled(NamedTuple):
    """A piece ready for the cast."""

    p: np.ndarray  # what is cast
    scales: Scales
    any_nan: bool


class Call:
    """What the pieces of one call share."""

    def __init__(self, request: Request) -> None:
        fmt = request.fmt
        assert isinstance(fmt, BlockFormat)
        dialect = dialect_of(fmt)
        assert dialect is not None
        x = request.x if request.x.ndim else request.x.reshape(1)
        words = request.random_bits
        if words is not None and not request.x.ndim:
            words = words.reshape(1)
        random = request.random
        if random is not None and random.global_shape is None:
            random = replace(random, global_shape=x.shape, start=(0,) * x.ndim)
        self.request = replace(request, x=x, random=random, random_bits=words)
        self.fmt: BlockFormat = fmt
        self.dialect: Dialect = dialect
        self.ops = numpy_ops(request.kind)
        self.steps = block_steps(fmt, x.shape, request.axis)
        self.wide = prod(self.steps)
        self.tensor = self._tensor_scale()

    def _tensor_scale(self) -> TensorScale:
        request = self.request
        if not self.fmt.tensor_scaled:
            amax = np.float32(1)
        elif request.amax is not None:
            amax = np.float32(request.amax)
        else:
            amax = tensor_amax(request, self.dialect.skip_nan)
            if self.dialect.narrow:
                amax = to_bfloat16(self.ops, amax)
        with np.errstate(all="ignore"):
            return self.dialect.tensor(self.ops, self.fmt, amax)

    def cuts(self) -> list[tuple[slice, ...]]:
        x = self.request.x
        return pieces(x.shape, self.steps, PIECE) if x.size else []

    def blocks(self, array: np.ndarray, index: tuple[slice, ...], dtype: Any) -> Blocks:
        """A piece of an array of x's shape as whole blocks."""
        with np.errstate(over="ignore"):
            part = to_blocks(array[index], self.steps)
            count = part.size // self.wide
            if dtype is np.float32 and part.dtype == np.uint16 and self.request.kind == "bfloat16":
                values = np.empty(part.size, np.float32)
                dialect_loops.widen_bfloat16(part.reshape(-1), values)
            else:
                values = np.ascontiguousarray(part, dtype).reshape(-1)
            if dtype is np.float32 and self.dialect.narrow and self.request.kind != "bfloat16":
                rounded = np.empty_like(values)
                dialect_loops.round_bfloat16(values, rounded)
                values = rounded
        return Blocks(values, count, self.wide)

    def amaxes(self, blocks: Blocks) -> np.ndarray:
        bits = np.empty(blocks.count, np.uint32)
        cols = blocks.values.size
        loops.amax_strips(
            blocks.values, bits, 0, 1, 0, cols, 1, cols, 1, blocks.wide, self.dialect.skip_nan
        )
        return bits.view(np.float32)

    def scales(self, blocks: Blocks) -> Scales:
        dialect = self.dialect
        with np.errstate(all="ignore"):
            amax = self.amaxes(blocks)
            six = dialect.block(self.ops, self.fmt, amax, self.tensor)
            if dialect.four is None:
                return six
            four = dialect.four(self.ops, self.fmt, amax, self.tensor)
        pick = choose(self.ops, dialect, blocks, six, four, self.tensor)
        return Scales(*(np.where(pick, b, a) for a, b in zip(six, four, strict=True)))

    def scaled(self, index: tuple[slice, ...]) -> Scaled:
        blocks = self.blocks(self.request.x, index, np.float32)
        scales = self.scales(blocks)
        p, nan = prepare(self.fmt, self.dialect, self.request.rounding, self.ops, blocks, scales)
        return Scaled(p, scales, nan)

    def words(self, index: tuple[slice, ...]) -> np.ndarray | None:
        request = self.request
        if request.rounding != "sr":
            return None
        if request.random_bits is not None:
            return self.blocks(request.random_bits, index, np.uint32).values
        random = request.random
        assert random is not None
        part = random.shard(index)
        shape = tuple(s.stop - s.start for s in index)
        bases = part.row_bases(shape)
        assert bases is not None
        words = np.empty(prod(shape), np.uint32)
        seed, stream = _signed(part.seed), _signed(part.stream)
        loops.shard_words(words, shape[-1], 0, bases, seed, stream)
        return np.ascontiguousarray(to_blocks(words.reshape(shape), self.steps)).reshape(-1)

    def cast(self, scaled: Scaled, index: tuple[slice, ...], values: bool) -> np.ndarray:
        """Codes, or float32 values of the element format, block by block."""
        request, element = self.request, self.fmt.element
        rounding = request.rounding
        if fits_fast(element, rounding, "sat") and request.overflow == "sat" and not scaled.any_nan:
            params = clamp_params(element, values)
        else:
            params = bias_params(element, rounding, request.overflow, values, request.sr_bits)
        dtype = np.float32 if values else element.code_dtype
        out = np.empty(scaled.p.size, dtype)
        words = self.words(index)
        if words is None:
            loops.cast_flat(scaled.p, out, 0, out.size, params, None, None, None)
        else:
            loops.cast_flat_sr(scaled.p, out, 0, out.size, params, None, None, words, 0, 0, 0)
        if self.dialect.zero == "never":
            minus = out == 0 if values else out == element.sign_bit
            out[minus] = 0
        if scaled.any_nan and not values and element.has_nan:
            nan = element.nan_code
            dialect_loops.negative_nan_codes(scaled.p, out, nan, element.sign_bit)
        return out


# The verbs ---------------------------------------------------------------------------------------


def encode(request: Request) -> Parts:
    """Codes, scales and the number that the library stores for the tensor."""
    call = Call(request)
    x, fmt = call.request.x, call.fmt
    codes = np.empty(x.shape, fmt.element.code_dtype)
    shape = scales_shape(fmt, x.shape, request.axis)
    assert shape is not None
    scales = np.empty(shape, np.uint8)

    def piece(index: tuple[slice, ...]) -> None:
        scaled = call.scaled(index)
        from_blocks(call.cast(scaled, index, False), call.steps, codes[index])
        where = block_index(index, call.steps)
        scales[where] = scaled.scales.stored.reshape(scales[where].shape)

    parallel(piece, [(cut,) for cut in call.cuts()])
    stored = np.array(call.tensor.decode, np.float32) if fmt.tensor_scaled else None
    return Parts(codes.reshape(request.x.shape), scales.reshape(_shape(request)), stored)


def _shape(request: Request) -> tuple[int, ...]:
    assert isinstance(request.fmt, BlockFormat)
    shape = scales_shape(request.fmt, request.x.shape, request.axis)
    assert shape is not None
    return shape


def quantize(request: Request, out: np.ndarray, store: Any) -> None:
    """Values into `out`; `store` writes float64 values into an output of any dtype."""
    call = Call(request)
    target = out if out.ndim else out.reshape(1)

    def piece(index: tuple[slice, ...]) -> None:
        scaled = call.scaled(index)
        values = call.cast(scaled, index, True)
        values = in_order(call.ops, call.fmt, values, scaled.scales.factor, call.tensor.decode)
        put(values, call.steps, target[index], store)

    parallel(piece, [(cut,) for cut in call.cuts()])


def within(request: Request) -> np.ndarray:
    """Where the value that is cast lies within +-max; False under a NaN scale."""
    call = Call(request)
    inside = np.empty(call.request.x.shape, np.bool_)
    top = np.float32(call.fmt.max)

    def piece(index: tuple[slice, ...]) -> None:
        scaled = call.scaled(index)
        ok = np.abs(scaled.p) <= top
        ok &= np.repeat(scaled.scales.factor == scaled.scales.factor, call.wide)
        from_blocks(ok, call.steps, inside[index])

    parallel(piece, [(cut,) for cut in call.cuts()])
    return inside.reshape(request.x.shape)


def decode_piece(
    fmt: BlockFormat, parts: Parts, axis: int, out: np.ndarray, index: tuple[slice, ...], store: Any
) -> None:
    """A piece of ``decode``, in the dialect's order of products."""
    codes = parts.codes[index]
    steps = block_steps(fmt, parts.codes.shape, axis)
    values = value_table(fmt.element)[to_blocks(codes, steps)].reshape(-1)
    assert fmt.scale is not None
    stored = parts.scales[block_index(index, steps)].reshape(-1)
    scale = stored if stored.dtype == np.float32 else value_table(fmt.scale)[stored]
    number = np.float32(1) if parts.tensor_scale is None else parts.tensor_scale
    put(in_order(NUMPY, fmt, values, scale, number), steps, out[index], store)


# Steps -------------------------------------------------------------------------------------------


def tensor_amax(request: Request, skip_nan: bool) -> np.float32:
    """Largest ``|x|`` of a tensor, NaN where there is one unless `skip_nan`; 0 where it is empty."""
    x = request.x
    if not x.size:
        return np.float32(0)

    def piece(index: tuple[slice, ...]) -> int:
        part = x[index]
        with np.errstate(over="ignore"):
            if request.kind == "bfloat16":
                flat = np.empty(part.size, np.float32)
                dialect_loops.widen_bfloat16(np.ascontiguousarray(part).reshape(-1), flat)
            else:
                flat = np.ascontiguousarray(part, np.float32).reshape(-1)
        if skip_nan:
            return int(loops.amax_flat(flat, 0, flat.size))
        return int(dialect_loops.amax_with_nan(flat))

    cuts = pieces(x.shape, (1,) * x.ndim, PIECE)
    return np.uint32(max(parallel(piece, [(cut,) for cut in cuts]))).view(np.float32)


def choose(
    ops: Ops, dialect: Dialect, blocks: Blocks, six: Scales, four: Scales, tensor: TensorScale
) -> np.ndarray:
    """Blocks whose candidate 4 has the smaller error."""
    assert dialect.error is not None
    error = ERRORS[dialect.error]
    pick = np.empty(blocks.count, np.bool_)
    dialect_loops.four_is_better(
        blocks.values, blocks.wide, six.multiplier, four.multiplier, six.factor, four.factor,
        np.float32(tensor.decode), np.float32(tensor.encode), np.float32(error.top),
        _MEASURE[error.measure], error.fast, not dialect.wraps, pick,
    )  # fmt: skip
    return pick


def prepare(
    fmt: BlockFormat, dialect: Dialect, rounding: str, ops: Ops, blocks: Blocks, scales: Scales
) -> tuple[np.ndarray, bool]:
    """The values that are cast, and whether a NaN is left among them."""
    element = fmt.element
    src, wide, operand = blocks.values, blocks.wide, np.ascontiguousarray(scales.multiplier)
    p = np.empty(src.size, np.float32)
    if dialect.rounds_itself:
        bits = element.man_bits - (1 if element.is_integer else 0)
        below = np.empty(0, np.int32) if element.is_integer else log2_slack(_log_bits(ops))[1]
        dialect_loops.microxcaling(
            src, operand, wide, p, np.int32(bits), element.emin, np.float32(element.max),
            _ROUNDING[rounding], ops.kind == "bfloat16", below,
        )  # fmt: skip
        return p, False
    divide = dialect.apply != "multiply"
    third = dialect.apply == "divide-times-3"
    nan = dialect_loops.scaled(src, operand, wide, p, divide, third, _ZERO[dialect.zero])
    if dialect.wraps:
        dialect_loops.wrap(p, operand, wide)
        return p, False
    if not nan:
        return p, False
    nan_row = element_nan(dialect, element)
    dialect_loops.replace_nan(
        src, operand, wide, p, np.float32(0.0 if nan_row.value is None else nan_row.value), np.float32(nan_row.made_value),
        nan_row.value is not None, nan_row.signed, divide,
    )  # fmt: skip
    return p, nan_row.value is None


def _log_bits(ops: Ops) -> int:
    return 7 if ops.kind == "bfloat16" else 23


def in_order(
    ops: Ops, fmt: BlockFormat, values: np.ndarray, scale: Array, number: Array
) -> np.ndarray:
    """Element values (float32, whole blocks) times their scales, in the format's decode order.

    float64 for the exact order, whose products float64 holds; float32 for the others.
    """
    order = DECODE[fmt.decode]
    count = scale.size
    with np.errstate(all="ignore"):
        if order.factor is None:
            product = scale.astype(np.float64) * np.float64(number)
            return (values.reshape(count, -1) * product[:, None]).reshape(-1)
        factor = np.ascontiguousarray(order.factor(ops, scale, np.float32(number)))
    divisor = 1.0 if order.divisor is None else order.divisor
    dialect_loops.decoded(
        values, factor, values.size // count, np.float32(number), order.amax, np.float32(divisor),
        order.divisor is not None,
    )  # fmt: skip
    return values


def put(values: np.ndarray, steps: tuple[int, ...], out: np.ndarray, store: Any) -> None:
    """Values of whole blocks into `out`, rounded to its dtype; NaN is canonical."""
    shaped = np.empty(out.shape, values.dtype)
    from_blocks(values, steps, shaped)
    nan = shaped != shaped
    if nan.any():
        shaped[nan] = np.nan
    if out.dtype == np.float32 and shaped.dtype == np.float32:
        out[...] = shaped
    else:
        store(shaped.astype(np.float64, copy=False), out)


# Layout ------------------------------------------------------------------------------------------


def to_blocks(part: np.ndarray, steps: tuple[int, ...]) -> np.ndarray:
    """``(..., block)``: the blocks of a piece in C order, short ones padded with zeros."""
    if any(n % step for n, step in zip(part.shape, steps, strict=True)):
        pad = [(0, -n % step) for n, step in zip(part.shape, steps, strict=True)]
        part = np.pad(part, pad)
    if prod(steps[:-1]) == 1:
        return part
    split = [k for n, step in zip(part.shape, steps, strict=True) for k in (n // step, step)]
    rank = part.ndim
    return part.reshape(split).transpose(*range(0, 2 * rank, 2), *range(1, 2 * rank, 2))


def from_blocks(flat: np.ndarray, steps: tuple[int, ...], out: np.ndarray) -> None:
    """The inverse of `to_blocks`, into `out`."""
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


def _signed(word: int) -> int:
    """The int64 with the bits of a 64-bit word."""
    return word - (1 << 64) if word >> 63 else word
