"""Options of commands that read the runs of another program."""

import argparse


def add_foreign_arguments(parser: "argparse._ActionsContainer") -> None:
    """Add the options that say what the columns of another program's table mean."""
    add = parser.add_argument
    add(
        "--pairs",
        choices=("seed", "none"),
        help="seed: runs of two variants with the same seed are a pair. none: all runs are"
        " independent. Nothing is assumed.",
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
