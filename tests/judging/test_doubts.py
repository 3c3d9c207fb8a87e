"""Doubtful tables of other programs: states, units, digits, and what their errors advise."""

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from lit_attn import judge
from lit_attn.judging import table
from lit_attn.judging.prepare import Choices, Prepared, prepare
from lit_attn.judging.runs import judge_target
from lit_attn.judging.table import read_table
from lit_attn.report.__main__ import main
from lit_attn.report.statistics import stats
from lit_attn.report.tables.judgement import draw_judgement
from lit_attn.report.tables.terminal import Screen, find_screen
from lit_attn.schema.errors import ConfigError


def read(folder: Path, text: str, **choices: Any) -> Prepared:
    """Return the study of a table with these lines."""
    path = folder / "results.csv"
    path.write_text(text)
    defaults = {"pairs": "seed", "baseline": "a"}
    return prepare(read_table(path), Choices(**(defaults | choices)))


def test_an_unknown_state_is_asked_for_and_the_known_ones_count(tmp_path: Path) -> None:
    """One unknown word made the failed runs of the other words count: better, 6/6."""
    text = (
        "variant,seed,state,loss\na,0,finished,1\na,1,PRUNED,2\nb,0,FAILED,0\nb,1,,1\n"
        "b,2,finished,1\na,2,COMPLETE,1\n"
    )
    message = (
        r"state: no known state of a run: 'PRUNED' in 1 run, '' in 1 run; say what each means with"
        " --state PRUNED=failed"
    )
    with pytest.raises(ConfigError, match=message):
        read(tmp_path, text)
    study, notes = read(tmp_path, text, states=["PRUNED=failed", "=open"])
    statuses = {(cell.variant, cell.seed): cell.status for cell in study.cells}
    assert statuses["a", 1] == statuses["b", 0] == "error"
    assert (statuses["a", 2], statuses["b", 1]) == ("done", "running")
    assert "Failed: 1 run with the state 'FAILED', whatever the value." in notes
    with pytest.raises(ConfigError, match="--state: 'PRUNED=bad' is not WORD=done"):
        read(tmp_path, text, states=["PRUNED=bad"])


def test_states_of_another_kind_are_passed_over_for_those_of_runs(tmp_path: Path) -> None:
    text = "variant,seed,state,status,loss\na,0,Ohio,finished,1\nb,0,Utah,crashed,2\n"
    study, _ = read(tmp_path, text)
    assert [cell.status for cell in study.cells] == ["done", "error"]


@pytest.mark.parametrize(
    ("goal", "low", "high", "is_refused"),
    [
        ("accuracy:max", (0.91, 0.92), (93.1, 92.8), True),
        ("accuracy:max", (0.0091, 0.0102), (1.1, 1.2), True),
        ("word_error_rate:min", (0.09, 0.08), (8.9, 9.1), True),
        # A run that has learned nothing, a variant that solves nothing, a small loss.
        ("accuracy:max", (1.0, 72.0), (72.1, 72.2), False),
        ("accuracy:max", (0.0, 0.0), (93.1, 92.8), False),
        ("accuracy:max", (0.5, 0.6), (93.1, 92.8), True),
        ("accuracy:max", (0.5, 0.6), (1.5, 2.0), False),
        ("loss:min", (0.02, 0.03), (2.3, 2.4), False),
    ],
)
def test_a_share_beside_a_percentage_is_refused(
    goal: str, low: tuple[float, ...], high: tuple[float, ...], is_refused: bool, tmp_path: Path
) -> None:
    column = goal.partition(":")[0]
    rows = [f"a,{seed},{value}" for seed, value in enumerate(low)]
    rows += [f"b,{seed},{value}" for seed, value in enumerate(high)]
    text = "\n".join([f"variant,seed,{column}", *rows])
    if not is_refused:
        assert len(read(tmp_path, text, metric=goal).study.cells) == 4
        return
    with pytest.raises(ConfigError, match=f"{column}: 'a' has shares .* and 'b' has percentages"):
        read(tmp_path, text, metric=goal)
    # With a sign behind every number their unit is known.
    signed = "\n".join([f"variant,seed,{column}", *(f"{row}%" for row in rows)])
    assert len(read(tmp_path, signed, metric=goal).study.cells) == 4


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (("1e-320", "2e-320"), "1e-320 is beyond the sizes that can be compared"),
        (("1.7e308", "-1.7e308"), "1.7e308 is beyond the sizes that can be compared"),
        ((str(10**18 + 3214), str(10**18)), "1000000000000003214 has more digits than"),
    ],
)
def test_a_value_without_its_digits_is_one_line(
    values: tuple[str, str], message: str, tmp_path: Path
) -> None:
    text = "variant,seed,loss\na,0,{}\nb,0,{}\n"
    with pytest.raises(ConfigError, match=f"results.csv:2: loss: {message}"):
        read(tmp_path, text.format(*values))


def test_means_have_the_digits_of_small_differences(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A mean of 1e9 lost its last digits, and values near 1e-300 were printed as 0.000000."""
    for start, unit in (
        (1e9 + 3.2, 0.01),
        (2**53 - 5000.0, 20.0),
        (1e-298, 1e-300),
        (1e200, 1e198),
    ):
        rows = [f"a,{seed},{start + unit * (seed % 3)!r}" for seed in range(6)]
        rows += [f"b,{seed},{start - unit * (1 + seed % 2)!r}" for seed in range(6)]
        path = tmp_path / "runs.csv"
        path.write_text("variant,seed,loss\n" + "\n".join(rows))
        choices = {"pairs": "seed", "baseline": "a"}
        judged = judge(path, "loss:min", **choices)
        printed = draw_judgement(judged, Screen(200, 0))
        lines = printed.splitlines()
        (first,) = (line.split("baseline")[1] for line in lines if line.startswith("a "))
        (second,) = (line.split("better")[1] for line in lines if line.startswith("b "))
        difference = judged.variants[0].difference
        assert difference is not None
        change = float(second.split("±")[0]) - float(first.split("±")[0])
        assert change == pytest.approx(difference.mean, rel=0.02)


def test_a_terminal_without_columns_has_the_width_of_a_file(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "0")
    assert find_screen().width == 80


SIZES = "\n".join(
    [
        "variant,seed,size,steps,loss,seconds",
        *(
            f"{variant},{seed},{size},{100 * (seed + 1)},{1 + (size == 'M') + 0.01 * seed},{seed}"
            for variant in ("a", "b")
            for size in ("S", "M")
            for seed in range(5)
        ),
    ]
)
"""Runs of two sizes with the same seeds."""


def test_equal_seeds_name_the_column_that_explains_them(tmp_path: Path) -> None:
    message = (
        r"variant 'a' has seed 0 twice \(first at .*:2\); they differ in 'size' \(S, M\), so choose"
        " one with --where size=S"
    )
    with pytest.raises(ConfigError, match=message):
        read(tmp_path, SIZES, metric="loss")
    _, notes = read(tmp_path, SIZES, metric="loss", pairs="none")
    assert (
        "Runs of a variant differ because of the column 'size' (S, M), which explains 100 % of"
        " their variance. Judge one with --where size=S."
    ) in notes
    answer = judge_target(tmp_path / "results.csv", "loss:min", 1.5)
    assert any("because of the column 'size'" in note for note in answer.notes)
    study, notes = read(tmp_path, SIZES, metric="loss", where=["size=S"])
    assert len(study.cells) == 10
    assert not any("differ because" in note for note in notes)


@pytest.mark.parametrize(
    ("where", "count"),
    [
        (["size!=S"], 10),
        (["size=S", "steps>100", "steps<=300"], 4),
        (["steps >= 500"], 4),
        (["steps<200"], 4),
    ],
)
def test_conditions_compare_texts_and_numbers(where: list[str], count: int, tmp_path: Path) -> None:
    study, _ = read(tmp_path, SIZES, metric="loss", where=where, pairs="none")
    assert len(study.cells) == count


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ("steps>9000", "--where steps>9000: no run is left"),
        ("steps<many", "--where steps<many: 'many' is not a number"),
        ("steps", "--where: 'steps' is not COLUMN=VALUE, with =, !=, <"),
        ("stepz>1", "has no column 'stepz'; did you mean 'steps'"),
    ],
)
def test_a_wrong_condition_is_one_line(where: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        read(tmp_path, SIZES, where=[where])


def test_all_missing_options_are_one_line(tmp_path: Path) -> None:
    path = tmp_path / "w.csv"
    path.write_text("system,step,nll,ppl\na,0,1,2\nb,0,2,3\n")
    with pytest.raises(ConfigError) as error:
        judge(path, pairs="")
    message = str(error.value)
    assert message.count(str(path)) == 1
    assert "\n" not in message
    for part in ("--pairs seed (the", "no column 'variant'", "--metric NAME:min"):
        assert part in message
    with pytest.raises(ConfigError, match=r"smaller 'nll' is better .*; name the baseline with"):
        judge(path, "nll", pairs="none", variant="system")


def test_the_report_reads_a_table_as_the_judge_does(tmp_path: Path) -> None:
    (tmp_path / "results.csv").write_text(SIZES)
    words = ["--csv", str(tmp_path / "results.csv"), "--reports", str(tmp_path / "reports")]
    words += ["--pairs", "seed", "--baseline", "a", "--metric", "loss:min"]
    assert main([*words, "--where", "size=S", "--where", "steps>100"]) == 0
    written = pd.read_csv(tmp_path / "reports" / "results" / "table.csv")
    assert written["n"].tolist() == [4, 4]


def test_a_file_that_needs_too_much_memory_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A CSV of 300 MB took 23.5 GB, and the process was killed without a word."""
    monkeypatch.setattr(table, "MOST_BYTES", 10_000)
    with pytest.raises(ConfigError, match=r"results.csv:9: the runs up to here need 0 GB"):
        read(tmp_path, SIZES, metric="loss")
    path = tmp_path / "runs.jsonl"
    path.write_text(f'{{"note": "{1000 * "x"}"}}\n')
    with pytest.raises(ConfigError, match=r"runs.jsonl: the runs up to here need"):
        table.read_table(path)


def test_many_pairs_need_no_memory_for_all_sign_patterns() -> None:
    """20,000 patterns of 20,000 pairs took 6 GB; blocks of them are the same patterns."""
    blocks = list(stats._sign_blocks(150, stats.DRAWS, count=20_000))
    assert len(blocks) > 100
    assert np.array_equal(np.concatenate(blocks), stats._signs(150))
