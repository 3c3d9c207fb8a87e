"""Placeholders of probes: which mechanisms solve them, and after how many steps."""

import json
import math
from collections import defaultdict

from evidence_tables import (
    EVIDENCE,
    STAR,
    WORDS,
    find_row,
    format_difference,
    format_number,
    has_star,
    placeholder,
    read_table,
)

PROBES = (
    (("recall-mechanisms", "probe-recall-others"), "test"),
    (("probe-induction", "probe-induction-others"), "test"),
    (("probe-needle", "probe-needle-others"), "test"),
    (("probe-needle", "probe-needle-others"), "longer"),
    (("probe-copying",), "test"),
    (("probe-parity",), "test"),
)
"""The columns of the table of probes: studies that have different mechanisms, and a split."""


@placeholder
def unsolved(study: str, variant: str) -> str:
    """Return in how many of its seeds a variant does not solve the probe, as "two of twelve"."""
    solved = read_solved(study, "test")[variant]
    return f"{WORDS[solved.count(False)]} of {WORDS[len(solved)]}"


@placeholder
def probes() -> str:
    """Return the rows of the probes that each mechanism solved: in how many of its seeds."""
    names = list(read_solved("recall-mechanisms", "test"))
    names += [name for name in read_solved("probe-recall-others", "test") if name not in names]
    lines = []
    for name in names:
        cells = [f"`{name}`"]
        for studies, split in PROBES:
            tried = [read_solved(study, split) for study in studies]
            solved = next(seeds[name] for seeds in tried if name in seeds)
            cells.append(f"{sum(solved)} of {len(solved)}")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def read_solved(study: str, split: str) -> dict[str, list[bool]]:
    """Return for each variant whether its seeds solved a probe.

    Of a study that screened its variants, all of them count, with the seeds of the screening.
    """
    path = EVIDENCE / study / "screening.json"
    all_steps = float(read_table(f"{study}/per_seed.csv")[0]["steps"])
    solved: dict[str, list[bool]] = {}
    if path.exists():
        for screening in json.loads(path.read_text("utf-8"))["variants"]:
            # A seed that never solves the probe has all steps.
            steps = screening["by_seed"].values()
            solved[screening["variant"]] = [before < all_steps for before in steps]
        return solved
    for row in read_table(f"{study}/per_seed.csv"):
        seeds = solved.setdefault(row["variant"], [])
        seeds.append(float(row[f"metric {split}/solved"]) == 1)
    return solved


@placeholder
def solved_after(study: str, variant: str) -> str:
    """Return the median of the steps before a probe is solved, and the star that stays."""
    row = find_row(f"{study}/table.csv", variant=variant)
    median = format_number(float(row["median"]), 0) if row["median"] else "not reached"
    is_compared = row["p_adjusted"] != ""
    return median + STAR * (is_compared and has_star(study, variant))


@placeholder
def solved_within(study: str, variant: str, *limits: str) -> str:
    """Return how many seeds solved a probe within each number of steps, as "3, 8 and 8"."""
    rows = [row for row in read_table(f"{study}/per_seed.csv") if row["variant"] == variant]
    # They are the steps of the last evaluation before, or all steps of the training.
    unsolved_steps = [float(row["value"]) for row in rows]
    counts = [str(sum(steps < int(limit) for steps in unsolved_steps)) for limit in limits]
    return f"{', '.join(counts[:-1])} and {counts[-1]}"


@placeholder
def limit(study: str) -> str:
    """Return the steps of the longest training, one that did not solve its probe."""
    return f"{max(int(row['steps']) for row in read_table(f'{study}/per_seed.csv')):,}"


@placeholder
def times(study: str, variant: str) -> str:
    """Return the median of a variant over that of the baseline."""
    baseline = read_table(f"{study}/table.csv")[0]
    row = find_row(f"{study}/table.csv", variant=variant)
    return f"{float(row['median']) / float(baseline['median']):.1f}"


@placeholder
def events(study: str, variant: str) -> str:
    """Return in how many of its seeds a variant solves the probe, as "two of eight"."""
    row = find_row(f"{study}/table.csv", variant=variant)
    return f"{WORDS[int(row['reached'])]} of {WORDS[int(row['n'])]}"


@placeholder
def order(probe: str, text: str, decimals: int = 2) -> str:
    """Return the rank correlation of the mechanisms' means on a probe and on text.

    Its 95 % interval is that of Bonett and Wright (2000). The baseline is no mechanism.
    """
    from scipy.stats import norm, spearmanr

    on_probe, on_text = read_screening(probe), read_means(text)
    names = list_common(probe, text)
    correlation = spearmanr(
        [on_probe[name] for name in names], [on_text[name] for name in names]
    ).statistic
    deviation = math.sqrt((1 + correlation**2 / 2) / (len(names) - 3))
    reach = norm.ppf(0.975) * deviation
    ends = [math.tanh(math.atanh(correlation) + sign * reach) for sign in (-1, 1)]
    keys = ("difference", "low", "high")
    values = (correlation, *ends)
    row = {key: str(value) for key, value in zip(keys, values, strict=True)}
    return format_difference(row, decimals)


@placeholder
def common(probe: str, text: str) -> str:
    """Return the number of mechanisms that a probe and a text share."""
    return WORDS[len(list_common(probe, text))]


def list_common(probe: str, text: str) -> list[str]:
    """Return the mechanisms that a probe and a text share."""
    on_probe = read_screening(probe)
    return [name for name in read_means(text) if name in on_probe and name != "standard"]


def read_screening(study: str) -> dict[str, float]:
    """Return the mean over the seeds of a screening by variant."""
    record = json.loads((EVIDENCE / study / "screening.json").read_text("utf-8"))
    means = {}
    for screened in record["variants"]:
        values = screened["by_seed"].values()
        means[screened["variant"]] = sum(values) / len(values)
    return means


def read_means(study: str) -> dict[str, float]:
    """Return the mean over seeds by variant."""
    values = defaultdict(list)
    for row in read_table(f"{study}/per_seed.csv"):
        values[row["variant"]].append(float(row["value"]))
    return {name: sum(of_seeds) / len(of_seeds) for name, of_seeds in values.items()}
