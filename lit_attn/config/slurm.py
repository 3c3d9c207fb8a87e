"""What a cell asks of SLURM: `slurm:` of a study, and `--slurm KEY=VALUE`."""

import re
from typing import Annotated

from pydantic import AfterValidator, Field, PositiveInt, field_validator

from lit_attn.schema.base import Config

MEMORY = re.compile(r"[1-9][0-9]*[KMGT]?")
# The forms of sbatch's --time: minutes, M:SS, H:MM:SS, D-H, D-H:MM, D-H:MM:SS.
TIME = re.compile(
    r"(?:(?P<days>\d+)-(?P<hours>\d+)(?::(?P<minutes>\d+)(?::(?P<seconds>\d+))?)?"
    r"|(?P<a>\d+)(?::(?P<b>\d+)(?::(?P<c>\d+))?)?)"
)


def _word(value: str) -> str:
    if not re.fullmatch(r"[\w.:,&|*()\[\]@/+-]+", value):
        raise ValueError("needs a name as sbatch takes it, without spaces")
    return value


Word = Annotated[str, AfterValidator(_word)]


class Slurm(Config):
    """The resources of one cell's job; what is left out is the cluster's default."""

    partition: Word | None = Field(
        None, description="partition of the cluster; null: the cluster's default"
    )
    account: Word | None = Field(
        None, description="account that is charged; null: the cluster's default"
    )
    qos: Word | None = Field(None, description="quality of service; null: the cluster's default")
    constraint: Word | None = Field(None, description="features that a node must have; null: none")
    nodes: PositiveInt = Field(1, description="nodes of a cell")
    gpus: PositiveInt | None = Field(None, description="on each node")
    cpus: PositiveInt = Field(1, description="for each process of the cell")
    mem: str | None = Field(None, description="on each node, as 32G")
    time: str = Field("1-0", description="as sbatch takes it: minutes, H:MM:SS, D-H:MM")
    timeouts: int = Field(10, ge=0, description="how often a job out of time is queued again")
    setup: tuple[str, ...] = Field((), description="shell lines that run first")

    @field_validator("time", "mem", mode="before")
    @classmethod
    def _number(cls, value: object) -> object:
        return str(value) if isinstance(value, int) and not isinstance(value, bool) else value

    @field_validator("mem")
    @classmethod
    def _memory(cls, value: str | None) -> str | None:
        if value is not None and not MEMORY.fullmatch(value):
            raise ValueError(f"needs a size as 32G or 500M, not '{value}'")
        return value

    @field_validator("time")
    @classmethod
    def _time(cls, value: str) -> str:
        if not TIME.fullmatch(value) or minutes(value) < 1:
            raise ValueError(f"needs minutes, H:MM:SS or D-H:MM, not '{value}'")
        return value

    @property
    def minutes(self) -> int:
        """The time limit, in whole minutes."""
        return minutes(self.time)


def minutes(time: str) -> int:
    """A time as sbatch takes it, in minutes; a part of one counts whole."""
    found = TIME.fullmatch(time)
    assert found is not None
    if found["days"] is not None:
        days, hours, over, seconds = (
            int(found[name] or 0) for name in ("days", "hours", "minutes", "seconds")
        )
        whole = (24 * days + hours) * 60 + over
    elif found["c"] is not None:
        whole, seconds = 60 * int(found["a"]) + int(found["b"]), int(found["c"])
    else:
        whole, seconds = int(found["a"]), int(found["b"] or 0)
    return whole + (seconds > 0)
