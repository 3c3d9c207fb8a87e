"""Options of commands that read the runs of another program."""

import argparse
from typing import Any

from lit_attn.report.statistics import PAIRS

FOREIGN = {
    "metric": "--metric",
    "pairs": "--pairs",
    "baseline": "--baseline",
    "variant": "--variant",
    "seed": "--seed",
    "cut_seed": "--cut-seed",
    "where": "--where",
    "states": "--state",
    "reader": "--reader",
}
"""Options about a table of runs, by name in a namespace; the plan of a study has all of this."""


def add_foreign_arguments(parser: "argparse._ActionsContainer", **metric: Any) -> None:
    """Add the options that say what the columns of another program's table mean.

    `metric` are further arguments of --metric: how many there can be, and the default.
    """
    add = parser.add_argument
    meanings = [f"{value}: {words}." for value, words in PAIRS.items()]
    add("--pairs", choices=PAIRS, help=f"{' '.join(meanings)} Nothing is assumed.")
    add(
        "--metric",
        metavar="COLUMN[:min|:max]",
        help="Column that is compared, and which direction is better unless it is known.",
        **metric,
    )
    add(
        "--seed",
        metavar="COLUMN",
        default="",
        help="Column with the seeds (default: seed).",
    )
    add(
        "--cut-seed",
        action="store_true",
        help="Take the seed from the end of the names of runs (belief2-seed3).",
    )
    add_table_arguments(parser)


def add_table_arguments(parser: "argparse._ActionsContainer") -> None:
    """Add the options with which a table is read, whatever is computed from it."""
    add = parser.add_argument
    add("--baseline", metavar="NAME", default="", help="Variant that all others are compared with.")
    add(
        "--variant",
        metavar="COLUMN",
        default="",
        help="Column with the names of variants (default: variant), or the columns of a product of"
        " factors (residual,zz).",
    )
    add(
        "--where",
        metavar="COLUMN=VALUE",
        action="append",
        default=[],
        help="Use only the runs with this value; the sign can be !=, <, <=, > or >=, too. Several"
        " conditions must all hold.",
    )
    add(
        "--state",
        metavar="WORD=STATE",
        dest="states",
        action="append",
        default=[],
        help="Runs whose column of states has this word are done, failed or open (PRUNED=failed).",
    )
    add(
        "--reader",
        metavar="FILE.py:FUNCTION",
        default="",
        help="Function that gets the path and yields a mapping for each run. FILE.py is executed.",
    )
