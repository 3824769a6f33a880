"""One reader and one writer for every layout: stored arrays to codes and scales, and back.

Codes and scales are handled as a library stores them, blocks along the last axis; `Shape.axis`
says where the plain weight has that axis.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import numpy as np

from fpemu import packing
from fpemu.backends import scales_shape
from fpemu.checkpoints.layouts import (
    LOCAL,
    VALUES,
    Layout,
    granularity,
    read_format,
    sized,
)
from fpemu.checkpoints.storage import Stored
from fpemu.dialects import DECODE
from fpemu.formats import BlockFormat
from fpemu.packing import TILE_COLS, TILE_ROWS
from fpemu.scaling import NUMPY

#: Elements that are decoded at a time.
PIECE = 1 << 18


class Misfit(Exception):
    """Stored tensors that are not what their layout says; the message is half a sentence."""


@dataclass(frozen=True)
class Shape:
    """A weight's shape in a layout.

    Parameters
    ----------
    rows : tuple of int
        As stored, blocks along the last axis, FP4 codes counted one by one.
    axis : int
        Non-negative axis of the blocks in the plain weight.
    format : BlockFormat
    scale_dtype : str
        Of the stored scales.
    """

    rows: tuple[int, ...]
    axis: int
    format: BlockFormat
    scale_dtype: str

    @property
    def plain(self) -> tuple[int, ...]:
        """Shape of the plain weight."""
        return _moved(self.rows, self.axis)

    @property
    def scales(self) -> tuple[int, ...]:
        """Shape of the scales, blocks along the last axis; () for one scale of the tensor."""
        return scales_shape(self.format, self.rows, len(self.rows) - 1) or ()


def _moved(shape: tuple[int, ...], axis: int) -> tuple[int, ...]:
    """A shape with its last axis at `axis`."""
    rest = list(shape[:-1])
    rest.insert(axis, shape[-1])
    return tuple(rest)


def block_axis(layout: Layout, ndim: int) -> int:
    return (layout.stack_axis if ndim == 3 else -1) % ndim


def grid(layout: Layout, scales: tuple[int, ...]) -> tuple[int, ...]:
    """Shape in which scales are stored."""
    if layout.grid == "linear":
        return scales
    tall, wide = prod(scales[:-1]), scales[-1]
    return -(-tall // TILE_ROWS) * TILE_ROWS, -(-wide // TILE_COLS) * TILE_COLS


# Reading -----------------------------------------------------------------------------------------


def shape_of(layout: Layout, parts: dict[str, Stored], block: tuple[int, int] | None) -> Shape:
    """The shape that stored tensors have together.

    Raises
    ------
    Misfit
        When their dtypes or shapes do not go together in this layout.
    """
    codes, scales = parts["codes"], parts["scales"]
    for part, dtypes in ((codes, layout.code_dtypes), (scales, layout.scale_dtypes)):
        if part.dtype not in dtypes:
            raise Misfit(f"{part.name!r} has dtype {part.dtype}, not {' or '.join(dtypes)}")
    rows = _rows(layout, codes)
    if layout.number is not None:
        number = parts["number"]
        if number.dtype != "F32" or number.size != 1:
            raise Misfit(f"{number.name!r} is {number.dtype} of shape {number.shape}, not one F32")
    axis = block_axis(layout, len(rows))
    wanted = []
    for kind in layout.granularities:
        fmt = _format(layout, kind, rows[-1], block)
        if fmt.is_2d and len(rows) < 2:
            continue
        shape = Shape(rows, axis, fmt, scales.dtype)
        if scales.shape in _grids(layout, shape):
            return shape
        wanted.append(f"{_grids(layout, shape)[0]}")
    raise Misfit(
        f"{scales.name!r} has shape {scales.shape}; {rows} elements need {' or '.join(wanted)}"
    )


def _rows(layout: Layout, codes: Stored) -> tuple[int, ...]:
    shape = codes.shape
    if layout.grouped:
        fmt = read_format(layout.format)
        assert fmt.block is not None
        size = fmt.block[-1] * fmt.element.bits // 8
        if len(shape) < 2 or shape[-1] != size:
            raise Misfit(f"{codes.name!r} has shape {shape}; its last axis must be {size} bytes")
        shape = (*shape[:-2], shape[-2] * size)
    if not shape:
        raise Misfit(f"{codes.name!r} has no axis")
    return (*shape[:-1], shape[-1] * 2) if layout.element.bits == 4 else shape


def _format(layout: Layout, kind: str, columns: int, block: tuple[int, int] | None) -> BlockFormat:
    if kind == "group":
        return read_format(layout.format)
    if kind == "tensor":
        return read_format("fp8_tensor_e4m3")
    if kind == "channel":
        return sized(LOCAL["fp8_channel_e4m3"], columns)
    name = "e8m0" if layout.scaled_by_e8m0 else "fp32"
    fmt = read_format(f"fp8_block_e4m3/2d/{name}")
    if block is None or block == fmt.block:
        return fmt
    return replace(fmt, name=f"{fmt.name}/{block[0]}x{block[1]}", block=block)


def _grids(layout: Layout, shape: Shape) -> list[tuple[int, ...]]:
    """Shapes in which a weight's scales may be stored; the first is written."""
    kind, want = granularity(shape.format), grid(layout, shape.scales)
    if kind == "tensor":
        return [layout.number_shape, (), (1,)]
    if kind == "channel":
        per_row = shape.rows[:-1]
        return (
            [per_row, (*per_row, 1)] if layout.library == "modelopt" else [(*per_row, 1), per_row]
        )
    return [want] if layout.grid == "linear" else [want, (prod(want),)]


def unpack_codes(layout: Layout, shape: Shape, stored: np.ndarray) -> np.ndarray:
    """uint8 codes, one per element, in `shape.rows`."""
    data = stored.view(np.uint8)
    if layout.element.bits == 8:
        return data.reshape(shape.rows)
    if not layout.low_first:
        data = _swapped(data)
    packed = (*shape.rows[:-1], shape.rows[-1] // 2)
    return packing.unpack(data.reshape(packed), layout.element, shape.rows)


def unpack_scales(layout: Layout, shape: Shape, stored: np.ndarray) -> np.ndarray:
    """uint8 codes or float32 scales in `shape.scales`."""
    want = shape.scales
    if shape.scale_dtype in ("F32", "BF16", "F16"):
        return widen(stored, shape.scale_dtype).reshape(want)
    data = stored.view(np.uint8)
    if layout.grid == "linear":
        return data.reshape(want)
    tall, wide = prod(want[:-1]), want[-1]
    if layout.grid == "swizzled":
        return packing.unswizzle(data.reshape(-1), tall, wide).reshape(want)
    return np.ascontiguousarray(data.reshape(grid(layout, want))[:tall, :wide]).reshape(want)


def widen(stored: np.ndarray, dtype: str) -> np.ndarray:
    """float32 of stored F32, BF16 or F16; exact."""
    if dtype == "BF16":
        return (stored.astype(np.uint32) << 16).view(np.float32)
    return stored.astype(np.float32)


# Decoding ----------------------------------------------------------------------------------------


def decode(
    layout: Layout,
    shape: Shape,
    codes: np.ndarray,
    scales: np.ndarray,
    number: np.float32 | None,
    dtype: Any,
) -> Any:
    """Values in the plain weight's shape (a torch tensor), by the library's own products.

    float32 throughout, each product rounded once, then rounded to `dtype`; see
    `fpemu.dialects.DECODE` and `Layout.rounded`.
    """
    import torch

    table = VALUES[layout.elements]
    with ieee_mode(), np.errstate(all="ignore"):
        known = VALUES[layout.scale_values][scales] if scales.dtype == np.uint8 else scales
        order = DECODE[shape.format.decode].factor
        factor = np.asarray(known if order is None else order(NUMPY, known, number), np.float32)
        if layout.rounded == "output":
            factor = torch.from_numpy(factor).to(dtype).to(torch.float32).numpy()
        between = {"BF16": torch.bfloat16, "F16": torch.float16}.get(shape.scale_dtype)
        out = torch.empty(shape.rows, dtype=dtype)
        if not out.numel():
            return torch.movedim(out, -1, shape.axis)
        lead, columns = prod(shape.rows[:-1]), shape.rows[-1]
        flat_codes, flat_out = codes.reshape(lead, columns), out.view(lead, columns)
        step = max(PIECE // max(columns, 1), 1)
        for start in range(0, lead, step):
            stop = min(start + step, lead)
            values = table[flat_codes[start:stop]]
            values *= _spread(shape, factor, start, stop)
            piece = torch.from_numpy(values)
            if layout.rounded == "scale" and between is not None:
                piece = piece.to(between)
            flat_out[start:stop] = piece
    return torch.movedim(out, -1, shape.axis)


def _spread(shape: Shape, factor: np.ndarray, start: int, stop: int) -> np.ndarray:
    """The factors of rows start to stop, one per element (or fewer, where they broadcast)."""
    block = shape.format.block
    if block is None:
        return factor.reshape(1, 1)
    tall = block[0] if len(block) == 2 else 1
    high = shape.rows[-2] if len(shape.rows) > 1 else 1
    # Row r of the flattened weight lies in matrix r // high, in its row r % high.
    row = np.arange(start, stop)
    of_scales = row // max(high, 1) * -(-high // tall) + row % max(high, 1) // tall
    picked = factor.reshape(-1, shape.scales[-1])[of_scales]
    return np.repeat(picked, block[-1], axis=1)[:, : shape.rows[-1]]


def ieee_mode() -> AbstractContextManager[Any]:
    """Subnormals are kept, whatever torch.set_flush_denormal was told; numba sets the mode."""
    try:
        from fpemu.backends.floatmode import ieee_mode as mode
    except ImportError:
        return nullcontext()
    return mode()


# Writing -----------------------------------------------------------------------------------------


def planned(layout: Layout, shape: Shape) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Dtype and shape of every tensor that a weight is stored in, before there is any data.

    Raises
    ------
    Misfit
        When the layout cannot hold that shape.
    """
    *lead, columns = shape.rows
    fmt = shape.format
    if granularity(fmt) == "group":
        assert fmt.block is not None
        if columns % fmt.block[-1]:
            raise Misfit(f"its rows of {columns} are not whole blocks of {fmt.block[-1]}")
    if fmt.element.bits == 4:
        columns //= 2
    codes = (*lead, columns)
    if layout.grouped:
        assert fmt.block is not None
        size = fmt.block[-1] * fmt.element.bits // 8
        codes = (*lead, columns // size, size)
    parts = {
        "codes": (layout.code_dtypes[0], codes),
        "scales": (shape.scale_dtype, _grids(layout, shape)[0]),
    }
    if layout.number is not None:
        parts["number"] = ("F32", layout.number_shape)
    return parts


def pack_codes(layout: Layout, codes: np.ndarray) -> np.ndarray:
    packed = packing.pack(codes, layout.element)
    return packed if layout.low_first or layout.element.bits == 8 else _swapped(packed)


def _swapped(data: np.ndarray) -> np.ndarray:
    """Bytes with their nibbles exchanged."""
    return (data << 4 | data >> 4).astype(np.uint8, copy=False)


def pack_scales(layout: Layout, shape: Shape, scales: np.ndarray) -> np.ndarray:
    if shape.scale_dtype in ("BF16", "F16"):
        narrow = _narrow(scales, shape.scale_dtype)
        if not np.array_equal(widen(narrow, shape.scale_dtype), scales, equal_nan=True):
            raise Misfit(f"has scales that {shape.scale_dtype} does not hold")
        return narrow
    if layout.grid == "linear":
        return scales
    flat = scales.reshape(-1, scales.shape[-1])
    if layout.grid == "swizzled":
        return packing.swizzle(flat)
    padded = np.zeros(grid(layout, scales.shape), np.uint8)
    padded[: flat.shape[0], : flat.shape[1]] = flat
    return padded


def _narrow(scales: np.ndarray, dtype: str) -> np.ndarray:
    if dtype == "BF16":
        return (scales.view(np.uint32) >> 16).astype(np.uint16)
    with np.errstate(over="ignore"):
        return scales.astype(np.float16)
