"""Tensors of .npy, .npz, .safetensors and .pt files, one at a time, each as it is stored."""

from __future__ import annotations

import fnmatch
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from zipfile import BadZipFile, ZipFile, is_zipfile

import numpy as np

from fpemu.errors import FileFormatError

SUFFIXES = (".npy", ".npz", ".safetensors", ".pt", ".pth")


def tensors(path: str | Path, pattern: str = "*") -> Iterator[tuple[str, Any]]:
    """Yield the tensors of a file whose names match, in the file's order.

    Parameters
    ----------
    path : str or Path
        The suffix says what the file is. A ``.npy`` file's one array is called by the file's stem;
        in a ``.pt`` file, nested names are joined by dots.
    pattern : str
        Shell-style; ``"*.weight"`` for example.

    Yields
    ------
    name : str
    tensor : numpy.ndarray or torch.Tensor
        numpy for ``.npy`` and ``.npz``, torch (CPU) otherwise. Read when its turn comes, memory
        mapped where the file allows; treat it as read-only.

    Raises
    ------
    FileNotFoundError, IsADirectoryError
    FileFormatError
        For a suffix that is not read here, and for a truncated, mislabelled or unsafe file; the
        message names the file and, where one is at fault, the tensor. Nothing is unpickled.
    """
    path = Path(path)
    readers = (_npy, _npz, _safetensors, _torch, _torch)
    reader = dict(zip(SUFFIXES, readers, strict=True)).get(path.suffix.lower())
    if reader is None:
        raise FileFormatError(
            f"tensors: {str(path)!r} has suffix {path.suffix!r}; allowed: {', '.join(SUFFIXES)}."
            " Save the tensor with numpy.save, for example."
        )
    if path.is_dir():
        raise IsADirectoryError(f"tensors: {str(path)!r} is a folder; name a file in it.")
    if not path.exists():
        raise FileNotFoundError(f"tensors: no file {str(path)!r}; check the path.")
    return reader(path, pattern)


def _broken(path: Path, what: str, error: object, tensor: str | None = None) -> FileFormatError:
    part = f", tensor {tensor!r}" if tensor else ""
    detail = " ".join(str(error).split()) or type(error).__name__
    if len(detail) > 160:  # torch.load explains itself at length
        detail = detail[:160].rsplit(" ", 1)[0] + " ..."
    return FileFormatError(
        f"tensors: {str(path)!r}{part} is not {what}, got: {detail}. It may be truncated or"
        " mislabelled; save it again."
    )


def _npy(path: Path, pattern: str) -> Iterator[tuple[str, np.ndarray]]:
    if not fnmatch.fnmatchcase(path.stem, pattern):
        return
    try:
        array = np.lib.format.open_memmap(path, mode="r") if path.stat().st_size else None
    except (ValueError, OSError, SyntaxError) as error:
        raise _broken(path, "a readable .npy array of numbers", error) from None
    if array is None:
        raise _broken(path, "a readable .npy array of numbers", "an empty file")
    _check_plain(path, path.stem, array)
    yield path.stem, np.asarray(array)


def _npz(path: Path, pattern: str) -> Iterator[tuple[str, np.ndarray]]:
    what = "a readable .npz archive"
    try:
        archive = ZipFile(path)
    except (BadZipFile, OSError) as error:
        raise _broken(path, what, error) from None
    with archive:
        for member in archive.namelist():
            name = member.removesuffix(".npy")
            if name == member:
                raise _broken(path, what, f"a zip file that holds {member!r}")
            if not fnmatch.fnmatchcase(name, pattern):
                continue
            try:
                with archive.open(member) as file:
                    array = np.lib.format.read_array(file, allow_pickle=False)
            except (BadZipFile, ValueError, OSError, EOFError, zlib.error) as error:
                raise _broken(path, "a readable .npy array of numbers", error, name) from None
            _check_plain(path, name, array)
            yield name, array


def _check_plain(path: Path, name: str, array: np.ndarray) -> None:
    if array.dtype.kind == "V" and array.dtype.names is None:
        raise FileFormatError(
            f"tensors: {str(path)!r}, tensor {name!r} holds raw bytes (dtype {array.dtype.str}); numpy"
            " files cannot say what they mean (bfloat16 and FP8 are saved so). Save it as safetensors."
        )
    if array.dtype.kind in "OSUVMm":
        raise _broken(path, "an array of numbers", f"dtype {array.dtype}", name)


def _safetensors(path: Path, pattern: str) -> Iterator[tuple[str, Any]]:
    from safetensors import SafetensorError, safe_open

    try:
        file = safe_open(path, framework="pt")  # torch: it has bfloat16, FP8, FP4 and E8M0
    except (SafetensorError, OSError) as error:
        raise _broken(path, "a readable safetensors file", error, _cut_off(path)) from None
    with file:
        for name in file.keys():  # noqa: SIM118 (it is no mapping)
            if not fnmatch.fnmatchcase(name, pattern):
                continue
            try:
                tensor = file.get_tensor(name)
            except (SafetensorError, OSError, AttributeError, RuntimeError) as error:
                raise _broken(path, "a readable safetensors file", error, name) from None
            yield name, tensor


def _cut_off(path: Path) -> str | None:
    """Name of the first tensor that ends past the end of the file, or None."""
    try:
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(size))
        data = path.stat().st_size - 8 - size
        rows = [(row["data_offsets"][1], name) for name, row in header.items() if "dtype" in row]
        return next((name for end, name in sorted(rows) if end > data), None)
    except (OSError, OverflowError, MemoryError, ValueError, KeyError, TypeError, AttributeError):
        return None  # then the header itself is at fault


def _torch(path: Path, pattern: str) -> Iterator[tuple[str, Any]]:
    from pickle import UnpicklingError

    import torch

    try:
        # weights_only: tensors and plain containers; a pickle that would run code is refused.
        loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=is_zipfile(path))
    except (UnpicklingError, RuntimeError, ValueError, KeyError, EOFError, OSError) as error:
        raise _broken(path, "a readable torch file of tensors alone", error) from None
    found = False
    for name, tensor in _flatten(path.stem, loaded):
        if isinstance(tensor, torch.Tensor):
            found = True
            if fnmatch.fnmatchcase(name, pattern):
                yield name, tensor
    if not found:
        raise _broken(path, "a torch file that holds a tensor", f"a {type(loaded).__name__}")


def _flatten(name: str, value: Any, root: bool = True) -> Iterator[tuple[str, Any]]:
    """Leaves of nested dicts, lists and tuples with dotted names; a bare tensor keeps `name`."""
    if isinstance(value, dict):
        items: Any = value.items()
    elif isinstance(value, (list, tuple)):
        items = enumerate(value)
    else:
        yield name, value
        return
    for key, item in items:
        yield from _flatten(str(key) if root else f"{name}.{key}", item, root=False)
