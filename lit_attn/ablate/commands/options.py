"""Checked options of `run`, `rerun` and `seal`, and the studies that they choose."""

from argparse import Namespace
from dataclasses import fields
from pathlib import Path

from pydantic import TypeAdapter

from lit_attn.ablate.commands.arguments import DRY_RUN, PAPER, SLURM, StudyOptions, option_name
from lit_attn.ablate.plan import Matrix, expand
from lit_attn.config.cell import LARGEST_SEED
from lit_attn.config.source import parse_value
from lit_attn.config.study import choose, read_studies
from lit_attn.config.study_values import MOST_SEEDS, SeedChoice, Seeds
from lit_attn.papers.runs import expand_paper
from lit_attn.papers.sizes import find_size_option
from lit_attn.papers.source import read_paper
from lit_attn.schema.errors import ConfigError, suggest
from lit_attn.schema.yaml_text import Mapping, Where

COMMAND_NAMES = ("status", "judge", "logs", "rerun", "seal")
"""Commands that can be meant by a word that is no file."""


def expand_studies(options: StudyOptions) -> list[Matrix]:
    """Return the cells of the chosen studies. Raises ConfigError for a mistake in a study.

    The result changes when step times or trials are new.
    """
    if options.paper is not None:
        return expand_paper(
            options.paper, options.table, options.out, options.set, options.seeds, options.smoke
        )
    assert options.file is not None
    studies = choose(read_studies(options.file), options.study, options.file)
    return [
        expand(study, options.out, options.set, options.seeds, options.smoke) for study in studies
    ]


def read_options(arguments: Namespace) -> StudyOptions:
    """Return the options with default folders and the paper.

    Raises ConfigError for options that do not fit each other.
    """
    _require_positive_numbers(arguments)
    _require_conditions(arguments)
    values = {entry.name: getattr(arguments, entry.name) for entry in fields(StudyOptions)}
    if arguments.out is None:
        values["out"] = Path("runs/smoke") if arguments.smoke else Path("runs")
    if arguments.reports is None:
        values["reports"] = values["out"] / "reports" if arguments.smoke else Path("reports")
    if arguments.paper:
        if arguments.study or arguments.file:
            raise ConfigError("--paper: replaces the file of studies and --study")
        values["paper"] = read_paper(arguments.paper, arguments.small)
    else:
        values["paper"] = None
        _require_file(arguments.file)
    values["set"] = parse_settings(arguments.set)
    values["seeds"] = parse_seeds(arguments.seeds)
    values["cancel"] = arguments.cancel or arguments.cancel_removed
    return StudyOptions(**values)


def _require_positive_numbers(arguments: Namespace) -> None:
    for name in ("jobs", "limit", "stall"):
        number = getattr(arguments, name)
        # A comparison with NaN is false, so this refuses it, too.
        if number is not None and not number > 0:
            raise ConfigError(f"--{name}: the number must be positive")


def _require_conditions(arguments: Namespace) -> None:
    """Raise ConfigError for an option without the option that it needs."""
    conditions = {
        DRY_RUN: arguments.dry_run,
        PAPER: arguments.paper,
        SLURM: arguments.launcher == "slurm",
    }
    for entry in fields(StudyOptions):
        needed = entry.metadata["needs"]
        value = getattr(arguments, entry.name)
        if needed and value and not conditions[needed]:
            option = option_name(entry.name)
            if entry.name == "small":
                option = find_size_option(value)
            raise ConfigError(f"{option}: needs {needed}")
    for name in ("params", "estimate", "quiet_timing"):
        if arguments.json and getattr(arguments, name):
            raise ConfigError(f"--json: lists cells only; leave out {option_name(name)}")


def _require_file(file: Path | None) -> None:
    """Raise ConfigError without a file of studies; it suggests the nearest file or command."""
    if file is None:
        raise ConfigError("name a file of studies, such as ablations.yaml, or --paper NAME")
    if not file.exists():
        files = [str(path) for path in sorted(file.parent.glob("*.y*ml"))]
        choices = [*COMMAND_NAMES, *files]
        raise ConfigError(f"{file}: no such file or command{suggest(str(file), choices)}")


def parse_settings(settings: list[str]) -> Mapping:
    """Return the KEY=VALUE strings of --set as a mapping. Raises ConfigError for a mistake."""
    changes = Mapping(Where("--set"))
    for setting in settings:
        key, equals, value = setting.partition("=")
        where = Where(f"--set {setting}")
        if not equals:
            raise ConfigError(f"{where}: write KEY=VALUE")
        if key in changes:
            raise ConfigError(f"{where}: '{key}' is set twice")
        changes.put(key, parse_value(value, str(where)), where)
    return changes


def parse_seeds(text: str | None) -> SeedChoice | None:
    """Return the count `5` or the seeds `0,50,100` or `7,`. Raises ConfigError for a mistake."""
    if text is None:
        return None
    try:
        numbers = [int(part) for part in text.removesuffix(",").split(",")]
        value = numbers if "," in text else numbers[0]
        seeds: tuple[int, ...] = TypeAdapter(Seeds).validate_python(value)
    except ValueError as error:
        raise ConfigError(
            f"--seeds {text}: write a count up to {MOST_SEEDS:,} such as 5,"
            f" or different seeds up to {LARGEST_SEED} such as 0,50,100 or 7,"
        ) from error
    return seeds if "," in text else numbers[0]
