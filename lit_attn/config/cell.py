"""A cell: one variant of one study with one seed, resolved to all that is needed to run it."""

import hashlib
import json
from functools import cached_property
from pathlib import Path
from typing import Self

import yaml
from pydantic import Field, ValidationError

from lit_attn.cells.records import Metric
from lit_attn.config.experiment import Experiment
from lit_attn.config.models.base import Model
from lit_attn.files import write_atomic
from lit_attn.schema.base import Config, outside_identity
from lit_attn.schema.errors import ConfigError, explain
from lit_attn.schema.plugins import load_parts

LARGEST_SEED = 2**32 - 1
"""NumPy's and Lightning's."""


class Cell(Config):
    """`config.yaml` of a cell's folder.

    `match_to` is the model whose parameter count the FFN width is solved for; null where the width
    stands as written. It holds the whole model, so that a cell can be run again alone.
    """

    study: str = Field(description="name of the study")
    variant: str = Field(description="name of the variant")
    seed: int = Field(ge=0, le=LARGEST_SEED, description="random seed")
    experiment: Experiment = Field(
        description="everything that is trained, except variant name and seed"
    )
    match_to: Model | None = Field(
        None,
        description="model whose parameter count the FFN width is solved for; null: the "
        "width as written",
    )
    metric: Metric = Field(Metric(), description="value that the study compares")
    parts: tuple[Path, ...] = outside_identity((), "files with parts from outside the package")

    @cached_property
    def fingerprint(self) -> str:
        """Ten hexadecimal digits of what the cell computes.

        The study's and the variant's names, paths, devices and spelled-out defaults leave it alone.
        """
        match_to = None if self.match_to is None else self.match_to.identity()
        computed = [self.experiment.identity(), match_to, self.metric.selection, self.seed]
        text = json.dumps(computed, sort_keys=True, default=str)
        return hashlib.sha256(text.encode()).hexdigest()[:10]

    @cached_property
    def kind(self) -> str:
        """What cells have in common that need the same time and memory: everything but the seed."""
        match_to = None if self.match_to is None else self.match_to.model_dump(mode="json")
        text = json.dumps([self.experiment.model_dump(mode="json"), match_to], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:10]

    @property
    def folder(self) -> str:
        """The cell's folder below its study's."""
        return f"{self.variant}/{self.seed}-{self.fingerprint}"

    def write(self, path: Path) -> None:
        """Write as YAML: temp, fsync, rename."""
        write_atomic(path, yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False))

    @classmethod
    def read(cls, path: Path) -> Self:
        """The cell, after its `parts` have been imported.

        Raises ConfigError where the file is missing, not YAML or not a cell, or a part's is.
        """
        try:
            written = yaml.safe_load(path.read_text(encoding="utf-8"))
            # What is no list of files is an error of the whole.
            if isinstance(written, dict) and isinstance(written.get("parts"), list):
                _load(path, written["parts"])
            return cls.model_validate(written)
        except OSError as error:
            raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
        except yaml.YAMLError as error:
            raise ConfigError(f"{path}: not YAML: {' '.join(str(error).split())}") from error
        except ValidationError as error:
            raise explain(error, str(path)) from error


def _load(path: Path, parts: list[object]) -> None:
    """The files with parts that a cell's file names."""
    try:
        load_parts(Path(str(part)) for part in parts)
    except ConfigError as error:
        raise ConfigError(f"{path}: parts: {error}") from error
