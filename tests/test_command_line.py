"""The console command `lit-attn`: its own commands, and the same from an installed wheel."""

import json
import re
import subprocess
import sys
import tomllib
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest
from helpers.commands import run_new_python
from helpers.paths import ROOT

import lit_attn
from lit_attn.__main__ import COMMANDS, find_studies, main
from lit_attn.ablate.commands.arguments import split_words
from lit_attn.bench.__main__ import OPTIONS
from lit_attn.config.overrides import spell_out_experiment
from lit_attn.config.source import load
from lit_attn.config.study import read_titles
from lit_attn.data.text.ids import PREPARED
from lit_attn.schema.errors import ConfigError, program
from lit_attn.schema.yaml_text import Where


def test_the_overview_names_every_command_once(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main([])
    assert stopped.value.code == 0
    lines = capsys.readouterr().out.splitlines()
    for name in COMMANDS:
        assert sum(line.split()[:1] == [name] for line in lines) == 1
    assert max(map(len, lines)) <= 100


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_prints_its_usage(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stopped:
        main([name, "--help"])
    assert stopped.value.code == 0
    text = capsys.readouterr().out
    assert text.startswith(f"usage: lit-attn {name} ")
    assert "python -m lit_attn" not in text
    assert_names_page(text)


def test_a_python_without_the_packages_is_told_in_one_line() -> None:
    # Without `site`, Python does not find what pip has installed.
    run = run_new_python(ROOT, "-S", "-m", "lit_attn.ablate", "ablations.yaml")
    assert (run.returncode, run.stdout) == (1, "")
    assert run.stderr == (
        "jinja2, numpy, pandas, pydantic, rich, ruamel, scipy: not installed for "
        f"{sys.executable}; activate the environment of lit_attn, or install it as in README.md: "
        "pip install -e .\n"
    )


def test_the_packages_that_are_asked_for_are_dependencies(monkeypatch: pytest.MonkeyPatch) -> None:
    looked_for: list[str] = []
    monkeypatch.setattr(lit_attn, "find_spec", looked_for.append)
    lit_attn._find_lack()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    listed = {re.split(r"[^\w.]", text)[0] for text in project["dependencies"]}
    # pandas brings NumPy, and `ruamel` is the first part of the module's name.
    assert set(looked_for) - {"numpy", "ruamel"} <= listed
    assert "ruamel.yaml" in listed


def test_an_older_python_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "version_info", (3, 10, 2))
    lack = lit_attn._find_lack()
    assert lack == f"lit_attn needs Python 3.11 or newer, and {sys.executable} is Python 3.10"


def assert_names_page(text: str) -> None:
    """Assert that the last line of a help names a page that exists."""
    before, page = text.splitlines()[-1].rsplit(" ", 1)
    assert before.endswith("More:")
    assert page.startswith("docs/")
    assert (ROOT / page).is_file()


def list_programs() -> list[str]:
    """Return the modules of the package that `python -m` runs as a command with options."""
    modules = []
    for path in sorted((ROOT / "lit_attn").rglob("*.py")):
        text = path.read_text()
        if '__name__ == "__main__"' in text and "@command\ndef main(" in text:
            words = path.relative_to(ROOT).with_suffix("").parts
            modules.append(".".join(words))
    return modules


def test_no_help_imports_torch() -> None:
    """All run in one process, which stops at the first one that imports a heavy package."""
    calls = [("lit_attn.__main__", [name]) for name in COMMANDS]
    calls += [(module, []) for module in list_programs()]
    calls += [("lit_attn.bench.__main__", [name]) for name in (*OPTIONS, "data", "training")]
    calls += [("lit_attn.data.prepare", [name]) for name in (*PREPARED, "text")]
    others = ("rerun", "status", "judge", "seal", "logs")
    calls += [("lit_attn.ablate.__main__", [name]) for name in others]
    code = (
        "import contextlib, importlib, io, json, sys\n"
        "for module, words in json.loads(sys.argv[1]):\n"
        "    main = importlib.import_module(module).main\n"
        "    output = io.StringIO()\n"
        "    with contextlib.suppress(SystemExit), contextlib.redirect_stdout(output):\n"
        "        main([*words, '--help'])\n"
        "    assert output.getvalue().startswith('usage: ')\n"
        "    assert 'More: docs/' in output.getvalue().splitlines()[-1], (module, words)\n"
        "    heavy = {'torch', 'lightning', 'pandas', 'scipy', 'matplotlib'} & set(sys.modules)\n"
        "    if heavy: sys.exit(f'{module} {words}: imported {heavy}')\n"
        "print('tried', module)"
    )
    done = run_new_python(ROOT, "-c", code, json.dumps(calls))
    assert done.stderr == ""
    assert done.stdout == f"tried {calls[-1][0]}\n"


@pytest.mark.parametrize(
    "words",
    [
        "mine.yaml a --dry-run --seeds 2 --see=3",
        "--dry-run mine.yaml a --seeds 2 --see=3",
        "mine.yaml --dry-run --seeds 2 a --see=3",
        "--dry-run --seeds 2 --see=3 mine.yaml a",
    ],
)
def test_a_file_and_its_studies_stand_before_between_or_after_options(words: str) -> None:
    expected = ["mine.yaml", "--dry-run", "--seeds", "2", "--see=3", "--study", "a"]
    assert find_studies(words.split()) == expected
    assert split_words(["--set", "mine.yaml", "--cos", "h100", "b"]) == (
        ["b"],
        ["--set", "mine.yaml", "--cos", "h100"],
    )


@pytest.mark.parametrize(
    ("words", "name"),
    [
        ("bench --help", "usage: python -m lit_attn.bench "),
        ("report --help", "usage: python -m lit_attn.report "),
        ("ablate --help", "usage: python -m lit_attn.ablate "),
        ("ablate status a b", "python -m lit_attn.ablate status: unrecognized arguments: b"),
        ("ablate logs", "python -m lit_attn.ablate logs: the following arguments are required"),
        ("train", "python -m lit_attn.train: the following arguments are required"),
    ],
)
def test_a_module_names_itself_as_it_was_typed(words: str, name: str, tmp_path: Path) -> None:
    module, *rest = words.split()
    done = run_new_python(tmp_path, "-m", f"lit_attn.{module}", *rest)
    text = done.stdout + done.stderr
    assert text.startswith(name)
    assert "lit-attn" not in text


@pytest.mark.parametrize(
    ("main", "train", "logs"),
    [
        ("lit_attn.__main__", "lit-attn train", "lit-attn logs"),
        (
            "lit_attn.ablate.__main__",
            "python -m lit_attn.train",
            "python -m lit_attn.ablate logs",
        ),
    ],
)
def test_messages_name_other_commands_as_this_one_was_typed(
    main: str, train: str, logs: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", ModuleSpec(main, None))
    assert program("train", Path("runs/a b")) == f"{train} 'runs/a b'"
    assert program("logs") == logs


def test_a_missing_cell_or_a_second_folder_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["logs"]) == 2
    assert capsys.readouterr().err == "lit-attn logs: the following arguments are required: CELL\n"
    assert main(["status", "runs", "more"]) == 2
    assert capsys.readouterr().err == "lit-attn status: unrecognized arguments: more\n"


def test_an_unknown_command_names_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["statu"]) == 2
    assert capsys.readouterr().err == (
        "lit-attn: unknown command 'statu'; did you mean 'status'?\n"
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--vers"], "lit-attn: unknown command '--vers'"),
        (["list", "models", "tasks"], "lit-attn list: unrecognized arguments: tasks"),
        (["prepare", "text"], "lit-attn prepare text: the following arguments are required"),
        (["train"], "lit-attn train: the following arguments are required: CELL_DIR"),
        (["generate", "x"], "lit-attn generate: the following arguments are required: --prompt"),
        (
            ["run", "--paper", "mgk", "--small", "--small-data"],
            "lit-attn run: argument --small-data: not allowed with argument --small",
        ),
        (["bench"], "lit-attn bench: the following arguments are required: BENCHMARK"),
        (
            ["bench", "memory", "--heads", "x"],
            "lit-attn bench memory: argument --heads: 'x' is not",
        ),
        (["report"], "lit-attn report: give a folder of runs, --csv FILE or --paper NAME"),
        (["run", "digits", "--jobs", "x"], "lit-attn run: argument --jobs: invalid int value: 'x'"),
    ],
)
def test_a_wrong_command_line_is_one_line(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line


def test_init_writes_a_study_that_expands_and_replaces_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["init"]) == 0
    assert main(["run", "first", "--dry-run"]) == 0
    assert "4 variants x 3 seeds = 12 cells: 12 missing" in capsys.readouterr().out
    assert main(["run", "--dry-run", "--seeds", "1"]) == 0
    assert "4 variants x 1 seed =" in capsys.readouterr().out
    before = (tmp_path / "ablations.yaml").read_bytes()
    assert main(["init"]) == 2
    assert "ablations.yaml: exists already" in capsys.readouterr().err
    assert (tmp_path / "ablations.yaml").read_bytes() == before


def test_init_says_how_to_enter_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["init", "my study"]) == 0
    *_, last = capsys.readouterr().out.splitlines()
    assert last == "Next: cd 'my study', then lit-attn run --dry-run, then lit-attn run"
    assert main(["init"]) == 0
    *_, last = capsys.readouterr().out.splitlines()
    assert last == "Next: lit-attn run --dry-run, then lit-attn run"


def test_init_names_a_folder_that_cannot_be_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "file"
    file.touch()
    assert main(["init", str(file / "study")]) == 2
    message = f"lit-attn init {file}/study: cannot be written: Not a directory\n"
    assert capsys.readouterr().err == message


def test_rerun_without_a_choice_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["rerun"]) == 2
    message = "rerun: needs stale, failed or STUDY/VARIANT/SEED, and then the file\n"
    assert capsys.readouterr().err == message


def test_a_name_is_a_study_of_this_folder_or_a_shipped_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    shipped = str(ROOT / "ablations.yaml")
    assert find_studies(["--paper=mgk", "--cost", "H100"]) == ["--paper=mgk", "--cost", "H100"]
    assert find_studies(["digits", "--jobs", "2"]) == [shipped, "--jobs", "2", "--study", "digits"]
    with pytest.raises(ConfigError, match=r"no such file; write one with `lit-attn init`"):
        find_studies(["--dry-run"])
    main(["init"])
    assert find_studies([]) == ["ablations.yaml"]
    assert find_studies(["first"]) == ["ablations.yaml", "--study", "first"]
    assert find_studies(["digits", "text"])[0] == shipped
    assert find_studies(["other.yaml", "x"]) == ["other.yaml", "--study", "x"]
    assert find_studies(["x", "other.yaml"]) == ["other.yaml", "--study", "x"]
    with pytest.raises(ConfigError, match=r"no file or study 'belif2-cifar100'; did you mean"):
        find_studies(["belif2-cifar100"])


def test_a_study_of_two_files_is_suggested_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ablations.yaml").write_text("studies: {digits: {title: My own}}\n")
    shipped_count = len(read_titles(ROOT / "ablations.yaml"))
    with pytest.raises(ConfigError, match=rf"'b'; of {shipped_count} the nearest are "):
        find_studies(["b"])


def test_data_of_shipped_studies_is_in_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wheel has no folder for data; a checkout has one beside its experiments."""
    path = tmp_path / "site-packages" / "experiments" / "e.yaml"
    path.parent.mkdir(parents=True)
    path.write_text("data: {kind: labelled-text, folder: ../data/imdb}\n")
    monkeypatch.chdir(tmp_path)
    folder = path.parents[1] / "data" / "imdb"
    assert spell_out_experiment(load(path))["data"]["folder"] == str(folder)
    monkeypatch.setattr("lit_attn.schema.yaml_text.SHIPPED", path.parents[1])
    assert spell_out_experiment(load(path))["data"]["folder"] == str(tmp_path / "data" / "imdb")
    assert Where("--set x").folder == Path()


def test_list_names_studies_presets_and_members(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["list"]) == 0
    listed = capsys.readouterr().out
    for name in ("belief2-cifar100", "dcmha-query", "adamw", "language-modelling", "mixture"):
        assert name in listed
    assert main(["list", "schedule"]) == 0
    assert re.search(r"one-cycle +Linear from `start` to the peak", capsys.readouterr().out)
    assert main(["list", "schedul"]) == 2
    assert "did you mean 'schedule'?" in capsys.readouterr().err


COMPLETED = {
    "lit-attn run abl": "ablations.yaml",
    "lit-attn rerun stale abl": "ablations.yaml",
    "lit-attn train ru": "runs",
    "lit-attn run ablations.yaml --dry": "--dry-run",
    "lit-attn run ablations.yaml --out ru": "runs",
    "lit-attn seal ablations.yaml --stu": "--study",
    "lit-attn repo": "report",
}


def test_bash_completes_commands_options_and_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("shtab")
    assert main(["completion", "bash"]) == 0
    script = capsys.readouterr().out
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)
    (tmp_path / "ablations.yaml").touch()
    (tmp_path / "runs").mkdir()
    for words, completed in COMPLETED.items():
        state = f"COMP_WORDS=({words}); COMP_CWORD={words.count(' ')}; COMP_LINE='{words}'"
        call = f"_shtab_lit_attn lit-attn '{words.rpartition(' ')[2]}'"
        # Outside of an interactive shell, bash cannot set options of a completion.
        text = f"{script}\ncompopt() {{ :; }}\n{state}\n{call}\necho ${{COMPREPLY[*]}}"
        done = subprocess.run(
            ["bash"], input=text, text=True, cwd=tmp_path, capture_output=True, check=False
        )
        assert done.stdout.rstrip("/\n") == completed, (words, done.stderr)
