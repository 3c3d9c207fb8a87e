"""Tests of scenes of digits and of mmsegmentation's pipeline on ADE20K's layout."""

import io
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.data_ranks import on_rank
from helpers.paths import ADE20K
from PIL import Image
from pydantic import ValidationError

from lit_attn.schema.errors import ConfigError
from lit_attn.segmentation import scenes
from lit_attn.segmentation.data import Scenery, SceneryData, pipeline
from lit_attn.segmentation.label_masks import IGNORED, read_image, read_labels
from lit_attn.segmentation.mask_sets import Ade20k
from lit_attn.segmentation.scene_steps import CategoryCrop, Rescale, SceneFlip
from lit_attn.segmentation.scenes import Scenes

pytest.importorskip("mmseg")

CPU = torch.device("cpu")


def few(root: Path, **choices: object) -> Scenes:
    return Scenes.model_validate(
        {"root": root, "training_images": 6, "evaluation_images": 3, "batch_size": 4, **choices}
    )


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("scenes")


def contents(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def test_scenes_are_laid_out_as_ade20k_and_the_same_everywhere(root: Path, tmp_path: Path) -> None:
    one, two = scenes.prepare(few(root)), scenes.prepare(few(tmp_path))
    assert contents(one) == contents(two)
    assert len(contents(one)) == 2 * (6 + 3)
    assert (one / "images/training/scene_00000.jpg").is_file()
    assert (one / "annotations/validation/scene_00002.png").is_file()
    more = scenes.prepare(few(tmp_path, training_images=7))
    shared = contents(more)
    assert more != two
    assert all(shared[name] == data for name, data in contents(two).items())


def test_an_existing_folder_is_not_written_again(root: Path) -> None:
    folder = scenes.prepare(few(root))
    (folder / "images/training/scene_00000.jpg").write_bytes(b"kept")
    try:
        assert scenes.prepare(few(root)) == folder
        assert (folder / "images/training/scene_00000.jpg").read_bytes() == b"kept"
    finally:
        (folder / "images/training/scene_00000.jpg").unlink()
        for path in sorted(folder.rglob("*"), reverse=True):
            path.unlink() if path.is_file() else path.rmdir()
        folder.rmdir()
    assert [path.name for path in root.iterdir()] == [".scenes.lock"]


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"data\.root: cannot write to .*file"):
        scenes.prepare(few(tmp_path / "file"))


def test_labels_cover_the_objects_that_they_name() -> None:
    """The pixels of a digit are light and have the shape of the source digit."""
    blank = np.zeros((1, 1, 8, 8), dtype=np.uint8)
    blank[..., 2:6, 2:6] = 255
    generator = np.random.default_rng(0)
    picture, labels = scenes.scene(32, blank, np.array([7]), generator)
    assert set(np.unique(labels)) - {0, 1, 2, 3} == {4 + 7}
    assert picture[labels == 11].min() > 150
    assert np.isin(np.unique(labels[labels < 4]), [0, 1, 2, 3]).all()
    # The square's sides are half of the cell's, and a pixel more all around is thickened.
    cells = (labels == 11).reshape(2, 16, 2, 16).sum((1, 3))
    assert set(cells.flat) == {0, 100}


def test_training_and_evaluation_scenes_share_no_digit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: dict[int, set[bytes]] = {width: set() for width in scenes.WIDTHS.values()}

    def record(width: int, images: np.ndarray, digits: np.ndarray, generator: object) -> object:
        drawn[width] |= {image.tobytes() for image in images}
        return picture, labels

    picture, labels = np.zeros((4, 4, 3), np.uint8), np.zeros((4, 4), np.uint8)
    monkeypatch.setattr(scenes, "scene", record)
    scenes.prepare(few(tmp_path))
    training, evaluation = (drawn[scenes.WIDTHS[name]] for name in ("training", "validation"))
    assert training
    assert evaluation
    assert not training & evaluation


def test_zero_becomes_no_class_and_images_are_windows(root: Path) -> None:
    data = SceneryData(few(root), seed=0, device=CPU)
    assert data.splits == ["test"]
    assert len(data.classes) == 13
    batch = next(iter(data.train_dataloader()))
    # Rescaled images may be smaller than the window; the data preprocessor pads them.
    assert all(max(image.shape[1:]) <= 32 for image in batch["inputs"])
    for image, sample in zip(batch["inputs"], batch["data_samples"], strict=True):
        assert sample.gt_sem_seg.data.shape[1:] == image.shape[1:]
        assert set(sample.gt_sem_seg.data.unique().tolist()) <= {*range(13), 255}
    written = np.asarray(Image.open(data.root / "annotations/validation/scene_00000.png"))
    (read,) = next(iter(data.val_dataloader()[0]))["data_samples"]
    expected = np.where(written == 0, 255, written.astype(int) - 1)
    assert (read.gt_sem_seg.data[0].numpy() == expected).all()


def test_a_batch_is_a_function_of_seed_and_step_alone(root: Path) -> None:
    def batches(seed: int, workers: int) -> list[torch.Tensor]:
        data = SceneryData(few(root, workers=workers), seed, CPU)
        return [image for batch in data.train_dataloader() for image in batch["inputs"]]

    np.random.seed(5)
    one = batches(0, workers=0)
    np.random.seed(6)
    assert [len(one)] == [6]
    assert all(torch.equal(a, b) for a, b in zip(one, batches(0, workers=1), strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(one, batches(1, workers=0), strict=True))


def test_augmenting_leaves_the_global_generators_alone(root: Path) -> None:
    data = SceneryData(few(root), seed=0, device=CPU)
    np.random.seed(5)
    random.seed(5)
    data.train[0, 1, True]
    after = np.random.random(), random.random()
    np.random.seed(5)
    random.seed(5)
    assert after == (np.random.random(), random.random())


def test_an_epoch_sees_every_image_once_and_another_order_next(root: Path) -> None:
    data = SceneryData(few(root), seed=0, device=CPU)
    assert data.steps_per_epoch == 2
    epochs = [
        [image for step in steps for image, _, _ in data.samples(step)]
        for steps in ((0, 1), (2, 3))
    ]
    assert [sorted(epoch) for epoch in epochs] == [list(range(6))] * 2
    assert epochs[0] != epochs[1]
    assert SceneryData(few(root, drop_last=True), seed=0, device=CPU).steps_per_epoch == 1


def test_devices_share_a_batch_and_count_every_image_once(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = SceneryData(few(root, batch_size=3), seed=0, device=CPU)
    full_batch = data.samples(0)
    shares = []
    for rank in range(2):
        on_rank(data, rank, 2)
        data.train_dataloader()
        shares.append(data.samples(0))
        assert len(shares[-1]) == 2
    shared = [sample for share in shares for sample in share]
    assert {sample for sample in shared if sample[2]} == set(full_batch)
    (again,) = (sample for sample in shared if not sample[2])
    labels = data.train[again]["data_samples"].gt_sem_seg.data
    assert (labels == IGNORED).all()
    evaluated = []
    for rank in range(2):
        on_rank(data, rank, 2)
        evaluated += data.val_dataloader()[0].batches
    assert sorted(image for ((image, _, _),) in evaluated) == [0, 1, 2]


def test_held_out_images_leave_training(root: Path) -> None:
    data = SceneryData(few(root, validation=2), seed=0, device=CPU)
    assert data.splits == ["val", "test"]
    val, training = set(data.evaluated["val"].pairs), set(data.train.pairs)
    assert (len(val), len(training)) == (2, 4)
    assert not val & training
    with pytest.raises(ValidationError, match="validation: 6 of 6 samples leave none"):
        few(root, validation=6)
    with pytest.raises(ConfigError, match=r"data\.validation: 6 of 6"):
        SceneryData(Ade20k(root=data.root, validation=6), seed=0, device=CPU)


def test_the_pipeline_is_the_published_one() -> None:
    steps = pipeline(Ade20k(), augmented=True)
    assert steps[0] is read_image
    assert steps[1].func is read_labels
    assert [step["type"] for step in steps[2:]] == [
        "RandomResize",
        "mmseg.RandomCrop",
        "mmseg.RandomFlip",
        "mmseg.PhotoMetricDistortion",
        "mmseg.PackSegInputs",
    ]
    assert steps[2]["scale"] == (2048, 512)
    assert steps[2]["ratio_range"] == (0.5, 2.0)
    assert steps[3]["crop_size"] == (512, 512)
    assert steps[3]["cat_max_ratio"] == 0.75
    assert steps[4]["prob"] == 0.5


@pytest.mark.parametrize(
    ("augment", "message"),
    [
        ([CategoryCrop(), "mix"], "'mix' is not a known scene augmentation; choose from rescale"),
        ([Rescale(), SceneFlip()], "needs 'category-crop'"),
    ],
)
def test_augmentations_of_other_data_are_refused(augment: list[object], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        Scenes(augment=augment)


def test_missing_data_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"data\.root: .*training is not a folder.*kind: scenes"):
        SceneryData(Ade20k(root=tmp_path), seed=0, device=CPU)
    for kind, ending in (("images", "jpg"), ("annotations", "png")):
        for split in ("training", "validation"):
            (tmp_path / kind / split).mkdir(parents=True)
            Image.new("L", (8, 8)).save(tmp_path / kind / split / f"a.{ending}")
    (tmp_path / "annotations/validation/a.png").unlink()
    with pytest.raises(ConfigError, match=r"annotations/validation/a\.png is missing"):
        SceneryData(Ade20k(root=tmp_path), seed=0, device=CPU)
    (tmp_path / "images/validation/a.jpg").unlink()
    with pytest.raises(ConfigError, match=r"validation holds no images that end in \.bmp"):
        SceneryData(Ade20k(root=tmp_path), seed=0, device=CPU)


def test_a_root_one_level_too_high_is_explained(tmp_path: Path) -> None:
    (tmp_path / "ADEChallengeData2016").mkdir()
    with pytest.raises(ConfigError, match=r"did you mean .*/ADEChallengeData2016\?$"):
        SceneryData(Ade20k(root=tmp_path), seed=0, device=CPU)


def png(mode: str, size: tuple[int, int], label: int = 1) -> bytes:
    content = io.BytesIO()
    Image.new(mode, size, label).save(content, format="PNG")
    return content.getvalue()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("workers", "file", "content", "message"),
    [
        (0, "annotations", png("L", (40, 30)), r"a\.png has 40 x 30 pixels, .* has 60 x 40"),
        (0, "annotations", png("I;16", (60, 40), 300), r"a\.png has the label 300; labels are 1"),
        (1, "annotations", png("L", (60, 40), 151), r"a\.png has the label 151; labels are 1 to"),
        (1, "images", b"text", r"a\.jpg is not a readable image"),
    ],
)
def test_a_malformed_file_is_named(
    workers: int, file: str, content: bytes, message: str, tmp_path: Path
) -> None:
    """The error is one line, from a worker and from this process, in training and evaluation.

    test_pictures.py has the other kinds of wrong files.
    """
    for split in ("training", "validation"):
        for kind, picture in (("images", "a.jpg"), ("annotations", "a.png")):
            path = tmp_path / kind / split / picture
            path.parent.mkdir(parents=True)
            Image.new("L", (60, 40), 150).save(path)
            if kind == file:
                path.write_bytes(content)
    data = SceneryData(Ade20k(root=tmp_path, batch_size=1, workers=workers), seed=0, device=CPU)
    for split, batches in (
        ("training", data.train_dataloader()),
        ("validation", data.val_dataloader()[0]),
    ):
        with pytest.raises(ConfigError, match=rf"^data\.root: .*/{split}/{message}") as caught:
            next(iter(batches))
        assert "\n" not in str(caught.value)


def test_labels_of_every_kind_of_file_are_read(tmp_path: Path) -> None:
    """Labels of the last class, of no class (0 and 255), and indices of a palette."""
    for kind in ("images", "annotations"):
        for split in ("training", "validation"):
            (tmp_path / kind / split).mkdir(parents=True)
            if kind == "images":
                Image.new("RGB", (3, 2)).save(tmp_path / kind / split / "a.jpg")
            else:
                labels = Image.fromarray(np.array([[0, 150, 255]] * 2, dtype=np.uint8), "P")
                labels.putpalette([0] * 768)
                labels.save(tmp_path / kind / split / "a.png")
    chosen = Ade20k(root=tmp_path, short_side=2, long_side=3, batch_size=1, workers=0)
    data = SceneryData(chosen, seed=0, device=CPU)
    (read,) = next(iter(data.val_dataloader()[0]))["data_samples"]
    assert read.gt_sem_seg.data.tolist() == [[[255, 149, 255]] * 2]


def test_the_fingerprint_sees_a_file_change(tmp_path: Path) -> None:
    data = SceneryData(few(tmp_path), seed=0, device=CPU)
    before = data.fingerprint()
    assert before == SceneryData(few(tmp_path), seed=1, device=CPU).fingerprint()
    with (data.root / "images/training/scene_00001.jpg").open("ab") as file:
        file.write(b"x")
    assert data.fingerprint() != before


@pytest.mark.skipif(not ADE20K.is_dir(), reason="no ADE20K images at hand")
def test_real_ade20k_pairs_come_in_batches() -> None:
    chosen: Scenery = Ade20k(root=ADE20K, crop=128, batch_size=2, workers=0)
    data = SceneryData(chosen, seed=0, device=CPU)
    assert (len(data.classes), data.steps_per_epoch) == (150, 4)
    batch = next(iter(data.train_dataloader()))
    labels = torch.stack([sample.gt_sem_seg.data for sample in batch["data_samples"]])
    assert labels.shape == (2, 1, 128, 128)
    assert len(labels.unique()) > 3
    assert set(labels.unique().tolist()) <= {*range(150), 255}
    evaluated = list(data.val_dataloader()[0])
    assert [batch["inputs"][0].shape for batch in evaluated] == [(3, 512, 512)] * 3
