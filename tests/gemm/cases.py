"""Operands that are hard to add: every kind by every unit, from one seed."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from fpemu.casting import value_table
from fpemu.encoded import Encoded
from fpemu.formats import E8M0, FP32, UE4M3, BlockFormat, Format
from fpemu.gemm import Unit

KINDS = (
    "normal", "positive", "cancel", "wide", "subnormal", "overflow", "zeros", "codes", "specials",
    "huge c", "tiny c",
)  # fmt: skip


class Case(NamedTuple):
    kind: str
    a: Any  # float32 values [M, K], or Encoded
    b: Any
    c: np.ndarray


def values_of(fmt: Format) -> np.ndarray:
    """All finite float32 values of a format, or a large sample of fp32's and tf32's."""
    if fmt.bits <= 16:
        table = value_table(fmt)
        return np.unique(table[np.isfinite(table)])
    bits = np.random.default_rng(1).integers(0, 1 << 32, 1 << 16, np.uint32)
    bits &= np.uint32(0xFFFFFFFF << (23 - fmt.man_bits) & 0xFFFFFFFF)
    x = bits.view(np.float32)
    return np.unique(x[np.isfinite(x)])


def nearest(x: np.ndarray, fmt: Format) -> np.ndarray:
    """Values of a format near `x` (any will do: they are inputs)."""
    if fmt == FP32:
        return x.astype(np.float32)
    table = values_of(fmt) if fmt.bits <= 16 else None
    if table is None:
        return (x.astype(np.float32).view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32)
    return table[np.clip(np.searchsorted(table, x), 0, len(table) - 1)]


def operand(kind: str, fmt: Format, shape: tuple[int, int], rng: np.random.Generator) -> np.ndarray:
    x = rng.standard_normal(shape)
    every = values_of(fmt)
    if kind == "positive":
        return nearest(np.abs(x), fmt)
    if kind == "wide":
        return nearest(
            np.ldexp(x, rng.integers(max(fmt.emin, -60), min(fmt.emax, 60) + 1, shape)), fmt
        )
    if kind == "subnormal":
        return nearest(np.ldexp(x, fmt.emin - rng.integers(0, fmt.man_bits + 1, shape)), fmt)
    if kind == "overflow":
        return nearest(np.copysign(fmt.max * rng.uniform(0.5, 1, shape), x), fmt)
    if kind == "zeros":
        return np.where(rng.random(shape) < 0.8, np.copysign(0, x), nearest(x, fmt)).astype(
            np.float32
        )
    if kind in ("codes", "specials"):
        y = rng.choice(every, shape)
        if kind == "specials":
            bad = [
                v
                for v, has in (
                    (np.nan, fmt.has_nan),
                    (np.inf, fmt.has_inf),
                    (-np.inf, fmt.has_inf),
                    (0.0, True),
                )
                if has
            ]
            where = rng.random(shape) < 0.02
            y[where] = rng.choice(np.array(bad, np.float32), int(where.sum()))
        return y.astype(np.float32)
    return nearest(x, fmt)


def accumulator(kind: str, shape: tuple[int, int], rng: np.random.Generator) -> np.ndarray:
    c = rng.standard_normal(shape).astype(np.float32)
    if kind == "huge c":
        c = np.ldexp(c, rng.integers(0, 126, shape))
    elif kind in ("tiny c", "subnormal"):
        c = np.ldexp(c, rng.integers(-148, -10, shape))
    elif kind in ("zeros", "cancel"):
        c = np.where(rng.random(shape) < 0.5, np.copysign(0, c), c)
    elif kind == "specials":
        special = np.array([np.nan, np.inf, -np.inf, 0, 65519, 65520, 3e38], np.float32)
        c = np.where(rng.random(shape) < 0.2, rng.choice(special, shape), c)
    elif kind == "codes":
        c = rng.integers(0, 1 << 32, shape, np.uint32).view(np.float32)
    return c.astype(np.float32)


def _scaled(
    kind: str, unit: Unit, size: int, x: np.ndarray, axis: int, rng: np.random.Generator
) -> Encoded:
    """Element values as codes, with scales of all sorts."""
    element, scale = (unit.a, unit.b)[axis == 0], unit.scale
    assert scale is not None
    stored = E8M0 if scale == E8M0 else UE4M3
    fmt = BlockFormat(f"{unit.name} operand", element, (size,), stored, "mx_floor")
    table = value_table(element)
    order = np.argsort(table, kind="stable")
    codes = order[np.searchsorted(table[order], x.ravel())].reshape(x.shape).astype(np.uint8)
    codes = np.where(np.isnan(x), element.nan_code or 0, codes).astype(np.uint8)
    shape = list(x.shape)
    shape[axis] = -(-shape[axis] // size)
    if kind in ("codes", "wide"):
        scales = rng.integers(0, scale.max_mag + 1, shape)
    elif kind == "specials":
        scales = np.where(rng.random(shape) < 0.05, scale.nan_code, rng.integers(40, 80, shape))
    elif kind == "overflow":
        scales = rng.integers(max(scale.max_mag - 10, 0), scale.max_mag + 1, shape)
    elif kind in ("subnormal", "tiny c"):
        scales = rng.integers(0, 20, shape)
    else:
        middle = 127 if scale == E8M0 else 56
        scales = rng.integers(middle - 8, middle + 9, shape)
    return Encoded(codes, scales.astype(np.uint8), None, fmt, axis, np.dtype(np.float32))


def case(kind: str, unit: Unit, rows: int, depth: int, cols: int, seed: int = 0) -> Case:
    """One product of a unit, hard in the way that `kind` says."""
    rng = np.random.default_rng([seed, zlib.crc32(f"{kind} {unit.name}".encode())])
    a = operand(kind, unit.a, (rows, depth), rng)
    b = operand(kind, unit.b, (depth, cols), rng)
    c = accumulator(kind, (rows, cols), rng)
    if kind == "cancel":  # large terms in pairs that cancel, small ones among them
        half = depth // 2
        a[:, half : 2 * half], b[half : 2 * half] = -a[:, :half], b[:half]
        order = rng.permutation(depth)
        a, b = a[:, order], b[order]
        small = rng.random(depth) < 0.2
        a[:, small] = nearest(np.ldexp(a[:, small], -6), unit.a)
    if unit.scale is None:
        return Case(kind, a, b, c)
    size = int(rng.choice(unit.scale_block))
    return Case(kind, _scaled(kind, unit, size, a, 1, rng), _scaled(kind, unit, size, b, 0, rng), c)


def cases(unit: Unit, rows: int, depth: int, cols: int, seed: int = 0) -> Iterator[Case]:
    for kind in KINDS:
        yield case(kind, unit, rows, depth, cols, seed)


__all__ = ["KINDS", "Case", "case", "cases"]
