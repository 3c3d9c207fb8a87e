"""What the documentation prints to be run runs."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.paths import ROOT

from lit_attn.ablate.plan import expand
from lit_attn.cells.records import Plan
from lit_attn.config.study import choose, read_studies

CHECK = """
import sys
sys.path.insert(0, {tests!r})
from helpers import attention_cases
import torch
from lit_attn.attention.spec import AttentionSpec
from lit_attn.bench.blocks import Shape, agrees
from helpers.attention_checks import assert_same, make, tokens

found = [s for s in attention_cases.all_specs() if s.residual.kind == "reflected"]
assert {{s.residual.scope for s in found}} == {{"global", "head"}}
for chosen in found:
    assert_same(make(chosen), tokens(7))
    assert_same(make(chosen), tokens(7), is_causal=True)
assert AttentionSpec.model_validate({{"residual": "reflected"}}).residual == Reflected()

found = [s for s in attention_cases.all_specs() if s.similarity.kind == "cosine"]
assert {{s.residual.kind for s in found}} > {{"full", "split", "reflected"}}
assert {{s.compose.kind for s in found}} > {{"none", "query+key"}}
for chosen in found:
    assert_same(make(chosen), tokens(7))
    assert_same(make(chosen), tokens(7), is_causal=True)

# A reflection keeps the length of what it reflects.
heads, values = torch.randn(2, 1, 5, 3, 8, dtype=torch.double).unbind()
turned = heads - 2 * residual.projected(heads, values, "head")
torch.testing.assert_close(turned.norm(dim=-1), heads.norm(dim=-1))
"""


def test_adding_a_part() -> None:
    """In a process of its own: registering a part is for good."""
    text = (ROOT / "docs" / "adding-a-part.md").read_text()
    code = "\n".join(re.findall(r"```python\n(.*?)```", text, re.DOTALL))
    code += CHECK.format(tests=str(ROOT / "tests"))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_example_of_the_readme_is_a_whole_file(tmp_path: Path) -> None:
    """Its only study runs without being named."""
    (example,) = re.findall(r"```yaml\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    path = tmp_path / "mine.yaml"
    path.write_text(example.replace("experiments/", f"{ROOT}/experiments/"))
    (found,) = choose(read_studies(path), [], path)
    assert len(expand(found, tmp_path).jobs) == 4 * 5


def test_the_tests_that_are_named_exist() -> None:
    pages = [ROOT / "README.md", ROOT / "LOG.md", *(ROOT / "docs").glob("*.md")]
    named = {name for page in pages for name in re.findall(r"tests/\w+\.py", page.read_text())}
    assert named
    assert [name for name in sorted(named) if not (ROOT / name).exists()] == []


@pytest.mark.slow
def test_the_trial_of_the_readme(tmp_path: Path) -> None:
    """It ends with results, and beside the studies that it tries."""
    (command,) = re.findall(r"`… (--set .*?)` \| a trial", (ROOT / "README.md").read_text())
    shutil.copy(ROOT / "ablations.yaml", tmp_path)
    shutil.copytree(ROOT / "experiments", tmp_path / "experiments")
    done = subprocess.run(
        [sys.executable, "-m", "lit_attn.ablate", "ablations.yaml", *command.split()],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(list(tmp_path.glob("runs/*/*/*/result.json"))) == 4
    plans = {path.parent.name: path for path in tmp_path.glob("runs/*/plan.json")}
    assert plans
    for name, path in plans.items():
        assert "@training.max_steps=" in name
        assert Plan.model_validate_json(path.read_bytes()).study == name
        assert (tmp_path / "reports" / name / "table.html").exists()
