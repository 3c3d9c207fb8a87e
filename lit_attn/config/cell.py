"""Cell: one variant of a study with one seed, and everything that is needed to run it."""

import contextlib
import hashlib
import json
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any, Self

from pydantic import Field, ValidationError, ValidationInfo, field_validator

from lit_attn.cells.records import Metric
from lit_attn.config.experiment import Experiment
from lit_attn.files import read_text, write_atomic
from lit_attn.models.base import Model
from lit_attn.schema.base import Config, outside_identity
from lit_attn.schema.errors import ConfigError, explain
from lit_attn.schema.limits import parse_json
from lit_attn.schema.plugins import load_parts
from lit_attn.schema.trust import foreign_file, require_trust
from lit_attn.schema.yaml_text import format_yaml, parse_plain
from lit_attn.tasks.metrics import DEFAULT_METRIC, MetricChoice

LARGEST_SEED = 2**32 - 1  # Largest seed that NumPy and Lightning accept.


class Cell(Config):
    """A cell; `config.yaml` in its folder holds it.

    `match_to` is a complete model, so that a cell can be run again alone.
    """

    study: str = Field(description="name of the study")
    variant: str = Field(description="name of the variant")
    seed: int = Field(ge=0, le=LARGEST_SEED, description="random seed")
    experiment: Experiment = Field(description="everything but the variant name and the seed")
    match_to: Model | None = Field(
        None, description="model whose parameter count the FFN width matches; null: as written"
    )
    metric: Metric = Field(DEFAULT_METRIC, description="value that the study compares")
    parts: tuple[Path, ...] = outside_identity((), "files with parts from outside the package")

    @field_validator("metric", mode="before")
    @classmethod
    def _complete_metric(cls, value: Any, info: ValidationInfo) -> Any:
        """Take label, goal and scale that are not written from the metric itself."""
        experiment: Experiment | None = info.data.get("experiment")
        if not isinstance(value, dict) or experiment is None:
            return value
        is_complete = {"label", "goal", "scale"} <= value.keys()
        if is_complete:
            return value
        return MetricChoice.model_validate(value).resolve(experiment)

    @cached_property
    def fingerprint(self) -> str:
        """Hash of what the cell computes, ten hexadecimal digits.

        The names of study and variant, paths, devices and written-out defaults do not change it.
        """
        # The JSON text of a list. Its parts are texts that all seeds of a variant share.
        experiment = self.experiment.identity_json()
        match_to = "null" if self.match_to is None else self.match_to.identity_json()
        return _hash(f'[{experiment}, {match_to}, "{self.metric.selection}", {self.seed}]')

    @cached_property
    def kind(self) -> str:
        """Configuration without the seed; cells with equal values need equal time and memory."""
        match_to = None if self.match_to is None else self.match_to.model_dump(mode="json")
        values = [self.experiment.model_dump(mode="json"), match_to]
        return _hash(json.dumps(values, sort_keys=True))

    @property
    def floor_inputs(self) -> str:
        """Hash of the configuration on which floors depend: the data and the number of steps.

        A rule for text counts as many tokens, in batches of the same form, as the cell sees.
        """
        training = self.experiment.training
        values = [training.epochs, training.max_steps, training.stretch]
        return _hash(f"[{self.experiment.data.identity_json()}, {values}]")

    @property
    def processes(self) -> int:
        """Number of processes that train the cell together, each with a device of its own."""
        return self.experiment.training.devices

    @property
    def folder(self) -> str:
        """Folder of the cell, relative to that of its study."""
        return f"{self.variant}/{self.seed}-{self.fingerprint}"

    def write(self, path: Path) -> None:
        """Write the cell as YAML, atomically."""
        write_atomic(path, format_yaml(self.model_dump(mode="json")))

    @classmethod
    def read(cls, path: Path) -> Self:
        """Return the cell at `path`, whose code is imported. Raises ConfigError as `parse` does."""
        return cls.parse(cls.read_values(path), str(path))

    @classmethod
    @contextlib.contextmanager
    def open_foreign(
        cls, path: Path, *, is_trusted: bool, remedy: str = "add --trust-code"
    ) -> Iterator[Self]:
        """Yield the cell at `path`, which somebody else may have written, to use its model.

        Code that the file names is refused, also when a network is built inside the context, unless
        the file is trusted. Code that reading the file and building the network do not need, such
        as the class of an optimizer, is neither imported nor refused. Raises ConfigError, which
        ends with `remedy` for refused code, and as `read` does.
        """
        # Packages that the user has installed are no part of the file.
        load_parts([])
        values = cls.read_values(path)
        with foreign_file(str(path), remedy, is_trusted):
            yield cls._parse_foreign(values, path, is_trusted)

    @classmethod
    def _parse_foreign(cls, values: Any, path: Path, is_trusted: bool) -> Self:
        """Return the cell; import its `parts`, relative to the file, if the file is trusted."""
        parts = values.get("parts") if isinstance(values, dict) else None
        if not parts:
            return cls.parse(values, str(path))
        if is_trusted:
            if isinstance(parts, list):
                values = values | {"parts": [str(path.parent / str(part)) for part in parts]}
            return cls.parse(values, str(path))
        try:
            return cls._validate(values, str(path))
        except ConfigError:
            # A part can define what this process does not know.
            require_trust(f"parts: {parts}")
            raise

    @classmethod
    def read_values(cls, path: Path) -> Any:
        """Return the plain values in a config.yaml or config.json, without importing anything.

        Raises ConfigError if there is no such file, or if it is not YAML or JSON.
        """
        if not path.exists():
            folder = path.parent
            # The user may have written the seed without the identity, or the folder of a variant,
            # of a study or of all runs.
            neighbours = sorted(folder.parent.glob(f"{folder.name}-*"))
            for depth in ("*", "*/*", "*/*/*"):
                neighbours += sorted(file.parent for file in folder.glob(f"{depth}/{path.name}"))
            if neighbours:
                raise ConfigError(
                    f"{folder}: is not the folder of a cell; did you mean '{neighbours[0]}'?"
                )
        parse = parse_json if path.suffix == ".json" else parse_plain
        return parse(read_text(path), str(path))

    @classmethod
    def parse(cls, written: Any, place: str) -> Self:
        """Import the `parts` of the cell that is `written`, then return the cell.

        Raises ConfigError naming `place` if a part is missing or `written` is not a cell.
        """
        # Anything but a list of files is an error of the validation.
        if isinstance(written, dict) and isinstance(written.get("parts"), list):
            try:
                load_parts(Path(str(part)) for part in written["parts"])
            except ConfigError as error:
                raise ConfigError(f"{place}: parts: {error}") from error
        return cls._validate(written, place)

    @classmethod
    def _validate(cls, written: Any, place: str) -> Self:
        """Return the cell that is `written`; raise ConfigError naming `place` if it is none."""
        try:
            return cls.model_validate(written)
        except ValidationError as error:
            raise explain(error, place) from error


def _hash(text: str) -> str:
    """Return the first ten hexadecimal digits of the SHA-256 of a text."""
    return hashlib.sha256(text.encode()).hexdigest()[:10]
