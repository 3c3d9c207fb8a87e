"""Limits of a cluster, read and checked before the submission.

SLURM accepts jobs that exceed the limits of their partition, and lets them wait for ever.
"""

import getpass
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from lit_attn.ablate.slurm.commands import run_command
from lit_attn.config.slurm import SHORTEST_TIME, Slurm, describe_short_time, parse_minutes
from lit_attn.schema.errors import ConfigError, plural

NO_LIMIT = ("", "UNLIMITED", "INFINITE", "NONE", "N/A", "-1", "0")
"""Values of scontrol and sacctmgr that mean no limit; a number 0 of memory has the same meaning."""
MEBIBYTES = {"K": 1 / 1024, "M": 1, "G": 1024, "T": 1024**2}
"""Mebibytes of sbatch's units of memory."""
GPU = re.compile(r"\bgpu(?::[^:,()]+)?:(\d+)")
"""GPUs in a node's generic resources, as `gpu:a100:4(S:0-1)`."""


class Node(NamedTuple):
    """CPUs, memory in mebibytes and GPUs of a node, and its partition."""

    partition: str
    cpus: int
    memory: int
    gpus: int


class Partition(NamedTuple):
    """Limits of a partition; None is no limit. `memory` is in mebibytes."""

    name: str
    is_default: bool
    minutes: int | None
    nodes: int | None
    memory: int | None
    cpus: int | None
    qos: str


class Qos(NamedTuple):
    """Limits of a quality of service; None is no limit.

    `jobs` is the number of jobs that a user may submit. A job that `ignores_partition_time` may
    exceed the time limit of its partition.
    """

    name: str
    minutes: int | None
    jobs: int | None
    ignores_partition_time: bool


@dataclass(frozen=True)
class Cluster:
    """Name and limits of a cluster. `user_qos` are the names of the user's default QOS."""

    name: str
    max_array: int
    memory: int | None
    partitions: list[Partition] = field(default_factory=list)
    nodes: list[Node] = field(default_factory=list)
    qos: dict[str, Qos] = field(default_factory=dict)
    user_qos: set[str] = field(default_factory=set)


def read_cluster() -> Cluster:
    """Return the limits of the cluster that this machine submits to. Raises OSError."""
    settings = read_settings(run_command("scontrol", "show", "config"))
    partitions = run_command("scontrol", "--oneliner", "show", "partition")
    nodes = run_command("sinfo", "--noheader", "--Node", "--format=%R|%c|%m|%G")
    # A cluster without accounting has no QOS.
    qos: dict[str, Qos] = {}
    user_qos: set[str] = set()
    sacctmgr = ("sacctmgr", "--noheader", "--parsable2", "show")
    try:
        text = run_command(*sacctmgr, "qos", "format=Name,MaxWall,MaxSubmitPU,Flags")
        qos = {entry.name: entry for entry in read_qos(text)}
        user = f"user={getpass.getuser()}"
        user_qos = set(run_command(*sacctmgr, "assoc", user, "format=DefaultQOS").split())
    except (OSError, ConfigError):
        pass
    return Cluster(
        name=settings.get("ClusterName", ""),
        # Arrays can be switched off by 0. One job needs no array.
        max_array=max(1, int(settings.get("MaxArraySize", "1001"))),
        memory=read_limit(settings.get("MaxMemPerNode", "")),
        partitions=list(read_partitions(partitions)),
        nodes=list(read_nodes(nodes)),
        qos=qos,
        user_qos=user_qos,
    )


def read_settings(text: str) -> dict[str, str]:
    """Return the settings in the output of `scontrol show config`."""
    pairs = re.findall(r"^(\w+)[ \t]*=[ \t]*(.*?)[ \t]*$", text, re.MULTILINE)
    return dict(pairs)


def read_partitions(text: str) -> Iterator[Partition]:
    """Yield the partitions in the output of `scontrol --oneliner show partition`."""
    for line in text.splitlines():
        fields = dict(re.findall(r"(\w+)=(\S*)", line))
        if "PartitionName" in fields:
            yield Partition(
                name=fields["PartitionName"],
                is_default=fields.get("Default") == "YES",
                minutes=_read_time(fields.get("MaxTime", "")),
                nodes=read_limit(fields.get("MaxNodes", "")),
                memory=read_limit(fields.get("MaxMemPerNode", "")),
                cpus=read_limit(fields.get("MaxCPUsPerNode", "")),
                qos=fields.get("QoS", ""),
            )


def read_nodes(text: str) -> Iterator[Node]:
    """Yield the nodes in the output of `sinfo --Node --format=%R|%c|%m|%G`."""
    for line in text.splitlines():
        partition, cpus, memory, resources = line.split("|", 3)
        gpus = sum(int(count) for count in GPU.findall(resources))
        # A number can end in + if it belongs to several nodes.
        yield Node(partition, int(cpus.rstrip("+")), int(memory.rstrip("+")), gpus)


def read_qos(text: str) -> Iterator[Qos]:
    """Yield the entries in the output of `sacctmgr show qos format=Name,MaxWall,...`."""
    for line in text.splitlines():
        name, minutes, jobs, flags = line.split("|", 3)
        ignores_partition_time = "PartitionTimeLimit" in flags
        yield Qos(name, _read_time(minutes), read_limit(jobs), ignores_partition_time)


def read_limit(text: str) -> int | None:
    """Return a limit of scontrol as a number, or None if there is none."""
    return None if text in NO_LIMIT or not text.isdecimal() else int(text)


def _read_time(text: str) -> int | None:
    """Return a time limit in minutes, or None if there is none."""
    return parse_minutes(text) or None


def mebibytes(memory: str) -> float:
    """Return a size of sbatch (`32G`, `500`) in mebibytes."""
    unit = memory[-1].upper()
    return float(memory) if unit.isdecimal() else int(memory[:-1]) * MEBIBYTES[unit]


def check(study: str, slurm: Slurm, devices: int, jobs: int, cluster: Cluster) -> None:
    """Raise ConfigError if jobs of cells on `devices` devices exceed a limit of the cluster.

    sbatch's variables, such as SBATCH_PARTITION, replace the values of `slurm`.
    """
    minutes = _read_minutes(study, slurm)
    name = os.environ.get("SBATCH_QOS") or slurm.qos
    names = {name} if name else cluster.user_qos
    qos = [cluster.qos[name] for name in sorted(names) if name in cluster.qos]
    for entry in qos:
        # The job's account chooses one of several defaults.
        if len(qos) == 1:
            _check_qos(study, slurm, entry, minutes, jobs)
    partitions = _choose_partitions(slurm, cluster)
    ignores_time = any(entry.ignores_partition_time for entry in qos)
    problems = []
    for partition in partitions:
        problem = _find_problem(slurm, devices, minutes, partition, cluster, ignores_time)
        if not problem:
            return
        problems.append(problem)
    if problems:
        # SLURM takes a partition that allows the job, and there is none.
        raise ConfigError(f"{study}: {problems[0]}")


def _read_minutes(study: str, slurm: Slurm) -> int:
    """Return the time limit of a job in minutes."""
    text = os.environ.get("SBATCH_TIMELIMIT", "")
    if not text:
        return slurm.minutes
    minutes = parse_minutes(text)
    if 0 < minutes < SHORTEST_TIME:
        raise ConfigError(f"{study}: SBATCH_TIMELIMIT: {describe_short_time(text)}")
    return minutes


def _choose_partitions(slurm: Slurm, cluster: Cluster) -> list[Partition]:
    """Return the partitions that a job may use; sbatch itself refuses an unknown one."""
    names = (os.environ.get("SBATCH_PARTITION") or slurm.partition or "").split(",")
    chosen = [partition for partition in cluster.partitions if partition.name in names]
    if names == [""]:
        chosen = [partition for partition in cluster.partitions if partition.is_default]
    return chosen


def _check_qos(study: str, slurm: Slurm, qos: Qos, minutes: int, jobs: int) -> None:
    """Raise ConfigError if jobs exceed a limit of their QOS."""
    if qos.minutes is not None and minutes > qos.minutes:
        shown = format_minutes(qos.minutes)
        raise ConfigError(
            f"{study}: slurm.time: {slurm.time} exceeds the {shown} of the QOS '{qos.name}';"
            f" write slurm: {{time: {shown}}} or less"
        )
    if qos.jobs is not None and jobs > qos.jobs:
        raise ConfigError(
            f"{study}: {jobs} jobs exceed the {qos.jobs} jobs that the QOS '{qos.name}' lets a user"
            f" submit; write --limit {qos.jobs} or less"
        )


def _find_problem(
    slurm: Slurm,
    devices: int,
    minutes: int,
    partition: Partition,
    cluster: Cluster,
    ignores_time: bool,
) -> str:
    """Return which limit of a partition a job exceeds and what to write, or "" if none."""
    limits = [partition.minutes]
    if partition.qos in cluster.qos:
        limits.append(cluster.qos[partition.qos].minutes)
    for limit in limits:
        if limit is not None and minutes > limit and not ignores_time:
            shown = format_minutes(limit)
            return (
                f"slurm.time: {slurm.time} exceeds the limit {shown} of the partition"
                f" '{partition.name}'; write slurm: {{time: {shown}}} or less"
            )
    return _find_node_problem(slurm, devices, partition, cluster)


def _find_node_problem(slurm: Slurm, devices: int, partition: Partition, cluster: Cluster) -> str:
    """Return what a job needs and no node of a partition has, or "" if nothing."""
    nodes = [node for node in cluster.nodes if node.partition == partition.name]
    count = _smallest(partition.nodes, len(nodes) or None)
    if count is not None and slurm.nodes > count:
        return f"slurm.nodes: {slurm.nodes} exceeds the {count} of the partition '{partition.name}'"
    where = f"of a node of the partition '{partition.name}'"
    memory = _smallest(partition.memory, cluster.memory, *_largest(node.memory for node in nodes))
    if memory is not None and slurm.mem is not None and mebibytes(slurm.mem) > memory:
        return f"slurm.mem: {slurm.mem} exceeds the {memory}M {where}"
    cpus = _smallest(partition.cpus, *_largest(node.cpus for node in nodes))
    on_node = devices // slurm.nodes
    if cpus is not None and slurm.cpus * on_node > cpus:
        processes = "1 process" if on_node == 1 else f"{on_node} processes"
        return f"slurm.cpus: {slurm.cpus} for {processes} exceeds the {cpus} CPUs {where}"
    gpus = _smallest(*_largest(node.gpus for node in nodes))
    if gpus is not None and slurm.gpus is not None and slurm.gpus > gpus:
        return f"slurm.gpus: {slurm.gpus} exceeds the {plural(gpus, 'GPU')} {where}"
    return ""


def _largest(numbers: Iterable[int]) -> list[int]:
    """Return the largest number in a list, or an empty list if there is no number."""
    return sorted(numbers)[-1:]


def _smallest(*limits: int | None) -> int | None:
    """Return the smallest limit, or None if there is none."""
    known = [limit for limit in limits if limit is not None]
    return min(known, default=None)


def format_minutes(minutes: int) -> str:
    """Return a time limit as sbatch reads it: `1-0`, `1-2:30`, or `8:30:00`."""
    days, rest = divmod(minutes, 24 * 60)
    hours, rest = divmod(rest, 60)
    if days and not rest:
        return f"{days}-{hours}"
    return f"{days}-{hours}:{rest:02}" if days else f"{hours}:{rest:02}:00"
