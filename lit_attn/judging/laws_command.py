"""Command `laws`: power laws and effective speed-ups of the runs of any program."""

import argparse
from argparse import ArgumentParser, Namespace

from lit_attn.judging.arguments import add_table_arguments
from lit_attn.schema.commands import Command

DESCRIPTION = """\
Fit L = E + A C^-b to the loss L and the cost C of the runs in a table, and say for each variant how
much cost the baseline needs for the same loss. The table is one that `judge` reads, with runs of
the baseline at two costs or more."""


class Laws(Command):
    """Command that prints the laws of a table and the speed-ups of its variants."""

    words = "FILE"
    page = "laws.md"
    help = "fit loss over cost, and compare at equal cost"
    description = DESCRIPTION

    def add_arguments(self, parser: ArgumentParser) -> None:
        """Add the table and the options."""
        add = parser.add_argument
        add("file", metavar="FILE", help="Runs of any program, as `judge` reads them.")
        add(
            "--cost",
            metavar="COLUMN",
            required=True,
            help="Column with the cost of a run: FLOPs, tokens, steps or seconds.",
        )
        add(
            "--metric",
            metavar="COLUMN[:min]",
            required=True,
            help="Column with the loss.",
        )
        add(
            "--rate",
            metavar="COLUMN",
            default="",
            help="Column with cost per second, which turns speed-ups into those of time.",
        )
        add(
            "--asymptote",
            metavar="E|fit",
            type=_read_asymptote,
            default=0.0,
            help="Loss that no cost reaches (default: 0); fit: fitted to four costs or more.",
        )
        add(
            "--confidence",
            metavar="SHARE",
            type=float,
            default=0.95,
            help="Confidence of all intervals (default: 0.95).",
        )
        add(
            "--json",
            action="store_true",
            help="Print JSON (`schema laws` prints its schema).",
        )
        add_table_arguments(parser)

    def run(self, options: Namespace) -> int:
        """Print the laws. Raises ConfigError for a table that has none."""
        # These modules import pandas, which --help does not need.
        from lit_attn.judging.laws import find_laws
        from lit_attn.judging.laws_table import draw_laws
        from lit_attn.report.answers.entry import write_answer

        answer = find_laws(
            options.file,
            options.metric,
            cost=options.cost,
            baseline=options.baseline,
            variant=options.variant,
            rate=options.rate,
            asymptote=options.asymptote,
            confidence=options.confidence,
            where=options.where,
            states=options.states,
            reader=options.reader,
        )
        print(write_answer(answer) if options.json else draw_laws(answer))
        return 0


def _read_asymptote(text: str) -> float | None:
    """Return the asymptote, None for `fit`."""
    if text == "fit":
        return None
    try:
        return float(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"'{text}' is neither a number nor fit") from error
