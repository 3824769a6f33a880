"""Blocks through other libraries, recorded: equal wherever our policy and theirs coincide.

`EXCEPT` names every case where they do not, with the reason; outside it every scale byte and code
must be equal, and inside it at least one must differ, or the exception is out of date.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest
from helpers import FAST, as_numpy, block_records, give, unhex

import fpemu

#: recorded implementation -> suffix of our MX rule; None: nvfp4
IMPLEMENTATIONS = {
    "te_ref_1x16": None,
    "torchao_main_FLOOR": "",
    "torchao_main_RCEIL": "/rceil",
    "torchao_main_CEIL": "/ceil",
    "torchao_main_EVEN": "/even",
    "te_mxfp8_model": "/rceil",
}
_ZERO = "input -0.0: the Python reference gives code 0, the hardware cast (and we) 8"
_INF = "a block holding Inf: TransformerEngine's byte 0xFE, our policy NaN"
EXCEPT = {
    ("te_ref_1x16", "mixed_zero_sign"): _ZERO,
    ("te_ref_1x16", "scale_underflow_0"): _ZERO,
    ("torchao_main_EVEN", "amax_fltmax"): "rounding the amax overflows float32 there, not here",
    ("te_mxfp8_model", "one_inf"): _INF,
    ("te_mxfp8_model", "one_neginf"): _INF,
    ("te_mxfp8_model", "one_nan"): "the kernel ignores NaN in the amax; we never hide one",
}
BACKENDS = (*FAST, "oracle")


RECORDS = block_records()
needs_vectors = pytest.mark.skipif(
    not RECORDS, reason="recorded vectors are not beside this checkout"
)


def differing(record: dict[str, Any], fmt: str, backend: str, nan_codes: bool = False) -> str:
    """'' where scale and codes are equal, else what differs. Codes under a NaN scale say nothing."""
    x = unhex(record["input"])
    options = {}
    if "global_amax" in record:
        options["amax"] = float(unhex([record["global_amax"]])[0])
    got = fpemu.encode(give(backend, x), fmt, backend=backend, **options)
    scale, codes = as_numpy(got.scales).tolist(), as_numpy(got.codes).tolist()
    nan = {0x7F, 0xFF} if fmt.startswith("nvfp4") else {0xFF}
    if scale != record["scale"] and not ({*scale} | {*record["scale"]} <= nan):
        return f"scale {scale}, recorded {record['scale']}"
    if {*scale} <= nan:
        return ""
    return "" if codes == record["codes"] else f"codes {codes}, recorded {record['codes']}"


@needs_vectors
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_recorded_blocks(impl: str, backend: str) -> None:
    suffix, records = IMPLEMENTATIONS[impl], RECORDS[impl]
    assert len(records) >= 31
    excepted = defaultdict(bool)
    for record in records:
        fmt = "nvfp4" if suffix is None else record["format"] + suffix
        difference = differing(record, fmt, backend)
        if (impl, record["case"]) in EXCEPT:
            excepted[record["case"]] |= bool(difference)
        else:
            assert not difference, f"{fmt} {record['case']}: {difference}"
    assert all(excepted.values()), f"exceptions that no longer differ: {excepted}"
    assert set(excepted) == {case for i, case in EXCEPT if i == impl}


@needs_vectors
def test_negative_zero_is_the_only_difference_to_the_reference() -> None:
    """With every -0.0 made +0.0 the TransformerEngine reference agrees throughout."""
    for record in RECORDS["te_ref_1x16"]:
        record = dict(record, input=["00000000" if h == "80000000" else h for h in record["input"]])
        assert not differing(record, "nvfp4", "oracle"), record["case"]
