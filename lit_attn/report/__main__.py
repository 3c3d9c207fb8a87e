"""Write every table and figure from the records of the runner.

`--csv results.csv` does the same for a table of another program, with the columns variant, seed and
one or more metrics. `--paper mgk` writes every table and figure of a paper as printed, from the
folder `runs` if no other one is given.
"""

import sys
from pathlib import Path

from lit_attn.config.papers import SIZES, read_paper
from lit_attn.files import require_writable
from lit_attn.schema.errors import OneLineParser, command, program


@command
def main(arguments: list[str] | None = None) -> int:
    """Return exit code 0, 1 if a study or scaling was skipped, or 2 if no report was written."""
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
        from lit_attn.report.papers_page import write_parts

        source = read_paper(options.paper, options.small)
        outcome = write_parts(source, options.runs or Path("runs"), options.reports)
        print(*outcome.written)
        return 1 if outcome.skipped else 0
    if options.across:
        from lit_attn.report.read import read_studies
        from lit_attn.report.study_ranks import write_across

        records = list(read_studies(options.runs, options.across))
        outcome = write_across(records, options.reports)
        print(*outcome.written)
        return 1 if outcome.skipped or len(records) < len(options.across) else 0
    from lit_attn.report import write
    from lit_attn.report.read import read_studies

    if options.csv:
        from lit_attn.report.table_input import read_table

        tables = read_table(options.csv, options.baseline, options.metric)
        planned_count = len(tables)
        outcome = write.write_reports(tables, options.reports)
    else:
        planned_count = len(options.study or list(options.runs.glob("*/plan.json")))
        studies = read_studies(options.runs, options.study)
        outcome = write.write_reports(studies, options.reports)
    for folder in outcome.written:
        print(folder / "table.html")
    print(options.reports / "index.html")
    return 1 if outcome.skipped or len(outcome.written) < planned_count else 0


if __name__ == "__main__":
    sys.exit(main())
