"""Command `rerun`: train chosen cells again."""

import argparse
import sys
from typing import TYPE_CHECKING, Any

from lit_attn.ablate.commands.arguments import split_words
from lit_attn.ablate.commands.run import Run
from lit_attn.ablate.display import write_line
from lit_attn.schema.errors import ConfigError

if TYPE_CHECKING:
    from lit_attn.ablate.job import Job
    from lit_attn.ablate.plan import Matrix


class Rerun(Run):
    """Command that sets the chosen cells aside and trains them again from their first step."""

    words = "stale|failed|CELL [FILE] [STUDY ...]"
    help = "run cells again"
    description = "Set the cells of CHOICE aside and train them again from their first step."

    def parser_settings(self, name: str) -> dict[str, Any]:
        """Return the settings of `Run`, with the first word in the usage."""
        settings = super().parser_settings(name)
        return {**settings, "prog": f"{settings['prog']} CHOICE"}

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Add the arguments of `Run`, and the choice as an option that the help does not show."""
        super().add_arguments(parser)
        # CHOICE is no positional argument: argparse would find no FILE in `CHOICE --dry-run FILE`,
        # because it looks for both in front of the option.
        parser.add_argument("--choice", help=argparse.SUPPRESS)

    def prepare_words(self, words: list[str]) -> list[str]:
        """Return the words with the first name, the choice, as an option."""
        if "-h" in words or "--help" in words:
            return words
        names, options = split_words(words)
        if not names or len(words) < 2:
            raise ConfigError("rerun: needs stale, failed or STUDY/VARIANT/SEED, and then the file")
        choice, *rest = names
        return [f"--choice={choice}", *rest, *options]

    def select(self, matrices: "list[Matrix]", options: argparse.Namespace) -> "list[Job]":
        """Return the chosen cells. Raises ConfigError for an unknown cell."""
        # Imported here, because --help imports no PyTorch.
        from lit_attn.ablate.rerun import select_cells

        cells = select_cells(matrices, options.choice)
        if not cells:
            # JSON is the only text on stdout.
            write_line(f"rerun: no cell is {options.choice}", sys.stderr)
        return cells
