"""Studies: the keys of an `ablations.yaml` (docs/studies.md shows an example of each).

`cells`, `set` and `axes` contain overrides (lit_attn.config.overrides).
"""

import contextlib
import functools
import itertools
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

from pydantic import Field, ValidationError, ValidationInfo, field_validator

from lit_attn.config.slurm import Slurm
from lit_attn.config.source import load, locate
from lit_attn.config.study_design import DesignConfig, require_seeds_or_design
from lit_attn.config.study_values import (
    Criteria,
    Label,
    Name,
    Named,
    Overrides,
    Points,
    Published,
    Seeds,
)
from lit_attn.files import read_text
from lit_attn.schema.base import Config
from lit_attn.schema.errors import ConfigError, find_problem, require, suggest
from lit_attn.schema.yaml_text import Mapping, Sequence, Where
from lit_attn.tasks.metrics import MetricChoice

EMPTY = Mapping(Where(""))
NO_POINTS = Sequence(Where(""))


class PaperReference(Config):
    """File of a paper in `experiments/papers`, whose tables publish the values of a study.

    The rows of its tables name the variants of the study. `readings` are further variants, which
    are alternative readings of a row and show its number: names, or patterns in which * is any
    text.
    """

    reader: ClassVar[str] = "lit_attn.papers.study_numbers:read_published"
    """Function that reads the numbers, by its name, because the core imports no product."""

    file: str = Field(description="file of the paper, relative to the study's file")
    readings: tuple[str, ...] = Field((), description="readings that show the number of their row")
    value: str = Field("metric", description="`value` of the columns in the paper's file")


class Latex(Config):
    """LaTeX table of a study."""

    columns: tuple[str, ...] | None = Field(
        None,
        description="keys of columns in lit_attn/report/assets/columns.yaml; null: those of the "
        "key `columns` of the study",
    )


class StudyConfig(Config):
    """A comparison of variants of one experiment with a baseline, over seeds."""

    synonyms: ClassVar[dict[str, str]] = {
        "variants": "cells",
        "variant": "cells",
        "arms": "cells",
        "treatments": "cells",
        "control": "baseline",
        "reference": "baseline",
        "grid": "axes",
        "sweep": "axes",
        "factors": "axes",
        "repeats": "seeds",
        "replicates": "seeds",
        "screening": "design",
        "overrides": "set",
        "defaults": "set",
        "label": "labels",
        "names": "labels",
        "hyperparameters": "tune",
        "search": "tune",
        "config": "experiment",
        "plugins": "parts",
        "imports": "parts",
        "equal": "match",
    }

    title: str = Field(description="title of the table, one line")
    source: str = Field("", description="paper and tables that the study reproduces")
    experiment: str = Field(description="file with the experiment, relative to the study's file")
    parts: tuple[str, ...] = Field((), description="plug-in files, relative to the study's file")
    default: bool = Field(False, description="run the study if no `--study` is given")
    seeds: Seeds = Field(
        (),
        description="seeds, or their number: 5 is [0, 1, 2, 3, 4]; needed without `design`",
    )
    design: DesignConfig | None = Field(
        None,
        description="in place of `seeds`: screen all variants with a few seeds, and confirm the "
        "best with fresh seeds, as in {screen: 2, keep: 5, confirm: 12}",
    )
    set: Overrides = Field(EMPTY, description="overrides for every variant")
    cells: Named = Field(EMPTY, description="named variants and their overrides")
    axes: Overrides = Field(EMPTY, description="axes of a product: keys or names, and their values")
    exclude: Points = Field(NO_POINTS, description="points to leave out of the product")
    baseline: Name = Field(description="name of the variant that the others are compared with")
    compare_within: tuple[str, ...] = Field(
        (),
        description="axes of named overrides, such as sizes; each of their values makes a study of "
        "its own, in which variants are matched and compared",
    )
    match: Criteria = Field(
        ("parameters",),
        description="equal for all variants: `parameters` (the FFN width is solved for), "
        "`flops` or `time` of the training (its length is stretched), `none`, or a list of these",
    )
    labels: dict[str, Label] = Field(
        {},
        description="texts of variants, and of values of axes, in tables and figures, by name; "
        "names of variants are names of folders",
    )
    paper: PaperReference | None = Field(
        None, description="paper whose tables publish the numbers of the variants"
    )
    published: dict[str, Published] = Field(
        {}, description="published numbers that no paper's file has, in printed units"
    )
    metric: MetricChoice = Field(MetricChoice(), description="value that the table compares")
    best_test_epoch: bool = Field(
        False,
        description="show the best epoch of `metric` on the test split in a separate column, as "
        "released code reports it; nothing selects or compares by it",
    )
    parity: str = Field("", description="caption on agreement with released code (docs/parity.md)")
    tune: Overrides = Field(
        EMPTY,
        description="keys with the values to try for every variant, and `select` and `seeds` of "
        "the search",
    )
    columns: tuple[str, ...] | None = Field(
        None,
        description="keys of the columns of tables in lit_attn/report/assets/columns.yaml; null: "
        "variant, value, n, difference, p and step_time",
    )
    latex: Latex = Field(Latex(), description="LaTeX table of the report")
    slurm: Slurm = Field(Slurm(), description="resources of a cell's job, for `--launcher slurm`")

    @field_validator("best_test_epoch")
    @classmethod
    def _needs_a_test_metric(cls, value: bool, info: ValidationInfo) -> bool:
        """Refuse the best test epoch of a metric that is not measured on the test split."""
        metric = info.data.get("metric")
        if value and metric and not metric.name.startswith("test/"):
            raise ValueError(f"needs a metric of the test split, but metric.name is {metric.name}")
        return value


@dataclass(frozen=True)
class StudySource:
    """A study with the mapping of its file and the text of its experiment's file.

    `path` is the study's file. `tree` and `experiment` contain the line of every key, `parts`
    absolute paths. `family` is the study as written and `level` the value of its axis if
    `compare_within` has split it.
    """

    path: Path
    name: str
    study: StudyConfig
    tree: Mapping
    experiment_path: Path
    experiment_text: str
    parts: tuple[Path, ...] = ()
    family: str = ""
    level: str = ""

    @property
    def experiment(self) -> Mapping:
        """The experiment as written. Only that of a chosen study is parsed, which takes long."""
        return _parse(self.experiment_path, self.experiment_text)

    def error(self, keys: tuple[str | int, ...], message: str) -> ConfigError:
        """Return an error that begins with the line of the deepest of `keys`."""
        path = ".".join(str(key) for key in (self.name, *keys))
        return ConfigError(f"{locate(self.tree, keys)}: {path}: {message}")


def read_studies(path: Path, texts: dict[Path, str] | None = None) -> dict[str, StudySource]:
    """Read the studies of an `ablations.yaml` in its order; ConfigError for the first mistake.

    Its key `files` names further files of studies, which come after its own. `texts` are the
    contents of files that are not written yet.
    """
    texts = texts or {}
    tree = _load(path, texts.get(path))
    for key in tree:
        require(f"{tree.where[key]}: a file of studies has no key", key, ["studies", "files"])
    sources = _read_file(path, tree, texts)
    for further in _further_files(path, tree):
        for name, source in _read_file(further, _load(further), texts).items():
            if name in sources:
                raise ConfigError(
                    f"{source.tree.at}: {name}: this study is in {sources[name].tree.at.file}, too"
                )
            sources[name] = source
    return sources


def read_titles(path: Path) -> dict[str, str]:
    """Return the titles of the studies of `path` and of the files that it names, unchecked."""
    tree = _load(path)
    titles = {}
    further_trees = [_load(further) for further in _further_files(path, tree)]
    for file_tree in [tree, *further_trees]:
        studies = file_tree.get("studies")
        if not isinstance(studies, Mapping):
            continue
        for name, study in studies.items():
            if isinstance(study, Mapping):
                titles[name] = str(study.get("title"))
    return titles


def _load(path: Path, text: str | None = None) -> Mapping:
    """Return the mapping in a file of studies, or in its `text`."""
    return _parse(path, read_text(path) if text is None else text)


@functools.lru_cache(maxsize=256)
def _parse(path: Path, text: str) -> Mapping:
    """Return the mapping in the text of a file, which is parsed once: parsing takes long.

    Studies share the experiment of a file, and nothing changes it.
    """
    return load(path, text)


def _read_file(path: Path, tree: Mapping, texts: dict[Path, str]) -> dict[str, StudySource]:
    """Read the studies under the key `studies` of one file, by their names."""
    studies = tree.get("studies")
    if not isinstance(studies, Mapping) or not studies:
        raise ConfigError(f"{path}: needs 'studies', a mapping of names to studies")
    sources = {}
    for name in studies:
        written = _read_study(path, name, studies, texts)
        for source in _split_levels(written):
            sources[source.name] = source
    return sources


def _further_files(path: Path, tree: Mapping) -> list[Path]:
    """Return the files under the key `files`, which lists the names of the studies in each."""
    files = tree.get("files", Mapping(Where("")))
    if not isinstance(files, Mapping):
        raise ConfigError(
            f"{tree.where['files']}: files: needs a mapping of files to the names of their studies"
        )
    further_paths = []
    for name, names in files.items():
        further = _find_file_at(files.where[name], f"files.{name}", path.parent / name)
        studies = _load(further).get("studies")
        defined = list(studies) if isinstance(studies, Mapping) else []
        if not isinstance(names, Sequence) or sorted(map(str, names)) != sorted(defined):
            raise ConfigError(
                f"{files.where[name]}: files.{name}: needs the names of the studies of that file: "
                f"[{', '.join(defined)}]"
            )
        further_paths.append(further)
    return further_paths


def choose(studies: dict[str, StudySource], names: list[str], path: Path) -> list[StudySource]:
    """Return the studies with `names`; without names the default studies, or the only study.

    The name of a study with `compare_within` chooses the studies of all its levels.
    """
    if names:
        return _choose_named(studies, names, path)
    if len(studies) == 1:
        return list(studies.values())
    chosen = [source for source in studies.values() if source.study.default]
    if not chosen:
        raise ConfigError(
            f"{path}: no study has `default: true`; name one with --study: {', '.join(studies)}"
        )
    return chosen


def _choose_named(
    studies: dict[str, StudySource], names: list[str], path: Path
) -> list[StudySource]:
    """Return the studies of which the name or the family is one of `names`."""
    families = {source.family for source in studies.values() if source.family}
    for name in names:
        require(f"{path}: no study", name, [*studies, *families])
    return [source for source in studies.values() if source.name in names or source.family in names]


def _read_study(path: Path, name: str, studies: Mapping, texts: dict[Path, str]) -> StudySource:
    """Read the study `name`; ConfigError for a mistake in its keys."""
    where = studies.where[name]
    tree = studies[name]
    if not isinstance(tree, Mapping):
        raise ConfigError(f"{where}: studies.{name}: needs a mapping of keys to values")
    try:
        study = StudyConfig.model_validate(tree)
    except ValidationError as error:
        keys, message = find_problem(error)
        # A key that is missing has no line; the line of the study's name stands for it.
        is_missing = len(keys) == 1 and keys[0] not in tree
        place = where if is_missing else locate(tree, keys)
        key = ".".join(str(part) for part in ("studies", name, *keys))
        raise ConfigError(f"{place}: {key}: {message}") from error
    require_seeds_or_design(tree, where, f"studies.{name}")
    experiment_path = path.parent / study.experiment
    experiment_text = texts.get(experiment_path)
    if experiment_text is None:
        experiment_path = _find_file(tree, name, experiment_path, "experiment")
        experiment_text = read_text(experiment_path)
    parts = []
    for number, part in enumerate(study.parts):
        part_path = (path.parent / part).resolve()
        parts.append(_find_file(tree, name, part_path, "parts", number))
    source = StudySource(
        path=path,
        name=name,
        study=study,
        tree=tree,
        experiment_path=experiment_path,
        experiment_text=experiment_text,
        parts=tuple(parts),
    )
    if study.design is not None:
        _require_comparable(source)
    return source


def _require_comparable(source: StudySource) -> None:
    """Raise ConfigError for a key beside `design` that a screening cannot have."""
    study = source.study
    reasons = {
        "compare_within": "every level would keep other variants",
        "paper": "a table of a paper has all of its rows",
    }
    for key, reason in reasons.items():
        if getattr(study, key):
            raise source.error(
                ("design",), f"cannot stand beside `{key}`, because {reason}; write `seeds`"
            )
    if len(study.axes) > 1:
        raise source.error(
            ("design",),
            "is not for a product of several axes, because their effects are estimated from all"
            " cells; write `seeds`",
        )
    if len(study.match) > 1:
        raise source.error(
            ("design",),
            "needs one criterion of `match`, because the screening could keep other variants under"
            " each of them",
        )


def _split_levels(source: StudySource) -> list[StudySource]:
    """Return the study, or a study for each combination of the values of `compare_within`."""
    study = source.study
    level_keys = study.compare_within
    if not level_keys:
        return [source]
    _require_levels(source)
    levels = []
    level_axes = [study.axes[key] for key in level_keys]
    for names in itertools.product(*level_axes):
        level = "-".join(names)
        axes = study.axes.copy()
        for key, name in zip(level_keys, names, strict=True):
            written = study.axes[key]
            axes[key] = Mapping(axes.where[key])
            axes[key].put(name, written[name], written.where[name])
        level_study = study.model_copy(update={"axes": axes, "title": f"{study.title}, {level}"})
        levels.append(
            replace(
                source,
                name=f"{source.name}-{level}",
                study=level_study,
                family=source.name,
                level=level,
            )
        )
    return levels


def _require_levels(source: StudySource) -> None:
    """Raise ConfigError if the axes of `compare_within` cannot split the study into levels."""
    study = source.study
    for key in study.compare_within:
        values = study.axes.get(key)
        if not isinstance(values, Mapping) or not values:
            raise source.error(
                ("compare_within",),
                f"'{key}' is no axis of named overrides{suggest(key, study.axes)}",
            )
        for index, rule in enumerate(study.exclude):
            if key in rule:
                raise source.error(
                    ("exclude", index, key),
                    "is an axis of compare_within, and every level has the same variants",
                )
    if study.cells:
        raise source.error(
            ("cells",), "not possible with compare_within; write an axis of named overrides"
        )


def _find_file(tree: Mapping, study: str, path: Path, *keys: str | int) -> Path:
    """Return `path`, which a study names; ConfigError with the line of the key if there is none."""
    return _find_file_at(locate(tree, keys), f"studies.{study}.{keys[0]}", path)


def _find_file_at(where: Where | None, key: str, path: Path) -> Path:
    """Return `path`; ConfigError with the nearest name in its folder if it is not a file."""
    # Python raises these for names that are too long, loops of links, and the character 0.
    with contextlib.suppress(OSError, RuntimeError, ValueError):
        path = path.resolve() if ".." in path.parts else path
        if path.is_file():
            return path
    neighbours = [other.name for other in path.parent.glob(f"*{path.suffix}")]
    raise ConfigError(f"{where}: {key}: no file {path}{suggest(path.name, neighbours)}")
