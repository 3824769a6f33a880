"""Does the software on this machine compute what exact arithmetic says? For ``fpemu verify``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fpemu.casting import ROUNDING_NAMES
from fpemu.dialects import dialect_of
from fpemu.formats import BlockFormat, Format, get_format, list_formats

BACKENDS = ("numba", "torch")
#: Row length of the arrays that block formats are checked on: blocks of 16, 32 and 128 end short.
ROW = 72


@dataclass
class Result:
    """What one format gave.

    `compared` counts results (codes and decoded values) per backend; `differing` those whose bits
    are not the oracle's; `missing` says why a backend could not serve.
    """

    name: str
    compared: int = 0
    differing: dict[str, int] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)


def element_values(fmt: Format, count: int, rng: np.random.Generator) -> np.ndarray:
    """float32 inputs that are hard for a cast: grid points, ties and their neighbours, any bits."""
    grid = fmt.values() if fmt.bits <= 16 else rng.standard_normal(count).astype(np.float32)
    grid = np.unique(grid[np.isfinite(grid)]).astype(np.float64)
    ties = (grid[1:] + grid[:-1]) / 2
    with np.errstate(over="ignore"):
        picked = rng.choice(np.concatenate([grid, ties]), count // 2).astype(np.float32)
        near = np.nextafter(picked, np.float32(rng.choice([-np.inf, np.inf])))
    patterns = rng.integers(0, 1 << 32, count - count // 2, dtype=np.uint32).view(np.float32)
    x = np.concatenate([np.where(rng.random(picked.size) < 0.5, picked, near), patterns])
    x[:6] = [0.0, -0.0, np.inf, -np.inf, 1e-45, np.nan]
    return x


def block_values(count: int, rng: np.random.Generator) -> np.ndarray:
    """float32 rows that are hard for a scale rule: scales far apart, bfloat16's ties, a few specials."""
    rows = -(-count // ROW)
    x = rng.standard_normal((rows, ROW)).astype(np.float32)
    x *= np.float32(2.0) ** rng.integers(-20, 20, (rows, 1)).astype(np.float32)
    x[::2] = (x[::2].view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)
    x[rows // 2, ::5] = -0.0
    x[-1] *= np.float32(0)
    x[0, :3] = [np.nan, 1e-45, -1e-40]
    return x


def check(pattern: str = "*", values: int = 2048, seed: int = 0) -> Iterator[Result]:
    """Cast `values` numbers into every matching format by every rounding, with every backend.

    ``"*"`` means the formats themselves; name the dialects to have them checked (``"nvfp4/*"``).

    Codes, scales and decoded values are compared with the oracle's, bit for bit.

    Yields
    ------
    Result
        One per format, in table order.
    """
    names = list_formats(pattern)
    if pattern == "*":  # the dialects, of which there are many, only when they are asked for
        names = [name for name in names if dialect_of(get_format(name)) is None]
    if not names:
        get_format(pattern, "verify")  # raises, with the nearest name
    for name in names:
        yield _check_format(get_format(name), values, seed)


def _outputs(
    x: np.ndarray, fmt: Format | BlockFormat, backend: str, options: dict[str, Any]
) -> tuple[np.ndarray, ...]:
    """Codes, scales, tensor scale and values, as a backend gives them."""
    import fpemu

    encoded = fpemu.encode(x, fmt, backend=backend, **options)
    parts = (encoded.codes, encoded.scales, encoded.tensor_scale)
    values = fpemu.quantize(x, fmt, backend=backend, **options)
    return (*(np.asarray(part) for part in parts if part is not None), values)


def _count_different(got: np.ndarray, want: np.ndarray) -> int:
    """How many elements differ in any bit (all of them where shape or dtype do)."""
    if got.dtype != want.dtype or got.shape != want.shape:
        return want.size
    kind = f"u{want.dtype.itemsize}"
    return int(np.count_nonzero(np.atleast_1d(got).view(kind) != np.atleast_1d(want).view(kind)))


def _check_format(fmt: Format | BlockFormat, values: int, seed: int) -> Result:
    import fpemu

    result = Result(fmt.name)
    rng = np.random.default_rng(seed)
    element = fmt.element if isinstance(fmt, BlockFormat) else fmt
    share = max(1, values // len(ROUNDING_NAMES))
    dialect = dialect_of(fmt)
    for rounding in ROUNDING_NAMES:
        if dialect is not None and dialect.rounds_itself and rounding != "rne":
            continue
        if isinstance(fmt, BlockFormat):
            x = block_values(share, rng)
        else:
            x = element_values(fmt, share, rng)
        if element.is_integer:
            x[np.isnan(x)] = 0  # integers refuse NaN
        options = {"rounding": rounding, "seed": seed if rounding == "sr" else None}
        want = _outputs(x, fmt, "oracle", options)
        result.compared += sum(map(np.size, want))
        for backend in BACKENDS:
            if backend in result.missing:
                continue
            try:
                got = _outputs(x, fmt, backend, options)
            except fpemu.BackendError as error:
                result.missing[backend] = str(error)
                continue
            wrong = sum(_count_different(g, w) for g, w in zip(got, want, strict=True))
            result.differing[backend] = result.differing.get(backend, 0) + wrong
    return result
