"""Parts of the answers in JSON about the rules `stop` and `gates` of a plan."""

from lit_attn.cells.decisions import Ending
from lit_attn.cells.records import Gate
from lit_attn.cells.rules import GateState
from lit_attn.report.answers import EndedVariant, StudyGates, UndecidedGate


def describe_ending(ending: Ending) -> EndedVariant:
    """Return an ended variant with the numbers of the decision."""
    return EndedVariant(
        variant=ending.variant,
        rule=ending.rule,
        seeds=ending.seeds,
        planned=ending.planned,
        power=ending.power,
        size=ending.size or None,
        p=ending.p,
        text=ending.describe(),
    )


def describe_gates(gate: Gate | None, state: GateState | None) -> StudyGates | None:
    """Return the gates of a study and what it waits for, None without the rule."""
    if gate is None or state is None:
        return None
    undecided = []
    for variant, reason in state.undecided.items():
        undecided.append(UndecidedGate(variant=variant, text=reason))
    return StudyGates(
        axis=gate.axis,
        size=gate.size,
        before=gate.before,
        level=gate.level,
        waits=state.waits or None,
        undecided=undecided,
    )
