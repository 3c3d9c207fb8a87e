"""What the server that cells are forked from has loaded before there is a cell."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml
from training_cells import digits_cell, folder_of, scenes_cell, text_cell

from lit_attn.config.cell import Cell

EXPERIMENTS = Path(__file__).parent.parent / "experiments"

# Loads what the server loads, and prints what each cell loads beyond it.
CODE = """\
import importlib, json, sys
from pathlib import Path
from lit_attn.ablate.launch import TRAINING
from lit_attn.train import run_cell
for module in TRAINING:
    importlib.import_module(module)
known, found = set(sys.modules), []
for folder in sys.argv[1:]:
    run_cell(Path(folder), smoke=True)
    found.append(sorted(set(sys.modules) - known))
    known |= set(sys.modules)
print(json.dumps(found))
"""


def composition_cell() -> Cell:
    experiment = yaml.safe_load((EXPERIMENTS / "head_composition.yaml").read_text())
    experiment["data"] |= {"eval_questions": 4, "batch_size": 64}
    given = {"study": "t", "variant": "v", "seed": 0, "experiment": experiment}
    metric = {"name": "test/accuracy"}
    return Cell.model_validate({**given, "metric": metric})


@pytest.mark.skipif(find_spec("mmseg") is None, reason="no mmsegmentation")
def test_a_cell_finds_its_task_loaded(tmp_path: Path) -> None:
    """Of every task: neither modules of this project nor packages, but for mmsegmentation's."""
    looking = {"diagnostics": ["residual", "rank", "maps", "heads"], "ema": 0.9}
    made = {
        "classification": digits_cell(training=looking),
        "language": text_cell(),
        "composition": composition_cell(),
        "segmentation": scenes_cell(tmp_path / "scenes"),
    }
    folders = [str(folder_of(cell, tmp_path / name)) for name, cell in made.items()]
    done = subprocess.run(
        [sys.executable, "-c", CODE, *folders],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    loaded = dict(zip(made, json.loads(done.stdout.splitlines()[-1]), strict=True))
    ours = {
        task: {name for name in names if name.startswith("lit_attn")}
        for task, names in loaded.items()
    }
    assert ours.pop("segmentation") == {"lit_attn.models.mmseg_parts", "lit_attn.models.pretrained"}
    assert not any(ours.values()), ours
    for task in ours:
        packages = {name for name in loaded[task] if "." not in name}
        assert packages <= sys.stdlib_module_names, task
    # Which no other cell's server pays for.
    assert "mmseg" in loaded["segmentation"]
