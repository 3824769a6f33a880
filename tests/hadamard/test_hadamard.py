"""`fpemu.hadamard`: the matrix, the operation order, every layout and container."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from helpers import BF16, FAST, assert_same_bits, block_data, give, patterns, specials, views

import fpemu
from fpemu import rotation

SIZES = (2, 4, 8, 16, 32, 64, 128)
TE = (1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1)


def sylvester(size: int) -> np.ndarray:
    """H[i, j] = (-1)**popcount(i & j), as integers."""
    return np.array([[(-1) ** (i & j).bit_count() for j in range(size)] for i in range(size)])


def signs_of(size: int, seed: int = 3) -> list[int]:
    return np.random.default_rng(seed).choice([-1, 1], size).tolist()


def reference(x: np.ndarray, signs: Any, inverse: bool) -> np.ndarray:
    """The documented order, one float32 operation at a time, on blocks along the last axis."""
    size = x.shape[-1]
    signs = np.float32(np.ones(size) if signs is None else signs)
    with np.errstate(all="ignore"):
        v = [x[..., i].astype(np.float32) for i in range(size)]
        if not inverse:
            v = [a * s for a, s in zip(v, signs, strict=True)]
        h = 1
        while h < size:
            v = [v[i ^ h] - v[i] if i & h else v[i] + v[i ^ h] for i in range(size)]
            h *= 2
        v = [a * np.float32(size**-0.5) for a in v]
        if inverse:
            v = [a * s for a, s in zip(v, signs, strict=True)]
        y = np.stack(v, -1).astype(x.dtype)
    return np.where(np.isnan(y), np.array(np.nan, x.dtype), y)


# The matrix --------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", SIZES)
def test_scale_is_the_nearest_float32(size: int) -> None:
    """(2 c)**2 size compared with the squares of the midpoints around c, exactly."""
    one = np.zeros(size, np.float32)
    one[0] = 1
    c = fpemu.hadamard(one, size=size)[0]
    low = (Fraction(float(np.nextafter(c, np.float32(0)))) + Fraction(float(c))) / 2
    high = (Fraction(float(np.nextafter(c, np.float32(2)))) + Fraction(float(c))) / 2
    assert low**2 < Fraction(1, size) < high**2
    if size in (4, 16, 64):
        assert Fraction(float(c)) ** 2 == Fraction(1, size)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("inverse", [False, True])
def test_integers_against_the_exact_product(size: int, inverse: bool) -> None:
    """Sums of small integers are exact in float32: the result is the exact product, rounded once."""
    signs = signs_of(size)
    matrix = np.diag(signs) @ sylvester(size)
    matrix = matrix.T if inverse else matrix
    x = np.random.default_rng(size).integers(-1000, 1001, (6, 3 * size))
    sums = (x.reshape(-1, size) @ matrix).reshape(x.shape)
    want = sums.astype(np.float32) * np.float32(size**-0.5)
    for axis, data, goal in ((1, x, want), (0, x.T, want.T)):
        got = fpemu.hadamard(
            np.ascontiguousarray(data, np.float32),
            size=size,
            signs=signs,
            axis=axis,
            inverse=inverse,
        )
        assert_same_bits(got + 0, goal + 0, data)  # zeros of either sign


@pytest.mark.parametrize("size", SIZES)
def test_error_bound(size: int) -> None:
    """Against exact rationals: log2(size) roundings of sums, one of the product."""
    u, stages = Fraction(1, 1 << 24), size.bit_length() - 1
    rng = np.random.default_rng(size)
    x = np.ldexp(rng.standard_normal(2 * size), rng.integers(-20, 20, 2 * size)).astype(np.float32)
    got, h = fpemu.hadamard(x, size=size), sylvester(size)
    c = Fraction(float(np.float32(size**-0.5)))
    for block in range(2):
        exact = [Fraction(float(v)) for v in x[block * size :][:size]]
        total = sum(abs(v) for v in exact)
        for j in range(size):
            value = c * sum(int(h[i, j]) * v for i, v in enumerate(exact))
            bound = c * total * ((1 + u) ** (stages + 1) - 1)
            assert abs(Fraction(float(got[block * size + j])) - value) <= bound


@pytest.mark.parametrize("size", [4, 16, 64])
def test_round_trip_is_exact_where_sums_are(size: int) -> None:
    x = np.random.default_rng(0).integers(-(1 << 10), 1 << 10, (5, 2 * size)).astype(np.float32)
    for signs in (None, signs_of(size)):
        y = fpemu.hadamard(x, size=size, signs=signs)
        back = fpemu.hadamard(y, size=size, signs=signs, inverse=True)
        assert_same_bits(back + 0, x + 0, x)


def test_transform_engine_matrix() -> None:
    matrix = fpemu.hadamard(np.eye(16, dtype=BF16), signs="te").astype(np.float64)
    assert (matrix == np.diag(TE) @ sylvester(16) / 4).all()
    assert rotation.TE_SIGNS == TE


def test_seeded_signs_are_philox_bits() -> None:
    from fpemu.rng import philox

    words = philox(np.arange(32, dtype=np.uint64), 11, 0)
    want = np.where(words >= 1 << 31, -1.0, 1.0)
    diagonal = fpemu.hadamard(np.eye(32, dtype=np.float32), size=32, signs=11)[:, 0]
    assert (np.sign(diagonal) == want).all()
    assert rotation.sign_vector("11", 16) == tuple(want[:16].astype(int))


# The operation order -----------------------------------------------------------------------------


def hard(dtype: Any, size: int) -> np.ndarray:
    """Blocks whose sums round, with every exponent, zeros, subnormals, Inf and NaN among them."""
    n = 48 * size
    rows = [block_data(24, 2 * size, 5).astype(np.float64).reshape(-1)]
    with np.errstate(invalid="ignore"):  # signalling NaN
        rows += [patterns(dtype, n, 1).astype(np.float64)]
    rng = np.random.default_rng(2)
    rows += [np.ldexp(rng.standard_normal(n), rng.integers(-12, 12, n))]
    x = np.concatenate(rows)
    few = specials(np.float32).astype(np.float64)
    x[: len(few) * size : size] = few
    with np.errstate(all="ignore"):
        return x.astype(dtype).reshape(-1, size)


@pytest.mark.parametrize("dtype", [np.float32, BF16, np.float16, np.float64], ids=str)
@pytest.mark.parametrize("size", [8, 16, 128])
@pytest.mark.parametrize("inverse", [False, True])
def test_bits_of_the_documented_order(dtype: Any, size: int, inverse: bool) -> None:
    x, signs = hard(dtype, size), signs_of(size)
    want = reference(x, signs, inverse)
    options: dict[str, Any] = {"size": size, "signs": signs, "inverse": inverse}
    assert_same_bits(fpemu.hadamard(x, **options), want, x, "along elements")
    rows = np.ascontiguousarray(x.T)
    assert_same_bits(fpemu.hadamard(rows, axis=0, **options), want.T, rows, "along rows")


@pytest.mark.parametrize("backend", FAST)
@pytest.mark.parametrize("size", SIZES)
def test_backends_agree(backend: str, size: int) -> None:
    import torch

    from fpemu.backends import hadamard_torch
    from fpemu.backends.hadamard_ import Rotation, rotate

    x, signs = hard(np.float32, size), tuple(signs_of(size))
    want = reference(x, signs, False)
    if backend == "torch":
        out = torch.empty(x.shape)
        hadamard_torch.rotate(torch.from_numpy(x), out, 1, size, signs, False)
        assert_same_bits(out, want, x)
    else:
        result = np.empty_like(x)
        rotate(x, result, 1, Rotation(size, signs, False))
        assert_same_bits(result, want, x)


def test_torch_operations_ignore_flushing() -> None:
    import torch

    from fpemu.backends import hadamard_torch

    x = np.float32([1e-45, 3e-45, 1e-39, 2e-38] * 8)
    want = reference(x.reshape(-1, 16), TE, False).reshape(-1)
    torch.set_flush_denormal(True)
    try:
        got = fpemu.hadamard(torch.from_numpy(x), signs="te")
        other = torch.empty(32)
        hadamard_torch.rotate(torch.from_numpy(x), other, 0, 16, TE, False)
    finally:
        torch.set_flush_denormal(False)
    assert_same_bits(got, want, x)
    assert_same_bits(other, want, x)


# Layouts -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("axis", [0, 1])
def test_layouts(axis: int) -> None:
    x = block_data(48, 48, 4)
    moved = np.moveaxis(x, axis, -1)
    for name, view in views(x):
        blocks = np.moveaxis(view, axis, -1)
        want = reference(blocks.reshape(-1, 16), TE, False).reshape(blocks.shape)
        before = view.copy()
        got = fpemu.hadamard(view, signs="te", axis=axis)
        assert_same_bits(got, np.moveaxis(want, -1, axis), view, name)
        assert_same_bits(view, before, note=f"{name} was changed")
        tensor = fpemu.hadamard(give("torch", view), signs="te", axis=axis)
        assert_same_bits(tensor, got, view, f"torch {name}")
    assert moved.shape == (48, 48)


@pytest.mark.parametrize(
    "shape", [(2, 16, 3), (3, 32, 17), (1, 16, 1), (2, 2, 32), (0, 16), (16, 0)]
)
def test_shapes_and_axes(shape: tuple[int, ...]) -> None:
    rng = np.random.default_rng(1)
    for axis in range(len(shape)):
        if shape[axis] % 16:
            continue
        x = rng.standard_normal(shape).astype(np.float32)
        blocks = np.moveaxis(x, axis, -1)
        want = reference(blocks.reshape(-1, 16), None, False).reshape(blocks.shape)
        want = np.moveaxis(want, -1, axis)
        assert_same_bits(fpemu.hadamard(x, axis=axis), want, x)
        assert_same_bits(fpemu.hadamard(x, axis=axis - len(shape)), want, x)


def test_threads_and_pieces() -> None:
    """More than a piece, in both directions, on one thread and on two."""
    x = np.random.default_rng(0).standard_normal((1024, 400)).astype(np.float32)
    for axis in (0, 1):
        results = []
        for threads in (1, 2):
            fpemu.set_num_threads(threads)
            try:
                results.append(fpemu.hadamard(x, size=16, axis=axis))
            finally:
                fpemu.set_num_threads(None)
        blocks = np.moveaxis(x, axis, -1)
        want = reference(blocks.reshape(-1, 16), None, False).reshape(blocks.shape)
        for got in results:
            assert_same_bits(got, np.moveaxis(want, -1, axis))


def test_out() -> None:
    x = np.random.default_rng(0).standard_normal((32, 32)).astype(np.float32)
    want = fpemu.hadamard(x)
    out = np.empty_like(x)
    assert fpemu.hadamard(x, out=out) is out
    assert_same_bits(out, want)
    same = x.copy()
    assert_same_bits(fpemu.hadamard(same, out=same), want, note="in place")
    wide = np.concatenate([x[:1], x])
    assert_same_bits(
        fpemu.hadamard(wide[:-1], out=wide[1:]),
        fpemu.hadamard(np.concatenate([x[:1], x])[:-1]),
        note="overlap",
    )
    strided = np.zeros((32, 64), np.float32)[:, ::2]
    assert_same_bits(fpemu.hadamard(x, out=strided), want, note="strided out")


# Torch -------------------------------------------------------------------------------------------


def test_gradient_is_the_transpose() -> None:
    import torch

    x = torch.randn(32, 5, requires_grad=True)
    gradient = torch.randn(32, 5)
    fpemu.hadamard(x, axis=0, signs="te").backward(gradient)
    assert_same_bits(x.grad, fpemu.hadamard(gradient, axis=0, signs="te", inverse=True))
    z = torch.randn(16, dtype=torch.float32, requires_grad=True)
    y = fpemu.hadamard(z, inverse=True, signs=5)
    (twice,) = torch.autograd.grad(y @ y, z, create_graph=True)
    assert torch.allclose(twice, 2 * z, atol=1e-5)  # orthonormal: |y|**2 == |z|**2
    assert twice.requires_grad


def test_operator() -> None:
    import torch

    assert_same_bits(
        torch.ops.fpemu.hadamard(torch.arange(16.0), 16, "te", 0, False),
        fpemu.hadamard(torch.arange(16.0), signs="te"),
    )
    x = torch.randn(32, 4, requires_grad=True)
    torch.library.opcheck(torch.ops.fpemu.hadamard.default, (x, 16, "te", 0, False))


def test_compiles_and_maps() -> None:
    import torch

    def rotate(x: torch.Tensor) -> torch.Tensor:
        return fpemu.hadamard(x * 2, axis=0, signs=5, size=8) + 1

    x = torch.randn(32, 3)
    compiled = torch.compile(rotate, fullgraph=True, backend="aot_eager")
    assert_same_bits(compiled(x), rotate(x))
    batch = torch.randn(3, 16, 2)
    mapped = torch.vmap(lambda s: fpemu.hadamard(s, axis=0))(batch)
    assert_same_bits(mapped, torch.stack([fpemu.hadamard(s, axis=0) for s in batch]))
    meta = fpemu.hadamard(torch.empty(32, 2, device="meta", dtype=torch.bfloat16), axis=0)
    assert meta.shape == (32, 2) and meta.dtype == torch.bfloat16


# Errors ------------------------------------------------------------------------------------------

F32 = np.ones((8, 32), np.float32)


@pytest.mark.parametrize(
    ("error", "sentence", "call"),
    [
        (ValueError, "has length 8 along axis 0, which size 16 does not divide",
         lambda: fpemu.hadamard(F32, axis=0)),
        (ValueError, "size must be one of 2, 4, 8, 16, 32, 64, 128, got 24",
         lambda: fpemu.hadamard(F32, size=24)),
        (ValueError, "axis 2 is out of range for x with 2 dimension",
         lambda: fpemu.hadamard(F32, axis=2)),
        (ValueError, "axis -1 is out of range for x with 0 dimension",
         lambda: fpemu.hadamard(np.float32(1))),
        (TypeError, "axis must be an integer, got str", lambda: fpemu.hadamard(F32, axis="0")),
        (TypeError, "x has dtype int64; allowed are float16",
         lambda: fpemu.hadamard(np.ones(16, np.int64))),
        (TypeError, "x has dtype complex64", lambda: fpemu.hadamard(np.ones(16, np.complex64))),
        (ValueError, "signs='te' has 16 signs and size is 32",
         lambda: fpemu.hadamard(F32, size=32, signs="te")),
        (ValueError, "signs has 3 entries", lambda: fpemu.hadamard(F32, signs=[1, 1, -1])),
        (ValueError, "it must be 16 of \\+1 and -1", lambda: fpemu.hadamard(F32, signs=[0.5] * 16)),
        (ValueError, "signs must be None, 'te', a seed", lambda: fpemu.hadamard(F32, signs="random")),
        (ValueError, "signs must be None, 'te', a seed", lambda: fpemu.hadamard(F32, signs=True)),
        (ValueError, "out has shape \\(16,\\)",
         lambda: fpemu.hadamard(F32, out=np.ones(16, np.float32))),
        (TypeError, "out must be a ndarray", lambda: fpemu.hadamard(F32, out=[1])),
    ],
)  # fmt: skip
def test_errors(error: type[Exception], sentence: str, call: Any) -> None:
    with pytest.raises(error, match=f"hadamard: .*{sentence}"):
        call()
