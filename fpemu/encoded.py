"""`Encoded`: codes, scales, and how to read them."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fpemu import packing
from fpemu.backends import Parts, element_format, scales_dtype, scales_shape
from fpemu.dialects import DECODE
from fpemu.errors import FileFormatError
from fpemu.formats import TABLE, BlockFormat, Format, get_format
from fpemu.scaling import NUMPY

#: What `Encoded.save` writes as the file's layout; raised when the layout changes.
LAYOUT = "fpemu.encoded.1"

_NATIVE = {
    "e4m3": "float8_e4m3fn", "ue4m3": "float8_e4m3fn", "e5m2": "float8_e5m2",
    "e4m3fnuz": "float8_e4m3fnuz", "e5m2fnuz": "float8_e5m2fnuz", "e8m0": "float8_e8m0fnu",
    "e2m1": "float4_e2m1fn_x2", "fp16": "float16", "bf16": "bfloat16", "fp32": "float32",
    "int8": "int8",
}  # fmt: skip


class TorchParts(NamedTuple):
    """Tensors of `Encoded.to_torch`."""

    codes: Any
    scales: Any
    tensor_scale: Any


@dataclass(eq=False, init=False)
class Encoded:
    """An array in a format.

    Parameters
    ----------
    codes : array of uint8, uint16 (16-bit formats) or uint32 (tf32, fp32)
        One code per element, shape of the source.
    scales : array of uint8 codes or float32, or None
        One per block, blocks in place of elements along `axis` (or the last two axes).
    global_scale : float32 scalar array, or None
        The tensor's number as the format's library stores it: a factor, a divisor or the amax.
        `tensor_scale` is the factor that multiplies.
    format : Format or BlockFormat
    axis : int
        Non-negative axis along which blocks lie.
    dtype : dtype
        Of the source array; `decode` returns it (float32 where the source was integer).

    Made from parts with ``Encoded(codes, scales, tensor_scale, format, axis, dtype)``, or with
    ``global_scale=`` in place of `tensor_scale` for the number as stored.
    """

    codes: Any
    scales: Any
    global_scale: Any
    format: Format | BlockFormat
    axis: int
    dtype: Any

    def __init__(
        self,
        codes: Any,
        scales: Any,
        tensor_scale: Any = None,
        format: str | Format | BlockFormat | None = None,  # needed; None is refused
        axis: int = -1,
        dtype: Any = np.dtype(np.float32),  # noqa: B008 (a constant)
        *,
        global_scale: Any = None,
    ) -> None:
        self.codes, self.scales = codes, scales
        self.format = get_format(format, "Encoded")  # type: ignore[arg-type]
        self.axis = axis % max(len(codes.shape), 1)
        self.dtype = dtype
        self.global_scale = global_scale
        if tensor_scale is not None:
            self.global_scale = self._stored(tensor_scale)

    def _stored(self, tensor_scale: Any) -> Any:
        """The number that the format's library stores for a factor that multiplies."""
        if not isinstance(self.format, BlockFormat) or DECODE[self.format.decode].stores_factor:
            return tensor_scale
        with np.errstate(all="ignore"):
            number = DECODE[self.format.decode].stores(NUMPY, np.asarray(_numpy(tensor_scale)))
        return _like(np.asarray(number, np.float32), tensor_scale)

    @property
    def tensor_scale(self) -> Any:
        """The float32 scalar that *multiplies* the decoded values, or None."""
        if self.global_scale is None or not isinstance(self.format, BlockFormat):
            return self.global_scale
        with np.errstate(all="ignore"):
            factor = DECODE[self.format.decode].multiplies(NUMPY, _numpy(self.global_scale))
        return _like(np.asarray(factor, np.float32), self.global_scale)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.codes.shape)

    @property
    def nbytes(self) -> int:
        """Bytes as stored: packed codes, scales and tensor scale."""
        element = element_format(self.format)
        size = int(np.prod(packing.packed_shape(self.shape, element), dtype=np.int64))
        if self.scales is not None:
            scales = _numpy(self.scales)
            size += scales.size * scales.itemsize
        return size + (4 if self.global_scale is not None else 0)

    def __repr__(self) -> str:
        return (
            f"Encoded({self.format.name!r}, shape={self.shape}, axis={self.axis},"
            f" dtype={self.dtype}, nbytes={self.nbytes})"
        )

    def decode(self, dtype: Any = None) -> Any:
        """Values: the exact ``code * scale * tensor_scale``, rounded once into `dtype`.

        A dialect whose library forms them in another order follows that (`fpemu.dialects.DECODE`).
        A NaN scale gives NaN throughout its block.
        """
        from fpemu import ops

        parts = Parts(self.codes, self.scales, self.global_scale)
        if not _is_torch(self.codes):
            wanted = ops.numpy_dtype(_float_or(dtype, self.dtype), "decode")
            out = np.empty_like(self.codes, dtype=wanted)
            target = out.view(np.uint16) if wanted.name == "bfloat16" else out
            _host_backend().decode(self.format, parts, self.axis, target, wanted.name)
            return out
        torch = sys.modules["torch"]
        wanted = ops.torch_dtype(_float_or(dtype, self.dtype), torch, "decode")
        out = torch.empty(self.shape, dtype=wanted, device=self.codes.device)
        if self.codes.device.type != "cpu":
            ops.device_decoder(self.format, out).decode(self.format, parts, self.axis, out)
            return out
        host = Parts(*(None if p is None else _numpy(p) for p in parts))
        kind = str(wanted).removeprefix("torch.")
        _host_backend().decode(self.format, host, self.axis, ops.as_numpy(out), kind)
        return out

    # Bytes -----------------------------------------------------------------------------------

    def pack(self) -> Any:
        """Codes as stored: FP4 two per byte, even index in the low nibble (uint8)."""
        packed = packing.pack(_numpy(self.codes), element_format(self.format))
        return _like(packed, self.codes)

    def scales_swizzled(self) -> Any:
        """Scales in the 128x4 layout that cuBLAS and CUTLASS read, zero-padded to whole tiles.

        The block axis counts as K (last), every other axis as rows. Scales of 2D blocks are
        repeated for each row of their tile, as those GEMMs want one per row.

        Raises
        ------
        ValueError
            For formats without 8-bit block scales.
        """
        return _like(packing.swizzle(self._scale_rows()), self.codes)

    def scales_unswizzled(self, data: Any) -> Any:
        """The inverse of `scales_swizzled`: `data` as an array of this Encoded's `scales` shape."""
        rows = self._scale_rows()
        flat = packing.unswizzle(_numpy(data).reshape(-1).view(np.uint8), *rows.shape)
        scales = _numpy(self.scales)
        if isinstance(self.format, BlockFormat) and self.format.is_2d:
            tall = self.format.block[0]  # type: ignore[index]
            lead = (*self.shape[:-1], rows.shape[-1])
            return _like(np.ascontiguousarray(flat.reshape(lead)[..., ::tall, :]), self.codes)
        moved = np.moveaxis(scales, self.axis, -1) if scales.ndim else scales.reshape(1)
        back = flat.reshape(moved.shape)
        back = np.moveaxis(back, -1, self.axis) if scales.ndim else back.reshape(())
        return _like(np.ascontiguousarray(back), self.codes)

    def _scale_rows(self) -> np.ndarray:
        fmt = self.format
        if self.scales is None or not isinstance(fmt, BlockFormat) or scales_dtype(fmt) != np.uint8:
            raise ValueError(
                f"scales_swizzled: {fmt.name!r} has no 8-bit block scales; the 128x4 layout holds"
                " E8M0 and E4M3 scales. Use an mx* or nvfp4 format."
            )
        scales = _numpy(self.scales)
        if fmt.is_2d:
            tall = fmt.block[0]  # type: ignore[index]
            scales = np.repeat(scales, tall, axis=-2)[..., : self.shape[-2], :]
        elif scales.ndim:
            scales = np.moveaxis(scales, self.axis, -1)
        last = scales.shape[-1] if scales.ndim else 1
        return scales.reshape(-1 if scales.size else 0, last)

    def to_torch(self) -> TorchParts:
        """Tensors in torch's own dtypes, sharing memory where they can.

        float8_e4m3fn, float8_e5m2, the fnuz pair, float8_e8m0fnu, float4_e2m1fn_x2 (packed, last
        axis halved), float16, bfloat16, float32 and int8; formats torch lacks stay uint8/16/32.
        """
        import torch

        def native(array: Any, fmt: Format) -> Any:
            data = array if _is_torch(array) else torch.from_numpy(np.ascontiguousarray(array))
            dtype = getattr(torch, _NATIVE.get(fmt.name, ""), None)
            return data if dtype is None else data.contiguous().view(dtype)

        element = element_format(self.format)
        codes = native(self.pack() if element.bits <= 4 else self.codes, element)
        scales = tensor_scale = None
        if isinstance(self.format, BlockFormat) and self.format.scale is not None:
            scales = native(self.scales, self.format.scale)
        if self.tensor_scale is not None:
            tensor_scale = torch.as_tensor(self.tensor_scale)
        return TorchParts(codes, scales, tensor_scale)

    # Files -----------------------------------------------------------------------------------

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a safetensors file: packed codes, scales, tensor scale and what they mean.

        The file appears only when it is complete.
        """
        from safetensors.numpy import save

        tensors = {"codes": np.ascontiguousarray(_numpy(self.pack()))}
        if self.scales is not None:
            tensors["scales"] = np.asarray(_numpy(self.scales), order="C")  # keeps 0-d
        if self.global_scale is not None:
            tensors[_global_name(self.format)] = np.asarray(_numpy(self.global_scale), order="C")
        metadata = {
            "layout": LAYOUT,
            "format": json.dumps(_row(self.format)),
            "shape": json.dumps(self.shape),
            "axis": str(self.axis),
            "dtype": str(self.dtype),
            "container": "torch" if _is_torch(self.codes) else "numpy",
        }
        write_atomically(Path(path), save(tensors, metadata=metadata))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Encoded:
        """Read what `save` wrote, into the container and with the dtype it was saved from.

        Raises
        ------
        FileFormatError
            For a file that is truncated, is no `Encoded`, or whose parts do not fit together.
        """
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(os.fspath(path), framework="numpy") as file:
                metadata = file.metadata() or {}
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except SafetensorError as error:
            raise FileFormatError(
                f"Encoded.load: {os.fspath(path)!r} is not a whole safetensors file ({error});"
                " it may be truncated. Write it again with Encoded.save."
            ) from error
        return cls._assemble(os.fspath(path), metadata, tensors)

    @classmethod
    def _assemble(
        cls, path: str, metadata: dict[str, str], tensors: dict[str, np.ndarray]
    ) -> Encoded:
        def broken(what: str) -> FileFormatError:
            return FileFormatError(
                f"Encoded.load: {path!r} {what}; expected what Encoded.save writes ({LAYOUT})."
                " Write it again with Encoded.save."
            )

        if metadata.get("layout") != LAYOUT:
            raise broken(f"has layout {metadata.get('layout')!r}")
        try:
            fmt = _from_row(json.loads(metadata["format"]))
            shape = tuple(int(n) for n in json.loads(metadata["shape"]))
            axis, dtype, container = int(metadata["axis"]), metadata["dtype"], metadata["container"]
        except (KeyError, ValueError, TypeError, AttributeError) as error:
            raise broken(f"has damaged metadata ({error})") from error
        if not 0 <= axis < max(len(shape), 1):
            raise broken(f"has axis {axis} for shape {shape}")
        element = element_format(fmt)
        if "codes" not in tensors:
            raise broken("has no tensor 'codes'")
        try:
            codes = packing.unpack(tensors["codes"], element, shape)
        except ValueError as error:
            raise broken(f"has a wrong tensor 'codes' ({error})") from error
        block = isinstance(fmt, BlockFormat)
        want = scales_shape(fmt, shape, axis) if block else None  # type: ignore[arg-type]
        scales = tensors.get("scales")
        if (want is None) != (scales is None) or (
            scales is not None and (scales.shape != want or scales.dtype != scales_dtype(fmt))  # type: ignore[arg-type]
        ):
            got = None if scales is None else (scales.shape, str(scales.dtype))
            raise broken(f"has tensor 'scales' {got}, but the format needs shape {want}")
        tensor_scale = tensors.get(_global_name(fmt))
        needs = block and fmt.tensor_scaled  # type: ignore[union-attr]
        fits = (
            tensor_scale is not None and tensor_scale.dtype == np.float32 and not tensor_scale.shape
        )
        if needs != fits or (not needs and tensor_scale is not None):
            raise broken(f"has a wrong or missing tensor {_global_name(fmt)!r}")
        if container == "torch":
            import torch

            found = getattr(torch, dtype.removeprefix("torch."), None)
            if not isinstance(found, torch.dtype):
                raise broken(f"has dtype {dtype!r}")
            host = (codes, scales, tensor_scale)
            tensors_ = Parts(*(None if p is None else torch.from_numpy(p) for p in host))
            return cls(
                tensors_.codes,
                tensors_.scales,
                None,
                fmt,
                axis,
                found,
                global_scale=tensors_.tensor_scale,
            )
        try:
            kind = _numpy_named(dtype)
        except TypeError as error:
            raise broken(f"has dtype {dtype!r}") from error
        return cls(codes, scales, None, fmt, axis, kind, global_scale=tensor_scale)


def _global_name(fmt: Format | BlockFormat) -> str:
    """What the tensor's number is called in a file: by what it does."""
    multiplies = not isinstance(fmt, BlockFormat) or DECODE[fmt.decode].stores_factor
    return "tensor_scale" if multiplies else "global_scale"


def write_atomically(path: Path, data: bytes) -> None:
    """Write under a temporary name in the same folder, then rename: no half-written file."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(name, 0o666 & ~umask)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


def _numpy_named(name: str) -> np.dtype:
    if name == "bfloat16":
        from ml_dtypes import bfloat16

        return np.dtype(bfloat16)
    return np.dtype(name)


def _row(fmt: Format | BlockFormat) -> Any:
    """A format as JSON: its name where the table has it, else the whole row."""
    if TABLE.get(fmt.name) == fmt:
        return fmt.name
    kind = "block" if isinstance(fmt, BlockFormat) else "element"
    return {"kind": kind, **dataclasses.asdict(fmt)}


def _from_row(row: Any) -> Format | BlockFormat:
    if isinstance(row, str):
        return TABLE[row]
    fields = {key: value for key, value in row.items() if key != "kind"}
    if row["kind"] == "element":
        return Format(**fields)
    fields["element"] = Format(**fields["element"])
    fields["scale"] = None if fields["scale"] is None else Format(**fields["scale"])
    fields["block"] = None if fields["block"] is None else tuple(fields["block"])
    return BlockFormat(**fields)


def _float_or(dtype: Any, source: Any) -> Any:
    """`dtype`, or the source's where it is a float type, or float32."""
    if dtype is not None:
        return dtype
    name = str(source).removeprefix("torch.")
    return source if "float" in name else "float32"


def _host_backend() -> Any:
    from fpemu import ops

    return ops.load_host_backend(None)


def _is_torch(array: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(array, torch.Tensor)


def _numpy(array: Any) -> np.ndarray:
    return array.cpu().numpy() if _is_torch(array) else np.asarray(array)


def _like(array: np.ndarray, other: Any) -> Any:
    """`array` in the container (and on the device) of `other`."""
    if not _is_torch(other):
        return array
    return sys.modules["torch"].from_numpy(array).to(other.device)
