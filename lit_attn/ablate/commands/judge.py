"""Command `judge`: the verdict of every variant, and the next action that can change one."""

from argparse import ArgumentParser, Namespace
from pathlib import Path

from lit_attn.schema.commands import Command
from lit_attn.schema.errors import ConfigError, require

DESCRIPTION = """\
Say for each variant whether it is better or worse than the baseline, equivalent to it, or
undecided, and which action would change a verdict at the lowest cost. Exit codes: 0: every verdict
is final and decided; 1: a verdict is undecided, or planned seeds are missing; 2: the command line
or the records are wrong."""


class Judge(Command):
    """Command that prints the verdicts of studies."""

    words = "[STUDY ...]"
    help = "say which variants are better or worse"
    description = DESCRIPTION

    def add_arguments(self, parser: ArgumentParser) -> None:
        """Add the studies and the options."""
        parser.add_argument(
            "studies",
            nargs="*",
            metavar="STUDY",
            help="Name of a study, or its folder (default: all studies of --runs).",
        )
        parser.add_argument(
            "--runs",
            type=Path,
            default=Path("runs"),
            metavar="DIR",
            help="Folder of runs (default: runs).",
        )
        parser.add_argument(
            "--json",
            action="store_true",
            help="Print JSON (schema: lit_attn/report/schemas/judge.json).",
        )

    def run(self, options: Namespace) -> int:
        """Print the verdicts and return the exit code. Raises ConfigError without a study."""
        # These modules import pandas, which --help does not need.
        from lit_attn.ablate.origin import find_file
        from lit_attn.report.answers import JudgeAnswer, write_answer
        from lit_attn.report.judge import is_decided, judge_study, make_study_command
        from lit_attn.report.looks import record_look
        from lit_attn.report.read import read_studies
        from lit_attn.report.terminal import draw_judgement

        judged = []
        for folder in _find_folders(options.studies, options.runs):
            # One by one, so that the records of one study are in memory at a time.
            for study in read_studies(folder.parent, [folder.name]):
                command = make_study_command(folder, find_file(folder), study.plan)
                judged.append(judge_study(study, command))
                record_look(study, folder)
        if options.json:
            print(write_answer(JudgeAnswer(studies=judged)))
        else:
            print("\n\n".join(draw_judgement(study) for study in judged))
        return 0 if all(is_decided(study) for study in judged) else 1


def _find_folders(names: list[str], runs: Path) -> list[Path]:
    """Return the folders of the named studies, or of all studies in `runs`.

    Raises ConfigError, which suggests the nearest name, for a study that is not in `runs`.
    """
    planned = sorted(path.parent for path in runs.glob("*/plan.json"))
    if not names:
        if not planned:
            raise ConfigError(
                f"{runs}: contains no study (no */plan.json);"
                " name the folder of the runs with --runs"
            )
        return planned
    folders = []
    for name in names:
        folder = Path(name)
        if (folder / "plan.json").is_file():
            folders.append(folder)
            continue
        require(f"{runs}: has no study", name, [path.name for path in planned])
        folders.append(runs / name)
    return folders
