"""A segmentation cell: mmsegmentation's scores, exact resume, and its pictures."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.finished_cells import assert_same, train_cell
from helpers.paths import ROOT
from helpers.stopping import run_until
from helpers.training_cells import folder_of, result_of, scenes_cell
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.nn import functional as F

from lit_attn.cells.legend import Legend
from lit_attn.cells.records import Timing
from lit_attn.cells.rows import read_diagnostics, read_metrics
from lit_attn.config.experiment import Experiment
from lit_attn.extras import require_mmseg
from lit_attn.models import factory
from lit_attn.schema.errors import ConfigError
from lit_attn.schema.yaml_text import parse_plain
from lit_attn.segmentation.data import SceneryData
from lit_attn.segmentation.label_masks import IGNORED
from lit_attn.segmentation.task import Overlap
from lit_attn.tasks.pictures import choose_colours
from lit_attn.train import run_cell, time_cell
from lit_attn.training import build

pytest.importorskip("mmseg")
require_mmseg("tests")

from mmseg.evaluation import IoUMetric  # noqa: E402

pytestmark = pytest.mark.slow


def weights(folder: Path, name: str = "weights.pt") -> dict[str, torch.Tensor]:
    return torch.load(folder / "checkpoints" / name, weights_only=True)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("scenes")


@pytest.fixture(scope="module")
def trained(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    cell = scenes_cell(root, training={"average": {"decay": 0.9}})
    return train_cell(cell, tmp_path_factory.mktemp("trained"))


def scores(areas: list[Any]) -> dict[str, float]:
    """Return mmsegmentation's scores as fractions, from `intersect_and_union` of each image."""
    totals = [sum(parts) for parts in zip(*areas, strict=True)]
    actual = IoUMetric.total_area_to_metrics(*totals, ["mIoU"])
    means = {f"m{name}": float(np.nanmean(actual[name])) for name in ("IoU", "Acc")}
    of_classes = {f"IoU:{k}": v for k, v in enumerate(actual["IoU"].tolist()) if not np.isnan(v)}
    return {"aAcc": float(actual["aAcc"]), **means, **of_classes}


def test_scores_equal_those_of_mmsegmentation() -> None:
    """Some classes occur only in labels, some only in predictions, and some in neither."""
    torch.manual_seed(0)
    classes = tuple(str(number) for number in range(7))
    overlap, areas, pixels = Overlap(classes), [], []
    for size in ((5, 9), (12, 4)):
        logits = torch.randn(7, *size)
        logits[5:] -= 100
        labels = torch.randint(1, 6, size)
        labels[:2] = IGNORED
        nll = F.cross_entropy(logits[None], labels[None], ignore_index=IGNORED, reduction="none")
        overlap.update(logits.argmax(0), labels, nll[0])
        areas.append(IoUMetric.intersect_and_union(logits.argmax(0), labels, 7, IGNORED))
        pixels.append(nll[nll > 0])
    actual = {name: value.item() for name, value in overlap.compute().items()}
    assert actual.pop("loss") == pytest.approx(torch.cat(pixels).mean().item())
    assert actual == pytest.approx(scores(areas))
    assert actual["IoU:0"] == actual["IoU:5"] == 0
    assert "IoU:6" not in actual


def test_counts_of_devices_add_up() -> None:
    torch.manual_seed(0)
    shares = [Overlap(("a", "b")) for _ in range(2)]
    single = Overlap(("a", "b"))
    for share, size in zip(shares, (3, 50), strict=True):
        image = torch.randint(2, (size, 4)), torch.randint(2, (size, 4)), torch.rand(size, 4)
        share.update(*image)
        single.update(*image)
    states = [share.metric_state for share in shares]
    assert all(share._reductions.values() for share in shares)
    together = Overlap(("a", "b"))
    for name in states[0]:
        setattr(together, name, together._reductions[name](torch.stack([s[name] for s in states])))
    together._update_count = 1
    assert together.compute() == single.compute()


@pytest.mark.parametrize(
    ("prefix", "file"), [("test/", "weights.pt"), ("test/averaged-", "averaged.pt")]
)
def test_the_result_equals_an_evaluation_by_mmsegmentation(
    prefix: str, file: str, trained: Path, root: Path
) -> None:
    """mmsegmentation evaluates its own sliding-window inference with the saved weights."""
    cell = scenes_cell(root)
    data = SceneryData(cell.experiment.data, seed=0, device=torch.device("cpu"))
    network = factory.build(cell.experiment.model, cell.experiment.data).eval()
    network.load_state_dict(weights(trained, file))
    areas = []
    for batch in data.val_dataloader()[0]:
        with torch.no_grad():
            (sample,) = network.test_step(batch)
        label_map = sample.gt_sem_seg.data[0].long()
        predicted = sample.pred_sem_seg.data[0]
        assert label_map.shape == (32, 48)
        areas.append(IoUMetric.intersect_and_union(predicted, label_map, 13, IGNORED))
    expected = {
        (f"IoU:{data.classes[int(name[4:])]}" if ":" in name else name): value
        for name, value in scores(areas).items()
    }
    actual = result_of(trained).metrics
    ours = {name.removeprefix(prefix): v for name, v in actual.items() if name.startswith(prefix)}
    del ours["loss"]
    ours = {name: value for name, value in ours.items() if not name.startswith("averaged-")}
    assert ours == pytest.approx(expected, abs=1e-6)


def test_a_finished_cell_has_a_complete_record(trained: Path) -> None:
    result = result_of(trained)
    assert (result.steps, result.epochs, result.selected_epoch) == (9, 3, 2)
    assert result.parameters == sum(weight.numel() for weight in weights(trained).values())
    assert result.flops > 10**5
    rows = read_metrics(trained / "metrics.csv")
    assert [row.step for row in rows if row.name == "test/mIoU"] == [6, 9]
    rates = {row.step: row.value for row in rows if row.name == "train/lr"}
    floor = 1e-5
    expected = {step: (0.1 - floor) * (1 - (step - 1) / 9) ** 0.9 + floor for step in (3, 6, 9)}
    assert rates == pytest.approx(expected)


def test_resume_is_exact(trained: Path, root: Path, tmp_path: Path) -> None:
    """A cell stopped within an epoch ends with the same weights and metrics, bit by bit."""
    folder = folder_of(scenes_cell(root, training={"average": {"decay": 0.9}}), tmp_path)
    run_until(4, folder)
    run_cell(folder)
    assert_same(folder, trained)
    theirs = weights(trained, "averaged.pt")
    for name, weight in weights(folder, "averaged.pt").items():
        assert torch.equal(weight, theirs[name]), name


def test_pictures_show_image_labels_and_prediction(trained: Path, root: Path) -> None:
    config = scenes_cell(root).experiment.data
    data = SceneryData(config, seed=0, device=torch.device("cpu"))
    paths = sorted((trained / "pictures").glob("*.png"))
    assert [path.name for path in paths] == ["0.png", "1.png", "2.png", "3.png"]
    palette = choose_colours(len(data.classes))
    observed: set[tuple[int, int, int]] = set()
    for number, path in enumerate(paths):
        # Four of the five images, spread evenly.
        stem = f"validation/scene_{number * 5 // 4:05d}"
        image, labels, prediction = np.split(np.asarray(Image.open(path)), 3, axis=1)
        written = np.asarray(Image.open(data.root / f"images/{stem}.jpg"))
        assert np.abs(image.astype(int) - written).mean() < 3
        annotation = np.asarray(Image.open(data.root / f"annotations/{stem}.png"))
        assert not labels[annotation == 0].any()
        assert (labels[annotation == 1] == palette[0]).all()
        predicted = {tuple(pixel) for pixel in prediction.reshape(-1, 3).tolist()}
        assert predicted <= set(palette)
        observed |= predicted | {tuple(pixel) for pixel in labels.reshape(-1, 3).tolist()}
    legend = Legend.model_validate_json((trained / "pictures/legend.json").read_bytes())
    assert list(legend.classes) == [*data.classes, "no label"]
    assert {legend.classes[name] for name in legend.shown} == observed
    assert legend.weights == "trained"
    events = EventAccumulator(str(trained)).Reload()
    names = {"pictures/0", "pictures/1", "pictures/2", "pictures/3", "pictures/legend"}
    assert set(events.Tags()["images"]) == names


def test_pictures_show_the_weights_that_the_metric_evaluates(trained: Path, root: Path) -> None:
    """The averaged weights predict the last class everywhere, the trained weights do not."""
    cell = scenes_cell(root, training={"average": {"decay": 0.9}})
    task = build.build(cell, torch.device("cpu")).task
    task.network.load_state_dict(weights(trained))
    assert task.average is not None
    norm = task.average.module.decode_head.mask_norm
    with torch.no_grad():
        norm.weight.zero_()
        norm.bias.copy_(torch.arange(13.0))
    last_colour = choose_colours(13)[12]
    for has_averaged in (True, False):
        pictures = task.draw_pictures(2, has_averaged)
        assert pictures is not None
        assert len(pictures.drawn) == 2
        assert pictures.legend.weights == ("averaged" if has_averaged else "trained")
        predictions = np.concatenate([np.split(p, 3, axis=1)[2] for p in pictures.drawn])
        assert (predictions == last_colour).all() == has_averaged


def test_smoke_runs_and_estimates_work(root: Path, tmp_path: Path) -> None:
    folder = folder_of(scenes_cell(root), tmp_path)
    run_cell(folder, smoke=True)
    assert result_of(folder).steps == 1
    time_cell(folder)
    timing = Timing.model_validate_json((folder / "timing.json").read_text())
    assert (timing.steps, timing.evaluations) == (9, 2)
    assert timing.step_time > 0


def test_the_published_set_up_trains_on_any_folder_of_ade20ks_layout(tmp_path: Path) -> None:
    """A tiny model of experiments/ade20k_segmenter trains on noise labelled as a bed."""
    drawn = np.random.default_rng(0)
    for split, count in (("training", 5), ("validation", 3)):
        for kind in ("images", "annotations"):
            (tmp_path / kind / split).mkdir(parents=True)
        for number in range(count):
            size = (40 + number, 60)
            image = Image.fromarray(drawn.integers(256, size=(*size, 3), dtype=np.uint8))
            image.save(tmp_path / "images" / split / f"{number}.jpg")
            labels = Image.fromarray(np.full(size, 8, dtype=np.uint8))
            labels.save(tmp_path / "annotations" / split / f"{number}.png")
    written = parse_plain(
        (ROOT / "experiments" / "ade20k_segmenter" / "experiment.yaml").read_text(), "text"
    )
    written["data"] |= {"root": str(tmp_path), "crop": 32, "short_side": 32, "workers": 1}
    written["data"] |= {
        "batch_size": 2,
        "augment": ["rescale", {"kind": "category-crop", "most": 1}],
    }
    written["model"] |= {"pretrained": None, "dim": 16, "depth": 1, "heads": 2}
    written["training"] |= {"epochs": 2, "accelerator": "cpu"}
    cell = scenes_cell(tmp_path).model_copy(
        update={"experiment": Experiment.model_validate(written)}
    )
    result = result_of(train_cell(cell, tmp_path))
    assert result.steps == 6
    assert 0 < result.metrics["test/loss"] < np.log(150)
    # ADE20K's own name ends in a space.
    assert "test/IoU:bed" in result.metrics


def test_diagnostics_cover_encoder_and_decoder(root: Path, tmp_path: Path) -> None:
    """The encoder has 16 patches and a class token, the decoder the patches and the classes."""
    chosen = {"kinds": ["residual", "maps"]}
    folder = train_cell(scenes_cell(root, training={"diagnostics": chosen}), tmp_path)
    rows = read_diagnostics(folder / "diagnostics.csv")
    assert {row.layer for row in rows} == {1, 2}
    assert {row.step for row in rows} == {6, 9}
    maps = np.load(folder / "attention.npz")
    assert maps["map.1"].shape == (2, 17, 17)
    assert maps["map.2"].shape == (2, 16 + 13, 16 + 13)


def test_a_compiled_cell_compiles_the_functions_that_mmsegmentation_calls(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled: list[str] = []

    def note(self: torch.nn.Module, *_: Any, **__: Any) -> None:
        compiled.append(type(self).__name__)

    monkeypatch.setattr(torch.nn.Module, "compile", note)
    monkeypatch.setattr(torch, "compile", lambda forward: note(forward.__self__))
    model = scenes_cell(root).experiment.model.model_copy(update={"depth": 8})
    cell = scenes_cell(root, training={"compile": "blocks"}, model=model.model_dump())
    task = build.build(cell, torch.device("cpu")).task
    assert compiled == ["Block"] * 9
    names = [type(module).__name__ for module in task.list_compiled()]
    assert names == ["AttentionViT", "Block"]
    assert not hasattr(task.network.decode_head, "conv_seg")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data": {"kind": "digits"}}, "'digits' does not go with `task: segmentation`"),
        ({"model": {"kind": "image-vit"}}, "choose from mmseg, module, segmenter"),
        (
            {"model": {"kind": "segmenter", "patch": 15}},
            "patch: patches of 15 do not tile windows of 32 x 32 .* of 16",
        ),
        (
            {"model": {"kind": "segmenter", "stride": 33}},
            "stride: 33 leaves gaps between windows of 32 .*; 32 at most",
        ),
        ({"training": {"epochs": 1, "devices": 3}}, "3 cannot share a batch of 4 evenly"),
        ({"optimizer": {"kind": "sgd", "lr": 1, "betas": [0, 0]}}, "unknown key 'betas'"),
    ],
)
def test_mistakes_are_one_line(changes: dict[str, Any], message: str, root: Path) -> None:
    written = scenes_cell(root).experiment.model_dump(mode="json") | changes
    with pytest.raises(ValueError, match=message):
        Experiment.model_validate(written)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("val/mIoU", "this data has these splits: test"),
        ("test/miou", "'miou' is not measured; did you mean 'mIoU'"),
        ("test/IoU:digit 10", "did you mean 'IoU:digit 1'"),
        ("test/averaged-mIoU", "measures averaged weights; set training.average"),
    ],
)
def test_an_unknown_metric_is_reported_before_training(name: str, message: str, root: Path) -> None:
    cell = scenes_cell(root)
    metric = cell.metric.model_copy(update={"name": name})
    with pytest.raises(ConfigError, match=message):
        build.build(cell.model_copy(update={"metric": metric}), torch.device("cpu"))
