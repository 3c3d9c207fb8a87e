"""Commands `status` and `logs`, which only read the folders of the cells."""

from argparse import ArgumentParser, Namespace
from pathlib import Path

from lit_attn.ablate.status import describe, print_log, read_cells, read_plans, watch
from lit_attn.schema.commands import Command


class Status(Command):
    """Command that prints the status of the studies in a folder."""

    words = "[--watch] [FOLDER]"
    help = "show done and failed cells"
    description = "Show which cells are done, running or failed, and the time left."
    has_options = True

    def add_arguments(self, parser: ArgumentParser) -> None:
        """Add the folder and --watch."""
        parser.add_argument(
            "where",
            type=Path,
            nargs="?",
            default=Path("runs"),
            help="Folder of runs (default: runs), or of one study in it.",
        )
        parser.add_argument(
            "--watch",
            action="store_true",
            help="Show the status again every few seconds until every cell has ended.",
        )

    def run(self, options: Namespace) -> int:
        """Print the status, with --watch until every cell has ended.

        Raises ConfigError without a study.
        """
        if options.watch:
            watch(options.where)
            return 0
        for plan, folder in read_plans(options.where):
            print(describe(plan, read_cells(plan, folder)))
        return 0


class Logs(Command):
    """Command that prints the log of a cell's last attempt."""

    words = "STUDY/VARIANT/SEED"
    help = "show the log of a cell"
    description = "Show the last log of a cell."

    def add_arguments(self, parser: ArgumentParser) -> None:
        """Add the cell."""
        parser.add_argument(
            "cell",
            metavar="CELL",
            help="STUDY/VARIANT/SEED below the folder runs, or the folder of the cell.",
        )

    def run(self, options: Namespace) -> int:
        """Print the log. Raises ConfigError without such a cell or log."""
        print_log(options.cell)
        return 0
