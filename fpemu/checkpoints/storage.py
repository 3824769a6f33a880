"""safetensors files: headers checked to the byte, tensors read one at a time, files filled in place.

The safetensors package reads a file as a whole or maps it; it writes a file from tensors that are
all in memory. A checkpoint is larger than memory, so here a file's header is written first, from
dtypes and shapes alone, and each tensor's bytes go to their place when they are ready.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from fpemu.errors import FileFormatError

#: Bits of an element of each dtype that a safetensors header may name.
BITS = {
    "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
    "I16": 16, "U16": 16, "F16": 16, "BF16": 16, "I32": 32, "U32": 32, "F32": 32,
    "I64": 64, "U64": 64, "F64": 64, "C64": 64,
}  # fmt: skip
#: numpy dtypes of those that numpy has; the others are read as unsigned integers of their width.
_NUMPY = {
    "I8": np.int8, "I16": np.int16, "U16": np.uint16, "F16": np.float16, "BF16": np.uint16,
    "I32": np.int32, "U32": np.uint32, "F32": np.float32, "I64": np.int64, "U64": np.uint64,
    "F64": np.float64, "C64": np.complex64,
}  # fmt: skip
#: Longest header that is believed, the safetensors package's own limit.
_LONGEST_HEADER = 100_000_000


@dataclass(frozen=True)
class Stored:
    """Where a tensor lies: file, name, dtype as the header names it, shape, and bytes."""

    file: Path
    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int

    @property
    def size(self) -> int:
        return prod(self.shape)

    @property
    def spec(self) -> tuple[str, tuple[int, ...]]:
        return self.dtype, self.shape

    def broken(self, what: str) -> FileFormatError:
        return FileFormatError(f"checkpoints: tensor {self.name!r} of {str(self.file)!r} {what}")


def byte_count(dtype: str, shape: tuple[int, ...]) -> int:
    return -(-prod(shape) * BITS[dtype] // 8)


def header(path: Path) -> tuple[dict[str, Stored], dict[str, str]]:
    """Tensors and metadata of a file; its tensors' bytes are not read.

    Raises
    ------
    FileFormatError
        When the file is truncated or its header is inconsistent; names the tensor.
    """

    def broken(what: str) -> FileFormatError:
        return FileFormatError(
            f"checkpoints: {str(path)!r} {what}; it may be truncated or no safetensors file. Copy it again."
        )

    with path.open("rb") as file:
        start = file.read(8)
        length = int.from_bytes(start, "little")
        if len(start) < 8 or length > _LONGEST_HEADER:
            raise broken("has no safetensors header")
        text = file.read(length)
        end = file.seek(0, os.SEEK_END) - 8 - length
    if len(text) < length:
        raise broken(f"ends in its header, after {len(text)} of {length} bytes")
    try:
        rows = json.loads(text, object_pairs_hook=_no_duplicates)
        metadata = rows.pop("__metadata__", {})
        metadata = {str(key): str(value) for key, value in metadata.items()}
        tensors = {name: _stored(path, name, row, 8 + length) for name, row in rows.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        if isinstance(error, FileFormatError):
            raise
        raise broken(f"has a damaged header ({error})") from None
    at = 0
    for tensor in sorted(tensors.values(), key=lambda t: (t.offset, t.nbytes)):
        if tensor.offset - 8 - length != at:
            raise tensor.broken(
                f"starts at byte {tensor.offset - 8 - length} of the data, not {at}."
            )
        at += tensor.nbytes
        if at > end:
            raise tensor.broken(
                f"ends at byte {at} of the data, of which there are {end}; the file is truncated."
                " Copy it again."
            )
    if at != end:
        raise broken(f"has {end - at} bytes after its last tensor")
    return tensors, metadata


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    twice = [key for key, n in Counter(key for key, _ in pairs).items() if n > 1]
    if twice:
        raise ValueError(f"it names {twice[0]!r} twice")
    return dict(pairs)


def _stored(path: Path, name: str, row: Any, data: int) -> Stored:
    dtype, shape, (begin, end) = row["dtype"], tuple(row["shape"]), row["data_offsets"]
    whole = all(type(n) is int and n >= 0 for n in (*shape, begin, end))
    tensor = Stored(path, name, dtype, shape, data + begin, end - begin)
    if dtype not in BITS:
        raise tensor.broken(f"has dtype {dtype!r}, which is unknown; known: {', '.join(BITS)}.")
    if not whole or tensor.nbytes != byte_count(dtype, shape):
        raise tensor.broken(
            f"has {end - begin} bytes, but {dtype} of shape {shape} needs"
            f" {byte_count(dtype, shape) if whole else 'whole numbers'}; the header is inconsistent."
        )
    return tensor


def read(tensor: Stored) -> np.ndarray:
    """A tensor's data: numpy's dtype where there is one, else its bits as unsigned integers.

    F4 and F6, which are packed, come as a flat array of bytes.
    """
    count = tensor.nbytes
    dtype = np.dtype(_NUMPY.get(tensor.dtype, np.uint8)).newbyteorder("<")
    with tensor.file.open("rb") as file:
        file.seek(tensor.offset)
        data = np.fromfile(file, dtype, count // dtype.itemsize)
    if data.nbytes != count:
        raise tensor.broken(f"gave {data.nbytes} of {count} bytes; the file has changed or is cut.")
    data = data.astype(dtype.newbyteorder("="), copy=False)
    return data if BITS[tensor.dtype] < 8 else data.reshape(tensor.shape)


class Writer:
    """A file whose tensors are written one at a time, in any order.

    Parameters
    ----------
    path : Path
    planned : mapping of name to (dtype, shape)
    metadata : dict of str
    """

    def __init__(
        self,
        path: Path,
        planned: Mapping[str, tuple[str, tuple[int, ...]]],
        metadata: dict[str, str],
    ) -> None:
        rows: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
        at = 0
        # Wide dtypes first, as the safetensors package does: every tensor is then aligned.
        for name in sorted(planned, key=lambda n: (-BITS[planned[n][0]], n)):
            dtype, shape = planned[name]
            size = byte_count(dtype, shape)
            rows[name] = {"dtype": dtype, "shape": shape, "data_offsets": (at, at + size)}
            at += size
        text = json.dumps(rows, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        self._rows, self._data = rows, 8 + len(text)
        self._left = set(planned)
        self._file = path.open("wb")
        self._file.write(len(text).to_bytes(8, "little") + text)
        self._file.truncate(self._data + at)

    def write(self, name: str, data: np.ndarray) -> None:
        begin, end = self._rows[name]["data_offsets"]
        if data.nbytes != end - begin:
            raise AssertionError(f"{name}: {data.nbytes} bytes for {self._rows[name]}")
        self._file.seek(self._data + begin)
        little = np.ascontiguousarray(data, data.dtype.newbyteorder("<"))
        self._file.write(little.reshape(-1).view(np.uint8).data)
        self._left.discard(name)

    def __enter__(self) -> Writer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._file.close()
        if kind is None and self._left:
            raise AssertionError(f"never written: {sorted(self._left)}")
