"""Ends of a cell that are not bugs."""


class Diverged(RuntimeError):
    """The loss is not finite; the update that would have used it was not made."""


class Preempted(RuntimeError):
    """The cell was told to stop (SIGTERM) and has written its checkpoint."""
