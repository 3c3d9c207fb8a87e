"""Removal of private values from everything that leaves this machine.

Exported folders, settings for TensorBoard and experiment trackers, and settings in reports contain
the configuration of a cell. It can name folders of a user, hosts, and keys of a service. The one
function `hide_private` is the filter of all of them.
"""

import itertools
import re
from typing import Any
from urllib.parse import parse_qsl, urlsplit

REMOVED = "(removed)"
"""Text in place of a secret."""

PRIVATE_KEYS = {"loggers"}
"""Keys that are left out: the address of an experiment tracker may be private."""

SECRET_WORDS = {
    "password",
    "passwd",
    "passphrase",
    "pwd",
    "secret",
    "token",
    "apikey",
    "credential",
    "credentials",
    "authorization",
    "bearer",
}
SECRET_PAIRS = {("api", "key"), ("access", "key"), ("private", "key"), ("account", "key")}
"""Words in keys of a mapping, or of the query of an address, whose text is a secret."""

# The beginning of an address or a path: file:/x, s3://x, /x, ~/x, ./x, ../x, C:\x, \\host\x.
_ADDRESS = re.compile(r"[A-Za-z][\w+.-]*:/|[A-Za-z]:\\|/|~|\.{1,2}[/\\]|\\\\")
# An address without a scheme: KEY:SECRET@host, alice@host:/data.
_LOGIN = re.compile(r"[^\s/@]+@[^\s/@]+[:/]|[^\s/@:]+:[^\s/@]+@")
_WORDS = re.compile(r"""[^\s"'`,;=()\[\]{}<>|]+""")


def hide_private(value: Any) -> Any:
    """Return a copy of a value without addresses, folders and secrets.

    The last name of a path or an address stays (`/home/alice/x.csv` becomes `x.csv`), because it
    says which file was used. Names of the hub (`org/name`) stay.
    """
    if isinstance(value, dict):
        public = {}
        for key, item in value.items():
            if key not in PRIVATE_KEYS:
                public[hide_in_text(str(key))] = _hide_item(str(key), item)
        return public
    if isinstance(value, list | tuple):
        return [hide_private(item) for item in value]
    if isinstance(value, str):
        return hide_in_text(value)
    return value


def hide_in_text(text: str) -> str:
    """Return a text with the last name of each path or address in place of it."""
    if _is_address(text):
        return _last_name(text)
    return _WORDS.sub(lambda word: _hide_word(word[0]), text)


def has_secret(address: str) -> bool:
    """Return True if an address (URL) contains a password, or a user or token of a web server."""
    try:
        parts = urlsplit(address)
        is_web = parts.scheme in ("http", "https")
        has_login = parts.password is not None or (is_web and parts.username is not None)
    except ValueError:
        return "@" in address
    return has_login or any(is_secret_key(key) for key, _ in parse_qsl(parts.query))


def is_secret_key(key: str) -> bool:
    """Return True if a key such as `api_key` or `hubToken` names a secret."""
    spaced = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", key)
    words = re.split(r"[\W_]+", spaced.lower())
    has_secret_word = not SECRET_WORDS.isdisjoint(words)
    has_secret_pair = not SECRET_PAIRS.isdisjoint(itertools.pairwise(words))
    return has_secret_word or has_secret_pair


def _hide_item(key: str, item: Any) -> Any:
    """Return the value of a key without private values; nothing of it if it is a secret."""
    if isinstance(item, str) and is_secret_key(key):
        return REMOVED
    return hide_private(item)


def _hide_word(word: str) -> str:
    """Return a word, or the last name of it if it is an address or a path."""
    return _last_name(word) if _is_address(word) else word


def _is_address(text: str) -> bool:
    """Return True for an address, a login, or a path with a folder."""
    has_parent = ".." in re.split(r"[/\\]", text)
    is_login = _LOGIN.match(text) is not None
    return has_parent or is_login or _ADDRESS.match(text) is not None


def _last_name(address: str) -> str:
    """Return the last name in a path or an address, without its query.

    A host, a login and the folder of a user are removed, and a text without a name stays.
    """
    scheme = re.match(r"[A-Za-z][\w+.-]*:(?=/)", address)
    without_scheme = address[scheme.end() :] if scheme else address
    path = re.split(r"[?#]", without_scheme)[0]
    names = [name for name in re.split(r"[/\\]", path) if name not in ("", ".", "..", "~")]
    if not names:
        return address
    is_host = path.startswith("//") and len(names) == 1
    is_home = len(names) == 2 and names[0].lower() in ("home", "users") and path[0] in "/\\"
    is_user = len(names) == 1 and (names[0].startswith("~") or "@" in names[0])
    if is_host or is_home or is_user:
        return REMOVED
    return names[-1]
