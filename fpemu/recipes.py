"""Training recipes as data: which format each operand of each GEMM of a linear layer has.

A linear layer trains with three matrix products (tokens x in and out features)::

    fprop   Y  = X  W^T     contracts in features
    dgrad   dX = dY W       contracts out features
    wgrad   dW = dY^T X     contracts tokens

A `Recipe` has a `Gemm` for each, a Gemm two `Operand`s. `RECIPES` has the field's recipes as rows;
another is a row more, or a row changed::

    mine = RECIPES["nvfp4"].change("*.dy", rounding="rne").without("rht")

`fpemu.nn` computes them.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from fpemu.casting import check_rounding
from fpemu.errors import unknown
from fpemu.formats import BlockFormat, Format, get_format

#: The six operands and the axis of the stored tensor that each GEMM contracts: X is (tokens, in),
#: dY is (tokens, out), W is (out, in).
OPERANDS = {
    "fprop.x": -1, "fprop.w": -1,
    "dgrad.dy": -1, "dgrad.w": 0,
    "wgrad.dy": 0, "wgrad.x": 0,
}  # fmt: skip
GEMMS = {"fprop": ("x", "w"), "dgrad": ("dy", "w"), "wgrad": ("dy", "x")}


@dataclass(frozen=True)
class Hadamard:
    """A rotation of the contracted axis by blocks, applied to both operands of a GEMM.

    Parameters
    ----------
    size : int
        A power of two; the axis is zero-padded to a multiple of it.
    signs : None, "te", int or tuple of +1 and -1
        As in `fpemu.hadamard`: none, TransformerEngine's vector (size 16), a seed, or given.
    """

    size: int = 16
    signs: Any = "te"

    def __post_init__(self) -> None:
        if not isinstance(self.signs, (str, int, type(None))):  # a recipe is a hashable value
            object.__setattr__(self, "signs", tuple(int(s) for s in self.signs))


@dataclass(frozen=True)
class Delayed:
    """TransformerEngine's delayed scaling: the tensor scale comes from amaxes of earlier steps.

    Parameters
    ----------
    history : int
        Length of the amax history.
    algo : {"max", "most_recent"}
        Scale from the largest amax of the history, or from the newest.
    margin : int
        Binades of headroom: ``scale = fl(max * 2**-margin / amax)``.
    reduce : bool
        Amaxes are maxima over all ranks, where `torch.distributed` is initialized.

    Source: TransformerEngine (d0067d0) common/recipe/delayed_scaling.cu; its defaults.
    """

    history: int = 1024
    algo: str = "max"
    margin: int = 0
    reduce: bool = True

    def __post_init__(self) -> None:
        if not (isinstance(self.history, int) and self.history >= 1):
            raise ValueError(
                f"Delayed: history must be a positive integer, got {self.history!r}; it counts the"
                " steps that are remembered. For example history=1024."
            )
        if self.algo not in ("max", "most_recent"):
            raise unknown("Delayed", "algo", self.algo, ("max", "most_recent"))
        if not (isinstance(self.margin, int) and 0 <= self.margin <= 64):
            raise ValueError(
                f"Delayed: margin must be an integer from 0 to 64, got {self.margin!r}; it is a"
                " number of binades. margin=0 is the default."
            )


@dataclass(frozen=True)
class Operand:
    """How one operand of a GEMM is quantized.

    Parameters
    ----------
    fmt : str, Format, BlockFormat or None
        None leaves the operand in float32. A name is looked up when it is first used.
    rounding : str
        Of the elements, as in `fpemu.quantize`. ``"sr"`` draws from the layer's random stream.
    transform : Hadamard, optional
        Rotates the contracted axis before quantization; both operands of a GEMM, or neither.
    scaling : Delayed, optional
        Where the scale of a format with one scale per tensor comes from; None: this tensor's own
        amax ("current scaling").
    blocks : {"contraction", "other"}
        The axis along which 1D blocks lie: the one that the GEMM contracts, as hardware needs it,
        or the other one. (2D blocks and tensor scales have no axis.)

    Examples
    --------
    >>> Operand("nvfp4", rounding="sr", transform=Hadamard())
    Operand(nvfp4 sr rht16)
    """

    fmt: str | Format | BlockFormat | None = None
    rounding: str = "rne"
    transform: Hadamard | None = None
    scaling: Delayed | None = None
    blocks: str = "contraction"

    def __post_init__(self) -> None:
        check_rounding(self.rounding, "Operand")
        if self.blocks not in ("contraction", "other"):
            raise unknown("Operand", "blocks", self.blocks, ("contraction", "other"))
        if self.fmt is None and (self.rounding != "rne" or self.scaling is not None):
            raise ValueError(
                "Operand: fmt is None, so nothing is rounded or scaled; rounding and scaling must be"
                " left out. Give a format, for example fmt='nvfp4'."
            )

    def __repr__(self) -> str:
        return f"Operand({self})"

    def __str__(self) -> str:
        if self.fmt is None:
            return "fp32" + (f" rht{self.transform.size}" if self.transform else "")
        words = [self.fmt if isinstance(self.fmt, str) else self.fmt.name]
        words += [self.rounding] if self.rounding != "rne" else []
        words += [f"rht{self.transform.size}"] if self.transform else []
        words += ["delayed"] if self.scaling else []
        words += ["other-axis"] if self.blocks == "other" else []
        return " ".join(words)


@dataclass(frozen=True)
class Gemm:
    """One matrix product of a linear layer: its operands, in the order of `GEMMS`, and its result.

    Parameters
    ----------
    a, b : Operand
    out : str, Format or None
        Element format that the result is rounded to (RNE) after accumulation, as a GEMM with 16-bit
        outputs does; None: the result goes from float32 straight into the tensor's dtype.
    """

    a: Operand = Operand()
    b: Operand = Operand()
    out: str | Format | None = None

    def __post_init__(self) -> None:
        if self.a.transform != self.b.transform:
            raise ValueError(
                f"Gemm: transforms differ, {self.a.transform!r} and {self.b.transform!r}; a rotation"
                " cancels only where both operands have it. Change both, as in"
                " recipe.change('wgrad.*', transform=Hadamard(32))."
            )


@dataclass(frozen=True)
class Recipe:
    """What `fpemu.nn` computes in a linear layer.

    Parameters
    ----------
    name : str
    fprop, dgrad, wgrad : Gemm
        ``(x, w)``, ``(dy, w)`` and ``(dy, x)``.
    keep : str, callable, tuple or list
        Layers that stay in higher precision, see `fpemu.nn.convert`.
    kept : str or Recipe
        What those layers compute in.
    unit : str, optional
        Tensor-core unit that accumulates, a full name of `fpemu.gemm.list_units` or a family such
        as ``"hopper.wgmma"`` that the operands' formats complete. None: float32 matrix products.
    weights : Operand, optional
        How weights are stored between steps, for `fpemu.nn.round_weights`. None: float32 masters.
    source : str
    """

    name: str
    fprop: Gemm = Gemm()
    dgrad: Gemm = Gemm()
    wgrad: Gemm = Gemm()
    keep: Any = ()
    kept: str | Recipe = "bf16"
    unit: str | None = None
    weights: Operand | None = None
    source: str = "user"

    # Operands by name ----------------------------------------------------------------------------

    def operand(self, name: str) -> Operand:
        """The operand called ``"wgrad.dy"``, say."""
        if name not in OPERANDS:
            raise unknown("Recipe", "operand", name, OPERANDS)
        gemm, tensor = name.split(".")
        row = getattr(self, gemm)
        return row.a if GEMMS[gemm][0] == tensor else row.b

    def operands(self) -> dict[str, Operand]:
        """All six, by name, in the order of `OPERANDS`."""
        return {name: self.operand(name) for name in OPERANDS}

    def _map(self, function: Callable[[str, Operand], Operand]) -> Recipe:
        gemms = {
            gemm: replace(
                getattr(self, gemm),
                a=function(f"{gemm}.{a}", getattr(self, gemm).a),
                b=function(f"{gemm}.{b}", getattr(self, gemm).b),
            )
            for gemm, (a, b) in GEMMS.items()
        }
        return replace(self, **gemms)

    def change(self, pattern: str, **fields: Any) -> Recipe:
        """A recipe whose operands that match a pattern have other fields.

        Parameters
        ----------
        pattern : str
            Shell-style, over ``fprop.x fprop.w dgrad.dy dgrad.w wgrad.dy wgrad.x``.
        **fields
            Of `Operand`.

        Examples
        --------
        >>> everywhere = RECIPES["nvfp4"].change("*", rounding="sr")
        >>> everywhere.fprop.a
        Operand(nvfp4 sr)
        """
        if not fnmatch.filter(OPERANDS, pattern):
            raise unknown("Recipe.change", "operand", pattern, OPERANDS)
        new = self._map(
            lambda name, row: replace(row, **fields) if fnmatch.fnmatchcase(name, pattern) else row
        )
        return replace(new, name=f"{self.name}*" if not self.name.endswith("*") else self.name)

    def without(self, *ingredients: str) -> Recipe:
        """A recipe less some of its ingredients, for ablation.

        Parameters
        ----------
        *ingredients : {"sr", "rht", "2d", "delayed", "keep", "fprop", "dgrad", "wgrad"}
            Stochastic rounding (RNE instead); rotations; 2D blocks (1D along the contraction);
            delayed scaling (current instead); the layers in higher precision; the quantization of
            one GEMM (float32 instead).

        Examples
        --------
        >>> RECIPES["nvfp4"].without("sr", "2d").name
        'nvfp4-sr-2d'
        """
        new = self
        for ingredient in ingredients:
            if ingredient not in INGREDIENTS:
                raise unknown("Recipe.without", "ingredient", ingredient, INGREDIENTS)
            new = INGREDIENTS[ingredient](new)
        return replace(new, name="-".join((self.name, *ingredients)))


# Ingredients that `without` removes ---------------------------------------------------------------


def _one_d(row: Operand) -> Operand:
    """The same format with 1D blocks: its name without ``/2d``."""
    fmt = row.fmt
    if isinstance(fmt, str) and "/2d" in fmt:
        return replace(row, fmt=fmt.replace("/2d", ""))
    if isinstance(fmt, BlockFormat) and fmt.is_2d and fmt.block is not None:
        return replace(row, fmt=replace(fmt, block=fmt.block[-1:]))
    return row


INGREDIENTS: dict[str, Callable[[Recipe], Recipe]] = {
    "sr": lambda r: r._map(
        lambda _, row: replace(row, rounding="rne") if row.rounding == "sr" else row
    ),
    "rht": lambda r: r._map(lambda _, row: replace(row, transform=None)),
    "2d": lambda r: r._map(lambda _, row: _one_d(row)),
    "delayed": lambda r: r._map(lambda _, row: replace(row, scaling=None)),
    "keep": lambda r: replace(r, keep=()),
    "fprop": lambda r: replace(r, fprop=Gemm()),
    "dgrad": lambda r: replace(r, dgrad=Gemm()),
    "wgrad": lambda r: replace(r, wgrad=Gemm()),
}


# The rows ----------------------------------------------------------------------------------------


def linear_recipe(name: str, x: Any, w: Any, dy: Any, **fields: Any) -> Recipe:
    """A recipe whose three tensors have the same `Operand` in every GEMM.

    Parameters
    ----------
    x, w, dy : Operand or format
        Activations, weights, gradients.
    **fields
        Of `Recipe`.

    Examples
    --------
    >>> linear_recipe("fp6", "mxfp6_e2m3", "mxfp6_e2m3", Operand("mxfp8_e5m2", rounding="sr")).dgrad
    Gemm(a=Operand(mxfp8_e5m2 sr), b=Operand(mxfp6_e2m3), out=None)
    """
    x, w, dy = (row if isinstance(row, Operand) else Operand(row) for row in (x, w, dy))
    return Recipe(name, Gemm(x, w), Gemm(dy, w), Gemm(dy, x), **fields)


def _half(fmt: str) -> dict[str, Any]:
    """Operands and results in a 16-bit format, as under `torch.autocast`."""
    gemm = Gemm(Operand(fmt), Operand(fmt), out=fmt)
    return {"fprop": gemm, "dgrad": gemm, "wgrad": gemm}


_DELAYED = Delayed()
_NV_WEIGHT = Operand("nvfp4/2d")
_NV_GRADIENT = Operand("nvfp4", rounding="sr")
_4OVER6 = Operand("nvfp4/te-4over6-mae-256")
#: Shares of the linear layers that NVIDIA's 12B run kept in BF16: 2 and 8 of 62 blocks.
_NV_KEEP = (2 / 62, 8 / 62)


def _rotated(row: Operand, size: int, signs: Any) -> Operand:
    return replace(row, transform=Hadamard(size, signs))


_ROWS = (
    Recipe("fp32", source="no quantization"),
    Recipe("bf16", **_half("bf16"), source="torch.autocast"),
    Recipe("fp16", **_half("fp16"), source="torch.autocast; needs loss scaling (1710.03740)"),
    linear_recipe(
        "fp8_delayed",
        Operand("fp8_tensor_e4m3", scaling=_DELAYED),
        Operand("fp8_tensor_e4m3", scaling=_DELAYED),
        Operand("fp8_tensor_e5m2", scaling=_DELAYED),
        source="TransformerEngine DelayedScaling (HYBRID)",
    ),
    linear_recipe(
        "fp8_current", "fp8_tensor_e4m3", "fp8_tensor_e4m3", "fp8_tensor_e5m2",
        source="TransformerEngine Float8CurrentScaling (HYBRID)",
    ),
    linear_recipe(
        "fp8_block", "fp8_block_e4m3", "fp8_block_e4m3/2d", "fp8_block_e4m3",
        source="TransformerEngine Float8BlockScaling; DeepSeek-V3 (2412.19437)",
    ),
    linear_recipe(
        "mxfp8", "mxfp8_e4m3/rceil", "mxfp8_e4m3/rceil", "mxfp8_e4m3/rceil",
        source="MXFP8 pretraining (2506.08027)",
    ),
    linear_recipe(
        "mxfp4", "mxfp4/rceil", "mxfp4/rceil", "mxfp4/rceil",
        source="all three GEMMs, nearest rounding, no more",
    ),
    Recipe(
        "mxfp4_sr_rht",
        Gemm(Operand("mxfp4/rceil"), Operand("mxfp4/rceil")),
        Gemm(Operand("mxfp4/rceil", rounding="sr"), Operand("mxfp4/rceil")),
        Gemm(
            _rotated(Operand("mxfp4/rceil", rounding="sr"), 32, 0),
            _rotated(Operand("mxfp4/rceil"), 32, 0),
        ),
        keep=_NV_KEEP,
        source="NVFP4's recipe with MXFP4 and rotations of 32 (2509.25149, its MXFP4 runs)",
    ),
    Recipe(
        "nvfp4",
        Gemm(Operand("nvfp4"), _NV_WEIGHT),
        Gemm(_NV_GRADIENT, _NV_WEIGHT),
        Gemm(_rotated(_NV_GRADIENT, 16, "te"), _rotated(Operand("nvfp4"), 16, "te")),
        keep=_NV_KEEP,
        source="NVIDIA's pretraining recipe (2509.25149); TransformerEngine NVFP4BlockScaling",
    ),
    Recipe(
        "nvfp4_4over6",
        Gemm(_4OVER6, _4OVER6),
        Gemm(_NV_GRADIENT, _4OVER6),
        Gemm(_NV_GRADIENT, _4OVER6),
        keep=_NV_KEEP,
        source="TransformerEngine NVFP4BlockScaling, nvfp4_4over6='all' (no rotation there), 1D",
    ),
    linear_recipe(
        "int8", "int8_tensor", "int8_tensor", Operand("int8_tensor", rounding="sr"),
        source="one symmetric scale per tensor, stochastic rounding of gradients",
    ),
    Recipe(
        "bf16_sr_weights",
        **_half("bf16"),
        weights=Operand("bf16", rounding="sr"),
        source="BF16 weights without a float32 master, updated with stochastic rounding",
    ),
)  # fmt: skip

#: The field's recipes by name.
RECIPES: dict[str, Recipe] = {row.name: row for row in _ROWS}


def get_recipe(recipe: str | Recipe, where: str = "get_recipe") -> Recipe:
    """The row called `recipe`; a `Recipe` is returned as it is.

    Raises
    ------
    ValueError
        For a name that is not in `RECIPES`, with the nearest known name.
    TypeError
        For anything that is neither a name nor a Recipe.

    Examples
    --------
    >>> get_recipe("mxfp8").wgrad.a
    Operand(mxfp8_e4m3/rceil)
    """
    if isinstance(recipe, Recipe):
        return recipe
    if isinstance(recipe, str):
        if recipe not in RECIPES:
            raise unknown(where, "recipe", recipe, RECIPES)
        return RECIPES[recipe]
    raise TypeError(
        f"{where}: recipe must be a name or an fpemu.recipes.Recipe, got {type(recipe).__name__}."
        " For example recipe='mxfp8'."
    )


def row_of(operand: Operand, where: str = "Operand") -> Format | BlockFormat | None:
    """The format of an operand as a row of the table."""
    return None if operand.fmt is None else get_format(operand.fmt, where)
