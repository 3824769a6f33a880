"""What every test shares: one comparison of bits, and inputs that are hard to round."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from fpemu import formats
from fpemu.backends import Request
from fpemu.dialects import dialect_of
from fpemu.formats import BlockFormat, Format

BF16 = np.dtype(ml_dtypes.bfloat16)
ELEMENTS = [name for name, row in formats.TABLE.items() if isinstance(row, Format)]
#: The formats themselves; the dialects, of which there are many, have tests of their own.
BLOCKS = [
    name
    for name, row in formats.TABLE.items()
    if isinstance(row, BlockFormat) and dialect_of(row) is None
]
DIALECTS = [name for name, row in formats.TABLE.items() if dialect_of(row) is not None]
DETERMINISTIC = ("rne", "rna", "rnz", "rtz", "rtp", "rtn", "rto")
OVERFLOWS = ("sat", "nonsat")
#: Backends that a test can force here; the oracle is what they are compared with.
FAST = [
    name
    for name, module in (("numba", "numba"), ("torch", "torch"))
    if importlib.util.find_spec(module)
]
VECTORS = Path(__file__).resolve().parents[2] / "shared" / "vectors"


# Comparison --------------------------------------------------------------------------------------


def as_numpy(a: Any) -> np.ndarray:
    """A numpy array or torch tensor as a numpy array; bfloat16 stays bfloat16."""
    if isinstance(a, np.ndarray | np.generic):
        return np.asarray(a)
    a = a.detach().cpu()
    if str(a.dtype) == "torch.bfloat16":
        import torch

        return a.contiguous().view(torch.int16).numpy().view(BF16)
    return a.numpy()


def bits_of(a: Any) -> np.ndarray:
    """The bits of every element, as unsigned integers."""
    a = as_numpy(a)
    if a.dtype == bool:
        return a.astype(np.uint8)
    native = np.ascontiguousarray(a).astype(a.dtype.newbyteorder("="), copy=False)
    return native.view(f"u{native.dtype.itemsize}").reshape(a.shape)


def assert_same_bits(got: Any, want: Any, inputs: Any = None, note: str = "") -> None:
    """Equal dtype, shape and bits, or an error that shows the first differing inputs in hex."""
    got, want = as_numpy(got), as_numpy(want)
    assert got.dtype == want.dtype, f"{note} dtype {got.dtype}, want {want.dtype}"
    assert got.shape == want.shape, f"{note} shape {got.shape}, want {want.shape}"
    g, w = bits_of(got), bits_of(want)
    if np.array_equal(g, w):
        return
    where = np.argwhere(g != w)
    digits = 2 * g.dtype.itemsize
    lines = [f"{note} {len(where)} of {g.size} differ; the first:"]
    x = None if inputs is None else as_numpy(inputs)
    for index in map(tuple, where[:5]):
        line = f"  at {tuple(map(int, index))}: got 0x{g[index]:0{digits}x}, want 0x{w[index]:0{digits}x}"
        if x is not None and x.shape == g.shape:
            line += f", input 0x{bits_of(x)[index]:0{2 * x.dtype.itemsize}x} ({x[index]})"
        lines.append(line)
    raise AssertionError("\n".join(lines))


def assert_same_parts(got: Any, want: Any, inputs: Any = None, note: str = "") -> None:
    """`assert_same_bits` for codes, scales and tensor scale of `Parts` or `Encoded`."""
    assert_same_bits(got.codes, want.codes, inputs, f"{note} codes:")
    for name in ("scales", "tensor_scale"):
        g, w = getattr(got, name), getattr(want, name)
        assert (g is None) == (w is None), f"{note} {name}: got {g!r}, want {w!r}"
        if w is not None:
            assert_same_bits(g, w, note=f"{note} {name}:")


# Requests ----------------------------------------------------------------------------------------


def request(x: np.ndarray, fmt: str | Format | BlockFormat, **options: Any) -> Request:
    """A `Request` as the verbs would build it, for calling a backend's functions directly."""
    row = formats.get_format(fmt)
    element = row.element if isinstance(row, BlockFormat) else row
    options.setdefault("overflow", element.overflow)
    options.setdefault("axis", max(x.ndim - 1, 0))
    if x.dtype == BF16:
        return Request(x.view(np.uint16), "bfloat16", row, **options)
    return Request(x, x.dtype.name, row, **options)


# Inputs ------------------------------------------------------------------------------------------


def all16(dtype: Any) -> np.ndarray:
    """All 65,536 patterns of float16 or bfloat16."""
    return np.arange(1 << 16, dtype=np.uint16).view(dtype)


def patterns(dtype: Any, n: int, seed: int) -> np.ndarray:
    """Random bit patterns: every exponent, subnormals, Inf and NaN alike."""
    dtype = np.dtype(dtype)
    rng = np.random.default_rng(seed)
    return rng.integers(0, 1 << 8 * dtype.itemsize, n, f"u{dtype.itemsize}").view(dtype)


@cache
def ties(name: str, dtype: str = "float32") -> np.ndarray:
    """Each value and each midpoint of a format of at most 16 bits, and the two neighbours of each,
    both signs, in `dtype`, with the specials."""
    values = formats.get_format(name).values()
    v = np.unique(np.abs(values[np.isfinite(values)]))
    if len(v) > 4096:  # the ends and a sample between
        v = np.concatenate([v[:1024], v[1024:-1024:61], v[-1024:]])
    top = v[-1]
    beyond = np.array([top + (top - v[-2]) / 2, top + (top - v[-2]), 2 * top, 4 * top])
    with np.errstate(over="ignore"):
        points = np.concatenate([v, (v[1:] + v[:-1]) / 2, beyond, specials(dtype)]).astype(dtype)
        points = points[~np.isnan(points)]
        near = np.concatenate(
            [points, np.nextafter(points, np.array(np.inf, dtype)),
             np.nextafter(points, np.array(-np.inf, dtype))]
        )  # fmt: skip
    return np.concatenate([near, -near, np.array([np.nan, -np.nan], dtype)])


def specials(dtype: Any = "float32") -> np.ndarray:
    """Zeros, infinities, and the ends of the dtype's range."""
    info = np.finfo(dtype)
    tiny = info.smallest_subnormal
    return np.array(
        [0, -0.0, np.inf, -np.inf, info.max, -info.max, info.tiny, tiny, -tiny], dtype=dtype
    )


def block_data(rows: int, cols: int, seed: int, special: bool = True) -> np.ndarray:
    """float32 rows at scales from subnormal to huge, with bfloat16-exact rows (ties), zero rows,
    power-of-two amaxes and their neighbours, and rows holding NaN, Inf and -0."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((rows, cols)).astype(np.float32)
    exponent = rng.integers(-149, 126, (rows, 1))
    exponent[rows // 3 :: 3] = rng.integers(-12, 8, (len(exponent[rows // 3 :: 3]), 1))
    x = np.ldexp(x, exponent).astype(np.float32)
    coarse = rng.random(rows) < 0.5  # exact in bfloat16: hits ties that float32 noise misses
    x[coarse] = (x[coarse].view(np.uint32) & 0xFFFF0000).view(np.float32)
    for row in range(0, rows, 5):
        peak = np.ldexp(np.float32(rng.choice([1, 1.5, 1.75, 1.9375])), int(exponent[row, 0]))
        x[row, rng.integers(cols)] = np.nextafter(
            np.float32(peak), np.float32(rng.choice([0, np.inf, peak]))
        )
    x[1::11] = 0
    x[2::11] = -0.0
    x[4::13, ::2] = -0.0
    if special:
        for row, bad in zip(
            range(3, rows, 17), (np.nan, np.inf, -np.inf, -np.nan) * rows, strict=False
        ):
            x[row, rng.integers(cols)] = bad
        if rows > 9:
            x[9] = np.nan
    return x


def views(x: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    """2-D data in every memory layout, each equal to `x` or a part of it."""
    wide = np.zeros((x.shape[0], 2 * x.shape[1] + 3), x.dtype)
    wide[:, 1:-2:2] = x
    readonly = x.copy()
    readonly.flags.writeable = False
    yield "transposed", np.ascontiguousarray(x.T).T
    yield "every other column", wide[:, 1:-2:2]
    yield "negative strides", x[::-1, ::-1].copy()[::-1, ::-1]
    yield "read-only", readonly
    yield "rows cut", np.concatenate([x, x])[x.shape[0] :]
    yield "broadcast", np.broadcast_to(x[:1], x.shape)
    yield "column broadcast", np.broadcast_to(x[:, :1], x.shape)


# Recorded vectors --------------------------------------------------------------------------------


def vectors(name: str) -> Any:
    """A file of recorded vectors, or a skip where the checkout stands alone."""
    import gzip

    path = VECTORS / name
    if not path.exists():
        pytest.skip(f"recorded vectors are not beside this checkout ({name})")
    raw = path.read_bytes()
    return json.loads(gzip.decompress(raw) if name.endswith(".gz") else raw)


def unhex(hexes: list[str], dtype: Any = "float32") -> np.ndarray:
    """Bit patterns written in hex, as floats."""
    dtype = np.dtype(dtype)
    return np.array([int(h, 16) for h in hexes], dtype=f"u{dtype.itemsize}").view(dtype)


# Calling the package -----------------------------------------------------------------------------


def give(backend: str, x: np.ndarray) -> Any:
    """The array in the container that a backend works on."""
    if backend != "torch":
        return x
    import torch

    x = np.asarray(x)
    x = np.ascontiguousarray(x).reshape(x.shape) if any(s < 0 for s in x.strides) else x
    x = x if x.flags.writeable else x.copy()
    if x.dtype == BF16:
        return torch.from_numpy(x.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(x)


@cache
def block_records() -> dict[str, list[dict[str, Any]]]:
    """Blocks that were run through other libraries, by implementation; empty where absent."""
    found: dict[str, list[dict[str, Any]]] = {}
    if (VECTORS / "block_vectors.json.gz").exists():
        for record in vectors("block_vectors.json.gz")["blocks"]:
            found.setdefault(record["impl"], []).append(record)
    return found


def decoded(fmt: Format, codes: np.ndarray, dtype: Any) -> np.ndarray:
    """Values of element codes, rounded once into `dtype`; NaN canonical. All lie on float32's grid."""
    if fmt.name == "fp32":
        values = codes.view(np.float32).copy()
    else:
        values = fmt.values()[codes].astype(np.float32)
    values[np.isnan(values)] = np.nan
    with np.errstate(over="ignore"):
        return values.astype(dtype)
