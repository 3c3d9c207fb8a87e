"""The sign-flip test for the arrays of a simulation."""

from collections.abc import Sequence

import numpy as np

from lit_attn.report.statistics.significance import OWN_TEST
from lit_attn.report.statistics.stats import DRAWS


def sign_flip_p(differences: Sequence[float], draws: int = DRAWS) -> float:
    """Return the p of the sign-flip test of one variant."""
    return OWN_TEST.find_p([np.array(differences, dtype=float)], draws)
