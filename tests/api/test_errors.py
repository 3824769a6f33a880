"""Bad input: one clear error that names argument, value, what is allowed and a way out."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from helpers import assert_same_bits

import fpemu

X = np.ones((2, 32), np.float32)
WORDS = np.zeros((2, 32), np.uint32)

#: arguments (x, fmt, options), error, words its message must have
BAD: list[tuple[Any, Any, dict[str, Any], type[Exception], list[str]]] = [
    (X, "nvfp5", {}, ValueError, ["encode", "nvfp5", "known", "Did you mean", "nvfp4"]),
    (X, "fp4", {}, ValueError, ["fp4", "known"]),
    (X, 7, {}, TypeError, ["fmt", "int"]),
    (X, None, {}, TypeError, ["fmt"]),
    (X, "e4m3", {"rounding": "rnee"}, ValueError, ["rounding", "rnee", "rne", "Did you mean"]),
    (X, "e4m3", {"rounding": "RNE"}, ValueError, ["rounding", "RNE"]),
    (X, "e4m3", {"overflow": "saturate"}, ValueError, ["overflow", "saturate", "nonsat"]),
    (X, "e4m3", {"backend": "numpy"}, ValueError, ["backend", "numpy", "numba"]),
    (X.astype(np.complex64), "e4m3", {}, TypeError, ["complex64"]),
    (X > 0, "e4m3", {}, TypeError, ["bool"]),
    (X.astype(object), "e4m3", {}, TypeError, ["object"]),
    (np.array(["a"]), "e4m3", {}, TypeError, ["U1"]),
    (X.astype("M8[s]"), "e4m3", {}, TypeError, ["datetime64"]),
    (X, "mxfp4", {"axis": 2}, ValueError, ["axis", "2"]),
    (X, "mxfp4", {"axis": -3}, ValueError, ["axis", "-3"]),
    (X, "mxfp4", {"axis": 1.0}, TypeError, ["axis", "float"]),
    (np.float32(1), "mxfp4", {"axis": 1}, ValueError, ["axis"]),
    (X[0], "nvfp4/2d", {}, ValueError, ["nvfp4/2d", "two axes"]),
    (X[0], "fp8_block_e4m3/2d", {}, ValueError, ["two axes"]),
    (X, "nvfp4", {"amax": -1.0}, ValueError, ["amax", "-1.0"]),
    (X, "nvfp4", {"amax": float("nan")}, ValueError, ["amax", "nan"]),
    (X, "nvfp4", {"amax": "big"}, TypeError, ["amax", "str"]),
    (X, "e4m3", {"amax": 1.0}, ValueError, ["amax", "e4m3"]),
    (X, "mxfp4", {"amax": 1.0}, ValueError, ["amax", "mxfp4"]),
    (X, "nvfp4/1level", {"amax": 1.0}, ValueError, ["amax", "nvfp4/1level"]),
    (X, "fp8_block_e4m3", {"amax": 1.0}, ValueError, ["amax"]),
    (X, "e4m3", {"random_bits": WORDS}, ValueError, ["random_bits", "sr"]),
    (X, "e4m3", {"rounding": "sr", "random_bits": WORDS[:, :5]}, ValueError, ["random_bits", "(2, 5)", "(2, 32)"]),
    (X, "e4m3", {"rounding": "sr", "random_bits": WORDS.astype(np.int64)}, ValueError, ["random_bits", "int64"]),
    (X, "e4m3", {"rounding": "sr", "seed": 0, "sr_bits": 0}, ValueError, ["sr_bits", "0", "32"]),
    (X, "e4m3", {"rounding": "sr", "seed": 0, "sr_bits": 33}, ValueError, ["sr_bits", "33"]),
    (X, "e4m3", {"rounding": "sr", "seed": 0.5}, TypeError, ["seed", "float"]),
    (X, "e4m3", {"rounding": "sr", "seed": 2**64}, ValueError, ["seed"]),
    (X, "e4m3", {"rounding": "sr", "seed": 0, "offset": -1}, ValueError, ["offset"]),
    (X, "e4m3", {"rounding": "sr", "seed": 0, "offset": ((4, 32), (3, 0))}, ValueError, ["offset", "(4, 32)"]),
    (X, "e4m3", {"rounding": "sr", "seed": 0, "offset": ((4,), (0, 0))}, ValueError, ["offset"]),
    (X, "e4m3", {"rounding": "sr", "seed": 0, "offset": (1, 2)}, TypeError, ["offset"]),
    (X * np.nan, "int8", {}, ValueError, ["NaN", "int8"]),
    (X * np.nan, "int8_tensor", {}, ValueError, ["NaN", "int8_tensor"]),
]  # fmt: skip


@pytest.mark.parametrize("verb", ["encode", "quantize", "stats"])
@pytest.mark.parametrize(("x", "fmt", "options", "error", "words"), BAD)
def test_bad_arguments(x: Any, fmt: Any, options: Any, error: type, words: list, verb: str) -> None:
    with pytest.raises(error) as caught:
        getattr(fpemu, verb)(x, fmt, **options)
    message = str(caught.value)
    assert type(caught.value) is error
    missing = [w for w in words if (verb if w == "encode" else w) not in message]
    assert not missing, f"{missing} not in {message!r}"
    assert message.endswith((".", "?")) and "\n" not in message


@pytest.mark.parametrize(("x", "fmt", "options", "error", "words"), BAD)
def test_bad_arguments_of_tensors(x: Any, fmt: Any, options: Any, error: type, words: list) -> None:
    torch = pytest.importorskip("torch")
    if not isinstance(x, np.ndarray) or x.dtype.kind in "OUM":
        return
    if "random_bits" in options:
        words_given = options["random_bits"]
        if words_given.dtype == np.int64:
            return  # torch has no unsigned arithmetic: int64 words are allowed there
        options = dict(options, random_bits=torch.from_numpy(words_given))
    for tensor in (
        torch.from_numpy(x),
        torch.from_numpy(x).requires_grad_() if x.dtype.kind == "f" else None,
    ):
        if tensor is not None:
            with pytest.raises(error):
                fpemu.quantize(tensor, fmt, **options)


@pytest.mark.parametrize("name", ["triton", "hardware"])
def test_gpu_backends_say_why(name: str) -> None:
    """Arrays in host memory are not for them."""
    for call in (fpemu.quantize, fpemu.encode):
        with pytest.raises(fpemu.BackendError, match=rf"{name}.*\."):
            call(X, "e4m3", backend=name)


@pytest.mark.parametrize(
    ("options", "error", "word"),
    [
        ({"out": np.zeros((2, 31), np.float32)}, ValueError, "shape"),
        ({"out": [0.0]}, TypeError, "out"),
        ({"out": np.zeros((2, 32), np.int32)}, TypeError, "int32"),
        ({"out": np.zeros((2, 32), np.float32), "dtype": np.float64}, ValueError, "dtype"),
        ({"dtype": np.int32}, TypeError, "dtype"),
        ({"dtype": "nothing"}, TypeError, "dtype"),
        ({"ste": "cilp"}, ValueError, "ste"),
    ],
)
def test_bad_outputs(options: Any, error: type, word: str) -> None:
    with pytest.raises(error, match=word):
        fpemu.quantize(X, "e4m3", **options)


def test_out_is_written_and_returned() -> None:
    x = np.linspace(-9, 9, 640, dtype=np.float32).reshape(10, 64)
    for fmt in ("e4m3", "mxfp4", "nvfp4", "fp8_tensor_e4m3"):
        want = fpemu.quantize(x, fmt)
        for out in (
            np.empty_like(x),
            np.empty((64, 10), np.float32).T,
            np.empty((10, 130), np.float32)[:, 1::2][:, :64],
        ):
            assert fpemu.quantize(x, fmt, out=out) is out
            assert_same_bits(out, want, x, fmt)
        narrow = np.empty(x.shape, np.float16)
        assert_same_bits(
            fpemu.quantize(x, fmt, out=narrow), fpemu.quantize(x, fmt, dtype="float16")
        )
        same = x.copy()
        assert_same_bits(fpemu.quantize(same, fmt, out=same), want, x, f"{fmt} in place")
        overlap = np.zeros(x.size + 7, np.float32)
        overlap[7:] = x.ravel()
        shifted = overlap[:-7].reshape(x.shape)
        assert_same_bits(
            fpemu.quantize(overlap[7:].reshape(x.shape), fmt, out=shifted),
            want,
            x,
            f"{fmt} overlap",
        )
    readonly = np.empty_like(x)
    readonly.flags.writeable = False
    with pytest.raises(ValueError, match="read-only"):
        fpemu.quantize(x, "e4m3", out=readonly)


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (("a", 9, 2), "exp_bits"), (("a", 4, 24), "man_bits"), (("a", 4, 3, 300), "float32"),
        (("a", 4, 3, None, "odd"), "special"), (("a", 0, 7, 0, "ieee"), "integer"),
        (("a", 4, 3, None, "fnuz", False), "unsigned"), (("a", 8, 23, 100), "float32"),
        (("a", 4, 3, None, "fn", True, True, "clip"), "overflow"),
    ],
)  # fmt: skip
def test_bad_rows(arguments: tuple, word: str) -> None:
    with pytest.raises(ValueError, match=word):
        fpemu.Format(*arguments)


def test_bad_block_rows() -> None:
    e4m3, e8m0 = fpemu.get_format("e4m3"), fpemu.get_format("e8m0")
    for block, scale in (
        ((0,), e8m0),
        ((1, 2, 3), e8m0),
        ((32,), None),
        (None, e8m0),
        (None, None),
    ):
        with pytest.raises(ValueError, match="BlockFormat"):
            fpemu.BlockFormat("a", e4m3, block, scale, "mx_floor")
    unknown = fpemu.BlockFormat("a", e4m3, (32,), e8m0, "mx_flor")
    for verb in (fpemu.encode, fpemu.quantize):
        with pytest.raises(ValueError, match="mx_flor"):
            verb(X, unknown)


def test_names_are_found_and_listed() -> None:
    assert "nvfp4" in fpemu.list_formats() and fpemu.list_formats("mxfp4*")[0] == "mxfp4"
    assert fpemu.list_formats("nothing*") == []
    row = fpemu.get_format("mxfp4")
    assert fpemu.get_format(row) is row
    with pytest.raises(ValueError, match="mxfp4"):
        fpemu.get_format("mxpf4")
    assert_same_bits(fpemu.quantize(X, row), fpemu.quantize(X, "mxfp4"))


def test_tensors_of_other_dtypes() -> None:
    torch = pytest.importorskip("torch")
    for dtype in (torch.bool, torch.complex64, torch.float8_e4m3fn):
        for x in (torch.zeros(4, dtype=dtype), torch.zeros(0, dtype=dtype)):
            with pytest.raises(TypeError, match=str(dtype).removeprefix("torch.")):
                fpemu.quantize(x, "e4m3")
            with pytest.raises(TypeError, match="dtype"):
                fpemu.encode(x, "e4m3")


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"exp_bits": 8, "man_bits": 3, "bias": 130}, "below 2\\*\\*-126"),
        ({"exp_bits": 4, "man_bits": 3, "has_zero": False, "signed": False}, "without a zero"),
        ({"exp_bits": 5, "man_bits": 0, "special": "ieee"}, "no code for NaN"),
    ],
)
def test_rows_that_no_backend_could_serve_are_refused(row, says):
    with pytest.raises(ValueError, match=says):
        fpemu.Format("mine", **row)
