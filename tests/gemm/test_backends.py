"""Fast backends against the oracle, and everything that must not change a bit."""

from __future__ import annotations

import dataclasses
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import Any

import numpy as np
import pytest
from gemm.cases import KINDS, Case, case, cases
from helpers import BF16, FAST, assert_same_bits

import fpemu
from fpemu.gemm import Unit, get_unit, list_units, loops, matmul, numba_, oracle, progress, torch_

#: Rows that differ from these in a, b or the architecture's name only.
DISTINCT = {}
for _name in list_units():
    _u = get_unit(_name)
    _key = (
        _u.L,
        _u.F,
        _u.rho,
        _u.group,
        _u.order,
        _u.scale,
        _u.a.man_bits,
        _u.a.emin,
        _u.a is _u.b,
    )
    DISTINCT.setdefault(_key, _name)
SAMPLE = (
    "volta.hmma.fp16", "ada.qmma.e5m2", "hopper.wgmma.e4m3", "hopper.wgmma.bf16", "blackwell.mma_sync.e4m3",
    "blackwell.tcgen05.tf32", "blackwell.tcgen05.mxfp8_e4m3", "blackwell.tcgen05.nvfp4",
)  # fmt: skip


def run(k: Case, unit: Unit | str, out: str = "fp32", **options: Any) -> Any:
    return matmul(k.a, k.b, unit=unit, c=k.c, out=out, **options)


@lru_cache(maxsize=1)  # one unit's, for all backends
def expected(name: str) -> list[tuple[Case, str, int, np.ndarray]]:
    unit = get_unit(name)
    return [
        (k, out, depth, run(k, unit, out, backend="oracle"))
        for out in unit.outputs
        for depth, rows in ((unit.step, 2), (2 * unit.step + 5, 3))
        for k in cases(unit, rows, depth, 5, seed=depth)
    ]


@pytest.mark.parametrize("backend", FAST)
@pytest.mark.parametrize("name", sorted(DISTINCT.values()))
def test_fast_equals_oracle(name: str, backend: str) -> None:
    """Nearly twenty thousand outputs: cancellation, subnormals, overflow, zeros, NaN, Inf."""
    unit = get_unit(name)
    if backend == "torch" and torch_.supports(unit):
        pytest.skip(f"torch backend: {torch_.supports(unit)}")
    for k, out, depth, want in expected(name):
        got = run(k, unit, out, backend=backend)
        assert_same_bits(got, want, note=f"{name} {out} K={depth} {k.kind}:")


@pytest.mark.parametrize("name", SAMPLE)
def test_long_chains(name: str) -> None:
    """K past the length that the kernels handle at once."""
    unit = get_unit(name)
    k = case("cancel", unit, 1, loops.CHUNK + unit.step + 3, 2)
    assert_same_bits(run(k, unit), run(k, unit, backend="oracle"))


@pytest.mark.parametrize("name", SAMPLE)
def test_rows_columns_and_threads_do_not_matter(name: str) -> None:
    """Every output is the same alone, in a corner of a large product, and on any thread count."""
    unit = get_unit(name)
    k = case("normal", unit, 131, 3 * unit.step + 1, 77)
    whole = run(k, unit)
    threads = fpemu.get_num_threads()
    try:
        for n in (1, 3):
            fpemu.set_num_threads(n)
            assert_same_bits(run(k, unit), whole, note=f"{n} threads")
    finally:
        fpemu.set_num_threads(threads)
    if unit.scale is None:
        for i, j in ((0, 0), (130, 76), (64, 16), (3, 15)):
            one = matmul(k.a[i : i + 1], k.b[:, j : j + 1], unit=unit, c=k.c[i : i + 1, j : j + 1])
            assert_same_bits(one, whole[i : i + 1, j : j + 1])


def test_pieces_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    k = case("normal", get_unit("hopper.wgmma.fp16"), 70, 100, 70)
    want = run(k, "hopper.wgmma.fp16")
    for least, most in ((1, 1), (1, 5000), (1 << 40, 1 << 40)):
        monkeypatch.setattr(numba_, "_LEAST", least)
        monkeypatch.setattr(numba_, "_MOST", most)
        assert_same_bits(run(k, "hopper.wgmma.fp16"), want)


def test_concurrent_calls() -> None:
    todo = [(name, case("wide", get_unit(name), 20, 90, 20)) for name in SAMPLE] * 3
    want = [run(k, name) for name, k in todo]
    with ThreadPoolExecutor(4) as pool:
        got = list(pool.map(lambda item: run(item[1], item[0]), todo))
    for g, w in zip(got, want, strict=True):
        assert_same_bits(g, w)


# Layout and containers -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fmt", "unit"),
    [("fp16", "hopper.wgmma.fp16"), ("bf16", "hopper.wgmma.bf16"), ("tf32", "hopper.wgmma.tf32"),
     ("fp32", "fp32.fma"), ("e4m3", "hopper.wgmma.e4m3")],
)  # fmt: skip
def test_codes_are_their_values(fmt: str, unit: str) -> None:
    """An Encoded operand of an element format multiplies as the array of its values."""
    torch = pytest.importorskip("torch")
    x = np.random.default_rng(0).standard_normal((5, 40), np.float32)
    y = np.random.default_rng(1).standard_normal((40, 7), np.float32)
    a, b = fpemu.encode(x, fmt), fpemu.encode(y, fmt)
    want = matmul(a.decode(), b.decode(), unit=unit)
    assert_same_bits(matmul(a, b, unit=unit), want)
    given = (fpemu.encode(torch.from_numpy(t), fmt) for t in (x, y))
    assert_same_bits(matmul(*given, unit=unit).numpy(), want)


@pytest.mark.parametrize("name", ["hopper.wgmma.e4m3", "blackwell.mma_sync.e5m2", "fp32.fma"])
@pytest.mark.parametrize(
    "lead", [((), ()), ((3,), ()), ((), (3,)), ((3,), (3,)), ((2, 1), (1, 3)), ((0,), ())]
)
def test_batches(name: str, lead: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    unit = get_unit(name)
    rng = np.random.default_rng(0)
    a = fpemu.quantize(rng.standard_normal((*lead[0], 5, 40)).astype(np.float32), unit.a)
    b = fpemu.quantize(rng.standard_normal((*lead[1], 40, 7)).astype(np.float32), unit.b)
    full = np.broadcast_shapes(*lead)
    c = rng.standard_normal((*full, 5, 7)).astype(np.float32)
    got = matmul(a, b, unit=unit, c=c)
    assert got.shape == (*full, 5, 7)
    a, b = np.broadcast_to(a, (*full, 5, 40)), np.broadcast_to(b, (*full, 40, 7))
    for i in np.ndindex(full):
        assert_same_bits(got[i], matmul(a[i], b[i], unit=unit, c=c[i]))


def test_scaled_batches() -> None:
    x = np.random.default_rng(0).standard_normal((3, 5, 80)).astype(np.float32)
    y = np.random.default_rng(1).standard_normal((80, 7)).astype(np.float32)
    unit = "blackwell.tcgen05.nvfp4"
    b = fpemu.encode(y, "nvfp4/1level", axis=0)
    got = matmul(fpemu.encode(x, "nvfp4/1level"), b, unit=unit)
    for i in range(3):
        assert_same_bits(got[i], matmul(fpemu.encode(x[i], "nvfp4/1level"), b, unit=unit))


@pytest.mark.parametrize("elements", [1, 2000, torch_._ELEMENTS])
def test_matrices_together_or_in_pieces(elements: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The portable backend: one row of one matrix at a time, a few matrices, all."""
    monkeypatch.setattr(torch_, "_ELEMENTS", elements)
    rng = np.random.default_rng(2)
    x = rng.standard_normal((4, 1, 5, 80)).astype(np.float32)
    y = rng.standard_normal((3, 80, 7)).astype(np.float32)
    y[1] *= 1000  # matrices differ in more than noise
    x[2, 0, 1, 3] = np.inf
    for unit in ("hopper.wgmma.bf16", "fp32.sequential", "fp32.pairwise"):
        a, b = (fpemu.quantize(t, get_unit(unit).a) for t in (x, y))
        assert_same_bits(matmul(a, b, unit=unit, backend="torch"), matmul(a, b, unit=unit))
    x[2, 0, 1, 3] = 2
    a, b = fpemu.encode(x, "nvfp4/1level"), fpemu.encode(y, "nvfp4/1level", axis=1)
    unit = "blackwell.tcgen05.nvfp4"
    assert_same_bits(matmul(a, b, unit=unit, backend="torch"), matmul(a, b, unit=unit))
    a, b = (fpemu.quantize(np.pad(t, w), "e4m3") for t, w in
            ((x, ((0, 0),) * 3 + ((0, 176),)), (y, ((0, 0), (0, 176), (0, 0)))))  # fmt: skip
    options = {"unit": "hopper.wgmma.e4m3", "recipe": "deepgemm.1d1d"}
    options["scale_a"] = rng.uniform(1, 2, (4, 1, 5, 2)).astype(np.float32)
    options["scale_b"] = rng.uniform(1, 2, (3, 2, 7)).astype(np.float32)
    assert_same_bits(matmul(a, b, backend="torch", **options), matmul(a, b, **options))


@pytest.mark.parametrize("name", ["hopper.wgmma.e4m3", "exact", "blackwell.tcgen05.e2m1"])
def test_layouts(name: str) -> None:
    unit = get_unit(name)
    k = case("normal", unit, 9, 50, 21)
    want = run(k, unit)
    for a in (np.asfortranarray(k.a), np.repeat(k.a, 2, 1)[:, ::2], k.a[::-1].copy()[::-1]):
        for b in (np.asfortranarray(k.b), np.repeat(k.b, 3, 0)[::3], k.b[:, ::-1].copy()[:, ::-1]):
            assert_same_bits(matmul(a, b, unit=unit, c=k.c), want)
    frozen = k.a.copy()
    frozen.flags.writeable = False
    assert_same_bits(matmul(frozen, k.b, unit=unit, c=k.c), want)


def test_shapes_without_elements() -> None:
    for unit in ("hopper.wgmma.e4m3", "exact", "blackwell.mma_sync.e4m3"):
        for backend in (None, "oracle"):
            c = np.float32([[1.5, -0.0, np.nan]])
            empty = matmul(np.zeros((1, 0)), np.zeros((0, 3)), unit=unit, c=c, backend=backend)
            assert_same_bits(empty, oracle.as_result(c, "fp32"))
        assert matmul(np.zeros((0, 4)), np.zeros((4, 3)), unit=unit).shape == (0, 3)
        assert matmul(np.zeros((2, 4)), np.zeros((4, 0)), unit=unit).shape == (2, 0)


@pytest.mark.parametrize("dtype", [np.float16, BF16, np.float32, np.float64, np.int8, np.int64])
def test_any_dtype_that_holds_the_values(dtype: Any) -> None:
    rng = np.random.default_rng(0)
    a, b = rng.integers(-8, 9, (3, 20)), rng.integers(-8, 9, (20, 4))
    want = matmul(a.astype(np.float32), b.astype(np.float32), unit="hopper.wgmma.e4m3")
    assert_same_bits(matmul(a.astype(dtype), b.astype(dtype), unit="hopper.wgmma.e4m3"), want)


def test_torch_tensors() -> None:
    torch = pytest.importorskip("torch")
    k = case("normal", get_unit("hopper.wgmma.e4m3"), 5, 70, 9)
    want = run(k, "hopper.wgmma.e4m3")
    a, b, c = (torch.from_numpy(x) for x in k[1:])
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float64):
        x = a.to(dtype)
        got = matmul(x.requires_grad_(), b.to(dtype), unit="hopper.wgmma.e4m3", c=c)
        assert isinstance(got, torch.Tensor)
        assert got.dtype == torch.float32
        assert_same_bits(got, want)
    half = matmul(a, b.mT.contiguous().mT, unit="hopper.wgmma.e4m3", c=c, out="fp16")
    assert half.dtype == torch.float16
    assert_same_bits(half, run(k, "hopper.wgmma.e4m3", "fp16"))
    x, y = torch.randn(4, 64), torch.randn(64, 3)
    got = matmul(
        fpemu.encode(x, "mxfp4"), fpemu.encode(y, "mxfp4", axis=0), unit="blackwell.tcgen05.mxfp4"
    )
    want = matmul(
        fpemu.encode(x.numpy(), "mxfp4"),
        fpemu.encode(y.numpy(), "mxfp4", axis=0),
        unit="blackwell.tcgen05.mxfp4",
    )
    assert_same_bits(got, want)


@pytest.mark.parametrize("name", [*SAMPLE, "fp32.sequential", "fp32.fma", "fp32.pairwise", "exact"])
def test_flushed_subnormals_do_not_matter(name: str) -> None:
    torch = pytest.importorskip("torch")
    unit = get_unit(name)
    k = case("subnormal", unit, 6, 70, 18)
    want = run(k, unit)
    if not torch.set_flush_denormal(True):
        pytest.skip("this CPU cannot flush subnormals")
    try:
        got = run(k, unit)
    finally:
        torch.set_flush_denormal(False)
    assert_same_bits(got, want)


def test_operands_are_not_modified() -> None:
    for name in ("hopper.wgmma.e4m3", "fp32.pairwise", "exact"):
        k = case("codes", get_unit(name), 4, 40, 4)
        before = [x.copy() for x in k[1:]]
        run(k, name)
        for x, y in zip(k[1:], before, strict=True):
            assert_same_bits(x, y)


# New rows and teeth ----------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", FAST)
def test_a_user_adds_a_row(backend: str) -> None:
    for change in ({"L": 8, "F": 10}, {"L": 2, "F": 20, "clamp_fp32": -3}, {"L": 64, "F": 13}):
        unit = dataclasses.replace(get_unit("hopper.wgmma.e4m3"), name="mine", **change)
        for k in cases(unit, 2, 70, 3):
            assert_same_bits(
                run(k, unit, backend=backend), run(k, unit, backend="oracle"), note=k.kind
            )


def test_a_row_beyond_the_kernels_falls_back() -> None:
    unit = dataclasses.replace(get_unit("hopper.wgmma.fp16"), name="mine", F=30)
    k = case("normal", unit, 2, 40, 3)
    assert_same_bits(run(k, unit), run(k, unit, backend="oracle"))
    with pytest.raises(fpemu.BackendError, match=r"'numba'.*'mine'.*32-bit"):
        run(k, unit, backend="numba")


@pytest.mark.parametrize("backend", FAST)
@pytest.mark.parametrize(
    "change", [{"F": 12}, {"F": 14}, {"rho": "rz32"}, {"L": 16}, {"clamp_fp32": 5}]
)
def test_teeth(change: dict[str, Any], backend: str) -> None:
    """The random cases see a wrong number in a row."""
    unit = get_unit("hopper.wgmma.e4m3")
    wrong = dataclasses.replace(unit, **change)
    differ = [
        kind for kind in KINDS
        if not np.array_equal(
            run(k := case(kind, unit, 4, 64, 16), unit, backend="oracle").view(np.uint32),
            run(k, wrong, backend=backend).view(np.uint32),
        )
    ]  # fmt: skip
    assert differ


def test_tiles_of_scales_are_rows_of_scales() -> None:
    """A weight with 16x16 scales gives the bits of the same codes with a scale per column."""
    rng = np.random.default_rng(0)
    x, w = (rng.standard_normal(s).astype(np.float32) for s in ((5, 70), (70, 37)))
    a = fpemu.encode(x, "nvfp4/1level")
    tiles = fpemu.encode(w, "nvfp4/2d")
    scales = np.repeat(tiles.scales, 16, 1)[:, :37]
    columns = fpemu.Encoded(
        tiles.codes, scales, tiles.tensor_scale, fpemu.get_format("nvfp4"), 0, np.dtype(np.float32)
    )
    unit = "blackwell.tcgen05.nvfp4"
    assert_same_bits(matmul(a, tiles, unit=unit), matmul(a, columns, unit=unit))


def test_a_bar_for_long_products(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "PATIENCE", 0.0)
    monkeypatch.setattr(numba_, "_LEAST", 1 << 10)
    k = case("normal", get_unit("hopper.wgmma.e4m3"), 300, 64, 64)
    want = run(k, "hopper.wgmma.e4m3", progress=False)
    assert capsys.readouterr().err == ""
    assert_same_bits(run(k, "hopper.wgmma.e4m3", progress=True), want)
    assert "matmul" in capsys.readouterr().err


def test_large_sums_of_references() -> None:
    """Exact sums that float64 holds, and those that it does not, are rounded once."""
    rng = np.random.default_rng(0)
    for depth, fmt in ((4000, "e4m3"), (40, "bf16"), (33, "fp16")):
        a = fpemu.quantize(rng.standard_normal((2, depth)).astype(np.float32), fmt)
        b = fpemu.quantize(rng.standard_normal((depth, 3)).astype(np.float32), fmt)
        c = rng.standard_normal((2, 3)).astype(np.float32)
        for out in ("fp32", "fp16"):
            got = matmul(a, b, unit="exact", c=c, out=out)
            assert_same_bits(got, matmul(a, b, unit="exact", c=c, out=out, backend="oracle"))
