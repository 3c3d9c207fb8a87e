"""The next runs of a stream of ideas."""

from collections.abc import Sequence

from lit_attn.judging.stream import BASELINE_RUNS, SCREEN_RUNS, Idea, find_level
from lit_attn.report.answers.judged import Action, ActionKind
from lit_attn.report.records.study_record import CellRecord, StudyRecord
from lit_attn.report.verdicts.next_action import describe_runs, expect_seconds, make_action

Seeds = dict[str, list[int]]
"""Seeds of the next runs by variant."""


def find_stream_action(study: StudyRecord, ideas: Sequence[Idea]) -> Action:
    """Return the next runs of the first open idea: its screening, or else its confirmation."""
    runs = study.cells
    baseline = study.plan.baseline
    screened = [run.seed for run in runs if run.variant == baseline and run.value is not None]
    lacking = max(0, BASELINE_RUNS - len(screened))
    screening = [idea for idea in ideas if len(idea.screening) < SCREEN_RUNS]
    if lacking or screening:
        return _screen(study, lacking, screening)
    confirming = [idea for idea in ideas if idea.stage == "confirming"]
    if not confirming:
        text = (
            "Every idea is judged or screened out."
            f" Add the next idea to the file with {SCREEN_RUNS} runs."
        )
        return make_action("none", text)
    return _confirm(study, min(confirming, key=lambda idea: idea.number or 0))


def _screen(study: StudyRecord, lacking: int, screening: Sequence[Idea]) -> Action:
    """Return the runs that the screening of the first idea needs."""
    runs = study.cells
    baseline = study.plan.baseline
    counts = {}
    seeds: Seeds = {}
    unused = _list_unused(runs)
    shared = [run.seed for run in runs if run.variant == baseline][:BASELINE_RUNS]
    if lacking:
        counts[baseline] = lacking
        seeds[baseline] = unused[:lacking]
        shared += unused[:lacking]
    if screening:
        name = screening[0].name
        counts[name] = SCREEN_RUNS - len(screening[0].screening)
        idea_seeds = {run.seed for run in runs if run.variant == name}
        free = [seed for seed in [*shared, *unused] if seed not in idea_seeds]
        seeds[name] = free[: counts[name]]
    text = f"Screen: run {describe_runs(counts)}."
    return _make_action(study, "screen", text, counts, seeds)


def _confirm(study: StudyRecord, idea: Idea) -> Action:
    """Return the fresh runs that the confirmation of an idea needs."""
    baseline = study.plan.baseline
    needed = idea.runs or 0
    seeds: Seeds = {}
    counts = {idea.name: needed - len(idea.confirmation), baseline: needed - len(idea.baseline)}
    if study.test.is_paired:
        seeds = _pair_seeds(study.cells, idea, baseline)
        counts = {name: len(chosen) for name, chosen in seeds.items()}
    counts = {name: count for name, count in counts.items() if count > 0}
    level = find_level(idea.number or 1)
    text = (
        f"Confirm {idea.name}, which has passed its screening: run {describe_runs(counts)}. All"
        f" {needed} runs of each decide together, and a star needs p ≤ {level:.2g}."
    )
    return _make_action(study, "confirm", text, counts, seeds)


def _pair_seeds(runs: Sequence[CellRecord], idea: Idea, baseline: str) -> Seeds:
    """Return the seeds that idea and baseline lack for the pairs of a confirmation."""
    missing = (idea.runs or 0) - len(idea.confirmation)
    places = [place for place, run in enumerate(runs) if run.variant == idea.name]
    idea_seeds = {runs[place].seed for place in places}
    fresh = {runs[place].seed for place in places[SCREEN_RUNS:]}
    end = idea.end or 0
    of_baseline = [place for place, run in enumerate(runs) if run.variant == baseline]
    theirs = {runs[place].seed for place in of_baseline}
    # The runs of the baseline up to its screening are used up.
    valued = [place for place in of_baseline if runs[place].value is not None]
    last = max(valued[:BASELINE_RUNS], default=end)
    free = {runs[place].seed for place in of_baseline if place > last}
    seeds: Seeds = {idea.name: [], baseline: []}
    for seed in sorted(fresh - theirs)[:missing]:
        seeds[baseline].append(seed)
        missing -= 1
    for seed in sorted(free - idea_seeds)[:missing]:
        seeds[idea.name].append(seed)
        missing -= 1
    for seed in _list_unused(runs)[:missing]:
        seeds[idea.name].append(seed)
        seeds[baseline].append(seed)
    return seeds


def _list_unused(runs: Sequence[CellRecord]) -> list[int]:
    """Return seeds above all of the runs."""
    first = 1 + max((run.seed for run in runs), default=-1)
    return list(range(first, first + 1000))


def _make_action(
    study: StudyRecord, kind: ActionKind, text: str, counts: dict[str, int], seeds: Seeds
) -> Action:
    """Return an action of further runs; seeds stand in it only if runs are paired."""
    trained = [name for name, count in counts.items() for _ in range(count)]
    if not study.test.is_paired:
        seeds = {}
    else:
        shown = [
            f"{name}: {', '.join(map(str, seeds[name]))}" for name in counts if seeds.get(name)
        ]
        text += f" Seeds: {'; '.join(shown)}."
    return Action(
        kind=kind,
        text=text,
        command=None,
        variants=list(counts),
        runs=counts,
        seeds=seeds,
        cells=len(trained),
        seconds=expect_seconds(study, trained),
    )
