"""Resources of a cell's SLURM job: `slurm:` of a study."""

import re
from typing import Annotated

from pydantic import Field, PositiveInt, field_validator

from lit_attn.schema.base import Config, must_be

MEMORY = re.compile(r"[1-9][0-9]*[KMGT]?")
# Forms of sbatch's --time: minutes, M:SS, H:MM:SS, D-H, D-H:MM, D-H:MM:SS.
TIME = re.compile(r"(\d+-)?\d+(:\d+){0,2}")


WORD = re.compile(r"[\w.:,&|*()\[\]@/+-]+")
Word = Annotated[str, must_be(WORD.fullmatch, "a name without spaces, as for sbatch")]
Memory = Annotated[str, must_be(MEMORY.fullmatch, "a size as 32G or 500M")]
Time = Annotated[str, must_be(lambda time: parse_minutes(time) > 0, "minutes, H:MM:SS or D-H:MM")]


class Slurm(Config):
    """Resources of one cell's job."""

    partition: Word | None = Field(None, description="partition; null: the cluster's default")
    account: Word | None = Field(None, description="account to charge; null: the user's default")
    qos: Word | None = Field(None, description="quality of service; null: the user's default")
    constraint: Word | None = Field(None, description="features that a node must have; null: none")
    gpus: PositiveInt | None = Field(None, description="GPUs of the job; null: no GPUs")
    cpus: PositiveInt = Field(1, description="CPUs of each process of the cell")
    mem: Memory | None = Field(None, description="memory of a node, as 32G; null: the default")
    time: Time = Field("1-0", description="time limit: minutes, H:MM:SS or D-H:MM")
    timeouts: int = Field(10, ge=0, description="repetitions of a job that ran out of time")
    setup: tuple[str, ...] = Field((), description="shell lines that run before the cell")

    @field_validator("time", "mem", mode="before")
    @classmethod
    def _number_to_text(cls, value: object) -> object:
        """Return a number without a unit, which YAML reads as an integer, as text."""
        is_number = isinstance(value, int) and not isinstance(value, bool)
        return str(value) if is_number else value

    @property
    def minutes(self) -> int:
        """Time limit in minutes."""
        return parse_minutes(self.time)


def parse_minutes(time: str) -> int:
    """Return a time of sbatch in minutes, rounded up; 0 for another text."""
    if not TIME.fullmatch(time):
        return 0
    days, _, clock = time.rpartition("-")
    numbers = [int(number) for number in clock.split(":")]
    begins_with_hours = bool(days) or len(numbers) == 3
    if not begins_with_hours:
        numbers.insert(0, 0)
    while len(numbers) < 3:
        numbers.append(0)
    hours, minutes, seconds = numbers
    if days:
        hours += 24 * int(days)
    total = 60 * hours + minutes
    return total + 1 if seconds > 0 else total
