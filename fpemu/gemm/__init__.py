"""Tensor cores to the bit: `matmul` computes as the named unit adds.

`units` has the table, `recipes` what libraries build from it, `explain` shows one dot product step
by step, `oracle` is the definition in exact arithmetic.
"""

from fpemu.gemm.api import matmul
from fpemu.gemm.explain import explain
from fpemu.gemm.recipes import Recipe, get_recipe, list_recipes
from fpemu.gemm.units import Unit, get_unit, list_units

__all__ = [
    "Recipe",
    "Unit",
    "explain",
    "get_recipe",
    "get_unit",
    "list_recipes",
    "list_units",
    "matmul",
]
