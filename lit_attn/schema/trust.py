"""Search for code in a file of somebody else, before anything in the file is used.

A configuration can name Python code: files in `parts`, a class in `import`, a metric `mine:Metric`.
Even its validation imports this code. So a downloaded run is read as plain values first, and
`find_code` looks at the values that the configuration would take as code.
"""

import sys
from collections.abc import Iterator
from typing import Any

from lit_attn.schema.base import Config, Kind, leaf_types
from lit_attn.schema.errors import ConfigError


def find_code(config: type[Config], written: Any) -> dict[str, Any]:
    """Return the values in `written` that name code to import, by their keys.

    `written` contains plain values that `config` has not validated. The search follows the fields
    of the configurations as the validation does; a value without a field is never used. The
    plug-ins of installed packages must have been imported, because they add kinds.
    """
    return dict(_find_code(config, written, ""))


def confirm_code(code: dict[str, Any], place: str) -> None:
    """Ask before the `code` of a run is executed; raise ConfigError if the answer is no.

    Without a terminal the error names the option `--trust-code`.
    """
    if not code:
        return
    keys = ", ".join(code)
    values = ", ".join(repr(value) for value in code.values())
    message = f"{place}: {keys}: this run executes the code in {values}."
    if not sys.stdin.isatty():
        raise ConfigError(f"{message} If you trust it, add --trust-code.")
    question = ConfigError(f"{message} Do you trust it? [y/N]")
    print(question, end=" ", file=sys.stderr, flush=True)
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise ConfigError("Nothing was executed.")


def _find_code(config: type[Config], written: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(written, list | tuple):
        for index, item in enumerate(written):
            yield from _find_code(config, item, f"{path}.{index}")
        return
    members: list[type[Config]] = [config]
    if issubclass(config, Kind) and "family" in vars(config):
        written = config.expand_kind(written)
        kind = str(written["kind"]) if isinstance(written, dict) and "kind" in written else None
        # The validation refuses an unknown kind. A mapping without a kind may refine any member.
        members = [member for name, member in config.family.items() if kind in (None, name)]
    for member in members:
        yield from _find_in_member(member, written, path)


def _find_in_member(member: type[Config], written: Any, path: str) -> Iterator[tuple[str, Any]]:
    if not isinstance(written, dict):
        return
    prefix = f"{path}." if path else ""
    for key, value in member.name_code(written).items():
        yield f"{prefix}{key}", value
    for name, field in member.model_fields.items():
        for key in {name, field.alias or name} & written.keys():
            for part in leaf_types(field.annotation):
                if isinstance(part, type) and issubclass(part, Config):
                    yield from _find_code(part, written[key], f"{prefix}{key}")
