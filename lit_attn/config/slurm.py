"""Resources of a cell's SLURM job: `slurm:` of a study."""

import re
from typing import Annotated

from pydantic import Field, PositiveInt, field_validator

from lit_attn.schema.base import Config, consistency_check, must_be
from lit_attn.schema.errors import key_error

MEMORY = re.compile(r"[1-9][0-9]*[KMGT]?")
# Forms of sbatch's --time: minutes, M:SS, H:MM:SS, D-H, D-H:MM, D-H:MM:SS.
TIME = re.compile(r"(\d+-)?\d+(:\d+){0,2}")
OPTION = re.compile(r"[a-z][a-z0-9]+(-[a-z0-9]+)*")
"""Name of a long option of sbatch, without its two dashes."""

WARNING = 120
"""Seconds before its time limit at which SLURM warns a job, so that its cell saves a checkpoint."""
SHORTEST_TIME = 5
"""Shortest time limit in minutes. SLURM may send the warning up to a minute early, and a cell takes
about a minute from the start of its job to its first step."""

OWN_KEYS = {
    "partition": "partition",
    "account": "account",
    "qos": "qos",
    "constraint": "constraint",
    "cpus-per-task": "cpus",
    "nodes": "nodes",
    "time": "time",
}
"""Options of sbatch that have a key of their own, with this key."""
MANAGED = {
    *("array", "chdir", "dependency", "error", "export", "export-file", "job-name", "no-requeue"),
    *("ntasks", "ntasks-per-node", "open-mode", "output", "parsable", "requeue"),
    *("signal", "test-only", "wait", "wrap"),
}
"""Options of sbatch that the runner sets itself, or that would keep it from finding its jobs."""
MEMORY_OPTIONS = ("mem", "mem-per-cpu", "mem-per-gpu")
GPU_OPTIONS = ("gpus", "gpus-per-node", "gpus-per-socket", "gpus-per-task")

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
    nodes: PositiveInt = Field(1, description="nodes of the job, which share a cell's processes")
    gpus: PositiveInt | None = Field(None, description="GPUs of a node; null: no GPUs")
    cpus: PositiveInt = Field(1, description="CPUs of each process of the cell")
    mem: Memory | None = Field(None, description="memory of a node, as 32G; null: the default")
    time: Time = Field("1-0", description="time limit: minutes, H:MM:SS or D-H:MM")
    timeouts: int = Field(10, ge=0, description="repetitions of a job that ran out of time")
    setup: tuple[str, ...] = Field((), description="shell lines that run before the cell")
    sbatch: dict[str, str | int | bool] = Field(
        {},
        description="further options of sbatch, such as `exclude: node7`; `true` for an option "
        "without a value",
    )

    @field_validator("time", "mem", mode="before", json_schema_input_type=str | int)
    @classmethod
    def _number_to_text(cls, value: object) -> object:
        """Return a number without a unit, which YAML reads as an integer, as text."""
        is_number = isinstance(value, int) and not isinstance(value, bool)
        return str(value) if is_number else value

    @field_validator("time")
    @classmethod
    def _leaves_time_to_train(cls, time: str) -> str:
        if parse_minutes(time) < SHORTEST_TIME:
            raise ValueError(describe_short_time(time))
        return time

    @field_validator("sbatch")
    @classmethod
    def _check_options(cls, options: dict[str, str | int | bool]) -> dict[str, str | int | bool]:
        for name, value in options.items():
            _check_option(name, value)
        return options

    @consistency_check
    def _check_conflicts(self) -> None:
        """Refuse two values for the memory or for the GPUs."""
        for name, value in self.sbatch.items():
            asks_for_gpus = name in GPU_OPTIONS or (name == "gres" and "gpu" in str(value))
            if self.mem is not None and name in MEMORY_OPTIONS:
                raise key_error("sbatch", f"'{name}' contradicts mem: {self.mem}; leave one out")
            if self.gpus is not None and asks_for_gpus:
                raise key_error("sbatch", f"'{name}' contradicts gpus: {self.gpus}; leave one out")

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


def describe_short_time(time: str) -> str:
    """Return the error about a time limit below SHORTEST_TIME."""
    return (
        f"'{time}' leaves no time to train: a cell saves its checkpoint {WARNING} s before the "
        f"limit, and a job takes about a minute to start; write {SHORTEST_TIME} minutes or more"
    )


def _check_option(name: str, value: str | int | bool) -> None:
    """Raise an error that names the key if an option of sbatch cannot be passed on."""
    if not OPTION.fullmatch(name):
        raise key_error(name, "write a long option of sbatch without its dashes, as exclude")
    for option, key in OWN_KEYS.items():
        # sbatch also accepts the beginning of an option's name.
        if option.startswith(name):
            raise key_error(name, f"write slurm.{key} instead")
    if any(option.startswith(name) for option in MANAGED):
        raise key_error(name, "the runner sets this option itself; leave it out")
    if value is False:
        raise key_error(name, "leave the option out instead of writing false")
    if "\n" in str(value):
        raise key_error(name, "needs a value of one line")
