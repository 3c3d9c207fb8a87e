"""A cell to run, as the runner, the commands and the jobs of a cluster know it."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lit_attn.cells.folder import State, read_cell
from lit_attn.files import write_atomic
from lit_attn.schema.yaml_text import format_yaml

if TYPE_CHECKING:
    from lit_attn.config.cell import Cell


@dataclass(frozen=True)
class Job:
    """A cell to run, with its folder and the identity of its result.

    `settings` are the values in its config.yaml that all cells of a variant share. They are plain,
    so a process that only starts cells imports neither PyTorch nor the plug-ins of the cells.
    """

    folder: Path
    study: str
    variant: str
    seed: int
    identity: str
    settings: dict[str, Any]

    @property
    def name(self) -> str:
        return f"{self.study}/{self.variant}/{self.seed}"

    @property
    def path(self) -> str:
        """Folder of the cell, relative to that of its study."""
        return f"{self.folder.parent.name}/{self.folder.name}"

    @property
    def processes(self) -> int:
        """Number of processes that train the cell together, each with a device of its own."""
        return int(self.settings["experiment"]["training"]["devices"])

    @property
    def config(self) -> dict[str, Any]:
        """All values of the config.yaml."""
        return {"study": self.study, "variant": self.variant, "seed": self.seed, **self.settings}

    @cached_property
    def cell(self) -> "Cell":
        """The validated configuration."""
        # Imported here, because it imports PyTorch.
        from lit_attn.config.cell import Cell

        return Cell.parse(self.config, str(self.folder))

    def state(self) -> State:
        return read_cell(self.folder, self.identity).state

    def write_config(self) -> None:
        write_atomic(self.folder / "config.yaml", format_yaml(self.config))
