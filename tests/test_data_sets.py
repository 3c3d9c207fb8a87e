"""Image sets from every source, and one clear line for what is wrong with them."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from lit_attn.config.data import Cifar10, Cifar100, Digits, Folder, Npz
from lit_attn.config.errors import ConfigError
from lit_attn.data import sets
from lit_attn.data.images import ImageData, TrainLoader, stream

CPU = torch.device("cpu")


def npz(path: Path, **changes: np.ndarray) -> Npz:
    generator = np.random.default_rng(0)
    arrays = {
        "x_train": generator.integers(256, size=(40, 8, 8, 3), dtype=np.uint8),
        "y_train": np.arange(40) % 4,
        "x_test": generator.integers(256, size=(10, 8, 8, 3), dtype=np.uint8),
        "y_test": np.arange(10) % 4,
    }
    np.savez(path, **(arrays | changes))
    return Npz(name="noise", path=path, size=8, classes=4, batch_size=16)


def test_digits_are_split_once_and_for_all() -> None:
    found = sets.load(Digits())
    assert {name: len(split.labels) for name, split in found.items()} == {
        "train": 1200,
        "val": 237,
        "test": 360,
    }
    assert sets.fingerprint(found) == sets.fingerprint(sets.load(Digits()))
    for split in found.values():
        counts = np.bincount(split.labels, minlength=10) / len(split.labels)
        assert counts.min() > 0.08
    rows = [split.images.reshape(len(split.images), -1) for split in found.values()]
    assert found["train"].images.max() == 255
    assert sum(len(r) for r in rows) == 1797


def test_npz_and_a_held_out_split(tmp_path: Path) -> None:
    data = npz(tmp_path / "a.npz")
    assert set(sets.load(data)) == {"train", "test"}
    found = sets.load(data.model_copy(update={"validation": 8}))
    assert [len(found[name].labels) for name in ("train", "val", "test")] == [32, 8, 10]
    assert np.bincount(found["val"].labels).tolist() == [2, 2, 2, 2]
    assert found["train"].images.shape == (32, 3, 8, 8)


def test_fingerprint_sees_every_byte(tmp_path: Path) -> None:
    found = sets.load(npz(tmp_path / "a.npz"))
    before = sets.fingerprint(found)
    found["test"].images[3, 1, 2, 2] ^= 1
    assert sets.fingerprint(found) != before


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"y_train": np.full(40, 4)}, "labels go from 4 to 4, configured are 4 classes"),
        ({"y_test": np.zeros(3)}, "test has 10 images and 3 labels"),
        ({"x_test": np.zeros((10, 9, 8, 3), np.uint8)}, r"\(3, 9, 8\) \(C, H, W\), configured"),
        ({"x_train": np.zeros((40, 8, 8, 3))}, "must be uint8 of .* is float64"),
        ({"x_train": np.zeros((40, 8), np.uint8)}, "must be uint8 of"),
    ],
)
def test_bad_arrays(changes: dict[str, np.ndarray], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        sets.load(npz(tmp_path / "a.npz", **changes))


def test_bad_files(tmp_path: Path) -> None:
    data = Npz(name="x", path=tmp_path / "no.npz", size=8, classes=4)
    with pytest.raises(ConfigError, match=r"no\.npz: cannot be read"):
        sets.load(data)
    data.path.write_bytes(b"not a zip")
    with pytest.raises(ConfigError, match=r"no\.npz: cannot be read"):
        sets.load(data)
    np.savez(data.path, x_train=np.zeros((2, 8, 8, 3), np.uint8))
    with pytest.raises(ConfigError, match="has no 'y_train'; it has x_train"):
        sets.load(data)


def folder(path: Path) -> Folder:
    for split, count in (("train", 6), ("test", 2)):
        for name in ("cat", "dog"):
            (path / split / name).mkdir(parents=True)
            for i in range(count):
                shade = (40 * i, 10, 200 if name == "cat" else 0)
                Image.new("RGB", (20, 12), shade).save(path / split / name / f"{i}.png")
    return Folder(name="pets", path=path, size=8, classes=2)


def test_class_folders(tmp_path: Path) -> None:
    data = folder(tmp_path)
    found = sets.load(data)
    assert found["train"].images.shape == (12, 3, 8, 8)
    assert found["train"].labels.tolist() == [0] * 6 + [1] * 6
    assert found["train"].images[0, 2].min() == 200
    grey = sets.load(data.model_copy(update={"channels": 1}))
    assert grey["test"].images.shape == (4, 1, 8, 8)


def test_bad_folders(tmp_path: Path) -> None:
    data = folder(tmp_path)
    (tmp_path / "test" / "cow").mkdir()
    with pytest.raises(ConfigError, match="cow: no such class in train"):
        sets.load(data)
    (tmp_path / "test" / "cow").rmdir()
    with pytest.raises(ConfigError, match=r"3, but .* has 2 folders"):
        sets.load(data.model_copy(update={"classes": 3}))
    (tmp_path / "train" / "cat" / "0.png").write_bytes(b"\x89PNG broken")
    with pytest.raises(ConfigError, match=r"0\.png: is not a readable image"):
        sets.load(data)
    with pytest.raises(ConfigError, match="train: is not a folder"):
        sets.load(data.model_copy(update={"path": tmp_path / "nowhere"}))


def test_cifar_from_torchvisions_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torchvision's own reader; here its download is what is missing."""
    import torchvision

    def offline(*args: object, **options: object) -> None:
        raise OSError("Name or service not known")

    monkeypatch.setattr(torchvision.datasets.CIFAR10, "download", offline)
    with pytest.raises(ConfigError, match=r"cifar10 is not in .* cannot be downloaded: Name"):
        sets.load(Cifar10(root=tmp_path))
    assert Cifar100().num_classes == 100


def test_epochs_are_permutations_and_passes(tmp_path: Path) -> None:
    """One epoch of three passes sees every image three times; the last partial batch is dropped."""
    data = npz(tmp_path / "a.npz").model_copy(update={"epoch_length": 3, "batch_size": 10})
    images = ImageData(data, 0, CPU)
    assert images.steps_per_epoch == 12
    order = images._order(0, 40)
    assert order.bincount().tolist() == [3] * 40
    assert sorted(order[:40].tolist()) == list(range(40))
    assert not torch.equal(order, images._order(1, 40))
    assert not torch.equal(order, ImageData(data, 1, CPU)._order(0, 40))


def test_the_last_partial_batch_by_choice(tmp_path: Path) -> None:
    data = npz(tmp_path / "a.npz")
    assert ImageData(data, 0, CPU).steps_per_epoch == 2
    kept = ImageData(data.model_copy(update={"drop_last": False}), 0, CPU)
    assert kept.steps_per_epoch == 3
    assert [len(kept.batch(step)[1]) for step in range(3)] == [16, 16, 8]
    with pytest.raises(ConfigError, match="64 is more than the 40 samples"):
        ImageData(data.model_copy(update={"batch_size": 64}), 0, CPU)


def test_a_batch_is_a_function_of_seed_and_step() -> None:
    data = Digits(augment=({"kind": "crop", "padding": 1}, "normalize", "mix"))
    one, two = ImageData(data, 0, CPU), ImageData(data, 0, CPU)
    for step in (5, 0, 17):
        assert all(map(torch.equal, one.batch(step), two.batch(step)))
    assert not torch.equal(one.batch(0)[0], one.batch(1)[0])
    assert not torch.equal(one.batch(0)[0], ImageData(data, 1, CPU).batch(0)[0])


def test_the_loader_goes_on_from_the_trainers_step(monkeypatch: pytest.MonkeyPatch) -> None:
    data = ImageData(Digits(), 0, CPU)

    class Trainer:
        global_step = data.steps_per_epoch + 7

    monkeypatch.setattr(data, "trainer", Trainer())
    batches = list(TrainLoader(data))
    assert len(batches) == data.steps_per_epoch - 7
    assert torch.equal(batches[0][0], data.batch(Trainer.global_step)[0])


def test_evaluation_covers_each_split_once_without_augmentation() -> None:
    data = ImageData(Digits(eval_batch_size=100, augment=("flip", "normalize")), 0, CPU)
    assert data.splits == ["val", "test"]
    labels = torch.cat([y for _, y in data.val_dataloader()[1]])
    assert torch.equal(labels, torch.from_numpy(sets.load(Digits())["test"].labels))
    assert len(data.val_dataloader()[1]) == 4
    first = next(iter(data.val_dataloader()[1]))[0]
    assert torch.equal(first, next(iter(data.val_dataloader()[1]))[0])


def test_streams_differ_by_purpose_seed_and_number() -> None:
    seeds = [stream(s, p, n) for s in range(3) for p in ("batch", "order") for n in range(50)]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**63 for seed in seeds)
