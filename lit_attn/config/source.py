"""Files and values of users in YAML, and the lines of their keys for errors."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from lit_attn.files import read_text
from lit_attn.schema.errors import ConfigError
from lit_attn.schema.yaml_text import Mapping, Sequence, Where, parse_tree


def locate(tree: Any, keys: Iterable[str | int], file: str | None = None) -> Where | None:
    """Return the line of the deepest of `keys` in `tree`, or None if `tree` is not from YAML.

    The line of a mapping is that of its kind, because another file can have changed the kind.
    Returns None as well if the value of the key contains a line of `file`.
    """
    where = tree.at if isinstance(tree, Mapping | Sequence) else None
    for key in keys:
        if isinstance(tree, Mapping) and key in tree:
            name = str(key)
            where = tree.where[name]
            tree = tree[name]
        elif isinstance(tree, Sequence) and isinstance(key, int) and key < len(tree):
            where = tree.where[key]
            tree = tree[key]
        else:
            break
    if isinstance(tree, Mapping):
        where = tree.where.get("kind", where)
    return None if file in _files(tree) else where


def load(path: Path, text: str | None = None) -> Mapping:
    """Read the mapping in a YAML file or in its `text`; ConfigError if there is no mapping."""
    if text is None:
        text = read_text(path)
    tree = parse_tree(text, str(path))
    if not isinstance(tree, Mapping):
        raise ConfigError(f"{path}: needs a mapping of keys to values")
    return tree


def parse_value(text: str, file: str) -> Any:
    """Parse a YAML value of a command line: `3e-4`, `without`, `[0, 1]`, `{kind: adamw, lr: 1}`."""
    return parse_tree(text, file, has_lines=False)


def format_value(value: object) -> str:
    """Return a value as in a variant's name: `0.0003`, `split+activation=silu`, `flip+crop`."""
    if isinstance(value, Mapping):
        # The names of the part come first, and stand without their keys.
        terms = [str(value[key]) for key in ("kind", "preset") if key in value]
        for key, item in value.items():
            if key not in ("kind", "preset"):
                terms.append(f"{key}={format_value(item)}")
        return "+".join(terms)
    if isinstance(value, Sequence):
        return "+".join(format_value(item) for item in value)
    if isinstance(value, bool):
        return str(value).lower()
    if value is None:
        return "none"
    if isinstance(value, float):
        return f"{value:.12g}"
    return str(value)


def _files(tree: Any) -> set[str]:
    """Return the files whose lines a mapping contains."""
    files: set[str] = set()
    if isinstance(tree, Mapping):
        for where in tree.where.values():
            files.add(where.file)
        for value in tree.values():
            files |= _files(value)
    return files
