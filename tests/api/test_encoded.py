"""`Encoded`: bytes as stored, files, native torch dtypes, scale layouts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import BF16, BLOCKS, ELEMENTS, all16, as_numpy, assert_same_bits, block_data, give

import fpemu

SOME = ("e2m1", "e4m3", "fp16", "tf32", "fp32", "int8", "mxfp4", "mxint8/even", "nvfp4", "nvfp4/2d",
        "fp8_tensor_e5m2", "fp8_block_e4m3", "mxfp6_e2m3")  # fmt: skip
X = np.where(np.isnan(block_data(6, 33, 1)), np.float32(2), block_data(6, 33, 1))


def same(a: fpemu.Encoded, b: fpemu.Encoded) -> None:
    assert (a.format, a.axis, a.shape, a.dtype) == (b.format, b.axis, b.shape, b.dtype)
    assert type(a.codes) is type(b.codes)
    for name in ("codes", "scales", "tensor_scale"):
        x, y = getattr(a, name), getattr(b, name)
        assert (x is None) == (y is None)
        if x is not None:
            assert_same_bits(x, y, note=name)


@pytest.mark.parametrize("fmt", [*ELEMENTS, *BLOCKS])
def test_dtypes_and_shapes(fmt: str) -> None:
    encoded, row = fpemu.encode(X, fmt), fpemu.get_format(fmt)
    element = getattr(row, "element", row)
    width = {4: 1, 6: 1, 7: 1, 8: 1, 16: 2, 19: 4, 32: 4}[element.bits]
    assert encoded.codes.dtype == np.dtype(f"u{width}") and encoded.shape == X.shape
    assert encoded.dtype == X.dtype and encoded.format == row
    if fmt in ELEMENTS:
        assert encoded.scales is None and encoded.tensor_scale is None
    elif row.scale is not None:
        assert encoded.scales.dtype == (np.float32 if row.scale.name == "fp32" else np.uint8)
    if getattr(row, "tensor_scaled", False):
        assert encoded.tensor_scale.dtype == np.float32 and encoded.tensor_scale.shape == ()


def test_fp4_is_packed_even_index_low() -> None:
    encoded = fpemu.encode(np.float32([0.5, -1, 6]), "e2m1")
    assert encoded.pack().tolist() == [0xA1, 0x07]
    assert fpemu.encode(X, "mxfp4").pack().shape == (6, 17)
    assert fpemu.encode(X, "e3m2").pack().shape == X.shape


@pytest.mark.parametrize("fmt", SOME)
def test_nbytes(fmt: str) -> None:
    encoded = fpemu.encode(X, fmt)
    scales = 0 if encoded.scales is None else encoded.scales.nbytes
    tensor = 0 if encoded.tensor_scale is None else 4
    assert encoded.nbytes == encoded.pack().nbytes + scales + tensor


@pytest.mark.parametrize("container", ["numpy", "torch"])
@pytest.mark.parametrize("fmt", SOME)
def test_files_give_back_every_bit(fmt: str, container: str, tmp_path: Path) -> None:
    if container == "torch":
        pytest.importorskip("torch")
    for i, x in enumerate((X, X.astype(np.float64), np.ones((6, 33), np.float16), X[:0], X[:, :1])):
        for axis in (-1, 0):
            encoded = fpemu.encode(give(container, x), fmt, axis=axis)
            path = tmp_path / f"{i}{axis}.safetensors"
            encoded.save(path)
            loaded = fpemu.Encoded.load(path)
            same(loaded, encoded)
            assert_same_bits(loaded.decode(), fpemu.decode(encoded))


def test_other_dtypes_and_user_formats_come_back(tmp_path: Path) -> None:
    row = fpemu.BlockFormat("mine", fpemu.Format("e3m2fn", 3, 2, special="fn"), (8,),
                            fpemu.get_format("e8m0"), "mx_rceil")  # fmt: skip
    for x, fmt in (
        (X.astype(BF16), "nvfp4"),
        (np.arange(10), "mxint8"),
        (X, row),
        (X[0, 0], "mxfp4"),
    ):
        encoded = fpemu.encode(x, fmt)
        encoded.save(tmp_path / "a")
        loaded = fpemu.Encoded.load(tmp_path / "a")
        same(loaded, encoded)
        assert loaded.decode().dtype == (np.float32 if x.dtype.kind == "i" else x.dtype)


def test_scale_bytes_survive_files(tmp_path: Path) -> None:
    scales = np.uint8([[120, 125, 127, 130, 140, 0, 254, 255]])
    codes = np.zeros((1, 256), np.uint8)
    encoded = fpemu.Encoded(codes, scales, None, fpemu.get_format("mxfp4"), 1, np.dtype(np.float32))
    encoded.save(tmp_path / "a")
    assert_same_bits(fpemu.Encoded.load(tmp_path / "a").scales, scales)


def test_damaged_files_are_told(tmp_path: Path) -> None:
    path = tmp_path / "whole"
    fpemu.encode(X, "nvfp4").save(path)
    whole = path.read_bytes()
    for end in (0, 4, 8, 20, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:end])
        with pytest.raises(fpemu.FileFormatError, match="whole"):
            fpemu.Encoded.load(path)
    path.write_bytes(b"\xff" * 64)
    with pytest.raises(fpemu.FileFormatError):
        fpemu.Encoded.load(path)
    with pytest.raises(FileNotFoundError):
        fpemu.Encoded.load(tmp_path / "nothing")


def _resave(path: Path, change: Any) -> None:
    from safetensors import safe_open
    from safetensors.numpy import save_file

    with safe_open(path, framework="numpy") as file:
        metadata, tensors = dict(file.metadata()), {k: file.get_tensor(k) for k in file.keys()}  # noqa: SIM118
    change(tensors, metadata)
    save_file(tensors, path, metadata=metadata)


@pytest.mark.parametrize(
    "change",
    [
        lambda t, m: t.pop("codes"),
        lambda t, m: t.pop("scales"),
        lambda t, m: t.pop("tensor_scale"),
        lambda t, m: t.update(codes=t["codes"][:, :-1].copy()),
        lambda t, m: t.update(codes=t["codes"].astype(np.int16)),
        lambda t, m: t.update(scales=t["scales"][:, :-1].copy()),
        lambda t, m: t.update(scales=t["scales"].astype(np.float32)),
        lambda t, m: t.update(tensor_scale=np.zeros(2, np.float32)),
        lambda t, m: m.clear(),
        lambda t, m: m.update(format='"nvfp5"'),
        lambda t, m: m.update(format="[1, 2]"),
        lambda t, m: m.update(shape="nonsense"),
        lambda t, m: m.update(shape="[6, 99]"),
        lambda t, m: m.update(axis="7"),
        lambda t, m: m.update(dtype="complex99"),
        lambda t, m: m.update(layout="somebody.else"),
    ],
)
def test_inconsistent_files_are_told(change: Any, tmp_path: Path) -> None:
    path = tmp_path / "file"
    fpemu.encode(X, "nvfp4").save(path)
    _resave(path, change)
    with pytest.raises(fpemu.FileFormatError, match="file"):
        fpemu.Encoded.load(path)


def test_a_failed_save_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    fpemu.encode(X, "mxfp4").save(path)
    before = path.read_bytes()
    broken = fpemu.encode(X, "mxfp4")
    broken.scales = "no array"
    with pytest.raises(Exception):  # noqa: B017
        broken.save(path)
    assert path.read_bytes() == before and [p.name for p in tmp_path.iterdir()] == ["file"]


# torch's own dtypes ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fmt", ["e4m3", "e5m2", "e4m3fnuz", "e5m2fnuz", "e8m0", "bf16", "fp16", "fp32"]
)
def test_native_dtypes_hold_our_values(fmt: str) -> None:
    torch = pytest.importorskip("torch")
    x = (
        np.linspace(-3, 5, 99, dtype=np.float32)
        if fmt != "e8m0"
        else np.geomspace(1, 99, 9, dtype=np.float32)
    )
    for container in ("numpy", "torch"):
        encoded = fpemu.encode(give(container, x), fmt)
        native = encoded.to_torch()
        assert native.scales is None and native.tensor_scale is None
        assert_same_bits(native.codes.to(torch.float32), as_numpy(encoded.decode()))


def test_native_block_formats() -> None:
    torch = pytest.importorskip("torch")
    native = fpemu.encode(X[:, :32].copy(), "mxfp8_e4m3").to_torch()
    assert (native.codes.dtype, native.scales.dtype) == (torch.float8_e4m3fn, torch.float8_e8m0fnu)
    encoded = fpemu.encode(torch.from_numpy(X[:, :32].copy()), "nvfp4")
    native = encoded.to_torch()
    assert native.codes.shape == (6, 16) and native.codes.dtype == torch.float4_e2m1fn_x2
    assert native.scales.dtype == torch.float8_e4m3fn and native.tensor_scale.dtype == torch.float32
    assert_same_bits(native.codes.view(torch.uint8), encoded.pack())
    whole = fpemu.encode(X, "fp8_block_e4m3").to_torch()
    assert whole.scales.dtype == torch.float32


# Scale layouts -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("rows", "cols"), [(1, 1), (128, 4), (129, 5), (300, 7), (0, 3), (3, 0)])
def test_swizzle_by_the_formula(rows: int, cols: int) -> None:
    """CUTLASS: ((m/128) ceil(K/4) + k/4) 512 + m%32 16 + (m/32)%4 4 + k%4, zero-padded."""
    scales = np.random.default_rng(2).integers(1, 255, (rows, cols)).astype(np.uint8)
    codes = np.zeros((rows, 32 * cols), np.uint8)
    fmt = fpemu.get_format("mxfp4")
    for container in ("numpy", "torch"):
        encoded = fpemu.Encoded(give(container, codes), give(container, scales), None, fmt, 1,
                                np.dtype(np.float32))  # fmt: skip
        flat = np.zeros(-(-rows // 128) * -(-cols // 4) * 512, np.uint8)
        for m in range(rows):
            for k in range(cols):
                place = (
                    ((m // 128) * -(-cols // 4) + k // 4) * 512
                    + m % 32 * 16
                    + m // 32 % 4 * 4
                    + k % 4
                )
                flat[place] = scales[m, k]
        swizzled = encoded.scales_swizzled()
        assert type(swizzled) is type(encoded.codes)
        assert_same_bits(as_numpy(swizzled).ravel(), flat)
        assert_same_bits(encoded.scales_unswizzled(swizzled), scales)


@pytest.mark.parametrize("fmt", ["nvfp4", "nvfp4/2d", "mxfp8_e5m2"])
@pytest.mark.parametrize("axis", [0, 1, 2])
def test_swizzle_comes_back(fmt: str, axis: int) -> None:
    x = np.random.default_rng(3).standard_normal((5, 40, 70)).astype(np.float32)
    encoded = fpemu.encode(x, fmt, axis=axis)
    assert_same_bits(encoded.scales_unswizzled(encoded.scales_swizzled()), encoded.scales)


@pytest.mark.parametrize("fmt", ["e4m3", "fp8_tensor_e4m3", "fp8_block_e4m3"])
def test_no_layout_without_byte_scales(fmt: str) -> None:
    with pytest.raises(ValueError, match="scales_swizzled"):
        fpemu.encode(X, fmt).scales_swizzled()


def test_repr_and_decode_dtype() -> None:
    encoded = fpemu.encode(all16(np.float16)[:64], "nvfp4")
    assert "nvfp4" in repr(encoded) and "(64,)" in repr(encoded)
    for dtype in (np.float64, "float16", np.dtype(np.float32)):
        assert encoded.decode(dtype).dtype == np.dtype(dtype)
    for bad in (np.int32, "float8", "complex64"):
        with pytest.raises(TypeError, match="dtype"):
            encoded.decode(bad)
    with pytest.raises(TypeError, match="Encoded"):
        fpemu.decode(X)
