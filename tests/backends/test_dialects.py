"""Dialects: the backends agree with each other and with the oracle, in every layout."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from helpers import BF16, DIALECTS, FAST, as_numpy, assert_same_bits, give, request

import fpemu
from fpemu import formats
from fpemu.backends import numba_, numba_dialects, oracle, torch_
from fpemu.dialects import DIALECTS as RULES
from fpemu.dialects import Dialect, dialect_of, log2_slack

FOUR_OVER_SIX = [name for name in DIALECTS if dialect_of(formats.TABLE[name]).four is not None]
#: One of each way of computing, for what does not depend on the rule.
KINDS = [
    "nvfp4/te-ref", "nvfp4/torchao", "nvfp4/compressed-tensors", "nvfp4/te-4over6-mse-256",
    "nvfp4/fouroversix-mae", "nvfp4/te-fast", "mxfp4/modelopt", "mxfp4/qutlass-absmax",
    "mxfp4/fouroversix-static6", "mxfp8_e4m3/te", "mxfp8_e5m2/microxcaling-even",
    "mxint8/microxcaling-nearest", "mxfp6_e2m3/quark-even", "mxfp4/quark-pack-down",
]  # fmt: skip


def hard(rows: int, cols: int, seed: int) -> np.ndarray:
    """float32 rows at many scales, with ties, zeros of both signs and tiny values among them."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((rows, cols)).astype(np.float32)
    x *= np.float32(2.0) ** rng.integers(-40, 20, (rows, 1)).astype(np.float32)
    ties = np.float32([0, -0.0, 0.25, 0.75, 1.25, -1.75, 2.5, 3.5, 5, 6, -6, 448, -1.5])
    x[::5] = rng.choice(ties, x[::5].shape)
    x[1::5] = (x[1::5].view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)
    x[2], x[3] = 0, np.float32(-0.0)
    x[4, ::3] = 1e-45
    return x


def special(x: np.ndarray) -> np.ndarray:
    x = x.copy()
    x[-1, 3], x[-2, 5], x[-3, 1], x[-4, 2] = np.nan, np.inf, -np.inf, -np.nan
    return x


def outputs(x: Any, name: str, backend: str, **options: Any) -> list[np.ndarray]:
    """Codes, scales, number, values and decoded codes."""
    x = give(backend, x)
    if "random_bits" in options and backend == "torch":
        import torch

        words = options["random_bits"].astype(np.int64)
        options = options | {"random_bits": torch.from_numpy(words)}
    e = fpemu.encode(x, name, backend=backend, **options)
    values = fpemu.quantize(x, name, backend=backend, **options)
    number = None if e.global_scale is None else as_numpy(e.global_scale)
    if number is not None and np.isnan(number):
        number = np.float32(np.nan)
    parts = [as_numpy(e.codes), as_numpy(e.scales), number, as_numpy(values), as_numpy(e.decode())]
    return [part for part in parts if part is not None]


def same(a: list[np.ndarray], b: list[np.ndarray], what: str) -> None:
    for k, (got, want) in enumerate(zip(a, b, strict=True)):
        assert_same_bits(got, want, note=f"{what}, output {k}")


@pytest.mark.parametrize("kind", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", DIALECTS)
def test_backends_agree(name: str, kind: str) -> None:
    if len(FAST) < 2:
        pytest.skip("only one backend is installed")
    x = hard(40, 96, 1)
    tensor_scaled = formats.TABLE[name].tensor_scaled
    cases = [(special(x), {"amax": 3.0} if tensor_scaled else {}), (x, {})]
    for data, options in cases:
        data = data.astype(BF16) if kind == "bfloat16" else data
        same(outputs(data, name, "torch", **options), outputs(data, name, "numba", **options), name)


@pytest.mark.parametrize("name", DIALECTS)
def test_equals_the_oracle(name: str) -> None:
    x = special(hard(12, 32, 2))
    options = {"amax": 1.5} if formats.TABLE[name].tensor_scaled else {}
    same(outputs(x, name, FAST[0], **options), outputs(x, name, "oracle", **options), name)
    if options:
        x = hard(8, 32, 3)
        same(outputs(x, name, FAST[0]), outputs(x, name, "oracle"), name)


@pytest.mark.parametrize("backend", FAST)
@pytest.mark.parametrize("name", KINDS)
def test_layouts(name: str, backend: str) -> None:
    """Any axis, any strides, short blocks: the bits of the moved, contiguous, padded array."""
    x = hard(37, 90, 4)
    base = outputs(x, name, backend)
    along = outputs(np.ascontiguousarray(x.T), name, backend, axis=0)
    same([a.T for a in along], base, "axis 0")
    same(outputs(x.T.copy().T, name, backend), base, "Fortran order")
    wide = np.zeros((37, 180), np.float32)
    wide[:, ::2] = x
    same(outputs(wide[:, ::2], name, backend), base, "strided")
    padded = np.zeros((37, 96), np.float32)
    padded[:, :90] = x
    whole = outputs(padded, name, backend)
    assert_same_bits(base[0], whole[0][:, :90])
    assert_same_bits(base[1], whole[1])
    cube = x.reshape(37, 3, 30)
    flat = outputs(np.ascontiguousarray(cube.transpose(1, 2, 0)), name, backend)
    same(
        [np.moveaxis(a, -1, 0) if a.ndim else a for a in flat],
        outputs(cube, name, backend, axis=0),
        "3-D",
    )
    for empty in (np.zeros((0, 32), np.float32), np.zeros((3, 0), np.float32)):
        assert fpemu.encode(give(backend, empty), name).codes.shape == empty.shape
    point = outputs(np.float32(2.5), name, backend)
    assert_same_bits(point[0].reshape(1), outputs(np.float32([2.5]), name, backend)[0])


@pytest.mark.parametrize("name", [n for n in KINDS if "microxcaling" not in n])
def test_stochastic_rounding(name: str) -> None:
    """The same words, the same bits; a shard has the bits of the whole."""
    rng = np.random.default_rng(5)
    x = rng.standard_normal((24, 64)).astype(np.float32)
    options = {"rounding": "sr", "seed": 3}
    whole = outputs(x, name, "numba", **options)
    if "torch" in FAST:
        same(outputs(x, name, "torch", **options), whole, name)
    words = rng.integers(0, 1 << 32, x.shape, dtype=np.uint32)
    given = {"rounding": "sr", "random_bits": words}
    same(outputs(x, name, "torch", **given), outputs(x, name, "numba", **given), name)
    amax = {"amax": float(np.abs(x).max())} if formats.TABLE[name].tensor_scaled else {}
    part = outputs(x[8:16], name, "numba", offset=((24, 64), (8, 0)), **options, **amax)
    assert_same_bits(part[0], whole[0][8:16])


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
def test_result_dtypes(name: str, dtype: str) -> None:
    """A value is the float32 one (or the exact one) rounded into the dtype, whoever computes it."""
    x = hard(30, 64, 6)
    got = fpemu.quantize(x, name, dtype=dtype, backend="numba")
    assert_same_bits(got, fpemu.encode(x, name, backend="numba").decode(dtype), x)
    if "torch" in FAST:
        theirs = fpemu.quantize(give("torch", x), name, dtype=dtype, backend="torch")
        assert_same_bits(got, as_numpy(theirs), x)


@pytest.mark.parametrize("name", ["nvfp4/modelopt", "mxfp4/torchao-rceil", "nvfp4/te-fast"])
@pytest.mark.parametrize("source", [np.float64, np.float16, np.int32, np.uint8])
def test_inputs_are_rounded_to_float32_on_entry(name: str, source: Any) -> None:
    rng = np.random.default_rng(7)
    x = (rng.standard_normal((16, 64)) * 100).astype(source)
    got, want = fpemu.encode(x, name), fpemu.encode(x.astype(np.float32), name)
    assert_same_bits(got.codes, want.codes)
    assert_same_bits(got.scales, want.scales)


def test_large_arrays_go_through_many_pieces() -> None:
    """More than one piece and thread, and rows that pieces must cut."""
    rng = np.random.default_rng(8)
    x = rng.standard_normal((3, 1 << 19)).astype(np.float32)
    for name in ("nvfp4/torchao", "mxfp4/modelopt", "nvfp4/te-4over6-mae-256"):
        whole = fpemu.encode(x, name)
        amax = {"amax": float(np.abs(x).max())} if formats.TABLE[name].tensor_scaled else {}
        part = fpemu.encode(x[1:2, (1 << 18) - 4096 :][:, :8192], name, **amax)
        at = slice((1 << 18) - 4096, (1 << 18) + 4096)
        assert_same_bits(part.codes, whole.codes[1:2, at])
        assert_same_bits(whole.decode(), fpemu.quantize(x, name))
        assert_same_bits(part.decode(), whole.decode()[1:2, at])


def test_straight_through_gradient() -> None:
    """1 where the value that is cast lies within the range: the block's own scale decides."""
    torch = pytest.importorskip("torch")
    x = torch.tensor([[1.0, 100.0] + [0.5] * 30], requires_grad=True)
    fpemu.quantize(x, "mxfp4/torchao-floor").sum().backward()  # 100/16 = 6.25 is beyond 6
    assert x.grad.tolist() == [[1.0, 0.0] + [1.0] * 30]
    y = torch.full((1, 16), 7.0, requires_grad=True)
    fpemu.quantize(y, "nvfp4/te-ref").sum().backward()
    assert y.grad.tolist() == [[1.0] * 16]


def test_a_row_of_ones_own_may_use_a_dialect() -> None:
    row = formats.BlockFormat(
        "nvfp4_8/torchao", formats.E2M1, (8,), formats.E4M3, "nvfp4/torchao", True,
        decode="scale-first",
    )  # fmt: skip
    tile = formats.BlockFormat(
        "tile/te-ref", formats.E2M1, (4, 8), formats.E4M3, "nvfp4/te-ref", True, decode="te"
    )
    x = hard(20, 40, 9)
    for fmt in (row, tile):
        same(outputs(x, fmt, "torch"), outputs(x, fmt, "numba"), fmt.name)
    one = x[:1, :8]
    amax = float(np.abs(x).max())
    padded = np.zeros((1, 16), np.float32)
    padded[0, :8] = one
    small = fpemu.encode(one, row, amax=amax)
    assert_same_bits(small.codes, fpemu.encode(padded, "nvfp4/torchao", amax=amax).codes[:, :8])


def test_a_library_that_rounds_itself_takes_no_other_rounding() -> None:
    with pytest.raises(ValueError, match="rounds by its library's own rule"):
        fpemu.quantize(np.ones(32, np.float32), "mxfp4/microxcaling-even", rounding="rtz")


def test_every_mx_rule_has_a_table() -> None:
    """Bisection found at most one step between two powers of two, so the table is the rule."""
    rng = np.random.default_rng(10)
    bits = rng.integers(0, 0x7F800001, 200_000, dtype=np.int64).astype(np.uint32)
    near = (np.arange(255, dtype=np.int64) << 23)[:, None] + np.arange(-40, 40)
    bits = np.concatenate([bits, near[near >= 0].astype(np.uint32), np.uint32([0, 1, 0x7F800000])])
    checked = 0
    for name in DIALECTS:
        row = formats.TABLE[name]
        if not row.rule.startswith("mx/"):
            continue
        for kind in ("float32", "bfloat16"):
            table = numba_dialects.mx_table(row, kind)
            assert table is not None, name
            ops = numba_dialects._numpy_ops(kind)
            dialect = dialect_of(row)
            with np.errstate(all="ignore"):
                tensor = dialect.tensor(ops, row, np.float32(1))
                want = dialect.block(ops, row, bits.view(np.float32), tensor)
            blocks = numba_dialects._no_blocks(bits.size)
            numba_dialects.dialect_loops.mx_lookup(bits, table, *blocks[:3])
            assert_same_bits(blocks.stored, np.asarray(want.stored).astype(np.uint8), note=name)
            assert_same_bits(blocks.operand, want.multiplier, note=name)
            assert_same_bits(blocks.scale, want.factor, note=name)
            checked += 1
    assert checked >= 190


def test_log2_of_torch_is_what_the_table_says() -> None:
    """floor and ceil of torch's float32 and bfloat16 logarithms near every power of two."""
    torch = pytest.importorskip("torch")
    ops = numba_dialects._numpy_ops("float32")
    from fpemu.dialects import ceil_log2, floor_log2

    powers = (np.arange(1, 255, dtype=np.int64) << 23)[:, None] + np.arange(-64, 64)
    x = powers.reshape(-1).astype(np.uint32).view(np.float32)
    theirs = torch.log2(torch.from_numpy(x.copy()))
    assert np.array_equal(floor_log2(ops, x), theirs.floor().int().numpy())
    assert np.array_equal(ceil_log2(ops, x), theirs.ceil().int().numpy())
    halves = np.arange(1, 0x7F80, dtype=np.uint16)
    y = (halves.astype(np.uint32) << 16).view(np.float32)
    narrow = torch.log2(torch.from_numpy(halves.view(np.int16)).view(torch.bfloat16))
    narrow_ops = numba_dialects._numpy_ops("bfloat16")
    assert np.array_equal(floor_log2(narrow_ops, y), narrow.float().floor().int().numpy())
    # For exponents below 128 at most 22 floats above a power of two and 44 half steps below it.
    above, below = (slack[150 - 127 : 150 + 128] for slack in log2_slack(23))
    assert above.max() == 22 and below.max() == 44


def test_torch_adds_sixteen_floats_as_fouroversix_needs() -> None:
    torch = pytest.importorskip("torch")
    d = np.random.default_rng(11).standard_normal((64, 16)).astype(np.float32) ** 2
    total = np.zeros(64, np.float32)
    for k in range(8):
        total = total + (d[:, k] + d[:, k + 8])
    assert_same_bits(total, torch.from_numpy(d).sum(-1).numpy())


def test_a_planted_error_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another order of the same operations changes bits, and this file would notice."""
    x = hard(400, 96, 12).astype(BF16)
    before = outputs(x, "nvfp4/te-ref", "numba")
    other: Dialect = RULES["nvfp4/flashinfer-ref"]
    monkeypatch.setitem(RULES, "nvfp4/te-ref", other)
    dialect_of.cache_clear()
    numba_dialects._rule.cache_clear()
    try:
        with pytest.raises(AssertionError):
            same(outputs(x, "nvfp4/te-ref", "numba"), before, "planted")
    finally:
        monkeypatch.undo()
        dialect_of.cache_clear()
        numba_dialects._rule.cache_clear()


@pytest.mark.parametrize("name", [n for n in KINDS if formats.TABLE[n].tensor_scaled])
def test_a_given_amax_is_taken_as_it_is(name: str) -> None:
    """One that bfloat16 does not have, too, where the dialect rounds x to bfloat16."""
    x, amax = hard(8, 32, 5), 1234.5678
    want = outputs(x, name, "oracle", amax=amax)
    for backend in FAST:
        for got, right in zip(outputs(x, name, backend, amax=amax), want, strict=True):
            assert_same_bits(got, right, note=f"{name} {backend}")


@pytest.mark.parametrize("name", DIALECTS)
def test_what_is_in_range_is_the_same_everywhere(name: str) -> None:
    """Of the scaled value, before a library replaces NaN or wraps around; no NaN scale's block."""
    ordinary = hard(10, 32, 6)
    assert oracle.within(request(ordinary, name, axis=1)).any()
    for x in (ordinary, special(ordinary)):
        want = oracle.within(request(x, name, axis=1))
        assert_same_bits(numba_.within(request(x, name, axis=1)), want, note="numba")
        ask = request(x, name, axis=1)
        ask.x = give("torch", x)
        assert_same_bits(as_numpy(torch_.within(ask)), want, note="torch")
