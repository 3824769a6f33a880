"""The format table against numbers typed from the standards."""

from __future__ import annotations

import numpy as np
import pytest
from helpers import ELEMENTS, assert_same_bits

from fpemu import formats
from fpemu.backends import oracle
from fpemu.formats import Format

P = 2.0  # powers of two read better as P**-14

#: name: bits, bias, max, min normal, min subnormal, eps, emax, Inf codes, NaN codes
SPEC = {
    "fp16": (16, 15, 65504.0, P**-14, P**-24, P**-10, 15, 2, 2 * 1023),  # IEEE 754-2019, table 3.5
    "bf16": (16, 127, (2 - P**-7) * P**127, P**-126, P**-133, P**-7, 127, 2, 2 * 127),
    "tf32": (19, 127, (2 - P**-10) * P**127, P**-126, P**-136, P**-10, 127, 2, 2 * 1023),
    "e4m3": (8, 7, 448.0, P**-6, P**-9, P**-3, 8, 0, 2),  # OFP8 1.0, table 1
    "e5m2": (8, 15, 57344.0, P**-14, P**-16, P**-2, 15, 2, 6),
    "e3m2": (6, 3, 28.0, 0.25, 0.0625, 0.25, 4, 0, 0),  # OCP MX 1.0, tables 3 to 5
    "e2m3": (6, 1, 7.5, 1.0, 0.125, 0.125, 2, 0, 0),
    "e2m1": (4, 1, 6.0, 1.0, 0.5, 0.5, 2, 0, 0),
    "e8m0": (8, 127, P**127, P**-127, P**-127, 1.0, 127, 0, 1),  # OCP MX 1.0, table 7
    "ue4m3": (7, 7, 448.0, P**-6, P**-9, P**-3, 8, 0, 1),
    "int8": (8, -6, 127.0, 1.0, 1.0, 1.0, 6, 0, 0),
    "e4m3fnuz": (8, 8, 240.0, P**-7, P**-10, P**-3, 7, 0, 1),  # ml_dtypes README
    "e5m2fnuz": (8, 16, 57344.0, P**-15, P**-17, P**-2, 15, 0, 1),
    "e4m3b11fnuz": (8, 11, 30.0, P**-10, P**-13, P**-3, 4, 0, 1),
    "e3m4": (8, 3, 15.5, 0.25, P**-6, P**-4, 3, 2, 2 * 15),
    "e4m3_ieee": (8, 7, 240.0, P**-6, P**-9, P**-3, 7, 2, 2 * 7),
}

#: Codes whose meaning the standards give one by one.
SPECIAL_CODES = [
    ("fp16", 0x7C00, np.inf), ("fp16", 0xFC00, -np.inf), ("fp16", 0x7C01, np.nan),
    ("fp16", 0x3C00, 1.0), ("fp16", 0x0001, P**-24), ("fp16", 0x8000, -0.0),
    ("bf16", 0x7F80, np.inf), ("bf16", 0x3F80, 1.0), ("bf16", 0xFFFF, np.nan),
    ("tf32", 0x1FC00, 1.0), ("tf32", 0x3FC00, np.inf), ("tf32", 0x7FC00, -np.inf),
    ("e4m3", 0x7E, 448.0), ("e4m3", 0x7F, np.nan), ("e4m3", 0xFF, np.nan), ("e4m3", 0x78, 256.0),
    ("e4m3", 0x01, P**-9), ("e4m3", 0x07, 0.875 * P**-6), ("e4m3", 0x08, P**-6),
    ("e4m3", 0x80, -0.0), ("e4m3", 0xB8, -1.0),
    ("e5m2", 0x7B, 57344.0), ("e5m2", 0x7C, np.inf), ("e5m2", 0xFC, -np.inf),
    ("e5m2", 0x7D, np.nan), ("e5m2", 0x7F, np.nan), ("e5m2", 0x03, 0.75 * P**-14),
    ("e3m2", 0x1C, 16.0), ("e3m2", 0x3F, -28.0), ("e2m3", 0x18, 4.0), ("e2m3", 0x3F, -7.5),
    ("e2m1", 0x8, -0.0), ("e2m1", 0xF, -6.0),
    ("e8m0", 0x00, P**-127), ("e8m0", 0x7F, 1.0), ("e8m0", 0xFE, P**127), ("e8m0", 0xFF, np.nan),
    ("ue4m3", 0x7E, 448.0), ("ue4m3", 0x7F, np.nan),
    ("int8", 0x7F, 127.0), ("int8", 0x81, -127.0), ("int8", 0xFF, -1.0), ("int8", 0x00, 0.0),
    ("e4m3fnuz", 0x80, np.nan), ("e4m3fnuz", 0x7F, 240.0), ("e4m3fnuz", 0xFF, -240.0),
    ("e5m2fnuz", 0x80, np.nan), ("e5m2fnuz", 0x7F, 57344.0),
    ("e4m3b11fnuz", 0x80, np.nan), ("e4m3b11fnuz", 0x7F, 30.0),
    ("e3m4", 0x70, np.inf), ("e3m4", 0x6F, 15.5), ("e3m4", 0x71, np.nan),
    ("e4m3_ieee", 0x78, np.inf), ("e4m3_ieee", 0x77, 240.0), ("e4m3_ieee", 0xF9, np.nan),
]  # fmt: skip

#: Every non-negative value of the small formats, in code order.
LISTS = {
    "e2m1": [0, 0.5, 1, 1.5, 2, 3, 4, 6],
    "e3m2": [
        0, 0.0625, 0.125, 0.1875, 0.25, 0.3125, 0.375, 0.4375, 0.5, 0.625, 0.75, 0.875,
        1, 1.25, 1.5, 1.75, 2, 2.5, 3, 3.5, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28,
    ],
    "e2m3": [
        0, 0.125, 0.25, 0.375, 0.5, 0.625, 0.75, 0.875, 1, 1.125, 1.25, 1.375, 1.5, 1.625, 1.75,
        1.875, 2, 2.25, 2.5, 2.75, 3, 3.25, 3.5, 3.75, 4, 4.5, 5, 5.5, 6, 6.5, 7, 7.5,
    ],
}  # fmt: skip

#: block format: element, block, scale format, has a tensor scale
BLOCKS = {
    "mxfp8_e4m3": ("e4m3", (32,), "e8m0", False), "mxfp8_e5m2": ("e5m2", (32,), "e8m0", False),
    "mxfp6_e3m2": ("e3m2", (32,), "e8m0", False), "mxfp6_e2m3": ("e2m3", (32,), "e8m0", False),
    "mxfp4": ("e2m1", (32,), "e8m0", False),
    "nvfp4": ("e2m1", (16,), "e4m3", True), "nvfp4/2d": ("e2m1", (16, 16), "e4m3", True),
    "nvfp4/1level": ("e2m1", (16,), "e4m3", False),
    "fp8_tensor_e4m3": ("e4m3", None, None, True), "fp8_tensor_e5m2": ("e5m2", None, None, True),
    "int8_tensor": ("int8", None, None, True),
    "fp8_block_e4m3": ("e4m3", (128,), "fp32", False),
    "fp8_block_e4m3/2d": ("e4m3", (128, 128), "fp32", False),
    "fp8_block_e4m3/fp32": ("e4m3", (128,), "fp32", False),
    "fp8_block_e4m3/2d/fp32": ("e4m3", (128, 128), "fp32", False),
}  # fmt: skip


def test_every_element_format_has_a_row_here() -> None:
    assert set(ELEMENTS) == {*SPEC, "fp32"}


@pytest.mark.parametrize("name", SPEC)
def test_parameters(name: str) -> None:
    bits, bias, top, normal, subnormal, eps, emax, infs, nans = SPEC[name]
    fmt = formats.get_format(name)
    assert isinstance(fmt, Format)
    assert (fmt.bits, fmt.bias, fmt.emax) == (bits, bias, emax)
    assert (fmt.max, fmt.min_normal, fmt.min_subnormal, fmt.eps) == (top, normal, subnormal, eps)
    values = fmt.values()
    assert values.dtype == np.float64 and values.shape == (2**bits,)
    assert (np.isinf(values).sum(), np.isnan(values).sum()) == (infs, nans)
    finite = values[np.isfinite(values)]
    assert finite.max() == top
    assert finite[finite > 0].min() == subnormal
    zeros = {"e8m0": 0, "ue4m3": 1, "int8": 1}.get(name, 1 if name.endswith("fnuz") else 2)
    assert (values == 0).sum() == zeros


@pytest.mark.parametrize(("name", "code", "value"), SPECIAL_CODES)
def test_special_codes(name: str, code: int, value: float) -> None:
    got = formats.get_format(name).values()[code]
    assert (
        np.isnan(got) if np.isnan(value) else (got, np.signbit(got)) == (value, np.signbit(value))
    )


@pytest.mark.parametrize("name", LISTS)
def test_small_formats_in_full(name: str) -> None:
    positive = np.array(LISTS[name], dtype=np.float64)
    assert_same_bits(formats.get_format(name).values(), np.concatenate([positive, -positive]))


def test_fp32_refuses_a_table_and_has_the_ieee_range() -> None:
    fp32 = formats.FP32  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="fp32"):
        fp32.values()
    assert (fp32.max, fp32.min_normal, fp32.min_subnormal) == (
        (2 - P**-23) * P**127,
        P**-126,
        P**-149,
    )


@pytest.mark.parametrize("name", SPEC)
def test_values_equal_the_oracle(name: str) -> None:
    """`values()` and the oracle decode each code on their own."""
    fmt = formats.get_format(name)
    codes = range(0, 1 << fmt.bits, 17 if fmt.bits > 16 else 1)
    want = [oracle.to_bits(oracle.value_of(fmt, code), "float64") for code in codes]
    got = fmt.values()[codes]
    got[np.isnan(got)] = np.nan  # the sign of a NaN says nothing
    assert_same_bits(got, np.array(want, np.uint64).view(np.float64))


@pytest.mark.parametrize("name", BLOCKS)
@pytest.mark.parametrize("suffix", ["", "/rceil", "/even", "/ceil"])
def test_block_rows(name: str, suffix: str) -> None:
    if suffix and not name.startswith("mx"):
        return
    element, block, scale, tensor_scaled = BLOCKS[name]
    row = formats.get_format(name + suffix)
    assert (row.element.name, row.block, row.tensor_scaled) == (element, block, tensor_scaled)
    assert (row.scale.name if row.scale else None) == scale


def test_mxint8_element_has_two_digits_before_the_point() -> None:
    """OCP MX 1.0, 5.3.4: two's complement with the implicit scale 2**-6, largest 1 63/64."""
    element = formats.get_format("mxint8").element
    assert (element.max, element.min_subnormal) == (1 + 63 / 64, P**-6)
