"""Generator of the pages of results, which it writes to docs/.

    python docs/generators/write_results.py

A page is a template of this folder with each {{name argument ...}} replaced by numbers of the
committed evidence: `name` is a function with the decorator `placeholder`, and a last
argument `N digits` sets the decimals. No other number of a template is measured.
"""

import json
import re
from collections import defaultdict
from pathlib import Path
from typing import Any

from evidence_tables import (
    EVIDENCE,
    PLACEHOLDERS,
    ROOT,
    STAR,
    WORDS,
    correct_over_studies,
    find_row,
    format_difference,
    format_number,
    has_star,
    placeholder,
    read_table,
)
from probe_tables import read_screening

from lit_attn.ablate.plan import expand
from lit_attn.ablate.power import find_study_power
from lit_attn.config.study import read_studies
from lit_attn.report.statistics.stats import paired_interval
from lit_attn.report.verdicts.comparison import ALPHA

PAGES = ("results", "history", "claims", "questions")
"""Names of the pages; `results` is written from results.template."""

PLACEHOLDER = re.compile(r"\{\{([^}]+)\}\}")


@placeholder
def gain(study: str, variant: str, decimals: int = 3) -> str:
    """Return the difference to the baseline, its interval, and the star that stays."""
    row = find_row(f"{study}/table.csv", variant=variant)
    return format_difference(row, decimals) + STAR * has_star(study, variant)


@placeholder
def effect(study: str, name: str, decimals: int = 1) -> str:
    """Return the main effect of one level of an axis, with its interval."""
    return format_difference(find_row(f"{study}/effects.csv", effect=name), decimals)


@placeholder
def effect_with_star(study: str, name: str, decimals: int = 1) -> str:
    """Return an effect with its interval, and a star if it passes the test of its table.

    A `+` stands for each space of the name.
    """
    row = find_row(f"{study}/effects.csv", effect=name.replace("+", " "))
    return format_difference(row, decimals) + STAR * (float(row["p"]) <= ALPHA)


@placeholder
def effect_p(study: str, name: str) -> str:
    """Return the p of an effect, corrected for all effects of the study."""
    return f"{float(find_row(f'{study}/effects.csv', effect=name)['p']):.3f}"


@placeholder
def at_ceiling(study: str) -> str:
    """Return how many cells never solve their probe, of all cells, as "74 of its 156"."""
    rows = read_table(f"{study}/per_seed.csv")
    unsolved_count = sum(row["metric test/solved"] == "0.0" for row in rows)
    return f"{unsolved_count} of its {len(rows)}"


@placeholder
def mean(study: str, variant: str, decimals: int = 3) -> str:
    """Return the mean over seeds."""
    return format_number(float(find_row(f"{study}/table.csv", variant=variant)["mean"]), decimals)


@placeholder
def floor(study: str, rule: str, decimals: int = 3) -> str:
    """Return the value of a rule without attention (count_floors.py), a `-` for each space."""
    row = find_row("floors.csv", study=study, rule=rule.replace("-", " "))
    return format_number(float(row["value"]), decimals)


@placeholder
def seeds(study: str) -> str:
    """Return the planned seeds of a study."""
    return read_table(f"{study}/table.csv")[0]["planned"]


@placeholder
def variants(study: str) -> str:
    """Return the number of variants, each counted once whatever the criteria."""
    rows = read_table(f"{study}/table.csv")
    return str(len({row["variant"].partition("@")[0] for row in rows}))


@placeholder
def slower(study: str, variant: str) -> str:
    """Return how many times the baseline's time a step takes, measured in turns with it."""
    times = json.loads((EVIDENCE / study / "step_times.json").read_text(encoding="utf-8"))
    (ratio,) = [entry["ratio"] for entry in times["variants"] if entry["variant"] == variant]
    return f"{ratio:.2f}"


@placeholder
def count(study: str, direction: str, criterion: str) -> str:
    """Return how many variants are `better` or `worse` with a star at equal `steps` or `time`."""
    path = ROOT / "ablations.yaml"
    goal = read_studies(path)[study].study.metric.goal
    starred = 0
    for row in read_table(f"{study}/table.csv"):
        is_timed = row["variant"].endswith("@time")
        if not row["p_adjusted"] or is_timed != (criterion == "time"):
            continue
        is_better = (float(row["difference"]) > 0) == (goal == "max")
        if has_star(study, row["variant"]) and is_better == (direction == "better"):
            starred += 1
    return WORDS[starred] if starred < len(WORDS) else str(starred)


def lost(study: str) -> str:
    """Return how many stars of a study's table do not stay over studies."""
    starred = [r["variant"] for r in read_table(f"{study}/table.csv") if r["significant"] == "True"]
    return WORDS[sum(not has_star(study, variant) for variant in starred)]


@placeholder
def lost_of_file(path: str) -> str:
    """Return how many stars of each table of a file's sealed studies do not stay over studies."""
    sources = read_studies(ROOT / "ablations.yaml")
    studies = dict.fromkeys(study for study, _ in correct_over_studies())
    of_file = [study for study in studies if sources[study].path == ROOT / path]
    return join_words([f"{lost(s)} of `{s}`" for s in of_file if lost(s) != WORDS[0]])


def join_words(words: list[str]) -> str:
    """Return words as an enumeration, as "a, b and c"."""
    if len(words) < 2:
        return "".join(words)
    return f"{', '.join(words[:-1])} and {words[-1]}"


@placeholder
def p(study: str, variant: str) -> str:
    """Return the corrected p of a table."""
    return f"{float(find_row(f'{study}/table.csv', variant=variant)['p_adjusted']):.3f}"


@placeholder
def p_over_studies(study: str, variant: str) -> str:
    """Return the p of a table, corrected over studies too."""
    return f"{correct_over_studies()[study, variant]:.2f}"


@placeholder
def verdict(study: str, variant: str) -> str:
    """Return the verdict of a study with a margin."""
    return find_row(f"{study}/table.csv", variant=variant)["verdict"]


@placeholder
def margin(study: str) -> str:
    """Return the margin of a study, which ablations.yaml chooses before the first cell."""
    metric = read_studies(ROOT / "ablations.yaml")[study].study.metric
    assert metric is not None
    return f"{metric.margin:g}"


@placeholder
def sealed(path: str) -> str:
    """Return the number of studies of a file over which p is corrected."""
    sources = read_studies(ROOT / "ablations.yaml")
    studies = {study for study, _ in correct_over_studies()}
    return WORDS[sum(sources[study].path == ROOT / path for study in studies)]


@placeholder
def edge(study: str, end: str) -> str:
    """Return how many variants the search gave the `smallest` or `largest` of its rates."""
    at_edge = 0
    for chosen in read_rates(study).values():
        rate, rates = chosen
        at_edge += rate == (min(rates) if end == "smallest" else max(rates))
    return str(at_edge)


@placeholder
def edges(*studies: str) -> str:
    """Return for each study how many variants have the smallest or largest rate of the search."""
    lines = []
    for study in studies:
        for end in ("smallest", "largest"):
            at_edge = int(edge(study, end))
            if at_edge:
                count = len(read_rates(study))
                lines.append(f"the {end} rate for {at_edge} of {count} variants in `{study}`")
    return join_words(lines)


@placeholder
def worst_mean(study: str, metric: str, decimals: int = 1) -> str:
    """Return the smallest mean over seeds of a share that any variant has, in percent."""
    shares = defaultdict(list)
    for row in read_table(f"{study}/per_seed.csv"):
        shares[row["variant"]].append(float(row[f"metric {metric}"]))
    means = [sum(values) / len(values) for values in shares.values()]
    return format_number(100 * min(means), decimals)


@placeholder
def tied(study: str) -> str:
    """Return the variants that a screening dropped at the mean of one that it kept."""
    kept = {row["variant"] for row in read_table(f"{study}/per_seed.csv")}
    means = read_screening(study)
    baseline = read_studies(ROOT / "ablations.yaml")[study].study.baseline
    last = max(means[name] for name in kept if name != baseline)
    names = [name for name, value in means.items() if value == last and name not in kept]
    return join_words([f"`{name}`" for name in names])


def read_rates(study: str) -> dict[str, tuple[float, list[float]]]:
    """Return the chosen rate of every variant, and the rates that the search tried."""
    record: dict[str, Any] = json.loads((EVIDENCE / study / "tuning.json").read_text("utf-8"))
    rates = record["keys"]["optimizer.lr"]
    return {
        entry["variant"]: (entry["chosen"]["optimizer.lr"], rates) for entry in record["variants"]
    }


@placeholder
def steps(study: str) -> str:
    """Return the training steps of the baseline."""
    return f"{int(read_table(f'{study}/per_seed.csv')[0]['steps']):,}"


@placeholder
def tuning_seeds(study: str) -> str:
    """Return the number of seeds of the search."""
    record = json.loads((EVIDENCE / study / "tuning.json").read_text("utf-8"))
    return WORDS[len(record["seeds"])]


@placeholder
def parameters(end: str, device: str) -> str:
    """Return the parameters of the `smallest` or `largest` model that trained on `CPU` or `GPU`."""
    sizes = set()
    for path in EVIDENCE.glob("*/per_seed.csv"):
        for row in read_table(f"{path.parent.name}/per_seed.csv"):
            if row["parameters"] and row["device"].startswith("CPU") == (device == "CPU"):
                sizes.add(int(row["parameters"]))
    return f"{min(sizes) if end == 'smallest' else max(sizes):,}"


@placeholder
def percent(study: str, name: str, decimals: int = 1) -> str:
    """Return a metric of the only cell of a study, which is recorded as a share, in percent."""
    (row,) = read_table(f"{study}/per_seed.csv")
    return format_number(100 * float(row[f"metric {name}"]), decimals)


@placeholder
def claims(folder: str) -> str:
    """Return the cells of a paper's row: claims that agree, disagree, are undecided, and so on."""
    page = (EVIDENCE / folder / "index.md").read_text(encoding="utf-8")
    (line,) = re.findall(r"\*\*Claims of the paper: (.*)\.\*\*", page)
    return " | ".join(re.findall(r"\d+", line))


@placeholder
def below(folder: str) -> str:
    """Return how many studies of a paper's page are below their floors, of those that have one."""
    page = (EVIDENCE / folder / "index.md").read_text(encoding="utf-8")
    (line,) = re.findall(r"\*\*Baselines that are below .*: (\d+ of \d+)\.\*\*", page)
    return str(line)


@placeholder
def power(study: str) -> str:
    """Return the probability of a star for one variant that is better by two deviations."""
    matrix = expand(read_studies(ROOT / "ablations.yaml")[study], Path("runs"))
    strength = find_study_power(matrix)
    assert strength is not None, study
    return f"{strength.power:.2f}"


@placeholder
def change(study: str, before: str, variant: str, decimals: int = 3) -> str:
    """Return the change of a lead from another study, paired by seed, with its interval."""
    leads = [find_leads(name, variant) for name in (study, before)]
    differences = [now - then for now, then in zip(*leads, strict=True)]
    average = sum(differences) / len(differences)
    interval = paired_interval(differences)
    assert interval is not None
    row = {"difference": str(average), "low": str(interval[1]), "high": str(interval[2])}
    return format_difference(row, decimals)


@placeholder
def between(study: str, variant: str, other: str, decimals: int = 1) -> str:
    """Return the difference of two variants, paired by seed, with its interval."""
    leads = [find_leads(study, name) for name in (variant, other)]
    interval = paired_interval([one - two for one, two in zip(*leads, strict=True)])
    assert interval is not None
    keys = ("difference", "low", "high")
    row = {key: str(value) for key, value in zip(keys, interval, strict=True)}
    return format_difference(row, decimals)


def find_leads(study: str, variant: str) -> list[float]:
    """Return the difference to the baseline by seed."""
    baseline = read_studies(ROOT / "ablations.yaml")[study].study.baseline
    rows = read_table(f"{study}/per_seed.csv")
    values = {(row["variant"], int(row["seed"])): float(row["value"]) for row in rows}
    numbers = sorted(seed for name, seed in values if name == variant)
    return [values[variant, seed] - values[baseline, seed] for seed in numbers]


def fill(match: re.Match[str]) -> str:
    """Return the text of a placeholder; its last argument can be a number of decimals."""
    name, *arguments = match[1].split()
    if len(arguments) > 2 and arguments[-1] == "digits":
        *arguments, decimals, _ = arguments
        return PLACEHOLDERS[name](*arguments, decimals=int(decimals))
    return PLACEHOLDERS[name](*arguments)


def read_template(name: str) -> str:
    """Return the template of a page."""
    return Path(__file__).with_name(f"{name}.template").read_text(encoding="utf-8")


def write_page(name: str) -> str:
    """Return the text of a page."""
    return PLACEHOLDER.sub(fill, read_template(name))


def main() -> None:
    """Write all pages."""
    for name in PAGES:
        (ROOT / "docs" / f"{name}.md").write_text(write_page(name), encoding="utf-8")


if __name__ == "__main__":
    main()
