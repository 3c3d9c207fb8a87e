"""Cells of models from configuration files of mmsegmentation: training, inference, resume."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.finished_cells import assert_same_weights, read_weights, train_cell
from helpers.mmseg_files import make_network, write_file
from helpers.paths import ADE20K, ROOT
from helpers.stopping import run_until
from helpers.training_cells import cell_of, folder_of, result_of, scenes_cell

from lit_attn.config.cell import Cell
from lit_attn.extras import require_mmseg
from lit_attn.models import factory
from lit_attn.schema.yaml_text import parse_plain
from lit_attn.segmentation.data import SceneryData
from lit_attn.train import run_cell
from lit_attn.training.several_devices import require_shared_losses

pytest.importorskip("mmseg")
require_mmseg("tests")


def make_cell(folder: Path, network: dict[str, Any]) -> Cell:
    """Return a cell on scenes below `folder`, with the `model` of a configuration file."""
    path = write_file(folder / "network.py", network)
    cell = scenes_cell(folder / "scenes").model_dump(mode="json")
    cell["experiment"]["model"] = {"kind": "mmseg", "config": str(path)}
    return Cell.model_validate(cell)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["vit", "segformer"])
def test_a_cell_trains_and_evaluates_with_the_losses_and_windows_of_the_file(
    name: str, tmp_path: Path
) -> None:
    cell = make_cell(tmp_path, make_network(name))
    folder = train_cell(cell, tmp_path / "cell")
    result = result_of(folder)
    assert result.steps == 9
    assert 0 <= result.metrics["test/mIoU"] <= 1
    network: Any = factory.build(cell.experiment.model, cell.experiment.data)
    network.load_state_dict(read_weights(folder))
    assert network.test_cfg.mode == {"vit": "slide", "segformer": "whole"}[name]
    data = SceneryData(cell.experiment.data, seed=0, device=torch.device("cpu"))
    correct = 0
    counted = 0
    for batch in data.val_dataloader()[0]:
        with torch.no_grad():
            (sample,) = network.eval().test_step(batch)
        labels = sample.gt_sem_seg.data[0]
        is_labelled = labels != 255
        correct += int((sample.pred_sem_seg.data[0] == labels)[is_labelled].sum())
        counted += int(is_labelled.sum())
    assert result.metrics["test/aAcc"] == pytest.approx(correct / counted)


@pytest.mark.slow
def test_a_stopped_cell_resumes_exactly(tmp_path: Path) -> None:
    """The backbone draws drop paths, and the head has a batch norm."""
    fields = make_cell(tmp_path, make_network("swin")).model_dump(mode="json")
    fields["experiment"]["training"]["epochs"] = 2
    cell = Cell.model_validate(fields)
    complete = train_cell(cell, tmp_path / "complete")
    stopped = folder_of(cell, tmp_path / "stopped")
    run_until(4, stopped)
    run_cell(stopped)
    assert_same_weights(stopped, complete)


def test_several_devices_refuse_a_loss_that_is_no_mean_over_labelled_pixels(
    tmp_path: Path,
) -> None:
    content = make_network("segmenter")
    cell = make_cell(tmp_path, content)
    require_shared_losses(factory.build(cell.experiment.model, cell.experiment.data, "meta"))
    cell = make_cell(tmp_path, make_network("vit"))
    network = factory.build(cell.experiment.model, cell.experiment.data, "meta")
    with pytest.raises(ValueError, match=r"CrossEntropyLoss of FCNHead is no mean over labelled"):
        require_shared_losses(network)


@pytest.mark.slow
@pytest.mark.skipif(not ADE20K.is_dir(), reason="no ADE20K images at hand")
def test_the_example_of_the_page_trains_on_ade20k(tmp_path: Path) -> None:
    text = (ROOT / "docs" / "segmentation.md").read_text(encoding="utf-8")
    example = text.partition("## A configuration file of mmsegmentation")[2]
    (python,) = re.findall(r"```py\n(.*?)```", example.partition("## Segmenter in")[0], re.S)
    (tmp_path / "segformer.py").write_text(python)
    (recipe,) = re.findall(r'```yaml title="own-mmseg.yaml"\n(.*?)```', example, re.S)
    experiment = parse_plain(recipe, "text")
    experiment["data"] |= {"root": str(ADE20K), "workers": 0}
    experiment["model"]["config"] = str(tmp_path / experiment["model"]["config"])
    experiment["model"]["attention"] = {"preset": experiment["model"]["attention"]}
    experiment["optimizer"]["lr"] = float(experiment["optimizer"]["lr"])
    experiment["training"] |= {"accelerator": "cpu", "epochs": 1}
    cell = cell_of(experiment, metric={"name": "test/mIoU"})
    result = result_of(train_cell(cell, tmp_path / "cell"))
    assert result.steps == 2
    assert 0 <= result.metrics["test/mIoU"] <= 1
