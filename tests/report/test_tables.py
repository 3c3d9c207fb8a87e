"""Reports from records: numbers, captions, reproducible bytes, escaping."""

import io
import re
import shutil
import subprocess
import sys
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path

import pandas as pd
import pytest
from helpers.fake_study import EFFECTS, accuracy_of, result, write_study

from lit_attn.cells import records
from lit_attn.cells.records import (
    Metric,
    Plan,
    PlannedCell,
    PlannedVariant,
    Result,
    Spread,
    read_metrics,
)
from lit_attn.config.metrics import DEFAULT_METRIC
from lit_attn.report import write_reports
from lit_attn.report.__main__ import main
from lit_attn.report.formats import Cell, Table, escape_latex, to_latex
from lit_attn.report.read import StudyRecord
from lit_attn.schema.errors import ConfigError

NASTY = r"50% & <b>_x_</b> $y$ #1 {z} ~ ^ \ | café"


def has_siunitx() -> bool:
    if shutil.which("pdflatex") is None or shutil.which("kpsewhich") is None:
        return False
    return subprocess.run(["kpsewhich", "siunitx.sty"], check=False).returncode == 0


def test_the_table_states_which_trainings_stopped_early(tmp_path: Path) -> None:
    runs = write_study(tmp_path / "runs", seeds=3)
    plan = Plan.read(runs / "plan.json")
    assert plan is not None
    first, second = (cell for cell in plan.cells if cell.variant == "belief2" and cell.seed < 2)
    for cell, steps in ((first, 100), (second, 300)):
        early = result(cell, 0.5, steps=steps, stopped_early=True)
        early.write(runs / cell.path / "result.json")
    folder = report(tmp_path)
    text = (folder / "table.md").read_text(encoding="utf-8")
    assert "| stopped early |" in text
    assert "Stopped early is the number of seeds" in text
    table = pd.read_csv(folder / "table.csv").set_index("variant")
    last = result(first, 0.5).steps
    assert table.loc["belief2", "steps_run"] == pytest.approx((100 + 300 + last) / 3)
    assert table.loc["belief2", "stopped"] == 2
    assert table.loc["standard", "stopped"] == 0


def report(root: Path, name: str = "fake") -> Path:
    write_reports(root / "runs", root / "reports")
    return root / "reports" / name


def rows(folder: Path) -> pd.DataFrame:
    return pd.read_csv(folder / "table.csv").set_index("variant")


def index_cells(path: Path) -> list[str]:
    """Return the cells of the index's only row, from the number of finished cells on."""
    page = (path / "reports" / "index.html").read_text()
    return re.findall("<td>(.*?)</td>", page)[1:]


def test_a_complete_study_has_these_numbers(tmp_path: Path) -> None:
    write_study(tmp_path / "runs")
    folder = report(tmp_path)
    table = rows(folder)
    standard = pd.Series([100 * accuracy_of(0, s, "standard") for s in range(5)])
    belief2 = pd.Series([100 * accuracy_of(0.02, s, "belief2") for s in range(5)])
    assert table.loc["standard", "mean"] == pytest.approx(standard.mean())
    assert table.loc["standard", "sd"] == pytest.approx(standard.std())
    assert table.loc["belief2", "difference"] == pytest.approx((belief2 - standard).mean())
    assert table.loc["belief2", "p"] == 0.0625
    assert table.loc["belief2", "p_adjusted"] == 0.0625
    assert pd.isna(table.loc["standard", "difference"])
    assert table["best"].tolist() == [False, False, True]
    assert not table["significant"].any()
    markdown = (folder / "table.md").read_text()
    assert f"**{belief2.mean():.2f} ± {belief2.std():.2f}**" in markdown
    assert "cannot fall below 2/2ⁿ (0.0625 for 5 pairs)" in markdown
    assert "needs at least 6 seeds whatever the effect" in markdown
    assert "3,375,076" in markdown
    assert index_cells(tmp_path) == ["15 / 15", "5", "belief2", "none"]


def test_a_variant_that_passes_the_corrected_test_has_a_star(tmp_path: Path) -> None:
    write_study(tmp_path / "runs", seeds=6)
    folder = report(tmp_path)
    assert rows(folder).loc["belief2", "significant"]
    assert rows(folder).loc["belief2", "p_adjusted"] == 2 / 2**6
    assert r" \*" in (folder / "table.md").read_text()
    assert r"\textsuperscript{*}" in (folder / "table.tex").read_text()
    assert "<sup>*</sup>" in (folder / "table.html").read_text()
    table = rows(folder)
    assert index_cells(tmp_path)[2:4] == ["belief2", ", ".join(table.index[table["significant"]])]


def test_the_power_of_the_star_is_printed_beside_the_seeds_needed(tmp_path: Path) -> None:
    write_study(tmp_path / "runs", variants={"base": 0.0, "same": 0.0, "ahead": 0.02}, seeds=6)
    folder = report(tmp_path)
    lines = (folder / "table.md").read_text().splitlines()
    headings, *cells = ([cell.strip() for cell in line.split("|")] for line in lines if "|" in line)
    column = headings.index("power at n, 2n, 4n")
    assert headings[column - 1] == "seeds needed"
    printed = {row[1].strip("*"): row[column] for row in cells[1:]}
    assert printed["base"] == printed["same"] == "—"
    assert re.fullmatch(r"[01]\.\d\d, [01]\.\d\d, [01]\.\d\d", printed["ahead"])
    table = rows(folder)
    powers = table.loc["ahead", ["power_n", "power_2n", "power_4n"]]
    assert printed["ahead"] == ", ".join(f"{power:.2f}" for power in powers)
    assert table.loc[["base", "same"], ["effect", "power_n"]].isna().all(axis=None)
    caption = (folder / "table.md").read_text().replace("\\", "")
    assert "Power at n, 2n, 4n is the simulated probability of a star" in caption


def test_missing_and_failed_cells_are_shown_and_never_averaged(tmp_path: Path) -> None:
    write_study(
        tmp_path / "runs",
        skip=(("belief", 0),),
        failures={("belief", 3): "diverged", ("standard", 4): "out-of-memory"},
    )
    folder = report(tmp_path)
    table = rows(folder)
    assert table.loc["belief", ["n", "pairs"]].tolist() == [3, 2]
    assert table.loc["belief", "missing"] == "1 diverged, 1 missing"
    accuracies = pd.Series([100 * accuracy_of(0.004, s, "belief") for s in (1, 2, 4)])
    assert table.loc["belief", "mean"] == pytest.approx(accuracies.mean())
    markdown = (folder / "table.md").read_text()
    assert "3/5, 1 diverged, 1 missing" in markdown
    assert "(2 pairs)" in markdown
    assert "enter no mean" in markdown
    seeds = pd.read_csv(folder / "per_seed.csv")
    assert len(seeds) == 15
    assert seeds.set_index(["variant", "seed"]).loc[("belief", 3), "status"] == "diverged"


@pytest.mark.parametrize("seeds", [1, 2])
def test_few_seeds_leave_cells_empty(seeds: int, tmp_path: Path) -> None:
    write_study(tmp_path / "runs", seeds=seeds)
    folder = report(tmp_path)
    markdown = (folder / "table.md").read_text()
    assert "nan" not in markdown.lower()
    assert "<NA>" not in markdown
    assert pd.isna(rows(folder).loc["belief", "sd"]) == (seeds == 1)


def test_a_study_without_results_has_a_report(tmp_path: Path) -> None:
    everything = tuple((v, s) for v in EFFECTS for s in range(5))
    write_study(tmp_path / "runs", skip=everything)
    folder = report(tmp_path)
    text = (folder / "table.md").read_text()
    assert "0/5, 5 missing" in text
    assert "nan" not in text.lower()
    assert not (folder / "progress.svg").exists()


def test_a_variant_that_is_not_tuned_yet_has_no_cells(tmp_path: Path) -> None:
    study = write_study(tmp_path / "runs")
    plan = Plan.model_validate_json((study / "plan.json").read_bytes())
    plan.variants.append(PlannedVariant(name="untuned"))
    plan.write(study / "plan.json")
    assert rows(report(tmp_path)).loc["untuned", ["n", "planned"]].tolist() == [0, 0]


def test_without_a_baseline_there_is_no_difference(tmp_path: Path) -> None:
    write_study(tmp_path / "runs", skip=tuple(("standard", s) for s in range(5)))
    table = rows(report(tmp_path))
    assert table.loc["belief", "n"] == 5
    assert table["difference"].isna().all()


def test_identical_values_have_no_spread(tmp_path: Path) -> None:
    study = write_study(tmp_path / "runs", variants={"a": 0.0, "b": 0.0}, seeds=3)
    for path in study.glob("*/*/result.json"):
        text = path.read_text()
        start = text.index('"test/accuracy":')
        path.write_text(text[:start] + '"test/accuracy": 0.5' + text[text.index(",", start) :])
    table = rows(report(tmp_path))
    assert table.loc["b", ["difference", "low", "high", "p"]].tolist() == [0, 0, 0, 1]


def test_one_seed_keeps_three_digits_of_small_values(tmp_path: Path) -> None:
    metric = DEFAULT_METRIC.model_copy(update={"scale": 0.1})
    write_study(tmp_path / "runs", seeds=1, metric=metric)
    folder = report(tmp_path)
    markdown = (folder / "table.md").read_text()
    mean = rows(folder).loc["belief", "mean"]
    assert 0.01 < mean < 0.1
    assert re.search(rf"\| belief \| \**{mean:.4f}\** \| 1 \|", markdown)
    assert "of 1 planned (seed 0)" in markdown
    assert "metric's step" not in markdown


def test_captions_define_flops_and_the_test(tmp_path: Path) -> None:
    write_study(tmp_path / "runs")
    folder = report(tmp_path)
    for name in ("table.md", "table.tex", "table.html"):
        text = (folder / name).read_text()
        # The LaTeX table has fewer columns, and no notes on the others.
        assert ("seeds needed" in text.lower()) == (name != "table.tex")
        assert "corrected for 2 comparisons by the step-down max-T method" in text
        assert "softmax, norms, epilogues and other element-wise work are not counted" in text


def test_evaluation_time_is_a_column_if_it_was_measured(tmp_path: Path) -> None:
    """Old records lack this time, and their table has no column for it."""
    study = write_study(tmp_path / "runs", seeds=3)
    assert "evaluation (s)" not in (report(tmp_path) / "table.md").read_text()
    for seed, cell in enumerate(sorted(study.glob("v1/*/result.json"))):
        old = Result.model_validate_json(cell.read_text())
        assert old.evaluation_time is None
        time = Spread(median=37.0 + seed, iqr=0.1, count=9)
        old.model_copy(update={"evaluation_time": time}).write(cell)
    text = (report(tmp_path) / "table.md").read_text()
    assert "| evaluation (s) |" in text
    assert text.count(" 38.00 |") == 1
    assert "Evaluation is the time of one evaluation of all splits" in text
    assert rows(tmp_path / "reports" / "fake").loc["belief", "evaluation_time"] == 38
    assert pd.isna(rows(tmp_path / "reports" / "fake").loc["standard", "evaluation_time"])


def test_the_caption_counts_devices(tmp_path: Path) -> None:
    study = write_study(tmp_path / "runs", seeds=3)
    assert "Device: CPU." in (report(tmp_path) / "table.md").read_text()
    (cell,) = study.glob("v1/0-*/result.json")
    one = Result.model_validate_json(cell.read_text())
    one.model_copy(update={"devices": 2}).write(cell)
    text = (report(tmp_path) / "table.md").read_text()
    assert "Device: 2 x CPU, CPU." in text
    assert "devices differ between runs: step time and memory cannot be compared" in text
    assert "CUDA" not in text


def test_published_values_are_columns(tmp_path: Path) -> None:
    published = {"standard": (72.01, 0.2), "belief2": (76.15, None)}
    write_study(tmp_path / "runs", published=published, source="Belief2, Table 2")
    folder = report(tmp_path)
    markdown = (folder / "table.md").read_text()
    assert "72.01 ± 0.20" in markdown
    assert "| 76.15 |" in markdown
    assert "Published values and their ± are copied from Belief2, Table 2." in markdown
    table = rows(folder)
    difference = table.loc["standard", "published_difference"]
    assert difference == pytest.approx(table.loc["standard", "mean"] - 72.01)


def test_lower_can_be_better(tmp_path: Path) -> None:
    metric = Metric(name="test/loss", label="loss", goal="min", scale=1)
    write_study(tmp_path / "runs", metric=metric)
    table = rows(report(tmp_path))
    assert table["best"].tolist() == [False, False, True]
    assert table.loc["standard", "mean"] < 1


def test_records_of_other_code_cause_a_warning(tmp_path: Path) -> None:
    study = write_study(tmp_path / "runs")
    path = next(study.glob("v1/0-*/result.json"))
    path.write_text(path.read_text().replace('"c0de"', '"0ther"'))
    folder = report(tmp_path)
    assert "Warning: code differs between runs (0ther, c0de)" in (folder / "table.md").read_text()
    assert 'class="alert"' in (folder / "table.html").read_text()


def test_equal_records_give_equal_bytes(tmp_path: Path) -> None:
    """A copy of the records lists its folders in another order."""
    write_study(tmp_path / "a" / "runs")
    shutil.copytree(tmp_path / "a" / "runs", tmp_path / "b" / "runs")
    one, two = report(tmp_path / "a"), report(tmp_path / "b")
    names = sorted(path.name for path in one.iterdir())
    assert names == sorted(path.name for path in two.iterdir())
    assert {"cost.png", "progress.svg", "seeds.svg", "per_seed.csv", "table.tex"} <= set(names)
    for name in names:
        assert (one / name).read_bytes() == (two / name).read_bytes(), name


class Balanced(HTMLParser):
    """HTML parser that fails if the wrong element is closed."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in ("meta", "img", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def test_names_are_escaped_everywhere(tmp_path: Path) -> None:
    write_study(tmp_path / "runs", variants={"standard": 0.0, NASTY: 0.01}, title=NASTY)
    folder = report(tmp_path)
    for page in (folder / "table.html", tmp_path / "reports" / "index.html"):
        parser = Balanced()
        parser.feed(page.read_text())
        assert parser.open == []
        assert any(NASTY in text for text in parser.text)
    assert r"\|" in (folder / "table.md").read_text()
    assert pd.read_csv(folder / "table.csv")["variant"].tolist() == ["standard", NASTY]


@pytest.mark.skipif(not has_siunitx(), reason="no pdflatex or no siunitx")
@pytest.mark.parametrize("name", [NASTY, "belief2-without-mixing"])
def test_latex_compiles_and_fits_a_page_of_397_points(name: str, tmp_path: Path) -> None:
    omega = "\N{GREEK SMALL LETTER OMEGA}"
    write_study(
        tmp_path / "runs", variants={"standard": 0.0, name: 0.02, omega: 0.01}, title=name, seeds=6
    )
    folder = report(tmp_path)
    (folder / "paper.tex").write_text(
        "\\documentclass{article}\\usepackage{booktabs,graphicx,siunitx}\n"
        "\\setlength\\textwidth{397pt}\\begin{document}\n"
        "\\input{table.tex}\\end{document}\n"
    )
    command = ["pdflatex", "-interaction=nonstopmode", "-halt-on-error", "paper.tex"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:]
    assert "Overfull" not in done.stdout


def test_latex_escapes_text() -> None:
    assert escape_latex("a_b 95 % ± 1") == r"a\_b 95 \% $\pm$ 1"
    assert escape_latex("\N{GREEK SMALL LETTER OMEGA}²") == r"$\omega$$^{2}$"
    assert escape_latex("✓✗") == r"$\surd$$\times$"
    assert escape_latex("a 中--") == "a U+4E2D-{}-"
    assert escape_latex("\\") == r"\textbackslash{}"


def test_a_torn_result_is_no_result(tmp_path: Path) -> None:
    study = write_study(tmp_path / "runs")
    path = next(study.glob("v2/1-*/result.json"))
    path.write_text(path.read_text()[:100])
    assert rows(report(tmp_path)).loc["belief2", "n"] == 4


def test_a_result_with_nan_is_refused() -> None:
    cell = PlannedCell(variant="v", seed=0, identity="00", path="p")
    with pytest.raises(ValueError, match="finite"):
        result(cell, float("nan"))


def test_a_torn_metric_row_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "metrics.csv"
    path.write_text("step,epoch,name,value\n10,0,test/accuracy,0.5\n20,1,test/acc")
    assert [row.value for row in read_metrics(path)] == [0.5]
    assert read_metrics(tmp_path / "absent.csv") == []


def test_bad_input_is_an_error_of_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ConfigError, match="contains no study"):
        write_reports(tmp_path, tmp_path / "reports")
    write_study(tmp_path / "runs")
    out = ["--reports", str(tmp_path / "reports")]
    assert main([str(tmp_path / "runs"), "--study", "fak", *out]) == 2
    assert "has no study 'fak'; did you mean 'fake'?" in capsys.readouterr().err
    (tmp_path / "runs" / "fake" / "plan.json").write_text("{}")
    assert main([str(tmp_path / "runs"), *out]) == 2
    assert "is not a plan" in capsys.readouterr().err


def test_the_command_line_reports_every_study(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_study(tmp_path / "runs")
    write_study(tmp_path / "runs", name="other")
    assert main([str(tmp_path / "runs"), "--reports", str(tmp_path / "reports")]) == 0
    assert "fake/table.html" in capsys.readouterr().out
    assert "other/table.html" in (tmp_path / "reports" / "index.html").read_text()


def test_a_row_reads_the_cells_of_its_variant_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the time of a report grows with the square of the number of variants."""
    reads = []
    original = StudyRecord.measurements

    def measurements(study: StudyRecord, name: str, variant: str | None = None) -> list[object]:
        reads.append(variant)
        return original(study, name, variant)

    monkeypatch.setattr(StudyRecord, "measurements", measurements)
    counts = []
    for number in (5, 25):
        names = {"standard": 0.0} | {f"v{i}": 0.01 * i for i in range(number)}
        write_study(tmp_path / str(number), variants=names, seeds=2)
        reads.clear()
        write_reports(tmp_path / str(number), tmp_path / "reports")
        counts.append(reads.count(None))
    assert counts[0] == counts[1]


def test_studies_can_be_named_by_one_option_or_by_several(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("a", "b", "c"):
        write_study(tmp_path / "runs", name=name)
    arguments = [str(tmp_path / "runs"), "--reports", str(tmp_path / "reports")]
    for words in (["--study", "a", "c"], ["--study", "a", "--study", "c"]):
        assert main([*arguments, *words]) == 0
        printed = capsys.readouterr().out
        assert [name for name in ("a", "b", "c") if f"{name}/table.html" in printed] == ["a", "c"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give a folder of runs, --csv FILE or --paper NAME"),
        (["runs", "--csv", "a.csv"], "give a folder of runs, --csv FILE or --paper NAME"),
        (["--csv", "a.csv", "--across", "a"], "--across needs a folder of runs"),
        (["runs", "--baseline", "a"], "--baseline needs --csv"),
        (["runs", "--small"], "--small needs --paper"),
    ],
)
def test_options_that_do_not_fit_are_refused(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("name", ["null", "None", "NA", "nan"])
def test_no_name_of_a_variant_is_a_missing_value(name: str, tmp_path: Path) -> None:
    write_study(tmp_path / "runs", variants={"standard": 0.0, name: 0.1})
    write_reports(tmp_path / "runs", tmp_path / "reports")
    assert f"<td>{name}</td>" in (tmp_path / "reports" / "index.html").read_text()


def test_a_latex_table_has_the_names_of_its_rows(tmp_path: Path) -> None:
    write_study(tmp_path / "runs", latex=["published"])
    (folder,) = write_reports(tmp_path / "runs", tmp_path / "reports")
    assert "{belief2}" in (folder / "table.tex").read_text()


def test_help_imports_neither_pandas_nor_torch() -> None:
    code = (
        "import sys, lit_attn.report.__main__;"
        "assert not {'torch', 'pandas', 'matplotlib'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_every_record_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_study(tmp_path / "runs", seeds=3)
    reads: Counter[str] = Counter()
    read = records.open_at_once

    def count(path: Path) -> io.FileIO:
        reads[str(path)] += path.name == "result.json"
        return read(path)

    monkeypatch.setattr(records, "open_at_once", count)
    report(tmp_path)
    assert sorted(reads.values(), reverse=True)[:10] == [1] * 9 + [0]


def test_siunitx_aligns_numbers_and_their_spread() -> None:
    rows = [
        [
            Cell("a"),
            Cell("9.1 ± 0.5", is_bold=True, mark="*"),
            Cell("+1.0 [+10.0, +2.0]"),
            Cell("5"),
        ],
        [Cell("10"), Cell("1,010.2 ± 12.0"), Cell("\N{EM DASH}"), Cell("4/5, 1 diverged")],
    ]
    text = to_latex(Table(["name", "value", "difference", "n"], rows), "x")
    assert r"S[table-format=4.1(3)]" in text
    assert r"S[table-format=+1.1, table-space-text-post={\,[+10.0, +2.0]}]" in text
    _, first, second = text[text.index(r"\midrule") : text.index(r"\bottomrule")].splitlines()
    mark = r"{\rlap{\textsuperscript{*}}}"
    assert first == rf"{{a}} & \bfseries 9.1 \pm 0.5{mark} & +1.0{{\,[+10.0, +2.0]}} & 5 \\"
    assert second == r"{10} & 1010.2 \pm 12.0 & {\textemdash{}} & {4/5, 1 diverged} \\"


def test_siunitx_prints_a_published_spread_and_one_that_rounds_to_zero() -> None:
    rows = [[Cell("a"), Cell("88.15±0.55")], [Cell("b"), Cell("9.00 ± 0.00")]]
    text = to_latex(Table(["name", "value"], rows), "x")
    assert r"{a} & 88.15 \pm 0.55 \\" in text
    # Without this option siunitx leaves out the spread of zero.
    assert "retain-zero-uncertainty" in text


def test_the_page_lists_every_other_metric_of_the_split(tmp_path: Path) -> None:
    study = write_study(tmp_path / "runs", variants={"a": 0.0, "b": 0.1}, seeds=2)
    for path in study.glob("*/*/result.json"):
        recorded = Result.model_validate_json(path.read_text())
        added = {"test/F1": 0.25 + recorded.seed / 2, "test/averaged-F1": 0.9, "val/F1": 0.8}
        recorded.model_copy(update={"metrics": recorded.metrics | added}).write(path)
    page = (report(tmp_path) / "table.html").read_text()
    (table,) = [part for part in page.split("<table") if ">test/F1<" in part]
    assert "test/loss" in table
    assert table.count("<td>0.5000 ± 0.3536</td>") == 2
    assert "averaged-F1" not in table
    assert "val/F1" not in table
