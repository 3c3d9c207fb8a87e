"""Write every table and figure from the records of the runner.

`--csv results.csv --pairs seed` does the same for the runs of another program, as `judge` reads
them, with one or more metrics. `--paper mgk` writes every table and figure of a paper as printed,
from the folder `runs` if no other one is given.
"""

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from lit_attn.files import require_writable
from lit_attn.judging.arguments import FOREIGN, add_foreign_arguments
from lit_attn.papers.sizes import add_size_options, find_size_option
from lit_attn.schema.errors import OneLineParser, command, program

if TYPE_CHECKING:
    from lit_attn.report.records.skipped import Outcome


@command
def main(arguments: list[str] | None = None) -> int:
    """Return exit code 0, 1 if a study or scaling was skipped, or 2 if no report was written."""
    parser = _make_parser()
    options = parser.parse_args(arguments)
    _check_options(parser, options)
    require_writable(options.reports, "--reports")
    # These functions import pandas, which --help does not need.
    if options.paper:
        return _report_paper(options)
    if options.across:
        return _report_across(options)
    return _report_studies(options)


def _make_parser() -> OneLineParser:
    parser = OneLineParser(program("report"), description=__doc__)
    add = parser.add_argument
    add("runs", type=Path, nargs="?", help="folder that the runner wrote")
    add("--study", nargs="+", action="extend", metavar="NAME", help="report only these studies")
    add("--across", nargs="+", metavar="NAME", help="one table of these studies, with mean ranks")
    add(
        "--reports",
        type=Path,
        default=Path("reports"),
        metavar="DIR",
        help="write tables and figures to DIR (default: reports)",
    )
    add("--csv", type=Path, metavar="FILE", help="runs of another program, as in `judge FILE`")
    add(
        "--json",
        action="store_true",
        help="print what was written as JSON (`schema report` prints its schema)",
    )
    add("--paper", metavar="NAME", help="write the tables and figures of a paper as printed")
    add_size_options(parser, "with --paper: the results of small models on {data}")
    foreign = parser.add_argument_group("with --csv")
    add_foreign_arguments(foreign, nargs="+")
    return parser


def _check_options(parser: OneLineParser, options: argparse.Namespace) -> None:
    """End with exit code 2 unless there is one source, with options of this source alone."""
    sources = {
        "--paper": bool(options.paper),
        "--csv": bool(options.csv),
        # With --paper it is the folder of the paper's runs.
        "a folder of runs": bool(options.runs and not options.paper),
    }
    needed_sources = {
        **dict.fromkeys(FOREIGN, "--csv"),
        "study": "a folder of runs",
        "across": "a folder of runs",
    }
    if options.small and not sources["--paper"]:
        option = find_size_option(options.small)
        parser.error(f"{option} needs --paper")
    for name, source in needed_sources.items():
        if getattr(options, name) and not sources[source]:
            parser.error(f"{FOREIGN.get(name, f'--{name}')} needs {source}")
    if sum(sources.values()) != 1:
        parser.error("give a folder of runs, --csv FILE or --paper NAME")


def _report_paper(options: argparse.Namespace) -> int:
    """Write the page of a paper and return the exit code."""
    from lit_attn.papers.page import write_parts
    from lit_attn.papers.source import read_paper

    source = read_paper(options.paper, options.small)
    outcome = write_parts(source, options.runs or Path("runs"), options.reports)
    if options.json:
        _print_answer(outcome, index=None)
    else:
        print(*outcome.written)
    return 1 if outcome.skipped else 0


def _report_across(options: argparse.Namespace) -> int:
    """Write the table across studies and return the exit code."""
    from lit_attn.report.records.read import read_studies
    from lit_attn.report.tables.study_ranks import write_across

    records = list(read_studies(options.runs, options.across))
    outcome = write_across(records, options.reports)
    if options.json:
        _print_answer(outcome, index=None)
    else:
        print(*outcome.written)
    has_skipped = outcome.skipped or len(records) < len(options.across)
    return 1 if has_skipped else 0


def _report_studies(options: argparse.Namespace) -> int:
    """Write the reports of studies, from a folder or a table, and return the exit code."""
    from lit_attn.judging.runs import read_tables
    from lit_attn.report.pages import write
    from lit_attn.report.records.looks import record_looks
    from lit_attn.report.records.read import read_studies

    if options.csv:
        tables = read_tables(options)
        planned_count = len(tables)
        outcome = write.write_reports(tables, options.reports)
    else:
        planned_count = len(options.study or list(options.runs.glob("*/plan.json")))
        studies = record_looks(read_studies(options.runs, options.study), options.runs)
        outcome = write.write_reports(studies, options.reports)
    index = options.reports / "index.html"
    if options.json:
        _print_answer(outcome, index)
    else:
        for folder in outcome.written:
            print(folder / "table.html")
        print(index)
    has_skipped = outcome.skipped or len(outcome.written) < planned_count
    return 1 if has_skipped else 0


def _print_answer(outcome: "Outcome", index: Path | None) -> None:
    """Print the folders or pages that were written, and the names that were skipped, as JSON."""
    from lit_attn.report.answers.entry import write_answer
    from lit_attn.report.answers.runs import ReportAnswer, WrittenReport

    reports = []
    for path in outcome.written:
        page = path / "table.html" if path.is_dir() else path
        table = page.with_suffix(".csv")
        # The page of a study or of a paper stands in a folder with its name.
        is_single = page.name not in ("table.html", "index.html")
        report = WrittenReport(
            name=page.stem if is_single else page.parent.name,
            page=str(page),
            table=str(table) if table.exists() else None,
        )
        reports.append(report)
    answer = ReportAnswer(
        reports=reports,
        skipped=outcome.skipped,
        index=None if index is None else str(index),
    )
    print(write_answer(answer))


if __name__ == "__main__":
    sys.exit(main())
