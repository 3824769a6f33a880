"""Cases from public bug reports: each right value is what fpemu gives, on every backend.

Cases about optimisers, checkpoints of other libraries, loss scaling and matrix products belong to
other tests; `ELSEWHERE` lists them, so that no case is dropped unseen.
"""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from helpers import (
    BF16,
    FAST,
    VECTORS,
    as_numpy,
    assert_same_bits,
    bits_of,
    give,
    patterns,
    request,
    vectors,
)  # fmt: skip

import fpemu
from fpemu import formats
from fpemu.backends import Parts, oracle

BACKENDS = (*FAST, "oracle")
MX = {"mxe2m1": "mxfp4", "mxe2m3": "mxfp6_e2m3", "mxe3m2": "mxfp6_e3m2", "mxe4m3": "mxfp8_e4m3",
      "mxe5m2": "mxfp8_e5m2"}  # fmt: skip
OVERFLOW = {"sat": "sat", "ieee": "nonsat"}

#: Not casts of this package: op -> where it is dealt with, or why not.
ELSEWHERE = {
    "load_compressed_tensors": "checkpoint conventions of another library",
    "load_modelopt": "checkpoint conventions of another library",
    "delayed_scaling_sequence": "delayed scaling is a training recipe",
    "state_dict": "delayed scaling is a training recipe",
    "sequence": "loss scaling",
    "api": "loss scaling",
    "found_inf": "loss scaling",
    "gemm_accumulate": "tests/gemm",
    "cast_large": "needs 8 GB; index arithmetic is 64-bit, see tests/backends",
    "store_load": "tests/api/test_encoded.py",
    "ste_backward": "tests/api/test_torch_citizen.py",
    "value": "Hadamard transforms are no cast",
}


def _cases() -> list[dict[str, Any]]:
    if not (VECTORS / "bug_cases.json").exists():
        return []
    return vectors("bug_cases.json")["cases"]


def of(*ops: str) -> Any:
    """Parametrize over the cases of some ops."""
    cases = [c for c in _cases() if c["op"] in ops]
    if not cases:
        return pytest.mark.parametrize(
            "case", [pytest.param({}, marks=pytest.mark.skip("no recorded vectors here"))]
        )
    return pytest.mark.parametrize("case", cases, ids=[c["id"] for c in cases])


def array(spec: dict[str, Any]) -> np.ndarray:
    """The input of a case, from its bits where it gives them."""
    dtype = BF16 if spec["dtype"] == "bfloat16" else np.dtype(spec["dtype"])
    if "bits" in spec:
        return np.array([int(b, 16) for b in spec["bits"]], f"u{dtype.itemsize}").view(dtype)
    if dtype.kind == "i":
        return np.array(spec["values"], dtype)
    return np.array([float(v) for v in spec["values"]]).astype(dtype)


def power(text: str) -> float:
    """'2^-7' or '1.5*2^127' as a number."""
    factor, _, exponent = text.rpartition("2^")
    return float(factor.rstrip("*") or 1) * 2.0 ** int(exponent)


def test_every_case_is_accounted_for() -> None:
    ops = {c["op"] for c in vectors("bug_cases.json")["cases"]}
    here = {
        "cast", "cast_nearest", "cast_with_scale", "decode", "decode_then_encode", "encode_scale",
        "mx_quantize", "mx_quantize_shape", "mx_dequantize", "quantize_with_given_scale",
        "nvfp4_quantize", "nvfp4_dequantize", "nvfp4_quantize_shape", "nvfp4_quantize_2d",
        "delayed_scale_from_amax", "pertensor_quantize", "rowwise_quantize", "stochastic_round",
        "cast_and_mx", "property", "block2d_quantize_shape",
    }  # fmt: skip
    assert ops == here | set(ELSEWHERE)


@pytest.mark.parametrize("backend", BACKENDS)
@of("cast")
def test_cast(case: dict[str, Any], backend: str) -> None:
    expected, fmt = case["expected"], case["fmt"]
    if case["fmt"] == "any" or "e4m3_code" in expected:  # 0-d
        got = fpemu.encode(give(backend, np.float32(1.0625).reshape(())), "e4m3", backend=backend)
        assert got.shape == () and int(got.codes) == int(expected["e4m3_code"], 16)
        return
    x = array(case["input"])
    overflow = OVERFLOW[case["params"]["overflow"]]
    got = as_numpy(fpemu.encode(give(backend, x), fmt, overflow=overflow, backend=backend).codes)
    want = np.array([int(c, 16) for c in expected["codes"]], got.dtype)
    # "Any NaN code is acceptable": ours is the canonical one.
    values = np.array([float(v) for v in expected["values"]])
    want[np.isnan(values)] = formats.get_format(fmt).nan_code or 0
    assert_same_bits(got, want, x, case["why"])


@pytest.mark.parametrize("backend", BACKENDS)
@of("cast_nearest")
def test_cast_to_e8m0(case: dict[str, Any], backend: str) -> None:
    """Our policy where the case leaves it open: ties go up, ends saturate, zero is code 0."""
    x = array(case["input"])
    codes = as_numpy(fpemu.encode(give(backend, x), "e8m0", backend=backend).codes).tolist()
    policy = {0x00000000: 0, 0x7F7FFFFF: 254, 0x7F800000: 254}
    for bits, got, want in zip(bits_of(x).tolist(), codes, case["expected"]["codes"], strict=True):
        if isinstance(want, dict):
            want = want["tie"][1] if "tie" in want else policy[bits]
        assert got == want, hex(bits)


@of("cast_with_scale", "quantize_with_given_scale")
def test_cast_under_a_given_scale(case: dict[str, Any]) -> None:
    """A block whose amax leads to the scale asked for."""
    x, byte = array({"dtype": "float32", **case["input"]}), case["params"]["scale_code"]
    fmt = MX.get(case["fmt"], "mxfp4")
    codes = [int(c, 16) for c in case["expected"]["codes"]]
    emax = fpemu.get_format(fmt).element.emax
    peak = 2.0 ** min(byte - 127 + emax, 127)
    for backend in BACKENDS:
        for value, code in zip(x, codes, strict=True):
            got = fpemu.encode(give(backend, np.float64([value, peak])), fmt, backend=backend)
            if as_numpy(got.scales)[0] == byte:
                assert int(got.codes[0]) == code
            else:  # no block of finite float32 has this scale under the floor rule: cast x / scale
                exact = Fraction(float(value)) / Fraction(2) ** (byte - 127)
                element = fpemu.get_format(fmt).element
                assert oracle.round_to(element, oracle.number(exact)) == code
                scaled = give(backend, np.float64([float(exact)]))
                assert int(fpemu.encode(scaled, element, backend=backend).codes[0]) == code


@of("decode")
def test_decode(case: dict[str, Any]) -> None:
    codes = np.array([int(c, 16) if isinstance(c, str) else c for c in case["input"]["codes"]])
    fmt = fpemu.get_format(case["fmt"])
    for backend in BACKENDS:
        encoded = fpemu.encode(
            give(backend, np.zeros(len(codes), np.float32)), fmt, backend=backend
        )
        encoded.codes = give(backend, codes.astype(fmt.code_dtype))
        got = as_numpy(encoded.decode())
        if "f32_bits" in case["expected"]:
            for value, bits in zip(got, case["expected"]["f32_bits"], strict=True):
                assert np.isnan(value) if bits is None else int(bits, 16) == value.view(np.uint32)
        else:
            assert_same_bits(got, np.float32(case["expected"]["values"]))


@of("decode_then_encode")
def test_codes_come_back(case: dict[str, Any]) -> None:
    fmt = fpemu.get_format(case["fmt"])
    values = fmt.values()
    finite = np.flatnonzero(np.isfinite(values))
    assert len(finite) == case["expected"]["finite_codes"]
    table = case["expected"]["decode_table_f32_bits"]
    if table:
        assert bits_of(values.astype(np.float32)).tolist() == [int(b, 16) for b in table]
    for backend in BACKENDS:
        x = give(backend, values[finite].astype(np.float32))
        assert_same_bits(fpemu.encode(x, fmt, backend=backend).codes, finite.astype(np.uint8))


@of("encode_scale")
def test_scale_codes(case: dict[str, Any]) -> None:
    x = np.float32([power(s) for s in case["input"]["scales"]])
    for backend in BACKENDS:
        got = fpemu.encode(give(backend, x), "e8m0", backend=backend).codes
        assert_same_bits(got, np.uint8(case["expected"]["codes"]))


@of("mx_quantize")
def test_mx(case: dict[str, Any]) -> None:
    expected, name = case["expected"], MX.get(case["fmt"])
    if "second_pass" in expected:  # idempotence under FLOOR, any format
        x = np.random.default_rng(0).standard_normal((7, 70)).astype(np.float32)
        for fmt in MX.values():
            once = fpemu.quantize(x, fmt)
            assert_same_bits(fpemu.quantize(once, fmt), once, x)
        return
    x = array(case["input"])
    for backend in BACKENDS:
        modes = {k: v for k, v in expected.items() if isinstance(v, dict) and "scale_code" in v}
        for mode, want in modes.items():
            fmt = name if mode == "floor" else f"{name}/{mode}"
            got = fpemu.encode(give(backend, x), fmt, backend=backend)
            assert as_numpy(got.scales).tolist() == [want["scale_code"]]
            assert as_numpy(got.codes).tolist() == [int(c, 16) for c in want["codes"]]
            assert_same_bits(got.decode(), np.float32(want["dequant"]), x)
        if not modes:
            _check_special_block(case, x, fpemu.encode(give(backend, x), name, backend=backend))


def _check_special_block(case: dict[str, Any], x: np.ndarray, got: fpemu.Encoded) -> None:
    scale, codes, values = as_numpy(got.scales), as_numpy(got.codes), as_numpy(got.decode())
    if case["kind"] in ("nan-in-block", "inf-in-block"):  # policy: the block is NaN
        assert scale.tolist() == [255] and not codes.any() and np.isnan(values).all()
    else:
        assert case["kind"] == "zero-amax"
        assert scale.tolist() == [0] and not codes.any() and not values.any()


@of("mx_quantize_shape")
def test_blocks_stay_in_their_row(case: dict[str, Any]) -> None:
    x = np.repeat(np.float32([[1.0], [1024.0]]), 40, axis=1)
    for backend in BACKENDS:
        got = fpemu.encode(give(backend, x), MX[case["fmt"]], backend=backend)
        assert as_numpy(got.scales).tolist() == case["expected"]["scale_codes"]
        assert_same_bits(got.decode(), x)


@of("mx_dequantize")
def test_mx_decode(case: dict[str, Any]) -> None:
    codes = np.array([int(c, 16) for c in case["input"]["codes"]], np.uint8)
    dtype = BF16 if case["params"]["out_dtype"] == "bfloat16" else np.dtype(np.float32)
    fmt, expected = fpemu.get_format(MX[case["fmt"]]), case["expected"]
    parts = Parts(codes, np.uint8(case["input"]["scale_codes"]), None)
    ours = np.empty(len(codes), dtype)
    oracle.decode(fmt, parts, 0, ours.view(f"u{dtype.itemsize}"), dtype.name)
    given = fpemu.Encoded(*parts, fmt, 0, dtype)
    for got in (ours, given.decode()):
        if "class" in expected:
            assert np.isnan(got).all()
        else:
            hexes = expected.get("f32_bits") or expected["bf16_codes"]
            assert bits_of(got).tolist() == [int(h, 16) for h in hexes]


@of("nvfp4_quantize")
def test_nvfp4_nan(case: dict[str, Any]) -> None:
    """Policy: the block holding NaN is NaN, the other block is as if the NaN were not there."""
    x = array(case["input"])
    for backend in BACKENDS:
        got = fpemu.encode(give(backend, x), "nvfp4", backend=backend)
        values = as_numpy(got.decode())
        assert as_numpy(got.scales).tolist() == [0x7F, 0x7E] and np.isnan(values[:16]).all()
        assert_same_bits(values[16:], fpemu.quantize(x[16:], "nvfp4", backend="oracle"))


@of("nvfp4_dequantize")
def test_subnormal_scales_count(case: dict[str, Any]) -> None:
    scales = np.array([[int(c, 16)] for c in case["input"]["block_scale_codes"]], np.uint8)
    codes = np.array([[int(c, 16) for c in row] for row in case["input"]["codes"]], np.uint8)
    encoded = fpemu.Encoded(
        codes, scales, np.array(1, np.float32), fpemu.get_format("nvfp4"), 1, BF16
    )
    want = np.array(case["expected"]["values"]).astype(BF16)
    assert_same_bits(encoded.decode().ravel(), want)


@of("nvfp4_quantize_shape")
def test_nvfp4_shapes(case: dict[str, Any]) -> None:
    expected = case["expected"]
    for shape, packed, scales in zip(
        case["input"]["shapes"], expected["packed_shapes"], expected["scale_shapes"], strict=True
    ):
        got = fpemu.encode(np.ones(shape, np.float32), "nvfp4")
        assert (list(got.pack().shape), list(got.scales.shape)) == (packed, scales)


@of("nvfp4_quantize_2d")
def test_2d_blocks_commute_with_transposition(case: dict[str, Any]) -> None:
    w = np.random.default_rng(1).standard_normal(case["input"]["shape"]).astype(np.float32)
    for backend in BACKENDS:
        a = fpemu.encode(give(backend, w), "nvfp4/2d", backend=backend)
        b = fpemu.encode(give(backend, np.ascontiguousarray(w.T)), "nvfp4/2d", backend=backend)
        assert list(a.scales.shape) == case["expected"]["scales_shape"]
        assert_same_bits(as_numpy(a.codes).T.copy(), b.codes)
        assert_same_bits(as_numpy(a.scales).T.copy(), b.scales)


@of("block2d_quantize_shape")
def test_2d_shapes(case: dict[str, Any]) -> None:
    for shape, scales in zip(
        case["input"]["shapes"], case["expected"]["scales_shape"], strict=True
    ):
        got = fpemu.encode(np.ones(shape, np.float32), "fp8_block_e4m3/2d")
        assert list(got.scales.shape) == scales


@of("delayed_scale_from_amax")
def test_tensor_scales(case: dict[str, Any]) -> None:
    """`tensor_scale` is fl(1/scale), so the scale shows in the codes: fl(x * scale) at x = 1."""
    fmt = f"fp8_tensor_{case['fmt']}"
    amaxes = [int(b, 16) for b in case["input"]["amax_f32_bits"]]
    scales = case["expected"].get("scale_f32_bits")
    for i, bits in enumerate(amaxes):
        amax = np.uint32(bits).view(np.float32)
        if np.isnan(amax):
            with pytest.raises(ValueError, match="amax"):
                fpemu.encode(np.float32([1]), fmt, amax=float(amax))
            continue
        scale = np.float32(1) if scales is None else np.uint32(int(scales[i], 16)).view(np.float32)
        for backend in BACKENDS:
            given = give(backend, np.float32([amax if np.isfinite(amax) else 1]))
            got = fpemu.encode(given, fmt, amax=float(amax), backend=backend)
            assert_same_bits(got.tensor_scale, np.asarray(np.float32(1) / scale))
            if scales is None:
                assert float(got.tensor_scale) == 1


@of("pertensor_quantize")
def test_half_precision_input(case: dict[str, Any]) -> None:
    x = array(case["input"])
    for backend in BACKENDS:
        got = fpemu.encode(give(backend, x), "fp8_tensor_e4m3", backend=backend)
        assert as_numpy(got.codes).tolist() == [int(c, 16) for c in case["expected"]["codes"]]


@of("rowwise_quantize")
def test_zero_rows(case: dict[str, Any]) -> None:
    x = np.float32(case["input"]["values"])
    fmt = {"e4m3": "fp8_block_e4m3/fp32", "e5m2": "mxfp8_e5m2"}[case["fmt"]]
    for backend in BACKENDS:
        got = fpemu.encode(give(backend, x), fmt, backend=backend)
        assert not as_numpy(got.codes)[0].any() and not as_numpy(got.decode())[0].any()
        assert as_numpy(got.scales)[0, 0] == (1 if fmt.startswith("fp8") else 0)


@of("stochastic_round")
def test_stochastic_probabilities(case: dict[str, Any]) -> None:
    """Only the two neighbours come out, as often as the exact fraction says (5 sigma)."""
    n = 20_000
    for backend in FAST:
        for value, want in zip(case["input"]["values"], case["expected"]["per_value"], strict=True):
            x = np.full(n, value, np.float32)
            got = np.abs(as_numpy(
                fpemu.quantize(give(backend, x), case["fmt"], rounding="sr", seed=1, backend=backend)
            ))  # fmt: skip
            p = float(Fraction(want["p_up_exact"]))
            allowed = {want["abs_lo"]} | ({want["abs_hi"]} if p else set())
            assert set(got.tolist()) <= allowed
            up = (got != want["abs_lo"]).mean()
            assert abs(up - p) <= 5 * np.sqrt(p * (1 - p) / n)


@of("cast_and_mx")
def test_layouts_and_empties(case: dict[str, Any]) -> None:
    """Memory layouts are in `tests/backends`; here the empty shapes with their scale shapes."""
    if "shapes" not in case["input"]:
        wide = patterns(np.float32, 64, 2).reshape(4, 16)
        assert_same_bits(
            fpemu.encode(wide[:, :5], "e4m3").codes, fpemu.encode(wide, "e4m3").codes[:, :5]
        )
        return
    for shape, scales in zip(
        case["input"]["shapes"], case["expected"]["scales_shape"], strict=True
    ):
        for fmt, block in (("mxfp4", 32), ("nvfp4", 16)):
            if block == 32 and shape[-1] == 16 and scales[-1] != 1:
                continue
            for backend in BACKENDS:
                got = fpemu.encode(give(backend, np.zeros(shape, np.float32)), fmt, backend=backend)
                assert list(got.shape) == shape
                assert list(got.scales.shape) == [*shape[:-1], -(-shape[-1] // block)]
                assert got.tensor_scale is None or float(got.tensor_scale) == 1


@of("property")
def test_powers_of_two_are_exact(case: dict[str, Any]) -> None:
    if case["fmt"] != "any":
        pytest.skip("Hadamard transforms are no cast")
    x = np.ldexp(np.float32(1), np.arange(-149, 128)).astype(np.float32)
    for fmt in ("fp32", "tf32", "bf16"):
        fits = x[x >= fpemu.get_format(fmt).min_subnormal]
        assert_same_bits(fpemu.quantize(fits, fmt), fits)
    small = x[(x >= 2.0**-120)]  # every block of one power of two decodes to itself
    assert_same_bits(fpemu.quantize(small[:, None], "mxfp4"), small[:, None])


def test_request_helper_is_the_verbs_request() -> None:
    """`helpers.request` and `fpemu.encode` describe the same call."""
    x = np.float32([[1, 2, 3]])
    assert_same_bits(oracle.encode(request(x, "mxfp4")).codes, fpemu.encode(x, "mxfp4").codes)
