"""Checklists of conferences, filled with what the records of studies know."""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from lit_attn.files import write_atomic
from lit_attn.report import stats
from lit_attn.report.columns import format_seeds
from lit_attn.report.comparison import FAILURES, compare_variants
from lit_attn.report.formats import read_asset
from lit_attn.report.numbers import write_number
from lit_attn.report.skipped import Outcome
from lit_attn.report.study_record import StudyRecord
from lit_attn.schema.errors import ConfigError, plural, require

CHECKLISTS: dict[str, dict[str, Any]] = read_asset("checklists.yaml")
"""Questions of each checklist by its name."""


def write_checklist(name: str, studies: Iterable[StudyRecord], reports: Path) -> Outcome:
    """Write `reports`/checklist-NAME.md. Raises ConfigError for an unknown checklist."""
    require("--checklist: no checklist", name, CHECKLISTS)
    path = reports / f"checklist-{name}.md"
    write_atomic(path, make_checklist(name, list(studies)))
    return Outcome([path], [])


def make_checklist(name: str, studies: Sequence[StudyRecord]) -> str:
    """Return a checklist in Markdown: answers from the records, and marks for what is left."""
    if not studies:
        raise ConfigError("--checklist: there is no study to describe")
    checklist = CHECKLISTS[name]
    names = ", ".join(study.plan.study for study in studies)
    lines = [
        f"# {checklist['title']}",
        "",
        f"Filled from the records of {names}. Sentences behind a study's name follow from its",
        "records. Everything marked **To do** is left to the authors.",
    ]
    for number, item in enumerate(checklist["items"], start=1):
        lines += ["", f"## {number}. {item['title']}", ""]
        for study in studies:
            sentences = _describe(study, item.get("facts", []))
            if sentences:
                lines.append(f"- {study.plan.study}: {' '.join(sentences)}")
        if "left" in item:
            lines.append(f"- **To do:** {item['left']}")
    return "\n".join(lines) + "\n"


def _describe(study: StudyRecord, facts: Sequence[str]) -> list[str]:
    """Return the sentences about the `facts` that the records of a study know."""
    sentences = [FACTS[fact](study) for fact in facts]
    return [sentence for sentence in sentences if sentence]


def _join(study: StudyRecord, name: str) -> str:
    """Return the distinct recorded texts of a measurement."""
    return ", ".join(sorted({str(value) for value in study.measurements(name)}))


def _describe_range(study: StudyRecord, name: str, noun: str) -> str:
    """Return a number, or the range of the numbers of all cells, with its noun."""
    values = study.measurements(name)
    if not values:
        return ""
    low, high = min(values), max(values)
    return f"{low:,} {noun}" if low == high else f"{low:,} to {high:,} {noun}"


def _describe_identity(study: StudyRecord) -> str:
    code = _join(study, "code")
    if not code:
        return ""
    sealed = ""
    if study.seals is not None:
        first = study.seals.entries[0]
        order = "before" if study.seals.is_before_results else "after"
        sealed = f" The plan (hash {first.hash}) was sealed {order} the first result."
    return f"Every result holds the hash of the code ({code}).{sealed}"


def _describe_seeds(study: StudyRecord) -> str:
    plan = study.plan
    return (
        f"{plural(len(plan.variants), 'variant')} with {format_seeds(plan.seeds)}; variants share "
        "initial values, order of the data and augmentation of each seed."
    )


def _describe_data(study: StudyRecord) -> str:
    data = _join(study, "data")
    return f"Hash of the data: {data}." if data else ""


def _describe_training(study: StudyRecord) -> str:
    numbers = [
        _describe_range(study, "steps", "steps"),
        _describe_range(study, "epochs", "epochs"),
        _describe_range(study, "batch_size", "samples a step"),
        _describe_range(study, "parameters", "parameters"),
    ]
    known = [number for number in numbers if number]
    ends = {"last": "the last epoch", "best-validation": "the best epoch of the validation split"}
    metric = study.plan.metric
    values = f"Values are {metric.name} at {ends[metric.selection]}."
    return f"{values} Training: {', '.join(known)}." if known else values


def _describe_tuning(study: StudyRecord) -> str:
    tuning = study.tuning
    if tuning is None:
        return "No hyperparameter was tuned in this study."
    return (
        f"{' and '.join(tuning.keys)} of every variant, the baseline included, was chosen in "
        f"{plural(tuning.trials, 'trial')} ({tuning.sampler}) by {tuning.select.name} with "
        f"{format_seeds(tuning.seeds)}, which are not those of the results."
    )


def _describe_errors(study: StudyRecord) -> str:
    return (
        f"± is the sample standard deviation over {plural(len(study.plan.seeds), 'seed')}; "
        "differences to the baseline have 95 % Student t intervals of the pairs with equal seeds."
    )


def _describe_coverage(study: StudyRecord) -> str:
    return (
        "Error bars cover initial values, order of the data and augmentation; they do not cover "
        "the choice of the data split, other data or other model sizes."
    )


def _describe_tests(study: StudyRecord) -> str:
    comparisons = compare_variants(study)
    count = len(comparisons.pairs)
    if not count:
        return ""
    level = write_number(comparisons.level, ".3g")
    needed = stats.pairs_for_a_star(1, comparisons.level)
    return (
        f"p is a two-sided sign-flip test, corrected for {plural(count, 'comparison')} by the "
        f"step-down max-T method; a star needs p ≤ {level} and at least {needed} seeds."
    )


def _describe_failures(study: StudyRecord) -> str:
    failed = [cell for cell in study.cells if cell.status in FAILURES]
    missing = len(study.cells) - len(failed) - len(study.finished_cells())
    text = f"{len(study.finished_cells())} of {plural(len(study.cells), 'cell')} have a result"
    return f"{text}, {len(failed)} failed and {missing} are missing."


def _describe_compute(study: StudyRecord) -> str:
    seconds = [float(value) for value in study.measurements("wall_time")]
    if not seconds:
        return ""
    hours = write_number(sum(seconds) / 3600, ".2f")
    longest = write_number(max(seconds) / 3600, ".2f")
    text = (
        f"{plural(len(seconds), 'cell')} took {hours} hours on {_join(study, 'device')}, the "
        f"longest one {longest} hours."
    )
    memory = study.measurements("peak_memory")
    if memory:
        text += f" The largest memory was {write_number(max(memory) / 1e9, '.2f')} GB."
    if study.plan.trials:
        text += f" {plural(len(study.plan.trials), 'cell')} of the tuning are not included."
    return text


def _describe_versions(study: StudyRecord) -> str:
    versions = _join(study, "versions")
    return f"Packages: {versions}. lit_attn has the MIT licence." if versions else ""


FACTS: dict[str, Callable[[StudyRecord], str]] = {
    "identity": _describe_identity,
    "seeds": _describe_seeds,
    "data": _describe_data,
    "training": _describe_training,
    "tuning": _describe_tuning,
    "errors": _describe_errors,
    "coverage": _describe_coverage,
    "tests": _describe_tests,
    "failures": _describe_failures,
    "compute": _describe_compute,
    "versions": _describe_versions,
}
"""Function that describes each fact, which returns an empty text if the records do not know it."""
