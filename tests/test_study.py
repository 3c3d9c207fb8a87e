"""The Python interface: a study built in Python or read from YAML, run for real, as data frames."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers.paths import ROOT
from helpers.runs import list_holders

from lit_attn import Study
from lit_attn.schema.errors import ConfigError

EXPERIMENT = {
    "data": {"kind": "digits", "batch_size": 256},
    "model": {"kind": "vit", "dim": 16, "depth": 1, "heads": 2, "patch": 4, "ffn": {"width": 32}},
    "optimizer": {"kind": "adamw", "lr": 1e-3},
    "training": {"epochs": 2, "accelerator": "cpu"},
}
CELLS = {"standard": {}, "fast": {"optimizer.lr": 3e-3}}


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Study:
    """Return a study of four cells after its run."""
    folder = tmp_path_factory.mktemp("study")
    built = Study(
        "tiny",
        experiment=EXPERIMENT,
        folder=folder,
        out=folder / "runs",
        reports=folder / "reports",
        seeds=2,
        cells=CELLS,
        baseline="standard",
    )
    assert list(built.status()["state"]) == ["missing"] * 4
    assert built.run(jobs=1)
    return built


def test_the_representation_counts_variants_seeds_and_states(study: Study, tmp_path: Path) -> None:
    assert repr(study) == "Study('tiny': 2 variants x 2 seeds; 4 cells: 4 done)"
    (path,) = study.out.glob("tiny/fast/1-*/result.json")
    moved = path.rename(tmp_path / "result.json")
    assert repr(study).endswith("4 cells: 3 done, 1 interrupted)")
    moved.rename(path)


def test_the_status_names_what_makes_a_cell_stale(study: Study, tmp_path: Path) -> None:
    assert list(study.status()["stale"]) == [""] * 4
    (path,) = study.out.glob("tiny/fast/1-*/result.json")
    text, data = path.read_text(), tmp_path / "images.npz"
    data.touch()
    path.write_text(json.dumps(json.loads(text) | {"inputs": {str(data): "1 1"}}))
    status = study.status().set_index(["variant", "seed"])
    path.write_text(text)
    assert status.loc[("fast", 1), ["state", "stale"]].tolist() == [
        "done",
        f"{data} has another size or time",
    ]
    assert list(status["stale"]).count("") == 3


def test_results_are_one_row_for_each_cell(study: Study) -> None:
    """Configuration, metrics and costs are those of the cells' own records."""
    results = study.results()
    assert list(zip(results["variant"], results["seed"], strict=True)) == [
        (cell.variant, cell.seed) for cell in study.expand()
    ]
    by_variant = results.groupby("variant")["optimizer.lr"].unique()
    assert {name: list(rates) for name, rates in by_variant.items()} == {
        "fast": [3e-3],
        "standard": [1e-3],
    }
    for _, row in results.iterrows():
        (path,) = (study.out / "tiny" / row["variant"]).glob(f"{row['seed']}-*/result.json")
        record = json.loads(path.read_text())
        assert row["test/accuracy"] == record["metrics"]["test/accuracy"]
        assert row["parameters"] == record["parameters"]
        assert row["step_time"] == record["step_time"]["median"]
        assert json.loads(row["data.augment"])[0]["kind"] == "normalize"


def test_the_table_compares_the_variants(study: Study) -> None:
    table = study.table().set_index("variant")
    means = 100 * study.results().groupby("variant")["test/accuracy"].mean()
    for name in CELLS:
        assert table.loc[name, "mean"] == pytest.approx(means[name])
    assert table.loc["fast", "difference"] == pytest.approx(means["fast"] - means["standard"])


def test_the_figures_are_files(study: Study) -> None:
    figures = study.figures()
    assert "seeds" in figures
    assert all(path.read_text().lstrip().startswith("<?xml") for path in figures.values())


def test_a_second_run_trains_nothing(study: Study, capsys: pytest.CaptureFixture[str]) -> None:
    assert study.run()
    assert "4 cells: 4 done, 0 to run" in capsys.readouterr().out
    assert list(study.status()["state"]) == ["done"] * 4


@pytest.mark.slow
def test_an_interrupt_stops_the_runner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cell trains until it is stopped, so that the runner cannot end before the interrupt."""
    runners: list[subprocess.Popen[bytes]] = []
    endless = Study(
        "endless",
        experiment=EXPERIMENT | {"training": {"epochs": 1_000_000, "accelerator": "cpu"}},
        folder=tmp_path,
        out=tmp_path / "runs",
        reports=tmp_path / "reports",
        seeds=1,
        cells={"standard": {}},
        baseline="standard",
    )

    def interrupt(describe: Callable[[], str]) -> None:
        if list_holders(tmp_path):
            assert "1 cell: 1 running" in describe()
            raise KeyboardInterrupt

    class Runner(subprocess.Popen[bytes]):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            runners.append(self)

        def send_signal(self, number: int) -> None:
            """Send the signal to the runner, which then waits for its cell, and stop the cell."""
            super().send_signal(number)
            (cell,) = list_holders(tmp_path)
            os.kill(cell, signal.SIGTERM)

    monkeypatch.setattr("lit_attn.study.open_notebook_display", lambda: interrupt)
    monkeypatch.setattr(subprocess, "Popen", Runner)
    with pytest.raises(KeyboardInterrupt):
        endless.run()
    (runner,) = runners
    assert runner.returncode == 128 + signal.SIGINT


def test_a_study_of_a_file_is_the_same_study(study: Study) -> None:
    again = Study.from_yaml(study.path, "tiny", out=study.out, reports=study.reports)
    assert [c.fingerprint for c in again.expand()] == [c.fingerprint for c in study.expand()]
    assert len(again.results()) == 4


def test_mistakes_are_errors_of_one_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no study 'digit'; did you mean 'digits'\?"):
        Study.from_yaml(ROOT / "ablations.yaml", "digit")
    study = (
        "    title: t\n    experiment: {}\n    seeds: 1\n    baseline: a\n    cells: {{a: {{}}}}\n"
    )
    study = study.format(ROOT / "experiments" / "digits_vit.yaml")
    path = tmp_path / "ablations.yaml"
    for default in ("", "    default: true\n"):
        path.write_text(f"studies:\n  a:\n{study}{default}  b:\n{study}{default}")
        with pytest.raises(ConfigError) as caught:
            Study.from_yaml(path)
        advice = "choose one with the argument `name`: a, b"
        assert str(caught.value) == f"{path}: {advice}"
    path.write_text(f"studies:\n  a:\n{study}  b:\n{study}    default: true\n")
    assert Study.from_yaml(path).name == "b"
    study = Study.from_yaml(path, "a")
    path.write_text(path.read_text().replace("  a:", "  c:"))
    with pytest.raises(ConfigError, match=r"ablations\.yaml: no study 'a'; choose from c, b"):
        study.expand()


@pytest.mark.parametrize(
    ("name", "keys", "message"),
    [
        ("../tiny", {}, "Study: ../tiny: cannot name a folder: use up to 120 letters, digits"),
        (
            "tiny",
            {"seed": 1},
            "Study: studies.tiny.seed: unknown key 'seed'; did you mean 'seeds'?",
        ),
        ("tiny", {"baseline": "x"}, "Study: tiny.baseline: no variant 'x'; choose from standard"),
        ("tiny", {"set": {"model.depth": "x"}}, "Study: tiny: variant 'standard': model.depth: "),
        ("tiny", {"experiment": "x.yaml"}, "Study: studies.tiny.experiment: no file "),
        ("tiny", {"compare_within": ["a"]}, "Study: compare_within: makes several studies; write"),
        ("tiny", {"budgets": [1, 2]}, "Study: studies.tiny.budgets: unknown key 'budgets'"),
    ],
)
def test_a_refused_study_writes_nothing(
    name: str, keys: dict[str, Any], message: str, tmp_path: Path
) -> None:
    folder = tmp_path / "new"
    written = {"seeds": 1, "cells": CELLS, "baseline": "standard", "experiment": EXPERIMENT}
    with pytest.raises(ConfigError) as caught:
        Study(name, folder=folder, **written | keys)
    assert str(caught.value).startswith(message)
    assert list(tmp_path.iterdir()) == []
    Study("tiny", folder=folder, out=tmp_path / "runs", **written)
    before = {path: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises(ConfigError):
        Study(name, folder=folder, **written | keys)
    assert {path: path.read_bytes() for path in folder.iterdir()} == before


def test_a_file_of_the_user_is_not_replaced(tmp_path: Path) -> None:
    keys: dict[str, Any] = {"seeds": 1, "cells": {"standard": {}}, "baseline": "standard"}
    for name in ("mine.yaml", "yours.experiment.yaml"):
        (tmp_path / name).write_text("title: mine\n")
        with pytest.raises(ConfigError, match=f"{name}: was not written by Study; choose another"):
            Study(name.partition(".")[0], experiment=EXPERIMENT, folder=tmp_path, **keys)
        assert (tmp_path / name).read_text() == "title: mine\n"
    for lr in (1e-3, 2e-3):
        experiment = EXPERIMENT | {"optimizer": {"kind": "adamw", "lr": lr}}
        study = Study("other", experiment=experiment, folder=tmp_path, **keys)
        assert study.expand()[0].experiment.optimizer.lr == lr


def test_results_have_columns_before_the_first_run(tmp_path: Path) -> None:
    keys: dict[str, Any] = {"seeds": 1, "cells": {"standard": {}}, "baseline": "standard"}
    study = Study("a", experiment=EXPERIMENT, folder=tmp_path, out=tmp_path / "runs", **keys)
    assert study.results()[["variant", "seed"]].empty


def test_importing_the_package_imports_nothing_heavy() -> None:
    code = "import sys, lit_attn; print(sorted({'torch', 'pandas', 'pydantic'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
