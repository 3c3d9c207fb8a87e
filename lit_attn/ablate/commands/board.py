"""Command `board`: open the event files of a study in TensorBoard."""

from argparse import ArgumentParser, Namespace
from pathlib import Path

from lit_attn.ablate.status import read_plans
from lit_attn.schema.commands import Command
from lit_attn.schema.errors import ConfigError


class Board(Command):
    """Command that serves a study in TensorBoard; a run is called VARIANT/SEED-ID."""

    words = "[FOLDER]"
    page = "running.md"
    help = "open a study in TensorBoard"
    description = "Serve the event files of a study in TensorBoard until Ctrl-C."

    def add_arguments(self, parser: ArgumentParser) -> None:
        """Add the folder and the port."""
        parser.add_argument(
            "where",
            type=Path,
            nargs="?",
            default=Path("runs"),
            help="Folder of runs (default: runs), or of one study in it.",
        )
        parser.add_argument(
            "--port", type=int, default=6006, help="Port of the server (default: 6006; 0: any)."
        )

    def run(self, options: Namespace) -> int:
        """Serve the folder. Raises ConfigError without a study or an event file."""
        # It names the folders that are there if this one is none of a study.
        read_plans(options.where)
        if next(options.where.rglob("events.out.tfevents.*"), None) is None:
            raise ConfigError(
                f"{options.where}: has no event files yet; a cell writes them when it starts"
            )
        from tensorboard import default, program

        server = program.TensorBoard(default.get_plugins())
        server.configure(
            argv=["tensorboard", "--logdir", str(options.where), "--port", str(options.port)]
        )
        return int(server.main() or 0)
