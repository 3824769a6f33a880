"""The layer under real training code: what a run computes does not depend on how it is run."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import assert_same_bits
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fpemu
from fpemu.nn import Delayed, Linear, Operand, convert, layer, linear, round_weights, streams
from fpemu.recipes import RECIPES, linear_recipe

SHORT = linear_recipe(
    "fp8_delayed short",
    *(Operand(f, scaling=Delayed(3)) for f in ("fp8_tensor_e4m3", "fp8_tensor_e4m3", "fp8_tensor_e5m2")),
)  # fmt: skip
EVERYWHERE = RECIPES["nvfp4"].change("*", rounding="sr")
#: Without state, with random words, with random words everywhere, with histories.
RUNS = {"mxfp8": RECIPES["mxfp8"], "nvfp4": RECIPES["nvfp4"], "sr": EVERYWHERE, "delayed": SHORT}
every_run = pytest.mark.parametrize("run", RUNS)


def model(recipe: Any, seed: int | None = 5, **how: Any) -> nn.Sequential:
    torch.manual_seed(1)
    net = nn.Sequential(
        nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32, bias=False), nn.Linear(32, 8)
    )
    convert(net, recipe, keep=(), seed=seed, verbose=False, **how)
    return net


def batch(step: int, tokens: int = 11) -> Tensor:
    return torch.randn(2, tokens, 32, generator=torch.Generator().manual_seed(step))


def train(
    net: nn.Module, steps: range = range(3), forward: Callable[[Tensor], Tensor] | None = None,
    loss: Callable[[Tensor], Tensor] = lambda y: y.square().mean(), rate: float = 0.05,
) -> dict[str, Tensor]:  # fmt: skip
    """A few steps of SGD; everything the model then holds, and the last gradients."""
    forward = forward or net
    for step in steps:
        net.zero_grad()
        loss(forward(batch(step))).backward()
        with torch.no_grad():
            for p in net.parameters():
                if p.grad is not None:
                    p.sub_(p.grad, alpha=rate)
    gradients = {f"grad {n}": p.grad for n, p in net.named_parameters() if p.grad is not None}
    return {n: t.clone() for n, t in {**net.state_dict(), **gradients}.items()}


def assert_same_state(got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    assert got.keys() == want.keys()
    for name, value in want.items():
        assert_same_bits(got[name], value, note=name)


# Recomputation, compilation -----------------------------------------------------------------------


@every_run
@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing_changes_nothing(run: str, reentrant: bool) -> None:
    want = train(model(RUNS[run]))
    net = model(RUNS[run])
    got = train(net, forward=lambda x: checkpoint(net, x.requires_grad_(), use_reentrant=reentrant))
    assert_same_state(got, want)


def test_recomputed_calls_find_their_own_words() -> None:
    """One layer, called in two checkpointed segments that are recomputed in reverse order."""
    results = []
    for saved in (False, True):
        torch.manual_seed(7)
        net = Linear(32, 32, recipe=EVERYWHERE, seed=3)
        seen: list[Tensor] = []

        def segment(x: Tensor, net: Linear = net, seen: list[Tensor] = seen) -> Tensor:
            y = net(x)
            seen.append(y.detach().clone())
            return torch.tanh(y)

        x = batch(0).requires_grad_()
        run = (lambda x, s=segment: checkpoint(s, x, use_reentrant=False)) if saved else segment
        run(run(x)).sum().backward()
        results.append((x.grad, net.weight.grad, seen))
    (dx, dw, once), (dx2, dw2, twice) = results
    assert_same_bits(dx2, dx)
    assert_same_bits(dw2, dw)
    assert len(once) == 2 and len(twice) == 4
    for got, want in zip(twice, [*once, once[1], once[0]], strict=True):
        assert_same_bits(got, want)


#: Dynamo makes an instance of every autograd.Function that it traces.
dynamo = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")


@every_run
@dynamo
def test_compiled_training_equals_eager(run: str) -> None:
    want = train(model(RUNS[run]))
    net = model(RUNS[run])
    assert_same_state(
        train(net, forward=torch.compile(net, fullgraph=True, backend="aot_eager")), want
    )


@dynamo
def test_compiled_layers_keep_counting() -> None:
    """Two calls of one compiled graph draw different words, those of the eager layer."""
    net = Linear(32, 16, recipe="nvfp4", seed=3)
    other = Linear(32, 16, recipe="nvfp4", seed=3)
    other.load_state_dict(net.state_dict())
    compiled = torch.compile(net, fullgraph=True, backend="aot_eager")
    gradients = []
    for function, module in ((compiled, net), (other, other)):
        for _ in range(2):
            module.zero_grad()
            function(batch(0)).square().sum().backward()
            gradients.append(module.weight.grad.clone())
    assert (gradients[0] != gradients[1]).any()
    assert_same_bits(gradients[0], gradients[2])
    assert_same_bits(gradients[1], gradients[3])


@dynamo
def test_a_compiled_functional_call() -> None:
    x, w = batch(0), torch.randn(16, 32)
    function = torch.compile(
        lambda x, w: linear(x, w, recipe="mxfp4"), fullgraph=True, backend="aot_eager"
    )
    assert_same_bits(function(x, w), linear(x, w, recipe="mxfp4"))


# Saving, copying, converting ----------------------------------------------------------------------


@every_run
def test_a_resumed_run_has_the_bits_of_one_that_went_on(run: str) -> None:
    want = train(model(RUNS[run]), range(5))
    first = model(RUNS[run])
    train(first, range(3))
    saved = pickle.loads(pickle.dumps(first.state_dict()))
    torch.manual_seed(999)
    second = model(RUNS[run], seed=77)
    second.load_state_dict(saved)
    assert_same_state(train(second, range(3, 5)), want)


@pytest.mark.parametrize("clone", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_a_copy_goes_on_alone(clone: Callable[[nn.Module], nn.Module]) -> None:
    net = model(EVERYWHERE)
    train(net, range(2))
    other = clone(net)
    before = {n: t.clone() for n, t in net.state_dict().items()}
    got = train(other, range(2, 4))
    assert_same_state(dict(net.state_dict()), before)
    assert_same_state(train(net, range(2, 4)), got)


@every_run
def test_a_checkpoint_of_the_plain_model_loads(run: str) -> None:
    net = model(RUNS[run])
    plain = {n: t for n, t in net.state_dict().items() if n.endswith(("weight", "bias"))}
    state = {n: t.clone() for n, t in net.state_dict().items()}
    net.load_state_dict(plain)
    assert_same_state(dict(net.state_dict()), state)


def test_converting_again_changes_the_recipe_and_drops_the_state() -> None:
    net = model("nvfp4")
    train(net, range(2))
    convert(net, "bf16", verbose=False)
    assert [n for n in net.state_dict() if not n.endswith(("weight", "bias"))] == []
    fresh = model("bf16")
    fresh.load_state_dict(net.state_dict())
    assert_same_state(train(net, range(2, 4)), train(fresh, range(2, 4)))


def test_state_keeps_its_dtype_when_the_module_changes_its_own() -> None:
    net = model(SHORT)
    train(net, range(2))
    before = {n: t.clone() for n, t in net.state_dict().items() if "amax" in n or "scale" in n}
    net.to(torch.bfloat16)
    assert net[0].weight.dtype == torch.bfloat16
    for name, value in before.items():
        assert_same_bits(net.state_dict()[name], value, note=name)
    train(net, range(2, 3), forward=lambda x: net(x.bfloat16()))


# Random streams -----------------------------------------------------------------------------------


def test_torchs_seed_governs_and_its_generator_is_left_alone() -> None:
    seeds = []
    for _ in range(2):
        torch.manual_seed(11)
        seeds.append(convert(nn.Linear(32, 32), "nvfp4", keep=(), verbose=False).random_state)
    assert_same_bits(*seeds)
    net = model(EVERYWHERE)
    state = torch.get_rng_state()
    train(net)
    assert_same_bits(torch.get_rng_state(), state)


def test_the_functional_form_draws_from_torchs_generator() -> None:
    x, w = batch(0), torch.randn(16, 32)
    results = []
    for seed in (4, 4, 5):
        torch.manual_seed(seed)
        results.append(linear(x, w, recipe=EVERYWHERE))
    assert_same_bits(results[0], results[1])
    assert (results[0] != results[2]).any()
    again = linear(x, w, recipe=EVERYWHERE, seed=9, stream=1)
    assert_same_bits(again, linear(x, w, recipe=EVERYWHERE, seed=9, stream=1))
    assert (again != linear(x, w, recipe=EVERYWHERE, seed=9, stream=2)).any()


def test_no_two_draws_share_a_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers, operands and calls of two steps; two GEMMs may share one operand's."""
    seen: list[tuple[str, int, int]] = []
    inner = streams.of_operand

    def of_operand(ticket: Tensor, operand: str) -> tuple[int, int]:
        seed, stream = inner(ticket, operand)
        seen.append((operand, seed, stream))
        return seed, stream

    monkeypatch.setattr(streams, "of_operand", of_operand)
    net = model(EVERYWHERE.without("rht"))
    train(net, range(2))
    # Weights: rows of 16 x 16 tiles are the same in fprop and dgrad, and drawn alike.
    drawn = [s for s in seen if not s[0].endswith(".w")]
    assert len(set(drawn)) == len(drawn) == 2 * 3 * 4 - 2 * 1
    assert {seed for _, seed, _ in seen} == {5}
    weights = {s for s in seen if s[0].endswith(".w")}
    assert len(weights) == 2 * 3
    assert not {s[2] for s in drawn} & {s[2] for s in weights}


def test_stochastic_rounding_of_gradients_is_unbiased_over_calls() -> None:
    """The mean of many backward passes of one batch nears the product of the unrounded dY."""
    fmt = Operand("e4m3", rounding="sr")
    net = Linear(8, 4, bias=False, recipe=linear_recipe("sr", None, None, fmt), seed=1)
    x, dy = torch.randn(16, 8), torch.rand(16, 4) + 1.0
    total, n = torch.zeros(4, 8), 400
    for _ in range(n):
        net.zero_grad()
        net(x).backward(dy)
        total += net.weight.grad
    exact = dy.t() @ x
    # Var of one draw is at most (step / 2)**2, steps of values in [1, 2) being 1/8.
    sigma = (x.square().sum(0) * (1 / 16) ** 2 / n).sqrt()
    assert ((total / n - exact).abs() < 5 * sigma).all()
    assert ((net.weight.grad - exact).abs() > sigma).any()


# Ways to train ------------------------------------------------------------------------------------


def test_gradient_accumulation_quantizes_the_weight_once(monkeypatch: pytest.MonkeyPatch) -> None:
    net = model("nvfp4")
    calls: list[str] = []
    inner = layer.cast
    monkeypatch.setattr(layer, "cast", lambda core, name, *r, **k: (calls.append(name), inner(core, name, *r, **k))[1])  # fmt: skip
    for step in range(4):
        net(batch(step)).square().mean().backward()
    assert calls.count("fprop.w") == 3 and calls.count("dgrad.w") == 0
    parts = [p.grad.clone() for p in net.parameters()]
    alone = model("nvfp4")
    sums = [torch.zeros_like(p) for p in alone.parameters()]
    for step in range(4):
        alone.zero_grad()
        alone(batch(step)).square().mean().backward()
        for total, p in zip(sums, alone.parameters(), strict=True):
            total.add_(p.grad)
    for got, want in zip(parts, sums, strict=True):
        assert_same_bits(got, want)


@pytest.mark.parametrize("change", ["in place", "data", "data_ptr"])
def test_a_changed_weight_is_quantized_again(change: str) -> None:
    net = Linear(32, 16, bias=False, recipe="mxfp4")
    x = batch(0)
    net(x)
    new = net.weight.detach() * 3
    if change == "in place":
        with torch.no_grad():
            net.weight.copy_(new)
    elif change == "data":
        net.weight.data.copy_(new)
    else:
        net.weight = nn.Parameter(new)
    assert_same_bits(net(x), linear(x, new, recipe="mxfp4"))


@pytest.mark.parametrize("training", [True, False])
def test_one_value_that_is_changed_behind_torchs_back(training: bool) -> None:
    """As pruning and sensitivity studies do, through ``.data``, between evaluations."""
    net = Linear(64, 64, bias=False, recipe="mxfp4").train(training)
    x = torch.randn(4, 64)
    with torch.no_grad():
        net(x)
        net.weight.data[3, 3] = 40.0
        assert_same_bits(net(x), linear(x, net.weight.detach().clone(), recipe="mxfp4"))


def test_another_tensor_over_the_same_memory_is_another_weight() -> None:
    x = torch.randn(4, 64)
    one = torch.zeros(64, 64, requires_grad=True)
    linear(x, one, recipe="mxfp4")
    other = one.detach().requires_grad_()  # shares memory and version
    other.data[3, 3] = 1.0
    assert linear(x, other, recipe="mxfp4").any()


def test_shared_layers_and_tied_weights() -> None:
    net = nn.ModuleDict(
        {"a": nn.Linear(32, 32), "b": nn.Linear(32, 32), "emb": nn.Embedding(32, 32)}
    )
    net["again"] = net["a"]
    net["b"].weight = net["emb"].weight
    convert(net, "mxfp8", verbose=False)
    assert net["again"] is net["a"] and net["b"].weight is net["emb"].weight
    x = batch(0)
    net["b"](net["a"](net["again"](x))).sum().backward()
    a, b = net["a"], net["b"]
    leaves = [t.detach().clone().requires_grad_() for t in (a.weight, a.bias, b.weight, b.bias)]
    y = x
    for w, bias in (leaves[:2], leaves[:2], leaves[2:]):
        y = linear(y, w, bias, recipe="mxfp8")
    y.sum().backward()
    for got, want in zip((a.weight, a.bias, b.weight, b.bias), leaves, strict=True):
        assert_same_bits(got.grad, want.grad)


@every_run
def test_autocast_around_the_model(run: str) -> None:
    """X is what autocast would cast it to, Y comes in that dtype, the products stay float32."""
    net = model(RUNS[run])
    seen = []
    net[2].register_forward_hook(lambda m, i, y: seen.append((i[0].dtype, y.dtype)))
    x = batch(0)
    with torch.autocast("cpu", torch.bfloat16):
        y = net(x)
    y.float().square().sum().backward()
    assert seen == [(torch.bfloat16, torch.bfloat16)]
    assert net[0].weight.grad.dtype == torch.float32
    other = model(RUNS[run])
    z = x.bfloat16()
    for module in other:
        z = module(z)
    assert_same_bits(y, z)


def test_frozen_layers_compute_no_gradient_for_the_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    net = model("nvfp4")
    for p in net[0].parameters():
        p.requires_grad_(False)
    calls: list[str] = []
    inner = layer.cast
    monkeypatch.setattr(layer, "cast", lambda core, name, *r, **k: (calls.append(name), inner(core, name, *r, **k))[1])  # fmt: skip
    net[2].weight.requires_grad_(False)
    net(batch(0)).sum().backward()
    assert net[0].weight.grad is None and net[2].weight.grad is None
    # Nothing before the last layer needs a gradient: it alone goes backward, for its weight.
    assert sorted(c for c in calls if "grad" in c) == ["wgrad.dy", "wgrad.x"]
    calls.clear()
    net(batch(0).requires_grad_()).sum().backward()
    assert calls.count("wgrad.dy") == 1 and calls.count("dgrad.dy") == 3


@every_run
def test_evaluation_leaves_no_trace(run: str) -> None:
    net = model(RUNS[run])
    train(net, range(2))
    before = {n: t.clone() for n, t in net.state_dict().items()}
    net.eval()
    with torch.no_grad():
        first = net(batch(9))
        second = net(batch(9))
    with torch.inference_mode():
        third = net(batch(9))
    net(batch(9))
    assert_same_bits(first, second)
    assert_same_bits(first, third)
    assert_same_state(dict(net.state_dict()), before)


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe_learns(recipe: str) -> None:
    """A student of a linear teacher, odd token counts, halves its loss at least."""
    torch.manual_seed(0)
    teacher = torch.randn(8, 32) / 6
    net = convert(nn.Linear(32, 8), recipe, keep=(), verbose=False)
    sgd = torch.optim.SGD(net.parameters(), lr=0.1)
    if RECIPES[recipe].weights is not None:
        round_weights(sgd, recipe)
    losses = []
    for step in range(25):
        x = batch(step, 13)
        loss = (net(x) - x @ teacher.t()).square().mean()
        sgd.zero_grad()
        loss.backward()
        sgd.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 2


def test_a_user_writes_a_recipe_in_a_few_lines() -> None:
    mine = linear_recipe("mine", "mxfp6_e2m3", "mxfp6_e2m3", Operand("mxfp8_e5m2", rounding="sr"))
    net = convert(nn.Linear(32, 8), mine, verbose=False)
    net(batch(0)).sum().backward()
    assert torch.isfinite(net.weight.grad).all()


def test_second_derivatives_are_refused() -> None:
    net = Linear(32, 8, recipe="mxfp8")
    x = batch(0).requires_grad_()
    (g,) = torch.autograd.grad(net(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        g.sum().backward()


# Weights without a master -------------------------------------------------------------------------


def test_bf16_weights_move_only_by_stochastic_rounding() -> None:
    """An update of a quarter of BF16's step, 64 times: none to nearest; on average all, with SR."""
    ends = []
    for rounding in ("rne", "sr"):
        w = nn.Parameter(torch.ones(512))
        sgd = torch.optim.SGD([w], lr=2.0**-10)  # below 1, BF16's step is 2**-8
        round_weights(sgd, Operand("bf16", rounding=rounding), seed=1)
        for _ in range(64):
            w.grad = torch.ones_like(w)
            sgd.step()
        assert_same_bits(fpemu.quantize(w.detach(), "bf16"), w.detach())
        ends.append(w.detach().clone())
    assert (ends[0] == 1).all()
    # 64 steps of 2**-10: 1/16 lower; each element's variance is at most 64 * (2**-8 / 2)**2.
    assert abs(float(ends[1].mean()) - (1 - 2.0**-4)) < 5 * (64 / 512) ** 0.5 * 2.0**-9


def test_rounding_of_weights_resumes() -> None:
    def run(steps: range, state: Any = None, w: Tensor | None = None) -> tuple[Tensor, Any]:
        p = nn.Parameter(torch.ones(64) if w is None else w.clone())
        sgd = torch.optim.SGD([p], lr=2.0**-10)
        round_weights(sgd, seed=2 if state is None else 3)
        if state is not None:
            sgd.load_state_dict(state)
        for _ in steps:
            p.grad = torch.ones_like(p)
            sgd.step()
        return p.detach(), copy.deepcopy(sgd.state_dict())

    want, _ = run(range(6))
    half, state = run(range(3))
    got, _ = run(range(3), state, half)
    assert_same_bits(got, want)
    assert (want != half).any()


def test_float32_masters_have_nothing_to_round() -> None:
    sgd = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1)
    with pytest.raises(ValueError, match="keeps float32 master weights"):
        round_weights(sgd, "bf16")


def test_the_output_may_be_changed_in_place() -> None:
    """As that of nn.Linear may; with more than two dimensions it is a view of a matrix."""
    model = nn.Sequential(nn.Linear(32, 32), nn.ReLU(inplace=True), nn.Linear(32, 16))
    fpemu.nn.convert(model, "mxfp8", verbose=False)
    x = torch.randn(2, 3, 32, requires_grad=True)
    model(x).sum().backward()
    assert x.grad is not None and x.grad.shape == x.shape
