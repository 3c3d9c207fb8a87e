"""Commands of `lit-attn` that run no cells: `init`, `list`, `completion`, and other programs."""

import argparse
import inspect
import json
import shlex
from argparse import Namespace
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import lit_attn
from lit_attn.extras import require
from lit_attn.files import require_writable, write_atomic
from lit_attn.private_names.of_argparse import list_arguments
from lit_attn.schema import errors
from lit_attn.schema.base import Kind, load
from lit_attn.schema.commands import Command
from lit_attn.schema.errors import ConfigError
from lit_attn.schema.plugins import load_parts
from lit_attn.schema.yaml_text import SHIPPED

STUDIES = Path("ablations.yaml")  # File of studies in the working directory.
STARTER = Path(__file__).parent / "starter"  # Files that `lit-attn init` writes.


class Program(Command):
    """Command with a parser of its own: a function `module:function` that gets its words.

    Its module is imported when it runs, because it may import torch.
    """

    description = ""

    def __init__(self, words: str, help: str, function: str) -> None:
        self.words = words
        self.help = help
        self.function = function

    def parser_settings(self, name: str) -> dict[str, Any]:
        """Return settings with which no word is an option, not even --help."""
        return {"add_help": False, "prefix_chars": "\0"}

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Add all words as one argument."""
        parser.add_argument("program_words", nargs=argparse.REMAINDER)

    def run(self, options: Namespace) -> int:
        """Call the function with the words."""
        function: Callable[[list[str]], int] = load(self.function)
        return function(options.program_words)


class Init(Command):
    """Command that writes a first study."""

    words = "[FOLDER]"
    help = "write a first study and experiment"
    page = "tutorial.md"
    description = "Write a commented study and experiment to a folder, without replacing a file."

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Add the folder."""
        parser.add_argument("folder", nargs="?", type=Path, default=Path(), metavar="FOLDER")

    def run(self, options: Namespace) -> int:
        """Write the files. Raises ConfigError if one exists or cannot be written."""
        require_writable(options.folder, "lit-attn init")
        targets = {}
        for source in sorted(STARTER.rglob("*.yaml")):
            targets[source] = options.folder / source.relative_to(STARTER)
        for path in targets.values():
            if path.exists():
                raise ConfigError(f"{path}: exists already; choose a folder without it")
        for source, path in targets.items():
            write_atomic(path, source.read_bytes())
            print(path)
        change_folder = ""
        if options.folder != Path():
            change_folder = f"cd {shlex.quote(str(options.folder))}, then "
        print(f"Next: {change_folder}lit-attn run --dry-run, then lit-attn run")
        return 0


class List(Command):
    """Command that lists what a study can name."""

    words = "[FAMILY]"
    help = "list studies, presets and members"
    description = "List studies, presets and the members of all families, or one of these."

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Add the family."""
        parser.add_argument("family", nargs="?", metavar="FAMILY")

    def run(self, options: Namespace) -> int:
        """Print the lists, or the one of a family. Raises ConfigError for an unknown family."""
        lists = _make_lists()
        # The title of a list of studies is `studies in FILE`.
        families = {title: title.split()[0] for title in lists}
        if options.family is not None:
            errors.require("lit-attn list: no family", options.family, families.values())
        for title, rows in lists.items():
            if options.family in (None, families[title]):
                print(title)
                _print_rows(rows)
        return 0


class Schema(Command):
    """Command that prints the JSON schema of a YAML file or of an answer of --json."""

    words = "experiment|study|ANSWER"
    help = "print a JSON schema of a YAML file or of an answer of --json"
    description = (
        "Print the JSON schema of an experiment or of a file of studies, for an editor, or that of"
        " an answer of --json, for a program: dry-run, status, report, judge, laws or error."
    )

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Add the name of the schema and the plug-ins."""
        parser.add_argument("name", help="Kind of the YAML file, or name of the answer.")
        parser.add_argument(
            "--parts",
            type=Path,
            action="append",
            default=[],
            metavar="FILE",
            help="Plug-in whose members the schema of a file has too; repeat it for several files.",
        )

    def run(self, options: Namespace) -> int:
        """Print the schema. Raises ConfigError for an unknown name."""
        from lit_attn.answer_schemas import ANSWERS, make_schema

        if options.name in ANSWERS:
            schema = make_schema(options.name)
        else:
            # This module imports PyTorch.
            from lit_attn.config.json_schema import SCHEMAS

            errors.require("lit-attn schema: no schema", options.name, [*SCHEMAS, *ANSWERS])
            load_parts(options.parts)
            schema = SCHEMAS[options.name]()
        print(json.dumps(schema, indent=2))
        return 0


def _make_lists() -> dict[str, dict[str, str]]:
    """Return the lists by title; a list has a text for each name."""
    from lit_attn.attention.spec import PRESETS

    # The import of this module registers the members of all families.
    import_module("lit_attn.config.experiment")
    lists = {f"studies in {file}": titles for file, titles in read_study_titles().items()}
    lists["presets"] = dict.fromkeys(PRESETS, "")
    for base in Kind.__subclasses__():
        members = {}
        for name, member in base.family.items():
            members[name] = inspect.getdoc(member) or ""
        lists[base.family_name()] = members
    return lists


def _print_rows(rows: dict[str, str]) -> None:
    """Print the names of a list in a column, each with the first line of its text."""
    for name, text in rows.items():
        width = max(len(name) for name in rows)
        first_line = text.partition("\n")[0]
        print(f"  {name:{width}}  {first_line}".rstrip())


def read_study_titles() -> dict[Path, dict[str, str]]:
    """Return the titles of all studies of ./ablations.yaml and of the package, by their file."""
    # Imported here, because --help imports no PyTorch.
    from lit_attn.config.study import read_titles

    installed = SHIPPED / "ablations.yaml"
    checkout = Path(__file__).parents[1] / "ablations.yaml"
    shipped = installed if installed.exists() else checkout
    titles = {}
    for path in (STUDIES, shipped):
        if path.exists():
            titles[path] = read_titles(path)
    return titles


class Completion(Command):
    """Command that prints a script with which a shell completes `commands`."""

    words = "SHELL"
    help = "print a completion script"
    description = (
        'Print the completion script of a shell; ~/.bashrc: eval "$(lit-attn completion bash)".'
    )

    def __init__(self, commands: Mapping[str, Command]) -> None:
        self.commands = commands

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Add the shell. Raises ConfigError if the package for completion is missing."""
        shtab: Any = require("shtab", "completion", "completion")
        parser.add_argument("shell", choices=shtab.SUPPORTED_SHELLS)

    def run(self, options: Namespace) -> int:
        """Print the script."""
        shtab: Any = require("shtab", "completion", "completion")
        print(shtab.complete(self._make_parser(shtab.FILE), options.shell))
        return 0

    def _make_parser(self, file: dict[str, str]) -> argparse.ArgumentParser:
        """Return a parser of the names and options; words that are no options complete as `file`.

        A command takes any number of words, because studies can follow the file.
        """
        parser = make_overview_parser()
        subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
        for name, command in self.commands.items():
            help_line = f"{command.words}: {command.help}"
            command_parser = subparsers.add_parser(
                name, help=help_line, add_help=command.has_options
            )
            if command.has_options:
                command.add_arguments(command_parser)
            command_parser.add_argument("words", nargs="*")
            for argument in list_arguments(command_parser):
                if argument.type is Path or not argument.option_strings:
                    argument.complete = file  # type: ignore[attr-defined]
        return parser


def make_overview_parser() -> argparse.ArgumentParser:
    """Return the parser of `lit-attn --help` and `lit-attn --version`, without commands."""
    parser = argparse.ArgumentParser(
        prog="lit-attn",
        usage="lit-attn COMMAND ...",
        description="Train the variants of an ablation study and write their tables.",
        epilog="Every command explains its options with --help. More: docs/commands.md",
    )
    parser.add_argument("--version", action="version", version=f"lit_attn {lit_attn.__version__}")
    return parser
