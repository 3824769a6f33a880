"""Products on a GPU and their replay: operands, arguments of PyTorch's calls, bits of results."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import fpemu
from fpemu.gemm import get_unit, matmul
from fpemu.hw import gemms

BY_NAME = {row.name: row for cap in gemms.ARCHITECTURES for row in gemms.rows(cap)}
H200 = {row.name: row for row in gemms.rows((9, 0))}
B200 = {row.name: row for row in gemms.rows((10, 0))}
SHAPE = (128, 128, 512)


def small(row: gemms.Gemm, shape: tuple[int, int, int] = SHAPE) -> gemms.Operands:
    """Operands whose products and sums every order adds exactly: small integers, scales 2 and 4."""
    x = gemms.operands(row, "normal", shape, 1, 0)
    rng = np.random.default_rng(1)

    def codes(name: str, size: tuple[int, ...]) -> np.ndarray:
        values = rng.integers(-2, 3, size).astype(np.float32)
        return fpemu.encode(values, gemms.element(name)).codes

    scales = [
        None if s is None else np.full_like(s, f) for s, f in ((x.scale_a, 2), (x.scale_b, 4))
    ]
    return gemms.Operands(codes(row.a, x.a.shape), codes(row.b, x.b.shape), None, *scales)


# The table ---------------------------------------------------------------------------------------


def test_rows_are_unique_and_name_real_units() -> None:
    for capability in gemms.ARCHITECTURES:
        rows = gemms.rows(capability)
        assert len({row.name for row in rows}) == len(rows)
        for row in rows:
            unit = get_unit(row.unit)
            assert unit.name == row.unit
            assert (unit.a.name, unit.b.name) == tuple(
                gemms.element(x).name for x in (row.a, row.b)
            )
            if row.recipe is None:
                assert row.single and row.out in unit.outputs
    assert gemms.rows((7, 5)) == []


def test_both_targets_have_what_the_issue_asks_for() -> None:
    assert {"_scaled_mm tensor fast e4m3 -> bf16", "_scaled_mm tensor slow e4m3 -> bf16",
            "_scaled_mm rows slow e4m3 -> bf16", "_scaled_mm 1x128 by 128x128 e4m3 -> bf16",
            "torch.mm tf32 -> fp32", "torch.mm fp16 -> fp16", "torch.mm bf16 -> fp32"} <= set(H200)  # fmt: skip
    assert {"F.scaled_mm mxfp8_e4m3 -> bf16", "F.scaled_mm mxfp4 -> bf16",
            "F.scaled_mm nvfp4 -> fp32", "tcgen05.mma kind::mxf4nvf4 nvfp4 nvfp4"} <= set(B200)  # fmt: skip


# Operands ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", gemms.FAMILIES)
@pytest.mark.parametrize("name", ["fp16", "bf16", "tf32", "e4m3", "e5m2", "e2m1"])
def test_families_are_what_they_say(family: str, name: str) -> None:
    fmt = fpemu.get_format(name)
    codes = gemms.random_codes(fmt, family, (8, 16, 64), np.random.default_rng(0))
    values = gemms.values(codes, name)
    assert codes.dtype == fmt.code_dtype and int(codes.max()) < 1 << fmt.bits
    if family != "special":
        assert np.isfinite(values).all()
    else:
        assert np.isinf(values).any() == fmt.has_inf and np.isnan(values).any() == fmt.has_nan
        assert (codes == 0).any() and (codes == fmt.sign_bit).any()
    if family == "tiny" and fmt.exp_bits < 8:
        assert np.abs(values).max() < 2 * fmt.min_normal and (np.abs(values) < fmt.min_normal).any()
    if family in ("spread", "cancel") and fmt.exp_bits > 2:
        magnitudes = np.abs(values[values != 0])
        assert magnitudes.max() / magnitudes.min() > 2.0**12


def test_cancelling_sums_nearly_vanish() -> None:
    row = H200["wgmma.mma_async.sync.aligned.m64n64k16.f32.fp16.fp16".replace("fp16", "f16")]
    x = gemms.operands(row, "cancel", row.shapes[0], 4, 0)
    a, b = (gemms.values(codes, "fp16").astype(np.float64) for codes in (x.a, x.b))
    sums = np.abs(a @ b.swapaxes(1, 2))
    sizes = np.abs(a) @ np.abs(b).swapaxes(1, 2)
    assert np.median(sums / sizes) < 1e-2
    assert (sums > 0).any()


def test_bfloat16_products_reach_the_clamp() -> None:
    """Sums around 2**-133, where the smallest alignment exponent decides."""
    row = next(r for r in H200.values() if r.path == "tl.dot" and r.a == "bf16")
    x = gemms.operands(row, "tiny", row.shapes[0], 4, 0)
    other = replace(get_unit(row.unit), clamp_fp32=None)
    bits = [
        gemms.output_bits(
            matmul(gemms.values(x.a, "bf16"), gemms.values(x.b, "bf16").swapaxes(1, 2), c=x.c, unit=u),
            "fp32",
        )
        for u in (get_unit(row.unit), other)
    ]  # fmt: skip
    assert (bits[0] != bits[1]).any()


def test_accumulators_are_float16_values_where_the_output_is() -> None:
    row = H200["mma.sync.aligned.m16n8k16.row.col.f16.f16.f16.f16"]
    for family in gemms.FAMILIES:
        c = gemms.operands(row, family, row.shapes[0], 8, 0).c
        assert c is not None
        with np.errstate(over="ignore"):
            again = c.astype(np.float16).astype(np.float32)
        assert np.array_equal(c, again, equal_nan=True)
        assert not c[::4].any() and c[1].any()


def test_operands_are_the_same_again_and_other_for_another_seed() -> None:
    row = B200["F.scaled_mm nvfp4 -> fp32"]
    x, y, z = (gemms.operands(row, "spread", SHAPE, 1, seed) for seed in (0, 0, 1))
    for a, b, c in zip(x, y, z, strict=True):
        if a is not None:
            assert np.array_equal(a, b) and not np.array_equal(a, c)


# Replay ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("out", ["fp32", "fp16", "bf16", "e4m3"])
def test_output_bits_are_the_formats_own(out: str) -> None:
    values = np.float32([1.0, -2.5, 0.0, 448.0, np.nan])
    d = values.astype(np.float16) if out == "fp16" else values
    with np.errstate(invalid="ignore"):
        got = gemms.output_bits(d, out)
    want = {"fp32": values.view(np.uint32), "fp16": values.astype(np.float16).view(np.uint16),
            "bf16": (values.view(np.uint32) >> 16).astype(np.uint16),
            "e4m3": np.uint8([0x38, 0xC2, 0, 0x7E, 0x7F])}[out]  # fmt: skip
    assert got.dtype == want.dtype and np.array_equal(got, want)
    native = torch.from_numpy(values).to(gemms._type(out))
    assert np.array_equal(gemms.tensor_bits(native)[:4], got[:4])


def test_the_orders_of_row_scales_differ() -> None:
    row = H200["_scaled_mm rows fast e4m3 -> bf16"]
    row = replace(row, out="fp32")
    x = gemms.operands(row, "normal", SHAPE, 1, 0)
    base = gemms.replay(row, x)
    bare = {"recipe": "cublaslt.fp8_fast"}
    assert np.array_equal(gemms.replay(row, x, order="a(b acc)", **bare), base)
    others = [gemms.replay(row, x, order=order, **bare) for order in ("b(a acc)", "(ab) acc")]
    assert all((other != base).any() for other in others)
    assert (others[0] != others[1]).any()


@pytest.mark.parametrize("name", [n for n, r in H200.items() if r.alternatives])
def test_alternatives_can_be_replayed_and_are_others(name: str) -> None:
    """An alternative that gives the same bits as the row would explain nothing."""
    row = replace(H200[name], out="fp32" if H200[name].out == "e4m3" else H200[name].out)
    family = "normal" if row.path == "torch.mm" else "spread"
    x = gemms.operands(row, family, (64, 64, 1024), 1, 0)
    base = gemms.replay(row, x)
    tried = 0
    for _, changes in row.alternatives:
        if changes.get("split_k", 1) > 8:
            with pytest.raises(ValueError, match="at most one split per tile"):
                gemms.replay(row, x, **changes)
            continue
        other = gemms.replay(row, x, **changes)
        assert other.shape == base.shape and other.dtype == base.dtype
        tried += bool((other != base).any())
    assert tried >= 1


# PyTorch's calls ---------------------------------------------------------------------------------


def _calls(rows: dict[str, gemms.Gemm]) -> list[Any]:
    return [pytest.param(row, id=row.name) for row in rows.values() if not row.single]


@pytest.mark.parametrize("row", _calls(H200 | B200))
def test_arguments_fit_pytorchs_checks(row: gemms.Gemm) -> None:
    """On the meta device PyTorch checks types, shapes, strides and swizzles as for CUDA."""
    if row.a == "mxfp4":
        pytest.skip("PyTorch 2.13's check counts scales by packed bytes; its CUDA code by elements")
    x = gemms.operands(row, "normal", SHAPE, 1, 0)
    d = row.run(row, x, "meta")
    assert d.shape == (1, *SHAPE[:2]) and d.dtype == gemms._type(row.out)


@pytest.mark.parametrize("row", _calls(H200))
def test_calls_multiply_what_they_are_given(row: gemms.Gemm) -> None:
    """On the CPU, with sums that every order of adding makes exactly."""
    if row.scaling in ("1x128", "128x128") or (row.path == "torch.mm" and row.out != row.a):
        pytest.skip("PyTorch has this call on CUDA alone")
    x = small(row)
    assert np.array_equal(gemms.tensor_bits(row.run(row, x, "cpu")), gemms.replay(row, x))
    flipped = x._replace(a=x.a[:, ::-1].copy())
    assert (gemms.tensor_bits(row.run(row, flipped, "cpu")) != gemms.replay(row, x)).any()


def test_flags_of_torch_are_put_back() -> None:
    flags = torch.backends.cuda.matmul
    before = flags.allow_tf32, flags.allow_fp16_reduced_precision_reduction
    row = H200["torch.mm tf32 -> fp32"]
    row.run(row, small(row), "cpu")
    assert (flags.allow_tf32, flags.allow_fp16_reduced_precision_reduction) == before


@pytest.mark.parametrize("name", ["F.scaled_mm mxfp8_e4m3 -> bf16", "_scaled_mm rows fast e4m3 -> bf16"])  # fmt: skip
def test_an_older_torch_is_told_apart(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    row = B200[name]
    x = gemms.operands(row, "normal", SHAPE, 1, 0)
    monkeypatch.delattr(torch.nn.functional, "scaled_mm", raising=False)
    monkeypatch.delattr(torch, "_scaled_mm")
    with pytest.raises(NotImplementedError, match="is not in this torch"):
        row.run(row, x, "meta")
