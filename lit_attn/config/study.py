"""Studies: the keys of an `ablations.yaml`.

    studies:
      NAME:
        title: one line
        source: the paper and its tables
        experiment: experiments/digits_vit.yaml   # relative to this file
        parts: [reflected.py]    # plug-ins, relative to this file
        default: true            # run without --study
        seeds: [0, 50, 100]      # or their number: 5 is [0, 1, 2, 3, 4]
        set: {training.epochs: 10}        # for every variant
        cells:                   # named variants
          standard: {attention: standard}
        axes:                    # and a product of axes
          residual: [full, perpendicular]           # a key and its values, or
          recipe: {short: {training.epochs: 1}, long: {}}    # a name and named overrides
        zip: [[data.batch_size, optimizer.lr]]      # axes that advance together
        exclude: [{residual: full, zz: with}]       # points to leave out of the product
        include: [{residual: value, zz: without}]   # further points, of any keys
        overrides: {residual=full: {optimizer.lr: 1e-4}}   # for names with these terms
        baseline: standard
        match: parameters        # or none: keep the FFN width as written
        published: {standard: [72.01, 0.20]}        # printed mean and sd, or the mean alone
        metric: {selection: last}
        slurm: {partition: gpu, gpus: 1, time: 8:00:00}     # for --launcher slurm

`cells`, `set`, `axes`, `include` and `overrides` contain overrides (lit_attn.config.overrides).
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, ValidationError, field_validator

from lit_attn.config.cell import LARGEST_SEED
from lit_attn.config.metrics import MetricChoice
from lit_attn.config.slurm import Slurm
from lit_attn.config.source import Mapping, Sequence, Where, format_value, load, locate
from lit_attn.schema.base import Config
from lit_attn.schema.errors import ConfigError, find_problem, suggest


def _is_mapping(value: Any) -> Any:
    if not isinstance(value, Mapping):
        raise ValueError("needs a mapping of keys to values")
    return value


def _is_list_of_mappings(value: Any) -> Any:
    if not isinstance(value, Sequence) or not all(isinstance(item, Mapping) for item in value):
        raise ValueError("needs a list of mappings, as in [{residual: full, zz: with}]")
    return value


def _is_mapping_of_mappings(value: Any) -> Any:
    if not isinstance(value, Mapping) or not all(isinstance(v, Mapping) for v in value.values()):
        raise ValueError("needs a mapping of names to mappings, as in {xsa: {attention: xsa}}")
    return value


# These values stay mappings with lines until ablate.axes expands them.
Overrides = Annotated[Any, AfterValidator(_is_mapping)]
Points = Annotated[Any, AfterValidator(_is_list_of_mappings)]
Named = Annotated[Any, AfterValidator(_is_mapping_of_mappings)]

MOST_SEEDS = 10_000
"""Largest number of seeds; a larger number is probably meant as one seed."""
EMPTY = Mapping(Where(""))
NO_POINTS = Sequence(Where(""))


class Study(Config):
    """A comparison of variants of one experiment with a baseline, over seeds."""

    title: str = Field(description="title of the table, one line")
    source: str = Field("", description="paper and tables that the study reproduces")
    experiment: str = Field(description="file with the experiment, relative to the study's file")
    parts: tuple[str, ...] = Field(
        (), description="Python files with plug-ins, relative to the study's file"
    )
    default: bool = Field(False, description="run the study if no `--study` is given")
    seeds: tuple[Annotated[int, Field(ge=0, le=LARGEST_SEED)], ...] = Field(
        description="seeds, or their number: 5 is [0, 1, 2, 3, 4]"
    )
    set: Overrides = Field(EMPTY, description="overrides for every variant")
    cells: Named = Field(EMPTY, description="named variants and their overrides")
    axes: Overrides = Field(
        EMPTY, description="axes of a product: a key and its values, or a name and named overrides"
    )
    zip: tuple[tuple[str, ...], ...] = Field((), description="groups of axes that advance together")
    exclude: Points = Field(NO_POINTS, description="points to leave out of the product")
    include: Points = Field(NO_POINTS, description="further points, of any keys")
    overrides: Named = Field(
        EMPTY, description="overrides for the variants whose names contain these terms"
    )
    baseline: str = Field(description="name of the variant that the others are compared with")
    match: Literal["parameters", "none"] = Field(
        "parameters",
        description="solve the FFN width of each variant for the baseline's number of "
        "parameters, or keep it",
    )
    published: dict[str, tuple[float, float | None]] = Field(
        {}, description="published mean and standard deviation of variants, in printed units"
    )
    metric: MetricChoice = Field(MetricChoice(), description="value that the table compares")
    slurm: Slurm = Field(Slurm(), description="resources of a cell's job, for `--launcher slurm`")

    @field_validator("seeds", mode="before")
    @classmethod
    def _expand_count(cls, value: Any) -> Any:
        if isinstance(value, int) and not isinstance(value, bool):
            if not 1 <= value <= MOST_SEEDS:
                raise ValueError(
                    f"{value} is not a number of seeds from 1 to {MOST_SEEDS:,}; "
                    f"for one seed write [{value}]"
                )
            return tuple(range(value))
        if not isinstance(value, list) or not value:
            raise ValueError("needs a number of seeds, as 5, or a list of seeds, as [0, 50, 100]")
        return value

    @field_validator("seeds")
    @classmethod
    def _refuse_repetition(cls, seeds: tuple[int, ...]) -> tuple[int, ...]:
        if len(set(seeds)) < len(seeds):
            raise ValueError("a seed is written twice")
        return seeds

    @field_validator("baseline", mode="before")
    @classmethod
    def _format_baseline(cls, value: Any) -> Any:
        return value if isinstance(value, list | dict) else format_value(value)

    @field_validator("published", mode="before")
    @classmethod
    def _complete_published(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        return {
            name: item if isinstance(item, list) and len(item) != 1 else (*means, None)
            for name, item in value.items()
            for means in [item if isinstance(item, list) else [item]]
        }


@dataclass(frozen=True)
class StudySource:
    """A study with the mappings of its file and of its experiment's file.

    `tree` and `experiment` contain the line of every key, `parts` absolute paths.
    """

    name: str
    study: Study
    tree: Mapping
    experiment: Mapping
    experiment_path: Path
    parts: tuple[Path, ...] = ()

    def error(self, keys: tuple[str | int, ...], message: str) -> ConfigError:
        """Return an error that begins with the line of the deepest of `keys`."""
        path = ".".join(str(key) for key in (self.name, *keys))
        return ConfigError(f"{locate(self.tree, keys)}: {path}: {message}")


def read_studies(path: Path) -> dict[str, StudySource]:
    """Read the studies of an `ablations.yaml` in its order; ConfigError for the first mistake."""
    tree = load(path)
    for key in tree:
        if key != "studies":
            hint = suggest(key, ["studies"])
            raise ConfigError(f"{tree.where[key]}: unknown key '{key}'{hint}")
    studies = tree.get("studies")
    if not isinstance(studies, Mapping) or not studies:
        raise ConfigError(f"{path}: needs 'studies', a mapping of names to studies")
    return {name: _read(path, name, studies) for name in studies}


def choose(studies: dict[str, StudySource], names: list[str], path: Path) -> list[StudySource]:
    """Return the studies with `names`; without names the default studies, or the only study."""
    for name in names:
        if name not in studies:
            raise ConfigError(f"{path}: no study '{name}'{suggest(name, studies)}")
    chosen = [source for name, source in studies.items() if name in names]
    if not names:
        alone = len(studies) == 1
        chosen = [source for source in studies.values() if source.study.default or alone]
    if not names and not chosen:
        raise ConfigError(
            f"{path}: no study has `default: true`; name one with --study: {', '.join(studies)}"
        )
    return chosen


def _read(path: Path, name: str, studies: Mapping) -> StudySource:
    where, tree = studies.where[name], studies[name]
    if not isinstance(tree, Mapping):
        raise ConfigError(f"{where}: studies.{name}: needs a mapping of keys to values")
    try:
        study = Study.model_validate(tree)
    except ValidationError as error:
        keys, message = find_problem(error)
        place = locate(tree, keys) if len(keys) > 1 or keys[0] in tree else where
        key = ".".join(str(part) for part in ("studies", name, *keys))
        raise ConfigError(f"{place}: {key}: {message}") from error
    experiment = path.parent / study.experiment
    if not _is_file(experiment):
        key = f"studies.{name}.experiment"
        hint = suggest(experiment.name, [path.name for path in experiment.parent.glob("*.y*ml")])
        raise ConfigError(f"{tree.where['experiment']}: {key}: no file {experiment}{hint}")
    parts = tuple((path.parent / part).resolve() for part in study.parts)
    for number, part in enumerate(parts):
        if not _is_file(part):
            key = f"studies.{name}.parts"
            hint = suggest(part.name, [path.name for path in part.parent.glob("*.py")])
            raise ConfigError(f"{locate(tree, ('parts', number))}: {key}: no file {part}{hint}")
    return StudySource(name, study, tree, load(experiment), experiment, parts)


def _is_file(path: Path) -> bool:
    """Return True if the file exists; a name that is too long for the file system does not."""
    try:
        return path.is_file()
    except OSError:
        return False
