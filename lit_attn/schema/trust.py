"""Guard of files that somebody else may have written: reading them executes no code unasked.

`load_exported`, `generate` and `export` read such a file to use a trained model. The file can name
Python code: plug-ins in `parts`, a class in `import`, a metric `mine:Metric`. While the file is
open, nothing in it is tried out, and every import of such code is refused unless the user trusts
the file. All imports of foreign code ask `require_trust` (lit_attn.schema.plugins), so the guard
does not depend on where the name of the code stands.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field

from lit_attn.schema.errors import ConfigError

TRUST_HELP = "execute the code that the run names (`parts`, `import`, metrics)"
"""Help of the option --trust-code."""


@dataclass
class ForeignFile:
    """File of somebody else that is being read; `refused` names the code that it asked for."""

    place: str
    remedy: str
    is_trusted: bool
    refused: list[str] = field(default_factory=list)


_OPEN: list[ForeignFile] = []
"""Foreign files that are open; the last one is the innermost."""


@contextlib.contextmanager
def foreign_file(place: str, remedy: str, is_trusted: bool) -> Iterator[None]:
    """Refuse every import of foreign code inside the context, unless the file is trusted.

    A refused import ends the context with a ConfigError, which names the code and the `remedy`.
    """
    opened = ForeignFile(place, remedy, is_trusted)
    _OPEN.append(opened)
    try:
        yield
    except Exception as error:
        if not opened.refused:
            raise
        code = ", ".join(dict.fromkeys(opened.refused))
        raise ConfigError(
            f"{place}: this run executes the code in {code}. If you trust it, {remedy}."
        ) from error
    finally:
        _OPEN.pop()


def is_foreign_file_open() -> bool:
    """Return True while a foreign file is read, whether or not it is trusted."""
    return bool(_OPEN)


def require_trust(code: str) -> None:
    """Raise ConfigError if an untrusted file is open; `code` names what it would execute."""
    if not _OPEN or _OPEN[-1].is_trusted:
        return
    _OPEN[-1].refused.append(code)
    raise ConfigError(f"{code}: is foreign code, which is not executed without your consent")
