"""Tests of docs/tutorial.md, the pages with one purpose, and the notebooks: their code runs."""

import os
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.commands import run_new_python, run_python
from helpers.paths import ROOT
from helpers.training_cells import digits_cell, folder_of
from PIL import Image

from lit_attn.__main__ import main
from lit_attn.ablate.display import BAR_WIDTH
from lit_attn.attention.spec import PRESETS
from lit_attn.train import run_cell

PATH = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"


@pytest.mark.slow
def test_the_commands_of_the_tutorial_run(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "tutorial.md").read_text()
    blocks = re.findall(r"```(console|yaml|python)\n(.*?)```", page, re.DOTALL)
    folder, added = tmp_path / "first", ""
    for language, text in blocks:
        if language == "yaml":
            study = folder / "ablations.yaml"
            # The starter has two studies; the page is about the first one.
            added = study.read_text().replace("    baseline:", f"{text}    baseline:", 1)
            study.write_text(added)
            continue
        where = folder if folder.exists() else tmp_path
        if language == "python":
            finished = run_new_python(where, "-c", text, PATH=PATH)
        else:
            program, *words = text.removesuffix("cd first\n").split()
            assert program == "lit-attn"
            finished = run_python(where, "-m", "lit_attn", *words)
        assert finished.returncode == 0, text + finished.stdout + finished.stderr
        if "init" in text:
            # One epoch instead of fifteen: this test is about the commands.
            experiment = folder / "experiments" / "digits.yaml"
            recipe = experiment.read_text()
            assert recipe.count("epochs: 15") == recipe.count("warmup: 3") == 1
            experiment.write_text(
                recipe.replace("epochs: 15", "epochs: 1").replace("warmup: 3", "warmup: 0")
            )
    assert added
    assert len(list(folder.glob("runs/first/*/*/result.json"))) == 15
    assert "mgk" in finished.stdout
    assert (folder / "reports" / "index.html").exists()


@pytest.mark.process
def test_the_files_of_the_page_about_images_are_a_study(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "images-to-paper.md").read_text()
    blocks = re.findall(r"```(?:yaml|python)\n(.*?)```", page, re.DOTALL)
    names = ("vit.yaml", "shrink.py", "paper.yaml")
    for name, text in zip(names, blocks, strict=True):
        (tmp_path / name).write_text(text)
    for split in ("train", "val", "test"):
        for label in range(10):
            folder = tmp_path / "images" / split / str(label)
            folder.mkdir(parents=True)
            for number in range(8):
                Image.new("RGB", (32, 32), (20 * label, 30 * number, 0)).save(
                    folder / f"{number}.png"
                )
    finished = run_python(tmp_path, "-m", "lit_attn", "run", "paper.yaml", "--dry-run")
    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert "0 of 3 variants tuned; trials are 18 cells" in finished.stdout
    assert "after the search: 3 variants x 8 seeds = 24 cells" in finished.stdout
    finished = run_python(tmp_path, "-m", "lit_attn", "doctor", "--parts", "shrink.py")
    assert finished.returncode == 0, finished.stdout + finished.stderr


@pytest.mark.process
def test_the_files_of_the_page_about_text_are_a_study(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "own-text.md").read_text()
    blocks = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    for name, text in zip(("gpt.yaml", "text.yaml"), blocks, strict=True):
        (tmp_path / name).write_text(text)
    characters = "".join(map(chr, range(ord("0"), ord("0") + 65)))
    (tmp_path / "train.txt").write_text(20 * characters)
    (tmp_path / "val.txt").write_text(2 * characters)
    finished = run_python(tmp_path, "-m", "lit_attn", "run", "text.yaml", "--dry-run", "--params")
    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert "2 variants x 6 seeds = 12 cells" in finished.stdout


@pytest.mark.process
def test_a_trained_model_is_used_without_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cell has the second inner product, so its graph needs the formula of the page."""
    monkeypatch.chdir(tmp_path)
    model = {"attention": PRESETS["belief2"], "depth": 1}
    folder = folder_of(digits_cell(training={"epochs": 1}, model=model), tmp_path)
    run_cell(folder)
    assert main(["export", "hub", str(folder), "--out", "exported"]) == 0
    page = (ROOT / "docs" / "elsewhere.md").read_text()
    load, freeze, use, formula, replace = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    names: dict[str, Any] = {}
    for code in (load, freeze, formula, replace):
        exec(code, names)
    torch.export.save(names["program"], "model.pt2")
    images = torch.randn(3, 1, 8, 8)
    with torch.no_grad():
        torch.save((images, names["network"](images)), "expected.pt")
    (tmp_path / "use.py").write_text(
        f"{use}"
        "import sys\n"
        "images, expected = torch.load('expected.pt')\n"
        "torch.testing.assert_close(network(images), expected)\n"
        "assert logits.shape == (5, 10) and 'lit_attn' not in sys.modules\n"
    )
    finished = run_new_python(tmp_path, "-I", "use.py")
    assert finished.returncode == 0, finished.stderr

    # Causal order, with z and one key of each token, and with two keys of each token.
    q, z, v = torch.randn(3, 2, 4, 5, 8).unbind()
    for second, key_count in ((z, 1), (None, 2)):
        k = torch.randn(2, 4, key_count, 5, 8)
        expected = torch.ops.lit_attn.attend(q, k, second, v, True, 0.3)[0]
        torch.testing.assert_close(names["attend"](q, k, second, v, True, 0.3)[0], expected)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["first_study", "own_mechanism", "layer_to_study"])
def test_a_notebook_runs(name: str, tmp_path: Path) -> None:
    shutil.copy(ROOT / "docs" / "notebooks" / f"{name}.ipynb", tmp_path)
    script = (
        "import nbformat, nbclient\n"
        f"notebook = nbformat.read('{name}.ipynb', 4)\n"
        "nbclient.NotebookClient(notebook, timeout=500, kernel_name='python3').execute()\n"
        "print([output for cell in notebook.cells for output in cell.get('outputs', [])])\n"
    )
    finished = run_new_python(tmp_path, "-W", "ignore", "-c", script, PATH=PATH)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert "disagrees" not in finished.stdout
    # The last state of the display that replaces its text during the run.
    display = r"'display_data', 'metadata': {}, 'data': {'text/plain': '[^']*6 cells: 6 done"
    assert re.search(display, finished.stdout)
    assert len(list(tmp_path.glob("runs/*/*/*/result.json"))) == 6
    # A progress bar, tables and figures stand in the notebook.
    assert f"[{'#' * BAR_WIDTH}] 100%" in finished.stdout
    assert "<table" in finished.stdout
    assert "image/svg+xml" in finished.stdout or name == "own_mechanism"
