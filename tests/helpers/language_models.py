"""Small trained language models for the tests of the scripts in experiments/."""

from pathlib import Path
from typing import Any

from helpers.training_cells import folder_of, text_cell
from lit_attn.attention.spec import PRESETS
from lit_attn.train import run_cell


def train_model(root: Path, **changes: Any) -> Path:
    """Train a byte-level model with rotary positions and DCMHA, and return its folder."""
    model = {"positions": "rotary", "attention": PRESETS["dcmha"], **changes}
    folder = folder_of(text_cell(model=model), root)
    run_cell(folder)
    return folder
