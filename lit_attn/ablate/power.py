"""The power of a study that a dry run prints, and the screening that would find more.

Only dry runs import this module, because the statistics need scipy.
"""

from typing import NamedTuple

from lit_attn.ablate.plan import Matrix
from lit_attn.cells.screening import Screening
from lit_attn.report.answers.runs import PlannedScreening
from lit_attn.report.statistics import designs
from lit_attn.report.statistics.significance import TESTS
from lit_attn.report.statistics.stats import ALPHA
from lit_attn.schema.errors import plural


class StudyPower(NamedTuple):
    """Probability of a star for one better variant among those that the table compares.

    `fewest` are the seeds without which no star is possible.
    """

    compared: int
    seeds: int
    fewest: int
    power: float
    screening: PlannedScreening | None
    design: Screening | None = None

    def describe(self) -> list[str]:
        """Return the lines of the dry run."""
        lines = []
        if self.design is not None:
            design = self.design
            lines.append(
                f"design: screen all variants with {plural(design.screen, 'seed')} by"
                f" {design.select.name}, and confirm the best {design.keep} with"
                f" {plural(design.confirm, 'fresh seed')}: {design.count_trainings()} trainings"
            )
        if self.seeds < self.fewest:
            lines.append(
                f"power 0: a star needs {self.fewest} seeds, and the study has {self.seeds}"
            )
        else:
            lines.append(
                f"power {self.power:.2f}: probability of a star for one of"
                f" {plural(self.compared, 'variant')} that is better by two standard deviations"
                " over seeds"
            )
        better = self.screening
        if better is not None:
            lines.append(
                f"power {better.power:.2f} with {better.trainings} trainings: `design: {{screen:"
                f" {better.screen}, keep: {better.keep}, confirm: {better.confirm}}}` in place of"
                " `seeds` (docs/statistics.md, Screening)"
            )
        return lines


def find_study_power(matrix: Matrix) -> StudyPower | None:
    """Return the power of the seeds of the plan, also if this command runs some of them.

    It is None without comparisons, and for a product of several axes, which estimates their effects
    from all cells; a log-rank test estimates none.
    """
    test = TESTS[matrix.baseline.metric.pairs]
    # Variants that are not tuned or measured yet are compared, too.
    compared = max(len(matrix.variants), len(matrix.written)) - 1
    has_effects = test.has_means and len(matrix.source.study.axes) > 1
    if compared == 0 or has_effects:
        return None
    seeds = len(matrix.list_seeds())
    fewest = test.find_fewest(test.share_level(ALPHA, compared))
    if matrix.screening is not None:
        stages = designs.Screening(matrix.screening.screen, matrix.screening.keep, seeds)
        power = stages.power(compared, test)
        return StudyPower(compared, seeds, fewest, power, None, matrix.screening)
    design = designs.find_better(compared, seeds, test)
    screening = None
    if design is not None:
        screening = PlannedScreening(
            **design._asdict(),
            trainings=design.trainings(compared),
            power=design.power(compared, test),
        )
    power = designs.find_power(compared, seeds, test)
    return StudyPower(compared, seeds, fewest, power, screening)
