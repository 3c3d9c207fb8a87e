"""Screen, then confirm: the key `design` of a study, and the seeds of its two stages.

The screening trains every variant with a few seeds and keeps the best ones. These and the baseline
are then trained with fresh seeds, and every claim comes from the fresh seeds.
"""

from typing import Annotated

from pydantic import Field, PositiveInt

from lit_attn.config.source import locate
from lit_attn.config.study_values import MOST_SEEDS
from lit_attn.schema.base import Config, consistency_check
from lit_attn.schema.errors import ConfigError
from lit_attn.schema.yaml_text import Mapping, Where

FIRST_FRESH_SEED = 1000
"""First seed of the confirmation, whatever the number of seeds of the screening is."""

MOST_SCREENED = 100
"""Largest number of seeds of a screening, which is below FIRST_FRESH_SEED."""


class DesignConfig(Config):
    """Seeds of a screening, variants that it keeps, and fresh seeds that confirm them."""

    screen: Annotated[int, Field(ge=1, le=MOST_SCREENED)] | None = Field(
        None, description="seeds of the screening, which trains every variant: 2 is [0, 1]"
    )
    keep: PositiveInt | None = Field(
        None,
        description="variants beside the baseline that the screening keeps; those that tie with"
        " the last of them are kept, too",
    )
    confirm: Annotated[int, Field(ge=1, le=MOST_SEEDS)] | None = Field(
        None,
        description="fresh seeds of the baseline and the kept variants: 12 is [1000, ..., 1011]",
    )
    select: str | None = Field(
        None,
        description="validation metric that ranks the variants; null: `tune.select`, or else the "
        "study's metric on the validation split",
    )

    @consistency_check
    def _has_all_numbers(self) -> None:
        """Refuse a design without one of the three numbers."""
        if None in (self.screen, self.keep, self.confirm):
            raise ValueError("needs all of {screen: 2, keep: 5, confirm: 12}")


def require_seeds_or_design(tree: Mapping, where: Where, path: str) -> None:
    """Raise ConfigError unless a study, written as `tree`, has either `seeds` or `design`."""
    if "seeds" in tree and "design" in tree:
        raise ConfigError(
            f"{locate(tree, ('design',))}: {path}.design: cannot stand beside `seeds`, because it"
            " decides the seeds; remove one of them"
        )
    if not {"seeds", "design"} & set(tree):
        raise ConfigError(f"{where}: {path}.seeds: this key is required, or `design` in its place")
