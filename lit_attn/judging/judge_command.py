"""Command `judge`: the verdict of every variant, and the next action that can change one."""

import argparse
import math
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import TYPE_CHECKING

from lit_attn.judging.arguments import FOREIGN, add_foreign_arguments
from lit_attn.schema.commands import Command
from lit_attn.schema.errors import ConfigError, require

if TYPE_CHECKING:
    from lit_attn.judging.answers import JudgedTarget
    from lit_attn.report.answers.judged import JudgedStudy
    from lit_attn.report.tables.judgement import Extras

DESCRIPTION = """\
Say for each variant whether it is better or worse than the baseline, equivalent to it, or
undecided, and which action would change a verdict at the lowest cost. A path that is no study holds
the runs of another program: a table (CSV, TSV, JSON lines), an export of W&B, a folder or SQLite
file of MLflow, a folder of TensorBoard, or samples of lm-evaluation-harness. Exit codes: 0: every
verdict is final and decided; 1: a verdict is undecided, or planned seeds are missing; 2: the
command line or the records are wrong."""

OPTIONS = {**FOREIGN, "margin": "--margin", "target": "--target", "level": "--level"}
"""Options for the runs of other programs by their names in a namespace."""


class Judge(Command):
    """Command that prints the verdicts of studies and of the runs of other programs."""

    words = "[STUDY|FILE ...]"
    page = "judge.md"
    help = "say which variants are better or worse"
    description = DESCRIPTION

    def add_arguments(self, parser: ArgumentParser) -> None:
        """Add the studies and the options."""
        add = parser.add_argument
        add(
            "studies",
            nargs="*",
            metavar="STUDY|FILE",
            help="Name of a study, its folder, or runs of another program (default: all studies of"
            " --runs).",
        )
        add(
            "--runs",
            type=Path,
            default=Path("runs"),
            metavar="DIR",
            help="Folder of runs (default: runs).",
        )
        add(
            "--json",
            action="store_true",
            help="Print JSON (`schema judge` prints its schema), also after a mistake"
            " (`schema error`).",
        )
        add(
            "--all",
            action="store_true",
            help="Print all rows and, for a product of factors, all variants and interactions, also"
            " if they do not fit one screen.",
        )
        add(
            "--stream",
            action="store_true",
            help="Variants are ideas, one after another; each is confirmed at a level that later"
            " ideas do not change. Their order is that of the rows, or of the seals of a study.",
        )
        add(
            "--budget",
            metavar="TIME|N",
            default="",
            help="Say what to run next within a time (90min, 2h, 1.5d) of trainings one after"
            " another, or within a number of trainings (40), or that it decides nothing.",
        )
        foreign = parser.add_argument_group("runs of other programs")
        add_foreign_arguments(foreign, default="")
        foreign.add_argument(
            "--target",
            type=float,
            metavar="VALUE",
            help="Compare the mean of each group of runs with this value instead of a baseline, by"
            " a rule that may be asked after every run.",
        )
        foreign.add_argument(
            "--level",
            type=_share,
            metavar="SHARE",
            help="With --target: largest p of a group that passes (default: 0.01).",
        )
        foreign.add_argument(
            "--margin", type=_above_zero, help="Largest difference that does not matter."
        )

    def run(self, options: Namespace) -> int:
        """Print the verdicts and return the exit code. Raises ConfigError without a study."""
        # These modules import pandas, which --help does not need.
        from lit_attn.judging.answers import JudgeAnswer
        from lit_attn.judging.budget import read_budget
        from lit_attn.judging.target_table import draw_target
        from lit_attn.report.answers.entry import write_answer
        from lit_attn.report.tables.judgement import draw_judgement
        from lit_attn.report.tables.terminal import find_screen
        from lit_attn.report.verdicts.judge import is_decided

        _check_target(options)
        if options.budget:
            # A mistake in it is named before anything is read.
            read_budget(options.budget)
        tables, names = _split_words(options.studies, options.runs)
        for name, option in OPTIONS.items():
            value = getattr(options, name)
            if value not in (None, "", False, []) and not tables:
                raise ConfigError(f"{option}: is for the runs of another program; name their file")
        judged: list[tuple[JudgedStudy, Extras]] = []
        _check_budget(options, len(tables))
        targets = []
        if options.target is not None:
            targets = [_judge_target(path, options) for path in tables]
        else:
            judged += [_judge_table(path, options) for path in tables]
        has_skipped = False
        if names or not (judged or targets):
            folders = find_folders(names, options.runs)
            _check_budget(options, len(tables) + len(folders))
            verdicts = _judge_folders(folders, options)
            has_skipped = len(verdicts) < len(folders)
            judged += verdicts
        if options.json:
            studies = [study for study, _ in judged]
            print(write_answer(JudgeAnswer(studies=studies, targets=targets)))
        else:
            screen = find_screen(options.all)
            texts = [draw_judgement(study, screen, extras) for study, extras in judged]
            texts += [draw_target(answer, screen) for answer in targets]
            print("\n\n".join(texts))
        are_decided = all(is_decided(study) for study, _ in judged)
        for answer in targets:
            are_decided &= all(group.verdict != "undecided" for group in answer.groups)
        return 0 if are_decided and not has_skipped else 1


def _check_budget(options: Namespace, studies: int) -> None:
    """Raise ConfigError for a budget of several studies."""
    if options.budget and studies > 1:
        raise ConfigError("--budget: is for one study; name it")


def _above_zero(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"'{text}' is not a number above 0")
    return number


def _share(text: str) -> float:
    number = _above_zero(text)
    if number >= 1:
        raise argparse.ArgumentTypeError(f"'{text}' is not a number between 0 and 1")
    return number


def _check_target(options: Namespace) -> None:
    """Raise ConfigError for options that a target does not have."""
    if options.target is None:
        if options.level is not None:
            raise ConfigError("--level: needs --target; a verdict against a baseline has .05")
        return
    if not math.isfinite(options.target):
        raise ConfigError(f"--target: needs a finite number, not {options.target:g}")
    for name in ("pairs", "baseline", "seed", "margin", "cut_seed", "stream", "budget"):
        if getattr(options, name):
            option = f"--{name.replace('_', '-')}"
            raise ConfigError(f"{option}: is for a baseline; leave it out with --target")


def _judge_target(path: Path, options: Namespace) -> "JudgedTarget":
    """Return the verdicts about the groups of a table against a target."""
    from lit_attn.judging.runs import judge_target
    from lit_attn.judging.target import DEFAULT_LEVEL

    return judge_target(
        path,
        options.metric,
        options.target,
        level=options.level or DEFAULT_LEVEL,
        variant=options.variant,
        where=options.where,
        states=options.states,
        reader=options.reader,
    )


def _split_words(words: list[str], runs: Path) -> tuple[list[Path], list[str]]:
    """Return the paths of other programs' runs, and the studies that are named."""
    tables = []
    names = []
    for word in words:
        path = Path(word)
        is_study = (path / "plan.json").is_file() or (runs / word / "plan.json").is_file()
        if path.exists() and not is_study:
            tables.append(path)
        elif path.suffix and not is_study:
            raise ConfigError(f"{path}: no such file or folder")
        else:
            names.append(word)
    return tables, names


def _judge_table(path: Path, options: Namespace) -> "tuple[JudgedStudy, Extras]":
    """Return the verdicts about the runs of another program, and the effects of its factors."""
    from lit_attn.judging.runs import judge_with_record
    from lit_attn.report.tables.effects import find_effects
    from lit_attn.report.tables.judgement import Extras

    if next(path.glob("*/plan.json"), None) is not None:
        raise ConfigError(f"{path}: is a folder of studies; write --runs {path}")
    record, judged = judge_with_record(
        path,
        options.metric,
        pairs=options.pairs or "",
        baseline=options.baseline,
        variant=options.variant,
        seed=options.seed,
        margin=options.margin,
        cut_seed=options.cut_seed,
        where=options.where,
        states=options.states,
        reader=options.reader,
        stream=options.stream,
        budget=options.budget,
    )
    effects = [] if options.stream else find_effects(record)
    return judged, Extras(effects)


def _judge_folders(folders: list[Path], options: Namespace) -> "list[tuple[JudgedStudy, Extras]]":
    """Return the verdicts of the studies in `folders`.

    A study that cannot be judged is skipped with a warning. Raises ConfigError if none can.
    """
    from lit_attn.report.records.skipped import LOG, describe_failure

    judged: list[tuple[JudgedStudy, Extras]] = []
    for folder in folders:
        try:
            judged.append(_judge_folder(folder, options))
        except Exception as error:
            reason = describe_failure(error)
            if folder == folders[-1] and not judged:
                raise ConfigError(reason) from error
            LOG.warning("%s: %s. This study has no verdict.", folder, reason)
    return judged


def _judge_folder(folder: Path, options: Namespace) -> "tuple[JudgedStudy, Extras]":
    """Return the verdicts of the study in a folder, its effects and floor, and record a look."""
    from lit_attn.ablate.origin import find_file
    from lit_attn.judging.budget import plan_within, read_budget
    from lit_attn.judging.stream_verdicts import judge_sealed_stream
    from lit_attn.report.records.looks import record_look
    from lit_attn.report.records.read import read_studies
    from lit_attn.report.tables.effects import find_effects
    from lit_attn.report.tables.judgement import Extras
    from lit_attn.report.verdicts.floors import find_best_floor
    from lit_attn.report.verdicts.judge import judge_study
    from lit_attn.report.verdicts.next_action import make_study_command

    (study,) = read_studies(folder.parent, [folder.name])
    command = make_study_command(folder, find_file(folder), study.plan)
    is_stream = options.stream and not study.plan.is_smoke
    judge = judge_sealed_stream if is_stream else judge_study
    judged = judge(study, command)
    if options.budget:
        judged = plan_within(study, judged, read_budget(options.budget), command)
    record_look(study, folder)
    effects = [] if options.stream else find_effects(study)
    return judged, Extras(effects, find_best_floor(study))


def find_folders(names: list[str], runs: Path) -> list[Path]:
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
