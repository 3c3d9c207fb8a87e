"""Commands of a program, and the router that runs the command of a command line."""

import argparse
import io
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, NoReturn

from lit_attn.schema.errors import OneLineParser, program


class Command(ABC):
    """Command of a program: its arguments, and the work that it does with them."""

    words: str
    """Words after the name of the command, as the overview of all commands shows them."""

    help: str
    """Line of the overview."""

    description: str
    """First paragraph of the command's own help."""

    page: str = "commands.md"
    """Page of docs/ that the command's own help names in its last line."""

    has_options: bool = False
    """True if the completion script completes the options of the command."""

    def parser_settings(self, name: str) -> dict[str, Any]:
        """Return the keyword arguments of the parser of the command, which is called `name`."""
        return {"prog": program(name), "description": self.description, "page": self.page}

    @abstractmethod
    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Add the arguments of the command to its parser."""

    def prepare_words(self, words: list[str]) -> list[str]:
        """Return the words after the name of the command in the form that its parser reads."""
        return words

    def refuse(self, parser: OneLineParser, unknown: list[str]) -> NoReturn:
        """Raise ConfigError for the words that the parser does not know."""
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")

    @abstractmethod
    def run(self, options: argparse.Namespace) -> int:
        """Run the command and return the exit code."""


def route(
    parser: argparse.ArgumentParser, commands: Mapping[str, Command], words: list[str]
) -> int:
    """Run the command that the first word names, and return its exit code.

    `parser` parses what can stand in place of a command, such as --help. Raises ConfigError for
    words that the parser of the command refuses.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # Tables contain characters that an ASCII terminal cannot show.
            stream.reconfigure(errors="backslashreplace")
    chosen, *rest = words
    subparsers = parser.add_subparsers(
        dest="command", metavar="COMMAND", required=True, parser_class=OneLineParser
    )
    for name, command in commands.items():
        help_line = f"{command.words}: {command.help}"
        command_parser = subparsers.add_parser(
            name, help=help_line, **command.parser_settings(name)
        )
        # The arguments of the other commands are not needed, and can need further packages.
        if name == chosen:
            command.add_arguments(command_parser)
            rest = command.prepare_words(rest)
    options, unknown = parser.parse_known_args([chosen, *rest])
    command = commands[options.command]
    if unknown:
        command.refuse(subparsers.choices[options.command], unknown)
    return command.run(options)
