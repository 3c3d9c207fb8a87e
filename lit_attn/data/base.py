"""Base classes of the data configurations, and the checks of files that they share."""

from abc import abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self, get_type_hints

import torch
from pydantic import Field, PositiveInt

from lit_attn.schema.base import Kind, consistency_check, outside_identity
from lit_attn.schema.errors import ConfigError, suggest, suggest_near
from lit_attn.signatures import Signature


class Data(Kind):
    """Family of the data sets: what a cell trains and evaluates on.

    A member defines `kind`, its own keys, `signature` and `build`. The return annotation of
    `signature` says, before any value is known, with which models and tasks the member goes.
    Batch sizes are totals over all devices.
    """

    has_val_files: ClassVar[bool] = True
    """False if the split val exists only with `validation`, from the training samples."""

    batch_size: PositiveInt = Field(128, description="samples of a training step, over all devices")
    eval_batch_size: PositiveInt = Field(
        512, description="samples of an evaluation batch, over all devices"
    )
    workers: Annotated[int, Field(ge=0)] | None = outside_identity(
        None,
        "processes that prepare batches ahead of the device; 0: the training process; null: by the "
        "device and the cores of the process",
    )

    @property
    def prepares_on_cpu(self) -> bool:
        """True if samples are decoded or augmented on the CPU, so that worker processes help."""
        return False

    @classmethod
    def __pydantic_init_subclass__(cls, **keywords: Any) -> None:
        """Register a member; ConfigError without a signature class as annotation."""
        super().__pydantic_init_subclass__(**keywords)
        kind = cls.model_fields["kind"].default
        if kind not in cls.family:
            return
        annotation = get_type_hints(cls.signature).get("return")
        is_signature = isinstance(annotation, type) and issubclass(annotation, Signature)
        if not is_signature:
            raise ConfigError(
                f"class {cls.__name__} (kind '{kind}'): the return annotation of `signature` has"
                " to be a signature class, as in `def signature(self) -> ImageLabels`"
            )

    @abstractmethod
    def signature(self) -> Signature:
        """Return what one sample is, known without reading a file."""

    @abstractmethod
    def build(self, seed: int, device: torch.device) -> Any:
        """Return the `lit_attn.data.module.DataModule` of a cell with this seed.

        Raises ConfigError if the data cannot be had.
        """

    def check_files(self) -> None:
        """Raise ConfigError if a file, a folder or a split is missing; it reads no data.

        A dry run calls it, and so does the runner before the first cell, where a process then
        builds the data as a cell does. The message begins with the key, as in
        `data.path: no file x.csv`. A folder `root` may be missing, because some data sets are
        written there. A member whose folders have splits or fixed names checks these, too.
        """
        for key, path in find_paths(self.model_dump(), "data"):
            if key != "data.root":
                require_path(key, path)

    def input_paths(self) -> list[Path]:
        """Return the files and folders with the samples; a change makes results stale."""
        return [path for _, path in find_paths(self.model_dump())]

    @property
    def splits(self) -> tuple[str, ...]:
        """Evaluated splits, including those that may exist depending on the files."""
        has_val = self.has_val_files or getattr(self, "validation", False)
        return ("test", "val") if has_val else ("test",)

    @property
    def floor_rules(self) -> tuple[str, ...]:
        """Names of the rules without attention that the data module computes as floors.

        A dry run prints them; it reads no data.
        """
        return ()

    @property
    def micro_batches(self) -> int:
        """Number of micro-batches that make up a training step."""
        return 1

    def at_final_size(self) -> Self:
        """Return the configuration of the last epochs; itself if samples never change in size."""
        return self

    def require_a_batch(self, samples: int) -> None:
        """Raise ValueError if an epoch of training samples, less those held out, has no batch."""
        held_out = getattr(self, "validation", 0)
        if held_out >= samples:
            raise ValueError(f"validation: {held_out} of {samples} samples leave none")
        passes = getattr(self, "epoch_length", 1)
        epoch_samples = passes * (samples - held_out)
        drops_last_batch = getattr(self, "drop_last", True)
        if drops_last_batch and self.batch_size > epoch_samples:
            raise ValueError(
                f"batch_size: {self.batch_size} is more than the {epoch_samples} samples of an"
                f" epoch; {epoch_samples} at most"
            )

    @consistency_check
    def _has_a_batch(self) -> None:
        """Refuse a batch that is larger than the training samples of an epoch."""
        samples = getattr(self, "training_images", None)
        if samples is not None:
            self.require_a_batch(samples)


class TokenData(Data):
    """Data made of tokens, whose steps may be cut into micro-batches."""

    batch_size: PositiveInt = Field(32, description="sequences of a step, over all devices")
    eval_batch_size: PositiveInt = Field(
        32, description="sequences of an evaluation batch, on one device"
    )
    accumulate: PositiveInt = outside_identity(1, "micro-batches of a step, to save memory")

    @property
    def micro_batches(self) -> int:
        return self.accumulate

    @consistency_check
    def _accumulate_divides(self) -> None:
        """Refuse micro-batches of different sizes."""
        if self.batch_size % self.accumulate:
            raise ValueError(
                f"accumulate: {self.accumulate} does not divide the batch of {self.batch_size}"
            )


def require_path(key: str, path: Path) -> None:
    """Raise ConfigError, which begins with `key`, if `path` does not exist.

    The message names the first part of the path that does not exist, or the nearest name beside it.
    Its folder may be any one, such as a repository, so the message does not list it.
    """
    if path.exists():
        return
    missing = path
    while not missing.parent.exists():
        missing = missing.parent
    names = list_names(key, missing.parent)
    hint = suggest_near(missing.name, names)
    if not hint and missing != path:
        hint = f"; '{missing.parent.resolve()}' has no '{missing.name}'"
    raise ConfigError(f"{key}: no file {path}{hint}")


def require_split_folders(key: str, path: Path) -> None:
    """Raise ConfigError unless `path` has the folder train, and test or val."""
    names = list_names(key, path)
    if not (path / "train").is_dir():
        raise ConfigError(f"{key}: no folder {path / 'train'}{suggest('train', names)}")
    if not (path / "test").is_dir() and not (path / "val").is_dir():
        others = [name for name in names if name != "train"]
        hint = suggest("test", others)
        raise ConfigError(f"{key}: no folder {path / 'test'} or {path / 'val'}{hint}")


def list_names(key: str, folder: Path) -> list[str]:
    """Return the visible names in a folder in alphabetical order; ConfigError for another path."""
    try:
        names = sorted(path.name for path in folder.iterdir())
    except OSError as error:
        raise ConfigError(f"{key}: {folder} cannot be read: {error.strerror}") from error
    return [name for name in names if not name.startswith(".")]


def find_paths(value: Any, key: str = "") -> Iterator[tuple[str, Path]]:
    """Yield the paths in the values of a configuration with their keys, which begin with `key`."""
    if isinstance(value, Path):
        yield key, value
    elif isinstance(value, dict):
        for name, item in value.items():
            yield from find_paths(item, f"{key}.{name}")
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from find_paths(item, f"{key}.{index}")
