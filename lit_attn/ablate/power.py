"""The power of a study that a dry run prints, and the screening that would find more.

Only dry runs import this module, because the statistics need scipy.
"""

from typing import NamedTuple

from lit_attn.ablate.plan import Matrix
from lit_attn.report.answers import PlannedScreening
from lit_attn.report.statistics.designs import find_better, find_power
from lit_attn.report.statistics.stats import pairs_for_a_star
from lit_attn.schema.errors import plural


class StudyPower(NamedTuple):
    """Probability of a star for one better variant among those that the table compares."""

    compared: int
    seeds: int
    power: float
    screening: PlannedScreening | None

    def describe(self) -> list[str]:
        """Return the lines of the dry run."""
        fewest = pairs_for_a_star(1)
        if self.seeds < fewest:
            lines = [f"power 0: a star needs {fewest} seeds, and the study has {self.seeds}"]
        else:
            lines = [
                f"power {self.power:.2f}: probability of a star for one of"
                f" {plural(self.compared, 'variant')} that is better by two standard deviations"
                " over seeds"
            ]
        design = self.screening
        if design is not None:
            lines.append(
                f"power {design.power:.2f} with {design.trainings} trainings: screen all variants"
                f" with {plural(design.screen, 'seed')}, and confirm the best {design.keep} with"
                f" {design.confirm} fresh seeds (docs/statistics.md, Screening)"
            )
        return lines


def find_study_power(matrix: Matrix) -> StudyPower | None:
    """Return the power of the seeds of the plan, also if this command runs some of them.

    It is None without comparisons, and for a product of several axes, which estimates their effects
    from all cells.
    """
    # Variants that are not tuned or measured yet are compared, too.
    compared = max(len(matrix.variants), len(matrix.written)) - 1
    if compared == 0 or len(matrix.source.study.axes) > 1:
        return None
    seeds = len(matrix.list_seeds())
    design = find_better(compared, seeds)
    screening = None
    if design is not None:
        screening = PlannedScreening(
            **design._asdict(), trainings=design.trainings(compared), power=design.power(compared)
        )
    return StudyPower(compared, seeds, find_power(compared, seeds), screening)
