"""Pages of papers: our values beside the published ones, figures, LaTeX, speed."""

import csv
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import write_papers
from helpers.fake_cells import result
from helpers.invented_papers import FOLDER, draw, entries, judge, run_invented
from helpers.paths import ROOT

from lit_attn.ablate.plan import expand
from lit_attn.cells.records import Plan
from lit_attn.config.study import read_studies
from lit_attn.papers.page import write_paper
from lit_attn.papers.published import UNMEASURED, make_entries
from lit_attn.papers.source import read_paper


def run_reading(runs: Path, study: str, variant: str, value: float) -> Plan:
    """Write the results of a variant that belongs to a reading, and return the plan."""
    matrix = expand(read_studies(ROOT / "ablations.yaml")[study], runs)
    matrix.write_plan()
    metric = matrix.plan().metric.name
    for job in matrix.jobs:
        if job.variant == variant:
            result(job.cell, {metric: value}).write(job.folder / "result.json")
            curve = f"step,epoch,name,value\n10,0,{metric},{value}\n"
            (job.folder / "metrics.csv").write_text(curve)
    return matrix.plan()


def test_a_table_without_results_has_counts_and_otherwise_empty_rows(tmp_path: Path) -> None:
    table = draw(tmp_path, "belief2", "2")[0]
    assert table.headings == ["", "Attention", "Belief-Attention", "Belief2-Attention"]
    assert [[cell.text for cell in row] for row in table.rows] == [
        ["val acc.", "72.01±0.20", "74.18±0.25", "76.15±0.25"],
        ["ours", "", "", ""],
        ["model size", "3.38M", "<", "<"],
        ["ours", "3.38M (counted)", "3.38M (counted)", "3.38M (counted)"],
        ["time/epoch (s)", "43.42", "55.52", "59.74"],
        ["ours", "", "", ""],
    ]
    note = 'Rows with a name have the published values, and each row "ours" has our values'
    assert any(line.startswith(note) for line in table.notes)
    source = read_paper("belief2", "", FOLDER)
    assert write_paper(source, tmp_path / "none", tmp_path).is_file()


@pytest.mark.parametrize(("paper", "has_claims"), [("belief2", True), ("nanogpt", False)])
def test_a_page_has_a_table_of_claims_if_the_paper_has_some(
    paper: str, has_claims: bool, tmp_path: Path
) -> None:
    page = write_paper(read_paper(paper, "", FOLDER), tmp_path / "none", tmp_path)
    assert ("## Claims" in page.with_name("index.md").read_text()) == has_claims


def test_our_values_stand_below_the_published_ones(tmp_path: Path) -> None:
    """Values are in printed units, with the decimals and units of the paper, sd and n."""
    run_invented(tmp_path, "beliefformer", ["1", "3"], lambda name, seed: 0.8 + seed / 100)
    accuracies = entries(tmp_path, "beliefformer", "3")
    assert accuracies["Transformer", "val. acc"] == "82.00 ± 1.58 (n=5)"
    assert accuracies["Transformer", "validation time"] == "2.00 (n=5)"
    sizes = entries(tmp_path, "beliefformer", "1")
    assert sizes["BeliefFormer*", "time for evaluating val. dataset (s)"] == "2.00 (0.0%) (n=5)"
    heading = "no. of parameters"
    assert sizes["Transformer", heading] == "22.2M (-) (n=5)"
    assert sizes["BeliefFormer*", heading] == "24.0M (8.0%) (n=5)"


def test_two_measurements_of_a_file_stand_in_one_cell(tmp_path: Path) -> None:
    """DCMHA prints the speed of TFM++ without and with windows, and percentages of both."""
    for folder, name in (("2.8B", "dcmha"), ("6.9B-query-1-1", "dcmha-query")):
        (tmp_path / "bench" / folder).mkdir(parents=True)
        rows = [
            "standard,100.5,1,",
            "standard/windows,125.25,1.25,1",
            f"{name}/windows,96,0.955,0.76",
        ]
        text = "\n".join(["name,rate,ratio,beside", *rows, ""])
        (tmp_path / "bench" / folder / "decoding-cuda.csv").write_text(text)
    source = replace(read_paper("dcmha", "", FOLDER), runs=tmp_path)
    cells = {
        (number, entry.row, entry.column.partition("B / ")[2] or entry.column): entry.ours
        for number in ("6", "10")
        for line in make_entries(source, source.paper.tables[number], {})
        for entry in line
        if entry.ours
    }
    assert cells == {
        ("6", "2.8B", "Inference (tokens/s) / TFM++/win"): "100.5/125.2",
        ("6", "2.8B", "Inference (tokens/s) / DCFM++"): "96.0",
        ("6", "2.8B", "Inference (tokens/s) / pct. vs TFM++/ w/ window"): "95.5/76.0",
        ("10", "1:1 QW^", "DCFM++"): "96.00",
        ("10", "1:1 QW^", "pct. vs TFM++/ w/ window"): "95.5%/76.0%",
    }


def test_percentages_of_another_variant(tmp_path: Path) -> None:
    """TFM++, to which Table 10 of DCMHA compares training speeds, is none of its columns."""
    run_invented(tmp_path, "dcmha", ["10"], lambda n, s: 8000.0 if n == "standard" else 6000.0)
    cells = entries(tmp_path, "dcmha", "10")
    heading = "Training(K tokens/s)-6.9B / "
    assert cells["3:1", f"{heading}DCFM++"] == "6 (n=5)"
    assert cells["3:1", f"{heading}pct. vs TFM++"] == "75.0% (n=5)"


def test_times_of_a_busy_machine_are_not_printed(tmp_path: Path) -> None:
    run_invented(tmp_path, "beliefformer", ["3"], lambda name, seed: 0.8)
    for path in tmp_path.rglob("belief/0-*/result.json"):
        path.write_text(path.read_text().replace('"median": 2.0', '"median": 3.0'))
    cells = entries(tmp_path, "beliefformer", "3")
    assert cells["BeliefFormer", "validation time"] == "busy machine (n=5)"
    assert cells["BeliefFormer*", "validation time"] == "2.00 (n=5)"


@pytest.mark.process
def test_means_over_columns_need_every_column(tmp_path: Path) -> None:
    run_invented(tmp_path, "mgk", ["1"], lambda name, seed: 0.3 + seed / 100)
    assert entries(tmp_path, "mgk", "1")["sMGK 4 heads", "Average"] == "32.00 ± 1.58 (n=5)"
    shutil.rmtree(tmp_path / "mgk-text")
    assert entries(tmp_path, "mgk", "1")["sMGK 4 heads", "Average"] == ""
    assert entries(tmp_path, "mgk", "1")["sMGK 4 heads", "ListOps"] != ""


def test_a_value_at_an_epoch_and_a_relative_size(tmp_path: Path) -> None:
    """Epochs count from 1; the records of epoch 90 are missing here, those of the end exist."""
    run_invented(tmp_path, "dcmha", ["8"], lambda name, seed: 0.8)
    cells = entries(tmp_path, "dcmha", "8")
    assert cells["ViT-S/16", "Epoch 90 / Top-1"] == ""
    assert cells["ViT-S/16", "Epoch 300 / Top-5"] == "90.0 (n=5)"
    assert cells["ViT-M/16", "Relative size"] == "1.00 (n=5)"
    for path in tmp_path.rglob("metrics.csv"):
        path.write_text(path.read_text() + "99,89,test/top5,0.5\n")
    assert entries(tmp_path, "dcmha", "8")["ViT-S/16", "Epoch 90 / Top-5"] == "50.0 (n=5)"


def write_script_files(runs: Path) -> None:
    """Write the files of the scripts for two models of Table 5."""
    for model, accuracy in (("pythia-6.9b", 0.25), ("dcpythia-6.9b", 0.5)):
        folder = runs / "released-weights" / model
        for name in ("published-tasks", "heads"):
            (folder / name).mkdir(parents=True)
        overall = f"accuracy,perplexity,n\n{accuracy},8.125,5328\n"
        (folder / "published-tasks" / "overall.csv").write_text(overall)
        shots = f"shots,accuracy,perplexity,n\n2,{accuracy},9,8\n3,{accuracy},8,8\n"
        (folder / "published-tasks" / "shots.csv").write_text(shots)
        rows = "task,metric,value\npiqa,acc,0.75\npiqa,acc_norm,0.5\nsciq,acc,0.9\n"
        (folder / "harness-0.csv").write_text(rows)
        for kind in ("svg", "png"):
            (folder / "heads" / f"breakdown.{kind}").write_text("<svg>drawn</svg>")


def test_files_of_scripts_fill_tables_and_figures(tmp_path: Path) -> None:
    """Cells without a file, or whose row is missing in it, stay empty."""
    source = read_paper("dcmha", "", FOLDER)
    page = write_paper(source, tmp_path / "runs", tmp_path / "before")
    assert not list(page.parent.glob("figure-[678]-*"))
    assert f"Measured by `{source.paper.tables['5'].script}`" in page.read_text()
    # A figure that is not drawn names its command too.
    assert (
        "Measured by `python experiments/released/head_analysis.py composition" in page.read_text()
    )
    write_script_files(tmp_path / "runs")
    page = write_paper(source, tmp_path / "runs", tmp_path / "after")
    names = {path.name for path in page.parent.glob("figure-[678]-*.svg")}
    assert names == {"figure-6-panels.svg", "figure-7-picture-1.svg"}
    assert (page.parent / "figure-7-picture-1.svg").read_text() == "<svg>drawn</svg>"
    with (page.parent / "table-5.csv").open() as file:
        values = {(r["row"], r["column"]): r["ours"] for r in csv.DictReader(file)}
    assert values["DCPythia-6.9B", "Acc"] == "50.0"
    assert values["Pythia-6.9B", "PPL"] == "8.125"
    with (page.parent / "table-4.csv").open() as file:
        values = {(r["row"], r["column"]): r["ours"] for r in csv.DictReader(file)}
    assert values["0-shot / Pythia-6.9B", "PIQA"] == "75.0"
    assert values["0-shot / DCPythia-6.9B", "SciQ"] == "90.0"
    shown = [cell for cell, value in values.items() if value]
    assert len(shown) == 4


def test_differences_compare_with_the_row_that_a_row_names(tmp_path: Path) -> None:
    """Table 4 of DCMHA prints the perplexity of DCPythia and its difference to Pythia's."""
    for model, perplexity in (("pythia-2.8b", 6.5), ("dcpythia-2.8b", 6.25), ("dcformer-2.8b", 6)):
        folder = tmp_path / "released-weights" / model
        folder.mkdir(parents=True)
        rows = f"task,metric,value\npile,perplexity,{perplexity}\n"
        (folder / "harness-0.csv").write_text(rows)
    source = replace(read_paper("dcmha", "", FOLDER), runs=tmp_path)
    grid = make_entries(source, source.paper.tables["4"], {})
    cells = {entry.row: entry.ours for line in grid for entry in line if entry.ours}
    assert cells == {
        "0-shot / Pythia-2.8B": "6.50",
        "0-shot / DCPythia-2.8B": "6.25 /\N{MINUS SIGN}0.25",
        "0-shot / DCFM++2.8B": "6.00",
    }


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("acuracy,n\n0.5,3\n", "overall.csv:1: no column 'accuracy'; did you mean 'acuracy'?"),
        ("accuracy,n\nhalf,3\n", "overall.csv: columns accuracy: could not convert"),
    ],
)
def test_a_mistake_in_the_file_of_a_script_is_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, content: str, message: str
) -> None:
    folder = tmp_path / "released-weights" / "pythia-6.9b" / "published-tasks"
    folder.mkdir(parents=True)
    (folder / "overall.csv").write_text(content)
    source = replace(read_paper("dcmha", "", FOLDER), runs=tmp_path)
    grid = make_entries(source, source.paper.tables["5"], {})
    assert {entry.ours for line in grid for entry in line} == {""}
    assert message in caplog.text


def test_small_models_have_their_own_values_in_columns_of_files(tmp_path: Path) -> None:
    run_invented(tmp_path, "dcmha", ["5"], lambda name, seed: 0.5, "embedded")
    cells = entries(tmp_path, "dcmha", "5", "embedded")
    assert cells["Pythia-6.9B", "Acc"] == "50.0% (n=5)"
    assert cells["Pythia-6.9B", "PPL"] == UNMEASURED


def test_a_cell_that_no_study_measures_is_not_one_that_has_not_run(tmp_path: Path) -> None:
    """CIFAR-100 of AttentionX has a small study on real data only."""
    run_invented(tmp_path / "runs", "attentionx", ["1"], lambda name, seed: 0.5, "embedded")
    cells = {}
    for size in ("embedded", "real"):
        source = read_paper("attentionx", size, FOLDER)
        write_paper(source, tmp_path / "runs", tmp_path)
        cells[size] = entries(tmp_path / "runs", "attentionx", "1", size)
    assert cells["embedded"]["ViT-small with AttentionX", "CIFAR100"] == UNMEASURED
    assert cells["real"]["ViT-small with AttentionX", "CIFAR100"] == ""
    explanation = f"{UNMEASURED}: no study of this size measures the cell."
    text = (tmp_path / "paper-attentionx-small" / "index.md").read_text("utf-8")
    assert explanation in text
    assert re.search(r"on CIFAR-100\. .*\| not measured \|", text)
    text = (tmp_path / "paper-attentionx-small-data" / "index.md").read_text("utf-8")
    assert explanation not in text
    assert re.search(r"on CIFAR-100\. .*\| not run \|", text)


def test_readings_stand_in_a_second_block(tmp_path: Path) -> None:
    run_invented(tmp_path, "beliefformer", ["3"], lambda name, seed: 0.8)
    assert len(draw(tmp_path, "beliefformer", "3")) == 1
    # A reading has run as soon as one of its variants has a result.
    run_reading(tmp_path, "beliefformer-cifar10", "plain-belief", 0.5)
    first, second = draw(tmp_path, "beliefformer", "3")
    assert len(first.rows) > len(second.rows) > 0
    assert "plain-*" in second.title
    assert "50.00" in " ".join(cell.text for row in second.rows for cell in row)


def test_readings_of_single_rows_are_shown(tmp_path: Path) -> None:
    plan = run_reading(tmp_path, "dcmha-ablation", "global-rank-2", 12.5)
    _, second = draw(tmp_path, "dcmha", "9")
    assert second.title == (
        "T Alternative reading: variants global-rank-1, global-rank-2, global-rank-4."
    )
    assert [row[0].text for row in second.rows] == ["R=2"]
    assert second.rows[0][1].text.startswith("12.50 (n=")
    # The departures from the released code are stated beside these numbers too.
    assert any(plan.parity in note for note in second.notes)


def test_a_column_whose_metric_is_a_speed_has_times(tmp_path: Path) -> None:
    run_invented(tmp_path, "dcmha", ["6-sizes"], lambda name, seed: 1000.0 + 250 * (seed == 4))
    assert entries(tmp_path, "dcmha", "6-sizes")["405M", "TFM++"] == "busy machine (n=5)"


def test_rows_of_other_code_have_a_dagger_and_the_table_a_warning(tmp_path: Path) -> None:
    run_invented(
        tmp_path, "beliefformer", ["3"], lambda n, s: 0.8 + 0.05 * (n == "belief") + s / 1e4
    )
    for path in tmp_path.rglob("belief/0-*/result.json"):
        path.write_text(path.read_text().replace('"code": "c"', '"code": "d"'))
    cells = entries(tmp_path, "beliefformer", "3")
    assert cells["BeliefFormer", "val. acc"].endswith("(n=5) †")
    assert cells["BeliefFormer*", "val. acc"].endswith("(n=5)")
    verdicts = judge(tmp_path, "beliefformer", "3")
    assert [verdict.judgement[-1] for verdict in verdicts] == ["†", "d", "†"]
    source = read_paper("beliefformer", "", FOLDER)
    page = write_paper(source, tmp_path, tmp_path / "reports").with_name("index.md").read_text()
    assert "**beliefformer-cifar10: code differs between runs (c, d): rows with †" in page


def test_small_results_stand_apart_from_published_ones(tmp_path: Path) -> None:
    run_invented(tmp_path, "belief2", ["2"], lambda name, seed: 0.9 + seed / 100, "embedded")
    published, ours = draw(tmp_path, "belief2", "2", "embedded")
    texts = [[cell.text for row in t.rows for cell in row] for t in (published, ours)]
    assert "76.15±0.25" in texts[0]
    assert "76.15±0.25" not in texts[1]
    assert "92.00 ± 1.58 (n=5)" in texts[1]
    source = read_paper("belief2", "embedded", FOLDER)
    page = write_paper(source, tmp_path, tmp_path / "reports").read_text()
    assert page.index("Small models") < page.index("<h2>")
    claims = page[page.index("Claims</h2>") : page.index("Table 1</h2>")]
    assert "<td>Belief2-Attention on handwritten digits</td>" in claims


def test_a_table_that_measures_nothing_has_published_values_only(tmp_path: Path) -> None:
    (table,) = draw(tmp_path, "beliefformer", "4")
    assert table.notes[-1] == "Published values."
    assert "ours" not in {row[0].text for row in table.rows}


def test_a_table_without_small_models_is_printed_as_published_only(tmp_path: Path) -> None:
    counts = [len(draw(tmp_path, "dcmha", number, "embedded")) for number in ("2", "9")]
    assert counts == [1, 2]


def test_small_pages_state_no_condition_of_the_published_set_up(tmp_path: Path) -> None:
    for paper in ("beliefformer", "dcmha"):
        source = read_paper(paper, "embedded", FOLDER)
        page = write_paper(source, tmp_path / "runs", tmp_path).with_name("index.md").read_text()
        for item in source.items(()).values():
            assert not item.note or item.note not in page
            assert not source.references(item) or f"{item.caption}. Not measured" not in page
            assert item.small_note in page
    assert (
        "Not measured: No small model is trained for it"
        in write_paper(read_paper("mgk", "embedded", FOLDER), tmp_path / "runs", tmp_path)
        .with_name("index.md")
        .read_text()
    )


def test_parameters_of_small_models_have_two_digits(tmp_path: Path) -> None:
    run_invented(tmp_path, "beliefformer", ["2"], lambda name, seed: 3.0, "embedded")
    for path in tmp_path.rglob("result.json"):
        path.write_text(re.sub(r'"parameters": \d+', '"parameters": 27712', path.read_text()))
    cells = entries(tmp_path, "beliefformer", "2", "embedded")
    assert cells["Transformer", "no. of parameters"] == "0.028M (-) (n=5)"


def test_counts_of_the_published_set_up_do_not_scale_small_results(tmp_path: Path) -> None:
    """320 is the number of evaluation batches of the published set-up."""
    heading = "inference time (s) per iteration"
    for size, expected in (("", "0.0063 (-) (n=5)"), ("embedded", UNMEASURED)):
        run_invented(tmp_path / size, "beliefformer", ["2"], lambda name, seed: 3.0, size)
        cells = entries(tmp_path / size, "beliefformer", "2", size)
        assert cells["Transformer", heading] == expected
        assert cells["Transformer", "training time (s) per iteration"] == "0.500 (-) (n=5)"


def test_figures_have_the_panels_of_the_paper(tmp_path: Path) -> None:
    """Figure 5 of BeliefFormer: validation loss over iterations and over wall-clock time."""
    run_invented(tmp_path, "beliefformer", ["figure-5"], lambda name, seed: 3 + seed / 10)
    source = read_paper("beliefformer", "", FOLDER)
    page = write_paper(source, tmp_path, tmp_path / "reports")
    drawing = (page.parent / "figure-5-panels.svg").read_text()
    # Each label is drawn as glyphs, and is a comment in the file.
    for text in ("step", "wall-clock time (s)", "validation loss (nats)", "BeliefFormer*"):
        assert f"<!-- {text} -->" in drawing
    assert "figure-5-panels.svg" in page.read_text()


@pytest.mark.process
def test_readings_of_a_figure_are_drawn_below_it(tmp_path: Path) -> None:
    run_invented(tmp_path, "beliefformer", ["figure-5"], lambda name, seed: 3 + seed / 10)
    source = read_paper("beliefformer", "", FOLDER)
    page = write_paper(source, tmp_path, tmp_path / "reports")
    assert not (page.parent / "figure-5-panels-2.svg").exists()
    plan = run_reading(tmp_path, "beliefformer-gpt2", "openwebtext-belief", 3.25)
    write_paper(source, tmp_path, tmp_path / "reports")
    names = sorted(path.name for path in page.parent.glob("figure-5-*.svg"))
    # The third reading shares the baseline with the figure.
    assert names == ["figure-5-panels-2.svg", "figure-5-panels-3.svg", "figure-5-panels.svg"]
    text = page.with_name("index.md").read_text()
    start = text.index("figure-5-panels-2.svg")
    caption = text[text.rindex("![", 0, start) : start]
    assert "Alternative reading: variants openwebtext-" in caption
    assert plan.parity in caption


def test_numbers_stand_beside_their_agreement_with_released_code(tmp_path: Path) -> None:
    run_invented(tmp_path, "beliefformer", ["3", "figure-5"], lambda name, seed: 3 + seed / 10)
    source = read_paper("beliefformer", "", FOLDER)
    text = write_paper(source, tmp_path, tmp_path / "reports").with_name("index.md").read_text()
    studies = read_studies(ROOT / "ablations.yaml")
    for name, part in (("beliefformer-cifar10", "Table 3"), ("beliefformer-gpt2", "Figure 5")):
        section = text[text.index(f"## {part}\n") :]
        words = studies[name].study.parity
        assert words
        assert words in section[: section.find("\n## ")].replace("\\", "")
    latex = (tmp_path / "reports/paper-beliefformer/table-3.tex").read_text()
    assert studies["beliefformer-cifar10"].study.parity in latex
    assert (
        studies["beliefformer-cifar10"].study.parity
        in (tmp_path / "reports/paper-beliefformer/index.html").read_text()
    )


@pytest.mark.process
def test_a_figure_can_have_more_lines_than_colours(tmp_path: Path) -> None:
    """Figure 4 of MGK has a counted bar for each of 18 variants."""
    # The page of a paper without any result is refused.
    run_invented(tmp_path, "mgk", ["figure-5"], lambda name, seed: 0.5 + seed / 10, seeds=2)
    source = read_paper("mgk", "", FOLDER)
    page = write_paper(source, tmp_path, tmp_path / "reports")
    assert len(source.paper.figures["4"].variants()) == 18
    assert (page.parent / "figure-4-panels.svg").is_file()


def test_the_command_writes_csv_and_imports_neither_torch_nor_matplotlib(tmp_path: Path) -> None:
    code = (
        "import sys; from lit_attn.report.__main__ import main; "
        f"main(['--paper', 'attentionx', {str(tmp_path / 'runs')!r}, "
        f"'--reports', {str(tmp_path)!r}]); "
        "print([name for name in ('torch', 'matplotlib') if name in sys.modules])"
    )
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    page, modules = run.stdout.splitlines()
    assert Path(page).is_file()
    assert modules == "[]"
    with (tmp_path / "paper-attentionx" / "table-1.csv").open() as stream:
        rows = list(csv.DictReader(stream))
    assert rows[0] == {
        "row": "ViT-small with Attention",
        "column": "CIFAR10",
        "published": "88.15 + 0.55",
        "seed": "",
        "ours": "",
    }


@pytest.mark.slow
def test_the_page_of_papers_is_up_to_date() -> None:
    page = (ROOT / "docs" / "papers.md").read_text(encoding="utf-8")
    message = "run python docs/generators/write_papers.py > docs/papers.md"
    assert write_papers.write_page() == page, message
