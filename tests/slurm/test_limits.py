"""Limits of clusters, read from recorded output of SLURM's commands, and their checks."""

import pytest

from lit_attn.ablate.slurm import limits
from lit_attn.ablate.slurm.limits import (
    Cluster,
    Node,
    Partition,
    Qos,
    check,
    format_minutes,
    mebibytes,
    read_nodes,
    read_partitions,
    read_qos,
    read_settings,
)
from lit_attn.config.slurm import Slurm
from lit_attn.schema.errors import ConfigError

CONFIG = """\
Configuration data as of 2026-11-26T05:05:40
AccountingStorageEnforce = none
ClusterName             = test
MaxArraySize            = 5
MaxMemPerNode           = 2000
MaxJobCount             = 10000

Slurmctld(primary) at host is UP
"""
PARTITIONS = """\
PartitionName=main AllowGroups=ALL AllowAccounts=ALL AllowQos=ALL AllocNodes=ALL Default=YES \
QoS=N/A DefaultTime=NONE GraceTime=0 Hidden=NO MaxNodes=UNLIMITED MaxTime=01:00:00 \
MinNodes=0 LLN=NO MaxCPUsPerNode=UNLIMITED Nodes=node[0-2] PreemptMode=OFF State=UP TotalCPUs=6 \
TotalNodes=3 JobDefaults=(null) DefMemPerNode=UNLIMITED MaxMemPerNode=UNLIMITED TRES=cpu=2,mem=4G
PartitionName=long Default=NO QoS=big MaxNodes=2 MaxTime=2-12:00:00 MaxCPUsPerNode=16 \
MaxMemPerNode=8192 State=UP
PartitionName=free Default=NO QoS=N/A MaxNodes=UNLIMITED MaxTime=UNLIMITED State=UP
"""
NODES = """\
main|2|4096|(null)
main|2+|2048|gpu:a100:4(S:0-1),shard:8
long|16|16384|gpu:2,tmpdisk:100
"""
QOS = """\
normal|||
short|02:00:00|4|DenyOnLimit
big|1-00:00:00||PartitionTimeLimit,NoDecay
"""


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Cluster:
    for name in ("SBATCH_PARTITION", "SBATCH_QOS", "SBATCH_TIMELIMIT"):
        monkeypatch.delenv(name, raising=False)
    return Cluster(
        name="test",
        max_array=5,
        memory=8000,
        partitions=list(read_partitions(PARTITIONS)),
        nodes=list(read_nodes(NODES)),
        qos={qos.name: qos for qos in read_qos(QOS)},
    )


def test_output_of_slurm_is_parsed() -> None:
    settings = read_settings(CONFIG)
    assert (settings["ClusterName"], settings["MaxArraySize"]) == ("test", "5")
    assert list(read_partitions(PARTITIONS)) == [
        Partition("main", True, 60, None, None, None, "N/A"),
        Partition("long", False, 3600, 2, 8192, 16, "big"),
        Partition("free", False, None, None, None, None, "N/A"),
    ]
    assert list(read_nodes(NODES)) == [
        Node("main", 2, 4096, 0),
        Node("main", 2, 2048, 4),
        Node("long", 16, 16384, 2),
    ]
    assert list(read_qos(QOS)) == [
        Qos("normal", None, None, False),
        Qos("short", 120, 4, False),
        Qos("big", 1440, None, True),
    ]


@pytest.mark.parametrize(
    ("memory", "expected"), [("500", 500), ("512M", 512), ("2G", 2048), ("2048K", 2), ("1T", 2**20)]
)
def test_memory_is_read_as_sbatch_reads_it(memory: str, expected: float) -> None:
    assert mebibytes(memory) == expected


@pytest.mark.parametrize(
    ("minutes", "text"), [(60, "1:00:00"), (90, "1:30:00"), (1440, "1-0"), (3630, "2-12:30")]
)
def test_a_limit_is_printed_as_sbatch_reads_it(minutes: int, text: str) -> None:
    assert format_minutes(minutes) == text
    assert Slurm(time=text).minutes == minutes


@pytest.mark.parametrize(
    ("slurm", "devices", "message"),
    [
        (
            Slurm(),
            1,
            "slurm.time: 1-0 exceeds the limit 1:00:00 of the partition 'main';"
            " write slurm: {time: 1:00:00} or less",
        ),
        (
            Slurm(time="1:00:00", mem="5G"),
            1,
            "slurm.mem: 5G exceeds the 4096M of a node of the partition 'main'",
        ),
        # A limit of the cluster is lower than the memory of the node.
        (
            Slurm(partition="long", mem="8100M"),
            1,
            "slurm.mem: 8100M exceeds the 8000M of a node of the partition 'long'",
        ),
        (
            Slurm(time="1:00:00", cpus=3),
            1,
            "slurm.cpus: 3 for 1 process exceeds the 2 CPUs of a node of the partition 'main'",
        ),
        (
            Slurm(time="1:00:00", cpus=1),
            4,
            "slurm.cpus: 1 for 4 processes exceeds the 2 CPUs of a node of the partition 'main'",
        ),
        (
            Slurm(time="1:00:00", nodes=3),
            3,
            "slurm.nodes: 3 exceeds the 2 of the partition 'main'",
        ),
        (
            Slurm(time="1:00:00", nodes=2),
            8,
            "slurm.cpus: 1 for 4 processes exceeds the 2 CPUs of a node of the partition 'main'",
        ),
        (
            Slurm(time="1:00:00", gpus=8),
            1,
            "slurm.gpus: 8 exceeds the 4 GPUs of a node of the partition 'main'",
        ),
        (
            Slurm(time="1:00:00", qos="short"),
            1,
            "9 jobs exceed the 4 jobs that the QOS 'short' lets a user submit;"
            " write --limit 4 or less",
        ),
        (
            Slurm(time="3:00:00", qos="short"),
            1,
            "slurm.time: 3:00:00 exceeds the 2:00:00 of the QOS 'short';"
            " write slurm: {time: 2:00:00} or less",
        ),
    ],
)
def test_a_job_beyond_a_limit_is_one_error_line(
    cluster: Cluster, slurm: Slurm, devices: int, message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        check("tiny", slurm, devices, 9, cluster)
    assert str(caught.value) == f"tiny: {message}"


@pytest.mark.parametrize(
    "slurm",
    [
        Slurm(time="1:00:00", mem="4G", cpus=2, gpus=4),
        # One of two partitions allows the time.
        Slurm(partition="main,free", time="5-0"),
        # SLURM names an unknown partition itself.
        Slurm(partition="nowhere"),
        # This QOS lifts the limit of the partition, and a user's default QOS may be several ones.
        Slurm(partition="main", time="20:00:00", qos="big"),
    ],
)
def test_a_job_within_the_limits_is_submitted(cluster: Cluster, slurm: Slurm) -> None:
    check("tiny", slurm, 1, 9, cluster)


def test_variables_of_sbatch_replace_the_values_of_the_study(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SBATCH_PARTITION", "free")
    check("tiny", Slurm(partition="main", time="5-0"), 1, 1, cluster)
    monkeypatch.setenv("SBATCH_TIMELIMIT", "2")
    with pytest.raises(ConfigError, match=r"^tiny: SBATCH_TIMELIMIT: '2' leaves no time to train"):
        check("tiny", Slurm(), 1, 1, cluster)


def test_a_cluster_without_accounting_has_no_qos(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(*command: str) -> str:
        if command[0] == "sacctmgr":
            raise OSError("sacctmgr: You are not running a supported accounting_storage plugin")
        return {"config": CONFIG, "partition": PARTITIONS}.get(command[-1], NODES)

    monkeypatch.setattr(limits, "run_command", run)
    cluster = limits.read_cluster()
    assert (cluster.name, cluster.max_array, cluster.memory) == ("test", 5, 2000)
    assert (len(cluster.partitions), len(cluster.nodes), cluster.qos) == (3, 3, {})


def test_the_default_qos_of_a_user_counts(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(*command: str) -> str:
        if command[0] == "sacctmgr":
            return QOS if "qos" in command else "big\n\nbig\n"
        return {"config": CONFIG, "partition": PARTITIONS}.get(command[-1], NODES)

    monkeypatch.setattr(limits, "run_command", run)
    read = limits.read_cluster()
    assert read.user_qos == {"big"}
    check("tiny", Slurm(time="20:00:00"), 1, 1, read)
