"""The table of every number in the paper: its name, its record, its place there, its form.

A row names one place. Bodies of LaTeX tables are rows too; the functions that make them stand above
the part of the table that uses them. The text uses a number as ``\\n{name}``; tests hold the two
together, so a row that the text does not use is an error, as is a name that no row has.
"""

from __future__ import annotations

import re
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from paper.macros import (
    Row,
    code,
    fixed,
    interval,
    look_up,
    minus,
    percent,
    percents,
    raw,
    scientific,
    signed,
    whole,
    words,
)  # fmt: skip

Data = dict[str, Any]


def lines(rows: Iterable[Sequence[str]]) -> str:
    """Rows of a LaTeX table."""
    return " ".join(" & ".join(row) + r" \\" for row in rows)


def tt(text: str) -> str:
    return code(text)


def short(value: float) -> str:
    """A percent of a table, without its unit."""
    return percent(value).removesuffix("\\,\\%")


# Evidence ----------------------------------------------------------------------------------------

LABELS = ("hardware-verified", "library-verified", "spec-verified", "model")
_ARCHITECTURES = ("volta", "turing", "ampere", "ada", "hopper", "blackwell", "rtx_blackwell")


def kind_of(name: str, row: Data) -> str:
    """What an entry of the evidence table is about."""
    head = name.split(".")[0]
    if head == "cvt":
        return "instructions"
    if head in _ARCHITECTURES:
        return "matrix units"
    if head in ("cublaslt", "cutlass", "deepgemm", "scaled"):
        return "GEMM recipes"
    if head in ("exact", "fp32") and (row.get("of") != "inputs"):
        return "references"
    return "element formats" if row.get("of") == "inputs" else "block formats, dialects"


def evidence_table(record: Data) -> str:
    kinds: dict[str, Counter[str]] = {}
    for name, row in record.items():
        kinds.setdefault(kind_of(name, row), Counter())[row["label"]] += 1
    order = ("element formats", "block formats, dialects", "instructions", "matrix units",
             "GEMM recipes", "references")  # fmt: skip
    return lines([kind, *(str(kinds[kind][x] or "--") for x in LABELS)] for kind in order)


def labelled(label: str) -> Callable[[Data], int]:
    return lambda record: sum(row["label"] == label for row in record.values())


def hardware_outputs(record: Data) -> int:
    return sum(row["count"] for row in record.values() if row["label"] == "hardware-verified")


def gpus(record: Data) -> str:
    """The GPUs of the recordings, in order of appearance."""
    found: dict[str, None] = {}
    for row in record.values():
        if row["label"] == "hardware-verified":
            found |= dict.fromkeys(re.findall(r"\b(?:[A-Z]+\d+[A-Z]?|Ada)\b", row["what"]))
    known = [name for name in found if not re.fullmatch(r"FP\d+|BF\d+|TF\d+", name)]
    return ", ".join(known)


def live(column: int) -> Callable[[Data], int]:
    """Sum of a column over all libraries, dialects and cases."""

    def total(record: Data) -> int:
        return sum(
            row[column]
            for library in record["metrics"]["live"].values()
            for dialect in library.values()
            for row in dialect.values()
            if isinstance(row, list)
        )

    return total


def live_differing(record: Data) -> int:
    return sum(live(column)(record) for column in (3, 5, 7))


def recorded(key: str) -> Callable[[Data], int]:
    return lambda record: sum(row[key] for row in record["metrics"]["recorded"].values())


EVIDENCE = (
    Row("ev.table", "evidence", evidence_table, raw),
    Row("ev.names", "evidence", len, whole),
    Row("ev.hardware", "evidence", labelled("hardware-verified"), whole),
    Row("ev.library", "evidence", labelled("library-verified"), whole),
    Row("ev.model", "evidence", labelled("model"), whole),
    Row("ev.outputs", "evidence", hardware_outputs, whole),
    Row("ev.gpus", "evidence", gpus, words),
    Row("ev.inputs", "evidence", "e4m3.count", whole),
    Row("ev.libraries", "differential", lambda r: len(r["metrics"]["libraries"]), whole),
    Row("ev.live.blocks", "differential", live(0), whole),
    Row("ev.live.codes", "differential", live(4), whole),
    Row("ev.live.differing", "differential", live_differing, whole),
    Row("ev.recorded", "differential", recorded("blocks"), whole),
    Row("ev.recorded.differing", "differential", recorded("differing"), whole),
)

# Dialects ----------------------------------------------------------------------------------------

#: Weights that the study had: pretrained ones, or those of its own GPT.
PRETRAINED, OWN = "pretrained weight", "weight"


def weights_of(record: Data) -> str:
    return PRETRAINED if record["metrics"]["pretrained"] else OWN


def weights_in_words(record: Data) -> str:
    source = record["metrics"]["pretrained"]
    if source is None:
        return "the GPT's own weights (the pretrained ones were not installed)"
    return f"the matrices of all-MiniLM-L6-v2, package {source['package']} {source['version']}"


#: Dialects of the table: one line of arithmetic each, then those that mean to differ.
SHOWN = (
    "nvfp4/torchao", "nvfp4/modelopt", "nvfp4/compressed-tensors", "nvfp4/vllm-ref",
    "nvfp4/fouroversix-static6", "nvfp4/quark", "nvfp4/te-fast", "mxfp4/modelopt",
    "mxfp4/microxcaling-nearest", "mxfp4/microxcaling-even", "mxfp4/quark-even",
)  # fmt: skip


def share(record: Data, kind: str, dtype: str, dialect: str, key: str) -> float:
    (row,) = (
        row for row in record["metrics"]["shares"]
        if (row["kind"], row["dtype"], row["dialect"]) == (kind, dtype, dialect)
    )  # fmt: skip
    return row[key][0]


def dialect_share(
    kind: str, dtype: str, dialect: str, key: str = "bits"
) -> Callable[[Data], float]:
    """Share of blocks; kind ``"weights"`` is whichever weights the study had."""

    def look(record: Data) -> float:
        return share(record, weights_of(record) if kind == "weights" else kind, dtype, dialect, key)

    return look


def dialect_table(record: Data) -> str:
    weights = weights_of(record)
    cells = ((weights, "float32"), (weights, "bfloat16"), ("gradient", "bfloat16"))
    return lines(
        [tt(name), *(short(share(record, *cell, name, "bits")) for cell in cells),
         short(share(record, "gradient", "bfloat16", name, "values"))]
        for name in SHOWN
    )  # fmt: skip


def blocks(record: Data) -> int:
    (row,) = (
        m for m in record["metrics"]["matrices"]
        if (m["family"], m["kind"], m["dtype"]) == ("NVFP4", weights_of(record), "float32")
    )  # fmt: skip
    return row["blocks"]


def sqnr_span(names: Sequence[str], key: str) -> Callable[[Data], float]:
    """Largest |value| over dialects, kinds and dtypes."""

    def look(record: Data) -> float:
        return max(
            abs(row[key]) for row in record["metrics"]["sqnr"]
            if row["dialect"] in names and row[key] is not None
        )  # fmt: skip

    return look


ORDERS = ("nvfp4/te-ref", "nvfp4/torchao", "nvfp4/modelopt", "nvfp4/compressed-tensors",
          "nvfp4/vllm-ref", "nvfp4/fouroversix-static6", "nvfp4/quark")  # fmt: skip


def gain(dialect: str, pick: Callable[[Iterable[float]], float]) -> Callable[[Data], float]:
    """SQNR less that of `nvfp4`, over float32 tensors of all kinds."""

    def look(record: Data) -> float:
        level = {
            (row["kind"], row["dialect"]): row["sqnr_db"]
            for row in record["metrics"]["sqnr"] if row["dtype"] == "float32"
        }  # fmt: skip
        kinds = [kind for kind, name in level if name == dialect]
        return pick(level[kind, dialect] - level[kind, "nvfp4"] for kind in kinds)

    return look


DIALECTS = (
    Row("dia.table", "dialects", dialect_table, raw),
    Row("dia.blocks", "dialects", blocks, whole),
    Row("dia.weights", "dialects", weights_in_words, words),
    Row("dia.nvfp4", "dialects", lambda r: len(r["metrics"]["dialects"]["NVFP4"]), whole),
    Row("dia.mxfp4", "dialects", lambda r: len(r["metrics"]["dialects"]["MXFP4"]), whole),
    Row("dia.seed", "dialects", "point.seed", whole),
    Row("dia.torchao.bf16", "dialects", dialect_share("weights", "bfloat16", "nvfp4/torchao"), percent),
    Row("dia.ct.bf16", "dialects", dialect_share("weights", "bfloat16", "nvfp4/compressed-tensors"), percent),
    Row("dia.torchao.f32", "dialects", dialect_share("weights", "float32", "nvfp4/torchao"), percent),
    Row("dia.torchao.dy", "dialects", dialect_share("gradient", "bfloat16", "nvfp4/torchao"), percent),
    Row("dia.quark.bits", "dialects", dialect_share("weights", "bfloat16", "nvfp4/quark"), percent),
    Row("dia.quark.values", "dialects", dialect_share("weights", "bfloat16", "nvfp4/quark", "values"), percent),
    Row("dia.mxscaling.bf16", "dialects", dialect_share("weights", "bfloat16", "mxfp4/microxcaling-nearest"), percent),
    Row("dia.orders.db", "dialects", sqnr_span(ORDERS, "change_db"), fixed(3, "dB")),
    Row("dia.foursix.low", "dialects", gain("nvfp4/te-4over6-mse-256", min), fixed(2)),
    Row("dia.foursix.high", "dialects", gain("nvfp4/te-4over6-mse-256", max), fixed(2, "dB")),
    Row("dia.limit", "dialects", "metrics.limits.NVFP4", scientific),
)  # fmt: skip

# Accumulation ------------------------------------------------------------------------------------

UNITS_SHOWN = (
    "Hopper E4M3 fast", "Hopper E4M3 promoted", "Blackwell E4M3", "Hopper BF16", "Ampere FP16",
    "Blackwell NVFP4", "FP32 sequential", "FP32 pairwise",
)  # fmt: skip


def error(record: Data, kind: str, line: str, k: int, key: str) -> float:
    (row,) = (
        row for row in record["metrics"]["errors"]
        if (row["kind"], row["line"], row["k"]) == (kind, line, k)
    )  # fmt: skip
    return row[key]


def longest(record: Data) -> int:
    return max(record["point"]["lengths"])


def accumulation_table(record: Data) -> str:
    k = longest(record)
    label = {row["label"]: row["evidence"] for row in record["metrics"]["lines"]}
    return lines(
        [line.replace("promoted", "prom."),
         *(scientific(error(record, kind, line, k, key))
           for kind, key in (("normal", "rms"), ("growing", "rms"), ("growing", "bias"))),
         label[line].split(":")[0].replace("-verified", "")]
        for line in UNITS_SHOWN
    )  # fmt: skip


def wgrad_range(
    line: str, key: str, pick: Callable[[Iterable[float]], float]
) -> Callable[[Data], float]:
    return lambda record: pick(
        row[key] for row in record["metrics"]["weight_gradients"] if row["line"] == line
    )


ACCUMULATION = (
    Row("acc.table", "accumulation", accumulation_table, raw),
    Row("acc.k", "accumulation", longest, whole),
    Row("acc.seed", "accumulation", "point.seed", whole),
    Row("acc.tokens", "accumulation", lambda r: r["metrics"]["weight_gradients"][0]["k"], whole),
    Row("acc.hopper.max", "accumulation", "metrics.errors[kind=normal,line=Hopper E4M3 fast,k=4096].max", percent),
    Row("acc.hopper.rms", "accumulation", "metrics.errors[kind=normal,line=Hopper E4M3 fast,k=4096].rms", percent),
    Row("acc.promoted.rms", "accumulation", "metrics.errors[kind=normal,line=Hopper E4M3 promoted,k=4096].rms", percent),
    Row("acc.growing.bias", "accumulation", lambda r: error(r, "growing", "Hopper E4M3 fast", longest(r), "bias"), percents(1)),
    Row("acc.wgrad.low", "accumulation", wgrad_range("Hopper E4M3 fast", "error", min), percent),
    Row("acc.wgrad.high", "accumulation", wgrad_range("Hopper E4M3 fast", "error", max), percent),
    Row("acc.cast.low", "accumulation", wgrad_range("Hopper E4M3 fast", "cast_error", min), percent),
    Row("acc.cast.high", "accumulation", wgrad_range("Hopper E4M3 fast", "cast_error", max), percent),
    Row("acc.wgrad.promoted", "accumulation", wgrad_range("Hopper E4M3 promoted", "error", max), percent),
)  # fmt: skip

# Underflow ---------------------------------------------------------------------------------------

CAST = (
    "fp16", "e5m2", "e4m3", "fp8_tensor_e5m2", "fp8_tensor_e4m3", "fp8_block_e4m3", "mxfp8_e4m3",
    "mxfp4", "mxfp4/rceil", "nvfp4",
)  # fmt: skip


def end(record: Data) -> int:
    return max(record["point"]["steps"])


def gradient(record: Data, fmt: str, step: int | None = None) -> Data:
    (row,) = (
        row for row in record["metrics"]["by_format"]
        if (row["kind"], row["format"], row["step"])
        == ("gradient", fmt, end(record) if step is None else step)
    )  # fmt: skip
    return row


def flushed(fmt: str, key: str = "underflow_share") -> Callable[[Data], Any]:
    return lambda record: gradient(record, fmt)[key]


def underflow_table(record: Data) -> str:
    first = min(record["point"]["steps"])

    def row(fmt: str) -> list[str]:
        a, b = gradient(record, fmt, first), gradient(record, fmt)
        db = b["sqnr_db_median"]
        return [tt(fmt), short(a["underflow_share"]), short(b["underflow_share"]),
                short(b["worst_share"]), "--" if db is None else f"{db:.1f}"]  # fmt: skip

    return lines(row(fmt) for fmt in CAST)


def scaled(fmt: str, log2: int) -> Callable[[Data], float]:
    def look(record: Data) -> float:
        (row,) = (
            row for row in record["metrics"]["loss_scale"]
            if (row["format"], row["log2_scale"], row["step"]) == (fmt, log2, end(record))
        )  # fmt: skip
        return row["underflow_share"]

    return look


def in_percent(value: float) -> str:
    return f"{100 * value:.1f}\\,\\%"


def stochastic(fmt: str, key: str) -> str:
    return f"metrics.rounding[format={fmt}].{key}"


UNDERFLOW = (
    Row("uf.table", "underflow", underflow_table, raw),
    Row("uf.millions", "underflow", lambda r: r["metrics"]["parameters"] / 1e6, fixed(1)),
    Row("uf.first", "underflow", lambda r: min(r["point"]["steps"]) + 1, whole),
    Row("uf.last", "underflow", lambda r: end(r) + 1, whole),
    Row("uf.seed", "underflow", "point.seed", whole),
    Row("uf.draws", "underflow", "point.draws", whole),
    Row("uf.fp16", "underflow", flushed("fp16"), percent),
    Row("uf.fp16.worst", "underflow", flushed("fp16", "worst_share"), percent),
    Row("uf.fp16.layer", "underflow", flushed("fp16", "worst_layer"), code),
    Row("uf.fp16.scaled", "underflow", scaled("fp16", 16), percent),
    Row("uf.e5m2", "underflow", flushed("e5m2"), percent),
    Row("uf.e4m3", "underflow", flushed("e4m3"), percent),
    Row("uf.e5m2.scaled", "underflow", scaled("e5m2", 16), percent),
    Row("uf.e4m3.scaled", "underflow", scaled("e4m3", 16), percent),
    Row("uf.e5m2.tensor.db", "underflow", flushed("fp8_tensor_e5m2", "sqnr_db_median"), fixed(1, "dB")),
    Row("uf.e4m3.tensor.db", "underflow", flushed("fp8_tensor_e4m3", "sqnr_db_median"), fixed(1, "dB")),
    Row("uf.mxfp4", "underflow", flushed("mxfp4/rceil"), percent),
    Row("uf.nvfp4", "underflow", flushed("nvfp4"), percent),
    Row("uf.mxfp4.db", "underflow", flushed("mxfp4/rceil", "sqnr_db_median"), fixed(1, "dB")),
    Row("uf.nvfp4.db", "underflow", flushed("nvfp4", "sqnr_db_median"), fixed(1, "dB")),
    Row("uf.sr.kept", "underflow", stochastic("mxfp4/rceil", "kept_sr"), in_percent),
)  # fmt: skip

# Loss scale, masters, and all that is claimed ----------------------------------------------------

SAYS = {"worse": "$>$", "better": "$<$", "equal": "$=$"}
_SHORT = (
    (" bf16 at the end", ""), ("dynamic", "dyn."), ("nvfp4, forward", "forward"), ("nvfp4, backward", "backward"),
    ("nvfp4, both", "both"), ("fp8, ", ""),
)  # fmt: skip


def arm(name: str) -> str:
    """An arm's name in a table of claims, where room is short."""
    for long, brief in _SHORT:
        name = name.replace(long, brief)
    return re.sub(r"2\\textasciicircum\{\}(-?\d+)", r"$2^{\1}$", words(name))


def claims_table(record: Data) -> str:
    """A line per claim: gap in nats with half its interval, in percent, p after Holm, verdict."""
    return lines(
        [f"{arm(c['arm'])} {SAYS[c['says']]} {arm(c['reference'])}",
         f"{minus(format(c['mean'], '+.4f'))} $\\pm$ {(c['high'] - c['low']) / 2:.4f}",
         minus(format(c["percent"], "+.2f")),
         "$<$.001" if c["p_holm"] < 0.001 else f"{c['p_holm']:.3f}".removeprefix("0"), c["verdict"]]
        for c in record["metrics"]["claims"]
    )  # fmt: skip


def claim(arm: str, reference: str, says: str, key: str | None = None) -> Callable[[Data], Any]:
    """A claim's row, or one key of it."""

    def look(record: Data) -> Any:
        (row,) = (
            c for c in record["metrics"]["claims"]
            if (c["arm"], c["reference"], c["says"]) == (arm, reference, says)
        )  # fmt: skip
        return row if key is None else row[key]

    return look


def claim_in_words(row: Data) -> str:
    """``+0.0034 nats [low, high], verdict``"""
    return f"{signed(4)(row['mean'])} {interval(4)((row['low'], row['high']))}, \\emph{{{row['verdict']}}}"


def counted(verdict: str) -> Callable[[Data], int]:
    return lambda record: sum(c["verdict"] == verdict for c in record["metrics"]["claims"])


def number_of_claims(record: Data) -> int:
    return len(record["metrics"]["claims"])


def seeds(record: Data) -> str:
    """The seeds of a record's runs, as a list."""
    found = sorted({run["seed"] for run in record["metrics"]["runs"]})
    if len(found) > 2 and found == list(range(found[0], found[-1] + 1)):
        return f"{found[0]} to {found[-1]}"
    return " and ".join(
        [", ".join(map(str, found[:-1])), str(found[-1])] if len(found) > 1 else map(str, found)
    )


def number_of_seeds(record: Data) -> int:
    return len({run["seed"] for run in record["metrics"]["runs"]})


def cell(name: str, key: str) -> str:
    return f"metrics.cells[cell={name}].{key}"


def exploratory_gap(name: str) -> Callable[[Data], str]:
    """Gap of a cell of which nothing was claimed, with its interval."""

    def look(record: Data) -> str:
        (row,) = (row for row in record["metrics"]["cells"] if row["cell"] == name)
        return f"{signed(4)(row['gap'])} {interval(4)((row['low'], row['high']))}"

    return look


LOSS_SCALE = (
    Row("ls.table", "loss_scale", claims_table, raw),
    Row("ls.seeds", "loss_scale", seeds, words),
    Row("ls.steps", "loss_scale", "point.common.steps", whole),
    Row("ls.claims", "loss_scale", number_of_claims, whole),
    Row("ls.floor", "loss_scale", "metrics.chaos_floor", scientific),
    Row("ls.fp16.small", "loss_scale", claim("fp16 2^-16", "bf16", "worse"), claim_in_words),
    Row("ls.e5m2.none", "loss_scale", claim("e5m2 2^0", "bf16", "worse"), claim_in_words),
    Row("ls.e5m2.nothing", "loss_scale", exploratory_gap("e5m2 2^-16"), raw),
    Row("ls.fp16.one", "loss_scale", exploratory_gap("fp16 2^0"), raw),
    Row("ls.fp16.one.zero", "loss_scale", cell("fp16 2^0", "underflow_share"), percent),
    Row("ls.e5m2.scaled", "loss_scale", claim("e5m2 2^14", "bf16", "equal"), claim_in_words),
    Row("ls.dynamic", "loss_scale", claim("fp16 dynamic 2^16", "bf16", "equal"), claim_in_words),
    Row("ls.dynamic.high", "loss_scale", claim("fp16 dynamic 2^32", "fp16 dynamic 2^16", "worse"), claim_in_words),
    Row("ls.dynamic.backoffs", "loss_scale", cell("fp16 dynamic 2^32", "backoffs"), whole),
    Row("ls.interval", "loss_scale", "metrics.growth_interval", whole),
)  # fmt: skip

MASTERS = (
    Row("ma.table", "masters", claims_table, raw),
    Row("ma.seeds", "masters", seeds, words),
    Row("ma.claims", "masters", number_of_claims, whole),
    Row("ma.supported", "masters", counted("supported"), whole),
    Row("ma.floor", "masters", "metrics.chaos_floor", scientific),
    Row("ma.still", "masters", lambda r: look_up(r, cell("bf16_rne", "unchanged_matrices"))[-1], percent),
    Row("ma.late", "masters", claim("bf16_rne_late", "bf16_master", "worse"), claim_in_words),
    Row("ma.early", "masters", claim("bf16_rne_early", "bf16_rne", "better"), claim_in_words),
    Row("ma.norms", "masters", claim("bf16_rne_matrices", "bf16_rne", "better"), claim_in_words),
    Row("ma.sr", "masters", claim("bf16_sr", "bf16_master", "equal"), claim_in_words),
    Row("ma.ones", "masters", lambda r: look_up(r, cell("bf16_rne", "norms_at_one"))[-1], percent),
)  # fmt: skip


def around(name: str, offset: int, key: str) -> Callable[[Data], float]:
    """What was seen so many steps after the first jump, mean over seeds."""

    def look(record: Data) -> float:
        (row,) = (row for row in record["metrics"]["cells"] if row["cell"] == name)
        (seen,) = (seen for seen in row["around"] if seen["offset"] == offset)
        return seen[key][0]

    return look


def clips(record: Data) -> bool:
    """A jump by 2^8 saturates a share of dY of at least 1 %, and takes half of the gradient."""
    name = "delayed once 2^8"
    return around(name, 0, "saturated")(record) >= 0.01 and around(name, 0, "left")(record) <= 0.5


JUMP = (
    Row("ju.table", "jump", claims_table, raw),
    Row("ju.seeds", "jump", seeds, words),
    Row("ju.steps", "jump", "point.common.steps", whole),
    Row("ju.claims", "jump", number_of_claims, whole),
    Row("ju.floor", "jump", "metrics.chaos_floor", scientific),
    Row("ju.every", "jump", "metrics.every", whole),
    Row("ju.over.small", "jump", around("delayed once 2^2", 0, "saturated"), percent),
    Row("ju.over", "jump", around("delayed once 2^8", 0, "saturated"), percent),
    Row("ju.left", "jump", around("delayed once 2^8", 0, "left"), percent),
    Row("ju.left.next", "jump", around("delayed once 2^8", 1, "left"), percent),
    Row("ju.left.delayed", "jump", around("delayed often 2^8", 10, "left"), percent),
    Row("ju.left.newest", "jump", around("newest often 2^8", 10, "left"), percent),
    Row("ju.calm", "jump", around("newest", 0, "saturated"), percent),
    Row("ju.loss", "jump", claim("delayed once 2^8", "delayed", "equal"), claim_in_words),
    Row("ju.loss.newest", "jump", claim("newest often 2^8", "newest", "worse"), claim_in_words),
)  # fmt: skip

# Outliers ----------------------------------------------------------------------------------------


def crossings_table(record: Data) -> str:
    found = {
        (row["pair"], row["kind"]): row
        for row in record["metrics"]["crossings"]
        if row["view"] == "block"
    }

    def ours(pair: str, kind: str) -> str:
        at = found[pair, kind]["crossing"]
        return "--" if at is None else f"{at:.2f}"

    return lines(
        [pair["pair"], "--" if pair["published"] is None else f"{pair['published']:.2f}",
         *(ours(pair["pair"], kind) for kind in ("power", "spike", "natural")), pair["verdict"]]
        for pair in record["metrics"]["pairs"]
    )  # fmt: skip


def grown(
    pattern: str, family: str, scaling: str, exponent: int, key: str
) -> Callable[[Data], float]:
    def look(record: Data) -> float:
        metrics = record["metrics"]
        (row,) = (
            row for row in metrics["growth"]
            if (row["pattern"], row["rotation"], row["family"], row["scaling"])
            == (pattern, 0, family, scaling)
        )  # fmt: skip
        return row[key][metrics["exponents"].index(exponent)]

    return look


def rotated(scaling: str) -> Callable[[Data], str]:
    """What a Hadamard rotation of 16 adds to the SQNR of real tensors: median, lowest, highest."""

    def look(record: Data) -> str:
        place = record["metrics"]["measures"].index("sqnr_db")
        pairs = [
            [row["formats"][name][0][place] for name in (scaling, f"{scaling} H16")]
            for row in record["metrics"]["tensors"]
            if row["kind"] != "control"
        ]
        gains = [after - before for before, after in pairs if None not in (before, after)]
        middle, low, high = map(signed(2), (statistics.median(gains), min(gains), max(gains)))
        return f"{middle}\\,dB ({low} to {high})"

    return look


def sources_in_words(record: Data) -> str:
    if record["metrics"]["pretrained"] is None:
        return "the GPT alone (the pretrained encoder was not installed)"
    return "a pretrained encoder on real text through its own tokenizer, and the GPT"


OUTLIERS = (
    Row("ou.sources", "outliers", sources_in_words, words),
    Row("ou.crossings", "outliers", crossings_table, raw),
    Row("ou.draws", "outliers", "point.draws", whole),
    Row("ou.seeds", "outliers", lambda r: ", ".join(map(str, r["metrics"]["gpt_seeds"])), words),
    Row("ou.tensors", "outliers", lambda r: sum(row["kind"] != "control" for row in r["metrics"]["tensors"]), whole),
    Row("ou.rotated.int8", "outliers", rotated("INT8 tensor"), raw),
    Row("ou.rotated.mxfp4", "outliers", rotated("FP4 32"), raw),
    Row("ou.rotated.nvfp4", "outliers", rotated("FP4 two-level"), raw),
    Row("ou.fp8.tensor", "outliers", grown("channel", "FP8", "tensor", 16, "zeroed"), percent),
    Row("ou.fp4.tensor", "outliers", grown("channel", "FP4", "tensor", 8, "zeroed"), percent),
    Row("ou.fp4.sixteen", "outliers", grown("channel", "FP4", "two-level", 16, "zeroed"), percent),
    Row("ou.fp4.mx", "outliers", grown("channel", "FP4", "32", 16, "zeroed"), percent),
)  # fmt: skip

# Rounding ----------------------------------------------------------------------------------------

MAPPED = (
    ("mxfp8_e4m3", "rne"), ("mxfp8_e4m3/rceil", "rne"), ("mxfp4", "rne"), ("mxfp4", "sr"),
    ("mxfp4/rceil", "rne"), ("mxfp4/rceil", "sr"), ("nvfp4", "rne"), ("nvfp4", "sr"),
    ("nvfp4/up", "rne"), ("nvfp4/up", "sr"),
)  # fmt: skip
LETTERS = {"rne": "N", "sr": "S"}


def mapped(record: Data, fmt: str, rounding: str, data: str = "gradient") -> Data:
    (row,) = (
        row for row in record["metrics"]["map"]
        if (row["data"], row["format"], row["rounding"]) == (data, fmt, rounding)
    )  # fmt: skip
    return row


def share_of(cell: Data) -> str:
    return minus(f"{100 * cell['mean']:+.2f}")


def rounding_table(record: Data) -> str:
    made = []
    for fmt, way in MAPPED:
        row = mapped(record, fmt, way)
        half = 100 * (row["bias"]["high"] - row["bias"]["low"]) / 2
        made.append(
            [tt(fmt), LETTERS[way], f"{share_of(row['bias'])} $\\pm$ {half:.2f}",
             *(share_of(row[cause]) for cause in ("scale", "dead", "grid")), f"{row['sqnr_db']:.1f}"]
        )  # fmt: skip
    return lines(made)


def bias(fmt: str, rounding: str, data: str = "gradient") -> Callable[[Data], float]:
    return lambda record: mapped(record, fmt, rounding, data)["bias"]["mean"]


def scales(data: str, fmt: str, rounding: str, key: str) -> str:
    return f"metrics.scales[data={data},format={fmt},rounding={rounding}].{key}.mean"


def bits(fmt: str, source: str, key: str) -> Callable[[Data], int]:
    def look(record: Data) -> int:
        (row,) = (
            row for row in record["metrics"]["bits"]
            if (row["data"], row["source"], row["format"]) == ("gradient", source, fmt)
        )  # fmt: skip
        return row[key]

    return look


def bits_in_words(value: int | None) -> str:
    return "more than 31" if value is None else str(value)


def step(arm: str, key: str) -> str:
    return f"metrics.steps[arm={arm}].{key}.mean"


ROUNDING = (
    Row("ro.table", "rounding", rounding_table, raw),
    Row("ro.seeds", "rounding", "point.seeds", whole),
    Row("ro.draws", "rounding", "point.step_draws", whole),
    Row("ro.clipped", "rounding", scales("gradient, dgrad", "nvfp4", "sr", "clipped"), percent),
    Row("ro.worst", "rounding", scales("gradient, dgrad", "nvfp4", "sr", "worst"), percent),
    Row("ro.maxima", "rounding", scales("gradient, dgrad", "nvfp4", "sr", "maxima"), percents(2)),
    Row("ro.others", "rounding", scales("gradient, dgrad", "nvfp4", "sr", "others"), percents(2)),
    Row("ro.up", "rounding", bias("nvfp4/up", "sr"), percents(3)),
    Row("ro.nvfp4.sr", "rounding", bias("nvfp4", "sr"), percents(2)),
    Row("ro.floor.rne", "rounding", bias("mxfp4", "rne"), percents(2)),
    Row("ro.rceil.rne", "rounding", bias("mxfp4/rceil", "rne"), percents(2)),
    Row("ro.floor.db", "rounding", lambda r: mapped(r, "mxfp4", "rne")["sqnr_db"], fixed(1, "dB")),
    Row("ro.rceil.db", "rounding", lambda r: mapped(r, "mxfp4/rceil", "rne")["sqnr_db"], fixed(1, "dB")),
    Row("ro.bits.nvfp4", "rounding", lambda r: bits("nvfp4", "float32", "enough")(r), bits_in_words),
    Row("ro.bits.e4m3", "rounding", lambda r: bits("mxfp8_e4m3/rceil", "float32", "enough")(r), bits_in_words),
    Row("ro.ratio.nvfp4", "rounding", step("nvfp4", "ratio"), fixed(2)),
    Row("ro.ratio.mxfp4", "rounding", step("mxfp4_sr_rht", "ratio"), fixed(2)),
    Row("ro.cosine.nvfp4", "rounding", step("nvfp4", "cosine"), fixed(3)),
)  # fmt: skip

# Loss curves -------------------------------------------------------------------------------------

R, A = "loss_curves_recipes", "loss_curves_ablations"


def millions(record: Data) -> float:
    """Parameters of the GPT, from its sizes."""
    size = record["point"]["common"]["model"]
    d, layers, context = size["width"], size["layers"], size["context"]
    return (layers * (12 * d * d + 2 * d) + (2 * 256 + context + 1) * d) / 1e6


def tokens(record: Data) -> float:
    common = record["point"]["common"]
    return common["steps"] * common["batch"] * common["model"]["context"] / 1e6


def total(key: str) -> Callable[[Data], int]:
    return lambda record: sum(row[key] for row in record["metrics"]["cells"])


def accuracy_table(record: Data) -> str:
    """Next-byte accuracy by kind of text, and its gap to the reference with interval."""
    reference = record["metrics"]["reference"]

    def one(row: Data, kind: str) -> str:
        gap = row.get(f"accuracy_{kind}_gap")
        level = f"{100 * row[f'accuracy_{kind}']:.1f}"
        return level if gap is None else minus(f"{level} ({100 * gap[0]:+.2f})")

    rows = [row for row in record["metrics"]["cells"] if not row["cell"].endswith("one ulp")]
    rows.sort(key=lambda row: row["cell"] != reference)
    return lines(
        [arm(row["cell"]), f"{row['mean']:.4f}", one(row, "prose"), one(row, "code"),
         str(row["spikes"]), str(row["diverged"])]
        for row in rows
    )  # fmt: skip


def multiplier(slow: str, fast: str) -> Callable[[Data], str]:
    """``1.05 [1.01, 1.10], verdict``, or why there is none."""

    def look(record: Data) -> str:
        (row,) = (
            m for m in record["metrics"]["multipliers"] if (m["slow"], m["fast"]) == (slow, fast)
        )  # fmt: skip
        if "m" not in row:
            return f"\\emph{{{row['verdict']}}} (the loss does not fall with tokens)"
        ends = f"[{row['low']:.3f}, {row['high']:.3f}]"
        return f"{row['m']:.3f} {ends}, \\emph{{{row['verdict']}}}"

    return look


def rate(value: float, key: str) -> Callable[[Data], float]:
    """Of a learning rate; the rate 0.001 is the one that tuning chose."""

    def look(record: Data) -> float:
        (row,) = (row for row in record["metrics"]["rates"] if row["rate"] == value)
        return row[key]

    return look


PROXY_RATE = 1e-3


def proxy_ratio(arm_: str) -> Callable[[Data], float]:
    """Final loss over FP32's."""

    def look(record: Data) -> float:
        (row,) = (
            c for c in record["metrics"]["counts"] if (c["arm"], c["rate"]) == (arm_, PROXY_RATE)
        )
        return row["ratio"]

    return look


def proxy_total(key: str) -> Callable[[Data], int]:
    return lambda record: sum(row[key] for row in record["metrics"]["counts"])


def part(model: str, name: str, tensor: str, key: str) -> Callable[[Data], float]:
    """A measure of a part of a model."""

    def look(record: Data) -> float:
        (row,) = (
            row for row in record["metrics"]["parts"]
            if (row["model"], row["part"], row["tensor"]) == (model, name, tensor)
        )  # fmt: skip
        return row[key]

    return look


#: Parts of the hybrid, as the text calls them.
HYBRID_PARTS = {"mamba": "Mamba", "attention": "attention", "ffn": "feed-forward"}


def exact_gap(name: str) -> Callable[[Data], str]:
    """Gap of a cell in a float32 forward pass, with its interval."""

    def look(record: Data) -> str:
        (row,) = (row for row in record["metrics"]["cells"] if row["cell"] == name)
        gap, low, high = row["gap_fp32"]
        return f"{signed(4)(gap)} {interval(4)((low, high))}"

    return look


def said(record: str, arm_: str, says: str, reference: str, name: str) -> Row:
    return Row(name, record, claim(arm_, reference, says), claim_in_words)


LOSS_CURVES = (
    Row("lc.millions", R, millions, fixed(2)),
    Row("lc.width", R, "point.common.model.width", whole),
    Row("lc.layers", R, "point.common.model.layers", whole),
    Row("lc.steps", R, "point.common.steps", whole),
    Row("lc.tokens", R, tokens, fixed(2)),
    Row("lc.rate", R, "point.common.rate", scientific),
    Row("lc.seeds", R, seeds, words),
    Row("lc.n", R, number_of_seeds, whole),
    Row("lc.margin", R, "metrics.margin", fixed(2, "nats")),
    Row("lc.floor", R, "metrics.chaos_floor", scientific),
    Row("lc.claims", R, number_of_claims, whole),
    Row("lc.table", R, claims_table, raw),
    Row("lc.supported", R, counted("supported"), whole),
    Row("lc.contradicted", R, counted("contradicted"), whole),
    Row("lc.open", R, counted("not resolved"), whole),
    Row("lc.diverged", R, total("diverged"), whole),
    Row("lc.spikes", R, total("spikes"), whole),
    Row("lc.accuracy", R, accuracy_table, raw),
    Row("lc.rho", R, "metrics.prediction.rho", fixed(2)),
    said(R, "mxfp8", "equal", "bf16", "lc.mxfp8"),
    said(R, "nvfp4", "worse", "bf16", "lc.nvfp4"),
    said(R, "mxfp4", "worse", "bf16", "lc.mxfp4"),
    said(R, "nvfp4_naive", "worse", "bf16", "lc.naive"),
    said(R, "mxfp4", "worse", "nvfp4_naive", "lc.mxfp4 naive"),
    Row("lc.nvfp4 exact", R, exact_gap("nvfp4"), raw),
    said(R, "mxfp4_sr_rht", "worse", "nvfp4", "lc.mxfp4 nvfp4"),
    Row("ab.table", A, claims_table, raw),
    Row("ab.claims", A, number_of_claims, whole),
    Row("ab.seeds", A, seeds, words),
    Row("ab.supported", A, counted("supported"), whole),
    Row("ab.open", A, counted("not resolved"), whole),
    said(A, "nvfp4+sr_forward", "worse", "nvfp4", "ab.sr forward"),
    Row("tk.mx nv", "loss_curves_tokens", multiplier("mxfp4_sr_rht", "nvfp4"), raw),
    Row("tk.nv bf", "loss_curves_tokens", multiplier("nvfp4", "bf16"), raw),
    Row("tk.mx bf", "loss_curves_tokens", multiplier("mxfp4_sr_rht", "bf16"), raw),
    Row("tk.seeds", "loss_curves_tokens", seeds, words),
    Row("tk.lengths", "loss_curves_tokens",
        lambda r: ", ".join(str(row["steps"]) for row in r["metrics"]["lengths"]), words),
    Row("sw.table", "loss_curves_switch", claims_table, raw),
    Row("sw.seeds", "loss_curves_switch", seeds, words),
    *(said("loss_curves_switch", f"nvfp4, {which} bf16 at the end", "better", "nvfp4", f"sw.{which}")
      for which in ("forward", "backward", "both")),
    said("loss_curves_accumulation", "fp8, fast sums", "worse", "fp8, float32 sums", "su.fast"),
    said("loss_curves_accumulation", "fp8, promoted sums", "equal", "fp8, float32 sums", "su.promoted"),
    Row("su.table", "loss_curves_accumulation", claims_table, raw),
    Row("su.k", "loss_curves_accumulation",
        lambda r: r["point"]["common"]["batch"] * r["point"]["common"]["model"]["context"], whole),
    Row("su.floor", "loss_curves_accumulation", "metrics.chaos_floor", scientific),
    Row("su.seeds", "loss_curves_accumulation", seeds, words),
    Row("su.steps", "loss_curves_accumulation", "point.common.steps", whole),
    Row("ch.low", "loss_curves_chaos", lambda r: r["metrics"]["rates"][0]["rms bf16"], scientific),
    Row("ch.high", "loss_curves_chaos", lambda r: r["metrics"]["rates"][-1]["rms bf16"], scientific),
    Row("ch.chosen", "loss_curves_chaos", rate(1e-3, "rms bf16"), scientific),
    Row("ch.ulp", "loss_curves_chaos", lambda r: r["metrics"]["rates"][-1]["rms fp32, one ulp"], scientific),
    Row("ch.seeds", "loss_curves_chaos", seeds, words),
    Row("hy.seeds", "loss_curves_hybrid", seeds, words),
    Row("hy.pattern", "loss_curves_hybrid", "point.common.model.pattern", code),
    Row("hy.floor", "loss_curves_hybrid", "metrics.chaos_floor", scientific),
    *(Row(f"hy.{name}", "loss_curves_hybrid", exploratory_gap(name), raw)
      for name in ("mxfp8", "mxfp4_sr_rht", "nvfp4")),
    *(Row(f"hy.only.{name}", "loss_curves_hybrid", exploratory_gap(f"nvfp4-keep, in {words_} alone"), raw)
      for name, words_ in HYBRID_PARTS.items()),
    Row("hy.all", "loss_curves_hybrid", exploratory_gap("nvfp4-keep"), raw),
    Row("pt.seeds", "loss_curves_parts", seeds, words),
    *(Row(f"pt.kurtosis.{name}", "loss_curves_parts", part("hybrid", f"{words_} out", "x", "kurtosis"), fixed(1))
      for name, words_ in HYBRID_PARTS.items()),
    *(Row(f"pt.zeroed.{name}", "loss_curves_parts", part("hybrid", f"{words_} in", "dy", "zeroed nvfp4"), percent)
      for name, words_ in HYBRID_PARTS.items()),
    Row("px.seeds", "loss_curves_proxy", seeds, words),
    Row("px.steps", "loss_curves_proxy", "point.common.steps", whole),
    Row("px.runs", "loss_curves_proxy", proxy_total("runs"), whole),
    Row("px.diverged", "loss_curves_proxy", proxy_total("diverged"), whole),
    Row("px.rate", "loss_curves_proxy", lambda _: PROXY_RATE, scientific),
    Row("px.matrices", "loss_curves_proxy", proxy_ratio("mx matrices"), fixed(1)),
    Row("px.both", "loss_curves_proxy", proxy_ratio("mx matrices and norms"), fixed(1)),
    Row("px.norms", "loss_curves_proxy", proxy_ratio("mx norms"), fixed(1)),
    Row("tu.seeds", "loss_curves_tune", seeds, words),
)  # fmt: skip

# Beside published effects ------------------------------------------------------------------------

VERDICTS = {
    "supported": "reproduced", "contradicted": "contradicted",
    "not resolved": "not resolved at this scale", "resolved": "reproduced",
}  # fmt: skip


def verdict_of(claimed: Callable[[Data], Data]) -> Callable[[Data], str]:
    return lambda record: VERDICTS[claimed(record)["verdict"]]


def if_so(holds: Callable[[Data], bool]) -> Callable[[Data], str]:
    """For effects that are large and certain: it is so, or it is not."""
    return lambda record: "reproduced" if holds(record) else "contradicted"


def rescued(record: Data) -> bool:
    """FP16 flushes at least one gradient in a hundred, and a tenth of that with a loss scale."""
    before, after = flushed("fp16")(record), scaled("fp16", 16)(record)
    return before >= 0.01 and after <= before / 10


def turned(record: Data) -> bool:
    """Unscaled, E5M2 flushes less; with a scale a tensor, E4M3 has the higher SQNR."""
    e5m2, e4m3 = (
        gradient(record, f"fp8_tensor_{fmt}")["sqnr_db_median"] for fmt in ("e5m2", "e4m3")
    )
    return flushed("e5m2")(record) < flushed("e4m3")(record) and e4m3 > e5m2


def promoted(record: Data) -> bool:
    """Promotion at least halves the RMS error."""
    fast, slow = (
        error(record, "normal", f"Hopper E4M3 {how}", 4096, "rms") for how in ("fast", "promoted")
    )
    return slow < fast / 2


def floor_scale(record: Data) -> str:
    """The biases' intervals part, the floor scale's beyond the other's."""
    floor, up = (mapped(record, fmt, "rne")["bias"] for fmt in ("mxfp4", "mxfp4/rceil"))
    said = "more bias: reproduced" if floor["high"] < up["low"] else "more bias: not resolved"
    return f"{said}; divergence: not tested"


def token_verdict(record: Data) -> str:
    (row,) = (
        m for m in record["metrics"]["multipliers"]
        if (m["slow"], m["fast"]) == ("mxfp4_sr_rht", "nvfp4")
    )  # fmt: skip
    return VERDICTS[
        "contradicted" if row.get("m", 1) < 1 and row["verdict"] == "resolved" else row["verdict"]
    ]


def depth(arm: str) -> Callable[[Data], Data]:
    """How many times the first block's noise the weight gradients of the last block have."""

    def look(record: Data) -> Data:
        (row,) = (row for row in record["metrics"]["depth"] if row["arm"] == arm)
        return row["last_over_first"]

    return look


def times(row: Data) -> str:
    """``0.93 [0.91, 0.95]``"""
    return f"{row['mean']:.2f} [{row['low']:.2f}, {row['high']:.2f}]"


def deeper(record: Data) -> str:
    ratio = depth("nvfp4")(record)
    if ratio["low"] <= 1 <= ratio["high"]:
        return VERDICTS["not resolved"]
    return VERDICTS["supported" if ratio["mean"] > 1 else "contradicted"]


def effect(name: str, record: str, claimed: Callable[[Data], Data]) -> tuple[Row, Row]:
    """A claim's gap and its verdict."""
    return (
        Row(f"pv.{name}.gap", record, claimed, claim_in_words),
        Row(f"pv.{name}", record, verdict_of(claimed), words),
    )


PUBLISHED = (
    Row("pv.fp16", "underflow", if_so(rescued), words),
    Row("pv.e5m2", "underflow", if_so(turned), words),
    Row("pv.e5m2.gap", "loss_scale", claim("e4m3 2^14", "e5m2 2^14", "worse"), claim_in_words),
    Row("pv.sums", "accumulation", if_so(promoted), words),
    Row("pv.floor", "rounding", floor_scale, words),
    *effect("masters", "masters", claim("bf16_rne", "bf16_master", "worse")),
    Row("pv.jump", "jump", if_so(clips), words),
    Row("pv.mx nv", R, verdict_of(claim("mxfp4_sr_rht", "nvfp4", "worse")), words),
    Row("pv.mx nv naive", R, verdict_of(claim("mxfp4", "nvfp4_naive", "worse")), words),
    Row("pv.tokens", "loss_curves_tokens", token_verdict, words),
    Row("pv.sr forward", A, verdict_of(claim("nvfp4+sr_forward", "nvfp4", "worse")), words),
    *effect("2d", A, claim("nvfp4-2d", "nvfp4", "worse")),
    *effect("keep", A, claim("nvfp4-keep", "nvfp4", "worse")),
    *(
        Row(f"pv.depth.{arm}", "loss_curves_parts", depth(arm), times)
        for arm in ("nvfp4", "mxfp4_sr_rht")
    ),
    Row("pv.depth", "loss_curves_parts", deeper, words),
    *effect("rht", A, claim("nvfp4-rht", "nvfp4", "worse")),
)

# Costs --------------------------------------------------------------------------------------------


def bytes_table(record: Data) -> str:
    rows = [row for row in record["metrics"]["states"] if row["model"] != "GPT"]
    return lines(
        [row["layout"], *(f"{row[key] / row['parameters']:.2f}" for key in
                          ("weights", "gradients", "masters", "moments", "total"))]
        for row in rows
    )  # fmt: skip


SPEED = (
    Row("sp.table", "speed", bytes_table, raw),
    Row("sp.nvfp4", "speed", "metrics.steps[recipe=nvfp4].ratio", fixed(2)),
    Row("sp.bf16", "speed", "metrics.steps[recipe=bf16].ratio", fixed(2)),
)  # fmt: skip

ROWS: tuple[Row, ...] = (
    *EVIDENCE, *DIALECTS, *ACCUMULATION, *UNDERFLOW, *LOSS_SCALE, *MASTERS, *JUMP, *OUTLIERS, *ROUNDING,
    *LOSS_CURVES, *PUBLISHED, *SPEED,
)  # fmt: skip
