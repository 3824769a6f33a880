"""The custom operators: compilers, tracers, transforms, checkpointing and their errors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from helpers import assert_same_bits, block_data

import fpemu
from fpemu import formats
from fpemu.errors import BackendError

torch = pytest.importorskip("torch", reason="torch is not installed")
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

from fpemu import torch_op  # noqa: E402

# Importing inductor or forward-mode AD makes torch warn about itself.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")
X = torch.from_numpy(block_data(24, 48, 1, special=False)).clamp(-1e3, 1e3)
ROW = formats.Format("e3m2fn", exp_bits=3, man_bits=2, special="fn")
BLOCKS = formats.BlockFormat("own blocks", ROW, (8,), formats.E8M0, "mx_rceil")
EDGES = [0.3, 448.0, -448.0, 447.0, 449.0, 1000.0, 0.0, float("nan"), float("inf")]
INSIDE = [1, 1, 1, 1, 0, 0, 1, 0, 0]


def compiled(f: Callable[..., Any], backend: Any = "aot_eager", **options: Any) -> Any:
    torch._dynamo.reset()
    return torch.compile(f, fullgraph=True, backend=backend, **options)


# Compilers ---------------------------------------------------------------------------------------

CALLS: dict[str, dict[str, Any]] = {
    "seed": {"fmt": "e4m3", "rounding": "sr", "seed": 5},
    "largest words": {"fmt": "e4m3", "rounding": "sr", "seed": (1 << 64) - 5, "stream": 1 << 63},
    "negative seed": {"fmt": "e4m3", "rounding": "sr", "seed": -1},
    "shard": {"fmt": "mxfp4", "rounding": "sr", "seed": 1, "offset": ((30, 60), (2, 3))},
    "offset": {"fmt": "mxfp4", "rounding": "sr", "seed": 1, "offset": 7, "sr_bits": 8},
    "axis": {"fmt": "mxfp8_e4m3/rceil", "axis": 0},
    "amax": {"fmt": "nvfp4", "amax": 2.5},
    "dtype": {"fmt": "e5m2", "dtype": "bfloat16"},
    "torch dtype": {"fmt": "e5m2", "dtype": torch.float16},
    "overflow": {"fmt": "e5m2", "overflow": "nonsat", "rounding": "rtp"},
    "row": {"fmt": ROW},
    "block row": {"fmt": BLOCKS},
    "table row": {"fmt": formats.TABLE["nvfp4"]},
    "backend": {"fmt": "nvfp4", "backend": "torch"},
}


@pytest.mark.parametrize("name", CALLS)
def test_one_graph_for_every_argument(name: str) -> None:
    call = CALLS[name]
    got = compiled(lambda x: fpemu.quantize(x * 1.0, **call))(X)
    assert_same_bits(got, fpemu.quantize(X, **call), X)


def test_compiled_gradient_equals_the_eager_one() -> None:
    def f(x: Any) -> Any:
        return fpemu.quantize(x, "nvfp4", amax=1.0)

    eager, traced = X.clone().requires_grad_(), X.clone().requires_grad_()
    f(eager).backward(X)
    compiled(f)(traced).backward(X)
    assert_same_bits(traced.grad, eager.grad)
    assert (eager.grad == 0).any()


def test_changing_numbers_do_not_recompile() -> None:
    graphs = []

    def count(graph: Any, example: Any) -> Any:
        graphs.append(graph)
        return graph

    f = compiled(lambda x, s: fpemu.quantize(x, "e4m3", rounding="sr", seed=s), backend=count)
    for seed in (5, 6, 7, 1 << 40):
        assert_same_bits(f(X, seed), fpemu.quantize(X, "e4m3", rounding="sr", seed=seed), X)
    assert len(graphs) <= 2


def test_tensor_amax_and_dynamic_shapes() -> None:
    """Delayed scaling keeps its amax in a tensor: no graph break, no value at trace time."""
    f = compiled(lambda x: fpemu.quantize(x, "nvfp4", amax=x.abs().max()), dynamic=True)
    for x in (X, X[:5, :7].contiguous()):
        assert_same_bits(f(x), fpemu.quantize(x, "nvfp4"), x)


def test_given_words_compile() -> None:
    words = torch.randint(0, 1 << 32, X.shape)
    f = compiled(lambda x, r: fpemu.quantize(x, "mxfp4", rounding="sr", random_bits=r))
    for w in (words, words.to(torch.uint32)):
        want = fpemu.quantize(X, "mxfp4", rounding="sr", random_bits=w)
        assert_same_bits(f(X, w), want, X)


def twice(x: Any) -> Any:
    return [fpemu.quantize(x, "e4m3", rounding="sr") for _ in range(2)]


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_a_drawn_seed_is_neither_folded_nor_shared(backend: str) -> None:
    """Two equal calls in one graph differ, and `torch.manual_seed` governs both."""
    f = compiled(twice, backend)
    for _ in range(2):
        torch.manual_seed(3)
        want = twice(X)
        torch.manual_seed(3)
        got = f(X)
        for g, w in zip(got, want, strict=True):
            assert_same_bits(g, w, X)
        assert not torch.equal(*got)


@pytest.mark.slow
def test_inductor_on_a_transposed_input() -> None:
    def f(x: Any) -> Any:
        return fpemu.quantize((x * 2).t(), "nvfp4") * 2

    x, y = X.clone().requires_grad_(), X.clone().requires_grad_()
    got, want = compiled(f, "inductor")(x), f(y)
    assert_same_bits(got, want)
    got.sum().backward()
    want.sum().backward()
    assert_same_bits(x.grad, y.grad)


# torch's own checks and tracers ------------------------------------------------------------------


@pytest.mark.parametrize("fmt", ["e4m3", "nvfp4", "fp8_tensor_e4m3"])
def test_opcheck(fmt: str) -> None:
    """Schema (nothing mutated or aliased), autograd registration, fake kernel, AOT dispatch."""
    text = repr(fmt)
    # AOT dispatch compares two runs, and two runs of a drawn seed differ.
    some = ["test_schema", "test_autograd_registration", "test_faketensor"]
    for x in (X, X.clone().requires_grad_(), X.t(), X[::2, 1:], X.to(torch.bfloat16), X[:0]):
        head, tail = (x, text, "sr", None, -1, None), (0, [0], 32, None, "clip", None, None)
        op = torch.ops.fpemu
        torch.library.opcheck(op.quantize.default, (*head, 7, *tail))
        torch.library.opcheck(op.quantize_seeded.default, (*head, *tail), test_utils=some)
        torch.library.opcheck(op.within.default, (x.detach(), text, -1, None, None))


def test_only_the_drawn_seed_is_tagged_random() -> None:
    tag = torch.Tag.nondeterministic_seeded
    assert tag in torch.ops.fpemu.quantize_seeded.default.tags
    assert tag not in torch.ops.fpemu.quantize.default.tags


def test_fake_and_meta_tensors() -> None:
    with FakeTensorMode():
        for device in ("cpu", "cuda"):
            x = torch.empty(4, 40, dtype=torch.bfloat16, device=device).t()
            y = fpemu.quantize(x, "nvfp4")
            assert (y.shape, y.dtype) == (x.shape, x.dtype)
            assert (y.device, y.stride()) == (x.device, (1, 40))
            assert fpemu.quantize(x, "e4m3", rounding="sr").shape == x.shape
            assert fpemu.quantize(x, "int8").shape == x.shape
        with pytest.raises(ValueError, match="axis 5 is out of range"):
            fpemu.quantize(x, "nvfp4", axis=5)
        with pytest.raises(ValueError, match="unknown format"):
            fpemu.quantize(x, "nvfp5")
    whole = torch.empty(3, dtype=torch.int32, device="meta")
    assert fpemu.quantize(whole, "e2m1").dtype == torch.float32


def test_export_and_make_fx_keep_one_operator() -> None:
    from torch.fx.experimental.proxy_tensor import make_fx

    class Model(torch.nn.Module):
        def forward(self, x: Any) -> Any:
            return fpemu.quantize(x, BLOCKS)

    exported = torch.export.export(Model(), (X,))
    assert_same_bits(exported.module()(X), Model()(X), X)
    graph = make_fx(lambda x: fpemu.quantize(x, "nvfp4"))(X).graph
    assert [n.name for n in graph.nodes if n.op == "call_function"] == ["quantize"]


# Gradients ---------------------------------------------------------------------------------------


def test_straight_through_at_every_edge() -> None:
    x = torch.tensor(EDGES, requires_grad=True)
    before = x.detach().clone()
    upstream = torch.arange(1.0, 10.0)
    fpemu.quantize(x, "e4m3").backward(upstream)
    assert x.grad.tolist() == [u * m for u, m in zip(upstream.tolist(), INSIDE, strict=True)]
    assert x.is_leaf
    assert_same_bits(x, before)
    x.grad = None
    fpemu.quantize(x, "e4m3", ste="full").backward(upstream)
    assert_same_bits(x.grad, upstream)


def test_nan_and_inf_gradients_do_not_pass_the_clip() -> None:
    x = torch.tensor([1.0, 1000.0, 1000.0], requires_grad=True)
    fpemu.quantize(x, "e4m3").backward(torch.tensor([2.0, float("inf"), float("nan")]))
    assert x.grad.tolist() == [2.0, 0.0, 0.0]


def test_blocks_clip_what_is_cast() -> None:
    """OCP floor scaling of [7, 1, ...] has scale 1: 7 lies beyond 6. A poisoned block: all 0."""
    x = torch.ones(32)
    x[0] = 7.0
    for fmt, first in (("mxfp4", 0.0), ("mxfp4/rceil", 1.0)):
        leaf = x.clone().requires_grad_()
        fpemu.quantize(leaf, fmt).sum().backward()
        assert leaf.grad.tolist() == [first] + [1.0] * 31
    bad = torch.ones(32)
    bad[3] = float("nan")
    poisoned = torch.cat([x, bad]).requires_grad_()
    fpemu.quantize(poisoned, "mxfp4/rceil").sum().backward()
    assert poisoned.grad.tolist() == [1.0] * 32 + [0.0] * 32


def test_x_may_change_before_backward() -> None:
    leaf = torch.tensor(EDGES[:7], requires_grad=True)
    x = leaf * 1.0
    y = fpemu.quantize(x, "e4m3")
    with torch.no_grad():
        x.mul_(1e9)
    y.sum().backward()
    assert leaf.grad.tolist() == INSIDE[:7]


def test_no_graph_where_none_is_wanted() -> None:
    leaf = X.clone().requires_grad_()
    with torch.no_grad():
        assert not fpemu.quantize(leaf, "e4m3").requires_grad
    with torch.inference_mode():
        assert not fpemu.quantize(leaf, "e4m3").requires_grad
    assert not fpemu.quantize(leaf.detach(), "e4m3").requires_grad
    assert torch_op.needs_op(leaf)
    assert not torch_op.needs_op(X)


def test_double_backward_and_gradient_dtype() -> None:
    x = X.to(torch.float64).requires_grad_()
    y = fpemu.quantize(x, "e4m3", dtype=torch.float32)
    (g,) = torch.autograd.grad((y**2).sum(), x, create_graph=True)
    assert g.dtype == torch.float64
    g.sum().backward()
    assert x.grad.unique().tolist() == [0.0, 2.0]


def test_autocast_leaves_it_alone() -> None:
    weight = torch.randn(48, 16, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        q = fpemu.quantize(weight, "mxfp4", axis=0)
        assert q.dtype == torch.float32
        (X @ q).sum().backward()
    assert_same_bits(q, fpemu.quantize(weight.detach(), "mxfp4", axis=0))
    assert weight.grad.dtype == torch.float32


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("seed", [11, None])
def test_checkpoint_recomputes_the_same_bits(seed: int | None, reentrant: bool) -> None:
    seen = []

    def f(x: Any) -> Any:
        y = fpemu.quantize(x, "e4m3", rounding="sr", seed=seed)
        seen.append(y.detach().clone())
        return (y * y).sum()

    x = X.clone().requires_grad_()
    checkpoint(f, x, use_reentrant=reentrant).backward()
    assert len(seen) == 2
    assert_same_bits(seen[1], seen[0], X)


# Transforms --------------------------------------------------------------------------------------


def test_functional_gradients() -> None:
    x = torch.tensor(EDGES[:7])
    two = x.expand(2, 7)

    def f(x: Any) -> Any:
        return fpemu.quantize(x, "e4m3")

    def total(x: Any) -> Any:
        return f(x).sum()

    want = torch.tensor(INSIDE[:7], dtype=torch.float32)
    assert_same_bits(torch.func.grad(total)(x), want)
    assert_same_bits(torch.vmap(torch.func.grad(total))(two), want.expand(2, 7))
    assert_same_bits(torch.func.grad(lambda x: torch.vmap(f)(x).sum())(two), want.expand(2, 7))
    assert_same_bits(torch.func.jacrev(f)(x), torch.diag(want))
    assert_same_bits(torch.func.jacfwd(f)(x), torch.diag(want))
    value, tangent = torch.func.jvp(f, (x,), (torch.full_like(x, 3.0),))
    assert_same_bits(value, f(x))
    assert_same_bits(tangent, 3 * want)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, torch.ones_like(x))
        assert_same_bits(torch.autograd.forward_ad.unpack_dual(f(dual)).tangent, want)


@pytest.mark.parametrize("fmt", ["e4m3", "nvfp4", "mxfp4"])
def test_vmap_is_one_call_per_sample(fmt: str) -> None:
    x = X.reshape(3, 8, 48)
    for dim in (0, 1, 2):
        got = torch.vmap(lambda v: fpemu.quantize(v, fmt, axis=0), in_dims=dim)(x)
        want = torch.stack([fpemu.quantize(v, fmt, axis=0) for v in x.unbind(dim)])
        assert_same_bits(got, want)


def test_vmap_randomness() -> None:
    x = torch.linspace(0.1, 0.4, 48).expand(3, 48)

    def f(v: Any) -> Any:
        return fpemu.quantize(v, "e2m1", rounding="sr")

    with pytest.raises(RuntimeError, match="randomness"):
        torch.vmap(f)(x)
    same = torch.vmap(f, randomness="same")(x)
    different = torch.vmap(f, randomness="different")(x)
    assert torch.equal(same[0], same[1])
    assert not torch.equal(different[0], different[1])


# Errors ------------------------------------------------------------------------------------------

WRONG: list[dict[str, Any]] = [
    {"fmt": "e4m4"},
    {"fmt": 3},
    {"fmt": "e4m3", "rounding": "x"},
    {"fmt": "e4m3", "overflow": "x"},
    {"fmt": "e4m3", "ste": "x"},
    {"fmt": "e4m3", "amax": 1.0},
    {"fmt": "nvfp4", "amax": -1.0},
    {"fmt": "nvfp4", "amax": [1, 2]},
    {"fmt": "nvfp4", "axis": 1},
    {"fmt": "e4m3", "axis": 1.5},
    {"fmt": "e4m3", "dtype": "int8"},
    {"fmt": "e4m3", "backend": "fpga"},
    {"fmt": "e4m3", "backend": "triton"},
    {"fmt": "int8"},
    {"fmt": "e4m3", "rounding": "sr", "seed": 1 << 64},
    {"fmt": "e4m3", "rounding": "sr", "seed": 1.5},
    {"fmt": "e4m3", "rounding": "sr", "stream": -(1 << 70)},
    {"fmt": "e4m3", "rounding": "sr", "sr_bits": 40},
    {"fmt": "e4m3", "rounding": "sr", "offset": "a"},
    {"fmt": "e4m3", "rounding": "sr", "offset": -1},
    {"fmt": "e4m3", "rounding": "sr", "offset": ((1,), (2, 3), 4)},
    {"fmt": "e4m3", "rounding": "sr", "offset": ((5,), (2,))},
    {"fmt": "e4m3", "rounding": "sr", "random_bits": np.zeros(3, np.uint32)},
    {"fmt": "e4m3", "random_bits": np.zeros(4, np.uint32)},
]


@pytest.mark.parametrize("call", WRONG, ids=str)
def test_errors_are_those_of_the_plain_path(call: dict[str, Any]) -> None:
    messages = []
    for grad in (False, True):
        x = torch.full((4,), float("nan"), requires_grad=grad)
        with pytest.raises((TypeError, ValueError, BackendError)) as caught:
            fpemu.quantize(x, **call)
        messages.append((caught.type, str(caught.value)))
    assert messages[0] == messages[1]


def test_a_row_survives_its_spelling() -> None:
    for row in (*formats.TABLE.values(), ROW, BLOCKS):
        again = torch_op._read(repr(torch_op._spell(row)))
        assert again == row
        assert again.source == row.source
