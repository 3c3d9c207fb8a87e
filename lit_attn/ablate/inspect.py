"""`python -m lit_attn.ablate status` and `... logs CELL`: looking, without touching anything."""

import argparse
import sys
import time
from pathlib import Path
from typing import TextIO

from lit_attn.ablate import status
from lit_attn.cells import folder
from lit_attn.cells.lock import read_holder
from lit_attn.schema.errors import ConfigError, suggest

COMMANDS = ("status", "logs")
CLEAR = "\x1b[H\x1b[2J"


def main(arguments: list[str]) -> int:
    """The command line of both; `arguments` begin with one of COMMANDS. Returns 0.

    Raises ConfigError where there is nothing to look at.
    """
    options = _parser().parse_args(arguments)
    if options.command == "logs":
        return _logs(options, sys.stdout)
    while True:
        found = status.plans(options.where, options.out, options.study)
        seen = [(plan, place, status.look(plan, place)) for plan, place in found]
        if options.watch and sys.stdout.isatty():
            sys.stdout.write(CLEAR)
        print("\n".join(status.report(*study) for study in seen), flush=True)
        if not options.watch or all(c.state == "done" for *_, cells in seen for c in cells):
            return 0
        time.sleep(options.watch)


def _parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="python -m lit_attn.ablate",
        epilog="A file of studies that is called so itself is written ./status or ./logs.",
    )
    commands = made.add_subparsers(dest="command")
    add = commands.add_parser("status", help="what is done, running, failed, and how long yet")
    where = "a file of studies, or a folder of runs (default: runs)"
    add.add_argument("where", type=Path, nargs="?", default=Path("runs"), help=where)
    add.add_argument("--study", action="append", default=[], metavar="NAME")
    out = "where the runs of a file of studies are"
    add.add_argument("--out", type=Path, default=Path("runs"), metavar="DIR", help=out)
    seconds = "again every SECONDS (2) until all is done"
    add.add_argument(
        "--watch", type=_seconds, nargs="?", const=2.0, metavar="SECONDS", help=seconds
    )
    add = commands.add_parser("logs", help="the log of a cell's last attempt")
    add.add_argument("cell", metavar="CELL", help="STUDY/VARIANT/SEED, or the cell's folder")
    add.add_argument("--runs", type=Path, default=Path("runs"), metavar="DIR")
    add.add_argument(
        "--rank", type=int, default=0, metavar="N", help="of a cell on several devices"
    )
    add.add_argument("--attempt", type=int, metavar="N", help="an earlier one; the first is 1")
    add.add_argument("--watch", action="store_true", help="go on until the cell ends")
    return made


def _seconds(text: str) -> float:
    seconds = float(text)
    if not seconds > 0:
        raise ValueError
    return seconds


def _logs(options: argparse.Namespace, stream: TextIO) -> int:
    cell = _cell(options.cell, options.runs)
    begun = {path.name: path for path in folder.list_attempts(cell)}
    if not begun:
        raise ConfigError(f"{cell}: has no log: it was not begun")
    number = str(options.attempt or list(begun)[-1])
    if number not in begun:
        raise ConfigError(f"--attempt {number}: {cell} has {', '.join(begun)}")
    path = begun[number] / folder.log_name(options.rank)
    if not path.exists():
        there = ", ".join(sorted(entry.name for entry in begun[number].glob("log*")))
        raise ConfigError(f"--rank {options.rank}: {begun[number]} has {there or 'no log'}")
    with path.open(encoding="utf-8", errors="replace") as log:
        while True:
            # Asked before reading: what a cell wrote before its end is still to be read.
            ended = read_holder(cell) is None
            stream.write(log.read())
            stream.flush()
            if ended or not options.watch:
                return 0
            time.sleep(0.2)


def _cell(text: str, runs: Path) -> Path:
    """The folder of a cell by its name; of several identities, the one begun last."""
    if (Path(text) / "config.yaml").exists():
        return Path(text)
    parts = text.split("/")
    found = []
    if len(parts) == 3:
        study, variant, seed = parts
        folders = (runs / study / variant).glob("*")
        found = [path for path in folders if path.name.partition("-")[0] == seed]
    if not found:
        plans = status.plans(runs, runs, [])
        names = [f"{p.study}/{c.variant}/{c.seed}" for p, _ in plans for c in p.cells]
        if text in names:
            raise ConfigError(f"{text}: has no log: it was not begun")
        raise ConfigError(f"{runs}: has no cell '{text}'{suggest(text, names)}")
    return max(found, key=lambda path: path.stat().st_mtime)
