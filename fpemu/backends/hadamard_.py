"""Hadamard transforms on the CPU, alone and in front of a cast.

Arrays are handled in pieces of whole blocks, in memory order. In front of a cast a piece is rotated
into scratch that stays in the cache, and `numba_` casts it from there.
"""

from __future__ import annotations

import threading
from dataclasses import replace
from functools import lru_cache
from math import lcm, prod
from typing import Any, NamedTuple

import numpy as np

from fpemu.backends import (
    Parts,
    Request,
    element_format,
    numba_,
    scales_dtype,
    scales_shape,
)
from fpemu.backends.butterfly import butterfly
from fpemu.backends.floatmode import ieee_mode
from fpemu.backends.jit import jit
from fpemu.backends.loops import amax_flat
from fpemu.backends.numba_ import PIECE, _Call, _flat, _memory_order, _shard_words
from fpemu.backends.pieces import block_steps, pieces
from fpemu.backends.threads import parallel
from fpemu.dialects import dialect_of
from fpemu.formats import BlockFormat
from fpemu.rng import Random

SCRATCH = 1 << 14  # float32 between two passes: long runs of columns, and still in the cache
FUSED = 1 << 17  # elements rotated before they are cast
#: Rows that each pass of a block along rows takes at a time; more than 8 spill registers.
_PASSES = {
    2: (2, None, None), 4: (4, None, None), 8: (8, None, None), 16: (4, None, 4),
    32: (8, None, 4), 64: (8, None, 8), 128: (8, 4, 4),
}  # fmt: skip


class Rotation(NamedTuple):
    """A transform: block size, signs (+-1 each, or None) and direction."""

    size: int
    signs: tuple[int, ...] | None
    inverse: bool


class _Tables(NamedTuple):
    """What the kernels need to know of a rotation."""

    lanes: tuple[int, ...]  # stages inside a vector, along consecutive elements
    vectors: tuple[int, ...]  # vectors of one block, along consecutive elements
    passes: tuple[Any, Any, Any]  # along rows: vectors of each pass
    flip_in: np.ndarray  # sign bits XORed onto what is read, and onto what is written
    flip_out: np.ndarray
    scale: np.float32


@lru_cache(maxsize=256)
def _tables(rotation: Rotation) -> _Tables:
    size, signs, inverse = rotation
    none = np.zeros(max(size, 16), np.uint32)
    bits = np.where(np.array(signs or (1,) * size) < 0, np.uint32(0x80000000), np.uint32(0))
    flips = np.tile(bits, max(16 // size, 1))
    stages = size.bit_length() - 1
    return _Tables(
        (0,) * min(stages, 4), (0,) * max(size // 16, 1),
        tuple(None if n is None else (0,) * n for n in _PASSES[size]),  # type: ignore[arg-type]
        none if inverse else flips, flips if inverse else none, np.float32(size**-0.5),
    )  # fmt: skip


# Loops -------------------------------------------------------------------------------------------


@jit
def along_elements(src, dst, lanes, vectors, flip_in, flip_out, scale):
    """Transform runs of consecutive elements."""
    length = 16 * len(vectors)
    whole = len(src) // length * length
    for i in range(0, whole, length):
        butterfly(  # type: ignore[call-arg]
            src, i, 16, dst, i, 16, lanes, vectors, flip_in, flip_out, 0, 16, scale, None
        )  # fmt: skip
    if whole < len(src):
        butterfly(  # type: ignore[call-arg]
            src, whole, 16, dst, whole, 16, lanes, vectors, flip_in, flip_out, 0, 16, scale,
            len(src) - whole,
        )  # fmt: skip


@jit
def pass_over_rows(
    src, at, pitch, dst, to, step, width, height, stride, rows, flip_in, flip_out, scale
):  # fmt: skip
    """Stages ``stride, 2 * stride, ...`` of `height` rows of `width` columns: ``len(rows)`` rows,
    `stride` apart, at a time. Rows lie `pitch` apart in `src` and `step` apart in `dst`."""
    whole = width // 16 * 16
    for group in range(0, height, stride * len(rows)):
        for row in range(group, group + stride):
            s, d = at + row * pitch, to + row * step
            for c in range(0, whole, 16):
                butterfly(  # type: ignore[call-arg]
                    src, s + c, stride * pitch, dst, d + c, stride * step, (), rows, flip_in,
                    flip_out, row, stride, scale, None,
                )  # fmt: skip
            if whole < width:
                butterfly(  # type: ignore[call-arg]
                    src, s + whole, stride * pitch, dst, d + whole, stride * step, (), rows,
                    flip_in, flip_out, row, stride, scale, width - whole,
                )  # fmt: skip


@jit
def along_rows(src, dst, cols, size, first, middle, last, flip_in, flip_out, scale):
    """Transform blocks of `size` rows of `cols` columns; in passes through scratch where `last` is
    not None."""
    scratch = np.empty(0 if last is None else SCRATCH, np.float32)
    most = SCRATCH // size
    for at in range(0, len(src), size * cols):
        if last is None:
            pass_over_rows(
                src, at, cols, dst, at, cols, cols, size, 1, first, flip_in, flip_out, scale
            )
        else:
            for c in range(0, cols, most):
                n = min(most, cols - c)
                pass_over_rows(
                    src, at + c, cols, scratch, 0, most, n, size, 1, first, flip_in, None, None
                )
                stride = len(first)
                if middle is not None:
                    pass_over_rows(
                        scratch, 0, most, scratch, 0, most, n, size, stride, middle, None, None,
                        None,
                    )  # fmt: skip
                    stride = stride * len(middle)
                pass_over_rows(
                    scratch, 0, most, dst, at + c, cols, n, size, stride, last, None, flip_out,
                    scale,
                )  # fmt: skip


# Arrays ------------------------------------------------------------------------------------------


def _transform(x: np.ndarray, out: np.ndarray, axis: int, rotation: Rotation) -> None:
    """One piece, both arrays in C order; `out` may be x."""
    t, src, dst = _tables(rotation), _flat(x), _flat(out)
    cols = prod(x.shape[axis + 1 :])
    if cols == 1:
        along_elements(src, dst, t.lanes, t.vectors, t.flip_in, t.flip_out, t.scale)
    else:
        size = rotation.size
        along_rows(src, dst, cols, size, *t.passes, t.flip_in, t.flip_out, t.scale)


_own = threading.local()


def _scratch(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """This thread's scratch, which lies in its cache from the last piece; valid until the next."""
    size = prod(shape) * dtype.itemsize
    memory = getattr(_own, "memory", None)
    if memory is None or memory.size < size + 64:
        memory = _own.memory = np.empty(size + 64, np.uint8)
    start = -memory.ctypes.data % 64
    return memory[start : start + size].view(dtype).reshape(shape)


def _rotated(x: np.ndarray, axis: int, rotation: Rotation) -> np.ndarray:
    """A piece, rotated, in C order and in x's dtype; valid until this thread's next."""
    if x.flags.c_contiguous and x.dtype != np.float64:
        out = _scratch(x.shape, x.dtype)
        _transform(x, out, axis, rotation)
        return out
    with np.errstate(over="ignore", invalid="ignore"):
        out = np.array(x, np.float32 if x.dtype == np.float64 else None, order="C")
    _transform(out, out, axis, rotation)
    return out.astype(x.dtype, copy=False)


def _cut(
    x: np.ndarray, axis: int, rotation: Rotation, limit: int
) -> list[tuple[tuple[slice, ...]]]:
    steps = tuple(rotation.size if a == axis else 1 for a in range(x.ndim))
    return [(index,) for index in pieces(x.shape, steps, limit)]


def rotate(
    x: np.ndarray, out: np.ndarray, axis: int, rotation: Rotation, measure: bool = False
) -> float:
    """The transform of x along `axis` into `out` (both of one dtype; uint16: bfloat16 bits).

    Returns the result's largest magnitude, NaN skipped, if told to `measure`, else 0.
    """
    if x.size == 0:
        return 0.0
    order = _memory_order(x)
    x, out, axis = x.transpose(order), out.transpose(order), order.index(axis)

    def piece(index: tuple[slice, ...]) -> int:
        source, target = x[index], out[index]
        if source.flags.c_contiguous and target.flags.c_contiguous and x.dtype != np.float64:
            _transform(source, target, axis, rotation)
            result = target
        else:
            result = _rotated(source, axis, rotation)
            target[...] = result
        return _amax_bits(result) if measure else 0

    with ieee_mode():
        return _float(max(parallel(piece, _cut(x, axis, rotation, PIECE))))


def amax(x: np.ndarray, axis: int, rotation: Rotation) -> float:
    """Largest magnitude of the rotated x, in x's dtype, as a float32 value; NaN is skipped."""
    if x.size == 0:
        return 0.0
    order = _memory_order(x)
    x, axis = x.transpose(order), order.index(axis)

    def piece(index: tuple[slice, ...]) -> int:
        return _amax_bits(_rotated(x[index], axis, rotation))

    with ieee_mode():
        return _float(max(parallel(piece, _cut(x, axis, rotation, FUSED))))


def _amax_bits(x: np.ndarray) -> int:
    flat = _flat(x if x.dtype != np.float64 else x.astype(np.float32))
    return int(amax_flat(flat, 0, flat.size))


def _float(bits: int) -> float:
    return float(np.uint32(bits).view(np.float32))


# In front of a cast ------------------------------------------------------------------------------


def fuses(request: Request) -> bool:
    """Whether pieces can be cast one by one: the format's rule, and values as the kernels form them."""
    element = element_format(request.fmt)
    return dialect_of(request.fmt) is None and element.has_zero and request.kind != "float64"


def quantize(request: Request, axis: int, rotation: Rotation, out: np.ndarray) -> None:
    """Values of the rotated `request.x` into `out`, which is not float64.

    A tensor scale must be known before the first cast. It is faster to keep the rotated values,
    where the result will stand, than to rotate twice.
    """
    fmt, x = request.fmt, request.x
    if isinstance(fmt, BlockFormat) and fmt.tensor_scaled and request.amax is None:
        if out.dtype == x.dtype:
            top = rotate(x, out, axis, rotation, measure=True)
            numba_.quantize(replace(request, x=out, amax=top), out)
            return
    with ieee_mode():
        _RotatedCall(request, axis, rotation, True).run(out, None)


def encode(request: Request, axis: int, rotation: Rotation) -> Parts:
    """Codes, scales and tensor scale of the rotated `request.x`."""
    fmt, x = request.fmt, request.x
    codes = np.empty_like(x, element_format(fmt).code_dtype)
    scales = tensor_scale = None
    with ieee_mode():
        call = _RotatedCall(request, axis, rotation, False)
        if isinstance(fmt, BlockFormat):
            shape = scales_shape(fmt, x.shape, request.axis)
            if shape is not None:
                scales = np.empty(shape, scales_dtype(fmt))
            if fmt.tensor_scaled:
                tensor_scale = np.array(call.scalars[1])
        call.run(codes, scales)
    return Parts(codes, scales, tensor_scale)


class _RotatedCall(_Call):
    """`numba_`'s call on a source that is rotated piece by piece."""

    def __init__(self, request: Request, axis: int, rotation: Rotation, values: bool) -> None:
        fmt = request.fmt
        if isinstance(fmt, BlockFormat) and fmt.tensor_scaled and request.amax is None:
            request = replace(request, amax=amax(request.x, axis, rotation))
        super().__init__(request, values)
        self.rotation, self.rotation_axis = rotation, axis

    def run(self, dst: np.ndarray, scales: np.ndarray | None) -> None:
        request, x = self.request, self.request.x
        if x.size == 0:
            if scales is not None:
                scales[...] = 0
            return
        order = _memory_order(x)
        if not self._two_d_last(order, x.ndim):
            order = tuple(range(x.ndim))
        swapped = x.ndim > 1 and order.index(x.ndim - 1) < order.index(x.ndim - 2)
        x, dst = x.transpose(order), dst.transpose(order)
        axis, along = order.index(request.axis), order.index(self.rotation_axis)
        scales = None if scales is None else scales.transpose(order)
        words = None if request.random_bits is None else request.random_bits.transpose(order)
        blocks = block_steps(request.fmt, x.shape, axis, swapped)
        steps = tuple(lcm(n, self.rotation.size) if a == along else n for a, n in enumerate(blocks))

        def piece(index: tuple[slice, ...]) -> None:
            source = _rotated(x[index], along, self.rotation)
            target = direct = dst[index]
            if not target.flags.c_contiguous:
                target = np.empty(target.shape, target.dtype)
            inner = None
            if scales is not None:
                where = tuple(
                    slice(s.start // n, -(-s.stop // n)) for s, n in zip(index, blocks, strict=True)
                )
                inner = np.empty(scales[where].shape, scales.dtype)
            random, some = self._words(x.shape, order, index, source.shape)
            if words is not None:
                some = np.ascontiguousarray(words[index])
            self._contiguous(source, target, inner, axis, random, some, False, swapped)
            if target is not direct:
                direct[...] = target
            if scales is not None:
                scales[where] = inner

        parallel(piece, [(index,) for index in pieces(x.shape, steps, FUSED)])

    def _words(
        self,
        whole: tuple[int, ...],
        order: tuple[int, ...],
        index: tuple[slice, ...],
        part: tuple[int, ...],
    ) -> tuple[Random | None, np.ndarray | None]:
        """Where the random words of a piece come from: a range of indices, or the words."""
        random = self.request.random
        if random is None:
            return None, None
        ranks = range(len(order))
        lead = next((a for a in ranks if part[a] > 1), len(order) - 1)
        if (
            random.global_shape is None
            and order == tuple(ranks)
            and part[lead + 1 :] == whole[lead + 1 :]
        ):
            first = sum(index[a].start * prod(whole[a + 1 :]) for a in ranks)
            return replace(random, offset=random.offset + first), None
        inverse = [order.index(a) for a in ranks]
        if random.global_shape is None:
            shape = tuple(whole[k] for k in inverse)
            random = replace(random, global_shape=shape, start=(0,) * len(order))
        words = _shard_words(
            random.shard(tuple(index[k] for k in inverse)), tuple(part[k] for k in inverse)
        )
        return None, np.ascontiguousarray(words.transpose(order))
