"""Claims of papers: verdicts from differences with intervals, failed seeds, busy machines."""

import re
from pathlib import Path

import pytest
from helpers.invented_papers import FOLDER, entries, judge, run_invented
from pydantic import ValidationError

from lit_attn.cells.records import Exit, Result
from lit_attn.papers.claims import judge_claims
from lit_attn.papers.layout import Figure, Table
from lit_attn.papers.page import make_claims_table
from lit_attn.papers.published import read_records
from lit_attn.papers.source import read_paper

pytestmark = pytest.mark.usefixtures("no_rendering")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("difference", "judgement"), [(0.05, "agree"), (-0.05, "disagree"), (0.0, "undecided")]
)
def test_claims_compare_the_interval_with_the_published_side(
    tmp_path: Path, difference: float, judgement: str
) -> None:
    def value(name: str, seed: int) -> float:
        noise = 0.004 * ((seed * (7 if name == "belief" else 3)) % 5 - 2)
        return 0.8 + (difference if name == "belief" else 0) + noise

    run_invented(tmp_path, "beliefformer", ["3"], value)
    verdict = judge(tmp_path, "beliefformer", "3")[0]
    assert verdict.published == "+0.99"
    assert verdict.pairs == 5
    assert verdict.judgement == judgement
    text = verdict.ours.replace("\N{MINUS SIGN}", "~")
    assert re.fullmatch(r"[+~]?\d+\.\d+ \[[+~][\d.]+, [+~][\d.]+\]", text)


@pytest.mark.parametrize(
    ("difference", "text"), [(-0.1, "0.10"), (-0.1 + 1e-12, "0.10"), (0.05, "0.0500")]
)
def test_rounding_errors_add_no_digits_to_a_difference(
    tmp_path: Path, difference: float, text: str
) -> None:
    def value(name: str, seed: int) -> float:
        return 1.5 + 0.01 * seed + difference / 100 * (name == "belief")

    run_invented(tmp_path, "beliefformer", ["3"], value)
    verdict = judge(tmp_path, "beliefformer", "3")[0]
    assert verdict.ours[1:].startswith(f"{text} [")


def test_claims_about_the_same_cells_have_one_verdict_and_count_once(tmp_path: Path) -> None:
    """Small models have the same cells for Tables 1 and 2 of Belief2, the paper does not."""

    def value(name: str, seed: int) -> float:
        return 0.8 + 0.05 * (name == "belief2") + 0.001 * (seed % 3)

    for size, expected in (("embedded", ["1 / 2"] * 3), ("", ["1"] * 3 + ["2"] * 3)):
        run_invented(tmp_path / size, "belief2", ["1", "2"], value, size)
        verdicts = judge(tmp_path / size, "belief2", "1", "2", size=size)
        assert [verdict.places for verdict in verdicts] == expected
    source = read_paper("belief2", "embedded", FOLDER)
    items = source.items(["1", "2"])
    records = read_records(source, items.values(), tmp_path / "embedded")
    table = make_claims_table(source, items, records)
    first = [cell.text for cell in table.rows[0]]
    assert first[0].count("Belief2-Attention exceeds the standard layer on") == 2
    assert first[3] == "+1.42 / +4.14"
    assert (
        table.title
        == "Claims of the paper: 2 agree, 0 disagree, 1 undecided, 0 not run, 0 not measured."
    )


def test_claims_that_cannot_be_judged_stay_apart() -> None:
    """Cells that no study measures are not the same cells, even without any result."""
    source = read_paper("mgk", "embedded", FOLDER)
    verdicts = judge_claims(source, source.items(()), {})
    claims = [claim for item in source.items(()).values() for claim in item.claims]
    judgements = {verdict.judgement for verdict in verdicts}
    # No small study translates, so "not run" would ask for what nobody can run.
    assert judgements == {"not run", "not measured"}
    texts = [text for verdict in verdicts for text in verdict.text.split(" / ")]
    assert sorted(texts) == sorted(claim.text for claim in claims)


def test_a_claim_of_a_figure_can_name_another_value_and_its_better_side(tmp_path: Path) -> None:
    """AttentionX claims a lower training loss in the figure of its validation loss."""
    run_invented(tmp_path, "attentionx", ["figure-1"], lambda name, seed: 3.0 + seed / 10)
    for path in tmp_path.rglob("result.json"):
        record = Result.model_validate_json(path.read_bytes())
        is_better = record.variant == "attentionx-half"
        loss = 2.0 - is_better * (0.5 + record.seed / 100)
        metrics = record.metrics | {"train/loss": loss}
        record.model_copy(update={"metrics": metrics}).write(path)
    source = read_paper("attentionx", "", FOLDER)
    item = source.paper.figures["1"]
    validation, training = judge_claims(source, {"": item}, read_records(source, [item], tmp_path))
    assert validation.judgement == "undecided"
    assert (training.published, training.judgement) == ("curves only", "agree")
    assert training.ours.startswith("\N{MINUS SIGN}0.52 [")
    claim = item.claims[1].model_copy(update={"goal": "max"})
    item = item.model_copy(update={"claims": (claim,)})
    (opposite,) = judge_claims(source, {"": item}, read_records(source, [item], tmp_path))
    assert opposite.judgement == "disagree"


@pytest.mark.parametrize(("seeds", "judgement"), [(0, "not run"), (1, "undecided: one pair")])
def test_a_claim_needs_two_pairs(tmp_path: Path, seeds: int, judgement: str) -> None:
    run_invented(tmp_path, "beliefformer", ["3"], lambda name, seed: 0.8, seeds=max(1, seeds))
    if not seeds:
        for path in tmp_path.rglob("belief/*/result.json"):
            path.unlink()
    verdict = judge(tmp_path, "beliefformer", "3")[0]
    assert (verdict.pairs, verdict.judgement) == (seeds, judgement)


def fail(runs: Path, variant: str, seeds: range) -> None:
    """Replace results by failures."""
    for seed in seeds:
        for path in runs.rglob(f"{variant}/{seed}-*/result.json"):
            end = Exit(failure="diverged", returncode=1, message="loss is nan")
            end.write(path.parent / "attempts" / "1" / "exit.json")
            path.unlink()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("variant", "seeds", "failures", "judgement"),
    [
        ("belief", 5, 2, "undecided: 2 failed (BeliefFormer)"),
        ("belief", 5, 5, "undecided: 5 failed (BeliefFormer)"),
        ("belief", 10, 3, "undecided: 3 failed (BeliefFormer)"),
        # Ten pairs in favour of the variant are enough for the test of ranks.
        ("standard", 10, 2, "agree"),
    ],
)
def test_failed_seeds_are_counted_and_ranked_last(
    tmp_path: Path, variant: str, seeds: int, failures: int, judgement: str
) -> None:
    def value(name: str, seed: int) -> float:
        return 0.8 + 0.05 * (name == "belief") + 0.001 * (seed % 3)

    run_invented(tmp_path, "beliefformer", ["3"], value, seeds=seeds)
    fail(tmp_path, variant, range(failures))
    verdict = judge(tmp_path, "beliefformer", "3")[0]
    assert verdict.judgement == judgement
    row = {"belief": "BeliefFormer", "standard": "Transformer"}[variant]
    text = entries(tmp_path, "beliefformer", "3")[row, "val. acc"]
    assert text.endswith(f"(n={seeds - failures} of {seeds}, {failures} diverged)")
    assert entries(tmp_path, "beliefformer", "3")["BeliefFormer*", "val. acc"].endswith(
        f"(n={seeds})"
    )


def test_a_claim_about_a_speed_is_undecided_on_a_busy_machine(tmp_path: Path) -> None:
    run_invented(tmp_path, "beliefformer", ["2"], lambda name, seed: 3.0)
    for path in tmp_path.rglob("result.json"):
        record = Result.model_validate_json(path.read_bytes())
        speed = 2000 - 500 * (record.variant == "belief-star") - record.seed
        metrics = record.metrics | {"train/tokens_per_second": speed}
        record.model_copy(update={"metrics": metrics}).write(path)
    assert judge(tmp_path, "beliefformer", "2")[0].judgement == "agree"
    for path in tmp_path.rglob("standard/4-*/result.json"):
        path.write_text(path.read_text().replace("1996", "3996"))
    verdict = judge(tmp_path, "beliefformer", "2")[0]
    assert verdict.judgement == "undecided: busy machine"
    cell = entries(tmp_path, "beliefformer", "2")["Transformer", "tokens/s in training"]
    assert cell == "busy machine (n=5)"


def test_a_claim_of_a_figure_follows_the_goal_of_the_metric(tmp_path: Path) -> None:
    """A lower loss is better, although the figure prints no number."""
    losses = {"standard": 3.5, "belief": 3.4, "belief-star": 3.6}
    run_invented(
        tmp_path, "beliefformer", ["figure-5"], lambda name, seed: losses[name] + seed / 1e3
    )
    verdicts = judge(tmp_path, "beliefformer", "figure-5")
    assert [verdict.judgement for verdict in verdicts] == ["agree", "disagree"]


@pytest.mark.parametrize("layout", ["table", "figure"])
def test_a_claim_about_an_unknown_column_is_refused(layout: str) -> None:
    claim = {"text": "a is better", "row": "a", "against": "b", "column": "acuracy"}
    if layout == "table":
        rows = {name: {"published": "1"} for name in "ab"}
        fields = {"columns": {"accuracy": {}}, "rows": rows}
        expected = "no column 'acuracy'; did you mean 'accuracy'?"
    else:
        fields = {"lines": {"a": "study/a", "b": "study/b"}}
        expected = "no column 'acuracy'"
    layout_class = {"table": Table, "figure": Figure}[layout]
    with pytest.raises(ValidationError, match=re.escape(expected)):
        layout_class.model_validate({"caption": "A caption", "claims": [claim], **fields})
