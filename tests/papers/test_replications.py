"""Published numbers beside ours: equivalence with the noise of both sides, and their page."""

import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import write_replications
from helpers.invented_papers import FOLDER, run_invented
from helpers.paths import ROOT
from scipy import stats

from lit_attn.papers.published import read_records
from lit_attn.papers.replications import judge, judge_text, make_replications_table
from lit_attn.papers.source import Paper, read_paper
from lit_attn.report.tables.formats import Table

OURS = [18.1, 19.4, 18.8, 20.3, 19.0]


@pytest.mark.parametrize("runs", [2, 5])
def test_the_interval_is_that_of_welch_where_both_sides_are_known(runs: int) -> None:
    """The mean of many published runs has almost no noise left."""
    many = 10_000_000
    equivalence = judge(OURS, 18.0, 0.5, many, 1.0)
    expected = stats.ttest_1samp(OURS, 18.0).confidence_interval(0.95)
    assert (equivalence.low, equivalence.high) == pytest.approx(
        (expected.low - 18.0, expected.high - 18.0), rel=1e-3
    )
    # Without a published deviation both sides have ours, as if it was pooled from our seeds.
    equivalence = judge(OURS, 18.0, None, runs, 1.0)
    assert equivalence.high is not None
    half = stats.t.ppf(0.975, 4) * np.std(OURS, ddof=1) * np.sqrt(1 / 5 + 1 / runs)
    assert equivalence.high == pytest.approx(np.mean(OURS) - 18.0 + half)


def test_the_interval_covers_and_keeps_its_level() -> None:
    """Call 2.5 of 100 numbers reproduced whose true difference is the margin."""
    generator = np.random.default_rng(0)
    count, reproduced, covered = 4000, 0, 0
    for _ in range(count):
        ours = generator.normal(1.0, 0.3, 6)
        published = generator.normal(0.0, 0.3)
        equivalence = judge(ours.tolist(), float(published), None, 1, 1.0)
        reproduced += equivalence.verdict == "reproduced"
        assert equivalence.low is not None
        assert equivalence.high is not None
        covered += equivalence.low <= 1.0 <= equivalence.high
    assert reproduced / count <= 0.025 + 3 * (0.025 * 0.975 / count) ** 0.5
    assert covered / count == pytest.approx(0.95, abs=3 * (0.95 * 0.05 / count) ** 0.5)


@pytest.mark.parametrize(
    ("ours", "published", "margin", "verdict"),
    [
        (OURS, 19.0, 2.0, "reproduced"),
        (OURS, 19.0, 1.0, "undecided"),
        (OURS, 25.0, 2.0, "not reproduced"),
        (OURS, 13.0, 2.0, "not reproduced"),
        ([19.0], 19.0, 2.0, "undecided: one seed"),
        ([19.0, 19.0], 19.5, 0.5, "reproduced"),
        ([19.0, 19.0], 19.5, 0.4, "not reproduced"),
        ([], 19.0, 2.0, "not run"),
    ],
)
def test_the_whole_interval_lies_within_the_margin_or_outside(
    ours: list[float], published: float, margin: float, verdict: str
) -> None:
    assert judge(ours, published, None, 5, margin).verdict == verdict


def test_the_printed_deviation_counts_unless_another_one_is_given() -> None:
    (printed,) = [
        item
        for item in read_paper("belief2", "", FOLDER).paper.tables["2"].replications
        if item.row == "Attention"
    ]
    ours = [72.0, 72.1, 71.9]
    assert judge_text("72.01±0.20", printed, ours, 0) == judge(ours, 72.01, 0.2, 3, 0.5)
    replaced = printed.model_copy(update={"deviation": 1.5})
    assert judge_text("72.01±0.20", replaced, ours, 0) == judge(ours, 72.01, 1.5, 3, 0.5)
    decided = judge_text("72.01±0.20", printed, ours, 0)
    waiting = judge_text("72.01±0.20", printed, ours, 1)
    assert decided.verdict == "reproduced"
    assert waiting == decided._replace(verdict="undecided: 1 seed without a result")


def make_table(runs: Path) -> Table:
    """Return the table of the published numbers of Belief2."""
    source = replace(read_paper("belief2", "", FOLDER), runs=runs)
    items = source.items(())
    return make_replications_table(source, items, read_records(source, items.values(), runs))


def test_the_page_of_a_paper_judges_its_published_numbers(tmp_path: Path) -> None:
    run_invented(tmp_path, "belief2", ["2"], lambda name, seed: 0.72 + seed / 1e5, seeds=None)
    table = make_table(tmp_path)
    rows = [[cell.text for cell in row] for row in table.rows]
    names = read_paper("belief2", "", FOLDER).paper.tables["2"].rows
    assert [row[0] for row in rows] == [f"{name}, val acc." for name in names]
    assert rows[0][3:6] == ["72.01±0.20 (3)", "72.050", "3"]
    assert [row[-1] for row in rows] == ["reproduced", "not reproduced", "not reproduced"]
    assert "1 reproduced, 2 not reproduced, 0 undecided, 0 not run" in table.title
    # A number waits for all planned seeds.
    next(tmp_path.glob("belief2-cifar100/standard/50-*/result.json")).unlink()
    verdict = make_table(tmp_path).rows[0][-1].text
    assert verdict == "undecided: 1 seed without a result"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"row": "nanoGTP"}, "no row or line 'nanoGTP'; did you mean 'nanoGPT'"),
        ({"column": "READ"}, "no column 'READ'; did you mean 'README'"),
        ({"published": "— | 1.9"}, "'nanoGPT | README' needs a variant and a published number"),
        ({"variant": None}, "'nanoGPT | README' needs a variant and a published number"),
    ],
)
def test_a_cell_without_a_number_or_a_variant_is_refused(
    changes: dict[str, str | None], message: str
) -> None:
    paper = read_paper("nanogpt", "", FOLDER).paper.model_dump()
    table = paper["tables"]["1"]
    for key, value in changes.items():
        place = table["replications"][0] if key in ("row", "column") else table["rows"]["nanoGPT"]
        place[key] = value
    with pytest.raises(ValueError, match=re.escape(message)):
        Paper.model_validate(paper)


def test_the_page_decides_nothing_while_a_seed_has_no_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seeds that solve a task late are still running when the others have their results."""
    monkeypatch.setattr(write_replications, "EVIDENCE", tmp_path)
    (tmp_path / "belief2-cifar100").mkdir()
    rows = ["variant,seed,status,value", "standard,0,done,72.0", "standard,1,done,72.1"]
    rows += ["standard,2,interrupted,", "belief2,2,missing,"]
    (tmp_path / "belief2-cifar100" / "per_seed.csv").write_text("\n".join(rows) + "\n")
    source = read_paper("belief2", "", FOLDER)
    item = source.paper.tables["2"]
    row = write_replications.make_row(source, item, item.replications[0])
    assert "| 2 |" in row
    assert "| undecided: 1 seed without a result |" in row


def test_the_page_of_replications_is_up_to_date() -> None:
    """Committed records are judged again."""
    generator = ROOT / "docs" / "generators" / "write_replications.py"
    run = subprocess.run(
        [sys.executable, str(generator)], capture_output=True, text=True, cwd=ROOT, check=True
    )
    page = (ROOT / "docs" / "replications.md").read_text(encoding="utf-8")
    assert run.stdout == page, (
        "run python docs/generators/write_replications.py > docs/replications.md"
    )
