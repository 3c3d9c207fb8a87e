"""Commands `status` and `logs`, which read the folders of the cells, and SLURM's queue."""

from argparse import ArgumentParser, Namespace
from pathlib import Path

from lit_attn.ablate.slurm.queue import describe_queues
from lit_attn.ablate.status import (
    describe,
    describe_screening,
    make_answer,
    print_log,
    read_cells,
    read_plans,
    watch,
)
from lit_attn.schema.commands import Command
from lit_attn.schema.errors import ConfigError


class Status(Command):
    """Command that prints the status of the studies in a folder."""

    words = "[--watch] [FOLDER]"
    page = "running.md"
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
        parser.add_argument(
            "--json",
            action="store_true",
            help="Print JSON (`schema status` prints its schema).",
        )

    def run(self, options: Namespace) -> int:
        """Print the status, with --watch until every cell has ended.

        Raises ConfigError without a study, and for --watch with --json.
        """
        if options.watch and options.json:
            raise ConfigError("--json: prints one status; leave out --watch")
        if options.json:
            print(make_answer(read_plans(options.where)))
            return 0
        if options.watch:
            watch(options.where, describe_queues)
            return 0
        plans = read_plans(options.where)
        queues = describe_queues([folder for _, folder in plans])
        for plan, folder in plans:
            cells = read_cells(plan, folder)
            screening = describe_screening(folder)
            print(describe(plan, cells, queues.get(folder, ()), screening))
        return 0


class Logs(Command):
    """Command that prints the log of a cell's last attempt."""

    words = "STUDY/VARIANT/SEED"
    page = "running.md"
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
