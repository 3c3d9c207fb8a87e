"""Training with layers of users: the study of docs/mixers.md, resuming, and diagnostics."""

import json
import re
import shutil
from pathlib import Path

import pytest
from helpers.commands import run_python
from helpers.finished_cells import assert_same_weights, train_cell
from helpers.paths import EXPERIMENTS, ROOT
from helpers.stopping import run_until
from helpers.training_cells import digits_cell, folder_of, result_of, text_cell

from lit_attn.schema.plugins import load_parts
from lit_attn.schema.yaml_text import parse_plain
from lit_attn.train import run_cell

MIXERS = EXPERIMENTS / "token_mixers" / "token_mixers.py"

load_parts([MIXERS])

DELTA = {"kind": "module", "import": "token_mixers:GatedDeltaRule"}
SPACE = {"kind": "module", "import": "token_mixers:StateSpace", "arguments": {"state": 4}}


def test_a_hybrid_resumes_exactly(tmp_path: Path) -> None:
    cell = digits_cell(model={"attention": DELTA | {"layers": {"last": 1, "use": "standard"}}})
    undisturbed = train_cell(cell, tmp_path / "undisturbed")
    stopped = folder_of(cell, tmp_path / "stopped")
    run_until(4, stopped)
    run_cell(stopped)
    assert_same_weights(stopped, undisturbed)
    assert result_of(undisturbed).flops > 0


def test_a_language_model_trains_and_records_its_attention_layers(tmp_path: Path) -> None:
    cell = text_cell(
        model={"attention": {"layers": [SPACE, "standard"]}},
        training={"diagnostics": {"kinds": ["rank"]}},
    )
    folder = train_cell(cell, tmp_path)
    rows = (folder / "diagnostics.csv").read_text().splitlines()[1:]
    assert {row.split(",")[1] for row in rows} == {"2"}


@pytest.mark.process
def test_the_study_of_the_page_trains(tmp_path: Path) -> None:
    """All variants reach a result; `match` gives them the parameters of the baseline."""
    page = (ROOT / "docs" / "mixers.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    study, experiment = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    (tmp_path / "gating.py").write_text(code)
    (tmp_path / "gating.yaml").write_text(experiment)
    (tmp_path / "ablations.yaml").write_text(study)
    shutil.copy(MIXERS, tmp_path)
    finished = run_python(tmp_path, "-m", "lit_attn.ablate", "ablations.yaml", "--jobs", "2")
    assert finished.returncode == 0, finished.stdout + finished.stderr
    results = [json.loads(path.read_text()) for path in tmp_path.rglob("result.json")]
    names = parse_plain(study, "text")["studies"]["mixers"]["axes"]["model"]
    assert {result["variant"] for result in results} == set(names)
    parameters = [result["parameters"] for result in results]
    assert min(parameters) > 0.98 * max(parameters)
