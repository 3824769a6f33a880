"""Blocks for the live comparison with other libraries: where quantizers part, and ordinary data.

A case is a tensor (float32, or bfloat16 as its own dtype), a family it is counted under, and
sometimes a tensor amax that is not the tensor's own. Every number comes from one seed.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from helpers import BF16

#: Columns of every tensor: whole blocks of 16 and 32.
COLUMNS = 128
E2M1_MIDPOINTS = np.float32([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5])
#: Where one MX scale rule or another turns: maxima of the elements, and half steps below 2.
TURNS = [1, 1.25, 1.5, 1.75, 1.875, 1.9375, 1.96875, 1.984375, 1.9921875, 2]


class Case(NamedTuple):
    family: str
    x: np.ndarray
    amax: np.float32 | None = None


def gaussian(rng: np.random.Generator, rows: int) -> np.ndarray:
    return rng.standard_normal((rows, COLUMNS)).astype(np.float32)


def powers(rng: np.random.Generator, low: int, high: int, blocks: tuple[int, int]) -> np.ndarray:
    """Random exponents in [low, high), one a block."""
    return rng.integers(low, high, blocks)


def scaled(x: np.ndarray, exponents: np.ndarray) -> np.ndarray:
    """Blocks times powers of two; what leaves float32 becomes subnormal, zero or the largest."""
    spread = np.repeat(exponents, x.shape[1] // exponents.shape[1], axis=1)
    largest = np.finfo(np.float32).max
    wide = np.ldexp(x.astype(np.float64), spread)
    return np.clip(wide, -largest, largest).astype(np.float32)


def coarse(x: np.ndarray) -> np.ndarray:
    """float32 values that bfloat16 holds exactly: these meet ties that float32 noise misses."""
    return (x.view(np.uint32) & 0xFFFF0000).view(np.float32)


def nudged(rng: np.random.Generator, x: np.ndarray, ulps: int) -> np.ndarray:
    """A third of the values as they are, the others up to `ulps` floats away from zero or to it."""
    away = rng.integers(1, ulps + 1, x.shape) * rng.integers(-1, 2, x.shape)
    bits = (x.view(np.uint32) & 0x7FFFFFFF).astype(np.int64) + away
    bits = np.clip(bits, 0, 0x7F7FFFFF).astype(np.uint32)
    return (bits | x.view(np.uint32) & 0x80000000).view(np.float32)


def sprinkled(
    rng: np.random.Generator, x: np.ndarray, block: int, values: list[float]
) -> np.ndarray:
    """One element of every other block replaced by one of `values`; at times several."""
    x = x.copy().reshape(-1, block)
    rows = np.arange(0, len(x), 2)
    for _ in range(2):
        x[rows, rng.integers(0, block, len(rows))] = rng.choice(np.float32(values), len(rows))
        rows = rows[::4]
    return x.reshape(-1, COLUMNS)


def zeroed(rng: np.random.Generator, x: np.ndarray, block: int) -> np.ndarray:
    """Zero blocks of both signs, blocks with one value left, and zeros strewn about."""
    x = x.copy().reshape(-1, block)
    x[1::4] = rng.choice(np.float32([0.0, -0.0]), x[1::4].shape)
    keep = x[2::4, 3].copy()
    x[2::4] = rng.choice(np.float32([0.0, -0.0]), x[2::4].shape)
    x[2::4, 3] = keep
    some = rng.random(x[3::4].shape) < 0.5
    x[3::4][some] = rng.choice(np.float32([0.0, -0.0, 1e-3, -1e-3]), int(some.sum()))
    return x.reshape(-1, COLUMNS)


def bfloat16(x: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):
        return x.astype(BF16)


# NVFP4 -------------------------------------------------------------------------------------------


def nvfp4(rng: np.random.Generator) -> Iterator[Case]:
    per_row = COLUMNS // 16

    yield Case("gaussian float32", gaussian(rng, 128))
    yield Case("gaussian bfloat16", bfloat16(gaussian(rng, 128)))
    yield Case("gaussian small float32", gaussian(rng, 64) * np.float32(2e-3))
    yield Case("gaussian small bfloat16", bfloat16(gaussian(rng, 64) * np.float32(2e-3)))
    for _ in range(8):
        x = coarse(gaussian(rng, 32) * np.float32(np.exp(rng.uniform(-6, 6))))
        peak = np.float32(np.abs(x).max() * rng.uniform(1, 4))
        yield Case("bfloat16 values in float32", x, coarse(peak.reshape(1, 1))[0, 0])
    for low in np.linspace(-130, 108, 14).astype(int):
        spread = int(low) + powers(rng, 0, 20, (16, per_row))
        x = scaled(gaussian(rng, 16), spread)
        yield Case("log-uniform float32", x)
        yield Case("log-uniform bfloat16", bfloat16(x))

    # With T = amax/2688 a power of two and A = 6 * s * T, every rule finds the same scale s, and
    # midpoint * s * T is a tie for the elements.
    codes = np.arange(1, 127, dtype=np.uint8)
    scales = np.where(codes < 8, codes * 2.0**-9, (8 + codes % 8) * 2.0 ** (codes // 8 - 10.0))
    for exponent in (-40, -8, 0, 3, 50):
        s = rng.choice(scales, (32, per_row)).repeat(16, axis=1)
        points = rng.choice(E2M1_MIDPOINTS, (32, COLUMNS)) * rng.choice([-1, 1], (32, COLUMNS))
        points[:, ::16] = 6
        x = nudged(rng, (points * s * 2.0**exponent).astype(np.float32), 2)
        x[:, ::16] = (6 * s * 2.0**exponent)[:, ::16]
        yield Case("element ties", x, np.float32(2688 * 2.0**exponent))
        middles = (scales[1:] + scales[:-1]) / 2
        peak = 6 * rng.choice(middles, (32, per_row)) * 2.0**exponent
        x = gaussian(rng, 32)
        x *= np.float32(0.4) * peak.repeat(16, axis=1).astype(np.float32) / np.float32(4)
        x = x.astype(np.float32)
        x[:, ::16] = nudged(rng, peak.astype(np.float32), 4)
        yield Case("scale ties", x, np.float32(2688 * 2.0**exponent))

    yield Case("zeros", zeroed(rng, gaussian(rng, 32), 16))
    yield Case("zeros", bfloat16(zeroed(rng, gaussian(rng, 32), 16)))
    for values, name in (([np.nan, -np.nan], "NaN"), ([np.inf, -np.inf], "Inf")):
        x = sprinkled(rng, gaussian(rng, 32), 16, values)
        yield Case(f"{name} in blocks", x, np.float32(4.5))
        yield Case(f"{name} in blocks", bfloat16(x), np.float32(4.5))
        yield Case(f"{name} in the tensor", x)
    huge = scaled(gaussian(rng, 32), powers(rng, 118, 128, (32, per_row)))
    yield Case("huge", sprinkled(rng, huge, 16, [3.4028235e38, -3.4028235e38]))
    yield Case("huge", scaled(gaussian(rng, 32), powers(rng, 100, 124, (32, per_row))))
    yield Case("zero tensor", zeroed(rng, gaussian(rng, 4), 16) * np.float32(0))
    for exponent in (-149, -146, -140, -134, -130, -128, -127, -126, -124, -121, -118, -116, -113):
        spread = powers(rng, exponent - 3, exponent + 1, (8, per_row))
        yield Case("tiny tensor amax", scaled(gaussian(rng, 8), spread))
        yield Case("tiny tensor amax", bfloat16(scaled(gaussian(rng, 8), spread)))
    for factor in (2.0**-12, 0.01, 0.3, 0.9, 3.0, 100.0, 2.0**14, 2.0**40):
        x = gaussian(rng, 16)
        amax = np.float32(np.abs(x).max() * factor)
        yield Case("another tensor amax", x, amax)
        yield Case("another tensor amax", bfloat16(x), coarse(amax.reshape(1, 1))[0, 0])


# MX ----------------------------------------------------------------------------------------------


def mx(rng: np.random.Generator) -> Iterator[Case]:
    per_row = COLUMNS // 32
    yield Case("gaussian float32", gaussian(rng, 128))
    yield Case("gaussian bfloat16", bfloat16(gaussian(rng, 128)))
    wide = scaled(gaussian(rng, 256), powers(rng, -149, 127, (256, per_row)))
    yield Case("log-uniform float32", wide)
    yield Case("log-uniform bfloat16", bfloat16(wide))
    yield Case("log-uniform bfloat16 values in float32", coarse(wide[:128]))

    # Amaxes at the turning points of every rule, and some floats to either side.
    for dtype in ("float32", "bfloat16"):
        for ulps in (1, 3, 60):
            rows = 128
            peak = rng.choice(np.float32(TURNS), (rows, per_row))
            exponents = powers(rng, -140, 127, (rows, per_row))
            x = gaussian(rng, rows) * np.float32(0.2)
            x = scaled(np.clip(x, -0.99, 0.99), exponents)
            peak = scaled(peak, exponents)
            if dtype == "bfloat16":
                top = (peak.view(np.uint32) >> 16).astype(np.int64)
                top += rng.integers(-min(ulps, 3), min(ulps, 3) + 1, top.shape)
                peak = (np.clip(top, 0, 0x7F7F).astype(np.uint32) << 16).view(np.float32)
            else:
                peak = nudged(rng, peak, ulps)
            x[:, ::32] = peak * rng.choice(np.float32([-1, 1]), peak.shape)
            yield Case(f"scale boundaries {dtype}", bfloat16(x) if dtype == "bfloat16" else x)

    # One float beside max * 2^-127, where A / max is subnormal.
    peak = rng.choice(np.float32([6, 7.5, 28, 448, 57344]), (32, per_row)) * np.float32(2.0**-127)
    x = scaled(
        np.clip(gaussian(rng, 32) * np.float32(0.2), -0.9, 0.9), np.full((32, per_row), -127)
    )
    x[:, ::32] = (peak.view(np.int32) + rng.integers(-1, 2, peak.shape, np.int32)).view(np.float32)
    yield Case("scale boundaries float32", x)

    # Ties of every element format: k and a half steps of each binade, times a power of two.
    for exponent in (-120, -30, 0, 5, 100):
        steps = rng.integers(1, 64, (64, COLUMNS)) / rng.choice(
            [4.0, 8.0, 16.0, 32.0], (64, COLUMNS)
        )
        x = steps * rng.choice([-1, 1], steps.shape)
        x[:, ::32] = rng.choice([4, 6, 7, 7.5, 28, 31], (64, per_row))
        yield Case("element ties", nudged(rng, np.ldexp(x, exponent).astype(np.float32), 1))
        yield Case("element ties", bfloat16(np.ldexp(x, exponent).astype(np.float32)))

    yield Case("zeros", zeroed(rng, gaussian(rng, 64), 32))
    yield Case("zeros", bfloat16(zeroed(rng, gaussian(rng, 64), 32)))
    for values, name in (([np.nan, -np.nan], "NaN"), ([np.inf, -np.inf], "Inf")):
        x = sprinkled(rng, gaussian(rng, 64), 32, values)
        yield Case(f"{name} in blocks", x)
        yield Case(f"{name} in blocks", bfloat16(x))
    huge = scaled(gaussian(rng, 64), powers(rng, 118, 128, (64, per_row)))
    yield Case("huge", sprinkled(rng, huge, 32, [3.4028235e38, -3.4028235e38]))
    yield Case("huge", bfloat16(scaled(gaussian(rng, 64), powers(rng, 118, 126, (64, per_row)))))
    yield Case("zero tensor", zeroed(rng, gaussian(rng, 4), 32) * np.float32(0))
    tiny = scaled(gaussian(rng, 64), powers(rng, -152, -112, (64, per_row)))
    yield Case("subnormal", tiny)
    yield Case("subnormal", bfloat16(tiny))


def cases(seed: int) -> dict[str, Case]:
    """All cases by name: ``16/...`` for NVFP4, ``32/...`` for MX."""
    found = {}
    for block, make in ((16, nvfp4), (32, mx)):
        for i, case in enumerate(make(np.random.default_rng([seed, block]))):
            found[f"{block}/{i}"] = case
    return found
