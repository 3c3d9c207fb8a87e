"""Failures that a cell reports by type, so that nobody has to guess them from text."""


class Diverged(RuntimeError):
    """A loss that is not finite. Training stops at once; the same cell would do the same again."""
