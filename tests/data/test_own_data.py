"""Tests of docs/own-data.md: its study runs as printed, and every key is documented."""

import re
from pathlib import Path

import numpy as np
import pytest
from helpers.paths import ROOT
from PIL import Image
from sklearn.datasets import load_digits

from lit_attn.ablate.plan import expand, require_inputs
from lit_attn.config.data.images import Npz
from lit_attn.config.study import read_studies
from lit_attn.train import run_cell

TRAIN, TEST = slice(0, 200), slice(200, 300)


def write_npz(path: Path) -> None:
    digits = load_digits()
    images = (digits.images * 15).astype(np.uint8)
    np.savez(
        path,
        x_train=images[TRAIN],
        y_train=digits.target[TRAIN],
        x_test=images[TEST],
        y_test=digits.target[TEST],
    )


def write_folders(root: Path) -> None:
    digits = load_digits()
    for split, part in (("train", TRAIN), ("test", TEST)):
        for index, (image, label) in enumerate(
            zip(digits.images[part], digits.target[part], strict=True)
        ):
            path = root / split / str(label) / f"{index}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray((image * 15).astype(np.uint8)).save(path)


@pytest.mark.parametrize("kind", ["npz", "folder"])
def test_the_study_of_the_page_runs(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (ROOT / "docs" / "own-data.md").read_text(encoding="utf-8")
    experiment, study, folder = re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)
    if kind == "folder":
        experiment = folder + experiment[experiment.index("model:") :]
        write_folders(tmp_path / "images")
    else:
        write_npz(tmp_path / "images.npz")
    (tmp_path / "own.yaml").write_text(experiment)
    (tmp_path / "own-study.yaml").write_text(study)
    monkeypatch.chdir(tmp_path)
    (source,) = read_studies(Path("own-study.yaml")).values()
    matrix = expand(source, tmp_path / "runs")
    require_inputs([matrix], matrix.jobs)
    cell = matrix.jobs[-1]
    cell.folder.mkdir(parents=True)
    cell.cell.write(cell.folder / "config.yaml")
    run_cell(cell.folder)
    assert cell.state() == "done"


def test_the_page_has_every_key_of_own_images() -> None:
    text = (ROOT / "docs" / "own-data.md").read_text(encoding="utf-8")
    table = text[text.index("| key of") :]
    for key in Npz.model_fields:
        assert key == "kind" or f"`{key}`" in table
