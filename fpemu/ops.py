"""The verbs: validate, choose a backend, call it.

`quantize` and `encode` turn their arguments into a `fpemu.backends.Request`; nothing behind this
file checks an argument again.
"""

from __future__ import annotations

import sys
from functools import lru_cache
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np

from fpemu.backends import FLOAT_KINDS, Parts, Request, element_format
from fpemu.casting import check_rounding, resolve_overflow
from fpemu.dialects import dialect_of
from fpemu.encoded import Encoded
from fpemu.errors import BackendError, unknown
from fpemu.formats import BlockFormat, Format, get_format
from fpemu.rng import Random

if TYPE_CHECKING:
    import torch

BACKENDS = {
    "oracle": "fpemu.backends.oracle",
    "numba": "fpemu.backends.numba_",
    "torch": "fpemu.backends.torch_",
    "triton": "fpemu.backends.triton_",
    "hardware": "fpemu.backends.hardware",
}
#: Those that work on torch tensors where they are; the others on arrays in host memory.
ON_TENSORS = ("torch", "triton", "hardware")
_KINDS = frozenset((*FLOAT_KINDS, *(f"{u}int{n}" for u in ("", "u") for n in (8, 16, 32, 64))))
_WORD = (1 << 64) - 1


def quantize(
    x: Any,
    fmt: str | Format | BlockFormat,
    *,
    rounding: str = "rne",
    overflow: str | None = None,
    axis: int = -1,
    amax: Any = None,
    seed: int | None = None,
    stream: int = 0,
    offset: Any = 0,
    sr_bits: int = 32,
    random_bits: Any = None,
    ste: str = "clip",
    dtype: Any = None,
    out: Any = None,
    backend: str | None = None,
) -> Any:
    """Round `x` to the values of a format ("fake quantization").

    Parameters
    ----------
    x : ndarray or Tensor, any shape
        float16, bfloat16, float32, float64 or an integer type; numpy scalars too. Not modified.
    fmt : str, Format or BlockFormat
        For example ``"nvfp4"``; `fpemu.list_formats` has the names.
    rounding : {"rne", "rna", "rnz", "rtz", "rtp", "rtn", "rto", "sr"}
        Of the elements; scales follow their rule.
    overflow : {"sat", "nonsat"}, optional
        Default: the format's (FP16, BF16, TF32 ``nonsat``; FP8, FP6, FP4 ``sat``).
    axis : int
        Along which blocks lie. 2D blocks tile the last two axes whatever it is.
    amax : float, optional
        Tensor amax to scale by in place of x's own (formats with a tensor scale).
    seed, stream, offset, sr_bits, random_bits
        Stochastic rounding: 64-bit key (default: drawn from numpy's or torch's global generator)
        and stream; index of x's first element in a whole, or ``(global_shape, start)``; how many
        random bits decide; or the uint32 words themselves in x's shape.
    ste : {"clip", "full"}
        Gradient of a torch input: 1 where the value that is cast lies within +-max and 0 beyond,
        or 1 everywhere.
    dtype : dtype, optional
        Of the result: float16, bfloat16, float32 or float64. Default x's; float32 for integers.
    out : array like x, optional
        Receives the result and is returned (without a gradient).
    backend : {"oracle", "numba", "torch", "triton"}, optional
        Force one. The bits are the same. Default: numba on a CPU; on CUDA tensors triton where it
        is installed and serves the format, else torch.

    Returns
    -------
    ndarray or Tensor
        Shape, device and container of x. Each value is ``code * scale * tensor_scale`` formed
        exactly and rounded once into `dtype` (RNE).

    Notes
    -----
    Error: within the range of normal results, at most half a step (``eps/2`` relative) for the
    nearest roundings and one step for the others. Special values: see ``docs/bits.md``.

    Raises
    ------
    TypeError
        For complex, bool, object and other dtypes that are not listed above.
    ValueError
        For an unknown name, an axis out of range, an `amax` that is negative, NaN or of no use to
        the format, `random_bits` of a wrong shape.
    BackendError
        When a forced backend cannot serve.

    Examples
    --------
    >>> import numpy as np, fpemu
    >>> fpemu.quantize(np.float32([0.1, 1.0, 2.6, 30.0]), "e4m3")
    array([ 0.1015625,  1.       ,  2.5      , 30.       ], dtype=float32)
    >>> fpemu.quantize(np.float32([0.1, 1.0, 2.6, 5.25]), fmt="nvfp4")
    array([0.   , 0.875, 2.625, 5.25 ], dtype=float32)
    """
    torch_ = sys.modules.get("torch")
    if torch_ is not None and isinstance(x, torch_.Tensor):
        from fpemu import torch_op

        if out is None and torch_op.needs_op(x):
            return torch_op.quantize(
                x, fmt, rounding, overflow, axis, amax, seed, stream, offset, sr_bits, random_bits,
                ste, dtype, backend,
            )  # fmt: skip
    if ste not in ("clip", "full"):
        raise unknown("quantize", "ste", ste, ("clip", "full"))
    request, box = _request(
        "quantize",
        x,
        fmt,
        rounding,
        overflow,
        axis,
        amax,
        seed,
        stream,
        offset,
        sr_bits,
        random_bits,
    )
    return box.quantized(request, dtype, out, backend)


def encode(
    x: Any,
    fmt: str | Format | BlockFormat,
    *,
    rounding: str = "rne",
    overflow: str | None = None,
    axis: int = -1,
    amax: Any = None,
    seed: int | None = None,
    stream: int = 0,
    offset: Any = 0,
    sr_bits: int = 32,
    random_bits: Any = None,
    backend: str | None = None,
) -> Encoded:
    """Codes and scales of `x` in a format; the arguments are those of `quantize`.

    Returns
    -------
    Encoded
        ``decode(encode(x, f))`` equals ``quantize(x, f)`` bit for bit.

    Examples
    --------
    >>> import numpy as np, fpemu
    >>> e = fpemu.encode(np.float32([0.5, -1.0, 6.0]), "mxfp4")
    >>> e.codes, e.scales
    (array([ 1, 10,  7], dtype=uint8), array([127], dtype=uint8))
    """
    request, box = _request(
        "encode", x, fmt, rounding, overflow, axis, amax, seed, stream, offset, sr_bits, random_bits
    )
    parts = box.encoded(request, backend)
    codes, scales, number = parts
    return Encoded(codes, scales, None, request.fmt, request.axis, box.dtype, global_scale=number)


def decode(encoded: Encoded, dtype: Any = None) -> Any:
    """Values of an `Encoded`, in the dtype of the array it was made from unless told otherwise.

    Raises
    ------
    TypeError
        When `encoded` is no Encoded or `dtype` no floating-point type.
    """
    if not isinstance(encoded, Encoded):
        raise TypeError(
            f"decode: encoded must be an fpemu.Encoded, got {type(encoded).__name__}."
            " fpemu.encode makes one."
        )
    return encoded.decode(dtype)


# Arguments ---------------------------------------------------------------------------------------


def _request(
    where: str,
    x: Any,
    fmt: Any,
    rounding: str,
    overflow: str | None,
    axis: int,
    amax: Any,
    seed: int | None,
    stream: int,
    offset: Any,
    sr_bits: int,
    random_bits: Any,
) -> tuple[Request, _Box]:
    box = _box(x, where)
    fmt = get_format(fmt, where)
    check_rounding(rounding, where)
    rounding = _own_rounding(rounding, fmt, where)
    element = element_format(fmt)
    overflow = resolve_overflow(element, overflow, where)
    ndim = len(box.shape)
    request = Request(box.array, box.kind, fmt, rounding, overflow, _axis(axis, ndim, fmt, where))
    if amax is not None:
        request.amax = _amax(amax, fmt, where)
    if rounding == "sr":
        _random(request, box, seed, stream, offset, sr_bits, random_bits, where)
    elif random_bits is not None:
        raise ValueError(
            f"{where}: random_bits is given but rounding={rounding!r}; random bits decide only"
            " stochastic rounding. Pass rounding='sr'."
        )
    if element.is_integer and box.kind in FLOAT_KINDS and _hides_nan(fmt) and box.has_nan():
        raise ValueError(
            f"{where}: x holds NaN and {fmt.name!r} has no code for it; integers need finite or"
            " infinite values. Replace NaN first, or use mxint8, whose scale can be NaN."
        )
    return request, box


def _own_rounding(rounding: str, fmt: Format | BlockFormat, where: str) -> str:
    """``"rne"``, the default, is the tie rule of the format's library."""
    if not isinstance(fmt, BlockFormat):
        return rounding
    dialect = dialect_of(fmt)
    if rounding == "rne" or (dialect is not None and dialect.rounds_itself):
        if rounding != "rne":
            raise ValueError(
                f"{where}: rounding is {rounding!r} but {fmt.name!r} rounds by its library's own"
                " rule; only 'rne', the default, is allowed. Use another dialect."
            )
        return fmt.rounding
    return rounding


def _hides_nan(fmt: Format | BlockFormat) -> bool:
    """Whether no scale can say that there was a NaN."""
    return not (isinstance(fmt, BlockFormat) and fmt.scale is not None and fmt.scale.has_nan)


def _axis(axis: Any, ndim: int, fmt: Format | BlockFormat, where: str) -> int:
    if type(axis) is not int:
        try:
            axis = axis.__index__()
        except AttributeError:
            raise TypeError(
                f"{where}: axis must be an integer, got {type(axis).__name__}. For example axis=-1."
            ) from None
    if not isinstance(fmt, BlockFormat) or fmt.block is None:
        return 0
    if fmt.is_2d:
        if ndim < 2:
            raise ValueError(
                f"{where}: {fmt.name!r} tiles the last two axes, got x with {ndim} dimension(s);"
                " at least 2 are needed. Reshape x or use a format with 1D blocks."
            )
        return ndim - 1
    if not -max(ndim, 1) <= axis < max(ndim, 1):
        raise ValueError(
            f"{where}: axis {axis} is out of range for x with {ndim} dimension(s); allowed are"
            f" {-max(ndim, 1)} to {max(ndim, 1) - 1}. axis=-1 is the last."
        )
    return axis % ndim if ndim else 0


def _amax(amax: Any, fmt: Format | BlockFormat, where: str) -> float:
    if not (isinstance(fmt, BlockFormat) and fmt.tensor_scaled):
        raise ValueError(
            f"{where}: amax is given but {fmt.name!r} has no tensor scale; only formats with one"
            " (nvfp4, fp8_tensor_*, int8_tensor) use it. Leave amax out."
        )
    try:
        value = float(amax)
    except (TypeError, ValueError):
        raise TypeError(
            f"{where}: amax must be one number, got {type(amax).__name__}. For example"
            " amax=float(abs(x).max())."
        ) from None
    if not value >= 0:
        raise ValueError(
            f"{where}: amax must be a non-negative number, got {value!r}; it is the largest |x|."
            " Pass amax=None to compute it."
        )
    with np.errstate(over="ignore"):
        return float(np.float32(value))


def _integer(value: Any, name: str, low: int, high: int, where: str) -> int:
    try:
        number = value.__index__()
    except AttributeError:
        raise TypeError(
            f"{where}: {name} must be an integer, got {type(value).__name__}; allowed are {low} to"
            f" {high}."
        ) from None
    if not low <= number <= high:
        raise ValueError(
            f"{where}: {name} is {number}; allowed are {low} to {high}. Leave it out for the default."
        )
    return number


def _random(
    request: Request,
    box: _Box,
    seed: int | None,
    stream: int,
    offset: Any,
    sr_bits: int,
    random_bits: Any,
    where: str,
) -> None:
    request.sr_bits = _integer(sr_bits, "sr_bits", 1, 32, where)
    if random_bits is not None:
        request.random_bits = box.words(random_bits, where)
        return
    seed = box.draw_seed() if seed is None else _integer(seed, "seed", -(1 << 63), _WORD, where)
    stream = _integer(stream, "stream", -(1 << 63), _WORD, where)
    shape = start = None
    first = 0
    if isinstance(offset, tuple):
        shape, start = _shard(offset, box.shape, where)
    else:
        first = _integer(offset, "offset", 0, (1 << 63) - 1, where)
    request.random = Random(seed & _WORD, stream & _WORD, request.sr_bits, first, shape, start)


def _shard(
    offset: tuple[Any, ...], local: tuple[int, ...], where: str
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    try:
        whole, start = (tuple(int(n) for n in part) for part in offset)
    except (TypeError, ValueError):
        raise TypeError(
            f"{where}: offset must be an integer or (global_shape, start), got {offset!r}."
            " For example offset=((1024, 4096), (512, 0))."
        ) from None
    fits = len(whole) == len(start) == len(local) and all(
        0 <= s and s + n <= w for s, n, w in zip(start, local, whole, strict=True)
    )
    if not fits:
        raise ValueError(
            f"{where}: offset puts a shard of shape {local} at {start} of a whole of shape {whole};"
            " it must lie inside and have as many axes. Check global_shape and start."
        )
    return whole, start


def check_dtype(name: str, where: str) -> str:
    if name not in FLOAT_KINDS:
        raise TypeError(
            f"{where}: dtype {name} is not supported; results are {', '.join(FLOAT_KINDS)}."
            " Leave dtype out to keep x's."
        )
    return name


def _wrong_dtype(where: str, name: str) -> TypeError:
    return TypeError(
        f"{where}: x has dtype {name}; allowed are float16, bfloat16, float32, float64 and integers."
        " Convert it first, for example x.astype('float32')."
    )


# Backends ----------------------------------------------------------------------------------------

_loaded: dict[str, ModuleType] = {}


def load_backend(name: str) -> ModuleType:
    """The backend's module; raises `BackendError` saying why it cannot be had."""
    module = _loaded.get(name)
    if module is not None:
        return module
    if name not in BACKENDS:
        raise unknown("quantize", "backend", name, BACKENDS)
    try:
        module = import_module(BACKENDS[name])
    except ImportError as error:
        raise BackendError(
            f"backend {name!r} cannot serve: {error}. Install it, or leave backend out."
        ) from error
    _loaded[name] = module
    return module


def _default_cpu() -> str:
    global _cpu
    if _cpu is None:
        _cpu = "numba" if find_spec("numba") is not None else "torch"
    return _cpu


_cpu: str | None = None


@lru_cache(maxsize=1)
def triton_backend() -> ModuleType | None:
    """The default backend of CUDA tensors, or None where Triton is missing."""
    if find_spec("triton") is None:
        return None
    try:
        return load_backend("triton")
    except BackendError:
        return None


def _on_device(request: Request) -> str:
    """The default backend of a tensor that is not in host memory."""
    if request.x.device.type != "cuda":
        return "torch"
    module = triton_backend()
    return "torch" if module is None or module.supports(request) is not None else "triton"


def device_decoder(fmt: Format | BlockFormat, out: torch.Tensor) -> ModuleType:
    """What decodes on the device of `out`, which is not the host."""
    module = triton_backend() if out.device.type == "cuda" else None
    return module if module is not None and module.decodes(fmt) else load_backend("torch")


def _choose(request: Request, backend: str | None, on_cpu: bool) -> tuple[str, ModuleType]:
    name = backend
    if name is None:
        name = _default_cpu() if on_cpu else _on_device(request)
    module = load_backend(name)
    reason = module.supports(request)
    if reason is None and not on_cpu and name not in ON_TENSORS:
        reason = "it works in host memory and x is on another device"
    if reason is not None:
        raise BackendError(f"backend {name!r} cannot serve: {reason}. Leave backend out.")
    return name, module


def quantizing(name: str, module: ModuleType) -> ModuleType:
    """The module, if it quantizes; hardware casts only encode."""
    if not hasattr(module, "quantize"):
        raise BackendError(
            f"backend {name!r} cannot serve: its instructions make codes. Use fpemu.encode, or leave"
            " backend out."
        )
    return module


def _host_module(request: Request, backend: str | None) -> ModuleType:
    """A backend that works on numpy arrays; those on tensors through a thin adapter."""
    name, module = _choose(request, backend, True)
    if name in ON_TENSORS:
        quantizing(name, module)
    return load_host_backend(name)


def load_host_backend(name: str | None) -> ModuleType:
    """The backend (None: the default one) that works on numpy arrays."""
    name = _default_cpu() if name is None else name
    module = load_backend(name)
    if name not in ON_TENSORS:
        return module
    return import_module("fpemu.backends.torch_host").OnArrays(module)  # type: ignore[no-any-return]


# Containers --------------------------------------------------------------------------------------


def _box(x: Any, where: str) -> _Box:
    torch_ = sys.modules.get("torch")
    if torch_ is not None and isinstance(x, torch_.Tensor):
        return _TorchBox(x, torch_, where)
    return _NumpyBox(x, where)


class _Box:
    """x, its kind, and how results come back in the same container."""

    array: Any
    kind: str
    shape: tuple[int, ...]
    dtype: Any
    on_cpu: bool = True

    def quantized(self, request: Request, dtype: Any, out: Any, backend: str | None) -> Any:
        raise NotImplementedError

    def encoded(self, request: Request, backend: str | None) -> Parts:
        raise NotImplementedError

    def _to_host(self, request: Request) -> Request:
        """The request on numpy arrays."""
        return request

    def on_host(self, request: Request, backend: str | None) -> tuple[Request, ModuleType]:
        """The request on numpy arrays, and a backend for it."""
        return self._to_host(request), _host_module(request, backend)

    def words(self, random_bits: Any, where: str) -> Any:
        raise NotImplementedError

    def draw_seed(self) -> int:
        raise NotImplementedError

    def has_nan(self) -> bool:
        raise NotImplementedError


class _NumpyBox(_Box):
    def __init__(self, x: Any, where: str) -> None:
        array = x if type(x) is np.ndarray else np.asarray(x)
        if not array.dtype.isnative:
            array = array.astype(array.dtype.newbyteorder("="))
        self.scalar = isinstance(x, np.generic)
        self.shape, self.dtype = array.shape, array.dtype
        self.kind = _kind_names.get(array.dtype) or _numpy_kind(array.dtype, where)
        self.array = array.view(np.uint16) if self.kind == "bfloat16" else array

    def quantized(self, request: Request, dtype: Any, out: Any, backend: str | None) -> Any:
        result, target = self._target(dtype, out)
        module = _host_module(request, backend)
        if out is not None and np.may_share_memory(target, self.array) and target is not self.array:
            request.x = self.array.copy()  # written values must not be read again
        module.quantize(request, target)
        return result[()] if self.scalar and out is None else result

    def _target(self, dtype: Any, out: Any) -> tuple[np.ndarray, np.ndarray]:
        if out is None:
            if dtype is None:
                wanted = self.dtype if self.kind in FLOAT_KINDS else np.dtype(np.float32)
            else:
                wanted = numpy_dtype(dtype, "quantize")
            result = np.empty_like(self.array, dtype=wanted, subok=False)
        else:
            result = _check_out(out, np.ndarray, self.shape)
            if not result.flags.writeable or not result.dtype.isnative:
                raise ValueError(
                    "quantize: out is read-only or not in native byte order; it must be a writeable"
                    " native array. Leave out=None to have one made."
                )
            check_dtype(result.dtype.name, "quantize")
            if dtype is not None and numpy_dtype(dtype, "quantize") != result.dtype:
                raise _two_dtypes(dtype, result.dtype)
        return result, result.view(np.uint16) if result.dtype.name == "bfloat16" else result

    def encoded(self, request: Request, backend: str | None) -> Parts:
        return _host_module(request, backend).encode(request)

    def words(self, random_bits: Any, where: str) -> np.ndarray:
        words = np.asarray(random_bits)
        if words.dtype != np.uint32 or words.shape != self.shape:
            raise _wrong_words(where, str(words.dtype), words.shape, self.shape)
        return words

    def draw_seed(self) -> int:
        return int(np.random.randint(0, 1 << 63, dtype=np.int64))

    def has_nan(self) -> bool:
        if self.kind == "bfloat16":
            return bool(((self.array & 0x7FFF) > 0x7F80).any())
        return bool(np.isnan(self.array).any())


_kind_names: dict[np.dtype, str] = {}


def _numpy_kind(dtype: np.dtype, where: str) -> str:
    if dtype.name not in _KINDS:
        raise _wrong_dtype(where, str(dtype))
    _kind_names[dtype] = dtype.name
    return dtype.name


def numpy_dtype(dtype: Any, where: str) -> np.dtype:
    """The numpy dtype that a caller asked for by any name (a torch dtype's too)."""
    name = str(dtype).removeprefix("torch.") if not isinstance(dtype, (str, type)) else dtype
    if name == "bfloat16":
        from ml_dtypes import bfloat16

        return np.dtype(bfloat16)
    try:
        found = np.dtype(name)
    except TypeError:
        raise TypeError(
            f"{where}: dtype {dtype!r} is unknown; results are {', '.join(FLOAT_KINDS)}."
            " Leave dtype out to keep x's."
        ) from None
    check_dtype(found.name, where)
    return found


def _check_out(out: Any, kind: Any, shape: tuple[int, ...]) -> Any:
    if not isinstance(out, kind):
        raise TypeError(
            f"quantize: out must be a {kind.__name__} like x, got {type(out).__name__}."
            " Leave out=None to have one made."
        )
    if tuple(out.shape) != shape:
        raise ValueError(
            f"quantize: out has shape {tuple(out.shape)}; it must have x's, {shape}."
            " Leave out=None to have one made."
        )
    return out


def _two_dtypes(dtype: Any, found: Any) -> ValueError:
    return ValueError(
        f"quantize: dtype={dtype} but out has dtype {found}; they must agree. Leave dtype out."
    )


def _wrong_words(
    where: str, dtype: str, shape: tuple[int, ...], wanted: tuple[int, ...]
) -> ValueError:
    return ValueError(
        f"{where}: random_bits has dtype {dtype} and shape {tuple(shape)}; it must be uint32 words"
        f" in x's shape {tuple(wanted)}. Pass seed= to have them drawn."
    )


class _TorchBox(_Box):
    def __init__(self, x: torch.Tensor, torch_: ModuleType, where: str) -> None:
        self.torch = torch_
        self.tensor = x.detach()
        self.shape, self.dtype = tuple(x.shape), x.dtype
        self.kind = _torch_kinds.get(x.dtype) or _torch_kind(x.dtype, where)
        self.on_cpu = x.device.type == "cpu"
        self.array = self.tensor

    def quantized(self, request: Request, dtype: Any, out: Any, backend: str | None) -> Any:
        torch_ = self.torch
        if out is None:
            if dtype is None:
                wanted = self.dtype if self.kind in FLOAT_KINDS else torch_.float32
            else:
                wanted = torch_dtype(dtype, torch_, "quantize")
            result = torch_.empty_like(self.tensor, dtype=wanted)
        else:
            result = _check_out(out, torch_.Tensor, self.shape)
            check_dtype(str(result.dtype).removeprefix("torch."), "quantize")
            if dtype is not None and torch_dtype(dtype, torch_, "quantize") != result.dtype:
                raise _two_dtypes(dtype, result.dtype)
            if result.device != self.tensor.device:
                raise ValueError(
                    f"quantize: out is on {result.device} and x on {self.tensor.device}; they must"
                    " agree. Leave out=None to have one made."
                )
        name, module = _choose(request, backend, self.on_cpu)
        if name in ON_TENSORS:
            quantizing(name, module).quantize(request, result.detach())
        else:
            target = as_numpy(result.detach())
            self._to_host(request)
            if out is not None and result.data_ptr() != self.tensor.data_ptr():
                if np.may_share_memory(target, request.x):
                    request.x = request.x.copy()
            module.quantize(request, target)
        return result

    def encoded(self, request: Request, backend: str | None) -> Parts:
        name, module = _choose(request, backend, self.on_cpu)
        if name in ON_TENSORS:
            return module.encode(request)
        parts = module.encode(self._to_host(request))
        return Parts(*(None if p is None else self.torch.from_numpy(p) for p in parts))

    def _to_host(self, request: Request) -> Request:
        request.x = as_numpy(self.tensor.cpu())
        if request.random_bits is not None:
            request.random_bits = request.random_bits.cpu().numpy().astype(np.uint32)
        return request

    def words(self, random_bits: Any, where: str) -> torch.Tensor:
        torch_ = self.torch
        if not isinstance(random_bits, torch_.Tensor):
            random_bits = torch_.as_tensor(random_bits)
        allowed = (torch_.uint32, torch_.int64, torch_.int32)
        if random_bits.dtype not in allowed or tuple(random_bits.shape) != self.shape:
            raise _wrong_words(where, str(random_bits.dtype), random_bits.shape, self.shape)
        # int32 holds the same bits; int64 the numbers 0 .. 2**32 - 1.
        return random_bits.to(self.tensor.device).to(torch_.int64) & 0xFFFFFFFF

    def draw_seed(self) -> int:
        return int(self.torch.randint(0, (1 << 63) - 1, (), dtype=self.torch.int64).item())

    def has_nan(self) -> bool:
        return bool(self.torch.isnan(self.tensor).any())


_torch_kinds: dict[Any, str] = {}


def _torch_kind(dtype: Any, where: str) -> str:
    name = str(dtype).removeprefix("torch.")
    if name not in _KINDS:
        raise _wrong_dtype(where, str(dtype))
    _torch_kinds[dtype] = name
    return name


def torch_dtype(dtype: Any, torch_: ModuleType, where: str) -> Any:
    """The torch dtype that a caller asked for by any name (a numpy dtype's too)."""
    if not isinstance(dtype, torch_.dtype):
        name = dtype if isinstance(dtype, str) else np.dtype(dtype).name
        dtype = getattr(torch_, name, None) or name
    check_dtype(str(dtype).removeprefix("torch."), where)
    return dtype


def as_numpy(tensor: torch.Tensor) -> np.ndarray:
    """A CPU tensor's memory as an array; bfloat16 as its uint16 bits."""
    torch_ = sys.modules["torch"]
    tensor = tensor.resolve_neg()
    if tensor.dtype == torch_.bfloat16:
        return tensor.view(torch_.int16).numpy().view(np.uint16)
    return tensor.numpy()
