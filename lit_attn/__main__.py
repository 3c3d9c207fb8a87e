"""Console command `lit-attn`, also `python -m lit_attn`: every command of the package."""

import argparse
import inspect
import signal
import sys
from collections.abc import Callable
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple

import lit_attn
from lit_attn.ablate.display import silence
from lit_attn.extras import require
from lit_attn.files import write_atomic
from lit_attn.schema.base import Kind, load
from lit_attn.schema.errors import ConfigError, suggest

STUDIES = Path("ablations.yaml")
"""File of studies in the working directory."""
STARTER = Path(__file__).parent / "starter"
"""Files that `lit-attn init` writes."""


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
    "status": Command("[FILE]", "show done and failed cells", RUN, ("status",)),
    "logs": Command("STUDY/VARIANT/SEED", "show the log of a cell", RUN, ("logs",)),
    "report": Command("RUNS", "write the tables again", "lit_attn.report.__main__:main"),
    "train": Command("FOLDER", "train one cell alone", "lit_attn.train:main"),
    "generate": Command("FOLDER", "continue a text", "lit_attn.generate:main"),
    "bench": Command("WHAT", "measure time and memory", "lit_attn.bench.__main__:main"),
    "prepare": Command("SOURCE", "download and tokenise text", "lit_attn.data.prepare:main"),
    "list": Command("[FAMILY]", "list studies, presets and members", "lit_attn.__main__:show"),
    "completion": Command("SHELL", "print a completion script", "lit_attn.__main__:complete"),
}
# Commands with the name of a study, and the parser of their options.
PARSERS = dict.fromkeys(("run", "rerun"), "lit_attn.ablate.__main__:make_parser")


def main(arguments: list[str] | None = None) -> int:
    """Run a command and return its exit code; 2 for a wrong command line or configuration."""
    words = sys.argv[1:] if arguments is None else arguments
    if not words or words[0] in ("-h", "--help", "help"):
        print(make_overview(), end="")
        return 0
    if words[0] == "--version":
        print(f"lit_attn {lit_attn.__version__}")
        return 0
    name, *rest = words
    try:
        if name not in COMMANDS:
            raise ConfigError(f"lit-attn: unknown command '{name}'{suggest(name, COMMANDS)}")
        command = COMMANDS[name]
        if {"-h", "--help"} & set(rest) and name in ("list", "rerun"):
            print(f"usage: lit-attn {name} {command.words}\n\n{command.help.capitalize()}.")
            return 0
        if name in PARSERS and not {"-h", "--help"} & set(rest):
            count = min(1, len(rest)) if name == "rerun" else 0
            rest = [*rest[:count], *find_studies(rest[count:])]
        run: Callable[[list[str]], int] = load(command.main)
        return run([*command.first, *rest])
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    except BrokenPipeError:
        # The reader, such as `head`, has closed the pipe.
        silence(sys.stdout)
        return 128 + signal.SIGPIPE


def make_overview() -> str:
    """Return the list of all commands."""
    words = {f"{name} {command.words}": command.help for name, command in COMMANDS.items()}
    lines = [f"  lit-attn {text:{max(map(len, words))}}  {words[text]}" for text in words]
    head = "lit_attn trains the variants of an ablation study and writes their tables.\n"
    return "\n".join([head, *lines, "", "Every command explains its options with --help.", ""])


def find_studies(words: list[str]) -> list[str]:
    """Return the words of `lit-attn run` as a file, options, and `--study` for each name.

    The file is the one that is named, else ./ablations.yaml, else the file that comes with the
    package. Raises ConfigError, which suggests the nearest name, for a study in neither file.
    """
    names = list(takewhile(lambda word: not word.startswith("-"), words))
    options = words[len(names) :]
    path = STUDIES
    if any(word.partition("=")[0] == "--paper" for word in options):
        return words
    if names and (Path(names[0]).suffix in (".yaml", ".yml") or Path(names[0]).is_file()):
        path = Path(names.pop(0))
    elif names:
        known = {file: list(_read_titles(file)) for file in (STUDIES, _shipped()) if file.exists()}
        path = next((file for file in known if set(names) <= set(known[file])), path)
        every = [study for file in known for study in known[file]]
        for name in names:
            if name not in every:
                raise ConfigError(f"lit-attn: no file or study '{name}'{suggest(name, every)}")
    elif not path.exists():
        raise ConfigError(
            f"{path}: no such file; write one with `lit-attn init`, or name a study, as in "
            "`lit-attn run digits` (`lit-attn list studies` names all)"
        )
    return [str(path), *options, *(word for name in names for word in ("--study", name))]


def init(words: list[str]) -> int:
    """Write a commented study and experiment to a folder, without replacing a file."""
    parser = argparse.ArgumentParser(prog="lit-attn init", description=init.__doc__)
    parser.add_argument("folder", nargs="?", type=Path, default=Path(), metavar="FOLDER")
    folder = parser.parse_args(words).folder
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
    """List studies, presets and the members of families, or one of these with descriptions."""
    from lit_attn.attention.spec import PRESETS

    # The import of this module registers the members of all families.
    load("lit_attn.config.experiment:MEMBERS")
    families = {cls.__name__.lower(): cls.family for cls in Kind.__subclasses__()}
    topic = words[0] if words else None
    if topic in families:
        _print_table({k: inspect.getdoc(m) or "" for k, m in families[topic].items()})
    elif topic not in (None, "studies", "presets"):
        hint = suggest(str(topic), ["studies", "presets", *families])
        raise ConfigError(f"lit-attn list: no family '{topic}'{hint}")
    if topic in (None, "studies"):
        for file in filter(Path.exists, (STUDIES, _shipped())):
            print(f"studies in {file}")
            _print_table(_read_titles(file))
    if topic in (None, "presets"):
        print("presets of attention")
        _print_table(dict.fromkeys(PRESETS, ""))
    if topic is None:
        print("members of families (`lit-attn list FAMILY` describes them)")
        _print_table({name: ", ".join(members) for name, members in families.items()})
    return 0


def complete(words: list[str]) -> int:
    """Print the completion script of a shell; ~/.bashrc: eval "$(lit-attn completion bash)"."""
    shtab: Any = require("shtab", "completion", "completion")
    own = argparse.ArgumentParser(prog="lit-attn completion", description=complete.__doc__)
    own.add_argument("shell", choices=shtab.SUPPORTED_SHELLS)
    shell = own.parse_args(words).shell
    parser = argparse.ArgumentParser(prog="lit-attn")
    commands = parser.add_subparsers(dest="command")
    for name, command in COMMANDS.items():
        parents = [load(PARSERS[name])()] if name in PARSERS else []
        added: Any = commands.add_parser(
            name, help=command.help, parents=parents, conflict_handler="resolve"
        )
        if not parents:
            added.add_argument("words", nargs="*").complete = shtab.FILE
    print(shtab.complete(parser, shell))
    return 0


def _shipped() -> Path:
    """Return the file of studies that comes with the package: of the wheel, or of the checkout."""
    from lit_attn.config.source import SHIPPED

    wheel = SHIPPED / "ablations.yaml"
    return wheel if wheel.exists() else Path(lit_attn.__file__).parents[1] / "ablations.yaml"


def _read_titles(path: Path) -> dict[str, str]:
    """Return the title of every study in a file."""
    from lit_attn.config.source import load as load_yaml

    studies = load_yaml(path).get("studies")
    items = studies.items() if isinstance(studies, dict) else ()
    return {name: str(study.get("title", "")) for name, study in items if isinstance(study, dict)}


def _print_table(rows: dict[str, str]) -> None:
    """Print names and the first lines of their descriptions."""
    width = max(map(len, rows), default=0)
    for name, text in rows.items():
        print(f"  {name:{width}}  {text.partition(chr(10))[0]}".rstrip())


if __name__ == "__main__":
    sys.exit(main())
