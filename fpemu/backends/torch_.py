"""Portable backend: torch tensors on any device, in int64 arithmetic.

A value is taken apart into sign, exponent and significand (`Exact`), rounded by the integer recipe
of `fpemu.casting`, and put together again as bits. No float product touches the data, so neither
a device's float unit nor `torch.set_flush_denormal` can change a result. Only the scale rules
compute in float32, on block amaxes, and run with denormals on.

Tensors are worked through in chunks of whole blocks, which bounds the extra memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from fractions import Fraction
from math import ceil, prod
from typing import NamedTuple

import torch
from torch import Tensor

from fpemu import scaling
from fpemu.backends import (
    NARROW_KINDS,
    Parts,
    Request,
    element_format,
    scales_dtype,
    scales_shape,
    torch_dialects,
)
from fpemu.casting import ROUNDINGS, Specials, specials
from fpemu.dialects import dialect_of, zero_sign
from fpemu.formats import BF16, FP16, FP32, BlockFormat, Format
from fpemu.rng import PHILOX_M, PHILOX_ROUNDS, PHILOX_W, Random

#: Elements per chunk on a CPU: below torch's grain size, so that every operation runs on the calling
#: thread, whose denormal mode we control, and a dozen int64 temporaries stay in the cache.
CHUNK = (1 << 15) - 1
#: Larger elsewhere, where launching a kernel costs as much as a small chunk.
DEVICE_CHUNK = 1 << 19

# Exact values ------------------------------------------------------------------------------------

#: Bits of a normalised significand: products of 24-bit values (48) and SR's 32 bits below a 24-bit
#: result (56) fit, and a bias of up to 2**61 can be added without overflow.
SIG = 60
MAN64, INF64 = (1 << 52) - 1, 0x7FF << 52


class Exact(NamedTuple):
    """Values ``(-1)**negative * sig * 2**(exp - 59)``; int64 and bool tensors that broadcast.

    `sig` is 0 or lies in [2**59, 2**60). Its lowest bit may be sticky: set where the value has any
    bit below it. At most the top `width` bits are in use. Under `nan` and `inf` it is meaningless.
    (A float64 subnormal has a smaller `sig`: it lies below every format's range, so only its
    being non-zero counts.)
    """

    negative: Tensor
    exp: Tensor
    sig: Tensor
    nan: Tensor
    inf: Tensor
    width: int


_SIGNED = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_ROWS = {torch.float16: FP16, torch.bfloat16: BF16, torch.float32: FP32}
_QUIET_NAN = {torch.float16: 0x7E00, torch.bfloat16: 0x7FC0, torch.float32: 0x7FC00000}


def _bits(x: Tensor) -> Tensor:
    """The bits of x as signed integers of its width (a view)."""
    return x.detach().resolve_neg().view(_SIGNED[x.element_size()])


def _exact(bits: Tensor, dtype: torch.dtype) -> Exact:
    """Values of the bits of a tensor of `dtype`."""
    bits = bits.to(torch.int64)
    no = bits.new_zeros((), dtype=torch.bool)
    if dtype in _ROWS:
        return _from_codes(_ROWS[dtype], bits)
    if dtype == torch.float64:
        mag = bits & ~(-1 << 63)
        exp = mag >> 52
        sig = ((mag & MAN64) | ((exp != 0).to(torch.int64) << 52)) << 7
        return Exact(bits < 0, exp - 1023, sig, mag > INF64, mag == INF64, 53)
    width = 8 * dtype.itemsize
    if not dtype.is_signed:
        if width < 64:
            bits = bits & (1 << width) - 1
        return _from_integers(no, bits, no, width)
    sign = bits >> 63
    return _from_integers(bits < 0, (bits ^ sign) - sign, no, width)


def _from_integers(negative: Tensor, mag: Tensor, no: Tensor, width: int) -> Exact:
    """Values of magnitudes of `width` bits; one of 64 bits is an unsigned number in an int64."""
    if width < 64:
        return _normalise(negative, mag, 0, no, no, width)
    # Beyond 53 bits: normalise the upper 53 of 64, then append the low 11 at their place.
    high = (mag >> 11) & (1 << 53) - 1
    wide = high >> 42 != 0
    e = _normalise(negative, torch.where(wide, high, mag), torch.where(wide, 11, 0), no, no, SIG)
    room = (70 - e.exp).clamp(0, 17)  # 60 - bits of `high`
    low = torch.where(wide, mag & 0x7FF, 0) << room
    return e._replace(sig=e.sig | (low >> 11) | (low & 0x7FF != 0))


def _normalise(
    negative: Tensor, integer: Tensor, exp: Tensor | int, nan: Tensor, inf: Tensor, width: int
) -> Exact:
    """Values ``integer * 2**exp`` with ``0 <= integer < 2**53``.

    The conversion to float64 is exact and normalises: its exponent field counts the bits.
    """
    bits = integer.to(torch.float64).view(torch.int64)
    sig = torch.where(bits == 0, 0, (bits & MAN64 | 1 << 52) << 7)
    return Exact(negative, (bits >> 52) + (exp - 1023), sig, nan, inf, width)


def _from_codes(fmt: Format, code: Tensor) -> Exact:
    """Values of int64 codes of `fmt`; bits above its width are ignored."""
    m, no = fmt.man_bits, code.new_zeros((), dtype=torch.bool)
    code = code & (1 << fmt.bits) - 1
    negative = code & fmt.sign_bit != 0
    if fmt.is_integer:
        count = torch.where(negative, (1 << fmt.bits) - code, code)
        return _normalise(negative, count, fmt.emin - m, no, no, fmt.bits)
    mag = code & ~fmt.sign_bit
    nan = inf = no
    if fmt.special == "fnuz":
        nan = code == fmt.sign_bit
    elif fmt.inf_code is not None:
        nan, inf = mag > fmt.inf_code, mag == fmt.inf_code
    elif fmt.has_nan:
        nan = mag > fmt.max_mag
    if not fmt.has_zero:
        mag = mag + (1 << m)
    exp = mag >> m
    integer = mag & (1 << m) - 1 | (exp != 0).to(torch.int64) << m
    return _normalise(negative, integer, (exp - 1).clamp(min=0) + (fmt.emin - m), nan, inf, m + 1)


def _times(a: Exact, b: Exact) -> Exact:
    """Exact products; the widths' sum must not exceed 60. Inf * 0 is NaN."""
    width = a.width + b.width
    product = (a.sig >> SIG - a.width) * (b.sig >> SIG - b.width)
    top = product >> width - 1  # 1 where the product has all `width` bits, else 0
    nan = a.nan | b.nan | (a.inf & (b.sig == 0)) | (b.inf & (a.sig == 0))
    sig = product << (SIG - width + 1 - top)
    return Exact(a.negative ^ b.negative, a.exp + b.exp + top, sig, nan, a.inf | b.inf, width)


# The cast ----------------------------------------------------------------------------------------


def _cast(
    e: Exact, fmt: Format, rounding: str, code: Specials, words: Tensor | None = None, n: int = 32
) -> Tensor:
    """Codes (int64) of values in `fmt`, rounded once; `words` are the random ones of ``"sr"``."""
    m = fmt.man_bits
    exp = e.exp.clamp(min=fmt.emin)  # below emin the grid is that of emin
    discard = exp - e.exp + (SIG - 1 - m)
    # 61 discarded bits leave less than half a step of any significand, as any greater number does.
    d = discard.clamp(max=SIG + 1)
    if rounding == "sr":
        assert words is not None
        fraction = (e.sig & (1 << d) - 1) >> (discard - n).clamp(max=63)
        kept = (e.sig >> d) + (fraction + (words >> 32 - n) >> n)
    else:
        kept = e.sig + _bias(e, d, rounding) >> d
    mag = kept + (exp - fmt.emin << m)
    if not fmt.has_zero:
        mag = mag.clamp(min=1 << m) - (1 << m)
    if fmt.is_integer:
        signed = torch.where(e.negative, -mag & (1 << fmt.bits) - 1, mag)
    elif fmt.signed:
        minus = e.negative if fmt.has_negative_zero else e.negative & (mag != 0)
        signed = torch.where(minus, mag | fmt.sign_bit, mag)
    else:
        signed = mag
    over = torch.where(e.negative, code.over_neg, code.over_pos)
    inf = torch.where(e.negative, code.inf_neg, code.inf_pos)
    signed = torch.where(e.inf, inf, torch.where(mag > fmt.max_mag, over, signed))
    nan = e.nan if fmt.signed else e.nan | (e.negative & (e.sig != 0))
    return torch.where(nan, code.nan, signed)


def _bias(e: Exact, d: Tensor, rounding: str) -> Tensor | int:
    """What rounds ``sig`` when added before its low `d` bits are cut: a row of `ROUNDINGS`."""
    row = ROUNDINGS[rounding]
    lsb = (e.sig >> d) & 1
    bias: Tensor | int = 0
    if row.half:
        bias = (1 << d - 1) - row.minus_one
    if row.lsb:
        bias = bias + lsb
    if row.mask_positive or row.mask_negative:
        up = torch.where(e.negative, row.mask_negative, row.mask_positive)
        bias = bias + ((1 << d) - 1) * (up * (1 - lsb) if row.only_even else up)
    return bias


def _store(e: Exact, dtype: torch.dtype) -> Tensor:
    """Values in a float dtype, rounded to nearest even once; NaN is the positive quiet one."""
    if dtype in _ROWS:
        row = _ROWS[dtype]
        code = specials(row, "rne", "nonsat")._replace(nan=_QUIET_NAN[dtype])
        return _cast(e, row, "rne", code).to(_SIGNED[dtype.itemsize]).view(dtype)
    # The conversion rounds (the sticky bit lies below float64's last), the power of two is exact:
    # three float32 factors never leave float64's normal range.
    power = (e.exp.clamp(min=-900) + (1023 - SIG + 1) << 52).view(torch.float64)
    bits = (e.sig.to(torch.float64) * power).view(torch.int64)
    bits = torch.where(e.inf, INF64, bits)
    bits = torch.where(e.negative, bits | -1 << 63, bits)
    return torch.where(e.nan, 0x7FF8 << 48, bits).view(torch.float64)


def _round_float32(e: Exact) -> Exact:
    return _exact(_bits(_store(e, torch.float32)), torch.float32)


def _at_most(e: Exact, limit: float) -> Tensor:
    """Where ``|value| <= limit`` (a positive number of at most 60 bits)."""
    number = Fraction(limit)
    exp = number.numerator.bit_length() - number.denominator.bit_length()
    exp -= number < Fraction(2) ** exp
    sig = int(number * Fraction(2) ** (SIG - 1 - exp))
    below = (e.exp < exp) | ((e.exp == exp) & (e.sig <= sig)) | (e.sig == 0)
    return below & ~(e.nan | e.inf)


# Scales ------------------------------------------------------------------------------------------


def _f32(like: Tensor, value: float) -> Tensor:
    return torch.full((), value, dtype=torch.float32, device=like.device)


#: Constants are 0-d tensors: torch divides by a Python number through its reciprocal.
OPS = scaling.Ops(
    torch,
    _f32,
    lambda a: a.view(torch.int32),
    lambda b: b.view(torch.float32),
    lambda mask: mask.to(torch.int32),
    lambda entries, index: torch.from_numpy(entries).to(index.device)[index.long()],
    lambda a: a.to(torch.float16).to(torch.float32),
)


def _amax(e: Exact, ignore_nan: bool) -> Tensor:
    """Largest magnitude along the last axis as float64 bits, NaN above Inf (or 0 if ignored).

    Rounded to odd where 53 bits do not suffice (64-bit integers), which later decisions, all on
    fewer bits, read as if exact.
    """
    key = (e.exp + 1023).clamp(min=0) << 52 | e.sig >> 7 & MAN64
    if e.width > 53:
        key = key | (e.sig & 127 != 0)
    key = torch.where(e.inf, INF64, key)
    return torch.where(e.nan, 0 if ignore_nan else INF64 + 1, key).amax(-1)


def _mx_scales(amax: Tensor, fmt: BlockFormat, threshold: int) -> Tensor:
    """E8M0 codes (int64) of block amaxes (float64 bits); NaN and Inf give 0xFF."""
    above = ((amax & MAN64) > threshold).to(torch.int64)
    code = ((amax >> 52) - (1023 - 127 + fmt.element.emax) + above).clamp(0, 254)
    return torch.where(amax >= INF64, 255, code)


def _factor(fmt: BlockFormat, scales: Tensor) -> Exact:
    """Values of stored scales: codes of the scale format, or float32."""
    assert fmt.scale is not None
    if scales.dtype == torch.float32:
        return _exact(_bits(scales), torch.float32)
    return _from_codes(fmt.scale, scales.to(torch.int64))


_TINY = 5e-324


@contextmanager
def _denormals() -> Iterator[None]:
    """Denormals on for this thread's float32 arithmetic, and as before afterwards."""
    flushing = _TINY * 1.0 == 0.0
    if flushing:
        torch.set_flush_denormal(False)
    try:
        yield
    finally:
        if flushing:
            torch.set_flush_denormal(True)


# Blocks and chunks -------------------------------------------------------------------------------


def _granule(fmt: Format | BlockFormat, rank: int, axis: int) -> tuple[int, ...]:
    """Block size along every axis."""
    sizes = [1] * rank
    if isinstance(fmt, BlockFormat) and fmt.block is not None:
        if fmt.is_2d:
            sizes[-2:] = fmt.block
        else:
            sizes[axis] = fmt.block[0]
    return tuple(sizes)


def _to_blocks(t: Tensor, granule: tuple[int, ...]) -> Tensor:
    """``(*grid, block elements)``, short blocks padded with zeros."""
    if prod(granule) == 1:
        return t.unsqueeze(-1)
    pad = [-n % g for n, g in zip(t.shape, granule, strict=True)]
    if any(pad):
        t = torch.nn.functional.pad(t, [p for n in reversed(pad) for p in (0, n)])
    rank = t.dim()
    split = [k for n, g in zip(t.shape, granule, strict=True) for k in (n // g, g)]
    order = (*range(0, 2 * rank, 2), *range(1, 2 * rank, 2))
    return t.reshape(split).permute(order).flatten(rank)


def _from_blocks(t: Tensor, granule: tuple[int, ...], shape: tuple[int, ...]) -> Tensor:
    """The inverse of `_to_blocks`."""
    if prod(granule) == 1:
        return t.squeeze(-1)
    rank, grid = len(shape), t.shape[:-1]
    t = t.reshape(*grid, *granule).permute([a for k in range(rank) for a in (k, rank + k)])
    t = t.reshape([n * g for n, g in zip(grid, granule, strict=True)])
    return t[tuple(slice(n) for n in shape)]


def _chunks(grid: tuple[int, ...], limit: int) -> Iterator[tuple[slice, ...]]:
    """Boxes of at most `limit` cells that cover `grid`."""
    if 0 in grid:
        return
    rest = prod(grid[1:])
    step = max(1, limit // rest)
    for start in range(0, grid[0], step):
        rows = slice(start, min(start + step, grid[0]))
        if rest <= limit:
            yield (rows, *(slice(0, n) for n in grid[1:]))
        else:
            yield from ((rows, *box) for box in _chunks(grid[1:], limit))


class Chunk(NamedTuple):
    """One box of whole blocks: where it lies in the grid of blocks and in the tensor."""

    blocks: tuple[slice, ...]
    at: tuple[slice, ...]
    shape: tuple[int, ...]


def _walk(
    shape: tuple[int, ...], granule: tuple[int, ...], device: torch.device
) -> Iterator[Chunk]:
    """Chunks that cover a tensor."""
    limit = max(1, (CHUNK if device.type == "cpu" else DEVICE_CHUNK) // prod(granule))
    grid = tuple(ceil(n / g) for n, g in zip(shape, granule, strict=True))
    for blocks in _chunks(grid, limit):
        at = tuple(
            slice(b.start * g, min(b.stop * g, n))
            for b, g, n in zip(blocks, granule, shape, strict=True)
        )
        yield Chunk(blocks, at, tuple(s.stop - s.start for s in at))


def _no_0d(t: Tensor) -> Tensor:
    return t if t.dim() else t.view(1)


# Random words ------------------------------------------------------------------------------------


def _signed64(n: int) -> int:
    """n modulo 2**64 as a signed number."""
    return (n + (1 << 63)) % (1 << 64) - (1 << 63)


def _strides(shape: tuple[int, ...]) -> list[int]:
    return [prod(shape[axis + 1 :]) for axis in range(len(shape))]


def _words(request: Request, chunk: Chunk, shape: tuple[int, ...]) -> Tensor:
    """Random words (int64 below 2**32) of a chunk of a tensor of `shape`."""
    if request.random_bits is not None:
        return _no_0d(request.random_bits)[chunk.at].to(torch.int64) & 0xFFFFFFFF
    random, device = request.random, request.x.device
    assert random is not None
    strides, first = _strides(random.global_shape or shape), random.offset
    if random.global_shape:
        assert random.start is not None
        first += sum(s * n for s, n in zip(random.start, strides, strict=True))
    first += sum(s.start * n for s, n in zip(chunk.at, strides, strict=True))
    dense = zip(chunk.shape, strides, _strides(chunk.shape), strict=True)
    if all(n == 1 or stride == own for n, stride, own in dense):
        # A contiguous range: four words from every counter.
        lane, count = first % 4, prod(chunk.shape)
        block = torch.arange((lane + count + 3) // 4, device=device) + _signed64(first // 4)
        flat = torch.stack(_philox(block, random), dim=-1).flatten()
        return flat[lane : lane + count].view(chunk.shape)
    index = torch.full((), _signed64(first), dtype=torch.int64, device=device)
    for axis, (n, stride) in enumerate(zip(chunk.shape, strides, strict=True)):
        step = torch.arange(n, device=device) * _signed64(stride)
        index = index + step.view([n if a == axis else 1 for a in range(len(chunk.shape))])
    words = torch.stack(_philox((index >> 2) & (1 << 62) - 1, random), dim=-1)
    return words.gather(-1, (index & 3).unsqueeze(-1)).squeeze(-1)


def _philox(block: Tensor, random: Random) -> tuple[Tensor, ...]:
    """The four words of every counter; see `fpemu.rng.philox`."""
    low = 0xFFFFFFFF

    def product(x: Tensor, m: int) -> tuple[Tensor, Tensor]:
        # x * (m - 2**32) fits in int64, x * m does not: the high half is short of x.
        p = x * (m - (1 << 32))
        return (p >> 32) + x, p & low

    x0, x1 = block & low, (block >> 32) & low
    x2 = torch.full_like(x0, random.stream & low)
    x3 = torch.full_like(x0, random.stream >> 32 & low)
    k0, k1 = random.seed & low, random.seed >> 32 & low
    for _ in range(PHILOX_ROUNDS):
        (high0, low0), (high1, low1) = product(x0, PHILOX_M[0]), product(x2, PHILOX_M[1])
        x0, x1, x2, x3 = high1 ^ x1 ^ k0, low1, high0 ^ x3 ^ k1, low0
        k0, k1 = k0 + PHILOX_W[0] & low, k1 + PHILOX_W[1] & low
    return x0, x1, x2, x3


# The interface -----------------------------------------------------------------------------------


class Scaled(NamedTuple):
    """The values of a chunk that are cast, block by block."""

    value: Exact
    scales: Tensor | None
    bad: Tensor | None  # blocks whose codes are all 0, because their scale is NaN
    before: Exact | None = None  # a dialect's values before the steps of its library


def _tensor_scale(request: Request, granule: tuple[int, ...]) -> scaling.TensorScale | None:
    """Scales of the whole tensor, after one pass over it where its amax is not given."""
    fmt, x = request.fmt, request.x
    dialect = dialect_of(fmt)
    if dialect is not None and isinstance(fmt, BlockFormat) and not fmt.tensor_scaled:
        return dialect.tensor(_ops(request), fmt, _f32(x, 1.0))
    if not isinstance(fmt, BlockFormat) or not fmt.tensor_scaled:
        return None
    if scaling.exponent_rule(fmt) is not None:
        return None
    ignore_nan = dialect is None or dialect.skip_nan
    if request.amax is not None:
        amax = _f32(x, request.amax)
    else:
        x = _no_0d(x)
        top = torch.zeros((), dtype=torch.int64, device=x.device)
        for chunk in _walk(tuple(x.shape), granule, x.device):
            values = _exact(_bits(x[chunk.at]).reshape(-1), x.dtype)
            top = torch.maximum(top, _amax(values, ignore_nan))
        # Rounding is monotone: the float32 amax is the amax rounded.
        amax = _store(_exact(top, torch.float64), torch.float32)
    if dialect is not None:
        given = request.amax is not None
        return torch_dialects.tensor_scale(_ops(request), fmt, amax, given)
    return scaling.multiplier_rule(fmt).tensor(OPS, fmt, amax)


def _ops(request: Request) -> scaling.Ops:
    return OPS._replace(kind=request.kind)


def _scaled(
    request: Request, chunk: Chunk, granule: tuple[int, ...], tensor: scaling.TensorScale | None
) -> Scaled:
    fmt, x = request.fmt, _no_0d(request.x)
    e = _exact(_to_blocks(_bits(x[chunk.at]), granule), x.dtype)
    if isinstance(fmt, Format):
        return Scaled(e, None, None)
    if dialect_of(fmt) is not None:
        assert tensor is not None
        bits = _bits(_store(e, torch.float32))
        blocks = torch.where(e.nan & e.negative, bits | -1 << 31, bits).view(torch.float32)
        p, scales_, unaltered = torch_dialects.prepare(
            _ops(request), fmt, request.rounding, blocks, tensor
        )
        bad = scales_.factor != scales_.factor
        value, before = (_exact(_bits(t), torch.float32) for t in (p, unaltered))
        return Scaled(value, scales_.stored, bad, before)
    threshold = scaling.exponent_rule(fmt)
    if threshold is not None:
        code = _mx_scales(_amax(e, ignore_nan=False), fmt, threshold)
        return Scaled(e._replace(exp=e.exp - (code - 127).unsqueeze(-1)), code, code == 255)
    rule = scaling.multiplier_rule(fmt)
    if request.kind not in NARROW_KINDS:
        e = _round_float32(e)
    scales = bad = None
    if rule.block is None or fmt.scale is None:
        assert tensor is not None
        multiplier = tensor.encode
    else:
        ignore = rule.nan == "ignore"
        amax = _store(_exact(_amax(e, ignore), torch.float64), torch.float32)
        tensor = tensor or scaling.no_tensor_scale(OPS, fmt, amax)
        stored, multiplier, factor = rule.block(OPS, fmt, amax, tensor)
        scales = stored if fmt.scale.bits <= 8 else factor
        bad = None if ignore else amax != amax
        multiplier = multiplier.unsqueeze(-1)
    e = _round_float32(_times(e, _exact(_bits(multiplier), torch.float32)))
    return Scaled(e, scales, bad)


def _codes(request: Request, chunk: Chunk, granule: tuple[int, ...], scaled: Scaled) -> Tensor:
    element = element_format(request.fmt)
    words = None
    if request.rounding == "sr":
        shape = tuple(_no_0d(request.x).shape)
        words = _to_blocks(_words(request, chunk, shape), granule)
    code = specials(element, request.rounding, request.overflow)
    codes = _cast(scaled.value, element, request.rounding, code, words, request.sr_bits)
    dialect = dialect_of(request.fmt)
    if dialect is not None:
        if zero_sign(dialect, element) == "never":
            codes = codes.masked_fill(codes == element.sign_bit, 0)
        if not element.has_nan:
            return codes
        negative = scaled.value.nan & scaled.value.negative
        return torch.where(negative, codes | element.sign_bit, codes)
    return codes if scaled.bad is None else codes.masked_fill(scaled.bad.unsqueeze(-1), 0)


def _decoded(
    fmt: Format | BlockFormat, codes: Tensor, scales: Tensor | None, tensor: Tensor | None
) -> Exact:
    """Values of codes in blocks: code x scale x tensor scale, exactly (or in the dialect's order)."""
    value = _from_codes(element_format(fmt), codes)
    if isinstance(fmt, BlockFormat) and fmt.decode != "exact":
        assert scales is not None
        q, factor = _store(value, torch.float32), _store(_factor(fmt, scales), torch.float32)
        number = _f32(q, 1.0) if tensor is None else tensor
        return _exact(_bits(torch_dialects.in_order(OPS, fmt, q, factor, number)), torch.float32)
    if scales is not None:
        assert isinstance(fmt, BlockFormat)
        value = _times(value, _factor(fmt, scales.unsqueeze(-1)))
    if tensor is not None:
        value = _times(value, _exact(_bits(tensor), torch.float32))
    return value


def supports(request: Request) -> str | None:
    """Why this backend cannot serve `request`, or None."""
    fmt = request.fmt
    device = getattr(getattr(request.x, "device", None), "type", "cpu")  # numpy: the host
    if device == "mps":
        return "device 'mps' has no float64; move the tensor to the CPU"
    if isinstance(fmt, BlockFormat):
        width = fmt.element.man_bits + 1 + (fmt.scale.man_bits + 1 if fmt.scale else 0)
        width += 24 if fmt.tensor_scaled else 0
        if width > SIG:
            return (
                f"element, scale and tensor scale of {fmt.name!r} multiply to {width} bits, over 60"
            )
    return None


def quantize(request: Request, out: Tensor) -> None:
    """Values of ``decode(encode(x))`` into `out`, each rounded once into its dtype.

    Parameters
    ----------
    request : Request
    out : Tensor of float16, bfloat16, float32 or float64
        x's shape and device, any strides.
    """
    shape = tuple(_no_0d(request.x).shape)
    granule = _granule(request.fmt, len(shape), request.axis)
    target = _no_0d(out.detach())
    with _denormals():
        tensor = _tensor_scale(request, granule)
        decode_scale = None if tensor is None or not _tensor_scaled(request) else tensor.decode
        for chunk in _walk(shape, granule, out.device):
            scaled = _scaled(request, chunk, granule, tensor)
            codes = _codes(request, chunk, granule, scaled)
            values = _decoded(request.fmt, codes, scaled.scales, decode_scale)
            stored = _store(values, out.dtype)
            target[chunk.at].copy_(_from_blocks(stored, granule, chunk.shape))


def encode(
    request: Request,
    codes_of: Callable[[Request, Chunk, tuple[int, ...], Scaled], Tensor] = _codes,
) -> Parts:
    """Codes and scales of x; `codes_of` casts the scaled values of a chunk."""
    fmt, x = request.fmt, request.x
    shape = tuple(_no_0d(x).shape)
    granule = _granule(fmt, len(shape), request.axis)
    width = element_format(fmt).code_dtype.name
    codes = torch.empty(x.shape, dtype=getattr(torch, width), device=x.device)
    scales = None
    if isinstance(fmt, BlockFormat):
        scales_in = scales_shape(fmt, tuple(x.shape), request.axis)
        if scales_in is not None:
            dtype = getattr(torch, scales_dtype(fmt).name)
            scales = torch.empty(scales_in, dtype=dtype, device=x.device)
    with _denormals():
        tensor = _tensor_scale(request, granule)
        for chunk in _walk(shape, granule, x.device):
            scaled = _scaled(request, chunk, granule, tensor)
            block_codes = codes_of(request, chunk, granule, scaled)
            _no_0d(codes)[chunk.at].copy_(_from_blocks(block_codes, granule, chunk.shape))
            if scales is not None and scaled.scales is not None:
                _no_0d(scales)[chunk.blocks].copy_(scaled.scales)
    stored = None if tensor is None or not _tensor_scaled(request) else tensor.decode
    return Parts(codes, scales, stored)


def _tensor_scaled(request: Request) -> bool:
    return isinstance(request.fmt, BlockFormat) and request.fmt.tensor_scaled


def decode(fmt: Format | BlockFormat, parts: Parts, axis: int, out: Tensor) -> None:
    """Values of codes and scales into `out`, each rounded once into its dtype."""
    codes, target = _no_0d(parts.codes), _no_0d(out.detach())
    shape = tuple(codes.shape)
    granule = _granule(fmt, len(shape), axis)
    with _denormals():
        for chunk in _walk(shape, granule, codes.device):
            blocks = _to_blocks(_bits(codes[chunk.at]), granule).to(torch.int64)
            scales = None if parts.scales is None else _no_0d(parts.scales)[chunk.blocks]
            values = _store(_decoded(fmt, blocks, scales, parts.tensor_scale), out.dtype)
            target[chunk.at].copy_(_from_blocks(values, granule, chunk.shape))


def within(request: Request) -> Tensor:
    """Where the value that is cast lies in ±max, ends included; False for NaN and for blocks
    whose scale is NaN."""
    x = request.x
    shape = tuple(_no_0d(x).shape)
    granule = _granule(request.fmt, len(shape), request.axis)
    inside = torch.empty(x.shape, dtype=torch.bool, device=x.device)
    with _denormals():
        tensor = _tensor_scale(request, granule)
        for chunk in _walk(shape, granule, x.device):
            scaled = _scaled(request, chunk, granule, tensor)
            value = scaled.value if scaled.before is None else scaled.before
            ok = _at_most(value, element_format(request.fmt).max)
            if scaled.bad is not None:
                ok = ok & ~scaled.bad.unsqueeze(-1)
            _no_0d(inside)[chunk.at].copy_(_from_blocks(ok, granule, chunk.shape))
    return inside
