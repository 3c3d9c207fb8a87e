"""`python -m lit_attn.ablate logs CELL`: the log of a cell."""

import argparse
import sys
import time
from pathlib import Path

from lit_attn.ablate import status
from lit_attn.ablate.display import escape_control
from lit_attn.cells import folder
from lit_attn.cells.lock import read_holder
from lit_attn.schema.errors import ConfigError, suggest

POLL = 0.2
"""Seconds between two reads of a log that is watched."""


def main(arguments: list[str]) -> int:
    """Print a log, with `--watch` until the cell ends. Returns 0.

    Raises ConfigError if there is no such cell or log. On a terminal, control characters are
    printed in visible form.
    """
    options = _parser().parse_args(arguments)
    cell = _find_cell(options.cell, options.runs)
    path = _find_log(cell, options.attempt, options.rank)
    stream = sys.stdout
    with path.open(encoding="utf-8", errors="replace") as log:
        while True:
            # Checked before the read, so that the last lines before the cell's end are read too.
            has_ended = read_holder(cell) is None
            text = log.read()
            stream.write(escape_control(text) if stream.isatty() else text)
            stream.flush()
            if has_ended or not options.watch:
                return 0
            time.sleep(POLL)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m lit_attn.ablate logs",
        description="Show the log of a cell's last attempt.",
    )
    add = parser.add_argument
    add("cell", metavar="CELL", help="STUDY/VARIANT/SEED, or the folder of the cell.")
    runs = "Folder of the runs (default: runs)."
    add("--runs", type=Path, default=Path("runs"), metavar="DIR", help=runs)
    rank = "Show rank N of a cell on several devices (default 0)."
    add("--rank", type=int, default=0, metavar="N", help=rank)
    add("--attempt", type=int, metavar="N", help="Show attempt N; the first attempt is 1.")
    add("--watch", action="store_true", help="Show new lines until the cell ends.")
    return parser


def _find_log(cell: Path, attempt: int | None, rank: int) -> Path:
    attempts = {path.name: path for path in folder.list_attempts(cell)}
    if not attempts:
        raise ConfigError(f"{cell}: has no log, because the cell was not started")
    number = str(attempt or list(attempts)[-1])
    if number not in attempts:
        raise ConfigError(f"--attempt {number}: {cell} has the attempts {', '.join(attempts)}")
    path = attempts[number] / folder.log_name(rank)
    if not path.exists():
        logs = ", ".join(sorted(entry.name for entry in attempts[number].glob("log*")))
        raise ConfigError(f"--rank {rank}: {attempts[number]} has {logs or 'no log'}")
    return path


def _find_cell(text: str, runs: Path) -> Path:
    """Return the folder of a cell. Of several identities, return the one that changed last."""
    if (Path(text) / "config.yaml").exists():
        return Path(text)
    parts = text.split("/")
    folders = []
    if len(parts) == 3:
        study, variant, seed = parts
        paths = (runs / study / variant).glob("*")
        folders = [path for path in paths if path.name.partition("-")[0] == seed]
    if not folders:
        plans = status.read_plans(runs, runs, [])
        names = [f"{p.study}/{c.variant}/{c.seed}" for p, _ in plans for c in p.cells]
        if text in names:
            raise ConfigError(f"{text}: has no log, because the cell was not started")
        raise ConfigError(f"{runs}: has no cell '{text}'{suggest(text, names)}")
    return max(folders, key=lambda path: path.stat().st_mtime)
