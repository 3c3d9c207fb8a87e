"""Splits that the names of files state, as words between separators: `fineweb_val_000001.bin`."""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from lit_attn.data.folders import natural_order
from lit_attn.data.log import LOG
from lit_attn.schema.errors import ConfigError

WORDS = {
    "train": {"train", "training"},
    "val": {"val", "valid", "validation"},
    "test": {"test", "testing"},
}
"""Words that name a split. `pretrain`, `latest` and `interval` are other words."""


def find_split(name: str, where: str) -> str | None:
    """Return the split that a file's name states, or None if it states none.

    Everything but a letter separates two words. Raises ConfigError, which begins with `where`, for
    a name with the words of two splits.
    """
    words = set(re.split(r"[\W\d_]+", name.lower()))
    stated = [split for split, names in WORDS.items() if names & words]
    if len(stated) > 1:
        splits = " and ".join(stated)
        raise ConfigError(
            f"{where}: its name states the splits {splits}, and a file belongs to one split; "
            "rename the file"
        )
    return stated[0] if stated else None


def group_by_split(paths: Iterable[Path]) -> dict[str | None, list[Path]]:
    """Return `paths` in the natural order of their names, by the split that the name states.

    Files without a split are listed for None. Raises ConfigError for a file in two splits: by its
    name, or by two names of one file (links).
    """
    groups: dict[str | None, list[Path]] = {}
    known: dict[Path, tuple[str, Path]] = {}
    for path in sorted(paths, key=lambda path: natural_order(path.name)):
        split = find_split(path.stem, str(path))
        groups.setdefault(split, []).append(path)
        if split is None:
            continue
        other_split, other_path = known.setdefault(path.resolve(), (split, path))
        if split != other_split:
            raise ConfigError(
                f"{path}: is the same file as {other_path.name}, and a file cannot be in the "
                f"splits {other_split} and {split}; remove one of the two names"
            )
    return groups


def warn_of_shared_files(files: Mapping[str, Path], key: str | None = None) -> None:
    """Warn if the file or the folder of an evaluated split is also that of train.

    `files` are by split. The warning begins with `key`, or with the split's own key.
    """
    for split, path in files.items():
        if split != "train" and path.resolve() == files["train"].resolve():
            LOG.warning(
                "%s: %s is also the %s of train, so the results of this split are those of "
                "training samples",
                key or f"data.{split}",
                path,
                "folder" if path.is_dir() else "file",
            )
