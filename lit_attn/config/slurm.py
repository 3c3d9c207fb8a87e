"""Resources of a cell's SLURM job: `slurm:` of a study."""

import re
from typing import Annotated

from pydantic import AfterValidator, Field, PositiveInt, field_validator

from lit_attn.schema.base import Config

MEMORY = re.compile(r"[1-9][0-9]*[KMGT]?")
# Forms of sbatch's --time: minutes, M:SS, H:MM:SS, D-H, D-H:MM, D-H:MM:SS.
TIME = re.compile(r"(\d+-)?\d+(:\d+){0,2}")


def _check_word(value: str) -> str:
    if not re.fullmatch(r"[\w.:,&|*()\[\]@/+-]+", value):
        raise ValueError("needs a name without spaces, as for sbatch")
    return value


Word = Annotated[str, AfterValidator(_check_word)]


class Slurm(Config):
    """Resources of one cell's job."""

    partition: Word | None = Field(None, description="partition; null: the cluster's default")
    account: Word | None = Field(None, description="account to charge; null: the user's default")
    qos: Word | None = Field(None, description="quality of service; null: the user's default")
    constraint: Word | None = Field(None, description="features that a node must have; null: none")
    gpus: PositiveInt | None = Field(None, description="GPUs of the job; null: no GPUs")
    cpus: PositiveInt = Field(1, description="CPUs of each process of the cell")
    mem: str | None = Field(None, description="memory of a node, as 32G; null: the default")
    time: str = Field("1-0", description="time limit: minutes, H:MM:SS or D-H:MM")
    timeouts: int = Field(10, ge=0, description="repetitions of a job that ran out of time")
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
    days, _, clock = time.rpartition("-")
    numbers = [int(number) for number in clock.split(":")]
    if days or len(numbers) == 3:
        hours, minutes, seconds = (*numbers, 0, 0)[:3]
    else:
        hours, minutes, seconds = 0, *(*numbers, 0)[:2]
    return (24 * int(days or 0) + hours) * 60 + minutes + (seconds > 0)
