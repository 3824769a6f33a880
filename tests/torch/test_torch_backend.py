"""The torch backend, called directly: against the oracle, in small chunks, on every device."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from helpers import (
    BF16,
    BLOCKS,
    DETERMINISTIC,
    ELEMENTS,
    OVERFLOWS,
    assert_same_bits,
    assert_same_parts,
    block_data,
    patterns,
    request,
    ties,
)

from fpemu import formats
from fpemu.backends import Parts, Request, oracle
from fpemu.formats import BlockFormat, Format
from fpemu.rng import Random, indices, philox

torch = pytest.importorskip("torch", reason="torch is not installed")
from fpemu.backends import torch_  # noqa: E402

INTEGERS = ("int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64")
OUT = ("float16", "bfloat16", "float32", "float64")
NO_CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
DEVICES = ["cpu", pytest.param("cuda", marks=NO_CUDA)]


def tensor(x: np.ndarray) -> Any:
    if x.dtype == BF16:
        return torch.from_numpy(x.view(np.int16).copy()).view(torch.bfloat16)
    return torch.from_numpy(x.copy())


def on_torch(r: Request, x: np.ndarray, device: str = "cpu") -> Request:
    words = r.random_bits
    words = None if words is None else torch.from_numpy(words.astype(np.int64)).to(device)
    return replace(r, x=tensor(x).to(device), random_bits=words)


def check(
    x: np.ndarray, fmt: Any, device: str = "cpu", out: str = "float32", **options: Any
) -> None:
    """All four functions of the interface against the oracle's."""
    r = request(x, fmt, **options)
    t = on_torch(r, x, device)
    note = f"{r.fmt.name} {options}"
    want = oracle.encode(r)
    got = torch_.encode(t)
    assert_same_parts(got, want, x, note)
    assert_same_bits(torch_.within(t), oracle.within(r), x, f"{note} within:")
    values = np.empty(x.shape, np.uint16 if out == "bfloat16" else out)
    oracle.decode(r.fmt, want, r.axis, values, out)
    values = values.view(BF16) if out == "bfloat16" else values
    for verb in ("quantize", "decode"):
        target = torch.full(x.shape, 7.0, dtype=getattr(torch, out), device=device)
        if verb == "quantize":
            torch_.quantize(t, target)
        else:
            torch_.decode(r.fmt, got, r.axis, target)
        assert_same_bits(target, values, x, f"{note} {verb}:")


def inputs(fmt: str, dtype: Any, seed: int) -> np.ndarray:
    """Random patterns, and the places where a cast can go wrong."""
    dtype, rng = np.dtype(dtype), np.random.default_rng(seed)
    x = patterns(dtype, 100, seed)
    if dtype.kind in "iu":
        info = np.iinfo(dtype)
        ends = np.array([info.min, info.max, info.max - 1, 0, 1], dtype)
        return np.concatenate([x, x >> rng.integers(0, info.bits, 100).astype(dtype), ends])
    name = "fp16" if fmt == "fp32" else fmt
    points = ties(name, "float32" if dtype == BF16 else dtype.name)
    x = np.concatenate([x, rng.choice(points, 100).astype(dtype)])
    if fmt != "int8":
        return x
    with np.errstate(invalid="ignore"):  # signalling NaNs of bfloat16
        return x[~np.isnan(x)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("fmt", ELEMENTS)
@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
def test_elements_of_every_dtype(fmt: str, device: str) -> None:
    dtypes = ("float16", BF16, "float32", "float64", *INTEGERS)
    cases = [(r, o) for r in (*DETERMINISTIC, "sr") for o in OVERFLOWS]
    for n, dtype in enumerate(dtypes):
        x = inputs(fmt, dtype, n)
        # Neighbouring integer dtypes have all of them between them.
        some = cases if n < 4 else [c for k, c in enumerate(cases) if (k + k // 2 + n) % 2 == 0]
        for k, (rounding, overflow) in enumerate(some):
            options: dict[str, Any] = {}
            if rounding == "sr":
                options["random_bits"] = patterns(np.uint32, len(x), k)
                options["sr_bits"] = (32, 1, 8, 31)[n % 4]
            check(x, fmt, device, OUT[(n + k) % 4], rounding=rounding, overflow=overflow, **options)


def block_input(row: BlockFormat, dtype: Any, seed: int) -> np.ndarray:
    dtype = np.dtype(dtype)
    shape = (130, 131) if row.block == (128, 128) else (5, 37)
    if dtype.kind in "iu":
        shift = np.random.default_rng(seed).integers(0, 8 * dtype.itemsize, shape)
        return patterns(dtype, shape[0] * shape[1], seed).reshape(shape) >> shift.astype(dtype)
    refuses_nan = row.element.is_integer and not row.rule.startswith("mx")
    x = block_data(*shape, seed, special=not refuses_nan).astype(dtype)
    return x * (1 + dtype.type(2.0**-50)) if dtype == np.float64 else x


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("fmt", BLOCKS)
@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
def test_blocks_of_every_dtype(fmt: str, device: str) -> None:
    row = formats.get_format(fmt)
    assert isinstance(row, BlockFormat)
    dtypes = ("float32", BF16, "float16", "float64", "int64", "uint64", "int32", "uint8")
    for n, dtype in enumerate(dtypes[:2] if row.block == (128, 128) else dtypes):
        x = block_input(row, dtype, n)
        rounding = ("rne", "rtp", "sr", "rto")[n % 4]
        options: dict[str, Any] = {"axis": n % 2, "rounding": rounding}
        if rounding == "sr":
            options["random"] = Random(seed=(1 << 64) - 3, stream=n + (1 << 63), offset=n)
        if row.tensor_scaled and n % 2:
            options["amax"] = float(np.float32((0, 1e-45, 5.5, np.inf)[n // 2]))
        check(x, row, device, OUT[n % 4], **options)


def test_large_integers_keep_a_sticky_bit() -> None:
    """2**62 + 2**38 + 1 lies above a tie of float32; a conversion to float64 puts it on the tie."""
    check(np.array([(1 << 62) + 1], np.int64), "mxfp4/ceil")  # 63 bits: up, by the last of them
    tie = (1 << 62) + (1 << 38)
    x = np.array([tie - 1, tie, tie + 1, -tie - 1, -(1 << 63), (1 << 63) - 1], np.int64)
    big = np.array([1 << 63, (1 << 63) + 1, (1 << 63) + (1 << 39) + 1, (1 << 64) - 1], np.uint64)
    for rounding in DETERMINISTIC:
        for fmt in ("fp32", "mxfp4/ceil", "mxfp8_e4m3/even"):
            check(x, fmt, rounding=rounding)
            check(big, fmt, rounding=rounding)
            for k in range(len(x)):
                check(x[k : k + 1], fmt, rounding=rounding)


@pytest.mark.parametrize("chunk", [1, 48, 100, 4096])
@pytest.mark.parametrize("fmt", ["e4m3", "mxfp4", "nvfp4", "nvfp4/2d", "fp8_tensor_e5m2"])
def test_chunks_do_not_matter(fmt: str, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = 2 if chunk == 1 else 7  # an element at a time is slow
    x = tensor(block_data(3 * rows, 37, 1).reshape(3, rows, 37))
    for axis in (0, 1, 2):
        row = formats.get_format(fmt)
        r = Request(x, "float32", row, "sr", "sat", axis, random=Random(5, offset=9))
        want, values = torch_.encode(r), torch.empty_like(x)
        torch_.quantize(r, values)
        with monkeypatch.context() as patch:
            patch.setattr(torch_, "CHUNK", chunk)
            again = torch.empty_like(x)
            torch_.quantize(r, again)
            assert_same_parts(torch_.encode(r), want, x)
            assert_same_bits(again, values, x)


def test_memory_layouts_and_views() -> None:
    base = tensor(block_data(24, 36, 2))
    imaginary = torch.conj(torch.complex(base, -base)).imag  # a view with torch's negative bit
    assert imaginary.is_neg()
    views = (
        base.t(),
        base[::2, 1::3],
        base.expand(2, 24, 36),
        imaginary,
        base[:, :1].expand(24, 5),
    )
    for x in views:
        whole = x.resolve_neg().contiguous()
        for fmt in ("e5m2", "mxfp6_e3m2", "nvfp4/2d"):
            row = formats.get_format(fmt)
            r = Request(x, "float32", row, "sr", "sat", x.dim() - 1, random=Random(3))
            strided = torch.empty((*x.shape, 2))[..., 1]
            plain = torch.empty(x.shape)
            torch_.quantize(r, strided)
            torch_.quantize(replace(r, x=whole), plain)
            assert_same_bits(strided, plain, whole, fmt)


def test_random_words_are_philox() -> None:
    """Contiguous ranges, boxes and shards, at every alignment, past 32 and 62 bits."""
    shape = (5, 3, 7)
    whole = tuple(slice(0, n) for n in shape)
    box = (slice(1, 4), slice(2, 3), slice(3, 6))
    randoms = [
        Random(seed=(1 << 64) - 59, stream=(1 << 63) + 2, offset=first)
        for first in (0, 1, 2, 3, (1 << 34) - 2, (1 << 62) + 5)
    ]
    randoms.append(Random(7, global_shape=(9, 8, 30), start=(2, 5, 11), offset=4))
    for random in randoms:
        r = Request(torch.empty(shape), "float32", formats.E4M3, random=random)
        want = philox(indices(shape, random), random.seed, random.stream)
        for at in (whole, box):
            size = tuple(s.stop - s.start for s in at)
            got = torch_._words(r, torch_.Chunk(at, at, size), shape)
            assert got.numpy().tolist() == want[at].tolist()


@pytest.mark.parametrize("fmt", ["nvfp4", "mxfp8_e5m2", "fp8_block_e4m3", "int8_tensor", "e3m2"])
def test_scalars_and_empties(fmt: str) -> None:
    row = formats.get_format(fmt)
    check(np.array(-1.3, np.float32), row)
    for shape in ((0,), (0, 5), (3, 0)):
        r = Request(torch.empty(shape), "float32", row, axis=len(shape) - 1)
        parts, out = torch_.encode(r), torch.empty(shape)
        torch_.quantize(r, out)
        assert parts.codes.shape == shape
        if parts.tensor_scale is not None:
            assert parts.tensor_scale.item() == 1.0


def test_every_code_decodes() -> None:
    """Those too that no cast produces: int8's -128, NaN payloads, spare top bits."""
    for fmt in (formats.INT8, formats.E5M2, formats.E4M3FNUZ, formats.UE4M3, formats.E8M0):
        codes = np.arange(256, dtype=np.uint8)
        want = np.empty(256)
        oracle.decode(fmt, Parts(codes, None, None), 0, want, "float64")
        got = torch.empty(256, dtype=torch.float64)
        torch_.decode(fmt, Parts(torch.from_numpy(codes), None, None), 0, got)
        assert_same_bits(got, want, codes, fmt.name)


def test_flushed_denormals_do_not_matter_over_many_chunks() -> None:
    x = tensor(block_data(600, 128, 6))
    for fmt in ("fp32", "mxfp8_e4m3", "nvfp4", "fp8_block_e4m3/fp32", "fp8_tensor_e4m3"):
        r = Request(x, "float32", formats.get_format(fmt), "rtp", "sat", 1)
        want, values, inside = torch_.encode(r), torch.empty_like(x), torch_.within(r)
        torch_.quantize(r, values)
        if not torch.set_flush_denormal(True):
            pytest.skip("this CPU has no denormal mode")
        try:
            got, again, mask = torch_.encode(r), torch.empty_like(x), torch_.within(r)
            torch_.quantize(r, again)
            still = (torch.tensor([1e-40]) * 1).item() == 0
        finally:
            torch.set_flush_denormal(False)
        assert still, "the caller's mode must be restored"
        assert_same_parts(got, want, x, fmt)
        assert_same_bits(again, values, x, fmt)
        assert_same_bits(mask, inside, x, fmt)


def test_unserved_requests_say_why() -> None:
    r = Request(torch.ones(8), "float32", formats.NVFP4)
    assert torch_.supports(r) is None
    int16 = Format("int16", 0, 15, bias=-14)
    wide = BlockFormat("wide", int16, (4,), formats.FP32, "fp8", tensor_scaled=True)
    assert "64 bits" in (torch_.supports(replace(r, fmt=wide)) or "")


def test_user_formats_with_odd_shapes() -> None:
    deep = Format("deep", exp_bits=7, man_bits=1, bias=127)
    rows = [
        deep,
        BlockFormat("blocks of one", formats.FP16, (1,), formats.E8M0, "mx_even"),
        BlockFormat("blocks of 7", formats.INT8, (7,), formats.FP32, "fp8"),
        BlockFormat("tiles", formats.E3M2, (4, 8), formats.E5M2, "nvfp4", tensor_scaled=True),
        BlockFormat("deep in blocks", deep, (8,), formats.E8M0, "mx_rceil"),
    ]
    for row in rows:
        special = not (isinstance(row, BlockFormat) and row.element.is_integer)
        check(block_data(9, 30, 3, special), row)
