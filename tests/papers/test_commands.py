"""Commands of the tables and figures of papers: they run as printed and say what they need."""

import os
import re
import subprocess
from pathlib import Path

import pytest
from helpers.invented_papers import FOLDER, NAMES
from helpers.paths import ROOT

from lit_attn.ablate.__main__ import main as run_studies
from lit_attn.ablate.variants import resolve
from lit_attn.config.study import read_studies
from lit_attn.models.language import GPTConfig
from lit_attn.papers.source import read_paper


def list_commands(script: str, folder: Path) -> list[str]:
    """Run a script with a `python` that only prints its arguments, and return what it prints."""
    python = folder / "python"
    python.write_text('#!/bin/sh\necho "$@"\n')
    python.chmod(0o755)
    result = subprocess.run(
        ["bash", "-c", script],
        env={"PATH": f"{folder}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        check=True,
    )
    return result.stdout.splitlines()


def read_options(command: str) -> dict[str, list[str]]:
    """Return the values of each option of a command."""
    _, *parts = command.split(" --")
    return {name: values for name, *values in (part.split() for part in parts)}


@pytest.mark.process
@pytest.mark.parametrize("table", ["6", "10"])
def test_the_commands_of_dcmha_measure_the_models_of_its_studies(
    table: str, tmp_path: Path
) -> None:
    item = read_paper("dcmha", "", FOLDER).paper.tables[table]
    commands = list_commands(item.script, tmp_path)
    studies = read_studies(ROOT / "ablations.yaml")
    for command, row in zip(commands, item.rows.values(), strict=True):
        options = read_options(command)
        if table == "6":
            size, name = str(row.variant), "dcformer"
        else:
            size, name = "6.9B", str(row.variant)
        variants = {variant.name: variant for variant in resolve(studies[f"dcmha-speed-{size}"])}
        model = variants[name].experiment.model
        assert isinstance(model, GPTConfig)
        for key in ("dim", "depth", "heads"):
            assert options[key] == [str(getattr(model, key))]
        if table == "6":
            assert options["out"] == [f"runs/bench/{size}"]
        else:
            assert options["out"] == [f"runs/bench/{size}-{name}"]
            assert options["windows"] == [str(keys or "none") for keys in model.windows]


@pytest.mark.process
def test_only_the_text_of_an_example_is_left_to_the_reader(tmp_path: Path) -> None:
    """A word in capitals, such as MODEL, stands for something that no command has."""
    words = set()
    for name in NAMES:
        for item in read_paper(name, "", FOLDER).items(()).values():
            for command in list_commands(item.script, tmp_path):
                assert "..." not in command
                assert Path(command.split()[0]).is_file() or command.startswith("-m lit_attn")
                words |= set(re.findall(r"(?<!\S)(?:\S*/)?([A-Z]+)(?!\S)", command))
    assert words == {"TEXT"}


@pytest.mark.process
def test_the_command_of_dcmha_table_4_measures_every_row_and_task(tmp_path: Path) -> None:
    table = read_paper("dcmha", "", FOLDER).paper.tables["4"]
    commands = list_commands(table.script, tmp_path)
    folders = set()
    for command in commands:
        folder = Path(command.split()[1]).name
        options = read_options(command)
        folders.add(f"{folder}/harness-{options['shots'][0]}")
        tasks = {column.where["task"] for column in table.columns.values() if column.file}
        assert set(options["tasks"]) == tasks - {"pile", "flan"}
    assert folders == {row.variant for row in table.rows.values()}


@pytest.mark.slow
@pytest.mark.parametrize("size", ["2.8B", "6.9B"])
def test_the_rows_of_table_6_can_be_planned_one_by_one(
    size: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    page = (ROOT / "docs" / "papers.md").read_text()
    pattern = rf"^    python -m lit_attn.ablate (.* dcmha-speed-{re.escape(size)}.*)$"
    (arguments,) = re.findall(pattern, page, re.MULTILINE)
    monkeypatch.chdir(ROOT)
    assert run_studies([*arguments.split(), "--dry-run"]) == 0
    assert f"dcmha-speed-{size}" in capsys.readouterr().out


@pytest.mark.parametrize("command", ["run", "report"])
def test_help_says_what_the_data_of_small_models_are(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    from lit_attn.__main__ import main as run_command

    with pytest.raises(SystemExit):
        run_command([command, "--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert "on data without a download, such as digits and Python's own text" in text
    assert "on CIFAR-100, the Penn Treebank and Multi30k from files in data/" in text
