"""Two processes on gloo: data-parallel training and tensor-sharded amaxes."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.skipif(
    not (torch.distributed.is_available() and torch.distributed.is_gloo_available()),
    reason="this torch has no gloo backend",
)
ROOT = Path(__file__).resolve().parents[2]


def run_two(body: str, tmp_path: Path) -> list[dict[str, torch.Tensor]]:
    """Run `body` in two processes; it fills ``out``, and both are returned, by rank."""
    script = tmp_path / "ranks.py"
    lines = f"""
        import sys, torch, torch.distributed as dist
        from torch import nn
        import fpemu
        from fpemu.nn import Delayed, Linear, Operand, convert, streams
        from fpemu.recipes import RECIPES, linear_recipe

        torch.set_num_threads(1)
        fpemu.set_num_threads(1)
        rank = int(sys.argv[1])
        store = dist.FileStore({str(tmp_path / "store")!r}, 2)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
        out = {{}}
        torch.manual_seed(0)
    """
    script.write_text(
        textwrap.dedent(lines)
        + body
        + f"\ntorch.save(out, {str(tmp_path)!r} + f'/{{rank}}.pt')\ndist.destroy_process_group()\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(script), str(rank)], env=environment, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )
        for rank in range(2)
    ]  # fmt: skip
    said = [process.communicate(timeout=240)[0] for process in ranks]
    assert [process.returncode for process in ranks] == [0, 0], "\n".join(said)
    return [torch.load(tmp_path / f"{rank}.pt") for rank in range(2)]


DATA_PARALLEL = """
def fp8(fmt): return Operand(fmt, scaling=Delayed(3))
recipe = linear_recipe("short", fp8("fp8_tensor_e4m3"), fp8("fp8_tensor_e4m3"),
                       fp8("fp8_tensor_e5m2"))
nets = {"delayed": recipe, "nvfp4": RECIPES["nvfp4"].change("*", rounding="sr")}
seen = []
inner = streams.of_operand
def of_operand(ticket, operand):
    seen.append((operand, *inner(ticket, operand)))
    return seen[-1][1:]
streams.of_operand = of_operand
for name, recipe in nets.items():
    net = convert(nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 8)), recipe,
                  keep=(), verbose=False)
    ddp = nn.parallel.DistributedDataParallel(net)
    for step in range(4):
        g = torch.Generator().manual_seed(10 * step + rank)
        x = torch.randn(16, 32, generator=g) * (1 + 3 * rank)
        out[f"{name} amax {step}"] = x.abs().max()
        ddp(x).square().mean().backward()
        with torch.no_grad():
            for p in net.parameters():
                p -= 0.05 * p.grad
                p.grad = None
    for key, value in net.state_dict().items():
        out[f"{name} {key}"] = value.clone()
out["streams"] = torch.tensor([s[2] for s in seen if not s[0].endswith(".w")])
out["weight streams"] = torch.tensor([s[2] for s in seen if s[0].endswith(".w")])
"""

SHARDED = """
torch.manual_seed(1)  # the same tensors on both ranks
x, w, dy = torch.randn(32, 64), torch.randn(64, 64), torch.randn(32, 64)
w[40] *= 50
dy[:, 3] *= 50
for name in ("fp8_current", "nvfp4"):
    recipe = RECIPES[name].without("sr")
    half = slice(32 * rank, 32 * rank + 32)
    for label, rows, group in (("whole", slice(0, 64), None), ("half", half, dist.group.WORLD),
                               ("alone", half, None)):
        net = Linear(64, w[rows].shape[0], bias=False, recipe=recipe, amax_group=group)
        with torch.no_grad():
            net.weight.copy_(w[rows])
        y = net(x)
        y.backward(dy[:, rows])
        out[f"{name} {label} y"] = y.detach()
        out[f"{name} {label} dw"] = net.weight.grad
"""


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, torch.Tensor]]:
    return run_two(DATA_PARALLEL + SHARDED, tmp_path_factory.mktemp("ranks"))


def test_data_parallel_histories_streams_and_weights(ranks: list[dict[str, torch.Tensor]]) -> None:
    """Under DistributedDataParallel, which copies rank 0's buffers before each forward pass."""
    a, b = ranks
    for key in a:
        if key.startswith(("delayed 0", "delayed 2", "nvfp4 0", "nvfp4 2", "weight")):
            assert torch.equal(a[key], b[key]), key
    # Rank 1's inputs are the larger ones: the history is the maximum over both ranks.
    amaxes = [max(float(r[f"delayed amax {step}"]) for r in ranks) for step in range(4)]
    assert a["delayed 0.x_amax_history"].tolist() == [amaxes[3], *amaxes[1:3]]
    assert float(a["delayed amax 3"]) < amaxes[3]
    assert not set(a["streams"].tolist()) & set(b["streams"].tolist())
    assert len(set(a["streams"].tolist())) == len(a["streams"])


def test_sharded_tensors_are_quantized_as_the_whole(ranks: list[dict[str, torch.Tensor]]) -> None:
    """Rows of W and columns of dY on two ranks: with the amax of both, the bits of one process."""
    for name in ("fp8_current", "nvfp4"):
        for part, axis in (("y", 1), ("dw", 0)):
            whole = ranks[0][f"{name} whole {part}"]
            halves = torch.cat([r[f"{name} half {part}"] for r in ranks], axis)
            alone = torch.cat([r[f"{name} alone {part}"] for r in ranks], axis)
            # Equal operands; a float32 product of other shapes may add in another order.
            assert ((halves - whole).abs().max() / whole.abs().max()) < 1e-6
            assert ((alone - whole).abs().max() / whole.abs().max()) > 1e-4
