"""Command `run`: train the missing cells of studies, or show what it would do."""

from argparse import Namespace
from typing import TYPE_CHECKING

from lit_attn.ablate.commands.arguments import StudyCommand

if TYPE_CHECKING:
    from lit_attn.ablate.job import Job
    from lit_attn.ablate.plan import Matrix

TARGET = "lit_attn.train:run_cell"


class Run(StudyCommand):
    """Command that trains the missing cells, each with the function `target`."""

    words = "[FILE] [STUDY ...]"
    page = "running.md"
    help = "run missing cells and write tables"
    description = (
        "Train every variant with every seed, then write the tables; the same command continues."
    )

    def __init__(self, target: str = TARGET) -> None:
        self.target = target

    def select(self, matrices: "list[Matrix]", options: Namespace) -> "list[Job] | None":
        """Return the cells to train from their first step, or None for those without a result."""
        return None

    def run(self, options: Namespace) -> int:
        """Run the cells, or do what --cost, --dry-run or --cancel ask for instead."""
        # Imported here, because --help imports no PyTorch.
        from lit_attn.ablate.commands.studies import run_studies

        return run_studies(options, self.target, lambda matrices: self.select(matrices, options))
