"""Training with quantized linear layers: `convert` a model, or call `linear`.

>>> import torch, fpemu
>>> model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 8))
>>> model = fpemu.nn.convert(model, "mxfp8", verbose=False)
>>> model(torch.ones(2, 64)).shape
torch.Size([2, 8])
"""

from fpemu.nn.convert import convert
from fpemu.nn.layer import Linear, linear
from fpemu.nn.rounding import round_weights
from fpemu.recipes import RECIPES, Delayed, Gemm, Hadamard, Operand, Recipe, get_recipe

__all__ = [
    "Delayed", "Gemm", "Hadamard", "Linear", "Operand", "RECIPES", "Recipe", "convert",
    "get_recipe", "linear", "round_weights",
]  # fmt: skip
