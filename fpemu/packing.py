"""Bytes as stored: packed codes, and the scale layout that block-scaled GEMMs read.

Sources: OCP MX 1.0 and PTX (FP4: two per byte, even index in the low nibble); CUTLASS
"Blackwell functionality" and cuBLAS block scaling (128x4 scale tiles).
"""

from __future__ import annotations

import numpy as np

from fpemu.errors import FileFormatError
from fpemu.formats import Format

#: A scale tile: 128 rows by 4 scales, 512 bytes.
TILE_ROWS, TILE_COLS = 128, 4


def pack(codes: np.ndarray, fmt: Format) -> np.ndarray:
    """Codes as bytes, last axis growing or shrinking.

    Formats of at most 4 bits go two per byte, the even index in the low nibble (an odd last one
    leaves the high nibble 0). Five to eight bits take a byte each, wider codes little-endian bytes.

    Returns
    -------
    ndarray of uint8
    """
    codes = np.ascontiguousarray(codes)
    if not codes.ndim:
        codes = codes.reshape(1)
    if fmt.bits <= 4:
        if codes.shape[-1] % 2:
            codes = np.concatenate([codes, np.zeros_like(codes[..., :1])], axis=-1)
        return codes[..., 0::2] | codes[..., 1::2] << 4
    if codes.dtype == np.uint8:
        return codes
    return codes.astype(codes.dtype.newbyteorder("<")).view(np.uint8)


def packed_shape(shape: tuple[int, ...], fmt: Format) -> tuple[int, ...]:
    """Shape of ``pack(codes)`` for codes of a shape."""
    *rest, last = shape or (1,)
    size = (last + 1) // 2 if fmt.bits <= 4 else last * fmt.code_dtype.itemsize
    return (*rest, size)


def unpack(data: np.ndarray, fmt: Format, shape: tuple[int, ...]) -> np.ndarray:
    """Codes of the given shape from `pack`'s bytes.

    Raises
    ------
    ValueError
        When the bytes do not have the shape that `shape` packs to.
    """
    want = packed_shape(shape, fmt)
    if data.dtype != np.uint8 or data.shape != want:
        raise ValueError(
            f"unpack: data has dtype {data.dtype} and shape {data.shape}; {fmt.name!r} codes of"
            f" shape {shape} are uint8 bytes of shape {want}. Check the shape."
        )
    if fmt.bits <= 4:
        codes = np.empty((*data.shape[:-1], data.shape[-1] * 2), np.uint8)
        codes[..., 0::2], codes[..., 1::2] = data & 0xF, data >> 4
        return np.ascontiguousarray(codes[..., : (shape or (1,))[-1]]).reshape(shape)
    wide = fmt.code_dtype.newbyteorder("<")
    return np.ascontiguousarray(data).view(wide).astype(fmt.code_dtype).reshape(shape)


def swizzle(scales: np.ndarray) -> np.ndarray:
    """Scales (rows, blocks along K) in the 128x4 layout, zero-padded to whole tiles.

    Scale (m, k) lies at ``((m//128) * ceil(K/4) + k//4) * 512 + m%32 * 16 + m%128//32 * 4 + k%4``.

    Parameters
    ----------
    scales : ndarray of uint8, shape (M, K)

    Returns
    -------
    ndarray of uint8, shape (ceil(M/128) * ceil(K/4) * 512,)
    """
    rows, cols = scales.shape
    tiles_m, tiles_k = -(-rows // TILE_ROWS), -(-cols // TILE_COLS)
    padded = np.zeros((tiles_m * TILE_ROWS, tiles_k * TILE_COLS), np.uint8)
    padded[:rows, :cols] = scales
    tiles = padded.reshape(tiles_m, 4, 32, tiles_k, TILE_COLS)
    return np.ascontiguousarray(tiles.transpose(0, 3, 2, 1, 4)).reshape(-1)


def unswizzle(data: np.ndarray, rows: int, cols: int) -> np.ndarray:
    """The (rows, cols) scales of `swizzle`'s bytes.

    Raises
    ------
    FileFormatError
        When there are not as many bytes as whole tiles need.
    """
    tiles_m, tiles_k = -(-rows // TILE_ROWS), -(-cols // TILE_COLS)
    if data.size != tiles_m * tiles_k * TILE_ROWS * TILE_COLS:
        raise FileFormatError(
            f"unswizzle: {data.size} bytes for scales of shape ({rows}, {cols}); 128x4 tiles make"
            f" {tiles_m * tiles_k * TILE_ROWS * TILE_COLS}. Check rows and cols."
        )
    tiles = data.reshape(tiles_m, tiles_k, 32, 4, TILE_COLS).transpose(0, 3, 2, 1, 4)
    padded = tiles.reshape(tiles_m * TILE_ROWS, tiles_k * TILE_COLS)
    return np.ascontiguousarray(padded[:rows, :cols])
