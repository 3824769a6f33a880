"""Hadamard transforms along an axis, alone and fused with quantization.

A block of n values is multiplied by an orthonormal matrix ``diag(signs) @ H / sqrt(n)``, H being
Sylvester's matrix of +1 and -1. It spreads an outlier over its block, and a product of two matrices
is unchanged when both are rotated along the axis they share.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import lru_cache
from importlib.util import find_spec
from typing import Any

import numpy as np

from fpemu import ops
from fpemu.backends import FLOAT_KINDS, Parts, Request, element_format
from fpemu.encoded import Encoded
from fpemu.formats import BlockFormat, Format, get_format
from fpemu.rng import philox

SIZES = (2, 4, 8, 16, 32, 64, 128)
#: TransformerEngine's sign vector, a constant there (custom_recipes/reference_nvfp4.py).
TE_SIGNS = (1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1)


def hadamard(
    x: Any,
    *,
    size: int = 16,
    signs: Any = None,
    axis: int = -1,
    inverse: bool = False,
    out: Any = None,
) -> Any:
    """Rotate blocks of `size` values along an axis by an orthonormal Hadamard matrix.

    Parameters
    ----------
    x : ndarray or Tensor, at least 1-D
        float16, bfloat16, float32 or float64. Not modified. Its length along `axis` must be
        divisible by `size`: a rotation of a padded tail could not be cropped.
    size : {2, 4, 8, 16, 32, 64, 128}
    signs : None, "te", int or sequence of `size` +1 and -1
        Diagonal that multiplies each block first ("randomized Hadamard transform"): none,
        TransformerEngine's vector (size 16), drawn from a seed, or given.
    axis : int
        Along which blocks lie.
    inverse : bool
        Multiply by the transpose, which is the inverse, instead.
    out : array like x, optional
        Receives the result and is returned (without a gradient). May be x itself.

    Returns
    -------
    ndarray or Tensor
        Shape, dtype, device and container of x. With B a block as a row vector and
        ``M = diag(signs) @ H / sqrt(size)``: ``B @ M``, or ``B @ M.T`` for `inverse`.

    Notes
    -----
    The arithmetic is float32 in a fixed order, see ``docs/rotation.md``: x rounded to float32
    (only a float64 x changes); signs; log2(size) stages ``(a, b) -> (a + b, a - b)`` of pairs 1,
    2, 4, ... apart; times fl(size**-0.5); one rounding to x's dtype. With u = 2**-24, the error
    before that rounding is at most ``log2(size) * u * sum|B| / sqrt(size)``, to first order, plus
    2 u of the result where size is no power of 4.

    Special values: a NaN or Inf in a block makes all of it NaN or Inf; NaN is canonical. A sum
    beyond float32's range is Inf, which needs ``|x| > 2**127 / size``.

    Raises
    ------
    TypeError
        For integers and other dtypes.
    ValueError
        For a length that `size` does not divide, a size, sign vector or axis that is not allowed.

    Examples
    --------
    >>> import numpy as np, fpemu
    >>> fpemu.hadamard(np.float32([8, 0, 0, 0]), size=4)
    array([4., 4., 4., 4.], dtype=float32)
    >>> x = np.arange(16, dtype=np.float32)
    >>> y = fpemu.hadamard(x, signs="te")
    >>> bool((fpemu.hadamard(y, signs="te", inverse=True) == x).all())
    True
    """
    where = "hadamard"
    torch_ = sys.modules.get("torch")
    if torch_ is not None and isinstance(x, torch_.Tensor):
        from fpemu import torch_op

        if out is None and torch_op.needs_op(x):
            from fpemu import rotation_op

            return rotation_op.hadamard(x, size, spell_signs(signs, size, where), axis, inverse)
    box, axis = _checked(x, axis, size, where)
    vector = sign_vector(spell_signs(signs, size, where), size)
    result, target = _target(box, out, where)
    _rotate(box, target, axis, size, vector, bool(inverse))
    return result


def quantize_rotated(
    x: Any,
    fmt: str | Format | BlockFormat,
    *,
    size: int = 16,
    signs: Any = None,
    axis: int = -1,
    rounding: str = "rne",
    overflow: str | None = None,
    amax: Any = None,
    seed: int | None = None,
    stream: int = 0,
    offset: Any = 0,
    sr_bits: int = 32,
    random_bits: Any = None,
    dtype: Any = None,
) -> Any:
    """``fpemu.quantize(fpemu.hadamard(x, ...), fmt, axis=axis, ...)``, to the bit, in one pass.

    Parameters
    ----------
    x, size, signs, axis
        As in `hadamard`. `axis` is that of the format's blocks, too.
    fmt, rounding, overflow, amax, seed, stream, offset, sr_bits, random_bits, dtype
        As in `fpemu.quantize`. `amax` is the *rotated* tensor's, see `rotated_amax`.

    Returns
    -------
    ndarray or Tensor
        Shape and container of x.

    Notes
    -----
    On a CPU the rotated values of dense float16, bfloat16 and float32 arrays never reach memory: a
    piece that fits the cache is rotated, rounded to x's dtype and quantized. On a CUDA device a
    Triton kernel does the same to a tile. A format with a tensor scale reads x twice. Other
    layouts, dtypes and devices, library dialects, and calls that torch watches (gradients,
    `torch.compile`) take the two steps one after the other.

    Examples
    --------
    >>> import numpy as np, fpemu
    >>> x = np.random.default_rng(0).standard_normal((64, 32), np.float32)
    >>> y = fpemu.rotation.quantize_rotated(x, "nvfp4", signs="te", axis=0)
    >>> z = fpemu.quantize(fpemu.hadamard(x, signs="te", axis=0), "nvfp4", axis=0)
    >>> bool((y == z).all())
    True
    """
    options = _options(rounding, overflow, axis, amax, seed, stream, offset, sr_bits, random_bits)
    if _in_two_steps(x, fmt):
        rotated = hadamard(x, size=size, signs=signs, axis=axis)
        return ops.quantize(rotated, fmt, **options, dtype=dtype)
    call = _Fused(x, fmt, size, signs, options, "quantize_rotated")
    on_gpu = call.on_gpu()
    if on_gpu is not None:
        result = call.empty_like_x(dtype)
        on_gpu.quantize(call.request, result, on_gpu.Rotation(call.size, call.signs))
        return result
    if call.fuses():
        from fpemu.backends import hadamard_

        result = call.empty_like_x(dtype)
        target = _memory(result)
        if target.dtype != np.float64:  # whose products are formed exactly elsewhere
            hadamard_.quantize(call.host, call.axis, call.rotation, target)
            return result
    request, box = call.rotated()
    return box.quantized(request, dtype, None, None)


def encode_rotated(
    x: Any,
    fmt: str | Format | BlockFormat,
    *,
    size: int = 16,
    signs: Any = None,
    axis: int = -1,
    rounding: str = "rne",
    overflow: str | None = None,
    amax: Any = None,
    seed: int | None = None,
    stream: int = 0,
    offset: Any = 0,
    sr_bits: int = 32,
    random_bits: Any = None,
) -> Encoded:
    """``fpemu.encode(fpemu.hadamard(x, ...), fmt, axis=axis, ...)``, to the bit, in one pass.

    The arguments are those of `quantize_rotated`.

    Examples
    --------
    >>> import numpy as np, fpemu
    >>> e = fpemu.rotation.encode_rotated(np.ones((16, 2), np.float32), "mxfp4", axis=0)
    >>> e.codes[:3].tolist()
    [[6, 6], [0, 0], [0, 0]]
    """
    options = _options(rounding, overflow, axis, amax, seed, stream, offset, sr_bits, random_bits)
    if _in_two_steps(x, fmt):
        return ops.encode(hadamard(x, size=size, signs=signs, axis=axis), fmt, **options)
    call = _Fused(x, fmt, size, signs, options, "encode_rotated")
    on_gpu = call.on_gpu()
    if on_gpu is not None:
        parts = on_gpu.encode(call.request, on_gpu.Rotation(call.size, call.signs))
        return _encoded(parts, call.request, call.box)
    if call.fuses():
        from fpemu.backends import hadamard_

        parts = hadamard_.encode(call.host, call.axis, call.rotation)
        if not call.on_host:
            from_numpy = sys.modules["torch"].from_numpy
            parts = Parts(*(None if p is None else from_numpy(p) for p in parts))
        return _encoded(parts, call.request, call.box)
    request, box = call.rotated()
    return _encoded(box.encoded(request, None), request, box)


def _encoded(parts: Parts, request: Request, box: Any) -> Encoded:
    codes, scales, number = parts
    return Encoded(codes, scales, None, request.fmt, request.axis, box.dtype, global_scale=number)


def rotated_amax(x: Any, *, size: int = 16, signs: Any = None, axis: int = -1) -> float:
    """Largest magnitude of ``hadamard(x, ...)``, NaN skipped, without forming it (on a CPU).

    For a tensor scale that several calls or processes share: reduce it, then pass it as `amax`.

    Examples
    --------
    >>> import numpy as np, fpemu
    >>> fpemu.rotation.rotated_amax(np.full(16, 2.0, np.float32))
    8.0
    """
    where = "rotated_amax"
    box, axis = _checked(x, axis, size, where)
    if _on_numba(box):
        from fpemu.backends import hadamard_

        vector = sign_vector(spell_signs(signs, size, where), size)
        rotation = hadamard_.Rotation(size, vector, False)
        return hadamard_.amax(_memory(box.array), axis, rotation)
    rotated = hadamard(x, size=size, signs=signs, axis=axis)
    if isinstance(box, ops._TorchBox):
        magnitudes = rotated.detach().float().abs().nan_to_num(0.0, np.inf)
        return float(magnitudes.amax()) if magnitudes.numel() else 0.0
    return float(np.fmax.reduce(np.abs(rotated.astype(np.float32)), axis=None, initial=0.0))


# Arguments ---------------------------------------------------------------------------------------


def _checked(x: Any, axis: Any, size: Any, where: str) -> tuple[Any, int]:
    """x in its box and a non-negative axis whose length `size` divides."""
    if size not in SIZES:
        raise ValueError(
            f"{where}: size must be one of {', '.join(map(str, SIZES))}, got {size!r}. 16 is the"
            " default."
        )
    box = ops._box(x, where)
    if box.kind not in FLOAT_KINDS:
        raise TypeError(
            f"{where}: x has dtype {box.dtype}; allowed are {', '.join(FLOAT_KINDS)}. Convert it"
            " first, for example x.astype('float32')."
        )
    axis = check_axis(axis, box.shape, size, where)
    return box, axis


def check_axis(axis: Any, shape: tuple[int, ...], size: int, where: str) -> int:
    ndim = len(shape)
    try:
        axis = axis.__index__()
    except AttributeError:
        raise TypeError(
            f"{where}: axis must be an integer, got {type(axis).__name__}. For example axis=-1."
        ) from None
    if not -ndim <= axis < ndim:
        raise ValueError(
            f"{where}: axis {axis} is out of range for x with {ndim} dimension(s); at least one is"
            " needed. axis=-1 is the last."
        )
    axis %= ndim
    if shape[axis] % size:
        raise ValueError(
            f"{where}: x has length {shape[axis]} along axis {axis}, which size {size} does not"
            " divide; a rotated tail of padding could not be cropped. Pad x yourself, or pass a"
            " smaller size."
        )
    return axis


def spell_signs(signs: Any, size: int, where: str) -> str:
    """The sign argument as text that an operator can carry: "", "te", a seed, or "+-+-"."""
    if signs is None:
        return ""
    if isinstance(signs, str):
        if signs != "te":
            raise _wrong_signs(where, repr(signs))
        if size != len(TE_SIGNS):
            raise ValueError(
                f"{where}: signs='te' has {len(TE_SIGNS)} signs and size is {size}; they must agree."
                " Pass a seed, or your own signs."
            )
        return signs
    if isinstance(signs, (bool, np.bool_)):
        raise _wrong_signs(where, repr(signs))
    if hasattr(signs, "__index__") and getattr(signs, "ndim", 0) == 0:
        return str(ops._integer(signs, "signs", -(1 << 63), (1 << 64) - 1, where))
    values = signs.tolist() if hasattr(signs, "tolist") else signs
    try:
        values = list(values)
    except TypeError:
        raise _wrong_signs(where, repr(signs)) from None
    if len(values) != size or any(s not in (1, -1) for s in values):
        raise ValueError(
            f"{where}: signs has {len(values)} entries, {values[:4]!r}...; it must be {size} of +1"
            " and -1. Pass a seed to have them drawn."
        )
    return "".join("+" if s == 1 else "-" for s in values)


def _wrong_signs(where: str, got: str) -> ValueError:
    return ValueError(
        f"{where}: signs must be None, 'te', a seed or a vector of +1 and -1, got {got}."
        " signs=None rotates without signs."
    )


@lru_cache(maxsize=256)
def sign_vector(text: str, size: int) -> tuple[int, ...] | None:
    """Signs that `spell_signs` wrote. A seed's sign i is - where the top bit of word i of
    Philox4x32-10 (key = seed, stream 0) is set."""
    if not text:
        return None
    if text == "te":
        return TE_SIGNS
    if set(text) <= {"+", "-"}:
        return tuple(1 if s == "+" else -1 for s in text)
    words = philox(np.arange(size, dtype=np.uint64), int(text) & (1 << 64) - 1, 0)
    return tuple(-1 if word >> 31 else 1 for word in words.tolist())


def _target(box: Any, out: Any, where: str) -> tuple[Any, Any]:
    """The result, and where to write it: itself, or bfloat16's bits."""
    if isinstance(box, ops._NumpyBox):
        if out is None:
            result = np.empty_like(box.array, dtype=box.dtype, subok=False)
        else:
            result = _check_out(out, np.ndarray, box, where)
            if not result.flags.writeable:
                raise ValueError(
                    f"{where}: out is read-only; it must be writeable. Leave out=None to have one"
                    " made."
                )
        return result, result.view(np.uint16) if box.kind == "bfloat16" else result
    torch_ = box.torch
    if out is None:
        result = torch_.empty_like(box.tensor)
    else:
        result = _check_out(out, torch_.Tensor, box, where)
        if result.device != box.tensor.device:
            raise ValueError(
                f"{where}: out is on {result.device} and x on {box.tensor.device}; they must agree."
                " Leave out=None to have one made."
            )
    return result, result.detach()


def _check_out(out: Any, kind: Any, box: Any, where: str) -> Any:
    if not isinstance(out, kind):
        raise TypeError(
            f"{where}: out must be a {kind.__name__} like x, got {type(out).__name__}. Leave"
            " out=None to have one made."
        )
    if tuple(out.shape) != box.shape or out.dtype != box.dtype:
        raise ValueError(
            f"{where}: out has shape {tuple(out.shape)} and dtype {out.dtype}; it must have x's,"
            f" {box.shape} and {box.dtype}. Leave out=None to have one made."
        )
    return out


# Fused -------------------------------------------------------------------------------------------


def _options(
    rounding: str, overflow: str | None, axis: int, amax: Any, seed: int | None, stream: int,
    offset: Any, sr_bits: int, random_bits: Any,
) -> dict[str, Any]:  # fmt: skip
    return {
        "rounding": rounding, "overflow": overflow, "axis": axis, "amax": amax, "seed": seed,
        "stream": stream, "offset": offset, "sr_bits": sr_bits, "random_bits": random_bits,
    }  # fmt: skip


def _in_two_steps(x: Any, fmt: Any) -> bool:
    """Where torch must see both steps, or a check must see the rotated values."""
    torch_ = sys.modules.get("torch")
    if torch_ is not None and isinstance(x, torch_.Tensor):
        from fpemu import torch_op

        if torch_op.needs_op(x):
            return True
    return element_format(get_format(fmt, "quantize_rotated")).is_integer


class _Fused:
    """One checked call: the request on x, and the rotation that comes before it."""

    def __init__(
        self, x: Any, fmt: Any, size: int, signs: Any, options: dict[str, Any], where: str
    ) -> None:
        self.box, self.axis = _checked(x, options["axis"], size, where)
        self.size, self.signs = size, sign_vector(spell_signs(signs, size, where), size)
        self.request, _ = ops._request(where, x, fmt, **options)
        self.on_host = isinstance(self.box, ops._NumpyBox)

    @property
    def rotation(self) -> Any:
        from fpemu.backends.hadamard_ import Rotation

        return Rotation(self.size, self.signs, False)

    def empty_like_x(self, dtype: Any) -> Any:
        if self.on_host:
            return self.box._target(dtype, None)[0]
        torch_ = self.box.torch
        wanted = None if dtype is None else ops.torch_dtype(dtype, torch_, "quantize_rotated")
        return torch_.empty_like(self.box.tensor, dtype=wanted)

    def on_gpu(self) -> Any:
        """The Triton backend, where it rotates and casts this tensor in one kernel."""
        if self.on_host or self.box.array.device.type != "cuda":
            return None
        module = ops.triton_backend()
        if module is None or module.supports(self.request) is not None:
            return None
        return module if module.rotates(self.request, self.size) else None

    def fuses(self) -> bool:
        if not _on_numba(self.box):
            return False
        from fpemu.backends import hadamard_

        self.host = (
            replace(self.request) if self.on_host else self.box._to_host(replace(self.request))
        )
        return hadamard_.fuses(self.host)

    def rotated(self) -> tuple[Any, Any]:
        """The request on the rotated array."""
        result, target = _target(self.box, None, "quantize_rotated")
        _rotate(self.box, target, self.axis, self.size, self.signs, False)
        box = ops._box(result, "quantize_rotated")
        return replace(self.request, x=box.array), box


def _on_numba(box: Any) -> bool:
    return (isinstance(box, ops._NumpyBox) or box.on_cpu) and _has_numba()


def _memory(x: Any) -> np.ndarray:
    """An array's or CPU tensor's memory; bfloat16 as its bits."""
    if isinstance(x, np.ndarray):
        return x.view(np.uint16) if x.dtype.name == "bfloat16" else x
    return ops.as_numpy(x.detach())


# Dispatch ----------------------------------------------------------------------------------------


@lru_cache(maxsize=1)
def _has_numba() -> bool:
    return find_spec("numba") is not None


def _rotate(
    box: Any, target: Any, axis: int, size: int, signs: tuple[int, ...] | None, inverse: bool
) -> None:
    on_host = isinstance(box, ops._NumpyBox)
    if _on_numba(box):
        from fpemu.backends.hadamard_ import Rotation, rotate

        x, out = _memory(box.array), _memory(target)
        if np.may_share_memory(x, out) and not _same_memory(x, out):
            x = x.copy()  # written values must not be read again
        rotate(x, out, axis, Rotation(size, signs, inverse))
        return
    from fpemu.backends import hadamard_torch, torch_host

    if on_host:
        landing = np.empty(box.shape, target.dtype)
        source, into = (torch_host.tensor_of(a, box.kind) for a in (box.array, landing))
        hadamard_torch.rotate(source, into, axis, size, signs, inverse)
        target[...] = landing
    else:
        hadamard_torch.rotate(box.tensor, target, axis, size, signs, inverse)


def _same_memory(a: np.ndarray, b: np.ndarray) -> bool:
    place = "__array_interface__"
    return getattr(a, place)["data"][0] == getattr(b, place)["data"][0] and a.strides == b.strides
