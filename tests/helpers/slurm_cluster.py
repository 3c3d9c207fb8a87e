"""A SLURM cluster on this machine, in a temporary folder, from Debian's slurm-wlm and munge."""

import contextlib
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from helpers.commands import Command, start_with_pipe

# Seconds after which a daemon has failed, on a machine of any load.
LIMIT = 400
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun")
# Text of a program: the command line, which asks every second how its jobs are.
COMMAND = (
    "import sys; from lit_attn.ablate.slurm import follow; follow.POLL = 1.0\n"
    "from lit_attn.ablate.__main__ import main; sys.exit(main())"
)
PATH = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])

CONF = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
SchedulerParameters=sched_interval=2,sched_min_interval=0
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
KillWait=10
ReturnToService=2
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""
NODE = """\
NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=2 RealMemory=4096
"""


def missing() -> str:
    """Return the reason why no cluster can run here, or an empty string."""
    if os.geteuid() != 0:
        return "SLURM's daemons need root"
    absent = [name for name in PROGRAMS if shutil.which(name, path=PATH) is None]
    return f"needs {', '.join(absent)} (apt-get install slurm-wlm munge)" if absent else ""


def start_study(
    folder: Path, cluster: dict[str, str], *options: str, package: str | None = None
) -> "subprocess.Popen[str] | Command":
    """Start the command line on ablations.yaml in `folder`, whose cells are jobs.

    `package` is the folder of another copy of the package.
    """
    path = os.pathsep.join(sys.path) if package is None else package
    words = ("-c", COMMAND, "ablations.yaml", "--launcher", "slurm", *options)
    environment = cluster | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    if package is None:
        return start_with_pipe(folder, words, environment)
    return subprocess.Popen(
        [sys.executable, *words],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@contextlib.contextmanager
def cluster(options: str = "", partitions: str = "", nodes: int = 1) -> Iterator[dict[str, str]]:
    """Run the daemons and yield the environment variables that SLURM's commands need.

    Its `nodes` are this machine, each with a daemon of its own. `options` and `partitions` are
    further lines of slurm.conf.
    """
    # The folder of a test would be too long: paths of SLURM's sockets have at most 108 characters.
    with tempfile.TemporaryDirectory(prefix="slurm", ignore_cleanup_errors=True) as folder:
        yield from _running(Path(folder), options, partitions, nodes)


def _running(folder: Path, options: str, partitions: str, count: int) -> Iterator[dict[str, str]]:
    names = [f"node{number}" for number in range(count)]
    for name in ("state", *(f"spool.{name}" for name in names)):
        (folder / name).mkdir(parents=True)
    key = folder / "munge.key"
    key.write_bytes(secrets.token_bytes(1024))
    key.chmod(0o400)
    conf = folder / "slurm.conf"
    host = socket.gethostname().partition(".")[0]
    lines = [NODE.format(name=name, host=host, port=free_port()) for name in names]
    text = CONF.format(folder=folder, host=host, controller=free_port())
    head, partition = text.split("PartitionName", 1)
    nodes = "".join(lines)
    conf.write_text(f"{head}{options}{nodes}PartitionName{partition}{partitions}")
    # Only SLURM knows the names of the nodes, so other processes need an address.
    environment = {**os.environ, "PATH": PATH, "SLURM_CONF": str(conf), "MASTER_ADDR": "127.0.0.1"}
    munge = ["munged", "--foreground", "--force", f"--socket={folder}/munge.socket"]
    munge += [f"--{name}-file={folder}/munge.{name}" for name in ("key", "pid", "log", "seed")]
    daemons: list[subprocess.Popen[bytes]] = []

    def start(*command: str) -> None:
        with (folder / f"{command[0]}-{len(daemons)}.out").open("wb") as out:
            process = subprocess.Popen(command, env=environment, stdout=out, stderr=out)
        daemons.append(process)

    def speak(*command: str) -> str:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=LIMIT, check=False
        )
        return done.stdout

    try:
        start(*munge)
        _until(lambda: (folder / "munge.socket").exists(), folder)
        start("slurmctld", "-D")
        for name in names:
            start("slurmd", "-D", "-N", name)
        idle = ("sinfo", "--noheader", "--Node", "--format=%T")
        _until(lambda: set(speak(*idle).split()) == {"idle"}, folder)
        yield environment
        speak("scancel", "--user=root")
        _until(lambda: not speak("squeue", "--noheader").strip(), folder)
    finally:
        for process in reversed(daemons):
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _until(condition: object, folder: Path) -> None:
    deadline = time.monotonic() + LIMIT
    assert callable(condition)
    while not condition():
        if time.monotonic() > deadline:
            logs = [f"{path}:\n{path.read_text()[-2000:]}" for path in folder.glob("*.log")]
            raise RuntimeError("the SLURM of the tests does not answer\n" + "\n".join(logs))
        time.sleep(0.1)


def free_port() -> int:
    """Return a port of this machine that no process uses."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
