"""Small trained language models for the tests of the scripts in experiments/."""

from pathlib import Path
from typing import Any

from helpers.finished_cells import train_cell
from helpers.training_cells import text_cell
from lit_attn.attention.spec import PRESETS


def train_model(root: Path, **changes: Any) -> Path:
    """Train a byte-level model with rotary positions and DCMHA, and return its folder."""
    model = {"positions": "rotary", "attention": PRESETS["dcmha"], **changes}
    return train_cell(text_cell(model=model), root)
