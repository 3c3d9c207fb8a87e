"""Command `submit`: write the records of a study to a folder that anybody can judge."""

from argparse import ArgumentParser, Namespace
from pathlib import Path

from lit_attn.ablate.commands.judge import find_folders
from lit_attn.schema.commands import Command
from lit_attn.schema.errors import plural, program

DESCRIPTION = """\
Write the sealed plan of a study, the values of every seed, versions, hashes and the ends of logs to
a folder that anybody can judge. Nothing in it is executed. Folders, addresses, and the names of
this host and user are removed from logs and messages."""


class Submit(Command):
    """Command that writes the submission of a study."""

    words = "STUDY"
    help = "write a folder that others can judge"
    description = DESCRIPTION

    def add_arguments(self, parser: ArgumentParser) -> None:
        """Add the study and the options."""
        parser.add_argument("study", metavar="STUDY", help="Name of a study, or its folder.")
        parser.add_argument(
            "--runs",
            type=Path,
            default=Path("runs"),
            metavar="DIR",
            help="Folder of runs (default: runs).",
        )
        parser.add_argument(
            "--to",
            type=Path,
            metavar="FOLDER",
            help="New folder of the submission (default: submissions/STUDY).",
        )
        parser.add_argument(
            "--hide",
            action="append",
            default=[],
            metavar="WORD",
            help="Remove this word from logs and messages, too, such as the name of a cluster.",
        )

    def run(self, options: Namespace) -> int:
        """Write the folder. Raises ConfigError without such a study, or if the folder exists."""
        # These modules import pandas, which --help does not need.
        from lit_attn.ablate.submission import write_submission
        from lit_attn.report.records.looks import record_look
        from lit_attn.report.records.read import read_studies

        (folder,) = find_folders([options.study], options.runs)
        target = options.to or Path("submissions", folder.name)
        # A judgement shows results, so it is a look, as in `judge`.
        (study,) = read_studies(folder.parent, [folder.name])
        record_look(study, folder)
        submission = write_submission(folder, target, options.hide)
        size = sum(path.stat().st_size for path in target.rglob("*") if path.is_file())
        files = plural(len(submission.files), "file")
        print(f"{target}: {files}, {max(1, size // 1024):,} KiB, hash {submission.hash}")
        if study.seals is None:
            print(
                "Not sealed: the study has no seals.json, so no plan is known to precede results."
            )
        print(
            f"Next: read the logs in {target}, then send the folder and its hash;"
            f" `{program('judge', target)}` judges it"
        )
        return 0
