"""The fast CPU backend: layout, chunks and threads around the kernels of `loops` and `wide`.

Memory order does not matter to a cast, so a dense array is handled as it lies, whatever its axis
order; anything else goes through scratch pieces of `PIECE` elements.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from math import ceil, prod
from typing import Any, NamedTuple

import numpy as np

from fpemu.backends import (
    NARROW_KINDS,
    Parts,
    Request,
    element_format,
    loops,
    numba_dialects,
    scales_dtype,
    scales_shape,
    wide,
)
from fpemu.backends.floatmode import ieee_mode
from fpemu.backends.kernels import HALF, bias_params, clamp_params, fits_fast, rne_params
from fpemu.backends.pieces import block_steps, pieces
from fpemu.backends.threads import get_num_threads, parallel, split
from fpemu.casting import value_bits, value_table
from fpemu.dialects import dialect_of
from fpemu.formats import E4M3, BlockFormat, Format
from fpemu.rng import Random, signed64
from fpemu.scaling import NUMPY, exponent_rule, multiplier_rule, no_tensor_scale

PIECE = 1 << 17  # elements copied into scratch at a time
SERIAL = 1 << 15  # below this, threads cost more than they bring
SHARE = 1 << 19  # elements a thread takes at a time
STREAM_BYTES = 1 << 23  # outputs from this size on are written past the caches

_FUSED = {
    "nvfp4": loops.RULE_NVFP4,
    "nvfp4_1level": loops.RULE_NVFP4,
    "fp8": loops.RULE_FP8,
    "fp8_pow2": loops.RULE_FP8_POW2,
    "int8": loops.RULE_FP8,
}
_NO_F32, _NO_I32 = np.empty(0, np.float32), np.empty(0, np.int32)
_NO_U8, _NO_U32 = np.empty(0, np.uint8), np.empty(0, np.uint32)
_NOT_GIVEN = (_NO_F32, _NO_I32, _NO_F32, _NO_I32)
_NO_SCALES: dict[np.dtype, np.ndarray] = {np.dtype(np.uint8): _NO_U8, np.dtype(np.float32): _NO_F32}


def supports(request: Request) -> str | None:
    """None: every format, rounding and host dtype is served."""
    return None


@lru_cache(maxsize=1024)
def _params(
    fmt: Format | BlockFormat, rounding: str, overflow: str, sr_bits: int, values: bool
) -> tuple[tuple[int, ...], bool]:
    """Kernel parameters and whether they are the general path's."""
    element = element_format(fmt)
    # Scaling by a power of two in float32 is exact only down to 2**-126: an element format that
    # reaches deeper takes the general path, which shifts exponents instead.
    deep = isinstance(fmt, BlockFormat) and element.emin - element.man_bits < -100
    fast = fits_fast(element, rounding, overflow) and not deep
    if fast and isinstance(fmt, BlockFormat) and _poisons(fmt):
        if overflow == "sat" or element.special == "finite":
            return clamp_params(element, values), False
    if fast:
        return rne_params(element, rounding, overflow, values), False
    return bias_params(element, rounding, overflow, values, sr_bits), True


def _poisons(fmt: BlockFormat) -> bool:
    """Whether a NaN overrides its block, so that its own cast does not matter."""
    return exponent_rule(fmt) is not None or multiplier_rule(fmt).nan == "poison"


@lru_cache(maxsize=256)
def _fused_rule(fmt: BlockFormat) -> int | None:
    if exponent_rule(fmt) is not None:
        return loops.RULE_MX
    if fmt.rule.startswith("nvfp4") and fmt.scale != E4M3:
        return None
    return _FUSED.get(fmt.rule)


# The three verbs ---------------------------------------------------------------------------------


def quantize(request: Request, out: np.ndarray) -> None:
    """Values of `request.x` on the format's grid, into `out` (uint16 `out`: bfloat16 bits)."""
    with ieee_mode():
        if dialect_of(request.fmt) is not None:
            numba_dialects.quantize(request, out, _store_float64)
            return
        element = element_format(request.fmt)
        wide_element = element.bits > 16 and request.kind not in NARROW_KINDS
        # Narrow sources are scaled in float32, whose products float64 results must not see.
        exact = out.dtype == np.float64 and (
            request.kind in NARROW_KINDS or isinstance(request.fmt, BlockFormat)
        )
        if not element.has_zero or wide_element or exact:
            _quantize_by_codes(request, out)
        else:
            _Call(request, values=True).run(out, None)


def encode(request: Request) -> Parts:
    """Codes, scales and tensor scale of `request.x`."""
    fmt, x = request.fmt, request.x
    if dialect_of(fmt) is not None:
        with ieee_mode():
            return numba_dialects.encode(request)
    order = _memory_order(x)
    codes = np.empty([x.shape[a] for a in order], element_format(fmt).code_dtype)
    codes = codes.transpose(np.argsort(order))
    scales = tensor_scale = None
    with ieee_mode():
        call = _Call(request, values=False)
        if isinstance(fmt, BlockFormat):
            shape = scales_shape(fmt, x.shape, request.axis)
            if shape is not None:
                scales = np.empty(shape, scales_dtype(fmt))
            if fmt.tensor_scaled:
                tensor_scale = np.array(call.scalars[1])
        call.run(codes, scales)
    return Parts(codes, scales, tensor_scale)


def within(request: Request) -> np.ndarray:
    """Where the value that is cast lies within +-max of the element format, ends included."""
    if dialect_of(request.fmt) is not None:
        with ieee_mode():
            return numba_dialects.within(request)
    mask = np.empty(request.x.shape, np.bool_)
    with ieee_mode():
        call = _Call(request, values=False)
        if call.plan.wide:
            top = request.fmt.max
            if isinstance(request.fmt, BlockFormat):
                return _within_wide_mx(request)
            x = request.x
            return (x <= top) & (x >= -top)
        call.params = (int(np.float32(request.fmt.max).view(np.uint32)),)
        call.plan = call.plan._replace(general=False)
        call.request = replace(request, random=None, random_bits=None)
        call.run(mask, None)
    return mask


def decode(
    fmt: Format | BlockFormat, parts: Parts, axis: int, out: np.ndarray, kind: str = ""
) -> None:
    """Values of codes and scales into `out`: the exact product, rounded once into out's dtype."""
    codes = parts.codes
    if not codes.ndim:
        codes, out = codes.reshape(1), out.reshape(1)
        scales = None if parts.scales is None else parts.scales.reshape(1)
        parts, axis = Parts(codes, scales, parts.tensor_scale), 0
    steps = block_steps(fmt, codes.shape, axis)
    cuts = pieces(codes.shape, steps, PIECE)
    with ieee_mode():
        parallel(
            lambda index: _decode_piece(fmt, parts, axis, out, index), [(cut,) for cut in cuts]
        )


# One call ----------------------------------------------------------------------------------------


class _Plan(NamedTuple):
    """What depends on the kind of call only, not on its data."""

    block_format: BlockFormat | None
    params: tuple[int, ...]
    general: bool  # parameters of the general path
    exponent: bool  # scaled by an exponent rule
    wide: bool  # float64 and wide integers, exactly
    convert: bool  # to be rounded to float32 first
    rule: int
    threshold: int
    emax: int
    element_max: float
    scale_max: float
    skip_nan: bool
    reversed: bool  # an amax pass has just read the tensor: its end is still cached


@lru_cache(maxsize=1024)
def _plan(
    fmt: Format | BlockFormat, kind: str, rounding: str, overflow: str, sr_bits: int, values: bool
) -> _Plan:
    block_format = fmt if isinstance(fmt, BlockFormat) else None
    params, general = _params(fmt, rounding, overflow, sr_bits, values)
    threshold = None if block_format is None else exponent_rule(block_format)
    # float64 and wide integers keep their bits for element and MX formats, and are rounded to
    # float32 for the rules that libraries define there.
    exact = block_format is None or threshold is not None
    wide_ = exact and kind not in NARROW_KINDS
    convert = kind not in ("float32", "float16", "bfloat16") and not wide_
    rule, emax, scale_max, skip_nan = loops.RULE_GIVEN, 0, 1.0, False
    if block_format is not None:
        fused = _fused_rule(block_format)
        rule = loops.RULE_GIVEN if fused is None else fused
        emax = block_format.element.emax
        scale_max = 1.0 if block_format.scale is None else block_format.scale.max
        skip_nan = threshold is None and multiplier_rule(block_format).nan == "ignore"
    return _Plan(
        block_format, params, general, threshold is not None, wide_, convert, rule, threshold or 0,
        emax, element_format(fmt).max, scale_max, skip_nan,
        block_format is not None and block_format.tensor_scaled,
    )  # fmt: skip


class _Call:
    """What all pieces of one call share."""

    def __init__(self, request: Request, values: bool) -> None:
        self.request, self.values = request, values
        self.plan = plan = _plan(
            request.fmt, request.kind, request.rounding, request.overflow, request.sr_bits, values
        )
        self.params = plan.params
        self.scalars = np.ones(4, np.float32)
        if plan.block_format is not None and not plan.exponent:
            self._tensor_scalars(plan.block_format)

    def _tensor_scalars(self, fmt: BlockFormat) -> None:
        plan, amax_bits = self.plan, 0
        if fmt.tensor_scaled:
            amax = self.request.amax
            if amax is None:
                amax_bits = tensor_amax_bits(self.request)
            else:
                amax_bits = int(np.float32(amax).view(np.uint32))
        if plan.rule == loops.RULE_GIVEN:
            tensor_rule = multiplier_rule(fmt).tensor if fmt.tensor_scaled else no_tensor_scale
            with np.errstate(all="ignore"):
                tensor = tensor_rule(NUMPY, fmt, np.uint32(amax_bits).view(np.float32))
            self.scalars[:2] = tensor.encode, tensor.decode
        elif fmt.tensor_scaled:
            loops.tensor_scalars(
                plan.rule, amax_bits, plan.element_max, plan.scale_max, self.scalars
            )
        elif plan.rule == loops.RULE_NVFP4:
            self.scalars[2] = np.float32(1) / np.float32(plan.element_max)
        else:
            self.scalars[2] = plan.element_max

    # Layout --------------------------------------------------------------------------------------

    def run(self, dst: np.ndarray, scales: np.ndarray | None) -> None:
        request = self.request
        x, axis = request.x, request.axis
        if x.size == 0:
            if scales is not None:
                scales[...] = 0
            return
        if x.ndim == 0:
            x, dst = x.reshape(1), dst.reshape(1)
            scales = None if scales is None else scales.reshape(1)
        random, words = request.random, request.random_bits
        sharded = random is not None and random.global_shape is not None
        simple = not (self.plan.convert or sharded)
        if simple and x.flags.c_contiguous and dst.flags.c_contiguous:
            if words is None or words.flags.c_contiguous:
                self._contiguous(x, dst, scales, axis, random, words, True)
                return
        # Any axis order will do, so take the one in memory.
        order = _memory_order(x)
        if not self._two_d_last(order, x.ndim):
            order = tuple(range(x.ndim))
        swapped = x.ndim > 1 and order.index(x.ndim - 1) < order.index(x.ndim - 2)
        x, dst, axis = x.transpose(order), dst.transpose(order), order.index(axis)
        if scales is not None:
            scales = scales.transpose(order)
        if words is not None:
            words = words.transpose(order)
        plain = random is None and words is None
        if simple and plain and x.flags.c_contiguous and dst.flags.c_contiguous:
            compact = None if scales is None else np.empty(scales.shape, scales.dtype)
            self._contiguous(x, dst, compact, axis, None, None, True, swapped)
            if scales is not None:
                scales[...] = compact
            return
        self._by_pieces(x, dst, scales, axis, words, order, swapped)

    def _two_d_last(self, order: tuple[int, ...], ndim: int) -> bool:
        fmt = self.plan.block_format
        return fmt is None or not fmt.is_2d or set(order[-2:]) == {ndim - 2, ndim - 1}

    def _by_pieces(
        self,
        x: np.ndarray,
        dst: np.ndarray,
        scales: np.ndarray | None,
        axis: int,
        words: np.ndarray | None,
        order: tuple[int, ...],
        swapped: bool,
    ) -> None:
        """Through scratch, piece by piece; axis k here is axis ``order[k]`` of the caller's x."""
        steps = block_steps(self.request.fmt, x.shape, axis, swapped)
        random = self.request.random
        inverse = [order.index(a) for a in range(x.ndim)]
        if random is not None and random.global_shape is None:
            shape = tuple(x.shape[k] for k in inverse)
            random = replace(random, global_shape=shape, start=(0,) * x.ndim)

        def piece(index: tuple[slice, ...]) -> None:
            with np.errstate(over="ignore"):
                source = np.ascontiguousarray(x[index], np.float32 if self.plan.convert else None)
            target = dst[index]
            if not target.flags.c_contiguous:
                target = np.empty(target.shape, target.dtype)
            inner = None
            if scales is not None:
                where = tuple(
                    slice(s.start // step, ceil(s.stop / step))
                    for s, step in zip(index, steps, strict=True)
                )
                inner = np.empty(scales[where].shape, scales.dtype)
            some = None if words is None else np.ascontiguousarray(words[index])
            if random is not None:
                shape = tuple(source.shape[k] for k in inverse)
                part = random.shard(tuple(index[k] for k in inverse))
                some = np.ascontiguousarray(_shard_words(part, shape).transpose(order))
            self._contiguous(source, target, inner, axis, None, some, False, swapped)
            if target.base is None or target.base is not dst:
                dst[index] = target
            if scales is not None:
                scales[where] = inner

        parallel(piece, [(index,) for index in pieces(x.shape, steps, PIECE)])

    # Contiguous memory ---------------------------------------------------------------------------

    def _contiguous(
        self,
        x: np.ndarray,
        dst: np.ndarray,
        scales: np.ndarray | None,
        axis: int,
        random: Random | None,
        words: np.ndarray | None,
        threads: bool,
        swapped: bool = False,
    ) -> None:
        fmt = self.plan.block_format
        rng: tuple[Any, ...] | None = None
        if words is not None:
            rng = (words.reshape(-1), 0, 0, 0)
        elif random is not None:
            rng = (_NO_U32, random.offset, signed64(random.seed), signed64(random.stream))
        shape = x.shape
        if fmt is None or fmt.block is None:
            outer, rows, cols, tall, wide_ = 1, 1, x.size, 1, 1
        elif fmt.is_2d:
            tall, wide_ = fmt.block[::-1] if swapped else fmt.block
            outer, rows, cols = prod(shape[:-2]), shape[-2], shape[-1]
        else:
            (size,) = fmt.block
            inner = prod(shape[axis + 1 :])
            if inner == 1:
                outer, rows, cols, tall, wide_ = 1, prod(shape[:axis]), shape[axis], 1, size
                if cols % size == 0:
                    rows, cols = 1, rows * cols
            else:
                outer, rows, cols, tall, wide_ = prod(shape[:axis]), shape[axis], inner, size, 1
        geometry = (outer, rows, cols, tall, wide_)
        flat_scales = None if scales is None else scales.reshape(-1)
        if self.plan.wide:
            self._run_wide(x, dst, flat_scales, geometry, rng, threads)
        elif fmt is None or fmt.block is None:
            self._run_flat(x, dst, rng, threads)
        else:
            self._run_strips(x, dst, flat_scales, geometry, rng, threads)

    def _ordered(self, ranges: list[Any]) -> list[Any]:
        return ranges[::-1] if self.plan.reversed else ranges

    def _streams(self, out: np.ndarray) -> bool:
        return self.values and out.dtype == np.float32 and out.nbytes >= STREAM_BYTES

    def _target(self, dst: np.ndarray) -> np.ndarray:
        return _flat(dst) if self.values else dst.reshape(-1)

    def _run_flat(self, x: np.ndarray, dst: np.ndarray, rng: Any, threads: bool) -> None:
        src, out = _flat(x), self._target(dst)
        n, params = x.size, self.params
        scaled = self.plan.block_format is not None
        mult = self.scalars if scaled else None
        tensor = self.scalars if scaled and self.values else None
        if rng is None:
            stream = (1,) if self._streams(out) else None
            if not threads or n <= SERIAL:
                loops.cast_flat(src, out, 0, n, params, mult, tensor, stream)
            else:
                parallel(
                    lambda a, b: loops.cast_flat(src, out, a, b, params, mult, tensor, stream),
                    self._ordered(split(n, 64, SERIAL // 2, SHARE)),
                )
            return
        words, index, seed, stream_id = rng
        ranges = split(n, 64, SERIAL // 2, SHARE) if threads and n > SERIAL else [(0, n)]
        parallel(
            lambda a, b: loops.cast_flat_sr(
                src, out, a, b, params, mult, tensor, words, index, seed, stream_id
            ),
            ranges,
        )

    def _run_strips(
        self,
        x: np.ndarray,
        dst: np.ndarray,
        scales: np.ndarray | None,
        geometry: tuple[int, ...],
        rng: Any,
        threads: bool,
    ) -> None:
        fmt = self.plan.block_format
        assert fmt is not None
        outer, rows, cols, tall, wide_ = geometry
        strips = outer * ceil(rows / tall)
        src, out = _flat(x), self._target(dst)
        stored = _NO_SCALES[scales_dtype(fmt)] if scales is None else scales
        by_shift = 1 if self.plan.general and self.plan.exponent else None
        narrow_out = out.dtype != np.float32
        tensor = None
        if self.values and not self.plan.exponent and (fmt.tensor_scaled or narrow_out):
            tensor = self.scalars
        # Such a store needs an address that 16 divides, at the start of every row.
        aligned = cols % 4 == 0 and out.ctypes.data % 16 == 0
        stream = 1 if aligned and self._streams(out) and rng is None else None
        given = (
            self._given(src, stored, geometry) if self.plan.rule == loops.RULE_GIVEN else _NOT_GIVEN
        )
        threshold = self.plan.threshold >> 29  # from 52 mantissa bits to float32's 23

        def strip_range(first: int, last: int, col0: int, col1: int) -> None:
            loops.cast_strips(
                src, out, stored, first, last, col0, col1, rows, cols, tall, wide_, self.params,
                by_shift, self.scalars, tensor, self.plan.rule, self.plan.skip_nan, threshold, self.plan.emax,
                given, rng, stream,
            )  # fmt: skip

        if not threads or x.size <= SERIAL or get_num_threads() == 1:
            strip_range(0, strips, 0, cols)
        elif strips >= 4 * get_num_threads():
            per = tall * cols
            ranges = split(strips, 1, max(1, SERIAL // 2 // per), max(1, SHARE // per))
            parallel(strip_range, self._ordered([(a, b, 0, cols) for a, b in ranges]))
        else:
            step, per = 64 if wide_ == 1 else wide_, strips * tall
            ranges = split(cols, step, max(1, SERIAL // 2 // per), max(1, SHARE // per))
            parallel(strip_range, self._ordered([(0, strips, a, b) for a, b in ranges]))

    def _given(
        self, src: np.ndarray, stored: np.ndarray, geometry: tuple[int, ...]
    ) -> tuple[np.ndarray, ...]:
        """The array path: reduce everything, then the rule as array operations."""
        fmt = self.plan.block_format
        assert fmt is not None
        outer, rows, cols, tall, wide_ = geometry
        strips, blocks = outer * ceil(rows / tall), ceil(cols / wide_)
        bits = np.empty(strips * blocks, np.uint32)
        loops.amax_strips(
            src, bits, 0, strips, 0, cols, rows, cols, tall, wide_, self.plan.skip_nan
        )
        rule = multiplier_rule(fmt)
        assert rule.block is not None
        tensor = no_tensor_scale(NUMPY, fmt, np.float32(0))._replace(encode=self.scalars[0])
        with np.errstate(all="ignore"):
            scales = rule.block(NUMPY, fmt, bits.view(np.float32), tensor)
        dead = bits > 0x7F800000
        if len(stored):
            stored[...] = scales.stored
        mult = np.where(dead, np.float32(0), scales.multiplier)
        factor = np.where(dead, np.float32(np.nan), scales.factor)
        return mult, _NO_I32, factor, np.where(dead, np.int32(0), np.int32(-1))

    def _run_wide(
        self,
        x: np.ndarray,
        dst: np.ndarray,
        scales: np.ndarray | None,
        geometry: tuple[int, ...],
        rng: Any,
        threads: bool,
    ) -> None:
        request = self.request
        outer, rows, cols, tall, wide_ = geometry
        src, form = _wide_bits(x)
        element = element_format(request.fmt)
        params = bias_params(element, request.rounding, request.overflow, False, request.sr_bits)
        table = _wide_table(element)
        out = dst.reshape(-1)
        direct = not self.values or out.dtype == np.float64
        values = out if self.values and direct else np.empty(out.size if self.values else 0)
        codes = _NO_U32 if self.values else out
        scaled = self.plan.block_format is not None
        if not scaled:
            # An element format has no blocks: let a "block" be a run of columns.
            wide_ = loops.CHUNK
        strips = outer * ceil(rows / tall)
        stored = _NO_U8 if scales is None else scales
        threshold = self.plan.threshold

        def strip_range(first: int, last: int) -> None:
            wide.cast_strips_wide(
                src, form, codes, table, values, stored, first, last, rows, cols, tall, wide_,
                params, scaled, threshold, self.plan.emax, rng,
            )  # fmt: skip

        ranges = split(strips, 1, 1, max(1, SHARE // (tall * cols))) if threads else [(0, strips)]
        parallel(strip_range, ranges)
        if self.values and not direct:
            _store_float64(values, out)


# Tensor amax -------------------------------------------------------------------------------------


def tensor_amax_bits(request: Request) -> int:
    """float32 bits of the largest ``|x|``, NaN skipped; 0 for an empty tensor."""
    x = request.x
    if x.size == 0:
        return 0
    if x.ndim == 0:
        x = x.reshape(1)
    if request.kind in ("float32", "float16", "bfloat16"):
        order = _memory_order(x)
        x = x.transpose(order)
        if x.flags.c_contiguous:
            src = _flat(x)
            if x.size <= SERIAL:
                return int(loops.amax_flat(src, 0, x.size))
            ranges = split(x.size, 64, SERIAL // 2, SHARE)
            return max(parallel(lambda a, b: int(loops.amax_flat(src, a, b)), ranges))

    def piece(index: tuple[slice, ...]) -> int:
        kind = np.float32 if request.kind not in ("float16", "bfloat16") else None
        with np.errstate(over="ignore"):
            part = _flat(np.ascontiguousarray(x[index], kind))
        return int(loops.amax_flat(part, 0, part.size))

    return max(parallel(piece, [(p,) for p in pieces(x.shape, (1,) * x.ndim, PIECE)]))


# Small helpers -----------------------------------------------------------------------------------


def _flat(a: np.ndarray) -> np.ndarray:
    """One axis of values, as a kernel wants them: bfloat16 bits as int16, float16 as HALF."""
    flat = a.reshape(-1)
    if flat.dtype == np.uint16:
        return flat.view(np.int16)
    return flat.view(HALF) if flat.dtype == np.float16 else flat


def _memory_order(x: np.ndarray) -> tuple[int, ...]:
    """Axes from the largest stride to the smallest: the order in which they lie in memory."""
    if x.flags.c_contiguous:
        return tuple(range(x.ndim))
    return tuple(sorted(range(x.ndim), key=lambda a: (-abs(x.strides[a]) or 1, a)))


def _wide_bits(x: np.ndarray) -> tuple[np.ndarray, int]:
    """A float64 or wide integer array as int64 words, and what they hold."""
    flat = x.reshape(-1)
    if flat.dtype == np.float64:
        return flat.view(np.int64), wide.FLOAT64
    if flat.dtype == np.uint64:
        return flat.view(np.int64), wide.UINT64
    return flat.astype(np.int64, copy=False), wide.INT64


@lru_cache(maxsize=64)
def _wide_table(fmt: Format) -> np.ndarray:
    if fmt.bits > 16:
        return np.empty(0)
    return value_table(fmt).astype(np.float64)


def code_values(fmt: Format, codes: np.ndarray) -> np.ndarray:
    """float32 values of codes."""
    if fmt.bits <= 16:
        return value_table(fmt)[codes]
    # Sign, exponent and mantissa of TF32 and FP32 sit where float32 has them.
    bits = codes.astype(np.uint32) << np.uint32(32 - fmt.bits)
    if fmt.exp_bits != 8 or fmt.bias != 127:
        return (
            np.array([value_bits(fmt, int(c)) for c in codes.ravel()], np.uint32)
            .view(np.float32)
            .reshape(codes.shape)
        )
    nan = (bits & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
    return np.where(nan, np.uint32(0x7FC00000), bits).view(np.float32)


def _bf16_bits(values: np.ndarray) -> np.ndarray:
    """bfloat16 bits of float64 values, rounded once to nearest even."""
    with np.errstate(all="ignore"):
        near = values.astype(np.float32)
        back = near.astype(np.float64)
        bits = near.view(np.uint32)
        # Round to odd in float32 first; then the second rounding cannot see a false tie.
        odd = np.where(np.abs(back) > np.abs(values), bits - np.uint32(1), bits)
        odd = np.where(back == values, bits, odd | np.uint32(1))
    rounded = (odd + (((odd >> np.uint32(16)) & np.uint32(1)) + np.uint32(0x7FFF))) >> np.uint32(16)
    return np.where(np.isnan(values), np.uint32(0x7FC0), rounded).astype(np.uint16)


def _store_float64(values: np.ndarray, out: np.ndarray) -> None:
    if out.dtype == np.uint16:
        out[...] = _bf16_bits(values)
    else:
        with np.errstate(all="ignore"):
            out[...] = values


def _quantize_by_codes(request: Request, out: np.ndarray) -> None:
    """For values that the kernels do not form: encode, then look up, piece by piece."""
    fmt, x = request.fmt, request.x
    if x.ndim == 0:
        words = None if request.random_bits is None else request.random_bits.reshape(1)
        _quantize_by_codes(replace(request, x=x.reshape(1), random_bits=words), out.reshape(1))
        return
    if isinstance(fmt, BlockFormat) and fmt.tensor_scaled and request.amax is None:
        amax = float(np.uint32(tensor_amax_bits(request)).view(np.float32))
        request = replace(request, amax=amax)
    random = request.random
    if random is not None and random.global_shape is None:
        request = replace(
            request, random=replace(random, global_shape=x.shape, start=(0,) * x.ndim)
        )

    def piece(index: tuple[slice, ...]) -> None:
        part = request.part(index)
        decode(fmt, encode(part), part.axis, out[index])

    steps = block_steps(fmt, x.shape, request.axis)
    parallel(piece, [(index,) for index in pieces(x.shape, steps, PIECE)] if x.size else [])


def _decode_piece(
    fmt: Format | BlockFormat, parts: Parts, axis: int, out: np.ndarray, index: tuple[slice, ...]
) -> None:
    if isinstance(fmt, BlockFormat) and fmt.decode != "exact":
        numba_dialects.decode_piece(fmt, parts, axis, out, index, _store_float64)
        return
    element = element_format(fmt)
    codes = parts.codes[index]
    values = code_values(element, codes)
    factors: list[np.ndarray] = []
    if isinstance(fmt, BlockFormat):
        if parts.scales is not None:
            factors.append(_expanded(fmt, parts.scales, codes.shape, axis, index))
        if parts.tensor_scale is not None:
            factors.append(parts.tensor_scale)
    if out.dtype != np.float32:
        values = values.astype(np.float64)
    with np.errstate(all="ignore"):
        for factor in factors:
            values = values * factor.astype(values.dtype)
    nan = np.isnan(values)
    if nan.any():
        values = np.where(nan, values.dtype.type(np.nan), values)
    if out.dtype == np.float32:
        out[index] = values
    else:
        piece = np.empty(codes.shape, out.dtype)
        _store_float64(values, piece)
        out[index] = piece


def _expanded(
    fmt: BlockFormat, scales: np.ndarray, shape: tuple[int, ...], axis: int, index: Any
) -> np.ndarray:
    """Decode scale of every element of a piece."""
    assert fmt.scale is not None and fmt.block is not None
    steps = block_steps(fmt, shape, axis)
    where = tuple(
        slice(s.start // step, ceil(s.stop / step)) for s, step in zip(index, steps, strict=True)
    )
    part = scales[where]
    values = part if part.dtype == np.float32 else value_table(fmt.scale)[part]
    for a, step in enumerate(steps):
        if step > 1:
            values = np.repeat(values, step, axis=a)
            values = values[(slice(None),) * a + (slice(0, shape[a]),)]
    return values


def _within_wide_mx(request: Request) -> np.ndarray:
    """|x| <= max * 2**scale, decided exactly: the bound has few bits, an integer x compares whole."""
    fmt = request.fmt
    assert isinstance(fmt, BlockFormat)
    parts = encode(request)
    shape = request.x.shape or (1,)
    whole = tuple(slice(0, n) for n in shape)
    scales = parts.scales.reshape(shape) if not request.x.shape else parts.scales
    bound = _expanded(fmt, scales, shape, request.axis, whole).astype(np.float64) * fmt.max
    x = request.x.reshape(shape)
    if x.dtype.kind in "iu":
        top = np.iinfo(x.dtype).max
        with np.errstate(invalid="ignore"):
            limit = np.where(bound >= float(top), top, np.floor(bound)).astype(x.dtype)
        low = x >= (-limit if x.dtype.kind == "i" else 0)
        return ((x <= limit) & low & ~np.isnan(bound)).reshape(request.x.shape)
    return (np.abs(x) <= bound).reshape(request.x.shape)


def _shard_words(random: Random, shape: tuple[int, ...]) -> np.ndarray:
    """The random words of a shard, in its shape."""
    bases = random.row_bases(shape)
    assert bases is not None
    words = np.empty(prod(shape), np.uint32)
    seed, stream = signed64(random.seed), signed64(random.stream)
    loops.shard_words(words, shape[-1], 0, bases, seed, stream)
    return words.reshape(shape)
