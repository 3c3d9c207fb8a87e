"""Names in a file that become names of files or folders."""

MOST_BYTES = 200
"""Longest name; file systems allow 255 bytes, and endings such as `.csv.tmp` are added."""


def is_file_name(text: str) -> bool:
    """Return True if `text` names a file or folder inside another folder, and is not hidden.

    A name of a downloaded record must pass before it becomes a part of a path: `../../.bashrc` and
    `/etc/passwd` would lead out of the folder.
    """
    try:
        size = len(text.encode())
    except UnicodeEncodeError:
        return False
    has_separator = "/" in text or "\\" in text
    return 0 < size <= MOST_BYTES and text.isprintable() and not has_separator and text[0] != "."
