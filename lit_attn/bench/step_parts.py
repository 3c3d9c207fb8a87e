"""Time of each part of a training step: the causes of what a cell adds to a plain loop.

Lightning announces each hook that it calls to a profiler. The time of a part is without the parts
inside it, so all parts together are the step. Parts that the plain loop has too have one name.
"""

from collections import defaultdict
from collections.abc import Callable
from functools import wraps
from typing import Any, NamedTuple

from lightning.pytorch.profilers import Profiler

from lit_attn.bench.measure import Spread, summarize

FORWARD = "forward pass and loss"
BACKWARD = "backward pass"
CLIPPING = "clipping of gradients"
UPDATE = "step of the optimiser"
CLEARING = "removal of gradients"
"""Parts of a step that a plain loop has, too."""

SHARED_PARTS = {
    "training_step": FORWARD,
    "backward": BACKWARD,
    "configure_gradient_clipping": CLIPPING,
    "optimizer_step": UPDATE,
    "optimizer_zero_grad": CLEARING,
}
"""Part of a plain loop by the hook in which a task or a strategy of Lightning does the same."""

LOOP = "Lightning's loop"
LOOP_ACTIONS = ("run_training_epoch", "run_training_batch")
"""Actions of Lightning that contain the hooks of a step: what is left is Lightning's own code."""

MOST_CAUSES = 10
"""Rows of each experiment in the table of causes."""


class Cause(NamedTuple):
    """Microseconds of a part of a step of one experiment, in this package and in a plain loop."""

    experiment: str
    part: str
    step: Spread
    plain: Spread
    added: Spread


class PartTimer(Profiler):
    """Profiler that adds up the seconds of each part, without those of the parts inside it."""

    def __init__(self, read: Callable[[], float]) -> None:
        super().__init__()
        self.read = read
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self._running: list[str] = []
        self._last_change = 0.0

    def start(self, action_name: str) -> None:
        self._add_to_running()
        self._running.append(name_part(action_name))

    def stop(self, action_name: str) -> None:
        self._add_to_running()
        self._running.pop()

    def forget(self) -> None:
        """Start to count afresh, within the parts that are running."""
        self.seconds.clear()
        self._last_change = self.read()

    def finish(self) -> None:
        """Count the parts that are running up to now."""
        self._add_to_running()

    def time_method(self, owner: Any, method: str, part: str) -> Callable[[], None]:
        """Make the calls of a method of `owner` a part, and return the function that ends this."""
        call = getattr(owner, method)

        @wraps(call)
        def timed(*arguments: Any, **named: Any) -> Any:
            with self.profile(part):
                return call(*arguments, **named)

        # An attribute of the object hides the method of its class.
        setattr(owner, method, timed)
        return lambda: delattr(owner, method)

    def _add_to_running(self) -> None:
        """Add the time since the last change to the innermost part that is running."""
        now = self.read()
        if self._running:
            self.seconds[self._running[-1]] += now - self._last_change
        self._last_change = now


def name_part(action: str) -> str:
    """Return the name of the part of a step that Lightning announces as `action`.

    Lightning writes "[Callback]NAME.HOOK" and so on; all hooks of a callback are one part.
    """
    if action in LOOP_ACTIONS:
        return LOOP
    owner, is_hook, name = action.removeprefix("[").partition("]")
    if not is_hook:
        return action
    owner_name, _, hook = name.rpartition(".")
    if owner == "Callback":
        return f"callback {owner_name}"
    return SHARED_PARTS.get(hook, f"hook {hook}")


def list_causes(
    experiment: str, cells: list[dict[str, float]], loops: list[dict[str, float]]
) -> list[Cause]:
    """Return the parts that add most to a plain loop, largest first, from seconds of each round."""
    parts: set[str] = set()
    for round_ in (*cells, *loops):
        parts.update(round_)
    causes = []
    for part in sorted(parts):
        steps = [1e6 * cell.get(part, 0.0) for cell in cells]
        plains = [1e6 * loop.get(part, 0.0) for loop in loops]
        added = [step - plain for step, plain in zip(steps, plains, strict=True)]
        causes.append(
            Cause(experiment, part, summarize(steps), summarize(plains), summarize(added))
        )
    causes.sort(key=lambda cause: -cause.added.median)
    return causes[:MOST_CAUSES]
