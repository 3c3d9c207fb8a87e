"""Tests of image sets in memory: every source, and one line for each error."""

import pickle
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torchvision
from helpers import noise_images
from helpers.paths import SHARED

from lit_attn.data import sets
from lit_attn.data.image_sets import Cifar10, Cifar100, Digits, Npz
from lit_attn.data.images import load_splits
from lit_attn.data.sets import stratified
from lit_attn.files import one_at_a_time
from lit_attn.schema.errors import ConfigError


def npz(path: Path, **changes: np.ndarray) -> Npz:
    noise_images.write(path, **changes)
    return Npz(name="noise", path=path, size=8, classes=4, batch_size=16)


def test_digits_are_split_once_and_for_all() -> None:
    loaded = load_splits(Digits())
    assert {name: len(split.labels) for name, split in loaded.items()} == {
        "train": 1200,
        "val": 237,
        "test": 360,
    }
    assert sets.fingerprint(loaded) == sets.fingerprint(load_splits(Digits()))
    for split in loaded.values():
        counts = np.bincount(split.labels, minlength=10) / len(split.labels)
        assert counts.min() > 0.08
    rows = [split.images.reshape(len(split.images), -1) for split in loaded.values()]
    assert loaded["train"].images.max() == 255
    assert sum(len(r) for r in rows) == 1797


def test_npz_and_a_held_out_split(tmp_path: Path) -> None:
    data = npz(tmp_path / "a.npz")
    assert set(load_splits(data)) == {"train", "test"}
    loaded = load_splits(data.model_copy(update={"validation": 8}))
    assert [len(loaded[name].labels) for name in ("train", "val", "test")] == [32, 8, 10]
    assert np.bincount(loaded["val"].labels).tolist() == [2, 2, 2, 2]
    assert loaded["train"].images.shape == (32, 3, 8, 8)


def test_fingerprint_sees_every_byte(tmp_path: Path) -> None:
    loaded = load_splits(npz(tmp_path / "a.npz"))
    before = sets.fingerprint(loaded)
    loaded["test"].images[3, 1, 2, 2] ^= 1
    assert sets.fingerprint(loaded) != before


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"y_train": np.full(40, 4)},
            r"data\.classes: 4, but train has the labels 4 to 4; subtract 4 from them, or set 5",
        ),
        ({"y_test": np.zeros(3, int)}, "test has 10 images and 3 labels"),
        ({"x_test": np.zeros((10, 9, 8, 3), np.uint8)}, r"\(3, 9, 8\) \(C, H, W\), configured"),
        ({"x_train": np.zeros((40, 8, 8, 3))}, "must be uint8 of .* is float64"),
        ({"x_train": np.zeros((40, 8), np.uint8)}, "must be uint8 of"),
        ({"y_test": np.full(10, 0.5)}, r"y_test must be integers of \(N,\), is float64"),
        ({"y_test": np.eye(10, 4, dtype=int)}, r"y_test must be integers .* of \(10, 4\)"),
    ],
)
def test_malformed_arrays_are_refused(
    changes: dict[str, np.ndarray], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        load_splits(npz(tmp_path / "a.npz", **changes))


def test_unreadable_files_are_refused(tmp_path: Path) -> None:
    data = Npz(name="x", path=tmp_path / "no.npz", size=8, classes=4)
    with pytest.raises(ConfigError, match=r"no\.npz: cannot be read"):
        load_splits(data)
    data.path.write_bytes(b"not a zip")
    with pytest.raises(ConfigError, match=r"no\.npz: cannot be read as .npz: it is no file of nu"):
        load_splits(data)
    with data.path.open("wb") as file:
        np.save(file, np.zeros(3))
    with pytest.raises(ConfigError, match=r"no\.npz: cannot be read .* single array"):
        load_splits(data)
    data.path.write_bytes(b"PK\x03\x04 cut short")
    with pytest.raises(ConfigError, match=r"no\.npz: cannot be read"):
        load_splits(data)
    np.savez(data.path, x_train=np.zeros((2, 8, 8, 3), np.uint8))
    with pytest.raises(ConfigError, match="has no 'y_train'; it has x_train"):
        load_splits(data)


@pytest.mark.parametrize(
    ("error", "reason"),
    [(OSError("Name or service not known\nTry again"), "Name or .*known$"), (TimeoutError(), "T")],
    ids=["no-network", "no-message"],
)
def test_cifar_from_torchvisions_files(
    error: Exception, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torchvision's reader raises because the download fails."""

    def offline(*args: object, **options: object) -> None:
        raise error

    monkeypatch.setattr(torchvision.datasets.CIFAR10, "download", offline)
    with pytest.raises(ConfigError, match=rf"cifar10 is not in .* cannot be downloaded: {reason}"):
        load_splits(Cifar10(root=tmp_path))
    assert Cifar100().num_classes == 100


def test_cells_that_start_together_download_in_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inside: list[int] = []
    most: list[int] = []

    def download(*_: object, **__: object) -> None:
        inside.append(1)
        most.append(len(inside))
        time.sleep(0.02)
        inside.pop()
        raise RuntimeError("no network")

    monkeypatch.setattr(torchvision.datasets, "CIFAR10", download)

    def load() -> None:
        with pytest.raises(ConfigError, match="no network"):
            load_splits(Cifar10(root=tmp_path / "data"))

    threads = [threading.Thread(target=load) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [1] * 4


def test_a_folder_that_cannot_be_written_needs_no_lock(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with one_at_a_time(tmp_path / "file", "cifar10"):
        pass
    assert list(tmp_path.iterdir()) == [tmp_path / "file"]


@pytest.mark.parametrize("classes", [10, 100])
def test_downloaded_cifar_is_read(classes: int, tmp_path: Path) -> None:
    """The files have the names of torchvision's download and three images each."""
    reader = {10: torchvision.datasets.CIFAR10, 100: torchvision.datasets.CIFAR100}[classes]
    key = {10: "labels", 100: "fine_labels"}[classes]
    folder = tmp_path / reader.base_folder
    folder.mkdir()
    pixels = np.random.default_rng(0).integers(256, size=(3, 3072), dtype=np.uint8)
    for name, _ in (*reader.train_list, *reader.test_list):
        (folder / name).write_bytes(pickle.dumps({"data": pixels, key: [0, classes - 1, 5]}))
    (folder / reader.meta["filename"]).write_bytes(pickle.dumps({reader.meta["key"]: []}))
    data = {10: Cifar10, 100: Cifar100}[classes](root=tmp_path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reader, "_check_integrity", lambda self: True)
        patch.setattr(torchvision.datasets.cifar, "check_integrity", lambda *a: True)
        loaded = load_splits(data)
    assert len(loaded["train"].labels) == 3 * len(reader.train_list)
    assert loaded["test"].labels.tolist() == [0, classes - 1, 5]
    assert np.array_equal(loaded["test"].images, pixels.reshape(3, 3, 32, 32))


def test_the_real_cifar100() -> None:
    """Sizes and statistics are those of docs/setups.md, section 2."""
    path = SHARED / "cifar100.npz"
    if not path.is_file():
        pytest.skip("no cifar100.npz at hand")
    data = Npz(name="cifar100", path=path, size=32, classes=100, validation=5000)
    loaded = load_splits(data)
    assert [len(loaded[name].labels) for name in ("train", "val", "test")] == [45_000, 5000, 10_000]
    assert np.bincount(loaded["val"].labels).tolist() == [50] * 100
    images = np.concatenate([loaded["train"].images, loaded["val"].images])
    assert images.mean((0, 2, 3)) / 255 == pytest.approx((0.5071, 0.4865, 0.4409), abs=1e-4)
    assert images.std((0, 2, 3)) / 255 == pytest.approx((0.2673, 0.2564, 0.2762), abs=1e-4)


@pytest.mark.parametrize(
    ("count", "labels", "message"),
    [
        (12812, [0] * 12 + [1] * 12, "12812 of 24 training samples; at most 22, so that both"),
        (23, [0] * 12 + [1] * 12, "23 of 24 training samples; at most 22, so that both parts"),
        (1, [0] * 12 + [1] * 12, "1 of 24 training samples; at least 2, so that both parts have"),
        (2, [0] * 12 + [7], "class 7 has one training sample, and both parts of the split need"),
        (6, [0.5] * 6, "6 of 6 training samples; at most 5, so that both parts have every class"),
    ],
)
def test_a_held_out_part_with_missing_classes_is_refused(
    count: int, labels: list[float], message: str
) -> None:
    with pytest.raises(ConfigError, match=f"^data.validation: {message}"):
        stratified(np.asarray(labels), count)
