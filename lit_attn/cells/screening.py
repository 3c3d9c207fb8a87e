"""Record of a screening: the values of all variants, and the variants that it keeps.

It stands beside the plan in the folder of the study, as `screening.json`. Once it names the kept
variants, they stay the same, also if a cell of the screening is trained again with another result.
"""

from pathlib import Path

from pydantic import Field, FiniteFloat

from lit_attn.cells.records import Integer, Metric, Record
from lit_attn.schema.errors import plural

SCREENING_FILE = "screening.json"


class ScreenedVariant(Record):
    """Values of a variant in the screening, in printed units.

    `mean` is null before all seeds have ended, and if one of them has diverged.
    """

    variant: str
    label: str | None = Field(None, description="text of tables and figures; null: `variant`")
    identity: str | None = Field(
        None, description="identity of the cell with the first seed; null before it is known"
    )
    mean: FiniteFloat | None = None
    by_seed: dict[str, FiniteFloat | None] = Field({}, description="value by seed; null: diverged")
    has_diverged: bool = Field(False, description="True if a seed has no finite value")

    @property
    def has_ended(self) -> bool:
        """True if the variant has a mean, or can never have one."""
        return self.mean is not None or self.has_diverged


class Screening(Record):
    """Stage before the confirmation: its seeds, the rule that keeps variants, and its state."""

    screen: Integer = Field(description="number of seeds of the screening")
    keep: Integer = Field(
        description="variants beside the baseline that are kept; more if they tie with the last"
    )
    confirm: Integer = Field(description="fresh seeds of the baseline and the kept variants")
    seeds: list[Integer]
    select: Metric = Field(description="metric that ranks the variants")
    baseline: str
    variants: list[ScreenedVariant]
    kept: list[str] | None = Field(
        None, description="kept variants in the order of the study; null before all have ended"
    )

    @property
    def compared(self) -> list[ScreenedVariant]:
        """All variants but the baseline."""
        return [entry for entry in self.variants if entry.variant != self.baseline]

    @property
    def screened_out(self) -> list[ScreenedVariant]:
        """Variants that are not confirmed, the best first and those without a mean last."""
        kept = self.kept
        if kept is None:
            return []
        out = [entry for entry in self.compared if entry.variant not in kept]
        return rank_variants(out, self.select)

    def count_trainings(self) -> int:
        """Return the trainings of both stages without failures and ties."""
        return self.screen * len(self.variants) + self.confirm * (self.keep + 1)

    def describe_state(self) -> str:
        """Return the ended part of the screening and the cells that follow it, in words."""
        confirmed = plural(self.confirm, "fresh seed")
        if self.kept:
            return f"kept {', '.join(self.kept)}, confirmed with {confirmed}"
        if self.kept is not None:
            return f"no variant has a value of {self.select.name}"
        cells = plural(self.confirm * (self.keep + 1), "cell")
        return f"not ended; then {self.baseline} and the best {self.keep} x {confirmed} = {cells}"

    def has_same_question(self, other: "Screening") -> bool:
        """Return True if both keep equally many of the same variants by the same values."""
        keys = {"screen", "keep", "seeds", "select", "baseline"}
        identities = {entry.variant: entry.identity for entry in self.variants}
        other_identities = {entry.variant: entry.identity for entry in other.variants}
        has_equal_keys = self.model_dump(include=keys) == other.model_dump(include=keys)
        return has_equal_keys and identities == other_identities


def rank_variants(entries: list[ScreenedVariant], select: Metric) -> list[ScreenedVariant]:
    """Return the variants, the best first and those without a mean last.

    Variants with equal means keep their order.
    """
    return sorted(entries, key=lambda entry: rank_key(entry, select))


def rank_key(entry: ScreenedVariant, select: Metric) -> tuple[bool, float]:
    """Return the key by which variants are sorted: smaller is better, and equal keys are a tie.

    Rounding makes sums of equal values unequal, so means are compared with twelve digits.
    """
    if entry.mean is None:
        return True, 0.0
    sign = -1.0 if select.goal == "max" else 1.0
    return False, sign * float(f"{entry.mean:.12g}")


def read_screening(folder: Path) -> Screening | None:
    """Return the recorded screening of the study in `folder`, None without a readable one."""
    return Screening.read_valid(folder / SCREENING_FILE)
