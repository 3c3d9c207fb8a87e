"""Studies: the keys of an `ablations.yaml` (docs/studies.md shows an example of each).

`cells`, `set` and `axes` contain overrides (lit_attn.config.overrides).
"""

import contextlib
import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, ValidationError, ValidationInfo, field_validator

from lit_attn.config.cell import LARGEST_SEED
from lit_attn.config.metrics import MetricChoice
from lit_attn.config.slurm import Slurm
from lit_attn.config.source import Mapping, Sequence, Where, format_value, load, locate
from lit_attn.schema.base import Config, must_be
from lit_attn.schema.errors import ConfigError, find_problem, require, suggest


def _are_mappings(values: Iterable[Any]) -> bool:
    return all(isinstance(value, Mapping) for value in values)


CRITERIA = "a list of parameters, flops and time, each once; or none in place of parameters"
Criteria = Annotated[
    tuple[Literal["parameters", "flops", "time", "none"], ...],
    BeforeValidator(lambda value: value if isinstance(value, list) else (value,)),
    must_be(lambda v: len({*v}) == len(v) > 0 and not {"parameters", "none"} <= {*v}, CRITERIA),
]
# These values stay mappings with lines until ablate.variants expands them.
Overrides = Annotated[Any, must_be(lambda v: isinstance(v, Mapping), "a mapping of keys to values")]
POINTS = "a list of mappings, as in [{residual: full, zz: with}]"
Points = Annotated[Any, must_be(lambda v: isinstance(v, Sequence) and _are_mappings(v), POINTS)]
NAMED = "a mapping of names to mappings, as in {xsa: {attention: xsa}}"
Named = Annotated[
    Any, must_be(lambda v: isinstance(v, Mapping) and _are_mappings(v.values()), NAMED)
]

MOST_SEEDS = 10_000  # A larger number of seeds is probably meant as one seed.


def _expand_count(value: Any) -> Any:
    if isinstance(value, int) and not isinstance(value, bool):
        if not 1 <= value <= MOST_SEEDS:
            limits = f"from 1 to {MOST_SEEDS:,}; for one seed write [{value}]"
            raise ValueError(f"{value} is not a number of seeds {limits}")
        return tuple(range(value))
    if not isinstance(value, list) or not value:
        raise ValueError("needs a number of seeds, as 5, or a list of seeds, as [0, 50, 100]")
    if len({str(seed) for seed in value}) < len(value):
        raise ValueError("a seed is written twice")
    return value


Name = Annotated[str, BeforeValidator(format_value)]
Seed = Annotated[int, Field(ge=0, le=LARGEST_SEED)]
Seeds = Annotated[tuple[Seed, ...], BeforeValidator(_expand_count)]
# A number alone is a mean without a deviation.
Published = Annotated[
    tuple[float, float | None],
    BeforeValidator(lambda value: value if isinstance(value, list) else (value, None)),
]
Label = Annotated[
    str,
    BeforeValidator(format_value),
    must_be(lambda text: text.strip() == text != "" and text.isprintable(), "a text of one line"),
]
EMPTY = Mapping(Where(""))
NO_POINTS = Sequence(Where(""))


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
    seeds: Seeds = Field(description="seeds, or their number: 5 is [0, 1, 2, 3, 4]")
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
        description="texts of variants in tables and figures, by name; names are names of folders",
    )
    published: dict[str, Published] = Field({}, description="means and deviations in printed units")
    metric: MetricChoice = Field(MetricChoice(), description="value that the table compares")
    best_test_epoch: bool = Field(
        False,
        description="show the best epoch of `metric` on the test split in a separate column, as "
        "released code reports it; nothing selects or compares by it",
    )
    parity: str = Field("", description="caption on agreement with released code (docs/parity.md)")
    tune: Overrides = Field(
        EMPTY,
        description="keys with the values to try for every variant, and `select`, `seeds`, "
        "`sampler` and `trials` of the search",
    )
    contrast: str | None = Field(None, description="another study with which leads are compared")
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
        metric = info.data.get("metric")
        if value and metric and not metric.name.startswith("test/"):
            raise ValueError(f"needs a metric of the test split, but metric.name is {metric.name}")
        return value


@dataclass(frozen=True)
class StudySource:
    """A study with the mappings of its file and of its experiment's file.

    `path` is the study's file. `tree` and `experiment` contain the line of every key, `parts`
    absolute paths. `family` is the
    study as written and `level` the value of its axis if `compare_within` has split it.
    """

    path: Path
    name: str
    study: StudyConfig
    tree: Mapping
    experiment: Mapping
    experiment_path: Path
    parts: tuple[Path, ...] = ()
    family: str = ""
    level: str = ""

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
    tree = load(path, texts.get(path))
    for key in tree:
        require(f"{tree.where[key]}: a file of studies has no key", key, ["studies", "files"])
    sources = _read_file(path, tree, texts)
    for further in _further_files(path, tree):
        for name, source in _read_file(further, load(further), texts).items():
            if name in sources:
                raise ConfigError(
                    f"{source.tree.at}: {name}: this study is in {sources[name].tree.at.file}, too"
                )
            sources[name] = source
    for source in sources.values():
        other = source.study.contrast
        if other is not None and other not in sources:
            raise source.error(("contrast",), f"no study '{other}'{suggest(other, sources)}")
    return sources


def read_titles(path: Path) -> dict[str, str]:
    """Return the titles of the studies of `path` and of the files that it names, unchecked."""
    tree = load(path)
    titles = {}
    for file in [path, *_further_files(path, tree)]:
        studies = (tree if file == path else load(file)).get("studies")
        if not isinstance(studies, Mapping):
            continue
        for name, study in studies.items():
            if isinstance(study, Mapping):
                titles[name] = str(study.get("title"))
    return titles


def _read_file(path: Path, tree: Mapping, texts: dict[Path, str]) -> dict[str, StudySource]:
    """Read the studies under the key `studies` of one file, by their names."""
    studies = tree.get("studies")
    if not isinstance(studies, Mapping) or not studies:
        raise ConfigError(f"{path}: needs 'studies', a mapping of names to studies")
    sources = {}
    for name in studies:
        for source in _split(_read(path, name, studies, texts)):
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
        studies = load(further).get("studies")
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
    families = {source.family for source in studies.values()} - {""}
    for name in names:
        require(f"{path}: no study", name, [*studies, *families])
    chosen = [source for source in studies.values() if {source.name, source.family} & {*names}]
    if not names:
        alone = len(studies) == 1
        chosen = [source for source in studies.values() if source.study.default or alone]
    if not names and not chosen:
        text = f"name one with --study: {', '.join(studies)}"
        raise ConfigError(f"{path}: no study has `default: true`; {text}")
    return chosen


def _read(path: Path, name: str, studies: Mapping, texts: dict[Path, str]) -> StudySource:
    where, tree = studies.where[name], studies[name]
    if not isinstance(tree, Mapping):
        raise ConfigError(f"{where}: studies.{name}: needs a mapping of keys to values")
    try:
        study = StudyConfig.model_validate(tree)
    except ValidationError as error:
        keys, message = find_problem(error)
        place = locate(tree, keys) if len(keys) > 1 or keys[0] in tree else where
        key = ".".join(str(part) for part in ("studies", name, *keys))
        raise ConfigError(f"{place}: {key}: {message}") from error
    experiment = path.parent / study.experiment
    if experiment not in texts:
        experiment = _find_file(tree, name, experiment, "experiment")
    files = [(path.parent / part).resolve() for part in study.parts]
    parts = tuple(_find_file(tree, name, f, "parts", number) for number, f in enumerate(files))
    content = load(experiment, texts.get(experiment))
    return StudySource(path, name, study, tree, content, experiment, parts)


def _split(source: StudySource) -> Iterator[StudySource]:
    """Yield the study, or a study for each combination of the values of `compare_within`."""
    study, keys = source.study, source.study.compare_within
    if not keys:
        yield source
        return
    for key in keys:
        if not isinstance(values := study.axes.get(key), Mapping) or not values:
            text = f"'{key}' is no axis of named overrides{suggest(key, study.axes)}"
            raise source.error(("compare_within",), text)
        for index, rule in enumerate(study.exclude):
            if key in rule:
                text = "is an axis of compare_within, and every level has the same variants"
                raise source.error(("exclude", index, key), text)
    if study.cells:
        text = "not possible with compare_within; write an axis of named overrides"
        raise source.error(("cells",), text)
    for names in itertools.product(*(study.axes[key] for key in keys)):
        axes, level = study.axes.copy(), "-".join(names)
        for key, name in zip(keys, names, strict=True):
            axes[key] = Mapping(axes.where[key])
            axes[key].put(name, study.axes[key][name], study.axes[key].where[name])
        changed = study.model_copy(update={"axes": axes, "title": f"{study.title}, {level}"})
        name = f"{source.name}-{level}"
        yield replace(source, name=name, study=changed, family=source.name, level=level)


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
    hint = suggest(path.name, [other.name for other in path.parent.glob(f"*{path.suffix}")])
    raise ConfigError(f"{where}: {key}: no file {path}{hint}")
