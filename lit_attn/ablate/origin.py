"""The file of studies that a study's folder belongs to.

A study's folder has the name of the study, so two files with one study name would share its plan,
results and tables. Therefore `origin.json` in the folder records the file: the first run claims the
folder, and another file is refused as long as the recorded one has the study. The path is relative
to the folder, so that a project can be moved as a whole.
"""

import os
from pathlib import Path
from typing import TYPE_CHECKING

from lit_attn.cells.records import Origin
from lit_attn.files import one_at_a_time
from lit_attn.schema.errors import ConfigError
from lit_attn.schema.yaml_text import SHIPPED

if TYPE_CHECKING:
    from lit_attn.config.study import StudySource

NAME = "origin.json"
INSTALLED = "installed:"  # Beginning of the record of a file that the package itself contains.


def require_origin(source: "StudySource", folder: Path) -> str:
    """Raise ConfigError if `folder` belongs to a study of the same name in another file.

    Returns a line about the change if the folder will belong to another file from now on: the
    recorded one was moved, or has this study no more. Otherwise returns an empty text. Raises
    ConfigError also for a record that cannot be read.
    """
    recorded = Origin.read(folder / NAME)
    if recorded is None or recorded.file == _describe(source.path, folder):
        return ""
    before = _locate(recorded.file, folder)
    if before.exists() and before.samefile(source.path):
        return ""
    if has_study(before, source.name):
        raise ConfigError(
            f"{folder}: belongs to the study '{source.name}' of {before}, and {source.path} has a "
            "study of the same name. Rename one of them, or choose other folders with --out and "
            f"--reports. If {source.path} replaces the other file, delete {folder / NAME}."
        )
    return f"{folder}: {before} no longer has this study; it belongs to {source.path} now"


def claim_folder(source: "StudySource", folder: Path) -> None:
    """Record that `folder` belongs to the file of `source`; raise as `require_origin`."""
    origin = Origin(file=_describe(source.path, folder))
    path = folder / NAME
    if Origin.read_valid(path) == origin:
        return
    with one_at_a_time(folder, "origin"):
        require_origin(source, folder)
        origin.write(path)


def find_file(folder: Path) -> Path | None:
    """Return the file that a study's folder belongs to, or None if that is not recorded."""
    recorded = Origin.read_valid(folder / NAME)
    return None if recorded is None else _locate(recorded.file, folder)


def has_study(path: Path, name: str) -> bool:
    """Return True if a file has the study `name`, or cannot be read and might have it."""
    if not path.exists():
        return False
    # Imported here, because `judge` reads the record of the file and imports no PyTorch.
    from lit_attn.config.study import read_studies

    try:
        return name in read_studies(path)
    except ConfigError:
        return True


def _describe(path: Path, folder: Path) -> str:
    """Return the text of the record for a file: a path relative to `folder`."""
    if path.is_relative_to(SHIPPED):
        # Another installation has the same studies in another place.
        return INSTALLED + path.relative_to(SHIPPED).as_posix()
    return os.path.relpath(path.resolve(), folder.resolve())


def _locate(text: str, folder: Path) -> Path:
    """Return the file that a record names."""
    if text.startswith(INSTALLED):
        return SHIPPED / text.removeprefix(INSTALLED)
    return Path(os.path.normpath(folder.resolve() / text))
