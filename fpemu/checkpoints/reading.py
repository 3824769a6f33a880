"""`open`: a checkpoint as a mapping of weight names to entries that read when asked."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from fpemu.checkpoints import coding
from fpemu.checkpoints.coding import Misfit, Shape
from fpemu.checkpoints.configs import Declared, read_declared, read_json
from fpemu.checkpoints.layouts import (
    LAYOUTS,
    Layout,
    convert_number,
    get_layout,
    granularity,
    stem_of,
)
from fpemu.checkpoints.storage import Stored, header, read
from fpemu.encoded import Encoded
from fpemu.errors import FileFormatError
from fpemu.formats import TABLE, BlockFormat, Format

INDEX = "model.safetensors.index.json"
#: Where a converted file remembers the numbers that its own layout cannot hold exactly.
ORIGIN = "fpemu.origin"
#: The element format of a plain tensor's dtype.
PLAIN_FORMATS = {
    "F16": "fp16", "BF16": "bf16", "F32": "fp32", "F8_E4M3": "e4m3", "F8_E5M2": "e5m2",
    "F8_E4M3FNUZ": "e4m3fnuz", "F8_E5M2FNUZ": "e5m2fnuz", "F8_E8M0": "e8m0",
}  # fmt: skip
_TORCH = {
    "BOOL": "bool", "U8": "uint8", "I8": "int8", "I16": "int16", "U16": "uint16", "F16": "float16",
    "BF16": "bfloat16", "I32": "int32", "U32": "uint32", "F32": "float32", "I64": "int64",
    "U64": "uint64", "F64": "float64", "C64": "complex64", "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2", "F8_E4M3FNUZ": "float8_e4m3fnuz", "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F8_E8M0": "float8_e8m0fnu",
}  # fmt: skip


#: Roles of the stored numbers, and the fields of a `Layout` that say what they mean.
NUMBERS = {"number": "number_kind", "input_number": "input_kind"}


@dataclass(frozen=True)
class Origin:
    """Numbers of a weight as they were stored first, and the dtype that its scales had.

    `numbers` maps a role to the number's kind and the number. `name` is the weight's first name,
    where the layout needed another.
    """

    scale_dtype: str
    numbers: Mapping[str, tuple[str, np.float32]]
    name: str | None = None

    def to_json(self) -> dict[str, Any]:
        bits = {
            role: [kind, f"0x{int(number.view(np.uint32)):08x}"]
            for role, (kind, number) in self.numbers.items()
        }
        name = {} if self.name is None else {"name": self.name}
        return {"scale_dtype": self.scale_dtype, **name, **bits}

    @classmethod
    def from_json(cls, row: dict[str, Any]) -> Origin:
        numbers = {
            role: (str(row[role][0]), np.uint32(int(row[role][1], 16)).view(np.float32))
            for role in NUMBERS
            if role in row
        }
        name = row.get("name")
        return cls(str(row["scale_dtype"]), numbers, None if name is None else str(name))


@dataclass(frozen=True, eq=False)
class Entry:
    """One weight (or any other tensor) of a checkpoint; its data is read when asked for.

    Parameters
    ----------
    name : str
        Of the plain weight: ``model.layers.0.mlp.up_proj.weight``, whatever its parts are called.
    layout : Layout or None
        None: a plain tensor.
    format : Format, BlockFormat or None
        Of the codes; None for integers and other dtypes without a format.
    shape : tuple of int
        Of the plain weight.
    dtype : str
        What `values` gives unless told otherwise: the plain tensor's own, or the model's.
    parts : dict of str to Stored
        The stored tensors by role: ``codes``, ``scales``, ``number``, ``input_number``.
    """

    name: str
    layout: Layout | None
    format: Format | BlockFormat | None
    shape: tuple[int, ...]
    dtype: str
    parts: dict[str, Stored]
    stored_shape: Shape | None = field(default=None, repr=False)
    remembered: Origin | None = field(default=None, repr=False)

    @property
    def nbytes(self) -> int:
        """Bytes of all its stored tensors."""
        return sum(part.nbytes for part in self.parts.values())

    @property
    def file(self) -> Path:
        return self.parts["codes"].file

    @property
    def global_scale(self) -> np.float32 | None:
        """The number of the whole tensor exactly as stored: it multiplies, divides, or is an amax.

        None where the layout has none.
        """
        part = self.parts.get("number")
        return None if part is None else np.float32(read(part).reshape(()))

    @property
    def tensor_scale(self) -> np.float32 | None:
        """The factor that multiplies: `global_scale` itself, or one rounding away from it."""
        number = self.global_scale
        if number is None or self.layout is None:
            return None
        return convert_number(number, self.layout.number_kind, "multiplies")

    @cached_property
    def origin(self) -> Origin | None:
        """Numbers and scale dtype as they were stored first, before any conversion by fpemu."""
        if self.layout is None or self.stored_shape is None:
            return None
        then = self.remembered
        numbers = {}
        for role, kind_of in NUMBERS.items():
            part, kind = self.parts.get(role), getattr(self.layout, kind_of)
            if part is None or part.spec[0] != "F32" or part.size != 1:
                continue
            number = np.float32(read(part).reshape(()))
            numbers[role] = kind, number
            first = None if then is None else then.numbers.get(role)
            # A note counts only while it still gives the number that is stored.
            if first is not None and _bits(convert_number(first[1], first[0], kind)) == _bits(
                number
            ):
                numbers[role] = first
        dtype = self.stored_shape.scale_dtype if then is None else then.scale_dtype
        return Origin(dtype, numbers)

    def encoded(self) -> Encoded:
        """Codes and scales as an `fpemu.Encoded` of torch tensors; a plain float's bits are codes.

        Raises
        ------
        TypeError
            For a plain tensor whose dtype is no format of the table (integers, bool, float64).
        FileFormatError
            When the file no longer holds what its header said.
        """
        import torch

        if self.format is None:
            raise TypeError(
                f"encoded: {self.name!r} is a plain {self.parts['codes'].dtype} tensor, which is no"
                " format here. Take its values()."
            )
        dtype = getattr(torch, self.dtype)
        if self.layout is None:
            bits = read(self.parts["codes"])
            bits = bits.view(f"u{bits.dtype.itemsize}")
            return Encoded(torch.from_numpy(bits), None, None, self.format, 0, dtype)
        assert self.stored_shape is not None and isinstance(self.format, BlockFormat)
        axis = self.stored_shape.axis
        codes = torch.movedim(torch.from_numpy(self.codes()), -1, axis)
        scales = self.scales()
        if granularity(self.format) == "tensor":
            return Encoded(
                codes, None, None, self.format, axis, dtype, global_scale=torch.from_numpy(scales)
            )
        number = self.global_scale
        kept = None if number is None else torch.from_numpy(np.asarray(number))
        moved = torch.movedim(torch.from_numpy(scales), -1, axis)
        return Encoded(codes, moved, None, self.format, axis, dtype, global_scale=kept)

    def values(self, dtype: Any = None) -> Any:
        """Values as a torch tensor in the plain weight's shape.

        Parameters
        ----------
        dtype : torch dtype or its name, optional
            Default `dtype`.

        Returns
        -------
        Tensor
            For a quantized weight, what the layout's library computes when it dequantizes to that
            dtype, its order of operations and roundings included.
        """
        import torch

        wanted = self.dtype if dtype is None else str(dtype).removeprefix("torch.")
        kind = getattr(torch, wanted, None)
        if not isinstance(kind, torch.dtype):
            raise TypeError(
                f"values: dtype {dtype!r} is unknown; for example 'bfloat16' or torch.float32."
            )
        if self.layout is not None:
            assert self.stored_shape is not None
            return coding.decode(
                self.layout,
                self.stored_shape,
                self.codes(),
                self.scales(),
                self.global_scale,
                kind,
            )
        part = self.parts["codes"]
        own = getattr(torch, _TORCH.get(part.dtype, ""), None)
        if own is None:
            raise TypeError(
                f"values: {self.name!r} has dtype {part.dtype}, which torch does not decode. Read"
                " its bytes with safetensors."
            )
        bits = read(part)
        if part.dtype.startswith("F8"):  # by table: torch's own casts depend on its version
            table = TABLE[PLAIN_FORMATS[part.dtype]].values().astype(np.float32)  # type: ignore[union-attr]
            return torch.from_numpy(bits).view(own) if kind == own else _cast(table[bits], kind)
        tensor = torch.from_numpy(bits).view(own)
        with coding.ieee_mode():
            return tensor if kind == own else tensor.to(kind)

    # As stored, blocks along the last axis ---------------------------------------------------

    def codes(self) -> np.ndarray:
        """uint8 codes of a quantized weight, blocks along the last axis, as its library has it."""
        assert self.layout is not None and self.stored_shape is not None
        return coding.unpack_codes(self.layout, self.stored_shape, read(self.parts["codes"]))

    def scales(self) -> np.ndarray:
        """Scales of a quantized weight in the same orientation: uint8 codes or float32."""
        assert self.layout is not None and self.stored_shape is not None
        return coding.unpack_scales(self.layout, self.stored_shape, read(self.parts["scales"]))


def _bits(number: np.float32) -> bytes:
    return np.float32(number).tobytes()


def _cast(values: np.ndarray, dtype: Any) -> Any:
    import torch

    with coding.ieee_mode():
        return torch.from_numpy(values).to(dtype)


class Checkpoint(Mapping[str, Entry]):
    """A checkpoint: names of plain weights to entries. Holds no data and no open file.

    Parameters
    ----------
    path : Path
        A safetensors file, or a folder of them.
    files : tuple of Path
    entries : dict of str to Entry
    declared : Declared
        What its configuration says.
    metadata : dict of Path to dict
        Of each file.
    """

    def __init__(
        self,
        path: Path,
        files: tuple[Path, ...],
        entries: dict[str, Entry],
        declared: Declared,
        metadata: dict[Path, dict[str, str]],
    ) -> None:
        self.path, self.files, self.declared = path, files, declared
        self.metadata = metadata
        self._entries = entries

    def __getitem__(self, name: str) -> Entry:
        return self._entries[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def nbytes(self) -> int:
        return sum(entry.nbytes for entry in self.values())

    @property
    def layouts(self) -> tuple[str, ...]:
        """Names of the layouts of its quantized weights."""
        return tuple(dict.fromkeys(e.layout.name for e in self.values() if e.layout is not None))

    def __repr__(self) -> str:
        what = ", ".join(self.layouts) or "plain"
        return f"Checkpoint({str(self.path)!r}, {len(self)} tensors, {what})"


def open_checkpoint(
    path: str | os.PathLike[str], *, layout: str | Layout | None = None
) -> Checkpoint:
    """Open a checkpoint: headers are read and checked, weights are not.

    Parameters
    ----------
    path : str or path
        A ``.safetensors`` file, or a folder with one, with several, or with an index of shards.
    layout : str or Layout, optional
        Of its quantized weights. Default: what ``quantization_config`` declares; without one, what
        the tensors' names, dtypes and shapes fit (FP8 by tensor: ``modelopt-fp8``).

    Returns
    -------
    Checkpoint
        A mapping of weight names to `Entry`.

    Raises
    ------
    FileNotFoundError
    FileFormatError
        When a file is truncated, a tensor is missing or has not the dtype or shape that its layout
        needs, or the configuration declares what is not read here; names tensor and file.

    Examples
    --------
    >>> import fpemu, torch, tempfile
    >>> from safetensors.torch import save_file
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save_file({"up.weight": torch.ones(2, 32)}, f"{folder}/model.safetensors")
    ...     _ = fpemu.checkpoints.convert(folder, f"{folder}/small", fmt="nvfp4")
    ...     fpemu.checkpoints.open(f"{folder}/small")["up.weight"].encoded().scales.tolist()
    [[126, 126], [126, 126]]
    """
    path = Path(path)
    files, mapped = _files(path)
    folder = path if path.is_dir() else path.parent
    found: dict[str, Stored] = {}
    metadata = {}
    for file in files:
        tensors, metadata[file] = header(file)
        for name, tensor in tensors.items():
            if name in found:
                raise tensor.broken(f"is also in {str(found[name].file)!r}; keep one of them.")
            found[name] = tensor
    if mapped is not None:
        _check_index(folder / INDEX, mapped, found)
    merged = {key: value for of_file in metadata.values() for key, value in of_file.items()}
    inside = {} if path.is_dir() else merged  # a lone file may bring its own configuration
    if layout is None:
        declared = read_declared(folder, inside)
        candidates, certain = declared.layouts, declared.layouts is not None
    else:
        candidates, certain = (get_layout(layout, "open"),), True
        try:
            declared = read_declared(folder, inside)
        except FileFormatError:  # the caller knows better
            declared = Declared()
    rows = tuple(LAYOUTS.values()) if candidates is None else candidates
    entries = _Matcher(found, rows, certain, declared, _origins(metadata)).entries()
    return Checkpoint(path, files, entries, declared, metadata)


def _files(path: Path) -> tuple[tuple[Path, ...], dict[str, str] | None]:
    """The files of a checkpoint, and its index's map of tensors to files where it has one."""
    if not path.exists():
        raise FileNotFoundError(f"checkpoints: no file or folder {str(path)!r}; check the path.")
    if not path.is_dir():
        if path.suffix != ".safetensors":
            raise FileFormatError(
                f"checkpoints: {str(path)!r} is no .safetensors file; other files are not read as"
                " checkpoints. Save it with safetensors."
            )
        return (path,), None
    if (path / INDEX).is_file():
        mapped = read_json(path / INDEX).get("weight_map")
        if not isinstance(mapped, dict) or not all(isinstance(f, str) for f in mapped.values()):
            raise FileFormatError(
                f"checkpoints: {str(path / INDEX)!r} has no 'weight_map' of tensors to files."
            )
        names = sorted(set(mapped.values()))
        for name in names:
            if Path(name).name != name or not (path / name).is_file():
                tensor = next(t for t, f in mapped.items() if f == name)
                raise FileFormatError(
                    f"checkpoints: {str(path / INDEX)!r} puts tensor {tensor!r} into {name!r}, which is not in"
                    " that folder. Fetch the missing shard."
                )
        return tuple(path / name for name in names), mapped
    files = tuple(sorted(path.glob("*.safetensors")))
    if not files:
        raise FileFormatError(
            f"checkpoints: {str(path)!r} holds no .safetensors file; check the path."
        )
    return files, None


def _check_index(index: Path, mapped: dict[str, str], found: dict[str, Stored]) -> None:
    for name, file in mapped.items():
        if name not in found or found[name].file.name != file:
            raise FileFormatError(
                f"checkpoints: {str(index)!r} puts tensor {name!r} into {file!r}, which does not have it."
                " The index and the files belong to different checkpoints; fetch both again."
            )
    for name, tensor in found.items():
        if name not in mapped:
            raise tensor.broken(f"is not in {str(index)!r}; fetch both again.")


def _origins(metadata: dict[Path, dict[str, str]]) -> dict[str, Origin]:
    """What a conversion by fpemu wrote down; damaged notes are no notes."""
    found = {}
    for of_file in metadata.values():
        try:
            rows = json.loads(of_file.get(ORIGIN, "{}"))
            found.update({name: Origin.from_json(row) for name, row in rows.items()})
        except (ValueError, KeyError, TypeError, AttributeError, IndexError):
            continue
    return found


# Which tensors make a weight ---------------------------------------------------------------------

_ROLES = ("scales", "number", "input_number")


class _Matcher:
    """Groups stored tensors into entries.

    `certain` says that the rows come from a declaration: then a tensor that looks quantized and
    fits none of them is an error. Without one, tensors are quantized only if some row fits them.
    """

    def __init__(
        self,
        found: dict[str, Stored],
        rows: tuple[Layout, ...],
        certain: bool,
        declared: Declared,
        origins: dict[str, Origin],
    ) -> None:
        self.found, self.rows, self.certain = found, rows, certain
        self.declared, self.origins = declared, origins

    def entries(self) -> dict[str, Entry]:
        taken: dict[str, Entry] = {}
        for name, tensor in self.found.items():
            entry = self._match(name, tensor)
            if entry is None:
                continue
            for part in entry.parts.values():
                if part.name in taken:
                    raise part.broken(
                        f"belongs to both {taken[part.name].name!r} and {entry.name!r}; open it with"
                        " layout= to say which."
                    )
                taken[part.name] = entry
        self._check_orphans(taken)
        result: dict[str, Entry] = {}
        for name, tensor in self.found.items():
            entry = taken.get(name) or self._plain(tensor)
            other = result.get(entry.name)
            if other is not None and other is not entry:
                raise tensor.broken(
                    f"gives weight {entry.name!r} a second time: it is also stored as"
                    f" {other.parts['codes'].name!r} of {str(other.file)!r}. Remove one of them."
                )
            result[entry.name] = entry
        return result

    def _match(self, name: str, tensor: Stored) -> Entry | None:
        """The quantized weight whose codes this tensor is, or None for other tensors."""
        if self.certain and f"{name}_weight_scale" in self.found:
            raise tensor.broken(
                "is a stack of experts with a scale for each, as ModelOpt stores them; such stacks"
                " are not read here. Export one weight for each expert."
            )
        wrong: tuple[Layout, str] | None = None
        for row in self.rows:
            stem = row.stem(name)
            if stem is None:
                continue
            parts = {"codes": tensor}
            for role in _ROLES:
                end = getattr(row, role)
                part = self.found.get(stem + end) if end else None
                if part is not None:
                    parts[role] = part
            complaint = self._missing(row, stem, parts)
            if complaint is None:
                try:
                    shape = coding.shape_of(row, parts, self.declared.block)
                except Misfit as misfit:
                    complaint = str(misfit)
                else:
                    return self._quantized(row, stem, parts, shape)
            if wrong is None and self._looks_quantized(row, parts):
                wrong = row, complaint
        if wrong is None:
            return None
        row, complaint = wrong
        source = f" that {self.declared.file!r} declares" if self.certain else ""
        raise tensor.broken(
            f"does not fit layout {row.name}{source}: {complaint}. The file is mislabelled or"
            " incomplete; name another layout= or fetch it again."
        )

    def _missing(self, row: Layout, stem: str, parts: dict[str, Stored]) -> str | None:
        for role in ("scales", "number"):
            end = getattr(row, role)
            if end and role not in parts:
                return f"there is no {stem + end!r}"
        return None

    def _looks_quantized(self, row: Layout, parts: dict[str, Stored]) -> bool:
        """Whether codes that fit no row are a fault rather than a tensor of another kind."""
        distinct = row.codes != row.plain
        coded = parts["codes"].dtype in row.code_dtypes
        if self.certain:
            # The word "weight" is everyone's; FP8 and uint8 weights are quantized ones here.
            return coded or distinct or "scales" in parts
        return coded and (distinct or "scales" in parts)

    def _quantized(self, row: Layout, stem: str, parts: dict[str, Stored], shape: Shape) -> Entry:
        origin = self.origins.get(row.plain_name(stem))
        name = None if origin is None else origin.name
        return Entry(
            name or row.plain_name(stem),
            row,
            shape.format,
            shape.plain,
            self.declared.dtype,
            parts,
            shape,
            origin,
        )

    def _plain(self, tensor: Stored) -> Entry:
        fmt = TABLE.get(PLAIN_FORMATS.get(tensor.dtype, ""))
        dtype = _TORCH.get(tensor.dtype, tensor.dtype)
        return Entry(tensor.name, None, fmt, tensor.shape, dtype, {"codes": tensor})

    def _check_orphans(self, taken: dict[str, Entry]) -> None:
        """Scales whose codes are missing: an incomplete file."""
        used = {entry.layout.name for entry in taken.values() if entry.layout is not None}
        for row in self.rows:
            if not (self.certain or row.name in used):
                continue
            for name, tensor in self.found.items():
                if name in taken:
                    continue
                for end in (row.scales, row.number):
                    stem = None if end is None else stem_of(name, end)
                    if stem is not None and stem + row.codes not in self.found:
                        raise tensor.broken(
                            f"is a scale of layout {row.name}, but there is no {stem + row.codes!r}."
                            " The checkpoint is incomplete; fetch it again."
                        )


def zero_code_share(entry: Entry) -> float | None:
    """Share of codes that are +0 or -0; None where the tensor has no format."""
    if entry.format is None:
        return None
    codes = entry.codes() if entry.layout is not None else entry.encoded().codes.numpy()
    element = entry.format.element if isinstance(entry.format, BlockFormat) else entry.format
    if not codes.size or not element.has_zero:
        return 0.0
    zeros = np.count_nonzero(codes == 0)
    if element.has_negative_zero:
        zeros += np.count_nonzero(codes == element.sign_bit)
    return zeros / codes.size


def saturated_scale_share(entry: Entry) -> float | None:
    """Share of block scales at their format's largest finite value or NaN; None for float32 ones."""
    if entry.layout is None or not isinstance(entry.format, BlockFormat):
        return None
    scale = entry.format.scale
    if scale is None or scale.bits > 8:
        return None
    scales = entry.scales()
    if not scales.size:
        return 0.0
    magnitude = scales & ~np.uint8(scale.sign_bit)
    return np.count_nonzero(magnitude >= scale.max_mag) / scales.size
