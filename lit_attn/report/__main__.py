"""`python -m lit_attn.report RUNS`: regenerate every table and figure from the records."""

import argparse
import sys
from pathlib import Path

from lit_attn.report import write_reports
from lit_attn.schema.errors import ConfigError


def main(arguments: list[str] | None = None) -> int:
    """Exit code 0, or 2 where there is nothing to report on or nowhere to write it."""
    parser = argparse.ArgumentParser(prog="python -m lit_attn.report", description=__doc__)
    parser.add_argument("runs", type=Path, help="the folder that a runner wrote")
    parser.add_argument("--study", nargs="+", metavar="NAME", help="only these")
    parser.add_argument("--reports", type=Path, default=Path("reports"), metavar="DIR")
    options = parser.parse_args(arguments)
    try:
        for folder in write_reports(options.runs, options.reports, options.study):
            print(folder / "table.html")
    except (ConfigError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    print(options.reports / "index.html")
    return 0


if __name__ == "__main__":
    sys.exit(main())
