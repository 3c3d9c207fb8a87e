"""Search for code in a file of somebody else, before anything in the file is used.

A configuration can name Python code: files in `parts`, a class in `import`, a metric `mine:Metric`.
Even its validation imports this code. So a downloaded run is read as plain values first, and
`find_code` looks at the values that the configuration would take as code, for one question about
all of them. Whatever it overlooks is refused by the import itself (`refuse_code` in plugins.py).
"""

import sys
from collections.abc import Iterator
from typing import Any

from lit_attn.schema.base import Config, Kind, leaf_types
from lit_attn.schema.errors import ConfigError

TRUST_HELP = "execute the code that the run names (`parts`, `import`, metrics) without asking"
"""Help of the option --trust-code."""


def find_code(config: type[Config], written: Any) -> dict[str, Any]:
    """Return the values in `written` that name code to import, by their keys.

    `written` contains plain values that `config` has not validated. The search follows the fields
    of the configurations as the validation does; a value without a field is never used. The
    plug-ins of installed packages must have been imported, because they add kinds.
    """
    return dict(_find_code(config, written, ""))


def confirm_code(code: dict[str, Any], place: str, remedy: str, asks: bool) -> bool:
    """Return True if the user trusts the `code` of a run, and False if the run has no code.

    Raises ConfigError if the answer is no. Without `asks` or a terminal, the error says what to do
    (`remedy`).
    """
    if not code:
        return False
    keys = ", ".join(code)
    values = ", ".join(repr(value) for value in code.values())
    warning = f"{place}: {keys}: this run executes the code in {values}."
    if not asks or not sys.stdin.isatty():
        raise ConfigError(f"{warning} If you trust it, {remedy}.")
    # A ConfigError shows control characters of foreign values in visible form.
    question = ConfigError(f"{warning} Do you trust it? [y/N]")
    print(question, end=" ", file=sys.stderr, flush=True)
    answer = sys.stdin.readline().strip().lower()
    if answer not in ("y", "yes"):
        raise ConfigError("Nothing was executed.")
    return True


def _find_code(config: type[Config], written: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Yield the keys, which begin with `path`, and values that name code, as `find_code`."""
    if isinstance(written, list | tuple):
        for index, item in enumerate(written):
            yield from _find_code(config, item, f"{path}.{index}")
        return
    if issubclass(config, Kind) and "family" in vars(config):
        mapping = config.expand_kind(written)
        for member in _list_members(config, mapping):
            yield from _find_in_member(member, mapping, path)
    else:
        yield from _find_in_member(config, written, path)


def _list_members(family: type[Kind], mapping: Any) -> list[type[Kind]]:
    """Return the members of a family that a mapping can configure."""
    if isinstance(mapping, dict) and "kind" in mapping:
        kind = str(mapping["kind"])
        # The validation refuses an unknown kind.
        return [member for name, member in family.family.items() if name == kind]
    # A mapping without a kind may refine any member.
    return list(family.family.values())


def _find_in_member(member: type[Config], written: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Yield the keys and values in the mapping of a member that name code."""
    if not isinstance(written, dict):
        return
    prefix = f"{path}." if path else ""
    for key, value in member.name_code(written).items():
        yield f"{prefix}{key}", value
    for name, field in member.model_fields.items():
        names = {name, field.alias or name}
        for key in names & written.keys():
            yield from _find_in_field(field.annotation, written[key], f"{prefix}{key}")


def _find_in_field(annotation: Any, written: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Yield the keys and values that name code in the value of a field."""
    for part in leaf_types(annotation):
        if isinstance(part, type) and issubclass(part, Config):
            yield from _find_code(part, written, path)
