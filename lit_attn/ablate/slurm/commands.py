"""Commands of SLURM, run without the variables of an allocation around this process."""

import contextlib
import os
import subprocess
from collections.abc import Iterator

from lit_attn.schema.errors import ConfigError

KEPT = {"SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_CLUSTERS", "SLURM_JWT"}
"""Variables with these prefixes that say which cluster to talk to."""
PREFIXES = ("SLURM_", "SLURMD_", "SRUN_", "SACCT_", "SCONTROL_", "SINFO_", "SQUEUE_")
"""Prefixes of variables that belong to an allocation, or that change what a command prints.

`salloc --mem-per-cpu` sets SLURM_MEM_PER_CPU, which a job would inherit and which contradicts its
`--mem`. SQUEUE_PARTITION hides the jobs of other partitions."""
TIMEOUT = 60.0  # Seconds that a command may take.


def clean_environment() -> dict[str, str]:
    """Return the environment variables of this process without those of an allocation.

    The variables of sbatch (SBATCH_PARTITION and others) stay: a user sets them for new jobs.
    """
    return {
        name: value
        for name, value in os.environ.items()
        if name in KEPT or not name.startswith(PREFIXES)
    }


@contextlib.contextmanager
def use_clean_environment() -> Iterator[None]:
    """Remove the variables of an allocation from this process in this context."""
    before = dict(os.environ)
    for name in before.keys() - clean_environment().keys():
        del os.environ[name]
    try:
        yield
    finally:
        os.environ.update(before)


def run_command(*command: str, timeout: float = TIMEOUT) -> str:
    """Return a command's output; OSError if it fails, ConfigError if it does not exist."""
    try:
        done = subprocess.run(
            command,
            env=clean_environment(),
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
    except FileNotFoundError as error:
        raise ConfigError(f"--launcher slurm: command '{command[0]}' not found") from error
    except subprocess.TimeoutExpired as error:
        raise OSError(f"{command[0]} does not answer") from error
    if done.returncode:
        reason = done.stderr.strip() or f"exit code {done.returncode}"
        raise OSError(f"{command[0]}: {reason}")
    return done.stdout
