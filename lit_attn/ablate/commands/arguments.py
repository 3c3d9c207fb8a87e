"""Command line of the commands that read studies: `run`, `rerun` and `seal`."""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from lit_attn.ablate.gpus import GPUS, read_gpu
from lit_attn.config.paper_sizes import add_size_options
from lit_attn.schema.commands import Command
from lit_attn.schema.errors import ConfigError, OneLineParser, program, suggest

EPILOG = Path(__file__).parents[1].joinpath("epilog.txt").read_text(encoding="utf-8")


class StudyCommand(Command):
    """Command that reads the studies of a file or of a paper."""

    has_options = True

    def parser_settings(self, name: str) -> dict[str, Any]:
        """Return the settings of `Command`, with the epilog about the other commands."""
        return {
            **super().parser_settings(name),
            "epilog": EPILOG.replace("lit-attn", program("")),
            "formatter_class": argparse.RawDescriptionHelpFormatter,
        }

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Add the file of studies and all options to a parser."""
        add_study_arguments(parser)

    def refuse(self, parser: OneLineParser, unknown: list[str]) -> NoReturn:
        """Raise ConfigError, which suggests the nearest option, for the first unknown word."""
        word = unknown[0]
        if word.startswith("-"):
            documented = argparse.ArgumentParser(add_help=False)
            add_study_arguments(documented)
            destinations = vars(documented.parse_args([]))
            names = [f"--{name.replace('_', '-')}" for name in destinations]
            raise ConfigError(f"{word}: unknown option{suggest(word, names)}")
        raise ConfigError(
            f"'{word}' is not an option, and there can be one file only;"
            " for seeds write --seeds 0,1,2"
        )


def add_study_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the file of studies and the options of `run` to a parser, in the order of the help."""

    def flag(name: str, text: str) -> None:
        parser.add_argument(name, action="store_true", help=text)

    def several(name: str, metavar: str, text: str) -> None:
        parser.add_argument(name, action="append", default=[], metavar=metavar, help=text)

    def value(
        name: str, kind: Callable[[str], object], metavar: str, text: str, default: object = None
    ) -> None:
        parser.add_argument(name, type=kind, metavar=metavar, help=text, default=default)

    parser.add_argument(
        "file",
        type=Path,
        metavar="ablations.yaml",
        nargs="?",
        help="File of studies (not with --paper).",
    )
    several("--study", "NAME", "Run this study (default: studies with `default: true`).")
    value("--paper", str, "NAME", "Run the tables and figures of a paper (see experiments/papers).")
    several("--table", "NUMBER", "With --paper: run this table (2) or figure (figure-2) only.")
    add_size_options(parser, "With --paper: run small models, for two CPU cores, on {data}.")
    parser.add_argument(
        "--cost",
        type=read_gpu,
        choices=GPUS,
        help="With --paper: print GPU time; run nothing.",
    )
    flag("--dry-run", "List the cells and their states; run nothing.")
    flag("--json", "With --dry-run: print JSON (lit_attn/report/schemas/dry-run.json).")
    flag("--params", "With --dry-run: show parameters and FLOPs.")
    flag("--estimate", "With --dry-run: time a few steps of each model; show the expected hours.")
    parser.add_argument(
        "--gpu",
        type=read_gpu,
        choices=GPUS,
        help="With --dry-run: estimate memory; show whether it fits.",
    )
    value("--jobs", int, "N", "Run at most N cells at once (default: one per GPU, or per core).")
    value("--seeds", str, "N|A,B,...", "Use N seeds, or the seeds A, B, ... ('7,' is one seed).")
    several("--set", "KEY=VALUE", "Override a key of all variants: a side study with own folders.")
    value("--limit", int, "N", "Run at most N of the missing cells.")
    value("--out", Path, "DIR", "Write results to DIR (default: runs, or runs/smoke).")
    value("--reports", Path, "DIR", "Write tables to DIR (default: reports).")
    flag(
        "--adopt",
        "Use finished cells of renamed studies and variants, and folders of replaced files.",
    )
    flag("--smoke", "Run one small step of every cell, in a separate folder.")
    value("--stall", float, "MINUTES", "Kill a cell without a step for MINUTES (default 30).", 30)
    parser.add_argument(
        "--launcher",
        choices=("local", "slurm"),
        default="local",
        help="Run the cells on this machine or as SLURM jobs (default: local).",
    )
    flag("--cancel", "With --launcher slurm: cancel the jobs of the studies.")
    flag("--cancel-removed", "As --cancel, but only jobs of cells that the file no longer has.")
    flag("--quiet-timing", "Measure step times after the cells, or at once with --dry-run.")
    flag("--allow-noisy-timing", "Accept step times that vary by more than a tenth.")
