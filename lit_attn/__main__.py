"""Console command `lit-attn`, also `python -m lit_attn`: every command of the package."""

import sys
from pathlib import Path

from lit_attn.ablate.commands.arguments import split_words
from lit_attn.ablate.commands.board import Board
from lit_attn.ablate.commands.rerun import Rerun
from lit_attn.ablate.commands.run import Run
from lit_attn.ablate.commands.seal import Seal
from lit_attn.ablate.commands.status import Logs, Status
from lit_attn.commands import (
    STUDIES,
    Completion,
    Init,
    List,
    Program,
    Schema,
    make_overview_parser,
    read_study_titles,
)
from lit_attn.judging.judge_command import Judge
from lit_attn.judging.laws_command import Laws
from lit_attn.schema import errors
from lit_attn.schema.commands import Command, route
from lit_attn.schema.errors import ConfigError, command

COMMANDS: dict[str, Command] = {
    "init": Init(),
    "run": Run(),
    "rerun": Rerun(),
    "status": Status(),
    "board": Board(),
    "judge": Judge(),
    "laws": Laws(),
    "seal": Seal(),
    "logs": Logs(),
    "report": Program("RUNS", "write the tables again", "lit_attn.report.__main__:main"),
    "train": Program("FOLDER", "train one cell alone", "lit_attn.train:main"),
    "generate": Program("FOLDER", "continue a text", "lit_attn.hub.generate:main"),
    "export": Program("hub FOLDER", "write weights and a model card", "lit_attn.hub.export:main"),
    "bench": Program("WHAT", "measure time and memory", "lit_attn.bench.__main__:main"),
    "doctor": Program("", "examine this machine", "lit_attn.doctor.__main__:main"),
    "prepare": Program("SOURCE", "download and tokenise text", "lit_attn.data.prepare:main"),
    "list": List(),
    "schema": Schema(),
}
COMMANDS["completion"] = Completion(COMMANDS)


@command
def main(arguments: list[str] | None = None) -> int:
    """Run a command and return its exit code; 2 for a wrong command line or configuration."""
    words = sys.argv[1:] if arguments is None else arguments
    name, *rest = words or ["--help"]
    if name not in ("-h", "--help", "--version"):
        errors.require("lit-attn: unknown command", name, COMMANDS)
    if name in ("run", "seal"):
        rest = find_studies(rest)
    elif name == "rerun" and not {"-h", "--help"} & set(rest):
        names, others = split_words(rest)
        if names:
            choice, *names = names
            rest = [choice, *find_studies([*names, *others])]
    return route(make_overview_parser(), COMMANDS, [name, *rest])


def find_studies(words: list[str]) -> list[str]:
    """Return the words of `lit-attn run` as a file, options, and `--study` for each name.

    The file is the one that is named, else ./ablations.yaml, else the file that comes with the
    package. Raises ConfigError, which suggests the nearest name, for a study in neither file.
    """
    names, options = split_words(words)
    if any(word.partition("=")[0] in ("-h", "--help", "--paper") for word in options):
        return words
    path = STUDIES
    files = [name for name in names if Path(name).suffix in (".yaml", ".yml")]
    if not files:
        files = [name for name in names[:1] if Path(name).is_file()]
    if files:
        path = Path(files[0])
        names.remove(files[0])
    elif names:
        path = _find_file(names)
    elif not path.exists():
        raise ConfigError(
            f"{path}: no such file; write one with `lit-attn init`, or name a study, as in"
            " `lit-attn run digits` (`lit-attn list studies` names all)"
        )
    study_options = []
    for name in names:
        study_options += ["--study", name]
    return [str(path), *options, *study_options]


def _find_file(names: list[str]) -> Path:
    """Return the first file that has all of the named studies, or else ./ablations.yaml.

    Raises ConfigError for a study in no file.
    """
    titles = read_study_titles()
    # A study in ./ablations.yaml can stand in the package's file, too.
    every_study = dict.fromkeys(study for file in titles for study in titles[file])
    for name in names:
        errors.require("lit-attn: no file or study", name, every_study)
    for file, studies in titles.items():
        if set(names) <= studies.keys():
            return file
    return STUDIES


if __name__ == "__main__":
    sys.exit(main())
