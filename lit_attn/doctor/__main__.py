"""Examine this machine: layers, compiled layers, trainings and a short benchmark, without data.

With --presets or --parts only these layers are compared with their formulas. The last line says
what does not hold. Exit codes: 0 everything that was checked holds, 1 something does not, 2 the
command is wrong.
"""

import argparse
import json
import os
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from lit_attn.files import require_writable, write_atomic, write_json
from lit_attn.schema.errors import ConfigError, OneLineParser, command, program, require

if TYPE_CHECKING:
    from lit_attn.doctor.verdict import Examination

RECORDS = Path("doctor")  # Folder of the records of all examinations.


@command
def main(arguments: list[str] | None = None) -> int:
    """Return 0 if everything that was checked holds, 1 if not, 2 for a wrong command line."""
    options = _make_parser().parse_args(arguments)
    require_writable(options.out, "--out")
    # torch's profiler, which counts a CPU's memory, would report its own start and end.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    import torch

    from lit_attn.attention.own_presets import load_presets
    from lit_attn.attention.spec import PRESETS
    from lit_attn.checks.paths import Selection
    from lit_attn.doctor.examine import examine
    from lit_attn.doctor.verdict import to_json

    kind = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if kind == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda: torch finds no GPU; write --device cpu")
    presets = load_presets(options.parts)
    for name in options.presets or []:
        require("--presets: unknown preset", name, PRESETS)
    if options.parts and not options.presets and not presets:
        raise ConfigError("--parts: these files have no part and no preset to compare")
    selection = Selection(options.short, tuple(options.presets or presets), tuple(options.parts))
    lines: list[str] = []

    def show(line: str) -> None:
        lines.append(line)
        # With --json, standard output has the record alone.
        print(line, file=sys.stderr if options.json else sys.stdout, flush=True)

    examination = examine(torch.device(kind), selection, options.runs, show)
    folder = options.out / name_record(examination)
    record = to_json(examination)
    write_atomic(folder / "doctor.txt", "\n".join(lines) + "\n")
    write_json(folder / "doctor.json", record)
    if options.json:
        print(json.dumps(record, indent=2, sort_keys=True))
    else:
        print(f"record: {folder}")
    return 1 if examination.list_problems() else 0


def name_record(examination: "Examination") -> str:
    """Return the name of the record's folder: date, device, and versions of torch and the code."""
    versions = f"torch {examination.machine['torch']} code {examination.code}"
    kind = "short" if examination.is_short else "full"
    if examination.named:
        kind = "presets"
    text = f"{examination.checked[:10]} {examination.device} {versions} {kind}"
    return re.sub(r"[^A-Za-z0-9_.]+", "-", text).strip("-")


def _make_parser() -> argparse.ArgumentParser:
    raw = argparse.RawDescriptionHelpFormatter
    parser = OneLineParser(
        program("doctor"), page="gpu.md", description=__doc__, formatter_class=raw
    )
    add = parser.add_argument
    add("--short", action="store_true", help="only the layers, one preset of each kind")
    add("--presets", nargs="+", metavar="NAME", help="compare only these, in float64 too")
    text = "plug-ins to import; without --presets only their presets and parts are compared"
    add("--parts", type=Path, nargs="+", default=[], metavar="FILE", help=text)
    add("--json", action="store_true", help="print the record as JSON; the text goes to stderr")
    text = "write the record to a new folder there (default: %(default)s)"
    add("--out", type=Path, default=RECORDS, metavar="DIR", help=text)
    text = "folder of the cells, whose disk is examined (default: %(default)s)"
    add("--runs", type=Path, default=Path("runs"), metavar="DIR", help=text)
    add("--device", choices=["cpu", "cuda"], help="default: a GPU if there is one")
    return parser


if __name__ == "__main__":
    sys.exit(main())
