"""The paper's pipeline: numbers come from records or the build stops, and every check can fail."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from experiments import harness
from paper import build, check, macros, sets
from paper.macros import Row
from paper.published import PUBLISHED
from paper.rows import ROWS

TEXTS = check.sources()
PHRASES = check.allowed()


def record(**changes: Any) -> dict[str, Any]:
    """A record of a tiny experiment; `changes` go to its point, git state, status, or its runs' states."""
    runs = [{"git": {"commit": "f00", "dirty": dirty}} for dirty in changes.pop("runs", [])]
    made: dict[str, Any] = {
        "schema": harness.SCHEMA,
        "experiment": "underflow",
        "status": changes.pop("status", "ok"),
        "error": None,
        "point": {"seed": 0, **changes.pop("point", {})},
        "provenance": {
            "git": {"commit": "0123456789abcdef", "dirty": changes.pop("dirty", False)},
            "argv": ["experiments/underflow.py", *changes.pop("argv", [])],
        },
        "metrics": {"rows": [{"arm": "a", "gap": -0.25}, {"arm": "b", "gap": None}], "runs": runs},
    }
    assert not changes
    return made


ROW = Row("gap.a", "underflow", "metrics.rows[arm=a].gap", macros.signed(2, "nats"))


@pytest.fixture
def home(tmp_path: Path) -> Path:
    (tmp_path / "results" / "full").mkdir(parents=True)
    (tmp_path / "fpemu").mkdir()
    return tmp_path


def put(home: Path, made: dict[str, Any]) -> Path:
    path = home / "results" / "full" / "underflow.json"
    harness.write_record(path, made)
    return path


# The committed text ------------------------------------------------------------------------------


NUMBER = re.compile(r"(?<![\w.^])\d+\.\d+(?![\w.])")


@pytest.mark.parametrize(
    ("file", "heading"),
    [("README.md", "What formats do"), ("docs/training.md", "What recipes do to learning")],
)
def test_numbers_of_the_documents_are_the_papers(file: str, heading: str) -> None:
    """Every decimal of the section is a number of the paper, made from the same records."""
    text = (harness.ROOT / file).read_text(encoding="utf-8")
    section = text.split(f"## {heading}\n")[1].split("\n!")[0]
    told = set(NUMBER.findall(section))
    found, _ = macros.values(ROWS, sets.full(), partial=True)
    known = {number for text in found.values() for number in NUMBER.findall(text)}
    assert len(told) > 8 and told <= known, told - known


def test_text_table_figures_and_references_hold_together() -> None:
    assert check.everything() == []


def test_committed_records_give_every_number_that_is_asked_of_them() -> None:
    found, lost = macros.values(ROWS, sets.full(), partial=True)
    there = {row.name for row in ROWS if row.record not in lost}
    assert found.keys() == there
    assert all("nan" not in text.lower() and "None" not in text for text in found.values())


def test_committed_figures_are_those_of_their_records() -> None:
    stale = sets.stale_figures(sets.full())
    assert {figure: why for figure, why in stale.items() if why != sets.NOT_DRAWN} == {}


def test_a_run_of_ones_own_leaves_the_committed_figures_alone() -> None:
    """`make underflow` is the README's first command; `make test` and `make paper` come after it."""
    own = harness.parse(harness.arguments("Asks.", "python trial.py", full="hours"), [])
    full = harness.parse(harness.arguments("Asks.", "python trial.py", full="hours"), ["--full"])
    assert harness.drawings(full) == sets.full().figures
    assert sets.full().figures not in (harness.figures_dir(own), harness.drawings(own))


def test_figures_name_the_commit_of_their_record() -> None:
    full = sets.full()
    for figure, name in sets.FIGURES.items():
        if not full.path(name).exists() or not (full.figures / f"{figure}.pdf").exists():
            continue
        made = json.loads(full.path(name).read_text("utf-8"))
        source = f"{made['experiment']} at {made['provenance']['git']['commit']}"
        assert source.encode() in (full.figures / f"{figure}.pdf").read_bytes(), figure


def test_every_caption_says_how_it_was_made() -> None:
    """A command by ``\\made``, or the section that has it; seeds or why there are none."""
    for name, text in TEXTS.items():
        for caption in re.findall(r"\\caption\{((?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*)\}", text):
            if "#" in caption:
                continue  # of a macro
            assert r"\made{" in caption or "make evidence" in caption or "command" in caption, (
                f"{name}: {caption[:80]}"
            )


def test_claims_rest_on_fresh_seeds() -> None:
    """Six of them, and none that tuning used; only where the committed record is there."""
    from experiments import studies

    full = sets.full()
    for name in sets.RECORDS:
        if name.startswith("loss_curves_") and full.path(name).exists():
            made = sets.read(full, name)
            study = made["point"]["study"]
            if study not in ("tune", "predict"):
                assert not {run["seed"] for run in made["metrics"]["runs"]} & set(studies.TUNING)
            assert all(c["n"] >= 6 for c in made["metrics"].get("claims", []))


# Numbers -----------------------------------------------------------------------------------------


def test_number_is_looked_up_and_formatted(home: Path) -> None:
    put(home, record())
    assert macros.values([ROW], sets.full(home)) == ({"gap.a": "$-$0.25\\,nats"}, {})


@pytest.mark.parametrize(
    ("made", "says"),
    [
        (None, "there is no"),
        (record(status="failed"), "records a failure"),
        (record(dirty=True), "in no commit"),
        (record(dirty=None), "in no commit"),
        (record(runs=[False, True]), "in no commit"),
        (record(point={"quick": True}), "'quick'"),
        (record(point={"budget": "default"}), "'default'"),
        (record(point={"budget": {"name": "default"}}), "'default'"),
    ],
)
def test_full_set_refuses_a_record(home: Path, made: dict[str, Any] | None, says: str) -> None:
    if made is not None:
        put(home, made)
    with pytest.raises(ValueError, match=re.escape(says)) as error:
        macros.values([ROW], sets.full(home))
    assert "\\n{gap.a}" in str(error.value)


def test_partial_build_leaves_out_what_has_no_record_but_no_missing_key(home: Path) -> None:
    found, lost = macros.values([ROW], sets.full(home), partial=True)
    assert found == {} and "there is no" in lost["underflow"]
    put(home, record())
    with pytest.raises(ValueError, match=r"\\n\{lost\}.*no key 'rumble'"):
        macros.values([replace(ROW, name="lost", where="metrics.rumble")], sets.full(home), True)


@pytest.mark.parametrize(
    ("where", "says"),
    [
        ("metrics.rows[arm=c].gap", "0 rows fit"),
        ("metrics.rows[arm=b].gap", "null"),
        ("metrics.rows[colour=red].gap", "KeyError"),
        ("metrics.gap", "no key 'gap'"),
    ],
)
def test_missing_place_in_a_record_is_named(home: Path, where: str, says: str) -> None:
    put(home, record())
    with pytest.raises(ValueError, match=re.escape(says)):
        macros.values([replace(ROW, where=where)], sets.full(home))


def test_two_rows_of_one_name_are_refused(home: Path) -> None:
    put(home, record())
    with pytest.raises(ValueError, match="two rows each"):
        macros.values([ROW, ROW], sets.full(home))


def test_values_with_commas_are_found() -> None:
    rows = {"rows": [{"data": "gradient, dgrad", "n": 3}, {"data": "gradient", "n": 4}]}
    assert macros.look_up(rows, "rows[data=gradient, dgrad].n") == 3


def test_numbers_tex_is_the_same_every_time_and_marks_a_local_run(home: Path) -> None:
    put(home, record(argv=["--out", str(home)]))
    full = macros.tex(sets.full(home), [ROW])
    assert full == macros.tex(sets.full(home), [ROW])
    assert "\\localsetfalse" in full and "exploratory" not in full
    shutil.copy(home / "results" / "full" / "underflow.json", home)
    local = macros.tex(sets.local(home, home), [ROW])
    assert "\\localsettrue" in local and "Local run, exploratory." in local
    assert str(home) not in local


def test_local_set_takes_small_budgets_and_uncommitted_code(home: Path) -> None:
    harness.write_record(home / "underflow.json", record(dirty=True, point={"quick": True}))
    assert macros.values([ROW], sets.local(home, home))[0]


@pytest.mark.parametrize(
    ("form", "value", "text"),
    [
        (macros.whole, 44000, "44{,}000"),
        (macros.fixed(1, "dB"), 20.45, "20.4\\,dB"),
        (macros.signed(4), -0.00341, "$-$0.0034"),
        (macros.percent, 0.000001, "$<$.001\\,\\%"),
        (macros.percents(2), -0.00341, "$-$0.34\\,\\%"),
        (macros.percents(2), -0.0000001, "0.00\\,\\%"),
        (macros.scientific, 7.9e-36, "$7.9\\cdot 10^{-36}$"),
        (macros.interval(2), (-1, 2), "[$-$1.00, $+$2.00]"),
        (macros.code, "a_b", "\\texttt{a\\_b}"),
    ],
)
def test_forms(form: Any, value: Any, text: str) -> None:
    assert form(value) == text


def test_no_number_becomes_text() -> None:
    with pytest.raises(ValueError, match="no number"):
        macros.fixed(2)(float("nan"))


# Stale -------------------------------------------------------------------------------------------


def test_changed_record_makes_its_text_unreviewed(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = put(home, record())
    committed = sets.full(home)
    monkeypatch.setattr(sets, "full", lambda: committed)
    kept = home / "reviewed.json"
    assert macros.unreviewed([ROW], kept) == ["underflow"]
    macros.review([ROW], kept)
    assert macros.unreviewed([ROW], kept) == []
    harness.write_record(path, record(point={"seed": 1}))
    assert macros.unreviewed([ROW], kept) == ["underflow"]


def test_stale_figures_are_found(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sets, "FIGURES", {"underflow_layers": "underflow"})
    path, chosen = put(home, record()), sets.full(home)
    pdf = chosen.figures / "underflow_layers.pdf"
    pdf.parent.mkdir(parents=True)
    assert sets.stale_figures(chosen) == {"underflow_layers": "it has not been drawn"}
    pdf.write_bytes(b"%PDF")
    source = {"record_sha256": sets.digest(path), "pdf_sha256": sets.digest(pdf)}
    harness.write_record(chosen.figures / sets.SOURCES, {"underflow_layers": source})
    assert sets.stale_figures(chosen) == {}
    pdf.write_bytes(b"%PDF edited")
    assert "not the one" in sets.stale_figures(chosen)["underflow_layers"]
    harness.write_record(path, record(point={"seed": 1}))
    assert "changed" in sets.stale_figures(chosen)["underflow_layers"]


# Checks that can fail ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "the gap is 0.81 nats", "36\\,\\% more tokens", "an SQNR of $12.5$\\,dB", "of 7 layers",
        "MXFP4 needs 1.4 times", "loss falls by $2\\cdot10^{-3}$", "\\emph{44,000 outputs}",
        "\\caption{seeds 11 to 16}", "32 values",
    ],
)  # fmt: skip
def test_typed_digits_are_found(text: str) -> None:
    assert check.typed_digits({"x": text}, PHRASES)


@pytest.mark.parametrize(
    "text",
    [
        "FP16, E4M3, bfloat16, H100 and NVFP4", "\\n{uf.e4m3 16}", "\\cite{a1,b2}", "Mamba-2",
        "\\includegraphics[width=0.97\\textwidth]{x1}", "\\texttt{mxfp8_e4m3/rceil}",
        "in MX formats 32 values share", "\\ref{tab:1}", "\\pub{token 36}",
    ],
)  # fmt: skip
def test_names_and_constants_are_no_typed_digits(text: str) -> None:
    assert check.typed_digits({"x": text}, PHRASES) == []


def test_allowed_phrases_have_reasons_and_are_used(tmp_path: Path) -> None:
    assert check.unused_phrases(TEXTS, [*PHRASES, "12345 apples"]) == [
        "allowed.txt: no text has '12345 apples'"
    ]
    (tmp_path / "allowed.txt").write_text("17 apples\n")
    with pytest.raises(ValueError, match="no reason"):
        check.allowed(tmp_path)


def test_numbers_of_one_side_only_are_found() -> None:
    names = [row.name for row in ROWS]
    assert check.numbers(TEXTS, names, list(PUBLISHED)) == []
    more = {**TEXTS, "x": "\\n{nowhere} \\body{no table} \\pub{nobody}"}
    assert len(check.numbers(more, names, list(PUBLISHED))) == 3
    assert len(check.numbers(TEXTS, [*names, "spare"], [*PUBLISHED, "spare"])) == 2


def test_comments_do_not_count() -> None:
    assert check.without_comments("a % \\n{x}\nb 5\\% c") == "a \nb 5\\% c"


def test_figures_references_records_and_labels_are_checked() -> None:
    more = {
        **TEXTS,
        "x": "\\wide{nothing}{1}{underflow}{c} \\cite{nobody2020} \\when{rumble}{} \\ref{a}",
    }
    bib = (check.PAPER / "refs.bib").read_text("utf-8")
    assert "nothing" in check.figures(more)[0]
    assert any("nobody2020" in line for line in check.references(more, bib))
    assert any(
        "spare" in line for line in check.references(TEXTS, bib + "@misc{spare,\n title={x}\n}\n")
    )
    assert check.records(more) and check.labels(more) == ["\\ref{a} points nowhere"]
    swapped = {"x": "\\wide{underflow_course}{1}{dialects}{c}"}
    assert any("names the record 'dialects'" in line for line in check.figures(swapped))


# Building ----------------------------------------------------------------------------------------


def test_build_without_latex_says_what_to_install(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(build.shutil, "which", lambda name: None)
    monkeypatch.setattr(build, "problems", lambda chosen, partial: [])
    monkeypatch.setattr(build, "PAPER", home)
    assert build.main(["--partial"]) == 3
    assert "apt-get install --no-install-recommends latexmk" in capsys.readouterr().err


def test_build_stops_at_a_problem(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(build, "latex", lambda *_: pytest.fail("LaTeX ran"))
    monkeypatch.setattr(check, "everything", lambda: ["'7' is typed by hand"])
    assert build.main(["--partial"]) == 1
    assert "typed by hand" in capsys.readouterr().err


@pytest.mark.skipif(shutil.which("latexmk") is None, reason="latexmk is not installed")
def test_paper_builds_from_what_is_committed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "full").mkdir()
    numbers = macros.tex(sets.full(), ROWS, partial=True)
    (tmp_path / "full" / "numbers.tex").write_text(numbers, encoding="utf-8")
    assert build.latex(tmp_path / "full", sets.full().figures) is None
    assert (tmp_path / "full" / "fpemu.pdf").read_bytes().startswith(b"%PDF")
    # With next to no records it builds too, and says what it lacks.
    nothing = macros.tex(sets.local(tmp_path / "nowhere"), ROWS, partial=True)
    (tmp_path / "local").mkdir()
    (tmp_path / "local" / "numbers.tex").write_text(nothing, encoding="utf-8")
    assert build.latex(tmp_path / "local", tmp_path / "nowhere") is None
    log = (tmp_path / "full" / "fpemu.log").read_text("utf-8", errors="replace")
    assert "Overfull" not in log
