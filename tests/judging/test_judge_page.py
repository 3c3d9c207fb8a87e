"""Examples of judge on the pages: their files, their commands, and what they print."""

import re
from pathlib import Path

import pytest
from helpers.paths import ROOT

from lit_attn.__main__ import main

PAGE = ROOT / "docs" / "judge.md"
EXAMPLES = {"judge": 6, "agents": 1, "other-runs": 1}
"""Number of commands on each page."""

FILE = re.compile(r"^\*\*(\S+)\*\*\n\n```\w+\n(.*?)^```$", re.MULTILINE | re.DOTALL)
CONSOLE = re.compile(r"^```console\n(.*?)^```$", re.MULTILINE | re.DOTALL)
COMMAND = re.compile(r"^\$ lit-attn (.*)\n((?:(?!\$ ).*\n)*)", re.MULTILINE)


def write_files(folder: Path, page: Path = PAGE) -> None:
    """Write the files of the page."""
    for name, text in FILE.findall(page.read_text()):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def run_examples(text: str, capsys: pytest.CaptureFixture[str]) -> str:
    """Return the page with what its commands print today."""
    for console in CONSOLE.findall(text):
        written = ""
        for words, _ in COMMAND.findall(console):
            main(words.split())
            printed = capsys.readouterr()
            written += f"$ lit-attn {words}\n{printed.out}{printed.err}"
        text = text.replace(f"```console\n{console}```", f"```console\n{written}```")
    return text


@pytest.mark.parametrize("name", EXAMPLES)
def test_every_command_prints_what_the_page_shows(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = PAGE.with_stem(name)
    write_files(tmp_path, page)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    text = page.read_text()
    assert len(COMMAND.findall(text)) == EXAMPLES[name]
    assert run_examples(text, capsys) == text


def test_the_example_in_python_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_files(tmp_path)
    monkeypatch.chdir(tmp_path)
    (code,) = re.findall(r"```python\n(from lit_attn .*?)```", PAGE.read_text(), re.DOTALL)
    exec(code, {})
    assert capsys.readouterr().out.startswith("better 3.2012")


def test_every_column_of_a_cost_stands_on_the_page() -> None:
    from lit_attn.judging.costs import COSTS

    named = set(re.findall(r"`(\w+)`", PAGE.with_stem("other-runs").read_text()))
    assert {name for name in COSTS if not name.startswith("_")} <= named
