"""Write every table and figure from the records of the runner.

`--csv results.csv` does the same for a table of another program, with the columns variant, seed and
one or more metrics. `--paper mgk` writes every table and figure of a paper as printed, from the
folder `runs` if no other one is given.
"""

import sys
from pathlib import Path

from lit_attn.config.papers import SIZES, read_paper
from lit_attn.files import require_writable
from lit_attn.report import write_reports
from lit_attn.schema.errors import OneLineParser, command, program


@command
def main(arguments: list[str] | None = None) -> int:
    """Return exit code 0, 1 if a study was skipped, or 2 if no report could be written."""
    parser = OneLineParser(program("report"), description=__doc__)
    add = parser.add_argument
    add("runs", type=Path, nargs="?", help="folder that the runner wrote")
    add("--study", nargs="+", action="extend", metavar="NAME", help="report only these studies")
    add("--across", nargs="+", metavar="NAME", help="one table of these studies, with mean ranks")
    meaning = "write tables and figures to DIR (default: reports)"
    add("--reports", type=Path, default=Path("reports"), metavar="DIR", help=meaning)
    add("--csv", type=Path, metavar="FILE", help="table with variant, seed and metric columns")
    add("--baseline", metavar="NAME", help="with --csv: the baseline (default: first variant)")
    text = "with --csv: metric columns and their goals (default: all numeric columns)"
    add("--metric", nargs="+", metavar="COLUMN[:min|:max]", help=text)
    add("--paper", metavar="NAME", help="write the tables and figures of a paper as printed")
    add_size = parser.add_mutually_exclusive_group().add_argument
    text = "with --paper: the results of small models"
    for flag, size in SIZES.items():
        add_size(flag, dest="small", action="store_const", const=size, default="", help=text)
    options = parser.parse_args(arguments)
    conditions = {
        "--paper": (options.paper, ("small",)),
        "--csv": (options.csv, ("baseline", "metric")),
        "a folder of runs": (options.runs and not options.paper, ("study", "across")),
    }
    for condition, (is_met, names) in conditions.items():
        for name in names:
            if getattr(options, name) and not is_met:
                parser.error(f"--{name} needs {condition}")
    if sum(bool(is_met) for is_met, _ in conditions.values()) != 1:
        parser.error("give a folder of runs, --csv FILE or --paper NAME")
    require_writable(options.reports, "--reports")
    # pandas is imported only when it is needed.
    if options.paper:
        from lit_attn.report.papers_page import write_paper

        source = read_paper(options.paper, options.small)
        print(write_paper(source, options.runs or Path("runs"), options.reports))
        return 0
    if options.across:
        from lit_attn.report.read import read_studies
        from lit_attn.report.study_ranks import write_across

        print(write_across(list(read_studies(options.runs, options.across)), options.reports))
        return 0
    if options.csv:
        from lit_attn.report import write
        from lit_attn.report.table_input import read_table

        studies = read_table(options.csv, options.baseline, options.metric)
        folders, planned = write.write_reports(studies, options.reports), len(studies)
    else:
        folders = write_reports(options.runs, options.reports, options.study)
        planned = len(options.study or list(options.runs.glob("*/plan.json")))
    print(*(folder / "table.html" for folder in folders), options.reports / "index.html", sep="\n")
    return 0 if len(folders) == planned else 1


if __name__ == "__main__":
    sys.exit(main())
