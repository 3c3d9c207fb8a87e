"""Command `seal`: print the decisions of a study."""

from argparse import Namespace

from lit_attn.ablate.commands.arguments import StudyCommand


class Seal(StudyCommand):
    """Command that prints the decisions of each study and their hash."""

    words = "[FILE] [STUDY ...]"
    page = "studies.md"
    help = "print the plan and its hash"
    description = (
        "Print the decisions of a study and their hash, to commit them before the first run."
    )

    def run(self, options: Namespace) -> int:
        """Print the seals as JSON."""
        # Imported here, because --help imports no PyTorch.
        from lit_attn.ablate.commands.options import expand_studies, read_options

        for matrix in expand_studies(read_options(options)):
            seal = matrix.seal(matrix.plan().seeds)
            print(seal.model_dump_json(indent=2, exclude={"results"}))
        return 0
