"""Resources of a cell's SLURM job: `slurm:` of a study, and `--slurm KEY=VALUE`."""

import re
from typing import Annotated

from pydantic import AfterValidator, Field, PositiveInt, field_validator

from lit_attn.schema.base import Config

MEMORY = re.compile(r"[1-9][0-9]*[KMGT]?")
# Forms of sbatch's --time: minutes, M:SS, H:MM:SS, D-H, D-H:MM, D-H:MM:SS.
TIME = re.compile(
    r"(?:(?P<days>\d+)-(?P<hours>\d+)(?::(?P<minutes>\d+)(?::(?P<seconds>\d+))?)?"
    r"|(?P<a>\d+)(?::(?P<b>\d+)(?::(?P<c>\d+))?)?)"
)


def _check_word(value: str) -> str:
    if not re.fullmatch(r"[\w.:,&|*()\[\]@/+-]+", value):
        raise ValueError("needs a name without spaces, as for sbatch")
    return value


Word = Annotated[str, AfterValidator(_check_word)]


class Slurm(Config):
    """Resources of one cell's job."""

    partition: Word | None = Field(
        None, description="partition of the cluster; null: the cluster's default"
    )
    account: Word | None = Field(
        None, description="account that is charged; null: the cluster's default"
    )
    qos: Word | None = Field(None, description="quality of service; null: the cluster's default")
    constraint: Word | None = Field(None, description="features that a node must have; null: none")
    nodes: PositiveInt = Field(1, description="nodes of a cell")
    gpus: PositiveInt | None = Field(None, description="GPUs of each node; null: no GPUs")
    cpus: PositiveInt = Field(1, description="CPUs of each process of the cell")
    mem: str | None = Field(
        None, description="memory of each node, as 32G; null: the cluster's default"
    )
    time: str = Field("1-0", description="time limit: minutes, H:MM:SS or D-H:MM")
    timeouts: int = Field(
        10, ge=0, description="times that a job that ran out of time is queued again"
    )
    setup: tuple[str, ...] = Field((), description="shell lines that run before the cell")

    @field_validator("time", "mem", mode="before")
    @classmethod
    def _number_to_text(cls, value: object) -> object:
        return str(value) if isinstance(value, int) and not isinstance(value, bool) else value

    @field_validator("mem")
    @classmethod
    def _check_memory(cls, value: str | None) -> str | None:
        if value is not None and not MEMORY.fullmatch(value):
            raise ValueError(f"needs a size as 32G or 500M, not '{value}'")
        return value

    @field_validator("time")
    @classmethod
    def _check_time(cls, value: str) -> str:
        if not TIME.fullmatch(value) or parse_minutes(value) < 1:
            raise ValueError(f"needs minutes, H:MM:SS or D-H:MM, not '{value}'")
        return value

    @property
    def minutes(self) -> int:
        """Time limit in minutes."""
        return parse_minutes(self.time)


def parse_minutes(time: str) -> int:
    """Return a time of sbatch in minutes, rounded up."""
    match = TIME.fullmatch(time)
    assert match is not None
    if match["days"] is not None:
        days, hours, minutes, seconds = (
            int(match[name] or 0) for name in ("days", "hours", "minutes", "seconds")
        )
        total = (24 * days + hours) * 60 + minutes
    elif match["c"] is not None:
        total, seconds = 60 * int(match["a"]) + int(match["b"]), int(match["c"])
    else:
        total, seconds = int(match["a"]), int(match["b"] or 0)
    return total + (seconds > 0)
