"""Command line of the commands that read studies: `run`, `rerun` and `seal`."""

import argparse
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from lit_attn.ablate.gpus import GPUS, read_gpu
from lit_attn.papers.sizes import SIZES, add_size_options
from lit_attn.schema.commands import Command
from lit_attn.schema.errors import ConfigError, OneLineParser, program, suggest

if TYPE_CHECKING:
    from lit_attn.config.study_values import SeedChoice
    from lit_attn.papers.source import PaperSource
    from lit_attn.schema.yaml_text import Mapping

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
            names = [option_name(entry.name) for entry in fields(StudyOptions)]
            names += SIZES
            raise ConfigError(f"{word}: unknown option{suggest(word, names)}")
        raise ConfigError(
            f"'{word}' has no option before it, and there can be one file only; write --study"
            " before the name of each study, and seeds as --seeds 0,1,2"
        )


def option_name(name: str) -> str:
    """Return the option of the command line whose value is the attribute `name`."""
    return f"--{name.replace('_', '-')}"


def _option(text: str, needs: str = "", **settings: Any) -> dict[str, Any]:
    """Describe an option for the metadata of its field.

    `settings` are arguments of `add_argument`. `needs` is the option without which this one is an
    error. `has_value` is True if the next word is the value of the option.
    """

    def add(parser: argparse.ArgumentParser, name: str) -> None:
        parser.add_argument(option_name(name), help=text, **settings)

    has_value = settings.get("action") != "store_true"
    return {"add": add, "needs": needs, "has_value": has_value}


def _flag(text: str, needs: str = "") -> dict[str, Any]:
    """Describe an option without a value."""
    return _option(text, needs, action="store_true")


def _several(metavar: str, text: str, needs: str = "") -> dict[str, Any]:
    """Describe an option that can be written several times."""
    return _option(text, needs, action="append", default=[], metavar=metavar)


def _value(
    kind: Callable[[str], object], metavar: str, text: str, default: object = None
) -> dict[str, Any]:
    """Describe an option with a value that `kind` reads."""
    return _option(text, type=kind, metavar=metavar, default=default)


def _add_file(parser: argparse.ArgumentParser, name: str) -> None:
    parser.add_argument(
        name,
        type=Path,
        metavar="ablations.yaml",
        nargs="?",
        help="File of studies (not with --paper).",
    )


def _add_sizes(parser: argparse.ArgumentParser, _: str) -> None:
    add_size_options(parser, "With --paper: run small models, for two CPU cores, on {data}.")


DRY_RUN = "--dry-run"
PAPER = "--paper"
SLURM = "--launcher slurm"


@dataclass(frozen=True)
class StudyOptions:
    """List of the options: each field is an option, in the order of the help.

    `read_options` (lit_attn.ablate.commands.options) gives each field its value: it reads `paper`,
    `set` and `seeds`, which needs PyTorch, and chooses the folders `out` and `reports`.
    """

    file: Path | None = field(metadata={"add": _add_file, "needs": "", "has_value": False})
    study: list[str] = field(
        metadata=_several("NAME", "Run this study (default: studies with `default: true`).")
    )
    paper: "PaperSource | None" = field(
        metadata=_value(
            str, "NAME", "Run the tables and figures of a paper (see experiments/papers)."
        )
    )
    table: list[str] = field(
        metadata=_several(
            "NUMBER", "With --paper: run this table (2) or figure (figure-2) only.", PAPER
        )
    )
    small: str = field(metadata={"add": _add_sizes, "needs": PAPER, "has_value": False})
    cost: str | None = field(
        metadata=_option(
            "With --paper: print GPU time; run nothing.", PAPER, type=read_gpu, choices=GPUS
        )
    )
    dry_run: bool = field(metadata=_flag("List the cells and their states; run nothing."))
    json: bool = field(
        metadata=_flag("With --dry-run: print JSON (`schema dry-run` prints its schema).", DRY_RUN)
    )
    params: bool = field(metadata=_flag("With --dry-run: show parameters and FLOPs.", DRY_RUN))
    estimate: bool = field(
        metadata=_flag(
            "With --dry-run: time a few steps of each model; show the expected hours.", DRY_RUN
        )
    )
    jobs: int | None = field(
        metadata=_value(
            int, "N", "Run at most N cells at once (default: one per GPU, or per core)."
        )
    )
    seeds: "SeedChoice | None" = field(
        metadata=_value(
            str,
            "N|A,B,...",
            "Use the first N seeds of the study, or the seeds A, B, ... ('7,' is one seed).",
        )
    )
    set: "Mapping" = field(
        metadata=_several(
            "KEY=VALUE", "Override a key of all variants: a side study with own folders."
        )
    )
    limit: int | None = field(metadata=_value(int, "N", "Run at most N of the missing cells."))
    out: Path = field(
        metadata=_value(Path, "DIR", "Write results to DIR (default: runs, or runs/smoke).")
    )
    reports: Path = field(metadata=_value(Path, "DIR", "Write tables to DIR (default: reports)."))
    smoke: bool = field(metadata=_flag("Run one small step of every cell, in a separate folder."))
    stall: float = field(
        metadata=_value(
            float, "MINUTES", "Kill a cell without a step for MINUTES (default 30).", 30
        )
    )
    launcher: str = field(
        metadata=_option(
            "Run the cells on this machine or as SLURM jobs (default: local).",
            choices=("local", "slurm"),
            default="local",
        )
    )
    cancel: bool = field(
        metadata=_flag("With --launcher slurm: cancel the jobs of the studies.", SLURM)
    )
    cancel_removed: bool = field(
        metadata=_flag("As --cancel, but only jobs of cells that the file no longer has.", SLURM)
    )
    quiet_timing: bool = field(
        metadata=_flag("Measure step times after the cells, or at once with --dry-run.")
    )
    allow_noisy_timing: bool = field(
        metadata=_flag("Accept step times that vary by more than a tenth.")
    )

    @property
    def is_slurm(self) -> bool:
        """True if the cells run as SLURM jobs."""
        return self.launcher == "slurm"

    @property
    def stall_seconds(self) -> float:
        """Seconds without a step after which a cell is killed."""
        return 60 * self.stall


def add_study_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the file of studies and the options of `run` to a parser, in the order of the help."""
    for entry in fields(StudyOptions):
        entry.metadata["add"](parser, entry.name)


def split_words(words: list[str]) -> tuple[list[str], list[str]]:
    """Return the words that are names, and the options with their values, each in their order."""
    entries = [entry for entry in fields(StudyOptions) if entry.metadata["has_value"]]
    value_options = [option_name(entry.name) for entry in entries]
    names = []
    options = []
    is_value = False
    for word in words:
        if is_value:
            options.append(word)
            is_value = False
        elif word.startswith("-"):
            options.append(word)
            # argparse accepts the beginning of an option.
            is_value = len(word) > 2 and any(name.startswith(word) for name in value_options)
        else:
            names.append(word)
    return names, options
