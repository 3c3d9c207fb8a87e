"""Tables of results that another program wrote: columns, checks, and what is said about them."""

import csv
import io
import json
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from lit_attn import judge
from lit_attn.__main__ import main as lit_attn_main
from lit_attn.judging.prepare import Choices, Prepared, prepare
from lit_attn.judging.table import read_table
from lit_attn.report.__main__ import main
from lit_attn.report.tables.columns import format_seeds
from lit_attn.schema.errors import ConfigError

pytestmark = pytest.mark.usefixtures("no_rendering")


def write(folder: Path, columns: str = "variant,seed,accuracy,loss,parameters") -> Path:
    """Write six seeds of three variants; `good` is ahead, and `bad` has a failed seed."""
    rows = [columns.split(",")]
    for place, variant in enumerate(("base", "good", "bad")):
        for seed in range(6):
            accuracy = 70 + seed + 3.1 * (variant == "good") + 0.1 * (seed * place % 4)
            value = "" if (variant, seed) == ("bad", 2) else str(accuracy)
            rows.append([variant, str(seed), value, str(100 - accuracy), str(1000 + place)])
    stream = io.StringIO()
    csv.writer(stream).writerows(rows)
    path = folder / "results.csv"
    path.write_text(stream.getvalue())
    return path


def read(folder: Path, text: str, name: str = "results.csv", **choices: Any) -> Prepared:
    """Return the study of a table with these lines."""
    path = folder / name
    path.write_text(text)
    defaults = {"pairs": "seed", "baseline": "a"}
    return prepare(read_table(path), Choices(**(defaults | choices)))


def report(folder: Path, *arguments: str) -> int:
    table = ["--csv", str(folder / "results.csv"), "--reports", str(folder / "reports")]
    return main([*table, "--pairs", "seed", *arguments])


def test_every_named_metric_becomes_a_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path)
    assert report(tmp_path, "--baseline", "base", "--metric", "accuracy", "loss") == 0
    folders = {path.name for path in (tmp_path / "reports").iterdir() if path.is_dir()}
    assert folders == {"results-accuracy", "results-loss"}
    folder = tmp_path / "reports" / "results-accuracy"
    table = pd.read_csv(folder / "table.csv").set_index("variant")
    assert table["best"].to_dict() == {"base": False, "good": True, "bad": False}
    assert table.loc["good", "difference"] == pytest.approx(3.1 + 0.1 * (0 + 1 + 2 + 3 + 0 + 1) / 6)
    assert table.loc["bad", ["n", "failed", "parameters"]].tolist() == [5, 1, 1002]
    text = (folder / "table.full.md").read_text()
    assert "accuracy is the column 'accuracy' of the table of results: mean" in text
    assert "n counts the seeds with a result, of 6 planned (seeds 0 to 5)." in text
    assert (folder / "seeds.svg").exists()
    index = (tmp_path / "reports" / "index.html").read_text()
    assert "results-loss/table.html" in index
    assert "Failed: 1 run without a value of 'accuracy'." in capsys.readouterr().err


def test_several_possible_metrics_are_never_chosen_from(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A cost beside the metric must not become a second study of the index."""
    write(tmp_path)
    assert report(tmp_path, "--baseline", "base") == 2
    assert "name the metric with --metric NAME:min or NAME:max; choose from accuracy, loss" in (
        capsys.readouterr().err
    )


def test_metrics_with_one_file_name_have_folders_of_their_own(tmp_path: Path) -> None:
    path = tmp_path / "results.csv"
    path.write_text("variant,seed,a/b,a-b\nx,0,1,1\nx,1,2,3\ny,0,2,2\ny,1,3,5\n")
    assert report(tmp_path, "--baseline", "x", "--metric", "a/b:max", "a-b:min") == 0
    folders = {path.name for path in (tmp_path / "reports").iterdir() if path.is_dir()}
    assert folders == {"results-a-b", "results-a-b-2"}


def test_a_written_direction_wins(tmp_path: Path) -> None:
    path = write(tmp_path)
    known = prepare(read_table(path), Choices("loss", "seed", "base")).study.plan.metric
    written = prepare(read_table(path), Choices("loss:max", "seed", "base")).study.plan.metric
    assert (known.goal, written.goal) == ("min", "max")
    with pytest.raises(ConfigError, match="whether a larger or a smaller 'parameters' is better"):
        prepare(read_table(path), Choices("parameters", "seed", "base"))


def test_a_table_with_missing_rows_is_an_interim_look(tmp_path: Path) -> None:
    path = write(tmp_path)
    words = ("--metric", "accuracy", "--baseline", "base")
    report(tmp_path, *words)
    assert "interim look" not in (tmp_path / "reports/results/table.full.md").read_text()
    path.write_text("\n".join(path.read_text().splitlines()[:-1]))
    report(tmp_path, *words)
    assert "interim look" in (tmp_path / "reports/results/table.full.md").read_text()


def test_a_value_that_is_not_finite_is_a_failed_seed(tmp_path: Path) -> None:
    text = "variant,seed,loss\na,0,1\na,1,Infinity\nb,0,\nb,1,2\na,2,NaN\nb,2,-inf\n"
    study, notes = read(tmp_path, text)
    statuses = [cell.status for cell in study.cells]
    assert statuses == ["done", "error", "error", "error", "done", "error"]
    assert "Failed: 1 run without a value of 'loss'." in notes
    assert "Failed: 3 runs with a value that is not finite." in notes


def test_a_variant_can_have_the_name_of_a_missing_value(tmp_path: Path) -> None:
    text = "variant,seed,loss\nNone,0,1\nnull,0,nan\nNA,0,2\na,0,3\n"
    study, _ = read(tmp_path, text)
    assert [variant.name for variant in study.plan.variants] == ["None", "null", "NA", "a"]


def test_names_keep_their_last_digit(tmp_path: Path) -> None:
    """Once belief2 (seeds 0, 1) and belief (seeds 2, 3) became one variant with four seeds."""
    text = "variant,seed,loss\nbelief2,0,1\nbelief2,1,2\nbelief,2,3\nbelief,3,4\na,0,5\n"
    study, _ = read(tmp_path, text)
    assert [variant.name for variant in study.plan.variants] == ["belief2", "belief", "a"]


def test_a_seed_is_cut_from_a_name_only_on_request(tmp_path: Path) -> None:
    text = "variant,loss\na-seed0,1\na-seed1,2\nvit-b16/0,3\nvit-b16/1,4\n"
    study, _ = read(tmp_path, text, cut_seed=True)
    assert study.values("vit-b16") == {0: 3.0, 1: 4.0}
    with pytest.raises(ConfigError, match="'a-seed0': take it from there with --cut-seed"):
        read(tmp_path, text)
    with pytest.raises(ConfigError, match=r"results.csv:2: 'mgk2' does not end in a seed"):
        read(tmp_path, "variant,loss\nmgk2,1\nmgk4,2\n", cut_seed=True)


def test_columns_are_mapped(tmp_path: Path) -> None:
    text = "system,run,val_ppl,gpu_hours\na,0,10,2\nours,0,9,1\n"
    study, _ = read(tmp_path, text, metric="val_ppl:min", variant="system", seed="run")
    assert study.values("ours") == {0: 9.0}
    assert study.measurements("wall_time", "ours") == [3600.0]
    with pytest.raises(ConfigError, match="there is no column 'variant'; "):
        read(tmp_path, text, metric="val_ppl:min")


def test_one_column_gives_each_cost(tmp_path: Path) -> None:
    """Runs without the second column would have the cost of another one."""
    text = "variant,loss,runtime,gpu_hours\na,1,100,1\nb,2,200,\n"
    study, notes = read(tmp_path, text, pairs="none")
    costs = [cell.measurements["wall_time"] for cell in study.cells]
    assert costs == [100, 200]
    assert "The column 'gpu_hours' is not used, because 'runtime' is the same cost." in notes


def test_everything_odd_is_counted_and_said(tmp_path: Path) -> None:
    text = 'variant;loss;"note"\na ;1;x\na;1;x\na;2;y\n a;nan;y\nb;;z\nb;3;z\nb;1;z\n'
    study, notes = read(tmp_path, text, pairs="none")
    assert list(study.values("a").values()) == [1.0, 1.0, 2.0]
    assert notes == [
        "Blanks around names of variants are ignored in 1 run.",
        "Failed: 1 run without a value of 'loss'.",
        "Failed: 1 run with a value that is not finite.",
        "Ties: 5 values, of which 3 are different.",
        "Variants have 2 to 3 runs with a value (median 2.5; the baseline has 3).",
    ]


def test_rows_that_repeat_another_row_are_counted(tmp_path: Path) -> None:
    _, notes = read(tmp_path, "variant,loss\na,1\na,1\nb,2\nb,3\n", pairs="none")
    assert "1 row equal to another one in every column: each is a run." in notes


def test_percent_signs_are_read_if_all_values_have_one(tmp_path: Path) -> None:
    text = "variant,seed,accuracy\na,0,91.2%\nb,0,92 %\n"
    study, notes = read(tmp_path, text)
    assert study.values("b") == {0: 92.0}
    assert "All values of 'accuracy' have a percent sign; differences are in points." in notes
    with pytest.raises(ConfigError, match="numbers with and without a percent sign"):
        read(tmp_path, "variant,seed,accuracy\na,0,91.2%\nb,0,0.92\n")
    # JSON has numbers beside texts.
    rows = [
        {"variant": "a", "seed": 0, "accuracy": "91.2%"},
        {"variant": "b", "seed": 0, "accuracy": 0.92},
    ]
    with pytest.raises(ConfigError, match="numbers with and without a percent sign"):
        read(tmp_path, json.dumps(rows), "runs.json")
    rows[1]["accuracy"] = 10**400
    rows[0]["accuracy"] = 91.2
    study, notes = read(tmp_path, json.dumps(rows), "runs.json")
    assert "Failed: 1 run with a value that is not finite." in notes
    # A run that has failed has no form.
    study, _ = read(tmp_path, text + "c,0,nan\n")
    assert study.values("c") == {}


@pytest.mark.parametrize(
    ("word", "status"),
    [
        ("finished", "done"),
        ("crashed", "error"),
        ("FAILED", "error"),
        ("killed", "error"),
        ("Running", "running"),
    ],
)
def test_the_state_of_a_run_counts(word: str, status: str, tmp_path: Path) -> None:
    text = f"variant,seed,State,loss\na,0,finished,1\nb,0,{word},2\n"
    study, notes = read(tmp_path, text)
    assert [cell.status for cell in study.cells] == ["done", status]
    assert any(f"'{word}'" in note for note in notes) == (status != "done")


def test_a_ledger_of_autoresearch_is_known(tmp_path: Path) -> None:
    text = (
        "commit\tval_bpb\tmemory_gb\tstatus\tdescription\n"
        "a1b2c3d\t0.997900\t44.0\tkeep\tbaseline\n"
        'b2c3d4e\t0.993200\t44.2\tkeep\tincrease "LR"\n'
        "c3d4e5f\t1.005000\t44.0\tdiscard\tswitch to GeLU, twice\n"
        "d4e5f6g\t0.000000\t0.0\tcrash\tdouble width\n"
    )
    study, notes = read(tmp_path, text, "results.tsv", pairs="none", baseline="")
    assert (study.plan.baseline, study.plan.metric.goal) == ("a1b2c3d", "min")
    statuses = {cell.variant: cell.status for cell in study.cells}
    assert statuses["d4e5f6g"] == "error"
    assert study.measurements("peak_memory", "b2c3d4e") == [round(44.2 * 2**30)]
    assert "Failed: 1 run with the state 'crash', whatever the value." in notes
    judged = judge(tmp_path / "results.tsv", pairs="none")
    assert {variant.verdict for variant in judged.variants} == {"undecided"}
    # The best idea is the one to repeat, and the crashed one is not asked for.
    assert judged.next.runs == {"a1b2c3d": 3, "b2c3d4e": 3}


def test_an_index_without_a_heading_is_no_metric(tmp_path: Path) -> None:
    """pandas writes such a column, and some programs write spaces behind commas."""
    study, _ = read(tmp_path, ",variant, seed, loss\n0,a, 0, 1\n1,b, 0, 2\n")
    assert study.plan.metric.name == "loss"
    assert [(cell.variant, cell.value) for cell in study.cells] == [("a", 1), ("b", 2)]


def test_lines_of_json_are_rows(tmp_path: Path) -> None:
    """A text of JSON may contain line separators of Unicode, as samples of the harness do."""
    rows = [
        {"variant": "a", "loss": 1.5, "doc": "one\u2028two\x85three"},
        {"variant": "b", "loss": "NaN"},
        {"variant": "b"},
    ]
    text = "\r\n".join(json.dumps(row, ensure_ascii=False) for row in rows)
    for name in ("runs.jsonl", "runs.json"):
        study, _ = read(tmp_path, text, name, pairs="none")
        assert [cell.status for cell in study.cells] == ["done", "error", "error"]
    study, _ = read(tmp_path, json.dumps(rows), "list.json", pairs="none")
    assert study.values("a") == {0: 1.5}


def test_rows_of_other_parts_are_left_out_on_request(tmp_path: Path) -> None:
    text = "variant,seed,size,loss\na,0,small,1\nb,0,small,2\na,0,big,3\nb,0,big,4\n"
    study, _ = read(tmp_path, text, where=["size=big"])
    assert study.values("b") == {0: 4.0}
    with pytest.raises(ConfigError, match="size: no run has the value 'bigg'; did you mean 'big'"):
        read(tmp_path, text, where=["size=bigg"])


def test_the_list_of_one_seed_cannot_be_read_as_a_number_of_seeds(tmp_path: Path) -> None:
    (tmp_path / "results.csv").write_text("variant,seed,loss\na,0,1\nb,0,2\n")
    assert report(tmp_path, "--baseline", "a") == 0
    text = (tmp_path / "reports" / "results" / "table.full.md").read_text()
    assert "n counts the seeds with a result, of 1 planned (seed 0)." in text
    assert format_seeds([3, 4, 5]) == "seeds 3 to 5"
    assert format_seeds([0, 50]) == "seeds 0, 50"


def test_a_seed_without_a_row_is_missing(tmp_path: Path) -> None:
    study, notes = read(tmp_path, "variant,seed,loss\na,0,1\na,1,2\nb,0,1.5\n")
    assert [cell.status for cell in study.variant_cells("b")] == ["done", "missing"]
    assert "'b' lacks 1 of 2 seeds." in notes


def test_seeds_can_be_texts(tmp_path: Path) -> None:
    study, notes = read(tmp_path, "variant,seed,loss\na,s1,1\na,s0,2\nb,s0,3\nb,s1,4\n")
    assert study.values("a") == {1: 1.0, 0: 2.0}
    assert "Seeds are texts, so they are numbered from 0 on in alphabetical order." in notes


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("name,seed,loss\na,0,1\n", "there is no column 'variant'"),
        ("variant,seed,loss\na,0.5,1\n", "results.csv:2: seed '0.5' is not a whole number"),
        ("variant,seed,loss\na,,1\n", "results.csv:2: has no seed"),
        ("variant,seed,loss\n,0,1\n", "results.csv:2: variant: is empty"),
        ("variant,seed,loss\na,0,1\na,0,2\n", "results.csv:3: variant 'a' has seed 0 twice .first"),
        ("variant,seed,note\na,0,x\n", "no column of numbers that could be a metric"),
        ("variant,seed,loss\na,0,1\na,1,x\n", "results.csv:3: loss: 'x' is not a number"),
        ("variant,seed,loss\na,0,1_0\n", "no column of numbers"),
        ("variant,seed,loss,step_time\na,0,1,x\n", "results.csv:2: step_time: 'x' is not a cost"),
        ("variant,seed,loss,step_time\na,0,1,-1\n", "step_time: '-1' is not a cost"),
        ("variant,seed,loss\na,0\n", "results.csv:2: has 2 cells, and the heading has 3"),
        ("variant,seed,seed\na,0,1\n", "results.csv:1: has the column 'seed' twice"),
        ("", "results.csv:1: has no heading"),
        ("variant,seed,loss\n", "contains no run"),
        ("variant,seed,loss\na,0,1\n\udcff", "cannot be read as a table in UTF-8"),
    ],
)
def test_another_table_is_refused_in_one_line(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "results.csv"
    path.write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(ConfigError, match=message):
        prepare(read_table(path), Choices(pairs="seed", baseline="a"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "runs.json: cannot be read as JSON"),
        ("[1]", "runs.json: run 1: is no JSON object"),
        ('{"a": 1}\n{"a": \n', "runs.json:2: cannot be read as JSON"),
        # The line of a list over several lines is that of the mistake.
        ('[\n{"a": 1},\n{"a": }\n]', "runs.json: cannot be read as JSON: Expecting value: line 3"),
        ("[]", "contains no run"),
    ],
)
def test_damaged_json_is_refused_in_one_line(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "runs.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_table(path)


def test_nothing_about_pairs_and_baselines_is_assumed(tmp_path: Path) -> None:
    text = "variant,seed,loss\na,0,1\nb,0,2\n"
    with pytest.raises(ConfigError, match="say with --pairs whether runs"):
        read(tmp_path, text, pairs="")
    with pytest.raises(ConfigError, match="name the baseline with --baseline; choose from a, b"):
        read(tmp_path, text, baseline="")
    study, _ = read(tmp_path, text.replace("b,", "baseline,"), baseline="")
    assert study.plan.baseline == "baseline"


FACTORS = "own,lr,seed,loss\n" + "".join(
    f"{value},{lr},{seed},{2 - (value == 'xsa') * 0.3 + (lr == '1e-3') * 0.1 + 0.01 * (seed % 4)}\n"
    for value in ("full", "xsa")
    for lr in ("1e-4", "1e-3")
    for seed in range(9)
)


def test_columns_of_factors_are_a_product(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "runs.csv"
    path.write_text(FACTORS)
    words = ["judge", str(path), "--pairs", "seed", "--metric", "loss:min"]
    words += ["--variant", "own, lr", "--baseline", "own=full,lr=1e-4"]
    lit_attn_main(words)
    printed = capsys.readouterr().out
    assert "runs: main effects against own=full,lr=1e-4: own=xsa is better (" in printed
    assert "\nlr=1e-3 " in printed
    assert "3 variants; --all shows them." in printed
    lit_attn_main([*words, "--all"])
    assert "\nown=xsa,lr=1e-3 " in capsys.readouterr().out
    lit_attn_main([*words, "--where", "lr=1e-4", "--json"])
    (study,) = json.loads(capsys.readouterr().out)["studies"]
    assert [variant["variant"] for variant in study["variants"]] == ["own=xsa,lr=1e-4"]


@pytest.mark.parametrize(
    ("old", "new", "variant", "message"),
    [
        ("", "", "own,rl", "--variant own,rl: there is no column 'rl'; did you mean 'lr'"),
        ("full,1e-4,0", ",1e-4,0", "own,lr", "runs.csv:2: own: '' names no level"),
        ("full,1e-4,0", '"a,b",1e-4,0', "own,lr", "runs.csv:2: own: 'a,b' names no level"),
        ("", "", "", r"those of a product with commas \(residual,zz\); there is no column"),
    ],
)
def test_factors_without_a_clear_name_are_refused(
    old: str, new: str, variant: str, message: str, tmp_path: Path
) -> None:
    choices = {"metric": "loss:min", "variant": variant}
    with pytest.raises(ConfigError, match=message):
        read(tmp_path, FACTORS.replace(old, new, 1), "runs.csv", **choices)
