"""Training runs, their studies, and what is said of them, on data whose answers are known."""

from __future__ import annotations

import json
import math
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fpemu
from experiments import (
    harness,
    learning,
    loss_curves,
    outliers,
    parts,
    prediction,
    proxy,
    runs,
    studies,
    verdicts,
)  # fmt: skip
from fpemu.gemm import matmul

TINY = replace(
    studies.QUICK,
    gpt={"width": 32, "layers": 1, "heads": 1, "context": 32},
    steps=20, sums_steps=4, hybrid_steps=4, proxy_steps=20, batch=2, proxy_seeds=2,
    held_out=1 << 11,
)  # fmt: skip
BUDGETS = (studies.FULL, studies.DEFAULT, studies.QUICK)


pytestmark = pytest.mark.usefixtures("one_thread")


def tiny(arm: str = "bf16", seed: int = 5, **changes: Any) -> dict[str, Any]:
    return studies.point(TINY, arm, seed, **changes)


# A run -------------------------------------------------------------------------------------------


def test_the_same_point_gives_the_same_metrics() -> None:
    point = tiny("nvfp4")
    first = runs.canonical(harness.plain(learning.train(point), 17))
    learning.train(tiny("mxfp8", seed=6))
    assert runs.canonical(harness.plain(learning.train(point), 17)) == first
    assert runs.canonical(harness.plain(learning.train({**point, "rounding": 6}), 17)) != first


def test_a_seed_fixes_weights_and_data_whatever_the_arm() -> None:
    a, b, c = (
        learning.build(p).state_dict()
        for p in (tiny("fp32"), tiny("nvfp4", rounding=9), tiny("fp32", seed=6))
    )
    weights = [name for name in a if name.endswith("weight") and a[name].ndim == 2]
    assert all(torch.equal(a[n], b[n]) for n in weights)
    assert not any(torch.equal(a[n], c[n]) for n in weights)
    one, two = (learning.train(tiny(arm, steps=1))["train"][0] for arm in ("fp32", "bf16"))
    assert one == pytest.approx(two, abs=1e-3)  # the same first batch
    assert one == learning.train(tiny("fp32", steps=1, rounding=9))["train"][0]
    assert abs(one - learning.train(tiny("fp32", seed=6, steps=1))["train"][0]) > 1e-3


def test_one_ulp_is_one_ulp_of_one_weight() -> None:
    a, b = (learning.build(tiny("fp32", perturb=p)).state_dict() for p in ("none", "ulp"))
    moved = {n: (a[n] != b[n]).sum().item() for n in a if not torch.equal(a[n], b[n])}
    assert moved == {"blocks.0.qkv.weight": 1}
    x, y = (s["blocks.0.qkv.weight"][0, 0] for s in (a, b))
    assert torch.nextafter(x, torch.tensor(math.inf)) == y


@pytest.mark.parametrize("which", studies.SWITCHES)
def test_a_switch_changes_its_gemms_at_the_decay(which: str) -> None:
    recipe = learning.switched(studies.recipe("nvfp4"), which)
    bf16, nvfp4 = studies.recipe("bf16"), studies.recipe("nvfp4")
    assert recipe.fprop == (nvfp4 if which == "backward" else bf16).fprop
    for gemm in ("dgrad", "wgrad"):
        assert getattr(recipe, gemm) == getattr(nvfp4 if which == "forward" else bf16, gemm)
    assert learning.decay_start(40) == 32
    # Checkpoints every second of 20 steps: equal as far as the decay, 16, and not behind it.
    base, run = (learning.train(tiny("nvfp4-keep", switch=s)) for s in ("none", which))
    assert [c for c in base["checkpoints"] if c[0] <= 16] == [c for c in run["checkpoints"] if c[0] <= 16]  # fmt: skip
    assert base["checkpoints"][-1] != run["checkpoints"][-1]


def test_the_loss_scaler_skips_and_recovers(monkeypatch: pytest.MonkeyPatch) -> None:
    quiet = learning.train(tiny("fp16", scaler="dynamic"))
    assert quiet["skipped"] == 0
    monkeypatch.setattr(learning, "FIRST_SCALE", 2.0**30)
    loud = learning.train(tiny("fp16", scaler="dynamic"))
    assert 3 < loud["skipped"] < 20
    assert loud["loss_scale"][-1] == 2.0 ** (30 - loud["skipped"])
    assert not loud["diverged"]
    monkeypatch.setattr(learning, "GROWTH_INTERVAL", 5)
    assert learning.train(tiny("fp16", scaler="dynamic"))["loss_scale"][0] > 2.0**10


def test_divergence_is_a_result() -> None:
    metrics = learning.train(tiny("bf16", rate=1e9))
    assert metrics["diverged"] and metrics["held_out"] is None
    assert verdicts.loss_of(metrics) == math.log(256)
    json.dumps(harness.plain(metrics), allow_nan=False)


def test_spikes() -> None:
    rng = random.Random(0)
    losses = [5 - 3 * min(1, s / 200) + rng.gauss(0, 0.05) for s in range(400)]
    assert learning.spikes_in(losses) == []
    losses[300] += 2
    assert learning.spikes_in(losses) == [300]
    losses[50] += 9  # too early: fewer than a window before it
    assert learning.spikes_in(losses) == [300]


def test_held_out_text_is_of_both_kinds_and_not_trained_on() -> None:
    train, held, digest = learning.texts()
    assert set(held) == {"prose", "code"}
    assert {len(data) for data in held.values()} == {learning.KIND_BYTES + 1}
    whole = train.numpy().tobytes()
    for data in held.values():
        assert data[:200].numpy().tobytes() not in whole
    assert len(digest) == 64
    learning.texts.cache_clear()
    assert learning.texts()[2] == digest


def test_the_full_budget_is_judged_on_64_kilobytes() -> None:
    assert 2 * studies.FULL.held_out == 1 << 16
    assert studies.FULL.held_out % studies.FULL.gpt["context"] == 0
    assert all(b.held_out <= learning.KIND_BYTES for b in BUDGETS)


def test_the_judge_by_hand() -> None:
    net = learning.build(tiny())
    found = learning.judge(net, 32, 1 << 11, "cpu")
    losses, right = [], 0
    data = learning.texts()[1]["code"].long()
    for start in range(0, (1 << 11) - 31, 32):
        with torch.no_grad():
            p = net(data[None, start : start + 32])[0].log_softmax(-1)
        target = data[start + 1 : start + 33]
        losses += (-p[torch.arange(32), target]).tolist()
        right += int((p.argmax(-1) == target).sum())
    assert len(losses) == 1 << 11
    assert found["loss_by_kind"]["code"] == pytest.approx(np.mean(losses), rel=1e-5)
    assert found["accuracy"]["code"] == right / len(losses)
    assert found["loss"] == pytest.approx(sum(found["loss_by_kind"].values()) / 2)
    assert net.training


# How sums are made -------------------------------------------------------------------------------


@pytest.mark.parametrize("how", studies.SUMS)
def test_sums_of_a_linear_layer(how: str) -> None:
    g = torch.Generator().manual_seed(1)
    x, w = torch.randn(3, 100, 160, generator=g), torch.randn(48, 160, generator=g)
    dy = torch.randn(3, 100, 48, generator=g)
    x.requires_grad_(), w.requires_grad_()
    y = learning.Sums.apply(x, w, how)
    y.backward(dy)

    def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """From tensors that hold values of E4M3 times a power of two or any scale: encode again."""
        a, b = (fpemu.encode(t, "fp8_tensor_e4m3") for t in (a, b))
        if how == "float32":
            return a.decode().float() @ b.decode().float()
        return matmul(a, b, unit="hopper.wgmma.e4m3", recipe=learning.SUMS[how])

    flat, gradient = x.detach().flatten(0, 1), dy.flatten(0, 1)
    assert torch.equal(y.detach().flatten(0, 1), product(flat, w.detach().t().contiguous()))
    assert x.grad is not None and w.grad is not None
    assert torch.equal(x.grad.flatten(0, 1), product(gradient, w.detach()))
    assert torch.equal(w.grad, product(gradient.t().contiguous(), flat))


def test_ways_of_summing_differ() -> None:
    g = torch.Generator().manual_seed(2)
    x, w = torch.randn(16, 512, generator=g), torch.randn(16, 512, generator=g)
    exact = learning.Sums.apply(x, w, "float32")
    fast, promoted = (learning.Sums.apply(x, w, how) for how in ("fast", "promoted"))
    assert float((fast - exact).norm()) > 2 * float((promoted - exact).norm()) > 0


# Studies -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("budget", BUDGETS, ids=lambda b: b.name)
def test_studies_are_paired_and_tuning_seeds_stay_apart(budget: studies.Budget) -> None:
    assert not set(budget.seeds) & set(studies.TUNING)
    for name, make in studies.STUDIES.items():
        points = make(budget)
        assert len(points) == len({runs.canonical(p) for p in points}), name
        tuning = name in ("tune", "predict")
        assert all((p["seed"] in studies.TUNING) == tuning for p in points), name
        if tuning:
            continue
        seeds: dict[str, set] = {}
        for p in points:
            what = {k: v for k, v in p.items() if k not in ("seed", "rounding")}
            seeds.setdefault(runs.canonical(what), set()).add(p["seed"])
        if name != "chaos":
            assert len({frozenset(s) for s in seeds.values()}) == 1, name


def test_seeds_of_budgets_differ() -> None:
    every = [seed for b in BUDGETS for seed in b.seeds]
    assert len(every) == len(set(every))
    assert len(studies.FULL.seeds) >= 6


def test_every_claim_has_its_runs() -> None:
    for claim in studies.CLAIMS:
        cells = {studies.cell(p) for p in studies.STUDIES[claim.study](studies.FULL)}
        assert {claim.arm, claim.reference} <= cells, claim
    full = [p for s in ("recipes", "ablations") for p in studies.STUDIES[s](studies.FULL)]
    assert len([p for p in full if p["arm"] == "nvfp4"]) == 2 * len(studies.FULL.seeds)
    assert len({runs.name_of(p) for p in full if p["arm"] == "nvfp4"}) == len(studies.FULL.seeds)


def test_the_arms_are_what_their_names_say() -> None:
    sr = {n: o.rounding for n, o in studies.recipe("nvfp4+sr_forward").operands().items()}
    assert set(sr.values()) == {"sr"}
    dgrad, nvfp4, bf16 = (studies.recipe(a) for a in ("nvfp4_dgrad", "nvfp4", "bf16"))
    assert (dgrad.fprop, dgrad.dgrad, dgrad.wgrad) == (bf16.fprop, nvfp4.dgrad, bf16.wgrad)
    assert dgrad.keep == nvfp4.keep and studies.recipe("nvfp4-keep").keep == ()
    naive = studies.recipe("nvfp4_naive")
    assert {str(o) for o in naive.operands().values()} == {"nvfp4"} and naive.keep == ()


# Verdicts ----------------------------------------------------------------------------------------


def gaps_around(mean: float, sd: float) -> list[float]:
    """Six gaps of exactly this mean and deviation."""
    z = np.array([-1.2, -0.6, -0.2, 0.1, 0.7, 1.2])
    return list(mean + sd * (z - z.mean()) / z.std(ddof=1))


def test_t_interval_and_p_of_six() -> None:
    """m = 0.01, s = 0.005: t = 4.899 at 5 degrees of freedom, p = 0.00448; t(0.975, 5) = 2.5706."""
    gaps = gaps_around(0.01, 0.005)
    mean, low, high = verdicts.interval(gaps)
    assert mean == pytest.approx(0.01) and high - mean == pytest.approx(2.570582 * 0.005 / 6**0.5)
    assert mean - low == pytest.approx(high - mean)
    for_it, against = verdicts.p_values("worse", gaps)
    assert (for_it, against) == (pytest.approx(0.004478, abs=5e-6), 1.0)
    assert verdicts.p_values("better", gaps) == (against, for_it)


def test_equality_is_two_one_sided_tests() -> None:
    """Distances to the margin of 0.01: 0.008 and 0.012 at s / sqrt(6) = 0.002 are t = 4 and 6."""
    gaps = gaps_around(0.002, 0.002 * 6**0.5)
    for_it, against = verdicts.p_values("equal", gaps)
    assert for_it == pytest.approx(0.005162, abs=5e-6)  # t(5) above 4, one side
    assert against == 1.0
    beyond = verdicts.p_values("equal", gaps_around(-0.02, 0.005))
    assert beyond[1] < 0.01 < beyond[0]


def test_gaps_without_spread() -> None:
    """Two ways to the same bits are equal, and neither is worse."""
    assert verdicts.p_values("equal", [0.0] * 6)[0] == 0.0
    assert verdicts.p_values("worse", [0.0] * 6) == (1.0, 1.0)
    assert verdicts.p_values("worse", [0.1] * 6) == (0.0, 1.0)


@pytest.mark.parametrize("budget", [studies.QUICK, studies.DEFAULT, studies.FULL])
def test_every_budgets_hybrid_has_all_kinds_of_layers(budget: studies.Budget) -> None:
    """The paper has a number for each, a local copy too."""
    assert set(budget.hybrid["pattern"]) == set("MAF")


def test_percent_is_of_the_references_magnitude() -> None:
    """What a loss falls by is negative; worse is to be positive there too."""
    falls = {"ref": {1: -0.5, 2: -0.5}, "arm": {1: -0.4, 2: -0.2}}
    (row,) = verdicts.claims([studies.Claim("x", "arm", "worse", "ref")], falls, 0.0)
    assert row["percent"] == pytest.approx(40) and row["mean"] == pytest.approx(0.2)


def test_holm_by_hand() -> None:
    assert verdicts.holm([0.02, 0.01, 0.9]) == pytest.approx([0.04, 0.03, 0.9])
    assert verdicts.holm([0.6, 0.5]) == [1.0, 1.0]


def judged(
    effects: dict[str, tuple[float, float]], wanted: list[studies.Claim], floor: float = 0.0
) -> list[str]:
    """Verdicts where cells lie this much (mean, deviation) above a reference that varies a lot."""
    base = {seed: 2 + 0.1 * seed for seed in range(6)}
    losses = {
        name: {s: base[s] + g for s, g in zip(base, gaps_around(*effect), strict=True)}
        for name, effect in effects.items()
    }
    rows = verdicts.claims(wanted, {"ref": base, **losses}, floor)
    return [row["verdict"] for row in rows]


def test_verdicts() -> None:
    def claim(arm: str, says: str) -> studies.Claim:
        return studies.Claim("x", arm, says, "ref")

    up, down, none, wide = (0.02, 0.001), (-0.02, 0.001), (0.001, 0.001), (0.02, 0.04)
    cells = {"up": up, "down": down, "none": none, "wide": wide}
    every = [claim(arm, says) for arm in cells for says in ("worse", "better", "equal")]
    want = [
        "supported", "contradicted", "contradicted",
        "contradicted", "supported", "contradicted",
        "not resolved", "not resolved", "supported",
        "not resolved", "not resolved", "not resolved",
    ]  # fmt: skip
    assert judged(cells, every) == want
    # Below the chaos floor no direction is resolved; equality is.
    assert judged(cells, every, floor=0.03)[:6] == ["not resolved"] * 2 + ["contradicted"] + [
        "not resolved"
    ] * 2 + ["contradicted"]


def test_correction_over_claims_decides() -> None:
    """t = 4.0, p = 0.0103: resolved alone, not among thirteen."""
    effect = {"a": (0.02, 0.02 * 6**0.5 / 4)}
    one = [studies.Claim("x", "a", "worse", "ref")]
    assert judged(effect, one) == ["supported"]
    assert judged(effect, one * 13) == ["not resolved"] * 13


def test_pairing_needs_the_same_seeds() -> None:
    with pytest.raises(ValueError, match="seeds differ"):
        verdicts.paired({1: 0.0, 2: 0.0}, {1: 0.0, 3: 0.0})


def test_the_floor_is_around_zero() -> None:
    """A common shift counts: rms 0.01 of four, t(0.975, 4) = 2.776."""
    assert verdicts.chaos_floor([0.01] * 4) == pytest.approx(2.776445 * 0.01 / 2)
    assert verdicts.chaos_floor([0.0] * 4) == 0.0


# Token multiplier --------------------------------------------------------------------------------

LENGTHS = (240, 480, 720)


def law(tokens: float) -> float:
    return 4 - 0.3 * math.log(tokens)


def token_losses(m: float, noise: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Six seeds with their own level; `slow` needs m times the tokens."""
    rng = np.random.default_rng(seed)
    level = rng.normal(0, 0.05, (6, 1))
    slow = level + [[law(t / m) for t in LENGTHS]] + noise * rng.normal(size=(6, 3))
    fast = level[:, 0] + law(480) + noise * rng.normal(size=6)
    return slow, fast


def test_the_multiplier_of_a_known_law() -> None:
    slow, fast = token_losses(1.36, 0.0, 0)
    found = verdicts.multiplier(LENGTHS, slow, fast, at=1)
    assert found["slope"] == pytest.approx(-0.3)
    assert [found[k] for k in ("m", "low", "high", "bootstrap_low", "bootstrap_high")] == (
        pytest.approx([1.36] * 5, abs=1e-9)
    )


def test_the_multipliers_interval_covers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 300 experiments with noise, about 95 % have the true value inside; the bootstrap fewer."""
    monkeypatch.setattr(verdicts, "RESAMPLES", 200)
    inside = again = 0
    for seed in range(300):
        found = verdicts.multiplier(LENGTHS, *token_losses(1.1, 0.01, seed), at=1)
        inside += found["low"] <= 1.1 <= found["high"]
        again += found["bootstrap_low"] <= 1.1 <= found["bootstrap_high"]
    assert 274 <= inside <= 295
    assert again < inside


def test_a_multiplier_needs_a_falling_loss() -> None:
    with pytest.raises(ValueError, match="does not fall"):
        verdicts.multiplier(LENGTHS, [[2.0, 2.0, 2.1]] * 3, [2.0] * 3, at=1)
    with pytest.raises(ValueError, match="do not fit"):
        verdicts.multiplier(LENGTHS, [[2.0, 1.9]] * 3, [2.0] * 3, at=1)


# Prediction and proxy ----------------------------------------------------------------------------


def test_predicted_noise_of_known_casts() -> None:
    found = prediction.measure(
        {**studies.predict(TINY)[0], "steps": 2, "model": TINY.gpt, "batch": 2}
    )["arms"]
    assert set(found) == set(studies.RECIPE_ARMS)
    score = {arm: row["score_db"] for arm, row in found.items()}
    assert score["fp32"] is None
    assert score["fp16"] > score["bf16"] > score["mxfp8"] > score["nvfp4_naive"] > score["mxfp4"]
    assert score["fp8_delayed"] == score["fp8_current"]
    operands = found["nvfp4"]["operands_db"]
    assert operands["wgrad.x"] > operands["wgrad.dy"] + 1  # to nearest, and stochastically


def test_proxy_spikes_are_counted_once() -> None:
    assert proxy.spikes_in([1.0] * 30) == []
    assert proxy.spikes_in([1.0] * 12 + [20, 30, 9, 1, 20]) == [12, 16]


def test_proxy_arms_differ_and_repeat() -> None:
    points = {p["arm"]: p for p in studies.proxy(TINY) if p["rate"] == 1e-2 and p["seed"] == 21}
    found = {arm: proxy.train(p) for arm, p in points.items()}
    assert found == {arm: proxy.train(p) for arm, p in points.items()}
    assert len({row["train"][-1] for row in found.values()}) == len(studies.PROXY_ARMS)
    assert found["fp32"]["train"][-1] < found["fp32"]["train"][0]
    assert found["fp32"]["gains_saturated"] is None


# The script --------------------------------------------------------------------------------------


def invented(point: dict[str, Any]) -> dict[str, Any]:
    """Metrics of a point without any training: MXFP4 is worse by 0.05, everything else by noise."""
    rng = random.Random(runs.canonical(point))
    if point["task"] == "proxy":
        bad = "norms" in point["arm"]
        return {"final": 0.1, "diverged": bad, "spikes": [5] if bad else [], "train": [1.0, 0.1]}
    if point["task"] == "parts":
        pattern = point["model"].get("pattern")
        layers = [f"{i}.into" for i in range(len(pattern))] if pattern else ["0.qkv", "0.down"]
        wgrad = [{"arm": arm, "layer": layer, "noise": 0.02 + (layer[0] != "0") * 0.01}
                 for arm in parts.CASTS for layer in (*layers, "1.qkv", "1.down")]  # fmt: skip
        return {"held_out": 2.0, "wgrad": wgrad, "tensors": [
            {"layer": layer, "part": parts.part_of(layer, pattern), "tensor": tensor,
             **dict.fromkeys(outliers.SHAPE, 1.0 + (tensor == "dy")),
             **{f"zeroed {fmt}": rng.random() for fmt in parts.FORMATS},
             **{f"db {fmt}": None if fmt == "fp16" else 20.0 for fmt in parts.FORMATS}}
            for layer in layers for tensor in ("dy", "w", "x")
        ]}  # fmt: skip
    worse = 0.05 if point["arm"].startswith("mxfp4") else 0.0
    loss = law(point["steps"]) + 0.01 * point["seed"] % 0.1 + worse + rng.gauss(0, 1e-4)
    curve = [loss + 1 / (k + 1) for k in range(max(1, point["steps"] // learning.BIN))]
    return {
        "held_out": loss, "held_out_fp32": loss - worse, "diverged": False, "spikes": [], "skipped": 0, "train": curve,
        "accuracy": {"prose": 0.5 + rng.gauss(0, 1e-3), "code": 0.6},
    }  # fmt: skip


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with invented runs of every study of the quick budget with six seeds."""
    budget = replace(studies.QUICK, seeds=tuple(range(21, 27)))
    monkeypatch.setitem(loss_curves.BUDGETS, "quick", budget)
    monkeypatch.setattr(studies, "PREDICTED", {"bf16": 50.0, "mxfp8": 30.0, "mxfp4": 15.0})
    origin = harness.provenance(loss_curves.NAME, [], "cpu")
    points = [p for make in studies.STUDIES.values() for p in make(budget)]
    runs.work(tmp_path / "runs", points, invented, loss_curves.NAME, origin)
    return tmp_path


def test_records_and_figures_of_every_study(store: Path, capsys: pytest.CaptureFixture) -> None:
    assert loss_curves.main(["--quick", "--collect", "--out", str(store)]) == 0
    for study in studies.STUDIES:
        record = harness.read_record(store / f"loss_curves_{study}.json")
        assert record["point"]["study"] == study
        assert record["provenance"]["git"].keys() == {"commit", "dirty"}
        runs_ = record["metrics"]["runs"]
        assert len(runs_) == len(studies.STUDIES[study](loss_curves.BUDGETS["quick"]))
    drawn = {path.name for path in store.glob("*.pdf")}
    names = ("gaps", "prediction", *studies.STUDIES)
    assert drawn == {f"loss_curves_{n}.pdf" for n in names if n != "predict"}
    recipes = harness.read_record(store / "loss_curves_recipes.json")["metrics"]
    verdict = {(c["arm"], c["reference"]): c["verdict"] for c in recipes["claims"]}
    assert verdict["mxfp4", "bf16"] == verdict["mxfp4_sr_rht", "nvfp4"] == "supported"
    assert verdict["mxfp8", "bf16"] == "supported"
    assert verdict["nvfp4", "bf16"] == "not resolved"
    row = next(c for c in recipes["cells"] if c["cell"] == "mxfp4")
    assert row["gap"] == pytest.approx(0.05, abs=1e-3)
    assert row["gap_fp32"][0] == pytest.approx(0.0, abs=1e-3)
    assert recipes["prediction"]["arms"] == ["bf16", "mxfp8", "mxfp4"]
    tokens = harness.read_record(store / "loss_curves_tokens.json")["metrics"]["multipliers"][0]
    assert tokens["m"] == pytest.approx(math.exp(0.05 / 0.3), rel=0.02)
    assert tokens["verdict"] == "resolved"
    assert "supported" in capsys.readouterr().out
    found = harness.read_record(store / "loss_curves_parts.json")["metrics"]
    row = found["parts"][0]
    assert (row["model"], row["part"], row["tensor"]) == ("GPT", "attention in", "dy")
    assert (row["kurtosis"], row["n"], row["db fp16"]) == (2.0, studies.QUICK.few, None)
    row = found["depth"][0]
    assert row["arm"] == "mxfp8" and row["blocks"] == pytest.approx([0.02, 0.03])
    assert row["last_over_first"] == pytest.approx({"mean": 1.5, "low": 1.5, "high": 1.5})

    before = {path.name: path.read_bytes() for path in store.glob("loss_curves_*")}
    argv = ["--quick", "--collect", "--study", "switch", "tokens", "--out", str(store)]
    assert loss_curves.main(argv) == 0  # the same bytes again
    after = {path.name: path.read_bytes() for path in store.glob("loss_curves_*")}
    assert {name for name in after if after[name] != before[name]} == {
        "loss_curves_switch.json", "loss_curves_tokens.json",  # their argv differs
    }  # fmt: skip


# Parts of a model --------------------------------------------------------------------------------


TINY_HYBRID = {
    "width": 32, "pattern": "MAF", "heads": 2, "head_size": 8, "state": 8, "chunk": 8, "context": 32,
}  # fmt: skip


def tiny_hybrid(**changes: Any) -> dict[str, Any]:
    budget = replace(studies.QUICK, hybrid=TINY_HYBRID, hybrid_steps=2, batch=2)
    fields = {"task": "hybrid", "model": TINY_HYBRID, "steps": 2}
    return studies.point(budget, "nvfp4-keep", 5, **fields, **changes)


def test_a_part_alone_is_quantized() -> None:
    net: Any = learning.build(tiny_hybrid(only="F"))
    recipes = {
        name: m.recipe.name
        for name, m in net.blocks.named_modules()
        if isinstance(m, fpemu.nn.Linear)
    }
    bf16 = dict.fromkeys(("0.into", "0.out", "1.qkv", "1.out"), "bf16")
    assert recipes.keys() == {*bf16, "2.into", "2.out"}
    assert {name: recipes[name] for name in bf16} == bf16
    assert recipes["2.into"] == recipes["2.out"] == studies.recipe("nvfp4-keep").name
    assert studies.cell(tiny_hybrid(only="F")) == "nvfp4-keep, in feed-forward alone"


def test_parts_are_measured() -> None:
    """Against the definitions, on the tensors that the model's own capture gives."""
    point = {**tiny_hybrid(), "task": "parts", "arm": "bf16"}
    measured = parts.measure(point)
    rows = {(r["layer"], r["tensor"]): r for r in measured["tensors"]}
    assert len(rows) == 6 * 3
    assert rows["1.qkv", "x"]["part"] == "attention in"
    found: dict[str, Any] = {}

    def at_end(net: Any) -> None:
        found.update(prediction.capture(net, point))
        before = [m.recipe for m in net.modules() if isinstance(m, fpemu.nn.Linear)]
        parts.gradients(net, found, 1)
        # The held-out loss, which comes next, is that of the BF16 run, whatever was cast.
        after = [m.recipe for m in net.modules() if isinstance(m, fpemu.nn.Linear)]
        assert after == before and {recipe.name for recipe in after} == {"bf16"}

    learning.train({**point, "task": "hybrid"}, at_end)
    sparse = found["2.out"]["x"]  # squared ReLU: zeros are no loss
    q = fpemu.quantize(sparse, "e4m3")
    assert int((sparse == 0).sum()) > 0
    assert rows["2.out", "x"]["zeroed e4m3"] == int(((sparse != 0) & (q == 0)).sum()) / int((sparse != 0).sum())  # fmt: skip
    x = found["0.out"]["dy"].numpy().astype(float)
    row = rows["0.out", "dy"]
    assert row["crest"] == pytest.approx(abs(x).max() / (x**2).mean() ** 0.5, rel=1e-6)
    q = fpemu.quantize(found["0.out"]["dy"], "e4m3").numpy()
    assert row["zeroed e4m3"] == ((x != 0) & (q == 0)).sum() / (x != 0).sum() > 0

    noise = {(r["arm"], r["layer"]): r["noise"] for r in measured["wgrad"]}
    assert len(noise) == 6 * len(parts.CASTS)
    # To nearest, in blocks along tokens, unrotated: by hand from the public casts.
    dy, x = (found["1.qkv"][name].T.contiguous() for name in ("dy", "x"))
    exact = dy.double() @ x.double().T
    for arm, fmt in (("mxfp8", "mxfp8_e4m3/rceil"), ("nvfp4_naive", "nvfp4")):
        product = fpemu.quantize(dy, fmt).double() @ fpemu.quantize(x, fmt).double().T
        share = float((product - exact).square().sum() / exact.square().sum())
        assert noise[arm, "1.qkv"] == pytest.approx(share, rel=1e-9)
    # With stochastic rounding and rotation: the noise of FP4, not the noise of a wrong product.
    assert noise["mxfp8", "1.qkv"] < noise["nvfp4", "1.qkv"] < 0.1


def test_an_incomplete_study_has_no_record(store: Path, capsys: pytest.CaptureFixture) -> None:
    budget = loss_curves.BUDGETS["quick"]
    gone, failed = studies.tune(budget)[0], studies.tune(budget)[1]
    runs.path_of(store / "runs", gone).unlink()
    path = runs.path_of(store / "runs", failed)
    record = json.loads(path.read_text())
    path.write_text(json.dumps({**record, "status": "failed", "error": "E: no luck"}))
    argv = ["--quick", "--collect", "--study", "tune", "chaos", "--out", str(store)]
    assert loss_curves.main(argv) == 1
    assert {p.name for p in store.glob("*.json")} == {"loss_curves_chaos.json"}
    shown = capsys.readouterr().out
    assert "1 runs failed, 1 missing" in shown and "E: no luck" in shown


def test_the_script_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One worker process, three runs of real training."""
    budget = replace(TINY, rates=(1e-3,), seeds=(21, 22), steps=4)
    monkeypatch.setitem(loss_curves.BUDGETS, "quick", budget)
    argv = ["--quick", "--study", "chaos", "--workers", "1", "--out", str(tmp_path)]
    assert loss_curves.main(argv) == 0
    record = harness.read_record(tmp_path / "loss_curves_chaos.json")
    assert [row["seeds"] for row in record["metrics"]["rates"]] == [[21, 22]]
    assert (tmp_path / "loss_curves_chaos.png").read_bytes().startswith(b"\x89PNG")
    assert loss_curves.main([*argv, "--status"]) == 0


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--quick", "--full"], "two budgets"),
        (["--workers", "0"], "at least one worker"),
        (["--study", "recipe"], "invalid choice"),
    ],
)
def test_arguments_that_cannot_be(argv: list[str], says: str, capsys: Any) -> None:
    with pytest.raises(SystemExit):
        loss_curves.main(argv)
    assert says in capsys.readouterr().err
