"""A `squeue` with invented rows, and a display that keeps the events of a follower."""

import stat
from pathlib import Path

import pytest

from lit_attn.ablate.plan import Matrix
from lit_attn.ablate.slurm.queue import BATCH
from lit_attn.files import write_atomic


def write_batch(matrix: Matrix, token: str, attempts: int = 0) -> None:
    """Record the cells of a study as a job array."""
    cells = [(job.path, attempts) for job in matrix.jobs]
    write_atomic(matrix.folder / ".slurm" / token / "batch.json", BATCH.dump_json(cells))


def install_command(path: Path, monkeypatch: pytest.MonkeyPatch, name: str, script: str) -> None:
    """Put a shell script on PATH, with the programs of the system."""
    command = path / "bin" / name
    command.parent.mkdir(exist_ok=True)
    command.write_text(f"#!/bin/sh\n{script}\n")
    command.chmod(command.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{command.parent}:/usr/bin:/bin")


def install_squeue(path: Path, monkeypatch: pytest.MonkeyPatch, *rows: str, code: int = 0) -> None:
    """Put a `squeue` on PATH that prints `rows`: index|id|state|name."""
    text = "\n".join(rows)
    install_command(path, monkeypatch, "squeue", f"cat <<'END'\n{text}\nEND\nexit {code}")
