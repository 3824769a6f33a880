"""Blocks through the libraries, recorded: every scale byte and every code of the dialects.

There are no exceptions. Not compared is what a record lacks: a code of -1 (a NaN without a code),
codes where only the scale was recorded, the sign of an E4M3 NaN.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from helpers import BF16, FAST, as_numpy, bits_of, block_records, give, unhex

import fpemu

#: recorded implementation -> dialect; "{}" stands for the record's format
IMPLEMENTATIONS = {
    "te_ref_1x16": "{}/te-ref",
    "te_ref_4over6_MAE_448": "{}/te-4over6-mae-448",
    "te_ref_4over6_MAE_256": "{}/te-4over6-mae-256",
    "te_ref_4over6_MSE_448": "{}/te-4over6-mse-448",
    "te_ref_4over6_MSE_256": "{}/te-4over6-mse-256",
    "te_ref_4over6_MAE_256_fastmath": "{}/te-4over6-mae-256-fast",
    "te_cuda_fastmath_model": "{}/te-fast",
    "te_mxfp8_model": "{}/te",
    "torchao_two_level": "{}/torchao",
    "torchao_single_level": "{}/torchao-1level",
    "torchao_FLOOR": "{}/torchao-0.18-floor",
    "torchao_RCEIL": "{}/torchao-0.18-rceil",
    "torchao_CEIL": "{}/torchao-0.18-ceil",
    "torchao_EVEN": "{}/torchao-0.18-even",
    "torchao_main_FLOOR": "{}/torchao-floor",
    "torchao_main_RCEIL": "{}/torchao-rceil",
    "torchao_main_CEIL": "{}/torchao-ceil",
    "torchao_main_EVEN": "{}/torchao-even",
    "modelopt_qtensor_dynamic": "{}/modelopt",
    "modelopt_MXFP4QTensor": "{}/modelopt",
    "modelopt_MXFP8QTensor": "{}/modelopt",
    "compressed_tensors_nvfp4": "{}/compressed-tensors",
    "compressed_tensors": "{}/compressed-tensors",
    "fouroversix_pt_static_6": "{}/fouroversix-static6",
    "fouroversix_pt_static_4": "{}/fouroversix-static4",
    "fouroversix_pt_mse": "{}/fouroversix-mse",
    "fouroversix_pt_mae": "{}/fouroversix-mae",
    "fouroversix_pt_abs_max": "{}/fouroversix-absmax",
    "vllm_ref_nvfp4_quant": "{}/vllm-ref",
    "flashinfer_test_ref": "{}/flashinfer-ref",
    "quark_observer_e4m3": "{}/quark",
    "quark_even_round_scale": "{}/quark-even",
    "quark_downcast_torch_ROUND_UP": "{}/quark-pack-up",
    "quark_downcast_torch_ROUND_DOWN": "{}/quark-pack-down",
    "quark_downcast_torch_EVEN": "{}/quark-pack-even",
    "microxcaling_nearest": "{}/microxcaling-nearest",
    "microxcaling_even": "{}/microxcaling-even",
    "microxcaling_floor": "{}/microxcaling-floor",
    "microxcaling_nearest_bf16in": "{}/microxcaling-nearest",
    "triton_kernels_ROUND_UP": "{}/triton-kernels-up",
    "triton_kernels_ROUND_DOWN": "{}/triton-kernels-down",
    "qutlass_abs_max_model": "{}/qutlass-absmax",
}
BACKENDS = ("oracle", *FAST)


RECORDS = block_records()
needs_vectors = pytest.mark.skipif(
    not RECORDS, reason="recorded vectors are not beside this checkout"
)


def _positive_nan(scales: list[int], fmt: str) -> list[int]:
    """E4M3 has two NaNs, which count as one."""
    return [0x7F if s == 0xFF else s for s in scales] if fmt.startswith("nvfp4") else scales


def _values(got: fpemu.Encoded, fmt: str) -> np.ndarray:
    """Elements without their scale, as float32."""
    return fpemu.get_format(fmt).element.values()[as_numpy(got.codes)].astype(np.float32)


def _differing_values(got: np.ndarray, want: list[str], what: str) -> str:
    """'' where bits are equal, any two NaNs counting as equal."""
    w = unhex(want)
    unequal = np.flatnonzero((bits_of(got) != bits_of(w)) & ~(np.isnan(got) & np.isnan(w)))
    return f"{what} {got[unequal]}, recorded {w[unequal]} at {unequal}" if len(unequal) else ""


def differing(record: dict[str, Any], fmt: str, backend: str) -> str:
    """'' where all that was recorded is equal, else what differs."""
    x = unhex(record["input"])
    if "bf16in" in record["impl"]:
        x = x.astype(BF16)
    options = {}
    if "global_amax" in record and fpemu.get_format(fmt).tensor_scaled:
        options["amax"] = float(unhex([record["global_amax"]])[0])
    return difference(record, fmt, fpemu.encode(give(backend, x), fmt, backend=backend, **options))


def difference(record: dict[str, Any], fmt: str, got: fpemu.Encoded) -> str:
    """'' where `got` has all that was recorded, else what differs."""
    scale = as_numpy(got.scales).tolist()
    if _positive_nan(scale, fmt) != _positive_nan(record["scale"], fmt):
        return f"scale {scale}, recorded {record['scale']}"
    if record["codes"]:
        codes = as_numpy(got.codes).tolist()
        pairs = zip(codes, record["codes"], strict=True)
        if any(c != r for c, r in pairs if r != -1):
            return f"codes {codes}, recorded {record['codes']}"
    if "values" in record:  # elements as numbers; a NaN among E2M3's has no code
        want = [h for h in record["values"] if not np.isnan(unhex([h])[0])]
        if len(want) == len(record["values"]):
            return _differing_values(_values(got, fmt), record["values"], "elements")
    if "dequant" in record:
        want = record["dequant"]
        if fmt.startswith("mxint8"):  # an integer has no -0
            want = ["00000000" if h == "80000000" else h for h in want]
        values = as_numpy(fpemu.decode(got, dtype="float32"))
        return _differing_values(values, want, "values")
    return ""


def test_every_recorded_implementation_has_a_dialect() -> None:
    if RECORDS:
        assert set(RECORDS) == set(IMPLEMENTATIONS)
    for dialect in IMPLEMENTATIONS.values():
        assert any(name.endswith(dialect.format("")) for name in fpemu.list_formats())


@needs_vectors
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_recorded_blocks(impl: str, backend: str) -> None:
    assert len(RECORDS[impl]) >= 31
    wrong = []
    for record in RECORDS[impl]:
        fmt = IMPLEMENTATIONS[impl].format(record["format"])
        if what := differing(record, fmt, backend):
            wrong.append(f"{fmt} {record['case']}: {what}")
    assert not wrong, f"{len(wrong)} of {len(RECORDS[impl])} blocks\n" + "\n".join(wrong[:5])
