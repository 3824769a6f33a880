"""`convert`: the linear layers of a model by a recipe."""

from __future__ import annotations

import fnmatch
import math
import textwrap
from collections import Counter
from typing import Any

from torch import nn

from fpemu.nn import streams
from fpemu.nn.layer import Linear, make_plan
from fpemu.recipes import GEMMS, Recipe, get_recipe


def convert(
    model: nn.Module,
    recipe: str | Recipe,
    *,
    keep: Any = None,
    seed: int | None = None,
    amax_group: Any = None,
    verbose: bool = True,
) -> nn.Module:
    """Turn every `nn.Linear` of a model into an `fpemu.nn.Linear`, in place.

    Layers stay the same objects with the same parameters (and hooks), so an optimizer made before,
    shared layers and tied weights go on as they are. A model may be converted again, to another
    recipe: that is how a run changes its precision.

    Parameters
    ----------
    model : nn.Module
    recipe : str or Recipe
        A name of `fpemu.recipes.RECIPES`, or your own.
    keep : str, callable, tuple or list, optional
        Layers that compute by ``recipe.kept`` (BF16) instead. A shell-style pattern of their
        qualified names (``"*head*"``); a function ``(name, module) -> bool``; ``(first, last)``:
        how many at either end, an int counting layers and a float being a share of them, rounded
        up; or a list of these. Default: ``recipe.keep``; ``()`` keeps none.
    seed : int, optional
        Of stochastic rounding, for the whole model; default: drawn from torch's global generator
        (only if the recipe rounds so). Ranks that start from the same seed draw different words.
    amax_group : ProcessGroup, optional
        Ranks that hold shards of the same tensors; amaxes of tensors are their maxima.
    verbose : bool
        Print what was done, a row per layer.

    Returns
    -------
    nn.Module
        `model` itself.

    Raises
    ------
    ValueError
        When the model has no linear layer, a pattern matches none, or the recipe is unknown.

    Examples
    --------
    >>> import torch
    >>> model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8))
    >>> model = convert(model, "nvfp4", keep="2")
    layer                   fprop x, w         dgrad dy, w        wgrad dy, x
    0                       nvfp4, nvfp4/2d    nvfp4 sr, nvfp4/2d nvfp4 sr rht16,
      64 x 64 nvfp4                                               nvfp4 rht16
    2                       bf16               bf16               bf16
      8 x 64 bf16
    2 linear layers: 1 nvfp4, 1 bf16
    """
    recipe = get_recipe(recipe, "convert")
    kept = get_recipe(recipe.kept, "convert")
    make_plan(recipe), make_plan(kept)  # raises before anything is changed
    layers = {n: m for n, m in model.named_modules() if type(m) in (nn.Linear, Linear)}
    if not layers:
        raise ValueError(
            f"convert: {type(model).__name__} has no nn.Linear layer; only those are converted."
            " Use fpemu.nn.linear in your own layers."
        )
    names = kept_layers(layers, recipe.keep if keep is None else keep)
    if seed is None and make_plan(recipe).draws:
        seed = streams.draw_seed()
    for index, (name, layer) in enumerate(layers.items()):
        layer.__class__ = Linear
        layer.set_recipe(
            kept if name in names else recipe, seed=seed, index=index, amax_group=amax_group
        )
    if verbose:
        print("\n".join(_report(model, layers)))
    return model


def kept_layers(layers: dict[str, Any], keep: Any) -> set[str]:
    """Names of the layers that `keep` chooses."""
    if isinstance(keep, list):
        return set().union(*(kept_layers(layers, item) for item in keep))
    names = list(layers)
    if isinstance(keep, str):
        found = set(fnmatch.filter(names, keep))
        if not found:
            raise ValueError(
                f"convert: keep={keep!r} matches none of the {len(names)} linear layers, for example"
                f" {names[0]!r}; patterns are shell-style and match whole names. Try '*{keep}*'."
            )
        return found
    if callable(keep):
        return {name for name, module in layers.items() if keep(name, module)}
    if keep == ():
        return set()
    if isinstance(keep, tuple) and len(keep) == 2:
        first, last = (_count(n, len(names)) for n in keep)
        return {*names[:first], *names[len(names) - last :]}
    raise TypeError(
        f"convert: keep must be a pattern, a function, (first, last) or a list of these, got"
        f" {keep!r}. For example keep=['*head*', (1, 2)]."
    )


def _count(number: Any, total: int) -> int:
    """How many of `total` layers a count or a share is."""
    if isinstance(number, float) and 0 <= number <= 1:
        return math.ceil(number * total)
    if isinstance(number, int) and not isinstance(number, bool) and number >= 0:
        return min(number, total)
    raise ValueError(
        f"convert: keep=(first, last) has {number!r}; allowed are counts (0 or more) and shares (0.0"
        " to 1.0). For example keep=(1, 2)."
    )


# What was done -----------------------------------------------------------------------------------

_NAME, _CELL = 23, 18  # columns: 23 + 3 * (1 + 18) = 80


def _report(model: nn.Module, layers: dict[str, Any]) -> list[str]:
    """A row per linear layer, of two lines or more, at most 80 columns wide."""
    heads = [f"{gemm} {', '.join(tensors)}" for gemm, tensors in GEMMS.items()]
    rows = [_row(["layer"], *([head] for head in heads))]
    for name, layer in layers.items():
        recipe = layer.recipe
        cells = []
        for gemm in GEMMS:
            a, b = getattr(recipe, gemm).a, getattr(recipe, gemm).b
            cells.append(textwrap.wrap(f"{a}" if a == b else f"{a}, {b}", _CELL))
        shape = f"  {layer.out_features} x {layer.in_features} {recipe.name}"
        rows.append(_row([_short(name or "(model)"), _short(shape)], *cells))
    other = {
        name: type(m).__name__
        for name, m in model.named_modules()
        if isinstance(m, nn.Linear) and name not in layers
    }
    rows += [
        f"{_short(name)} left as it is ({kind}, not nn.Linear)" for name, kind in other.items()
    ]
    counts = Counter(layer.recipe.name for layer in layers.values())
    total = ", ".join(f"{n} {name}" for name, n in counts.items())
    return [*rows, f"{len(layers)} linear layer{'s' * (len(layers) != 1)}: {total}"]


def _short(name: str) -> str:
    return name if len(name) <= _NAME else f"..{name[2 - _NAME :]}"


def _row(*cells: list[str]) -> str:
    widths = (_NAME, *(_CELL,) * (len(cells) - 1))
    lines = []
    for k in range(max(map(len, cells))):
        texts = (cell[k] if k < len(cell) else "" for cell in cells)
        lines.append(" ".join(f"{t:{w}}" for t, w in zip(texts, widths, strict=True)).rstrip())
    return "\n".join(lines)
