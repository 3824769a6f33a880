"""GPU backend: Triton kernels on torch tensors, one pass over memory.

This side decides what a kernel is told: the constants of a format (`Row`) and where the elements
lie (`Layout`). Axes that lie together in memory are merged, so that any tensor of up to four
separate axes is addressed where it is. A tensor with more of them is copied first. What follows a
library (`fpemu.dialects`) takes a pass more for its block amaxes; see `triton_dialects`.

With ``TRITON_INTERPRET=1`` set before Triton is imported the kernels run, slowly, on
CPU tensors.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from functools import lru_cache
from math import prod
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fpemu import scaling
from fpemu.backends import (
    Parts,
    Request,
    element_format,
    scales_dtype,
    scales_shape,
    triton_dialects,
)
from fpemu.backends import triton_dialect_kernels as dialect_kernels
from fpemu.backends import triton_kernels as kernels
from fpemu.backends.triton_dialects import NO_STEPS, Blocks, Cost, order_of, steps_of
from fpemu.casting import ROUNDINGS, specials, value_table
from fpemu.dialects import dialect_of
from fpemu.formats import BlockFormat, Format
from fpemu.rng import Random

INTERPRETED = bool(getattr(kernels.INTERPRETED, "value", kernels.INTERPRETED))
#: Elements of a program's tile, unless a block needs more.
TILE = 4096
#: Numbers of a tile that `measure` adds up.
MEASURES = 20
#: The largest tile: more values would not fit a program's registers.
MOST = 1 << 15
WIDE_KINDS = ("float64", "int32", "int64", "uint32", "uint64")
_SIGNED = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

# Formats -----------------------------------------------------------------------------------------


class Row(NamedTuple):
    """An element format under a rounding and an overflow mode, as the kernels need it.

    ``*_bits`` are float32 bits. A code that does not exist is -1.
    """

    path: str
    man: int
    emin: int
    bits: int
    mask: int  # all bits of a code (as int32, like the next two)
    sign: int  # its sign bit
    mag_mask: int  # the others
    max_mag: int
    signed: bool
    integer: bool
    has_zero: bool
    minus_zero: bool
    fnuz: bool
    inf_code: int
    nan_code: int
    over_pos: int
    over_neg: int
    inf_pos: int
    inf_neg: int
    nan: int
    half: int
    minus_one: int
    lsb: int
    mask_positive: int
    mask_negative: int
    only_even: int
    stochastic: bool
    sr_bits: int
    nan_matters: bool  # whether a NaN may reach the cast and its result be used
    overflows: bool  # whether what lies past the largest finite is not it
    drop: int  # float32 mantissa bits that go
    first: int  # bits of the first normal
    limit: int  # bits of what larger values are cut to before they are rounded
    max_bits: int
    step_bits: int  # the smallest step
    steps_bits: int  # 2**32 over that
    max_exp: int  # the largest value as exponent and 60-bit significand
    max_sig: int


def _f32_bits(value: float) -> int:
    with np.errstate(over="ignore"):
        return int(np.float32(value).view(np.int32))


def _int32(word: int) -> int:
    """The int32 with the bits of a 32-bit word."""
    return word - (1 << 32) if word >> 31 else word


def _path(fmt: Format, rounding: str, exact_product: bool, wide: bool, positive: bool) -> str:
    """How `fmt` is cast; see `fpemu.backends.triton_kernels`.

    `exact_product`: the value that is cast is x times a power of two, which float32 may cut.
    `positive`: no value is negative, so that a sign is not missed.
    """
    if wide:
        return "int64"
    lowest = fmt.emin - fmt.man_bits
    plain = fmt.has_zero and 1 <= fmt.man_bits <= 22
    if plain and fmt.signed and fmt.special == "ieee" and fmt.exp_bits == 8 and fmt.bias == 127:
        if rounding in ("rne", "sr") and not exact_product:
            return "same"
    elif rounding == "rne" and (fmt.signed or positive):
        # The largest power that is added must be finite; a product cut below 2**-126 must be
        # far below half a step.
        if plain and fmt.emax + 1 + 23 - fmt.man_bits <= 127 and lowest > -125:
            return "magic"
    elif rounding == "sr" and fmt.signed and fmt.has_zero and fmt.man_bits <= 22:
        if fmt.emax + 1 <= 127 and lowest >= -94:
            return "random"
    return "int64" if rounding == "sr" else "int32"


@lru_cache(maxsize=1024)
def row_of(
    fmt: Format, rounding: str = "rne", overflow: str = "sat", sr_bits: int = 32,
    exact_product: bool = False, wide: bool = False, positive: bool = False,
    nan_matters: bool = True,
) -> Row:  # fmt: skip
    """The constants of a cast; see `_path`."""
    bias = ROUNDINGS.get(rounding, ROUNDINGS["rtz"])
    code = specials(fmt, rounding, overflow)
    path = _path(fmt, rounding, exact_product, wide, positive)
    overflows = overflow == "nonsat" and (fmt.has_inf or fmt.has_nan)
    top, step = Fraction(fmt.max), Fraction(2) ** (fmt.emin - fmt.man_bits)
    exp = fmt.emax
    return Row(
        path=path, man=fmt.man_bits, emin=fmt.emin, bits=fmt.bits, mask=_int32((1 << fmt.bits) - 1),
        sign=_int32(fmt.sign_bit), mag_mask=(1 << fmt.bits - fmt.signed) - 1, max_mag=fmt.max_mag, signed=fmt.signed, integer=fmt.is_integer,
        has_zero=fmt.has_zero, minus_zero=fmt.has_negative_zero, fnuz=fmt.special == "fnuz",
        inf_code=-1 if fmt.inf_code is None else fmt.inf_code,
        nan_code=-1 if fmt.nan_code is None else fmt.nan_code,
        **{name: _int32(c) for name, c in code._asdict().items()}, **bias._asdict(), stochastic=rounding == "sr", sr_bits=sr_bits,
        nan_matters=nan_matters, overflows=overflows, drop=23 - fmt.man_bits,
        first=_f32_bits(2.0**fmt.emin),
        limit=_f32_bits(2.0 ** (exp + 1) if overflows else fmt.max), max_bits=_f32_bits(fmt.max),
        step_bits=_f32_bits(float(step)),
        steps_bits=_f32_bits(float(Fraction(2) ** 32 / step)),
        max_exp=exp, max_sig=int(top / Fraction(2) ** exp * (1 << 59)),
    )  # fmt: skip


class Scheme(NamedTuple):
    """How a format scales, as the kernels need it."""

    rule: str  # "none", "tensor", "mx", "nvfp4", "fp8", "fp8_pow2" or "dialect"
    scale: Row | None
    threshold: int
    emax: int
    tensor: bool  # a tensor scale multiplies decoded values
    exact: bool  # element times block scale is exact in float32
    short: bool  # values lie on bfloat16's grid


def _exact(fmt: BlockFormat) -> bool:
    """Whether every ``element * scale`` lies on float32's grid or beyond its range."""
    element, scale = fmt.element, fmt.scale
    if scale is None:
        return True
    digits = element.man_bits + 1 + (scale.man_bits + 1 if scale.man_bits else 0)
    lowest = element.emin - element.man_bits + scale.emin - scale.man_bits
    return digits <= 24 and lowest >= -149


@lru_cache(maxsize=512)
def scheme_of(fmt: Format | BlockFormat) -> Scheme | str:
    """The scheme of a format, or why the kernels have none."""
    if isinstance(fmt, Format):
        short = fmt.man_bits <= 7 and fmt.emin - fmt.man_bits >= -133
        return Scheme("none", None, 0, 0, False, True, short)
    name, element, scale = fmt.name, fmt.element, fmt.scale
    if fmt.block is not None:
        size = prod(1 << (n - 1).bit_length() for n in fmt.block)
        if size > MOST:
            return f"blocks of {name!r} have more than {MOST} elements"
    exact = _exact(fmt)
    if dialect_of(fmt) is not None or fmt.decode != "exact":
        reason = triton_dialects.refusal(fmt)
        if reason is not None:
            return reason
        assert scale is not None
        return Scheme("dialect", row_of(scale), 0, 0, False, exact, False)
    threshold = scaling.exponent_rule(fmt)
    if threshold is not None:
        if scale is None or (scale.man_bits, scale.bias, scale.has_zero) != (0, 127, False):
            return f"{name!r} has an exponent rule and a scale that is no E8M0"
        if fmt.tensor_scaled:
            return f"{name!r} has an exponent rule and a tensor scale"
        return Scheme("mx", row_of(scale), threshold, element.emax, False, exact, False)
    if fmt.block is None:
        return Scheme("tensor", None, 0, 0, True, True, False)
    assert scale is not None
    if fmt.rule in ("nvfp4", "nvfp4_1level") and scale.bits <= 8 and scale.has_nan:
        row = row_of(scale, positive=True)
        if row.path == "magic" and (exact or not fmt.tensor_scaled):
            return Scheme("nvfp4", row, 0, 0, fmt.tensor_scaled, exact, False)
    if fmt.rule in ("fp8", "fp8_pow2") and scale.bits > 8 and not fmt.tensor_scaled:
        return Scheme(fmt.rule, row_of(scale), 0, 0, False, exact, False)
    return f"rule {fmt.rule!r} with the element and scale of {name!r} has no kernel"


# Where elements lie ------------------------------------------------------------------------------


class Dim(NamedTuple):
    """An axis: its length, and the stride of each array along it (the scales' per block)."""

    size: int
    strides: tuple[int, ...]


class Layout(NamedTuple):
    """Tensors as (batch 0, batch 1, rows, columns), cut into tiles of whole blocks."""

    dims: tuple[Dim, Dim, Dim, Dim]
    row_axis: int | None  # the tensor's axis that the rows are, where blocks need to know
    tall: int
    wide: int
    tile: tuple[int, int]  # rows and columns, blocks padded to powers of two
    far: bool  # offsets within a tile need 64 bits

    @property
    def tiles(self) -> tuple[int, int]:
        rows = self.tile[0] // _power(self.tall) * self.tall
        cols = self.tile[1] // _power(self.wide) * self.wide
        return -(-self.dims[2].size // rows), -(-self.dims[3].size // cols)

    @property
    def grid(self) -> int:
        return self.dims[0].size * self.dims[1].size * prod(self.tiles)

    def strides(self, array: int) -> tuple[int, ...]:
        return tuple(d.strides[array] for d in self.dims)

    @property
    def sizes(self) -> tuple[int, ...]:
        """R, C, N1, TR, TC of the kernels."""
        return (self.dims[2].size, self.dims[3].size, self.dims[1].size, *self.tiles)

    @property
    def blocks(self) -> dict[str, Any]:
        tall, wide = self.tall, self.wide
        return {
            "TALL": tall, "WIDE": wide, "TALLP": _power(tall), "WIDEP": _power(wide),
            "BR": self.tile[0], "BC": self.tile[1], "FAR": self.far,
        }  # fmt: skip


def _power(n: int) -> int:
    """The next power of two."""
    return 1 << (n - 1).bit_length()


def _joins(outer: Dim, inner: Dim, block: int, scales: int | None) -> Dim | None:
    """Both axes as one, or None. `block` is the inner one's; `scales` which array has scales."""
    if inner.size % block:
        return None
    for k, (a, b) in enumerate(zip(outer.strides, inner.strides, strict=True)):
        length = inner.size // block if k == scales else inner.size
        if a != length * b:
            return None
    return Dim(outer.size * inner.size, inner.strides)


def layout(
    shape: Sequence[int], strides: Sequence[Sequence[int]], blocks: dict[int, int],
    scales: int | None = None, unit: tuple[int, int] | None = None, tile: int = TILE,
) -> Layout | None:  # fmt: skip
    """Where the elements of several arrays of one shape lie; None for too many separate axes.

    Parameters
    ----------
    shape : sequence of int
        At least 1-D, not empty.
    strides : sequence of sequence of int
        Of each array, in elements. The first array's decide which axis a tile's rows follow.
    blocks : dict of int to int
        Block size along the axes that have one: none, one, or the last two.
    scales : int, optional
        Which array holds one element per block.
    unit : (axis, int), optional
        Tiles hold whole runs of so many elements (a power of two) along an axis of `blocks`.
    """
    dims = [Dim(n, tuple(s[a] for s in strides)) for a, n in enumerate(shape)]
    near = min(
        range(len(dims)),
        key=lambda a: (dims[a].size == 1, dims[a].strides[0] or 1 << 62, -a),
    )
    row: int | None
    if len(blocks) == 2:
        row, col = sorted(blocks, key=lambda a: (-dims[a].strides[0], a))
    else:
        col = near
        row = next((a for a in blocks if a != near), None)
    tall = 1 if row is None else blocks.get(row, 1)
    wide = blocks.get(col, 1)
    rest = [d for a, d in enumerate(dims) if a not in (row, col) and d.size > 1]
    rest.sort(key=lambda d: -d.strides[0])
    columns = dims[col]
    merged: list[Dim] = []
    for dim in reversed(rest):  # from the nearest outwards
        joined = None
        if not merged:
            joined = _joins(dim, columns, wide, scales)
            if joined is not None:
                columns = joined
                continue
        if merged:
            joined = _joins(dim, merged[-1], 1, None)
        if joined is not None:
            merged[-1] = joined
        else:
            merged.append(dim)
    none = Dim(1, (0,) * len(strides))
    if row is None:
        # The axis along which the result lies in memory, else the longest.
        merged.sort(key=lambda d: (d.strides[min(1, len(strides) - 1)] != 1, -d.size))
        rows = merged.pop(0) if merged else none
    else:
        rows = dims[row]
    if len(merged) > 2:
        return None
    batch = [none] * (2 - len(merged)) + merged[::-1]
    tallp, widep = _power(tall), _power(wide)
    if unit is not None and unit[0] == row:
        tallp = max(tallp, unit[1])
    elif unit is not None:
        widep = max(widep, unit[1])
    cols = columns
    whole_cols = _power(-(-cols.size // wide) * _power(wide))
    whole_rows = _power(-(-rows.size // tall) * _power(tall))
    bc = max(widep, min(whole_cols, max(tile // tallp, min(32, whole_cols))))
    br = max(tallp, min(whole_rows, tile // bc))
    reach = max(
        abs(rows.strides[k]) * br + abs(cols.strides[k]) * bc for k in range(len(rows.strides))
    )
    return Layout((batch[0], batch[1], rows, cols), row, tall, wide, (br, bc), reach >= 1 << 31)


def _block_axes(fmt: Format | BlockFormat, rank: int, axis: int) -> dict[int, int]:
    if isinstance(fmt, Format) or fmt.block is None:
        return {}
    if fmt.is_2d:
        return {rank - 2: fmt.block[0], rank - 1: fmt.block[1]}
    return {axis: fmt.block[0]}


def _no_0d(t: Tensor) -> Tensor:
    return t if t.dim() else t.view(1)


def _raw(t: Tensor) -> Tensor:
    """The bits of t as signed integers of its width (a view), at least 1-D."""
    return _no_0d(t.detach().resolve_neg().view(_SIGNED[t.element_size()]))


# Random words ------------------------------------------------------------------------------------


def _index_strides(random: Random, shape: tuple[int, ...]) -> tuple[int, tuple[int, ...]]:
    """Index of the first element in the whole tensor, and how it grows along each axis."""
    whole = random.global_shape or shape
    strides = tuple(prod(whole[a + 1 :]) for a in range(len(whole)))
    first = random.offset
    if random.global_shape:
        assert random.start is not None
        first += sum(s * n for s, n in zip(random.start, strides, strict=True))
    return first, strides


def _halves(word: int) -> tuple[int, int]:
    """The two 32-bit halves of a 64-bit word, each as a signed number."""
    return tuple((half + (1 << 31)) % (1 << 32) - (1 << 31) for half in (word, word >> 32))  # type: ignore[return-value]


# Launching ---------------------------------------------------------------------------------------


def launch(
    kernel: Any, grid: int, warps: int, device: torch.device, arguments: Sequence[Any],
    constants: Mapping[str, Any],
) -> None:  # fmt: skip
    """Run `grid` programs of a kernel. Every launch of this backend goes through here."""
    if INTERPRETED:
        # numpy would warn of what a kernel computes and then masks.
        with np.errstate(all="ignore"):
            kernel[(grid,)](*arguments, **constants)
        return
    with torch.cuda.device(device):
        kernel[(grid,)](*arguments, **constants, num_warps=warps, enable_fp_fusion=False)


def _launch(
    kernel: Any, where: Layout, tensor: Tensor, *arguments: Any, thread: int = 32, **constants: Any
) -> None:
    """One program per tile, about `thread` elements per thread."""
    warps = min(max(where.tile[0] * where.tile[1] // (32 * thread), 1), 16)
    launch(kernel, where.grid, warps, tensor.device, arguments, {**constants, **where.blocks})


class Rotation(NamedTuple):
    """A Hadamard transform in front of the cast; see `fpemu.rotation`."""

    size: int
    signs: tuple[int, ...] | None


class _Turn(NamedTuple):
    """A rotation as the kernels take it."""

    flips: Tensor
    scale: float
    size: int
    rows: bool


def _turn(rotation: Rotation | None, x: Tensor, rows: bool) -> _Turn:
    if rotation is None:
        return _Turn(x, 0.0, 0, False)
    signs = torch.tensor(rotation.signs or (1,) * rotation.size, dtype=torch.int64)
    flips = torch.where(signs < 0, -(1 << 31), 0).to(torch.int32).to(x.device)
    return _Turn(flips, float(np.float32(rotation.size**-0.5)), rotation.size, rows)


# The whole tensor's scale ------------------------------------------------------------------------


def tensor_amax(request: Request, rotation: Rotation | None = None) -> Tensor:
    """float32 bits (int32, one element) of the largest ``|x|``, each x rounded to float32, NaN
    skipped; of the rotated x where there is a rotation."""
    x = _raw(request.x)
    top = torch.zeros(1, dtype=torch.int32, device=x.device)
    if x.numel() == 0:
        return top
    axis = request.axis
    blocks = {} if rotation is None else {axis: 1}
    unit = None if rotation is None else (axis, rotation.size)
    where = layout(x.shape, [x.stride()], blocks, unit=unit)
    if where is None:
        x = x.contiguous()
        where = layout(x.shape, [x.stride()], blocks, unit=unit)
    assert where is not None
    turn = _turn(rotation, x, where.row_axis == axis)
    _launch(
        kernels.amax_kernel, where, x, x, top, turn.flips, *where.sizes, *where.strides(0),
        turn.scale, KIND=request.kind, ROTATION=turn.size, ROTATE_ROWS=turn.rows,
    )  # fmt: skip
    return top


def _scalars(request: Request, scheme: Scheme, rotation: Rotation | None = None) -> Tensor:
    """What `scalars_kernel` makes of the tensor's amax, float32."""
    fmt, device = request.fmt, request.x.device
    if not scheme.tensor:
        return _unscaled(fmt, device) if scheme.rule == "nvfp4" else _NOTHING.to(device)
    if request.amax is not None:
        amax = torch.full((1,), request.amax, dtype=torch.float32, device=device).view(torch.int32)
    else:
        amax = tensor_amax(request, rotation)
    return _scalars_of(fmt, scheme, device, amax)


_NOTHING = torch.zeros(1, dtype=torch.float32)


@lru_cache(maxsize=64)
def _unscaled(fmt: Format | BlockFormat, device: torch.device) -> Tensor:
    scheme = scheme_of(fmt)
    assert isinstance(scheme, Scheme)
    return _scalars_of(fmt, scheme, device, None)


def _scalars_of(
    fmt: Format | BlockFormat, scheme: Scheme, device: torch.device, amax: Tensor | None
) -> Tensor:
    assert isinstance(fmt, BlockFormat)
    top = fmt.element.max * (fmt.scale.max if fmt.scale is not None else 1.0)
    scalars = torch.empty(16 + 512, dtype=torch.float32, device=device)
    constants = {
        "RULE": scheme.rule, "S": scheme.scale, "SCALED": amax is not None,
        "top_bits": _f32_bits(top), "max_bits": _f32_bits(fmt.element.max),
    }  # fmt: skip
    arguments = (scalars if amax is None else amax, scalars)
    launch(kernels.scalars_kernel, 1, 1, device, arguments, constants)
    return scalars


# The interface -----------------------------------------------------------------------------------


def supports(request: Request) -> str | None:
    """Why this backend cannot serve `request`, or None."""
    device = request.x.device.type if isinstance(request.x, Tensor) else "numpy"
    if INTERPRETED and device not in ("cpu", "numpy"):
        return f"its kernels are interpreted (TRITON_INTERPRET) on the CPU and x is on {device!r}"
    if not INTERPRETED and device != "cuda":
        what = "a numpy array" if device == "numpy" else f"on {device!r}"
        return f"it works on CUDA tensors and x is {what}; pass a CUDA tensor"
    scheme = scheme_of(request.fmt)
    if isinstance(scheme, str):
        return scheme
    random = request.random
    if random is not None and random.global_shape is not None:
        if sum(n > 1 for n in request.x.shape) > 4:
            return "a shard of more than four axes has more index strides than the kernels take"
    return None


def rotates(request: Request, size: int) -> bool:
    """Whether runs of `size` can be rotated in front of the cast: whole ones, and whole blocks, in
    a tile."""
    blocks = _block_axes(request.fmt, max(request.x.dim(), 1), request.axis).values()
    narrow = request.kind in ("float16", "bfloat16", "float32")
    # A transform's NaN has a sign of its own, which some libraries keep.
    narrow = narrow and dialect_of(request.fmt) is None
    return narrow and size <= 128 and all(n == _power(n) for n in blocks)


def decodes(fmt: Format | BlockFormat) -> bool:
    """Whether the kernels decode `fmt`."""
    return isinstance(scheme_of(fmt), Scheme)


class _Call:
    """One request, ready to be launched."""

    def __init__(self, request: Request, rotation: Rotation | None = None) -> None:
        scheme = scheme_of(request.fmt)
        assert isinstance(scheme, Scheme)
        self.request, self.scheme, self.rotation = request, scheme, rotation
        self.x = _raw(request.x)
        self.blocks = _block_axes(request.fmt, self.x.dim(), request.axis)
        self.given: Blocks | None = None
        if scheme.rule == "dialect":
            self.given = self._by_the_library()
            self.scalars = self.given.scalars
        else:
            self.scalars = _scalars(request, scheme, rotation)

    def _by_the_library(self) -> Blocks:
        """Scales by a dialect's rules."""
        request, fmt = self.request, self.request.fmt
        assert isinstance(fmt, BlockFormat)
        shape = scales_shape(fmt, tuple(self.x.shape), request.axis)
        assert shape is not None
        steps = steps_of(fmt, request.kind)
        amax = torch.zeros(shape, dtype=torch.int32, device=self.x.device)

        def on_blocks(kernel: Any, arguments: Sequence[Any], **rest: Any) -> None:
            x = self.x
            where = layout(x.shape, (x.stride(), amax.stride()), self.blocks, 1)
            if where is None:
                x = x.contiguous()
                where = layout(x.shape, (x.stride(), amax.stride()), self.blocks, 1)
            assert where is not None
            _launch(
                kernel, where, x, x, *arguments, *where.sizes, *where.strides(0),
                *where.strides(1), KIND=request.kind, NARROW=steps.narrow, **rest,
            )  # fmt: skip

        def choose(cost: Cost, six: Any, four: Any, scalars: Tensor) -> Tensor:
            pick = torch.zeros(shape, dtype=torch.int8, device=amax.device)
            candidates = (six.multiplier, six.factor, four.multiplier, four.factor)
            if amax.numel():
                on_blocks(dialect_kernels.choose_kernel, (pick, *candidates, scalars), E=cost)
            return pick != 0

        if amax.numel():
            on_blocks(dialect_kernels.block_amax_kernel, (amax,), SKIP_NAN=steps.skip_nan)
        values = amax.view(torch.float32)
        return triton_dialects.rules(fmt, request.kind, values, request.amax, choose)

    def layout(
        self, shape: Sequence[int], strides: Sequence[Sequence[int]], tile: int = TILE
    ) -> Layout | None:
        """Of arrays whose third has the scales; whole rotated runs in a tile."""
        blocks, axis, rotation = self.blocks, self.request.axis, self.rotation
        if rotation is None:
            return layout(shape, strides, blocks, 2, None, tile)
        return layout(shape, strides, blocks or {axis: 1}, 2, (axis, rotation.size), tile)

    def scales(self) -> Tensor | None:
        fmt, request = self.request.fmt, self.request
        if not isinstance(fmt, BlockFormat) or fmt.block is None:
            return None
        shape = scales_shape(fmt, tuple(request.x.shape), request.axis)
        assert shape is not None
        dtype = getattr(torch, scales_dtype(fmt).name)
        return torch.empty(shape, dtype=dtype, device=self.x.device)

    def run(self, out: Tensor, result: str, scales: Tensor | None = None) -> None:
        """Fill `out` (and `scales`) with what `result` names: codes, a float dtype or "within"."""
        request, scheme, x, given = self.request, self.scheme, self.x, self.given
        if x.numel() == 0:
            if scales is not None:
                scales.zero_()
            return
        element, steps = element_format(request.fmt), NO_STEPS
        measures = result == "stats"
        wide = request.kind in WIDE_KINDS and scheme.rule in ("none", "mx")
        nan_matters = scheme.rule not in ("mx", "nvfp4")
        if given is not None:
            assert isinstance(request.fmt, BlockFormat)
            steps = steps_of(request.fmt, request.kind)
            nan_matters = steps.keeps_nan
            if scales is not None:
                scales.copy_(given.stored.view(scales.shape))
                scales = None
        row = row_of(
            element, request.rounding, request.overflow, request.sr_bits, scheme.rule == "mx", wide,
            nan_matters=nan_matters,
        )  # fmt: skip
        target = x if measures else _raw(out)
        stored = None if scales is None else _no_0d(scales)
        if stored is not None and stored.dtype == torch.float32:
            stored = stored.view(torch.int32)
        words, first, kind = x, 0, "none"
        word_strides: tuple[int, ...] = (0,) * x.dim()
        if request.rounding == "sr" and result != "within":
            if request.random_bits is not None:
                words, kind = _no_0d(request.random_bits), "given"
                word_strides = words.stride()
            else:
                assert request.random is not None
                kind = "each"
                first, word_strides = _index_strides(request.random, tuple(x.shape))
        per_block = stored if given is None else given.operand
        scale_strides = (0,) * x.dim() if per_block is None else per_block.stride()
        rotation, axis = self.rotation, request.axis
        tile = TILE if row.path in ("magic", "same") and rotation is None else TILE // 2

        def place(x: Tensor, target: Tensor) -> Layout | None:
            arrays = (x.stride(), target.stride(), scale_strides, word_strides)
            return self.layout(x.shape, arrays, tile)

        where, landing = place(x, target), target
        if where is None:
            # Too many separate axes: work on dense copies.
            x, landing = (
                x.contiguous(),
                torch.empty(target.shape, dtype=target.dtype, device=x.device),
            )
            if kind == "given":
                words = words.contiguous()
                word_strides = words.stride()
            where = place(x, landing)
            assert where is not None
        if kind == "each" and _in_fours(where, first):
            kind = "fours"
        if measures:
            landing = torch.empty((where.grid, MEASURES), dtype=torch.float64, device=x.device)
        first0, first1 = _halves(first)
        random = request.random or Random(0)
        turn = _turn(rotation, x, where.row_axis == axis)
        _launch(
            kernels.quantize_kernel, where, x, x, landing, x if per_block is None else per_block,
            x if given is None else given.factor, x if given is None else given.value,
            self.scalars, words, turn.flips, *where.sizes, *where.strides(0), *where.strides(1),
            *where.strides(2), *where.strides(3), first0, first1, *_halves(random.seed),
            *_halves(random.stream), turn.scale,
            KIND=request.kind, OUT=result, F=row, S=scheme.scale or row, RULE=scheme.rule,
            THRESHOLD=scheme.threshold, EMAX=scheme.emax,
            TENSOR=scheme.tensor and result not in ("codes", "within"), EXACT=scheme.exact,
            SHORT=scheme.short, D=steps, ORDER=order_of(request.fmt), WORDS=kind,
            ROTATION=turn.size, ROTATE_ROWS=turn.rows, KEEP_SCALES=stored is not None,
            thread=8 if measures else 32,  # a dozen float64 numbers live for each element
        )  # fmt: skip
        if measures:
            out.resize_(landing.shape).copy_(landing)
        elif landing is not target:
            target.copy_(landing)


def _in_fours(where: Layout, first: int) -> bool:
    """Whether four neighbours along every tile's row share a counter."""
    *outer, last = where.strides(3)
    whole = where.wide == _power(where.wide)
    return last == 1 and whole and where.tile[1] >= 4 and not any(n % 4 for n in (first, *outer))


def _apart(x: Tensor, out: Tensor) -> bool:
    """Whether writing `out` leaves x alone, or writes only what was read."""
    if x.untyped_storage().data_ptr() != out.untyped_storage().data_ptr():
        return True
    same = x.data_ptr() == out.data_ptr() and x.stride() == out.stride()
    return same and x.element_size() == out.element_size()


def quantize(request: Request, out: Tensor, rotation: Rotation | None = None) -> None:
    """Values of ``decode(encode(x))`` into `out`, each rounded once into its dtype.

    Parameters
    ----------
    request : Request
    out : Tensor of float16, bfloat16, float32 or float64
        x's shape and device, any strides.
    """
    if not _apart(request.x, out):
        request = replace(request, x=request.x.clone())
    _Call(request, rotation).run(out, str(out.dtype).removeprefix("torch."))


def encode(request: Request, rotation: Rotation | None = None) -> Parts:
    """Codes and scales of x."""
    call = _Call(request, rotation)
    width = element_format(request.fmt).code_dtype.name
    codes = torch.empty(request.x.shape, dtype=getattr(torch, width), device=request.x.device)
    scales = call.scales()
    call.run(codes, "codes", scales)
    scaled = isinstance(request.fmt, BlockFormat) and request.fmt.tensor_scaled
    return Parts(codes, scales, call.scalars[1] if scaled else None)


def within(request: Request) -> Tensor:
    """Where the value that is cast lies in ±max, ends included; False for NaN and for blocks
    whose scale is NaN."""
    inside = torch.empty(request.x.shape, dtype=torch.bool, device=request.x.device)
    _Call(request).run(inside, "within")
    return inside


def measure(request: Request) -> tuple[Any, ...]:
    """Counts, sums and extremes of `fpemu.statistics`, in one pass (two with a tensor scale).

    Sums are float64 within a tile and then over the tiles in their order: the same for the same
    tensor, in another order than the CPU's.
    """
    fmt = request.fmt
    scaled = isinstance(fmt, BlockFormat) and fmt.tensor_scaled
    if scaled and dialect_of(fmt) is not None and request.amax is None:
        # Measures skip NaN, whatever the library makes of it.
        request = replace(request, amax=float(tensor_amax(request).view(torch.float32)))
    call = _Call(request)
    scales = call.scales()
    parts = torch.empty((0, MEASURES), dtype=torch.float64, device=request.x.device)
    call.run(parts, "stats", scales)
    found = parts.cpu().numpy()
    size = request.x.numel()
    sums = found[:, :14].sum(0)
    zeros, underflow, subnormal, saturated, nan, inf, nan_out, used = (int(n) for n in sums[:8])
    counts = np.array([size, zeros, underflow, subnormal, saturated, nan, inf, nan_out, used])
    low, high = found[:, 15].min(initial=1 << 20), found[:, 16].max(initial=-(1 << 20))
    blocks, amaxes = np.zeros(4, np.int64), (math.inf, 0.0)
    if scales is not None:
        blocks = _scale_counts(request.fmt, scales)
        amaxes = float(found[:, 18].min(initial=math.inf)), float(found[:, 19].max(initial=0.0))
    worst = float(found[:, 14].max(initial=0.0))
    return counts, sums[8:], worst, (int(low), int(high)), blocks, amaxes


def _scale_counts(fmt: Format | BlockFormat, scales: Tensor) -> np.ndarray:
    """Blocks, and those whose scale is zero, the largest finite, NaN."""
    assert isinstance(fmt, BlockFormat) and fmt.scale is not None
    values = scales
    if scales.dtype == torch.uint8:
        table = torch.from_numpy(value_table(fmt.scale).copy()).to(scales.device)
        values = table[scales.long()]
    top = torch.tensor(fmt.scale.max, dtype=torch.float32, device=scales.device)
    found = [(scales == 0), (values == top), values.isnan()]
    return np.array([scales.numel(), *(int(f.sum()) for f in found)])


def decode(fmt: Format | BlockFormat, parts: Parts, axis: int, out: Tensor) -> None:
    """Values of codes and scales into `out`, each rounded once into its dtype."""
    scheme = scheme_of(fmt)
    assert isinstance(scheme, Scheme)
    codes, target = _raw(parts.codes), _raw(out)
    if codes.numel() == 0:
        return
    scales, kind, tensor, order = codes, "none", parts.tensor_scale, order_of(fmt)
    scale_strides: tuple[int, ...] = (0,) * codes.dim()
    if parts.scales is not None:
        scales = _no_0d(parts.scales)
        if order.ordered:
            assert isinstance(fmt, BlockFormat)
            scales = triton_dialects.factors(fmt, scales, tensor)
        kind = "float32" if scales.dtype == torch.float32 else "codes"
        scales = scales if kind == "float32" else _raw(scales)
        scale_strides = scales.stride()
    blocks = _block_axes(fmt, codes.dim(), axis)

    def place(codes: Tensor, target: Tensor) -> Layout | None:
        return layout(codes.shape, (codes.stride(), target.stride(), scale_strides), blocks, 2)

    where, landing = place(codes, target), target
    if where is None:
        codes, landing = (
            codes.contiguous(),
            torch.empty(target.shape, dtype=target.dtype, device=codes.device),
        )
        where = place(codes, landing)
        assert where is not None
    row = row_of(element_format(fmt))
    _launch(
        kernels.decode_kernel, where, codes, codes, landing, scales,
        codes if tensor is None else tensor, *where.sizes, *where.strides(0), *where.strides(1),
        *where.strides(2), OUT=str(out.dtype).removeprefix("torch."), F=row, S=scheme.scale or row,
        SCALES=kind, TENSOR=tensor is not None and not order.ordered, EXACT=scheme.exact,
        SHORT=scheme.short, ORDER=order,
    )  # fmt: skip
    if landing is not target:
        target.copy_(landing)
