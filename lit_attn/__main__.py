"""Console command `lit-attn`, also `python -m lit_attn`: every command of the package."""

import argparse
import inspect
import sys
from collections.abc import Callable
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple

import lit_attn
from lit_attn.config.source import SHIPPED
from lit_attn.config.study import read_titles
from lit_attn.extras import require
from lit_attn.files import require_writable, write_atomic
from lit_attn.schema import errors
from lit_attn.schema.base import Kind, load
from lit_attn.schema.errors import ConfigError, OneLineParser, command

STUDIES = Path("ablations.yaml")  # File of studies in the working directory.
STARTER = Path(__file__).parent / "starter"  # Files that `lit-attn init` writes.


class Command(NamedTuple):
    """Command: its words and help, and the function that gets `first` and the words."""

    words: str
    help: str
    main: str
    first: tuple[str, ...] = ()


RUN = "lit_attn.ablate.__main__:main"
COMMANDS = {
    "init": Command("[FOLDER]", "write a first study and experiment", "lit_attn.__main__:init"),
    "run": Command("[FILE] [STUDY ...]", "run missing cells and write tables", RUN),
    "rerun": Command("stale|failed|CELL [FILE] [STUDY ...]", "run cells again", RUN, ("rerun",)),
    "status": Command("[FOLDER]", "show done and failed cells", RUN, ("status",)),
    "seal": Command("[FILE] [STUDY ...]", "print the plan and its hash", RUN, ("seal",)),
    "logs": Command("STUDY/VARIANT/SEED", "show the log of a cell", RUN, ("logs",)),
    "report": Command("RUNS", "write the tables again", "lit_attn.report.__main__:main"),
    "train": Command("FOLDER", "train one cell alone", "lit_attn.train:main"),
    "generate": Command("FOLDER", "continue a text", "lit_attn.generate:main"),
    "export": Command("hub FOLDER", "write weights and a model card", "lit_attn.hub:main"),
    "bench": Command("WHAT", "measure time and memory", "lit_attn.bench.__main__:main"),
    "prepare": Command("SOURCE", "download and tokenise text", "lit_attn.data.prepare:main"),
    "list": Command("[FAMILY]", "list studies, presets and members", "lit_attn.__main__:show"),
    "completion": Command("SHELL", "print a completion script", "lit_attn.__main__:complete"),
}


@command
def main(arguments: list[str] | None = None) -> int:
    """Run a command and return its exit code; 2 for a wrong command line or configuration."""
    words = sys.argv[1:] if arguments is None else arguments
    name, *rest = words or ["--help"]
    if name in ("-h", "--help", "--version"):
        make_parser().parse_args([name])
    errors.require("lit-attn: unknown command", name, COMMANDS)
    if name in ("run", "seal"):
        rest = find_studies(rest)
    elif name == "rerun" and rest and not {"-h", "--help"} & set(rest):
        rest = [*rest[:1], *find_studies(rest[1:])]
    run: Callable[[list[str]], int] = load(COMMANDS[name].main)
    return run([*COMMANDS[name].first, *rest])


def make_parser(file: dict[str, str] | None = None) -> argparse.ArgumentParser:
    """Return the parser of the commands; for completion of names by `file`, with options."""
    text = "Train the variants of an ablation study and write their tables."
    epilog = "Every command explains its options with --help."
    parser = argparse.ArgumentParser("lit-attn", "lit-attn COMMAND ...", text, epilog)
    parser.add_argument("--version", action="version", version=f"lit_attn {lit_attn.__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, entry in COMMANDS.items():
        is_run = file and name in ("run", "rerun", "seal")
        options = [load("lit_attn.ablate.__main__:make_parser")()] if is_run else []
        text = f"{entry.words}: {entry.help}"
        command = commands.add_parser(name, help=text, parents=options, add_help=False)
        if file:
            command.add_argument("words", nargs="*")
            for argument in command._actions:
                if argument.type is Path or not argument.option_strings:
                    argument.complete = file  # type: ignore[attr-defined]
    return parser


def find_studies(words: list[str]) -> list[str]:
    """Return the words of `lit-attn run` as a file, options, and `--study` for each name.

    The file is the one that is named, else ./ablations.yaml, else the file that comes with the
    package. Raises ConfigError, which suggests the nearest name, for a study in neither file.
    """
    names = list(takewhile(lambda word: not word.startswith("-"), words))
    options, path = words[len(names) :], STUDIES
    if any(word.partition("=")[0] in ("-h", "--help", "--paper") for word in options):
        return words
    if names and (Path(names[0]).suffix in (".yaml", ".yml") or Path(names[0]).is_file()):
        path = Path(names.pop(0))
    elif names:
        studies = _read_titles()
        path = next((file for file in studies if set(names) <= studies[file].keys()), path)
        every = [study for file in studies for study in studies[file]]
        for name in names:
            errors.require("lit-attn: no file or study", name, every)
    elif not path.exists():
        text = "write one with `lit-attn init`, or name a study, as in `lit-attn run digits`"
        raise ConfigError(f"{path}: no such file; {text} (`lit-attn list studies` names all)")
    return [str(path), *options, *(word for name in names for word in ("--study", name))]


def init(words: list[str]) -> int:
    """Write a commented study and experiment to a folder, without replacing a file."""
    parser = OneLineParser(prog="lit-attn init", description=init.__doc__)
    parser.add_argument("folder", nargs="?", type=Path, default=Path(), metavar="FOLDER")
    folder = parser.parse_args(words).folder
    require_writable(folder, "lit-attn init")
    files = {path: folder / path.relative_to(STARTER) for path in sorted(STARTER.rglob("*.yaml"))}
    for path in files.values():
        if path.exists():
            raise ConfigError(f"{path}: exists already; choose a folder without it")
    for source, path in files.items():
        write_atomic(path, source.read_bytes())
        print(path)
    print("Next: lit-attn run --dry-run, then lit-attn run")
    return 0


def show(words: list[str]) -> int:
    """List studies, presets and the members of all families, or one of these."""
    from lit_attn.attention.spec import PRESETS

    parser = OneLineParser(prog="lit-attn list", description=show.__doc__)
    parser.add_argument("family", nargs="?", metavar="FAMILY")
    family = parser.parse_args(words).family
    # The import of this module registers the members of all families.
    load("lit_attn.config.experiment:MEMBERS")
    lists = {f"studies in {file}": titles for file, titles in _read_titles().items()}
    lists["presets"] = dict.fromkeys(PRESETS, "")
    for cls in Kind.__subclasses__():
        lists[cls.family_name()] = {k: inspect.getdoc(m) or "" for k, m in cls.family.items()}
    names = [name.split()[0] for name in lists]
    if family is not None:
        errors.require("lit-attn list: no family", family, names)
    for name, rows in lists.items():
        if family in (None, name.split()[0]):
            print(name)
            for word, text in rows.items():
                first_line = text.partition("\n")[0]
                print(f"  {word:{max(map(len, rows))}}  {first_line}".rstrip())
    return 0


def complete(words: list[str]) -> int:
    """Print the completion script of a shell; ~/.bashrc: eval "$(lit-attn completion bash)"."""
    shtab: Any = require("shtab", "completion", "completion")
    parser = OneLineParser(prog="lit-attn completion", description=complete.__doc__)
    parser.add_argument("shell", choices=shtab.SUPPORTED_SHELLS)
    print(shtab.complete(make_parser(shtab.FILE), parser.parse_args(words).shell))
    return 0


def _read_titles() -> dict[Path, dict[str, str]]:
    """Return the titles of all studies of ./ablations.yaml and of the package, by their file."""
    wheel, checkout = SHIPPED / "ablations.yaml", Path(__file__).parents[1] / "ablations.yaml"
    paths = [STUDIES, wheel if wheel.exists() else checkout]
    return {path: read_titles(path) for path in paths if path.exists()}


if __name__ == "__main__":
    sys.exit(main())
