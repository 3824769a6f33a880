"""How libraries build a GEMM out of a unit's blocks, as rows of a table.

A recipe says where partial sums start afresh (promotion, split-K), where scales come in, and what
the epilogue does. Everything outside the unit is float32, each operation rounded to nearest even,
in the order that `run` shows.

Sources: cuBLASLt as measured by mmaemu 0.1.0 on H100 and RTX 4060 (tensor-wise FP8, split-K,
epilogue); DeepGEMM 54e2261 and CUTLASS `fp8_accumulation.hpp` (promotion; read, not run).
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import numpy as np

from fpemu.errors import unknown
from fpemu.gemm.request import Operand, Request
from fpemu.gemm.tensors import like, take
from fpemu.gemm.units import Unit

OUTPUTS = ("fp32", "fp16", "bf16", "e4m3", "e5m2")
BLOCK = 128  # K per promotion and per float32 block scale, in every library here


@dataclass(frozen=True)
class Recipe:
    """One way to build a GEMM.

    Parameters
    ----------
    name : str
    units : tuple of str
        Shell-style patterns of the units that it is built on.
    scaling : {"tensor", "rows", "blocks"}
        ``tensor``: acc * fl(scale_a * scale_b). ``rows``: scale_a[M] * fl(scale_b[N] * acc).
        ``blocks``: every promoted partial sum is multiplied by fl(scale_a * scale_b) of its 128 of
        K, in the fused multiply-add that promotes it.
    period : int
        Length of K after which the partial sum, started from +0, is added to the float32
        accumulator; 0: never.
    tile, split : int, {"runs", "modulo"}
        Split-K: K is cut in tiles, and split s takes a contiguous run of them, or the tiles t with
        t mod splits = s. Partial results are added in float32 in order.
    pairwise : bool
        Whether partial results of splits are added as neighbours instead.
    evidence, source : str
    """

    name: str
    units: tuple[str, ...]
    scaling: Literal["tensor", "rows", "blocks"] = "tensor"
    period: int = 0
    tile: int = BLOCK
    split: Literal["runs", "modulo"] = "runs"
    pairwise: bool = False
    evidence: str = "model"
    source: str = "user"

    def check_unit(self, unit: Unit) -> None:
        if not any(fnmatch.fnmatchcase(unit.name, pattern) for pattern in self.units):
            raise ValueError(
                f"matmul: recipe {self.name!r} is built on {' or '.join(self.units)}, got unit"
                f" {unit.name!r}. Choose one of those units, or recipe='scaled'."
            )
        if self.period % unit.L or (self.period and unit.order != "chain"):
            raise ValueError(
                f"matmul: recipe {self.name!r} promotes every {self.period} of K, and unit"
                f" {unit.name!r} takes {unit.L} in a step of its own order. Choose another unit."
            )


_FP8 = ("hopper.wgmma.e[45]m[23]*",)
_ADA = ("ada.qmma.*",)
_MEASURED = "mmaemu 0.1.0 (measured: H100 PCIe, cuBLASLt 12.8)"

_ROWS = (
    Recipe("scaled", ("*",), source="acc * fl(scale_a * scale_b), what a tensor-wise epilogue does"),
    Recipe("cublaslt.fp8_fast", _FP8, source=_MEASURED),
    Recipe("cublaslt.fp8_slow", _FP8, period=BLOCK, source=_MEASURED),
    Recipe("cublaslt.ada_fp8", _ADA, tile=64, split="modulo", source="mmaemu 0.1.0 (RTX 4060)"),
    Recipe("cublaslt.ada_fp8_pairwise", _ADA, tile=64, split="modulo", pairwise=True,
           source="mmaemu 0.1.0 (RTX 4060)"),
    Recipe("cublaslt.nvfp4", ("*.nvfp4",), source="PyTorch scaled_mm: block and tensor scales"),
    Recipe("cutlass.fp8_promoted", _FP8, period=BLOCK, source="CUTLASS GmmaFP8Accumulation, FADD"),
    Recipe("cutlass.fp8_rows", ("*.e[45]m[23]*",), "rows", source="CUTLASS row-wise scaling; order not checked"),
    Recipe("cutlass.fp8_blocks", _FP8, "blocks", period=BLOCK, source="CUTLASS GmmaFP8Accumulation, FFMA"),
    Recipe("deepgemm.1d2d", _FP8, "blocks", period=BLOCK, source="DeepGEMM 54e2261, a 1x128, b 128x128"),
    Recipe("deepgemm.1d1d", _FP8, "blocks", period=BLOCK, source="DeepGEMM 54e2261, a 1x128, b 1x128"),
)  # fmt: skip

RECIPES: dict[str, Recipe] = {row.name: row for row in _ROWS}
SCALED = RECIPES["scaled"]


def get_recipe(name: str | Recipe, where: str = "get_recipe") -> Recipe:
    """The row called `name`; a `Recipe` is returned as it is."""
    if isinstance(name, Recipe):
        return name
    if name not in RECIPES:
        raise unknown(where, "recipe", name, RECIPES)
    return RECIPES[name]


def list_recipes(pattern: str = "*") -> list[str]:
    """Names of the recipes that match a shell-style pattern.

    Examples
    --------
    >>> from fpemu.gemm import list_recipes
    >>> list_recipes("deepgemm*")
    ['deepgemm.1d2d', 'deepgemm.1d1d']
    """
    return [name for name in RECIPES if fnmatch.fnmatchcase(name, pattern)]


# Running -------------------------------------------------------------------------------------------


class Given(NamedTuple):
    """An operand's scales: the argument, and the Encoded (or None) that may carry them."""

    scale: Any
    encoded: Any


def run(
    recipe: Recipe,
    request: Request,
    product: Callable[[Request], Any],
    lead: tuple[int, ...],
    given: list[Given],
    bias: np.ndarray | None,
    scale_result: np.ndarray | None,
    split_k: int,
    out: str,
) -> np.ndarray:
    """The recipe's result, float32 values [matrices, M, N].

    Parameters
    ----------
    request : Request
        The bare product, float32 output.
    product : callable
        Computes a `Request`.
    """
    rows, cols = request.c.shape[1:]
    a, b = (_scale(recipe, g, name) for g, name in zip(given, "ab", strict=True))
    if recipe.scaling == "blocks":
        periods = -(-request.depth // BLOCK)
        request = replace(
            request, period=recipe.period,
            factor_a=_block_factors(a, "a", len(request.a.values), rows, periods, -2),
            factor_b=_block_factors(b, "b", len(request.b.values), cols, periods, -1),
        )  # fmt: skip
    acc = _splits(recipe, replace(request, period=recipe.period), product, split_k)
    if recipe.scaling == "rows":
        column = like(_factor(b, "scale_b", cols).reshape(1, -1), acc)
        y = like(_factor(a, "scale_a", rows).reshape(-1, 1), acc) * (column * acc)
    elif recipe.scaling == "tensor":
        alpha = _factor(a, "scale_a", 1) * _factor(b, "scale_b", 1)
        y = acc * like(alpha, acc)
    else:
        y = acc
    y = y + 0.0  # -0 becomes +0
    if bias is not None:
        if bias.shape != (cols,):
            raise ValueError(
                f"matmul: bias has shape {bias.shape}; it is added to each row, so it must be"
                f" ({cols},). Leave bias out for none."
            )
        y = y + like(bias, acc)
    return _into(y, out, scale_result)


def _scale(recipe: Recipe, given: Given, name: str) -> np.ndarray | None:
    """The scales of an operand: the argument's, else what its Encoded carries."""
    encoded, own = given.encoded, None
    if encoded is not None:
        own = encoded.scales if recipe.scaling == "blocks" else encoded.tensor_scale
        own = None if own is None else np.asarray(own.cpu() if hasattr(own, "cpu") else own)
    if own is not None and given.scale is not None:
        raise ValueError(
            f"matmul: scale_{name} is given, but {name} is an Encoded with scales of its own; they"
            f" would count twice. Leave scale_{name} out."
        )
    return given.scale if own is None else own


def _factor(scale: np.ndarray | None, name: str, count: int) -> np.ndarray:
    """A scalar factor, or `count` of them."""
    if scale is None:
        return np.ones(1, np.float32)
    scale = np.asarray(scale, np.float32)
    if scale.size not in (1, count):
        raise ValueError(
            f"matmul: {name} has shape {scale.shape}; this recipe takes one factor"
            f"{f' or {count}' if count > 1 else ''}. recipe='deepgemm.1d1d' takes blocks."
        )
    return scale.reshape(-1)


def _block_factors(
    scale: np.ndarray | None, name: str, matrices: int, count: int, periods: int, repeated: int
) -> np.ndarray:
    """[matrices, M, periods] or [matrices, periods, N]; tiles of 128 rows or columns spread out."""
    if scale is None:
        raise ValueError(
            f"matmul: scale_{name} is missing; this recipe multiplies by a float32 scale per"
            f" {BLOCK} of K. Pass it, or encode {name} as 'fp8_block_e4m3'."
        )
    scale = np.asarray(scale, np.float32)
    tiles = -(-count // BLOCK)
    if scale.ndim >= 2 and scale.shape[repeated] == tiles != count:
        scale = np.repeat(scale, BLOCK, repeated)
        scale = scale[..., :count, :] if repeated == -2 else scale[..., :count]
    want = (count, periods) if repeated == -2 else (periods, count)
    if scale.shape[-2:] != want or scale.size not in (
        want[0] * want[1],
        matrices * want[0] * want[1],
    ):
        raise ValueError(
            f"matmul: scale_{name} has shape {scale.shape}; this recipe takes (..., {want[0]},"
            f" {want[1]}), or one per {BLOCK} rows and columns. Its blocks lie along K."
        )
    return np.ascontiguousarray(np.broadcast_to(scale.reshape(-1, *want), (matrices, *want)))


def _splits(
    recipe: Recipe, request: Request, product: Callable[[Request], Any], splits: int
) -> Any:
    """The accumulator: one product, or one per split of K, added in float32."""
    if not isinstance(splits, int) or splits < 1:
        raise ValueError(
            f"matmul: split_k is {splits!r}; it is the number of splits, a positive integer."
            " split_k=1 is none."
        )
    if splits == 1:
        return product(request)
    if request.a.scales is not None or request.factor_a is not None:
        raise ValueError(
            f"matmul: split_k={splits} with block scales is not modelled; nobody has measured it."
            " Leave split_k out."
        )
    depth = request.depth
    tiles = -(-depth // recipe.tile)
    if splits > tiles:
        raise ValueError(
            f"matmul: split_k is {splits}, but K={depth} has {tiles} tile(s) of {recipe.tile};"
            " at most one split per tile. Use fewer splits."
        )
    run = -(-tiles // splits)
    split_of = np.arange(tiles) // run if recipe.split == "runs" else np.arange(tiles) % splits
    parts = []
    for s in range(int(split_of.max()) + 1):
        k = np.flatnonzero(np.repeat(split_of == s, recipe.tile)[:depth])
        a, b = request.a, request.b
        parts.append(product(replace(
            request, a=replace(a, values=take(a.values, k, 2)),
            b=replace(b, values=take(b.values, k, 1)),
        )))  # fmt: skip
    while len(parts) > 1:
        if recipe.pairwise:
            odd = parts[-1:] if len(parts) % 2 else []
            parts = [x + y for x, y in zip(parts[0::2], parts[1::2], strict=False)] + odd
        else:
            parts = [parts[0] + parts[1], *parts[2:]]
    return parts[0]


def _into(y: Any, out: str, scale_result: np.ndarray | None) -> Any:
    """The float32 result rounded (a second time) into the output's format, as float32 values."""
    if out in ("e4m3", "e5m2"):
        y = y * like(_factor(scale_result, "scale_result", 1), y)
    elif scale_result is not None:
        raise ValueError(
            f"matmul: scale_result is given for out={out!r}; only an FP8 result is scaled. Leave it out."
        )
    if out == "fp32":
        return y
    from fpemu.ops import quantize

    return quantize(y, out)


__all__ = ["OUTPUTS", "Operand", "Recipe", "get_recipe", "list_recipes", "run"]
