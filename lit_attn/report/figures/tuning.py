"""Trials of a tuned study: the metric at every tuned value, and the lead over the baseline."""

from collections.abc import Mapping
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from lit_attn.cells.records import Tuning
from lit_attn.report.figures import drawing
from lit_attn.report.statistics.stats import describe_pairs
from lit_attn.report.tables.columns import (
    choose_digits,
    format_difference,
    format_seeds,
    format_spread,
)
from lit_attn.report.tables.formats import Cell, Table, named_table


def read_trials(tuning: Tuning, baseline: str) -> pd.DataFrame:
    """Return one row for each variant and combination of values.

    The columns are variant, values and choice (texts), the place of each tuned key's value in its
    list, mean and sd over the tuning seeds (missing if a seed has diverged), and lead, low and
    high: the mean paired difference to the baseline with the same values, with its 95 % interval.
    """
    baseline_trials = {}
    for tuned in tuning.variants:
        if tuned.variant == baseline:
            baseline_trials = {str(trial.values): trial for trial in tuned.trials}
    rows = []
    for tuned in tuning.variants:
        for trial in tuned.trials:
            row: dict[str, Any] = {"variant": tuned.variant}
            row["values"] = ", ".join(f"{key}={value}" for key, value in trial.values.items())
            for key, value in trial.values.items():
                row[key] = tuning.keys[key].index(value)
            row["choice"] = ""
            if trial.values == tuned.chosen:
                row["choice"] = "chosen"
                if tuned.at_edge:
                    row["choice"] += f", at the edge of {', '.join(tuned.at_edge)}"
            values = pd.Series(trial.by_seed, dtype=float)
            row["mean"] = trial.mean
            row["sd"] = values.std(skipna=False)
            other = baseline_trials.get(str(trial.values))
            if tuned.variant != baseline and other is not None:
                has_diverged = trial.mean is None or other.mean is None
                if not has_diverged:
                    lead = values - pd.Series(other.by_seed, dtype=float)
                    row["lead"], row["low"], row["high"] = describe_pairs(lead.tolist())
            rows.append(row)
    numbers = ["mean", "sd", "lead", "low", "high"]
    columns = ["variant", "values", *tuning.keys, "choice", *numbers]
    return pd.DataFrame(rows, columns=columns).astype(dict.fromkeys(numbers, float))


def make_tuning_table(tuning: Tuning, baseline: str) -> Table:
    """Return mean and lead of every combination of values; the chosen one is bold."""
    trials = read_trials(tuning, baseline)
    digits = choose_digits(trials["sd"], trials["mean"])
    rows = []
    for _, trial in trials.iterrows():
        mean = "diverged"
        if not pd.isna(trial["mean"]):
            mean = format_spread(trial["mean"], trial["sd"], digits)
        lead = format_difference(trial["lead"], trial["low"], trial["high"], f".{digits}f")
        texts = [trial["variant"], trial["values"], mean, lead, trial["choice"]]
        rows.append([Cell(text, is_bold=trial["choice"] != "") for text in texts])
    return named_table(
        "tuning",
        rows,
        label=tuning.select.label,
        baseline=baseline,
        trials=tuning.trials,
        seeds=format_seeds(tuning.seeds),
        keys="; ".join(f"{key} from {values}" for key, values in tuning.keys.items()),
    )


def draw_tuning(
    tuning: Tuning, baseline: str, styles: Mapping[str, drawing.Style]
) -> Figure | None:
    """Draw metric and lead of each variant's best trial with each value, a column for each key."""
    trials = read_trials(tuning, baseline).dropna(subset="mean")
    if trials.empty:
        return None
    trials = trials.sort_values("mean", ascending=tuning.select.goal == "min", kind="stable")
    names = [variant.variant for variant in tuning.variants][: len(drawing.COLOURS)]
    key: drawing.Key = {name: (styles[name].colour, styles[name].dash) for name in names}
    figure = drawing.new_figure(4.2)
    grid = figure.subplots(2, len(tuning.keys), sharex="col", sharey="row", squeeze=False)
    for (top, bottom), (tuned, values) in zip(grid.T, tuning.keys.items(), strict=True):
        for number, (name, (colour, _)) in enumerate(key.items()):
            # The trials are sorted, so the first one with each value is the best one.
            rows = trials[trials["variant"] == name].drop_duplicates(tuned).sort_values(tuned)
            # Error bars of several variants would cover each other.
            place = rows[tuned] + 0.06 * (number - (len(key) - 1) / 2)
            style = {"color": colour, "fmt": "o-", "ms": 3, "lw": 1, "elinewidth": 0.8}
            ends = [rows["lead"] - rows["low"], rows["high"] - rows["lead"]]
            at = [f"{tuned} = {values[place_of_value]}" for place_of_value in rows[tuned]]
            drawing.draw_points(top, (place, rows["mean"], rows["sd"]), name, at, **style)
            drawing.draw_points(bottom, (place, rows["lead"], ends), name, at, **style)
            chosen = rows[rows["choice"] != ""]
            rings = top.plot(
                place[chosen.index], chosen["mean"], "o", mfc="none", color=colour, ms=9
            )
            drawing.name_values(rings[0], name)
        bottom.axhline(0, color=drawing.GREY, linewidth=0.8)
        bottom.set_xticks(range(len(values)), list(map(str, values)))
        bottom.set_xlabel(tuned)
    # With few seeds an interval can be many times as long as the leads.
    span = 3 * trials["lead"].abs().max()
    if span > 0:
        low, high = grid[1][0].get_ylim()
        grid[1][0].set_ylim(max(low, -span), min(high, span))
    grid[0][0].set_ylabel(drawing.wrap_vertical(tuning.select.label))
    grid[1][0].set_ylabel(f"difference to {drawing.shorten(baseline, 20)}")
    drawing.add_legend(figure, key)
    return figure
