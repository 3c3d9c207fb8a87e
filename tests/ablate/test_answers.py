"""Dry run and `report` with --json: answers for programs; test_status.py has that of `status`."""

import argparse
from pathlib import Path

import pytest
from helpers import fake_cells, studies
from helpers.answers import read_answer
from helpers.fake_study import write_study
from helpers.runs import make_body

from lit_attn.__main__ import main
from lit_attn.ablate.commands.arguments import StudyOptions, add_study_arguments
from lit_attn.ablate.commands.execution import run_selected
from lit_attn.ablate.commands.options import expand_studies, read_options
from lit_attn.ablate.dry_run import find_warnings, print_cells
from lit_attn.ablate.launch import Launcher
from lit_attn.ablate.outcomes import Summary
from lit_attn.ablate.plan import expand
from lit_attn.schema.errors import ConfigError


def test_a_dry_run_lists_every_cell_with_its_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    path = studies.write(tmp_path, make_body("ok", "new"))
    assert main(["run", "--dry-run", "--json"]) == 0
    answer = read_answer(capsys.readouterr().out)
    assert answer["command"] == "dry-run"
    (study,) = answer["studies"]
    assert study["study"] == "tiny"
    assert study["variants"] == ["ok", "new"]
    assert study["seeds"] == [0, 1]
    assert study["floors"] == ["most frequent class", "1 nearest neighbour", "logistic regression"]
    assert study["counts"] == {"missing": 4}
    assert {(cell["variant"], cell["seed"]) for cell in study["cells"]} == {
        ("ok", 0),
        ("ok", 1),
        ("new", 0),
        ("new", 1),
    }
    matrix = expand(studies.study(tmp_path, make_body("ok", "new")), Path("runs"))
    assert study["cells"][0]["identity"] == matrix.jobs[0].identity
    assert not path.with_name("runs").exists()


def test_json_and_costs_are_refused_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    studies.write(tmp_path, make_body("ok"))
    assert main(["run", "--json"]) == 2
    assert capsys.readouterr().err == "--json: needs --dry-run\n"
    assert main(["run", "--dry-run", "--json", "--params"]) == 2
    assert capsys.readouterr().err == "--json: lists cells only; leave out --params\n"
    assert main(["rerun", "failed", "--dry-run", "--json"]) == 2
    assert "leave it out with rerun" in capsys.readouterr().err


def test_a_report_names_what_it_wrote_and_what_it_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write_study(tmp_path / "runs", seeds=2)
    write_study(tmp_path / "runs", name="v1.5", seeds=2)
    assert main(["report", "runs", "--json"]) == 0
    answer = read_answer(capsys.readouterr().out)
    assert [report["name"] for report in answer["reports"]] == ["fake", "v1.5"]
    assert answer["index"] == "reports/index.html"
    for report in answer["reports"]:
        assert Path(report["page"]).is_file()
        assert Path(report["table"]).is_file()
    assert main(["report", "runs", "--across", "fake", "v1.5", "--json"]) == 0
    (report,) = read_answer(capsys.readouterr().out)["reports"]
    assert report == {
        "name": "across",
        "page": "reports/across.html",
        "table": "reports/across.csv",
    }


def test_variants_share_one_line_for_the_same_warning(tmp_path: Path) -> None:
    experiment = studies.EXPERIMENT.replace("warmup: 1", "warmup: 2")
    body = make_body("a", "b", "c", "d", "e")
    lines = find_warnings(expand(studies.study(tmp_path, body, experiment), tmp_path / "runs"))
    assert lines[0].startswith("all variants: ")
    assert lines[-1] == "e: optimizer.lr: 5 is above 1; most trainings diverge"
    some = body.replace("{optimizer.lr: 5}", "{optimizer.lr: 5, schedule.warmup: 1}")
    lines = find_warnings(expand(studies.study(tmp_path, some, experiment), tmp_path / "runs"))
    assert lines[0].startswith("a and 3 other variants: ")


def test_a_dry_run_warns_of_missing_data(tmp_path: Path) -> None:
    data = "{kind: npz, path: mine.npz, name: m, size: 8, channels: 1, classes: 2}"
    experiment = studies.with_data(data)
    body = "baseline: a\ncells: {a: {}, b: {attention: mgk}}"
    (line,) = find_warnings(expand(studies.study(tmp_path, body, experiment), tmp_path / "runs"))
    assert line.startswith("all variants: cannot run on this machine: data.path: no file")


def test_a_dry_run_warns_of_parameters_that_cannot_be_matched(tmp_path: Path) -> None:
    """The command refuses such a study before its first cell."""
    body = "baseline: a\ncells: {a: {}, b: {model.dim: 64}}"
    (line,) = find_warnings(expand(studies.study(tmp_path, body), tmp_path / "runs"))
    assert line.startswith("b: cannot run: match: parameters: ")
    assert "with the narrowest FFN exceed the" in line


def test_task_and_metric_follow_from_the_data(tmp_path: Path) -> None:
    experiment = (
        "data: {kind: python-text, context: 16, batch_size: 4}\n"
        "model: {kind: gpt, dim: 16, depth: 1, heads: 2, ffn: {width: 16}}\n"
        "optimizer: {kind: adamw, lr: 1e-3}\n"
        "training: {epochs: 1}\n"
    )
    body = "baseline: a\ncells: {a: {}, b: {attention: mgk}}"
    matrix = expand(studies.study(tmp_path, body, experiment), tmp_path / "runs")
    assert matrix.baseline.experiment.task.kind == "language-modelling"
    metric = matrix.plan().metric
    assert (metric.name, metric.goal) == ("test/loss", "min")
    experiment += "task: language-modelling\n"
    body += "\nmetric: {name: test/loss}"
    written = expand(studies.study(tmp_path, body, experiment), tmp_path / "runs")
    assert written.jobs[0].identity == matrix.jobs[0].identity


def print_dry_run(tmp_path: Path, body: str) -> None:
    print_cells([expand(studies.study(tmp_path, body), tmp_path / "runs")], with_costs=False)


def test_a_dry_run_prints_the_power_and_a_better_screening(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The numbers are those of lit_attn.report.statistics.designs, which has tests of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(studies, "STUDY", studies.STUDY.replace("seeds: 2", "seeds: 6"))
    names = [f"variant-{number}" for number in range(21)]
    body = make_body(*names)
    print_dry_run(tmp_path, body)
    output = capsys.readouterr().out
    assert (
        "  power 0.12: probability of a star for one of 20 variants that is better by two standard"
        " deviations over seeds\n  power 0.99 with 126 trainings: `design: {screen: 4, keep: 2,"
        " confirm: 14}` in place of `seeds` (docs/statistics.md, Screening)\n"
    ) in output
    studies.write(tmp_path, body)
    # The power is that of the study, of which this command would run one seed.
    assert main(["run", "--dry-run", "--json", "--seeds", "0,"]) == 0
    (study,) = read_answer(capsys.readouterr().out)["studies"]
    assert study["power"] == pytest.approx(0.125, abs=0.005)
    screening = study["screening"]
    assert (screening["screen"], screening["keep"], screening["confirm"]) == (4, 2, 14)
    assert screening["trainings"] == 126


def test_few_seeds_few_variants_and_products_have_their_own_power(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    print_dry_run(tmp_path, make_body("a", "b"))
    output = capsys.readouterr().out
    assert "  power 0: a star needs 6 seeds, and the study has 2\n" in output
    rules = "most frequent class, 1 nearest neighbour, logistic regression"
    assert f"  floors without attention: {rules}\n" in output
    assert "design" not in output
    print_dry_run(tmp_path, make_body("alone"))
    assert "power" not in capsys.readouterr().out
    product = (
        "axes: {optimizer.lr: [1, 2], data.batch_size: [32, 64]}\nbaseline: 'lr=1,batch_size=32'"
    )
    print_dry_run(tmp_path, product)
    assert "power" not in capsys.readouterr().out


def test_a_dry_run_of_a_search_counts_the_cells_after_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tune = "tune: {optimizer.lr: [1, 2], select: val/loss, seeds: [9]}"
    body = f"baseline: a\n{tune}\ncells: {{a: {{}}, b: {{attention: mgk}}}}"
    print_dry_run(tmp_path, body)
    output = capsys.readouterr().out
    assert "  after the search: 2 variants x 2 seeds = 4 cells" in output
    assert "0 variants" not in output


def make_options(folder: Path) -> StudyOptions:
    """Return the options of a run of the study in `folder`."""
    parser = argparse.ArgumentParser()
    add_study_arguments(parser)
    words = [str(folder / "ablations.yaml"), "--out", str(folder / "runs")]
    return read_options(parser.parse_args(words))


def test_a_variant_folder_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    studies.write(tmp_path, make_body("ok"))
    options = make_options(tmp_path)
    (matrix,) = expand_studies(options)
    matrix.folder.mkdir(parents=True)
    matrix.jobs[0].folder.parent.touch()
    with pytest.raises(ConfigError, match=r"--out .*/tiny/ok: cannot be written"):
        run_selected([matrix], options, Launcher(fake_cells.TARGET), lambda _: Summary(), None)
