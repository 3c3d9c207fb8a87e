"""Folders that tests read."""

import os
from pathlib import Path

ROOT = Path(__file__).parents[2]
"""The checkout."""
EXPERIMENTS = ROOT / "experiments"
DOCUMENTS = Path(__file__).with_name("text")
"""Fixed English text, so that no test depends on the wording of the documentation."""
SHARED = Path(os.environ.get("LIT_ATTN_SHARED", ROOT.parent / "shared" / "data"))
"""Real data beside the checkout; tests that use it skip when it is absent."""
ADE20K = SHARED / "ade20k" / "ADEChallengeData2016"
