"""Papers: the files agree with the studies and with the papers' own arithmetic; errors; cells."""

import re
import statistics
from functools import cache
from pathlib import Path

import pytest
from helpers.invented_papers import FOLDER, NAMES
from helpers.paths import EXPERIMENTS, ROOT

from lit_attn.ablate.__main__ import main
from lit_attn.ablate.axes import combine_axes
from lit_attn.ablate.plan import expand
from lit_attn.ablate.variants import resolve
from lit_attn.config.study import read_studies
from lit_attn.papers import runs as papers
from lit_attn.papers.layout import Table, find_numbers
from lit_attn.papers.source import PaperSource, read_paper
from lit_attn.schema.errors import ConfigError


@pytest.fixture(autouse=True)
def in_checkout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


@cache
def paper(name: str, size: str = "") -> PaperSource:
    return read_paper(name, size, FOLDER)


def places(text: str) -> int:
    """Return the decimals of the first number in a published cell."""
    number = re.search(r"\d+(?:\.(\d+))?", text)
    return len(number[1] or "") if number else 0


def rounds_to(value: float, text: str) -> bool:
    """Return True if `value` is printed as `text`, whichever way a half is rounded."""
    return abs(value - find_numbers(text)[0]) <= 0.5 * 10 ** -places(text) + 1e-9


def disagreements(table: Table) -> set[str]:
    """Return the published cells (ROW | COLUMN) that differ from the paper's own arithmetic."""
    wrong = set()
    headings = list(table.columns)
    first = next(iter(table.rows.values())).cells
    for name, row in table.rows.items():
        cells = dict(zip(headings, row.cells, strict=True))
        for heading, column in table.columns.items():
            cell, number = f"{name} | {heading}", find_numbers(cells[heading])
            if column.mean:
                mean = statistics.fmean(find_numbers(cells[other])[0] for other in column.mean)
                if not rounds_to(mean, cells[heading]):
                    wrong.add(cell)
            if column.overhead and row.cells != first:
                start = find_numbers(first[headings.index(heading)])[0]
                percent = cells[heading].partition("(")[2]
                if not rounds_to(100 * (number[0] / start - 1), percent):
                    wrong.add(cell)
    return wrong


@pytest.mark.parametrize("name", NAMES)
def test_published_cells_agree_with_the_arithmetic_of_the_paper(name: str) -> None:
    """Means and overheads follow from other cells, except the slips that the file explains.

    Slips of measured values contradict another table (`tests/papers/test_study_numbers.py`).
    """
    for number, table in paper(name).paper.tables.items():
        slips = set()
        for slip in table.slips:
            column = table.columns[slip.rpartition(" | ")[2]]
            if column.mean or column.overhead:
                slips.add(slip)
        assert disagreements(table) == slips, number


def test_tables_and_figures_need_every_variant_of_the_small_studies() -> None:
    """A variant that no paper command runs would stand in its study's table as missing.

    A level of a size axis is a study of its own, and a ladder can have more levels than the paper.
    """
    sources = [paper(name, size) for name in NAMES for size in ("embedded", "real")]
    needed = {r for s in sources for item in s.items(()).values() for r in s.references(item)}
    studies = read_studies(FOLDER / "small.yaml")
    names = {study for study, _ in needed}
    families = {studies[name].family for name in names} - {""}
    planned = {
        (name, variant.name)
        for name, study in studies.items()
        if name in names or study.family not in families
        for variant in combine_axes(study)
    }
    assert planned == needed


@pytest.mark.parametrize("paper", ["beliefformer", "attentionx", "mgk", "dcmha"])
def test_models_of_the_treebank_train_as_short_as_those_of_embedded_text(paper: str) -> None:
    """Data of another kind inherit no key: without their own, a cell takes twenty minutes."""
    studies = read_studies(FOLDER / "small.yaml")
    names = f"small-{paper}-text", f"small-{paper}-text-data"
    embedded, real = (expand(studies[name], ROOT).baseline.experiment for name in names)
    assert real.training == embedded.training.model_copy(
        update={"evaluate_every": real.training.evaluate_every}
    )
    for key in ("context", "batch_size", "epoch_steps", "eval_windows"):
        assert getattr(real.data, key) == getattr(embedded.data, key), key


@pytest.mark.parametrize("name", NAMES)
def test_every_reading_of_a_page_exists_and_every_variant_is_on_a_page(name: str) -> None:
    """A variant of a paper's study is in the paper's own row or line, or in a reading."""
    source, studies = paper(name), read_studies(ROOT / "ablations.yaml")
    shown: dict[str, set[str]] = {}
    measured = {n: item for n, item in source.items(()).items() if source.references(item)}
    for number, item in measured.items():
        for reading in ("*", *item.readings):
            columns, _ = item.grid()
            located = source.locate(item, reading).items()
            variants = {tuple(line) for (_, name), line in located if not columns[name].file}
            planned = {
                (study, variant.name)
                for study, _ in variants
                for variant in combine_axes(studies[study])
            }
            reached = variants & planned
            assert reached or not variants, (number, reading)
            assert isinstance(reading, str) or variants <= planned, (number, reading)
            for study, variant in reached:
                shown.setdefault(study, set()).add(variant)
    for study, variants_shown in shown.items():
        assert {variant.name for variant in combine_axes(studies[study])} == variants_shown, study


@pytest.mark.slow
@pytest.mark.parametrize("size", ["", "embedded", "real"])
def test_figures_of_attention_layers_have_studies_that_record_them(size: str) -> None:
    recorded_by = {
        "first-norms": "residual",
        "first-angles": "residual",
        "norms": "residual",
        "angles": "residual",
        "ranks": "rank",
        "key-weights": "keys",
    }
    for name in NAMES:
        source = paper(name, size)
        studies = read_studies(source.studies_path)
        for number, figure in source.paper.figures.items():
            kinds = {recorded_by.get(kind, kind) for kind in figure.draw}
            for study in {line.study for line in source.references(figure)} if kinds else ():
                experiment = resolve(studies[study])[0].experiment
                settings = experiment.training.diagnostics
                assert settings is not None, (name, number)
                assert kinds <= set(settings.kinds), (name, number)


@pytest.mark.parametrize("table", ["1", "6", "9"])
def test_every_mixture_of_mgk_on_the_long_range_arena_has_its_released_reading(table: str) -> None:
    source, studies = paper("mgk"), read_studies(ROOT / "ablations.yaml")
    item = source.paper.tables[table]
    for (row, _), line in source.locate(item, "released-*").items():
        kind, heads = line.variant.removeprefix("released-").rsplit("-", 1)
        if kind in ("mgk", "smgk", "mlk", "smlk"):
            variants = {v.name: v.experiment for v in resolve(studies[line.study])}
            assert line.variant in variants, (row, heads)
            assert variants[line.variant].model.heads == int(heads)


def test_dcmha_prints_means_and_differences_that_agree() -> None:
    """Table 4: the mean accuracy of eleven tasks, and differences to Pythia of the same size."""
    table = paper("dcmha").paper.tables["4"]
    rows = {name: row.cells for name, row in table.rows.items()}
    wrong = {
        name
        for name, cells in rows.items()
        if not rounds_to(statistics.fmean(map(float, cells[2:13])), cells[13])
    }
    assert wrong == set()
    for size in ("2.8B", "6.9B"):
        pythia, ours = rows[f"0-shot / Pythia-{size}"], rows[f"0-shot / DCPythia-{size}"]
        for place in (0, 1, 13):
            value, difference = find_numbers(ours[place].replace("+", ""))
            expected = value - find_numbers(pythia[place])[0]
            assert expected == pytest.approx(difference, abs=0.051 if place == 13 else 0.0051)


def test_dcmha_table_10_has_the_speeds_of_table_6() -> None:
    tables = paper("dcmha").paper.tables
    windowless, windowed = find_numbers(tables["6"].rows["6.9B"].cells[3])
    trained = float(tables["6"].rows["6.9B"].cells[0])
    for name, row in tables["10"].rows.items():
        _, _, training, percent, inference, percents = row.cells
        assert rounds_to(100 * float(training) / trained, percent), name
        assert rounds_to(100 * float(inference) / windowless, percents.split("/")[0]), name
    # The Transformer++ of the other rows has other windows than the one in Table 6.
    first = tables["10"].rows["1:1*"].cells
    assert list(tables["10"].slips) == [f"1:1* | {list(tables['10'].columns)[5]}"]
    assert not rounds_to(100 * float(first[4]) / windowed, first[5].split("/")[1])
    assert 100 * float(first[4]) / windowed == pytest.approx(88.6, abs=0.05)


@pytest.mark.slow
@pytest.mark.parametrize("size", ["", "embedded"])
@pytest.mark.parametrize("name", NAMES)
def test_every_variant_of_a_paper_exists(name: str, size: str) -> None:
    matrices = papers.expand_paper(paper(name, size), [], Path("runs"))
    assert sum(len(matrix.jobs) for matrix in matrices) > 0
    if size:
        assert all(len(matrix.seeds) >= 5 for matrix in matrices)


def test_a_table_runs_exactly_its_cells() -> None:
    matrices = papers.expand_paper(paper("mgk"), ["6"], Path("runs"), seeds=(3, 4))
    cells = {(job.study, job.variant, job.seed) for m in matrices for job in m.jobs}
    variants = ("softmax-2", "softmax-smgk-1", "softmax-mgk-1", "softmax-1", "smgk-1", "mgk-1")
    expected = {("mgk-retrieval", v, s) for v in (*variants, "gaussian-1") for s in (3, 4)}
    assert cells == expected


def test_a_dry_run_counts_the_variants_of_its_table(capsys: pytest.CaptureFixture[str]) -> None:
    """The study has six variants, of which the table needs two."""
    assert main(["--paper", "attentionx", "--table", "1", "--dry-run"]) == 0
    assert "2 variants x 3 seeds = 6 cells" in capsys.readouterr().out


def test_the_path_of_an_experiment_is_printed_without_a_way_back(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["--paper", "attentionx", "--small", "--dry-run"]) == 0
    output = capsys.readouterr().out
    assert f"  experiment {EXPERIMENTS}/digits_vit.yaml, baseline standard\n" in output
    assert ".." not in output


@pytest.mark.parametrize(
    ("arguments", "explanation"),
    [
        (["mgk", "--table", "variances", "--small"], "without files measures it; use --small-data"),
        (["dcmha", "--table", "figure-4", "--small"], "no study of small models measures it"),
    ],
)
def test_a_table_without_a_small_study_names_the_size_that_has_one(
    arguments: list[str], explanation: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--paper", *arguments, "--dry-run"]) == 2
    assert explanation in capsys.readouterr().err


def test_costs_of_small_models_are_not_zero(capsys: pytest.CaptureFixture[str]) -> None:
    """An hour of a GPU has no digit that shows the time of a small model."""
    assert main(["--paper", "attentionx", "--small", "--cost", "H100"]) == 0
    lines = capsys.readouterr().out.splitlines()[2:]
    times = [re.fullmatch(r"  (?:1|figure-1|all) +([\d.]+) (s|min)", line) for line in lines]
    assert len(times) == 3
    assert all(time and float(time[1]) > 0 for time in times)


@pytest.mark.parametrize(
    ("name", "hint"),
    [("h100", "; did you mean 'H100'?"), ("RTX", "; choose from H100, H200, A100, A6000")],
)
def test_costs_of_an_unknown_gpu_are_refused_with_the_nearest_name(
    name: str, hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--paper", "mgk", "--cost", name]) == 2
    error = capsys.readouterr().err
    assert error.endswith(f"argument --cost: unknown GPU '{name}'{hint}\n")
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("hours", "text"),
    [(1557.26, "1,557.3 h"), (1, "1.0 h"), (0.45, "27 min"), (1 / 60, "1 min"), (3.6e-5, "0.13 s")],
)
def test_times_have_the_unit_that_shows_them(hours: float, text: str) -> None:
    assert papers.format_time(hours) == text


def test_pythia_has_its_published_number_of_parameters() -> None:
    """The counts are those of the released weights, with Pythia's padding of the vocabulary."""
    from lit_attn.models import factory

    studies = read_studies(ROOT / "ablations.yaml")
    for size, count in (("2.8B", 2_775_208_960), ("6.9B", 6_857_302_016)):
        experiment = resolve(studies[f"dcmha-pythia-{size}"])[0].experiment
        assert factory.describe(experiment.model, experiment.data).parameters == count


def test_a_table_also_runs_the_variant_that_its_percentages_need() -> None:
    """Table 10 of DCMHA prints percentages of TFM++, which is none of its columns."""
    (speed,) = (
        {job.variant for job in matrix.jobs}
        for matrix in papers.expand_paper(paper("dcmha"), ["10"], Path("runs"))
        if matrix.source.name == "dcmha-speed-6.9B"
    )
    columns = set(paper("dcmha").paper.tables["10"].rows)
    assert len(speed) == len(columns) + 1
    assert "standard" in speed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--paper", "mkg"], "mkg.yaml: no such paper; did you mean 'mgk'?"),
        (["--paper", "mgk", "--table", "11"], "no table or figure '11'; did you mean"),
        (["--paper", "dcmha", "--table", "1"], "nothing to run: The table compares methods"),
        (
            ["--paper", "dcmha", "--table", "2"],
            "`python experiments/papers/count_composition.py` measures it",
        ),
        (["--paper", "mgk", "--study", "digits"], "replaces the file of studies"),
        (["ablations.yaml", "--table", "1"], "--table: needs --paper"),
        (["ablations.yaml", "--small"], "--small: needs --paper"),
        (["ablations.yaml", "--small-data"], "--small-data: needs --paper"),
        ([], "name a file of studies"),
    ],
)
def test_wrong_commands_are_one_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*arguments, "--dry-run"]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def write_paper(folder: Path, old: str, new: str) -> None:
    text = (
        (FOLDER / "attentionx.yaml")
        .read_text()
        .replace("../../ablations.yaml", f"{ROOT}/ablations.yaml")
    )
    assert old in text
    (folder / "attentionx.yaml").write_text(text.replace(old, new, 1))
    (folder / "small.yaml").write_text((FOLDER / "small.yaml").read_text())


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            "variant: standard",
            "variant: standrad",
            "has no variant 'standrad'; did you mean 'standard'?",
        ),
        ("study: attentionx-cifar10}", "study: attentionx-cifar1}", "no study 'attentionx-cifar1'"),
        ("88.15 + 0.55 | 61.86 + 0.47", "88.15 + 0.55", "1 cells for 2 columns"),
        ("88.15 + 0.55 | 61.86 + 0.47", "88.15", "should be a valid string, not 88.15"),
        ("plain-*,", "plian-*,", "no variant for the reading 'plian-*'"),
        ("plain-*,", "{ViT-small with AttentionX: gama-1},", "no variant for the reading 'gama-1'"),
        ("plain-*,", "{ViT: plain-standard},", "no row or line 'ViT'"),
        (
            "transposed: true",
            "side_by_side: [[ViT-small with Attention]]",
            "side_by_side: needs every row once, in lines of the same length",
        ),
        ("x: step, y: train/loss", "x: steps, y: train/loss", "no axis 'steps'; did you mean"),
        ("transposed", "transpose", "unknown key 'transpose'; did you mean 'transposed'?"),
        (
            "row: ViT-small with AttentionX",
            "row: AttentionX",
            "no row or line 'AttentionX'; did you mean 'ViT-small with AttentionX'?",
        ),
        (
            "row: AttentionX,",
            "row: AttentoinX,",
            "no row or line 'AttentoinX'; did you mean 'AttentionX'?",
        ),
    ],
)
def test_a_mistake_in_a_paper_is_one_line(tmp_path: Path, old: str, new: str, message: str) -> None:
    write_paper(tmp_path, old, new)
    with pytest.raises(ConfigError) as caught:
        papers.expand_paper(read_paper("attentionx", "", tmp_path), [], tmp_path)
    text = str(caught.value)
    assert re.match(rf"{tmp_path}/attentionx.yaml:\d+: ", text), text
    assert message in text
    assert "\n" not in text


def test_papers_of_a_wheel_are_found_outside_a_clone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("lit_attn.papers.source.SHIPPED", ROOT)
    assert read_paper("attentionx").path == ROOT / "experiments/papers/attentionx.yaml"


def test_the_printed_tables_and_figures_are_whole_or_have_one_sentence_why_not() -> None:
    """56 of them measure something (the others are drawings, code and lists)."""
    total = 0
    reasons = {}
    for name in NAMES:
        for key, item in paper(name).printed_items().items():
            total += 1
            if item.lacks:
                reasons[name, key] = item.lacks
    assert total == 56
    assert list(reasons) == [
        ("dcmha", "4"),
        ("dcmha", "6"),
        ("dcmha", "10"),
        ("dcmha", "figure-4"),
        ("dcmha", "figure-5"),
        ("dcmha", "figure-6"),
    ]
    for reason in reasons.values():
        assert reason.count(". ") == 0
        assert reason.endswith(".")
