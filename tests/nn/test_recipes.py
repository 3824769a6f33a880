"""Recipes are data: rows, changes, and what `convert` says and does."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

import fpemu
from fpemu.nn import Delayed, Gemm, Hadamard, Linear, Operand, Recipe, convert
from fpemu.nn.convert import kept_layers
from fpemu.nn.layer import make_plan
from fpemu.recipes import INGREDIENTS, OPERANDS, RECIPES, get_recipe, linear_recipe

NAMES = [
    "fp32", "bf16", "fp16", "fp8_delayed", "fp8_current", "fp8_block", "mxfp8", "mxfp4",
    "mxfp4_sr_rht", "nvfp4", "nvfp4_4over6", "int8", "bf16_sr_weights",
]  # fmt: skip


def test_the_table_has_the_fields_recipes() -> None:
    assert list(RECIPES) == NAMES
    assert fpemu.recipes.RECIPES is fpemu.nn.RECIPES


#: Typed from the sources: operand -> (format, rounding, rotation size).
PUBLISHED = {
    "nvfp4": {  # arXiv 2509.25149, section 4 and appendix C
        "fprop.x": ("nvfp4", "rne", None), "fprop.w": ("nvfp4/2d", "rne", None),
        "dgrad.dy": ("nvfp4", "sr", None), "dgrad.w": ("nvfp4/2d", "rne", None),
        "wgrad.dy": ("nvfp4", "sr", 16), "wgrad.x": ("nvfp4", "rne", 16),
    },
    "fp8_block": {  # arXiv 2412.19437, section 3.3
        "fprop.x": ("fp8_block_e4m3", "rne", None), "fprop.w": ("fp8_block_e4m3/2d", "rne", None),
        "dgrad.dy": ("fp8_block_e4m3", "rne", None), "dgrad.w": ("fp8_block_e4m3/2d", "rne", None),
        "wgrad.dy": ("fp8_block_e4m3", "rne", None), "wgrad.x": ("fp8_block_e4m3", "rne", None),
    },
    "fp8_current": {  # TransformerEngine Float8CurrentScaling, Format.HYBRID
        "fprop.x": ("fp8_tensor_e4m3", "rne", None), "fprop.w": ("fp8_tensor_e4m3", "rne", None),
        "dgrad.dy": ("fp8_tensor_e5m2", "rne", None), "dgrad.w": ("fp8_tensor_e4m3", "rne", None),
        "wgrad.dy": ("fp8_tensor_e5m2", "rne", None), "wgrad.x": ("fp8_tensor_e4m3", "rne", None),
    },
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_rows_are_the_published_recipes(name: str) -> None:
    found = {
        operand: (row.fmt, row.rounding, row.transform and row.transform.size)
        for operand, row in RECIPES[name].operands().items()
    }
    assert found == PUBLISHED[name]


def test_delayed_defaults_are_transformer_engines() -> None:
    row = RECIPES["fp8_delayed"].operand("wgrad.dy")
    assert row == Operand("fp8_tensor_e5m2", scaling=Delayed(1024, "max", 0, True))


def test_every_ingredient_can_be_left_out() -> None:
    nvfp4 = RECIPES["nvfp4"]
    assert nvfp4.operand("wgrad.dy") == Operand("nvfp4", "sr", Hadamard(16, "te"))
    assert nvfp4.without("sr").operand("wgrad.dy") == Operand("nvfp4", "rne", Hadamard(16, "te"))
    assert nvfp4.without("rht").operand("wgrad.dy") == Operand("nvfp4", "sr")
    assert nvfp4.without("2d").operand("dgrad.w") == Operand("nvfp4")
    assert nvfp4.without("keep").keep == ()
    assert nvfp4.without("dgrad").dgrad == Gemm() and nvfp4.without("dgrad").fprop == nvfp4.fprop
    bare = nvfp4.without(*INGREDIENTS)
    assert all(row == Operand() for row in bare.operands().values())
    assert RECIPES["fp8_block"].without("2d").operand("fprop.w").fmt == "fp8_block_e4m3"
    assert RECIPES["fp8_delayed"].without("delayed").fprop == RECIPES["fp8_current"].fprop


def test_without_2d_serves_a_format_of_ones_own() -> None:
    row = Operand(fpemu.get_format("nvfp4/2d"))
    fmt = Recipe("mine", Gemm(Operand(), row)).without("2d").operand("fprop.w").fmt
    assert fmt.block == (16,)  # type: ignore[union-attr]


def test_change_reaches_the_operands_that_match() -> None:
    changed = RECIPES["nvfp4"].change("*.dy", rounding="rne").operands()
    assert {name for name, row in changed.items() if row.rounding == "sr"} == set()
    everywhere = RECIPES["nvfp4"].change("*", rounding="sr").operands()
    assert all(row.rounding == "sr" for row in everywhere.values())
    assert RECIPES["mxfp8"].change("wgrad.*", transform=Hadamard(32, 1)).wgrad.a.transform


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: get_recipe("nvfp5"), "unknown recipe 'nvfp5'.*Did you mean 'nvfp4'"),
        (lambda: get_recipe(4), "must be a name or an fpemu.recipes.Recipe"),
        (lambda: RECIPES["nvfp4"].without("2D"), "unknown ingredient '2D'"),
        (lambda: RECIPES["nvfp4"].change("fprop.dy", fmt="e4m3"), "unknown operand"),
        (lambda: RECIPES["nvfp4"].operand("x"), "unknown operand"),
        (lambda: Operand("e4m3", rounding="up"), "unknown rounding"),
        (lambda: Operand(rounding="sr"), "fmt is None"),
        (lambda: Operand("e4m3", blocks="k"), "unknown blocks"),
        (lambda: Gemm(Operand(transform=Hadamard()), Operand()), "transforms differ"),
        (lambda: Delayed(history=0), "history must be a positive integer"),
        (lambda: Delayed(algo="mean"), "unknown algo"),
        (lambda: Delayed(margin=-1), "margin must be"),
        (lambda: make_plan(linear_recipe("r", "nvfp5", None, None)), "unknown format 'nvfp5'"),
        (
            lambda: make_plan(linear_recipe("r", Operand("nvfp4", scaling=Delayed()), None, None)),
            "one scale per tensor",
        ),
        (
            lambda: make_plan(
                RECIPES["fp8_delayed"].change("wgrad.dy", scaling=Delayed(history=2))
            ),
            "two kinds",
        ),
        (
            lambda: make_plan(
                RECIPES["fp8_delayed"].change("wgrad.*", transform=Hadamard())
            ),
            "amax of a rotated tensor",
        ),
    ],
)  # fmt: skip
def test_mistakes_are_named(make: object, message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        make()  # type: ignore[operator]


# convert -----------------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 128), nn.Linear(128, 64, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


def model() -> nn.Sequential:
    return nn.Sequential(Block(), Block(), nn.LayerNorm(64), nn.Linear(64, 10))


def test_convert_keeps_objects_and_says_what_it_did(capsys: pytest.CaptureFixture[str]) -> None:
    net = model()
    parameters, modules = list(net.parameters()), list(net.modules())
    assert convert(net, "nvfp4", keep=["3", (0, 2)]) is net
    assert [id(p) for p in net.parameters()] == [id(p) for p in parameters]
    assert [id(m) for m in net.modules()] == [id(m) for m in modules]
    said = capsys.readouterr().out.splitlines()
    assert said == [
        "layer                   fprop x, w         dgrad dy, w        wgrad dy, x",
        "0.up                    nvfp4, nvfp4/2d    nvfp4 sr, nvfp4/2d nvfp4 sr rht16,",
        "  128 x 64 nvfp4                                              nvfp4 rht16",
        "0.down                  nvfp4, nvfp4/2d    nvfp4 sr, nvfp4/2d nvfp4 sr rht16,",
        "  64 x 128 nvfp4                                              nvfp4 rht16",
        "1.up                    nvfp4, nvfp4/2d    nvfp4 sr, nvfp4/2d nvfp4 sr rht16,",
        "  128 x 64 nvfp4                                              nvfp4 rht16",
        "1.down                  bf16               bf16               bf16",
        "  64 x 128 bf16",
        "3                       bf16               bf16               bf16",
        "  10 x 64 bf16",
        "5 linear layers: 3 nvfp4, 2 bf16",
    ]
    assert repr(net[3]) == "Linear(in_features=64, out_features=10, bias=True, recipe=bf16)"


def test_no_row_is_wider_than_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    net = nn.ModuleDict({"a_layer_with_a_very_long_name_indeed": model()})
    for recipe in RECIPES:
        convert(net, recipe)
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 80


def test_keep_by_pattern_function_count_and_share() -> None:
    layers = dict.fromkeys("abcdefghij")
    assert kept_layers(layers, "[ab]") == {"a", "b"}
    assert kept_layers(layers, lambda name, module: name == "c") == {"c"}
    assert kept_layers(layers, (1, 2)) == {"a", "i", "j"}
    assert kept_layers(layers, (0.01, 0.25)) == {"a", "h", "i", "j"}
    assert kept_layers(layers, (0, 0)) == kept_layers(layers, ()) == set()
    assert kept_layers(layers, (99, 0)) == set(layers)
    assert kept_layers(layers, ["a", (0, 1)]) == {"a", "j"}


@pytest.mark.parametrize(
    ("keep", "message"),
    [
        ("lm_head", "matches none of the 5"),
        (7, "must be a pattern"),
        ((1, -1), "allowed are counts"),
    ],
)
def test_a_wrong_keep_changes_nothing(keep: object, message: str) -> None:
    net = model()
    with pytest.raises((ValueError, TypeError), match=message):
        convert(net, "nvfp4", keep=keep, verbose=False)
    assert type(net[3]) is nn.Linear


def test_models_without_plain_linear_layers(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match=r"has no nn\.Linear layer"):
        convert(nn.LayerNorm(4), "bf16")
    net = nn.ModuleList([nn.MultiheadAttention(8, 2), nn.Linear(8, 8)])
    convert(net, "mxfp8")
    assert "0.out_proj left as it is (NonDynamicallyQuantizableLinear" in capsys.readouterr().out
    assert not isinstance(net[0].out_proj, Linear)


def test_a_bare_layer_is_converted_in_place() -> None:
    layer = nn.Linear(32, 8)
    assert convert(layer, "mxfp8", verbose=False) is layer and isinstance(layer, Linear)


def test_default_keep_of_nvfp4_is_nvidias_share() -> None:
    """2 of 62 at the start and 8 of 62 at the end."""
    layers = dict.fromkeys(map(str, range(124)))
    assert kept_layers(layers, RECIPES["nvfp4"].keep) == {*map(str, [0, 1, 2, 3, *range(108, 124)])}


def test_a_recipe_may_hold_lists() -> None:
    signs = [1, -1] * 8
    recipe = Recipe("mine", wgrad=Gemm(*[Operand("nvfp4", transform=Hadamard(16, signs))] * 2))
    recipe = replace(recipe, keep=["3", (1, 0)])
    net = convert(model(), recipe, verbose=False)
    assert [m.recipe.name for m in net.modules() if isinstance(m, Linear)] == [
        "bf16", "mine", "mine", "mine", "bf16",
    ]  # fmt: skip
    net(torch.randn(4, 64)).sum().backward()


def test_operands_cover_every_gemm() -> None:
    assert list(OPERANDS) == list(RECIPES["fp32"].operands())
