"""Checked options of `run`, `rerun` and `seal`, and the studies that they choose."""

from argparse import Namespace
from dataclasses import dataclass, fields
from pathlib import Path

from pydantic import TypeAdapter

from lit_attn.ablate.papers import expand_paper
from lit_attn.ablate.plan import Matrix, expand
from lit_attn.config.cell import LARGEST_SEED
from lit_attn.config.paper_sizes import find_size_option
from lit_attn.config.papers import PaperSource, read_paper
from lit_attn.config.source import parse_value
from lit_attn.config.study import choose, read_studies
from lit_attn.config.study_values import MOST_SEEDS, Seeds
from lit_attn.schema.errors import ConfigError, suggest
from lit_attn.schema.yaml_text import Mapping, Where

COMMAND_NAMES = ("status", "judge", "logs", "rerun", "seal")
"""Commands that can be meant by a word that is no file."""


@dataclass(frozen=True)
class StudyOptions:
    """Options that fit each other; the names are those of the command line.

    Either `file` or `paper` names the studies. `changes` are the overrides of --set.
    """

    file: Path | None
    paper: PaperSource | None
    study: list[str]
    table: list[str]
    cost: str | None
    dry_run: bool
    json: bool
    params: bool
    estimate: bool
    gpu: str | None
    jobs: int | None
    seeds: tuple[int, ...] | None
    changes: Mapping
    limit: int | None
    out: Path
    reports: Path
    adopt: bool
    smoke: bool
    stall: float
    launcher: str
    cancel: bool
    cancel_removed: bool
    quiet_timing: bool
    allow_noisy_timing: bool

    @property
    def is_slurm(self) -> bool:
        """True if the cells run as SLURM jobs."""
        return self.launcher == "slurm"

    @property
    def stall_seconds(self) -> float:
        """Seconds without a step after which a cell is killed."""
        return 60 * self.stall

    def expand_studies(self) -> list[Matrix]:
        """Return the cells of the chosen studies. Raises ConfigError for a mistake in a study.

        The result changes when adopted cells, step times or trials are new.
        """
        if self.paper is not None:
            return expand_paper(
                self.paper, self.table, self.out, self.changes, self.seeds, self.smoke
            )
        assert self.file is not None
        studies = choose(read_studies(self.file), self.study, self.file)
        return [
            expand(study, self.out, self.changes, self.seeds, self.smoke, self.estimate)
            for study in studies
        ]


def read_options(arguments: Namespace) -> StudyOptions:
    """Return the options with default folders and the paper.

    Raises ConfigError for options that do not fit each other.
    """
    _require_positive_numbers(arguments)
    _require_conditions(arguments)
    out = arguments.out
    if out is None:
        out = Path("runs/smoke") if arguments.smoke else Path("runs")
    reports = arguments.reports
    if reports is None:
        reports = out / "reports" if arguments.smoke else Path("reports")
    paper = None
    if arguments.paper:
        if arguments.study or arguments.file:
            raise ConfigError("--paper: replaces the file of studies and --study")
        paper = read_paper(arguments.paper, arguments.small)
    else:
        _require_file(arguments.file)
    derived = {
        "paper": paper,
        "changes": parse_settings(arguments.set),
        "seeds": parse_seeds(arguments.seeds),
        "out": out,
        "reports": reports,
        "cancel": arguments.cancel or arguments.cancel_removed,
    }
    written = {}
    for field in fields(StudyOptions):
        if field.name not in derived:
            written[field.name] = getattr(arguments, field.name)
    return StudyOptions(**written, **derived)


def _require_positive_numbers(arguments: Namespace) -> None:
    for name in ("jobs", "limit", "stall"):
        number = getattr(arguments, name)
        # A comparison with NaN is false, so this refuses it, too.
        if number is not None and not number > 0:
            raise ConfigError(f"--{name}: the number must be positive")


def _require_conditions(arguments: Namespace) -> None:
    """Raise ConfigError for an option without the option that it needs."""
    conditions = {
        "--dry-run": (arguments.dry_run, ("params", "estimate", "gpu", "json")),
        "--launcher slurm": (arguments.launcher == "slurm", ("cancel", "cancel_removed")),
        "--paper": (arguments.paper, ("table", "cost")),
    }
    for condition, (is_met, names) in conditions.items():
        for name in names:
            if getattr(arguments, name) and not is_met:
                raise ConfigError(f"--{name.replace('_', '-')}: needs {condition}")
    if arguments.small and not arguments.paper:
        raise ConfigError(f"{find_size_option(arguments.small)}: needs --paper")
    if arguments.gpu and arguments.estimate:
        raise ConfigError("--gpu: lists cells with their memory; leave out --estimate")
    for name in ("params", "estimate", "gpu", "quiet_timing"):
        if arguments.json and getattr(arguments, name):
            option = f"--{name.replace('_', '-')}"
            raise ConfigError(f"--json: lists cells only; leave out {option}")


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


def parse_seeds(text: str | None) -> tuple[int, ...] | None:
    """Return the seeds of `5` (0 to 4), `0,50,100` or `7,`. Raises ConfigError for a mistake."""
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
    return seeds
