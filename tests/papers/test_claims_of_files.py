"""Claims about values in the files of scripts: standard errors, samples, rounds and counts."""

import csv
import itertools
import math
from pathlib import Path
from typing import Any

import pytest
from helpers.invented_papers import FOLDER, NAMES
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from lit_attn.papers.claims import Verdict, judge_claims
from lit_attn.papers.layout import FileError
from lit_attn.papers.source import PaperSource, read_paper

ACCURACIES = ("lambada_openai", "piqa", "winogrande", "arc_easy", "arc_challenge", "sciq")
ACCURACIES += ("logiqa", "boolq", "hellaswag", "race_middle", "race")
MODELS = ("pythia-2.8b", "dcpythia-2.8b", "dcformer-2.8b", "pythia-6.9b", "dcpythia-6.9b")
MODELS += ("pythia-12b",)


def write_csv(path: Path, rows: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8", newline="") as stream:
        writer = csv.DictWriter(stream, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def judge(paper: str, number: str, runs: Path) -> list[Verdict]:
    """Return the verdicts of the claims of one table, from the files in `runs`."""
    source = read_paper(paper, "", FOLDER)
    source = PaperSource(source.name, source.paper, source.path, "", runs)
    return judge_claims(source, {number: source.paper.tables[number]}, {})


def write_harness(
    runs: Path, pile: dict[str, float], flan: dict[str, float], error: float | None
) -> None:
    """Write the files of Table 4: perplexities by model, and accuracies that rise with models."""
    for place, model in enumerate(MODELS):
        rows = [(task, "acc", 0.5 + place / 50) for task in ACCURACIES]
        rows += [("pile", "perplexity", pile.get(model, 7.0))]
        rows += [("flan", "perplexity", flan.get(model, 9.0))]
        if error is not None:
            for task, metric, _ in list(rows):
                rows.append((task, f"{metric}_stderr", error))
        content = [dict(zip(("task", "metric", "value"), row, strict=True)) for row in rows]
        write_csv(runs / "released-weights" / model / "harness-0.csv", content)


def test_claims_on_different_rows_of_a_file_never_merge(tmp_path: Path) -> None:
    """The perplexity is lower on the Pile and higher on Flan: one claim holds, one does not."""
    pile = {"dcpythia-6.9b": 6.0, "pythia-12b": 6.5}
    flan = {"dcpythia-6.9b": 8.0, "pythia-12b": 7.0}
    write_harness(tmp_path, pile, flan, 0.01)
    verdicts = judge("dcmha", "4", tmp_path)
    assert len(verdicts) == 6
    assert [verdict.judgement for verdict in verdicts[:2]] == ["agree", "disagree"]
    assert verdicts[0].ours.startswith("\N{MINUS SIGN}0.50 [")
    assert verdicts[1].ours.startswith("+1.00 [")


def test_all_claims_of_a_paper_have_distinct_rows_of_files() -> None:
    """No two claims of different text share file, rows and column: none can hide another."""
    for paper in NAMES:
        source = read_paper(paper, "", FOLDER)
        items = source.items(())
        claims = [claim for item in items.values() for claim in item.claims]
        verdicts = judge_claims(source, items, {})
        texts = itertools.chain(*(verdict.text.split(" / ") for verdict in verdicts))
        assert len(list(texts)) == len(claims)


def test_standard_errors_of_a_file_decide_and_the_difference_is_always_printed(
    tmp_path: Path,
) -> None:
    pile = {"dcpythia-6.9b": 6.0, "pythia-12b": 6.5}
    expected = {0.01: "agree", 1.0: "undecided", None: "undecided: no standard error"}
    for error, judgement in expected.items():
        write_harness(tmp_path, pile, {}, error)
        verdict = judge("dcmha", "4", tmp_path)[0]
        assert verdict.judgement == judgement
        assert verdict.ours.startswith("\N{MINUS SIGN}0.50")
        assert ("[" in verdict.ours) == (error is not None)


def test_the_error_of_an_average_is_that_of_independent_tasks(tmp_path: Path) -> None:
    write_harness(tmp_path, {}, {}, 0.011)
    average = judge("dcmha", "4", tmp_path)[3]
    assert average.text == "DCPythia-6.9B is more accurate than Pythia-6.9B."
    # Eleven tasks with 1.1 points each, and two models.
    half = 1.96 * 1.1 / math.sqrt(11) * math.sqrt(2)
    assert average.ours == f"+2.00 [+{2 - half:.2f}, +{2 + half:.2f}]"
    assert average.judgement == "agree"


@pytest.mark.parametrize(("n", "judgement"), [(100, "undecided"), (10_000, "agree")])
def test_a_share_of_samples_has_a_binomial_error(tmp_path: Path, n: int, judgement: str) -> None:
    values = {"pythia-6.9b": (0.319, 10.0), "dcpythia-6.9b": (0.390, 7.0)}
    for model, (accuracy, perplexity) in values.items():
        row = {"accuracy": accuracy, "perplexity": perplexity, "n": n, "perplexity_stderr": 0.1}
        path = tmp_path / "released-weights" / model / "published-tasks" / "overall.csv"
        write_csv(path, [row])
    accuracy, perplexity = judge("dcmha", "5", tmp_path)
    errors = [p * (1 - p) / n for p, _ in values.values()]
    half = 100 * 1.96 * math.sqrt(sum(errors))
    low = f"{7.1 - half:+.2f}".replace("-", "\N{MINUS SIGN}")
    assert accuracy.ours == f"+7.10 [{low}, +{7.1 + half:.2f}]"
    assert accuracy.judgement == judgement
    assert (perplexity.ours[:5], perplexity.judgement) == ("\N{MINUS SIGN}3.00", "agree")


def test_counted_values_have_no_error_and_medians_that_of_their_rounds(tmp_path: Path) -> None:
    names = ("softmax-8", "mgk-4", "smgk-4", "linear-8", "mlk-4", "smlk-4")
    rows = []
    for place, name in enumerate(names):
        rows.append(
            {
                "variant": name,
                "memory": 10**9 * (60 - place),
                "seconds": 0.5 - 0.01 * place,
                "seconds_iqr": 0.02,
                "batch": 32,
                "tokens": 8192,
                "precision": "fp16",
                "rounds": 4,
            }
        )
    path = tmp_path / "bench" / "mgk-retrieval" / "inference.csv"
    write_csv(path, rows)
    verdicts = judge("mgk", "7", tmp_path)
    assert [verdict.judgement for verdict in verdicts] == ["agree", "undecided"] * 3
    assert verdicts[0].ours == "\N{MINUS SIGN}1.00"
    half = 1.96 * math.sqrt(2) * math.sqrt(math.pi / 2) * 0.02 / 1.349 / 2
    assert verdicts[1].ours == (
        f"\N{MINUS SIGN}0.0100 [\N{MINUS SIGN}{0.01 + half:.4f}, +{half - 0.01:.4f}]"
    )
    # Rounds that hardly differ decide.
    write_csv(path, [row | {"seconds_iqr": 1e-4} for row in rows])
    assert {verdict.judgement for verdict in judge("mgk", "7", tmp_path)} == {"agree"}
    # A file of an older script has no rounds.
    write_csv(path, [{k: v for k, v in row.items() if k != "rounds"} for row in rows])
    times = judge("mgk", "7", tmp_path)[1::2]
    assert {verdict.judgement for verdict in times} == {"undecided: no standard error"}
    assert all(verdict.ours for verdict in times)


@settings(max_examples=50, deadline=None)
@given(st.floats(0, 1), st.integers(0, 10**6), st.integers(0, 100))
def test_every_error_is_a_number_or_unknown(share: float, count: int, rounds: int) -> None:
    error = FileError(samples="n").compute(share, count)
    assert error is None if count == 0 else error is not None and 0 <= error <= 0.5
    spread = FileError(iqr="iqr").compute(1.0, 0.1, rounds)
    assert (spread is None) == (rounds < 2)


@pytest.mark.parametrize("keys", [{}, {"samples": "n", "iqr": "q"}, {"exact": True, "iqr": "q"}])
def test_an_error_has_one_source(keys: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match="needs one of standard_error"):
        FileError.model_validate(keys)
