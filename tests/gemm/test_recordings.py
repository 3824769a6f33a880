"""Recorded tensor-core outputs and oracle cases, bit for bit, by the oracle and the kernels."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
from helpers import FAST, VECTORS, assert_same_bits, unhex, vectors

from fpemu import get_format
from fpemu.casting import value_table
from fpemu.encoded import Encoded
from fpemu.formats import BlockFormat
from fpemu.gemm import get_unit, list_units, matmul

BACKENDS = (*FAST, "oracle")
ARCHITECTURE = {
    "V100": "volta", "A100": "ampere", "Ada": "ada", "L40S": "ada", "H100": "hopper",
    "H200": "hopper", "B200": "blackwell",
}  # fmt: skip
#: FP8 by GPU and output; the others are all HMMA. Hopper's FP32 outputs are the native unit's, its
#: FP16 outputs two FP16 HMMA.
FP8 = {
    ("ada", "fp32"): "qmma", ("ada", "fp16"): "qmma", ("hopper", "fp32"): "wgmma",
    ("hopper", "fp16"): "mma_sync", ("blackwell", "fp32"): "mma_sync", ("blackwell", "fp16"): "mma_sync",
}  # fmt: skip


@cache
def recordings() -> dict[str, np.ndarray]:
    path = VECTORS / "hardware_mma.npz"
    if not path.exists():
        pytest.skip("recorded vectors are not beside this checkout (hardware_mma.npz)")
    with np.load(path) as file:
        return {name: file[name] for name in file}


def sets() -> list[tuple[str, str, str]]:
    """(GPU, format, output) of every recorded set; typed here so that none can go missing."""
    fp16_out = {"fp16": ARCHITECTURE, "E4M3": ("Ada", "H100", "H200", "B200")}
    fp16_out["E5M2"] = fp16_out["E4M3"]
    found = []
    for gpu in ARCHITECTURE:
        formats = ["fp16"] if gpu == "V100" else ["fp16", "bf16", "tf32"]
        formats += [] if gpu in ("V100", "A100") else ["E4M3", "E5M2"]
        for fmt in formats:
            found.append((gpu, fmt, "fp32"))
            if gpu in fp16_out.get(fmt, ()):
                found.append((gpu, fmt, "fp16"))
    return found


def unit_of(gpu: str, fmt: str, out: str) -> str:
    architecture, name = ARCHITECTURE[gpu], fmt.lower()
    instruction = FP8[architecture, out] if fmt[0] == "E" else "hmma"
    return f"{architecture}.{'wgmma' if (architecture, instruction) == ('hopper', 'hmma') else instruction}.{name}"


def test_no_set_is_left_out() -> None:
    names = {
        name.rsplit("/", 1)[0] + "/" + name.rsplit("_", 1)[1]
        for name in recordings()
        if "/D_" in name
    }
    assert names == {"/".join(s) for s in sets()}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("gpu", "fmt", "out"), sets())
def test_hardware(gpu: str, fmt: str, out: str, backend: str) -> None:
    data = recordings()
    a, b, c = (data[f"{gpu}/{fmt}/{x}"].view(np.float32) for x in "ABC")
    want = data[f"{gpu}/{fmt}/D_{out}"].view(np.float32)
    name = unit_of(gpu, fmt, out)
    if name.startswith("hopper.wgmma.e"):
        c = np.zeros_like(c)  # recorded with c = 0; the set's C file was not used
    got = matmul(
        a[:, None, :], b[:, :, None], unit=name, c=c[:, None, None], out=out, backend=backend
    )
    assert_same_bits(got[:, 0, 0].astype(np.float32), want, note=f"{gpu} {fmt} {out} by {name}")


def test_hopper_fp32_fp8_was_recorded_without_c() -> None:
    """With the set's C the same unit matches hardly any output: the label says "c = 0"."""
    data = recordings()
    a, b, c = (data[f"H100/E4M3/{x}"].view(np.float32) for x in "ABC")
    got = matmul(a[:, None, :], b[:, :, None], unit="hopper.wgmma.e4m3", c=c[:, None, None])
    assert (got[:, 0, 0].view(np.uint32) == data["H100/E4M3/D_fp32"]).mean() < 0.1


@pytest.mark.parametrize(("gpu", "fmt", "out", "other"), [
    ("H100", "fp16", "fp32", "ampere.hmma.fp16"),
    ("A100", "fp16", "fp32", "hopper.wgmma.fp16"),
    ("V100", "fp16", "fp32", "ampere.hmma.fp16"),
    ("H100", "E4M3", "fp32", "ada.qmma.e4m3"),
    ("Ada", "E4M3", "fp32", "hopper.wgmma.e4m3"),
    ("B200", "E4M3", "fp32", "blackwell.tcgen05.e4m3"),
    ("B200", "E5M2", "fp32", "hopper.wgmma.e5m2"),
    ("H100", "E4M3", "fp16", "hopper.wgmma.e4m3"),
])  # fmt: skip
def test_recordings_tell_units_apart(gpu: str, fmt: str, out: str, other: str) -> None:
    """A wrong unit does not pass: the sets are evidence."""
    data = recordings()
    a, b, c = (data[f"{gpu}/{fmt}/{x}"].view(np.float32) for x in "ABC")
    c = np.zeros_like(c) if (gpu, out) == ("H100", "fp32") and fmt[0] == "E" else c
    got = matmul(a[:, None, :], b[:, :, None], unit=other, c=c[:, None, None], out=out)[:, 0, 0]
    assert (got.astype(np.float32).view(np.uint32) != data[f"{gpu}/{fmt}/D_{out}"]).any()


def test_evidence_labels_are_true() -> None:
    """A row is labelled hardware-verified for the recorded sets and for nothing else."""
    recorded: dict[str, dict[str, list[str]]] = {}
    for gpu, fmt, out in sets():
        recorded.setdefault(unit_of(gpu, fmt, out), {}).setdefault(out, []).append(gpu)
    for name in list_units():
        unit = get_unit(name)
        if name not in recorded:
            assert not unit.evidence.startswith("hardware"), name
            continue
        parts = [
            f"{out.upper()} output on {', '.join(recorded[name][out])} (1,000 each)"
            for out in ("fp32", "fp16")
            if out in recorded[name]
        ]
        assert unit.evidence.startswith("hardware-verified: " + "; ".join(parts)), name
        for out in unit.outputs:
            if out not in recorded[name]:
                assert f"{out.upper()} output: model" in unit.evidence, name


# The oracle cases ----------------------------------------------------------------------------------


def case_unit(case: dict[str, Any]) -> str:
    block_scaled = {
        "blackwell_mxfp8_e4m3": "mxfp8_e4m3", "blackwell_mxfp8_e5m2": "mxfp8_e5m2",
        "blackwell_mxfp4_k32": "mxfp4_k32", "blackwell_mxf4_k64": "mxfp4", "blackwell_nvfp4_k64": "nvfp4",
    }  # fmt: skip
    if case["model"] in block_scaled:
        return "blackwell.tcgen05." + block_scaled[case["model"]]
    a, b = case["a_fmt"], case["b_fmt"]
    return f"{case['model'].replace('_', '.')}.{a if a == b else f'{a}x{b}'}"


def values(hexes: list[str], fmt: str, shape: tuple[int, int]) -> np.ndarray:
    codes = np.array([int(h, 16) for h in hexes], np.uint32)
    if fmt == "tf32":  # stored as float32; the hardware ignores the low 13 bits
        return (codes & np.uint32(0xFFFFE000)).view(np.float32).reshape(shape)
    return value_table(get_format(fmt))[codes].reshape(shape)  # type: ignore[arg-type]


def operands(case: dict[str, Any]) -> tuple[Any, Any]:
    m, n, k = case["M"], case["N"], case["K"]
    a, b = case["A"], case["B_KxN"]
    if "scale" not in case:
        return values(a, case["a_fmt"], (m, k)), values(b, case["b_fmt"], (k, n))
    unit = get_unit(case_unit(case))
    sides = []
    for codes, scales, element, shape, axis in (
        (a, case["scale_A"], unit.a, (m, k), 1), (b, case["scale_B"], unit.b, (k, n), 0),
    ):  # fmt: skip
        scale = get_format("e8m0" if case["scale"] == "ue8m0" else "ue4m3")
        row = BlockFormat("case", element, (case["block"],), scale, "mx_floor")  # type: ignore[arg-type]
        bytes_ = (np.array([int(h, 16) for h in x], np.uint8) for x in (codes, scales))
        code_array, scale_array = bytes_
        scale_shape = (m, -1) if axis == 1 else (-1, n)
        sides.append(
            Encoded(
                code_array.reshape(shape),
                scale_array.reshape(scale_shape),
                None,
                row,
                axis,
                np.float32,
            )
        )
    return sides[0], sides[1]


def expected(case: dict[str, Any], key: str) -> tuple[str, np.ndarray]:
    out = "fp16" if case.get("out") == "f16" else "fp32"
    want = unhex(case[key], np.float16 if out == "fp16" else np.float32)
    return out, want.reshape(case["M"], case["N"])


@pytest.mark.parametrize("backend", BACKENDS)
def test_oracle_cases(backend: str) -> None:
    cases = [c for c in vectors("mma_vectors.json.gz")["cases"] if "D" in c]
    assert len(cases) == 147
    for case in cases:
        out, want = expected(case, "D")
        c = unhex(case["C"], want.dtype if len(case["C"][0]) == 4 else np.float32)
        got = matmul(
            *operands(case), unit=case_unit(case), c=c.reshape(want.shape), out=out, backend=backend
        )
        assert_same_bits(got, want, note=f"{case['model']} {case['kind']} {out}")
        if "D_mmaemu" in case:
            assert_same_bits(got, unhex(case["D_mmaemu"]).reshape(want.shape), note="mmaemu")


@pytest.mark.parametrize("backend", BACKENDS)
def test_disputed_cases(backend: str) -> None:
    """Zeros never raise the alignment exponent (proven on Ada FP8; MMA-Sim has it otherwise)."""
    for case in vectors("mma_vectors.json.gz")["disputed"]:
        out, want = expected(case, "D_zero_excluded")
        c = unhex(case["C"]).reshape(want.shape)
        got = matmul(*operands(case), unit=case_unit(case), c=c, out=out, backend=backend)
        assert_same_bits(got, want, note=case["name"])
        assert got[0, 0] != unhex(case["D_mmasim"])[0]


@pytest.mark.parametrize("backend", FAST)
def test_scaled_mm_cases(backend: str) -> None:
    """cuBLASLt's fast and slow accumulation and its epilogue, as mmaemu has them."""
    cases = [c for c in vectors("mma_vectors.json.gz")["cases"] if "use_fast_accum" in c]
    assert len(cases) == 6
    for case in cases:
        m, n, k = case["M"], case["N"], case["K"]
        a, b = values(case["A"], "e4m3", (m, k)), values(case["B_NxK"], "e4m3", (n, k)).T
        recipe = "cublaslt.fp8_fast" if case["use_fast_accum"] else "cublaslt.fp8_slow"
        options = {"unit": "hopper.wgmma.e4m3", "recipe": recipe, "backend": backend}
        scales = {x: unhex([case[x]])[0] for x in ("scale_a", "scale_b")}
        assert_same_bits(matmul(a, b, **options), unhex(case["acc_fp32"]).reshape(m, n), note="acc")
        got = matmul(a, b, **options, **scales)
        assert_same_bits(got, unhex(case["out_fp32"]).reshape(m, n), note="fp32")
        half = matmul(a, b, **options, **scales, out="bf16").view(np.uint32) >> 16
        assert_same_bits(half.astype(np.uint16), unhex(case["out_bf16"], np.uint16).reshape(m, n))
