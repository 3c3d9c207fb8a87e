"""The studies of ablations.yaml, read and expanded once in each process of pytest."""

from functools import cache
from pathlib import Path

from helpers.paths import ROOT
from lit_attn.ablate.plan import Matrix, expand
from lit_attn.config.study import StudySource, read_studies


@cache
def shipped_studies() -> dict[str, StudySource]:
    """Return the studies by name. Their expansion would take several seconds."""
    return read_studies(ROOT / "ablations.yaml")


@cache
def shipped_matrix(name: str) -> Matrix:
    """Return the cells of a study."""
    return expand(shipped_studies()[name], Path("runs"))
