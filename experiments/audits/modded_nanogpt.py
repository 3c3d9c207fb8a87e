"""Reader of the logs of KellerJordan/modded-nanogpt, and the table of all runs of its first track.

A run is judged where its logs lie, and the table is made from a checkout:

    lit-attn judge CHECKOUT/records/track_1_short/2026-04-29_XSAGatedLayers --pairs none
        --metric val_loss --baseline baseline-s1410 --reader modded_nanogpt.py:read
    python modded_nanogpt.py CHECKOUT COMMIT > modded-nanogpt.csv

The record book, each record against the target of 3.28, comes from the table:

    lit-attn judge modded-nanogpt.csv --reader modded_nanogpt.py:read_records
        --metric val_loss:min --target 3.28

The READMEs of the records print 43 p for this target. The 35 whose runs have a log each agree with
the t test of this command in every printed digit.
"""

import csv
import re
import sys
from collections.abc import Iterator
from pathlib import Path

TRACK = "records/track_1_short"

VALIDATION = re.compile(
    r"step:(?P<step>\d+)/(?P<steps>\d+) val_loss:(?P<val_loss>[\d.]+)"
    r" train_time:(?P<train_time_ms>[\d.]+)ms"
)
"""Line of a log after a validation; the last one of a run has its final loss."""

COLUMNS = ("commit", "path", "step", "steps", "val_loss", "train_time_ms")


def read(path: Path) -> Iterator[dict[str, str]]:
    """Yield the last validation of each log below a folder; the variant is the log's folder.

    A run that has not reached its last step is a crashed one. Logs of other programs, which have no
    such line, are left out.
    """
    for log in sorted([*path.rglob("*.txt"), *path.rglob("*.log")]):
        validations = list(VALIDATION.finditer(log.read_text(encoding="utf-8", errors="replace")))
        if not validations:
            continue
        run = validations[-1].groupdict()
        yield {
            "variant": log.parent.relative_to(path).as_posix(),
            "path": log.relative_to(path).as_posix(),
            "state": "finished" if run["step"] == run["steps"] else "crashed",
            **run,
        }


def read_records(path: Path) -> Iterator[dict[str, str]]:
    """Yield the runs of the committed table; the variant is the folder of a record's logs."""
    with path.open(encoding="utf-8", newline="") as file:
        for run in csv.DictReader(file):
            folder = Path(run["path"]).relative_to(TRACK).parent
            state = "finished" if run["step"] == run["steps"] else "crashed"
            yield {"variant": folder.as_posix(), "state": state, **run}


def main(checkout: Path, commit: str) -> None:
    """Print the runs of the first track as CSV."""
    table = csv.DictWriter(sys.stdout, COLUMNS, extrasaction="ignore", lineterminator="\n")
    table.writeheader()
    for run in read(checkout / TRACK):
        table.writerow({**run, "commit": commit, "path": f"{TRACK}/{run['path']}"})


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
