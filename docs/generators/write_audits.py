"""Generator of the pages of audits: `python docs/generators/write_audits.py`.

Each file experiments/audits/NAME.yaml has the comparisons of a project's public runs, NAME.csv has
their numbers, and docs/audits/NAME.md is the page.
"""

import fnmatch
import math
import posixpath
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd

from lit_attn import find_laws, judge
from lit_attn.judging.answers import CostComparison
from lit_attn.report.answers.judged import Interval, JudgedStudy, JudgedVariant
from lit_attn.report.numbers import write_number
from lit_attn.report.statistics.stats import holm
from lit_attn.schema.errors import ConfigError
from lit_attn.schema.yaml_text import parse_plain

ROOT = Path(__file__).parents[2]
AUDITS = ROOT / "experiments" / "audits"
PAGES = ROOT / "docs" / "audits"
LEVEL = 0.05
NOTHING = "—"
UNJUDGED = ["record", "number", "reason"]

ANSWERS = {
    ("better", "better"): "shown",
    ("better", "undecided"): "not shown",
    ("better", "worse"): "contradicted",
    ("kept", "better"): "more than claimed",
    ("kept", "undecided"): "not contradicted",
    ("kept", "worse"): "contradicted",
}
"""Relation of a project's claim to a verdict."""

SHOWN_AT_TIME = "shown at equal time"
UNTESTABLE = "cannot be tested"

HEAD = """\
# Audit of {title}

`python docs/generators/write_audits.py` writes this page from `experiments/audits/{name}.yaml` and
`experiments/audits/{name}.csv`, which has each run with its path in
[{source}](https://github.com/{source}) at commit `{commit}`. A test fails if the page is out of
date. Nothing of that project is in this repository but numbers.

{words}
"""


class Judged(NamedTuple):
    """A comparison with its answer, and the same at equal time if the baseline has a ladder."""

    entry: dict[str, Any]
    study: JudgedStudy
    variant: JudgedVariant
    steps: str
    at_time: CostComparison | None


class Verdict(NamedTuple):
    """Corrected p of a comparison (None without a test), and what it decides."""

    p: float | None
    word: str


def make_page(name: str) -> str:
    """Return the page of an audit."""
    path = AUDITS / f"{name}.yaml"
    audit = parse_plain(path.read_text(encoding="utf-8"), str(path))
    runs = read_runs(AUDITS / f"{name}.csv")
    (commit,) = set(runs["commit"])
    groups = []
    for group in audit["groups"]:
        judged = [judge_entry(entry, audit, runs) for entry in group["comparisons"]]
        groups.append((group, judged))
    every = [one for _, judged in groups for one in judged]
    p_values = [one.variant.p for one in every]
    verdicts = correct(p_values, [one.variant.verdict for one in every])
    timed = [one for one in every if one.at_time is not None]
    at_time = correct_at_time(timed)
    answers = []
    for one, verdict in zip(every, verdicts, strict=True):
        answers.append(answer_claim(one, verdict, at_time.get(id(one))))
    by_entry = {}
    for one, verdict, answer in zip(every, verdicts, answers, strict=True):
        by_entry[id(one)] = (verdict, answer)
    parts = [HEAD.format(**audit, name=name, commit=commit)]
    parts.append(summarise(every, answers))
    for group, judged in groups:
        parts.append(f"## {group['title']}\n\n{group['words'].strip()}\n")
        parts.append(make_table(judged, by_entry, has_steps="steps" in runs))
    if timed:
        parts.append(make_time_table(timed, at_time))
    parts.append(list_statements(every, by_entry))
    if audit["unjudged"]:
        rows = [[str(entry[key]) for key in UNJUDGED] for entry in audit["unjudged"]]
        parts.append("## What cannot be judged\n")
        parts.append(draw(UNJUDGED, rows))
    return "\n".join(parts)


def read_runs(path: Path) -> pd.DataFrame:
    """Return the table of runs; a run that has not reached its last step has crashed."""
    runs = pd.read_csv(path)
    runs["state"] = "finished"
    if "steps" in runs:
        runs.loc[runs["step"] != runs["steps"], "state"] = "crashed"
    return runs


def select(
    entry: dict[str, Any], side: str, audit: dict[str, Any], runs: pd.DataFrame
) -> pd.DataFrame:
    """Return the runs of one side of a comparison. Raises ConfigError if there are none."""
    folder = posixpath.join(audit["folder"], entry["record"])
    pattern = posixpath.normpath(posixpath.join(folder, entry[side]))
    chosen = runs[[fnmatch.fnmatch(path, pattern) for path in runs["path"]]]
    steps = entry.get(f"{side}_steps")
    if steps is not None:
        chosen = chosen[chosen["steps"] == steps]
    if chosen.empty:
        raise ConfigError(f"{pattern}: no run")
    return chosen.assign(variant=side)


def judge_entry(entry: dict[str, Any], audit: dict[str, Any], runs: pd.DataFrame) -> Judged:
    """Return the answer about a comparison, and its steps as text."""
    baseline = select(entry, "baseline", audit, runs)
    variant = select(entry, "variant", audit, runs)
    both = pd.concat([baseline, variant], ignore_index=True)
    study = judge(both, audit["metric"], pairs="none", baseline="baseline")
    (judged,) = study.variants
    steps = ""
    if "steps" in runs:
        counts = [f"{int(side['steps'].max()):,}" for side in (variant, baseline)]
        steps = counts[0] if counts[0] == counts[1] else " / ".join(counts)
    at_time = None
    if "ladder" in entry:
        sides = [baseline, select(entry, "ladder", audit, runs).assign(variant="baseline"), variant]
        timed = [side.assign(seconds=side["train_time_ms"].mean() / 1000) for side in sides]
        metric = audit["metric"]
        laws = find_laws(pd.concat(timed), metric, cost="seconds", baseline="baseline")
        (at_time,) = laws.comparisons
    return Judged(entry, study, judged, steps, at_time)


def correct(p_values: list[float | None], words: list[str]) -> list[Verdict]:
    """Return p corrected by Holm over all tests, and the verdicts that hold after it."""
    corrected = iter(holm([p for p in p_values if p is not None]))
    verdicts = []
    for p, word in zip(p_values, words, strict=True):
        value = None if p is None else next(corrected)
        is_decided = value is not None and value <= LEVEL
        verdicts.append(Verdict(value, word if is_decided else "undecided"))
    return verdicts


def find_smallest_p(judged: Judged) -> float:
    """Return the smallest p that the permutation test of a comparison can have."""
    baseline = judged.study.baseline_values.n
    variant = judged.variant.values.n
    # Groups of one size can be exchanged, and the statistic stays the same.
    extremes = 2 if baseline == variant else 1
    return extremes / math.comb(baseline + variant, variant)


def correct_at_time(timed: list[Judged]) -> dict[int, Verdict]:
    """Return the verdict of each comparison at equal time, corrected over these comparisons."""
    entries = [one.at_time for one in timed if one.at_time is not None]
    words = []
    for at_time in entries:
        is_lower = at_time.difference is not None and at_time.difference.mean < 0
        words.append("better" if is_lower else "worse")
    verdicts = correct([at_time.p for at_time in entries], words)
    return {id(one): verdict for one, verdict in zip(timed, verdicts, strict=True)}


def answer_claim(judged: Judged, verdict: Verdict, at_time: Verdict | None) -> str:
    """Return the relation of a project's claim to the verdicts.

    A claim that the loss is kept in less time is shown if the loss is lower at equal time. If it is
    only not contradicted, the upper end of the interval is the margin within which it is kept.
    """
    if find_smallest_p(judged) > LEVEL:
        return UNTESTABLE
    answer = ANSWERS[judged.entry["claim"], verdict.word]
    if answer != "not contradicted":
        return answer
    if at_time is not None and at_time.word == "better":
        return SHOWN_AT_TIME
    interval = judged.variant.difference
    if interval is not None and interval.high is not None:
        margin = f"{interval.high:.5f}" if interval.high > 0 else "0"
        answer += f" (worse by at most {margin})"
    return answer


def summarise(every: list[Judged], answers: list[str]) -> str:
    """Return the numbers of claims by their answers, in words."""
    records = {one.entry["record"] for one in every}
    counts: dict[str, int] = {}
    for answer in [*ANSWERS.values(), SHOWN_AT_TIME, UNTESTABLE]:
        counts[answer] = sum(full.partition(" (")[0] == answer for full in answers)
    listed = ", ".join(f"{count} {answer}" for answer, count in counts.items() if count)
    text = (
        f"{len(every)} claims of {len(records)} records, after the correction for all of them:"
        f" {listed}.\n"
    )
    excluded = [one for one in every if is_away_from_zero(one)]
    text += f"In {len(excluded)} comparisons the interval, which is not corrected, excludes 0.\n"
    if counts[UNTESTABLE]:
        text += (
            f"{counts[UNTESTABLE]} claims cannot be tested: with so few runs the smallest possible"
            " p is above .05 before any correction, whatever the values. They get no verdict, and"
            " the correction counts them all the same.\n"
        )
    return text


def is_away_from_zero(judged: Judged) -> bool:
    """Return True if the interval of a difference excludes 0."""
    interval = judged.variant.difference
    if interval is None or interval.low is None or interval.high is None:
        return False
    return not interval.low <= 0 <= interval.high


def make_table(
    judged: list[Judged], by_entry: dict[int, tuple[Verdict, str]], has_steps: bool
) -> str:
    """Return the table of comparisons."""
    headings = ["record", "change", "runs", "steps", "difference [95 %]", "p", "corrected p"]
    headings += ["verdict", "claim"]
    rows = []
    for one in judged:
        verdict, answer = by_entry[id(one)]
        row = [
            f"{one.entry['number']}: {one.entry['record']}",
            one.entry["change"],
            f"{one.variant.values.n} / {one.study.baseline_values.n}",
            one.steps,
            write_interval(one.variant.difference),
            write_p(one.variant.p),
            write_p(verdict.p),
            NOTHING if answer == UNTESTABLE else verdict.word,
            answer,
        ]
        if one.variant.seeds.failed:
            row[2] += f", {one.variant.seeds.failed} failed"
        rows.append(row)
    if not has_steps:
        headings.pop(3)
        for row in rows:
            row.pop(3)
    return draw(headings, rows)


def make_time_table(timed: list[Judged], verdicts: dict[int, Verdict]) -> str:
    """Return the section about equal time, with a correction of its own."""
    text = """\
## At equal time

The baseline was run with two numbers of steps. A line through the logarithms of loss and mean
training time of its runs says what it reaches in the variant's time ([laws.md](../laws.md)). The
speed-up is the time that the baseline needs for the variant's loss, divided by the variant's time;
+ needs more time than any run of the baseline took. p is that of the t test, corrected over this
table. Outside the baseline's times there is no difference.
"""
    rows = []
    for one in timed:
        at_time, verdict = one.at_time, verdicts[id(one)]
        assert at_time is not None
        mark = "+" if at_time.is_extrapolated else ""
        rows.append(
            [
                f"{one.entry['number']}: {one.entry['record']}",
                one.entry["change"],
                f"{at_time.cost:.2f}",
                write_interval(at_time.difference),
                write_p(verdict.p),
                NOTHING if at_time.difference is None else verdict.word,
                write_interval(at_time.speedup, ".4f") + mark,
            ]
        )
    headings = ["record", "change", "seconds", "difference [95 %]", "corrected p", "verdict"]
    return f"{text}\n{draw([*headings, 'speed-up [95 %]'], rows)}"


def list_statements(every: list[Judged], by_entry: dict[int, tuple[Verdict, str]]) -> str:
    """Return both statements about each comparison, the project's and the judge's."""
    text = """\
## Both statements

This page asks whether the two sides differ, after the correction for all comparisons. A claim that
is "not shown" can be true. A record that claims less time or fewer steps is "not contradicted" if
its loss is not shown to be higher; the number behind it is the upper end of the 95 % interval, the
margin within which its loss is kept. Such a claim is "shown at equal time" if the loss is lower in
the time of the variant.
"""
    rows = []
    for one in every:
        verdict, answer = by_entry[id(one)]
        judge_says = write_interval(one.variant.difference)
        if answer != UNTESTABLE:
            judge_says += f", corrected p {write_p(verdict.p)}: {verdict.word}"
        number = f"{one.entry['number']}: {one.entry['record']}"
        rows.append([number, one.entry["statement"], judge_says, answer])
    return f"{text}\n{draw(['record', 'the project', 'the judge', 'claim'], rows)}"


def write_interval(interval: Interval | None, form: str = "+.5f") -> str:
    """Return a number with its interval, as far as they are known."""
    if interval is None:
        return NOTHING
    mean = write_number(interval.mean, form)
    if interval.low is None or interval.high is None:
        return mean
    return f"{mean} [{write_number(interval.low, form)}, {write_number(interval.high, form)}]"


def write_p(p: float | None) -> str:
    """Return p with two significant digits."""
    return NOTHING if p is None else f"{p:.2g}"


def draw(headings: list[str], rows: list[list[str]]) -> str:
    """Return a table in Markdown."""
    lines = [headings, ["---"] * len(headings), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def main() -> None:
    """Write the pages of all audits."""
    PAGES.mkdir(exist_ok=True)
    for path in sorted(AUDITS.glob("*.yaml")):
        page = PAGES / f"{path.stem}.md"
        page.write_text(make_page(path.stem), encoding="utf-8")
        print(page.relative_to(ROOT))


if __name__ == "__main__":
    main()
