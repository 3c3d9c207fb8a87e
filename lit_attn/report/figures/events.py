"""The figure of times until an event: the share of runs with the event against steps."""

from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from lit_attn.report.figures import drawing
from lit_attn.report.figures.study import order_variants
from lit_attn.report.records.study_record import StudyRecord
from lit_attn.report.statistics.times import find_shares
from lit_attn.report.verdicts.comparison import Comparisons


def draw_events(study: StudyRecord, comparisons: Comparisons) -> Figure | None:
    """Draw the Kaplan-Meier share of runs with the event, of at most MOST_LINES variants.

    Returns None for a metric that is no time until an event.
    """
    metric = study.plan.metric
    if not metric.event:
        return None
    ordered = order_variants(study, comparisons)
    names = [name for name in ordered if study.values(name)][: drawing.MOST_LINES]
    styles = drawing.assign_styles(study.plan)
    key: drawing.Key = {name: (styles[name].colour, styles[name].dash) for name in names}
    figure = drawing.new_figure(2.6)
    axes = figure.subplots()
    for name, (colour, dash) in key.items():
        values = study.values(name).values()
        steps = [0.0]
        shares = [0.0]
        for time, share_without in find_shares(values):
            steps.append(time)
            shares.append(1 - share_without)
        points = zip(steps, shares, strict=True)
        texts = [f"{share:.0%} at {drawing.short(step)}" for step, share in points]
        # The line goes on to the last step of any run.
        steps.append(max(values))
        shares.append(shares[-1])
        (line,) = axes.step(steps, shares, where="post", color=colour, linestyle=dash)
        drawing.name_values(line, name, texts)
    axes.set_ylim(0, 1.03)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    axes.set_ylabel(f"share {metric.event}")
    axes.set_xlabel(metric.label)
    drawing.add_legend(figure, key)
    return figure
