"""`python -m lit_attn.report RUNS`: write every table and figure from the records."""

import argparse
import sys
from pathlib import Path

from lit_attn.report import write_reports
from lit_attn.schema.errors import ConfigError


def main(arguments: list[str] | None = None) -> int:
    """Return exit code 0, 1 if a study was skipped, or 2 if no report could be written."""
    parser = argparse.ArgumentParser(prog="python -m lit_attn.report", description=__doc__)
    parser.add_argument("runs", type=Path, help="folder that the runner wrote")
    parser.add_argument("--study", nargs="+", metavar="NAME", help="report only these studies")
    parser.add_argument("--reports", type=Path, default=Path("reports"), metavar="DIR")
    options = parser.parse_args(arguments)
    try:
        folders = write_reports(options.runs, options.reports, options.study)
    except (ConfigError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    for folder in folders:
        print(folder / "table.html")
    print(options.reports / "index.html")
    planned = options.study or list(options.runs.glob("*/plan.json"))
    return 0 if len(folders) == len(planned) else 1


if __name__ == "__main__":
    sys.exit(main())
