"""Casts against other implementations on all 16-bit inputs and many float32 ones.

Where a peer has another policy (NaN codes, e8m0 of zero and negatives, one saturation mode) the
comparison leaves those inputs out by name.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from helpers import BF16, all16, assert_same_bits, patterns, ties

import fpemu

ml_dtypes = pytest.importorskip("ml_dtypes", reason="ml_dtypes is not installed")

#: our name -> ml_dtypes name
ML_DTYPES = {
    "bf16": "bfloat16", "e4m3": "float8_e4m3fn", "e5m2": "float8_e5m2", "e4m3fnuz": "float8_e4m3fnuz",
    "e5m2fnuz": "float8_e5m2fnuz", "e4m3b11fnuz": "float8_e4m3b11fnuz", "e3m4": "float8_e3m4",
    "e4m3_ieee": "float8_e4m3", "e2m1": "float4_e2m1fn", "e2m3": "float6_e2m3fn",
    "e3m2": "float6_e3m2fn", "e8m0": "float8_e8m0fnu",
}  # fmt: skip
TORCH = {
    "bf16": "bfloat16", "fp16": "float16", "e4m3": "float8_e4m3fn", "e5m2": "float8_e5m2",
    "e4m3fnuz": "float8_e4m3fnuz", "e5m2fnuz": "float8_e5m2fnuz", "e8m0": "float8_e8m0fnu",
}  # fmt: skip


def inputs(name: str) -> list[np.ndarray]:
    return [all16(np.float16), all16(BF16), patterns(np.float32, 1 << 18, 21), ties(name)]


def compare(
    name: str, x: np.ndarray, theirs: np.ndarray, overflow: str, skip: np.ndarray | None = None
) -> None:
    """Codes equal, or both NaN, outside `skip`."""
    ours, values = fpemu.encode(x, name, overflow=overflow).codes, fpemu.get_format(name).values()
    ours = np.where(np.isnan(values[ours]), 0, ours)
    theirs = np.where(np.isnan(values[theirs]), 0, theirs)
    keep = slice(None) if skip is None else ~skip
    assert_same_bits(ours[keep], theirs[keep].astype(ours.dtype), x[keep], name)


def e8m0_policy(x: np.ndarray) -> np.ndarray:
    """Zero, negatives, and the band below 2**-126 that others round by bit pattern, not value."""
    wide = x.astype(np.float64)
    return (wide <= 0) | np.isnan(wide) | (wide > 2.0**-127) & (wide < 2.0**-126)


@pytest.mark.parametrize("name", ML_DTYPES)
def test_ml_dtypes(name: str) -> None:
    dtype = np.dtype(getattr(ml_dtypes, ML_DTYPES[name]))
    for x in inputs(name):
        with np.errstate(all="ignore"):
            theirs = x.astype(np.float32).astype(dtype).view(f"u{dtype.itemsize}")
            nan = np.isnan(x.astype(np.float32))
            skip = e8m0_policy(x) if name == "e8m0" else None
        if name in ("e2m1", "e2m3", "e3m2"):  # NaN: +max here (PTX), -0 there
            skip = nan
        compare(name, x, theirs, "nonsat", skip)


@pytest.mark.parametrize("name", ML_DTYPES)
def test_ml_dtypes_values(name: str) -> None:
    dtype = np.dtype(getattr(ml_dtypes, ML_DTYPES[name]))
    fmt = fpemu.get_format(name)
    codes = np.arange(1 << fmt.bits).astype(fmt.code_dtype)
    with np.errstate(invalid="ignore"):
        theirs = codes.view(dtype).astype(np.float64)
    ours = fmt.values()
    assert np.array_equal(np.isnan(ours), np.isnan(theirs))
    ours[np.isnan(ours)] = theirs[np.isnan(theirs)] = np.nan
    assert_same_bits(ours, theirs)


@pytest.mark.parametrize("name", TORCH)
def test_torch(name: str) -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    dtype = getattr(torch, TORCH[name], None)
    if dtype is None:
        pytest.skip(f"this torch has no {TORCH[name]}")
    saturates = torch.tensor(1000.0).to(torch.float8_e4m3fn).float().item() == 448  # since 2.13
    for x in inputs(name):
        with np.errstate(all="ignore"):
            wide = x.astype(np.float32)
            skip = e8m0_policy(x) if name == "e8m0" else None
        theirs = (
            torch.from_numpy(wide)
            .to(dtype)
            .view(torch.uint8 if dtype.itemsize == 1 else torch.uint16)
        )
        overflow = "sat" if name == "e4m3" and saturates else "nonsat"
        compare(name, x, theirs.numpy(), overflow, skip)


@pytest.mark.parametrize("rounding", ["rne", "rna", "rtz", "rtp", "rtn"])
@pytest.mark.parametrize("name", ["fp16", "bf16", "e4m3", "e5m2", "e3m2", "e2m3", "e2m1"])
def test_gfloat(name: str, rounding: str) -> None:
    gfloat = pytest.importorskip("gfloat", reason="gfloat is not installed")
    formats = pytest.importorskip("gfloat.formats")
    infos = {
        "fp16": "binary16", "bf16": "bfloat16", "e4m3": "ocp_e4m3", "e5m2": "ocp_e5m2",
        "e3m2": "ocp_e3m2", "e2m3": "ocp_e2m3", "e2m1": "ocp_e2m1",
    }  # fmt: skip
    modes = {"rne": "TiesToEven", "rna": "TiesToAway", "rtz": "TowardZero", "rtp": "TowardPositive",
             "rtn": "TowardNegative"}  # fmt: skip
    info = getattr(formats, f"format_info_{infos[name]}")
    mode = gfloat.RoundMode[modes[rounding]]
    for x in [np.random.default_rng(22).choice(a, 4000) for a in inputs(name)]:
        with np.errstate(all="ignore"):
            wide = x.astype(np.float64)
        wide = wide[~np.isnan(wide)]
        with np.errstate(all="ignore"):
            theirs = gfloat.round_ndarray(info, wide, mode, sat=True)
        ours = fpemu.quantize(wide, name, rounding=rounding, overflow="sat")
        assert_same_bits(ours, theirs, wide, f"{name} {rounding}")


def test_numpy_float16() -> None:
    for x in (
        patterns(np.float32, 1 << 18, 23),
        patterns(np.float64, 1 << 18, 24),
        ties("fp16", "float64"),
    ):
        keep = ~np.isnan(x)
        with np.errstate(all="ignore"):
            theirs = x.astype(np.float16).view(np.uint16)
        assert_same_bits(fpemu.encode(x, "fp16").codes[keep], theirs[keep], x[keep])


def test_numpy_float32() -> None:
    narrow = np.random.default_rng(26).standard_normal(1 << 16)
    near_subnormal = np.ldexp(narrow, -125 - np.arange(1 << 16) % 30)
    for x in (patterns(np.float64, 1 << 18, 25), narrow, near_subnormal):
        keep = ~np.isnan(x)
        with np.errstate(all="ignore"):
            theirs = x.astype(np.float32).view(np.uint32)
        assert_same_bits(fpemu.encode(x, "fp32").codes[keep], theirs[keep], x[keep])


def test_torchao_mx() -> None:
    """MX scales and codes of torchao where it is installed (floor, finite blocks of normal scale)."""
    mx = pytest.importorskip(
        "torchao.prototype.mx_formats.mx_tensor", reason="torchao is not installed"
    )
    torch = pytest.importorskip("torch")
    to_mx: Callable = mx.to_mx
    x = np.random.default_rng(27).standard_normal((64, 128)).astype(np.float32)
    for name, dtype in (("mxfp8_e4m3", torch.float8_e4m3fn), ("mxfp8_e5m2", torch.float8_e5m2)):
        scale, codes = to_mx(torch.from_numpy(x), dtype, 32)
        ours = fpemu.encode(x, name)
        assert_same_bits(ours.scales, scale.view(torch.uint8).numpy().reshape(ours.scales.shape))
        assert_same_bits(ours.codes, codes.view(torch.uint8).numpy().reshape(x.shape), x)
