"""Training batches are a function of (seed, step), on any number of devices."""

from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from helpers import noise_images
from helpers.data_ranks import on_rank
from torch import Tensor
from torch.nn import functional as F

from lit_attn.data import images as loading
from lit_attn.data.augment.base import Batch
from lit_attn.data.image_sets import Digits, Npz
from lit_attn.data.images import ImageData, Images, load_splits
from lit_attn.data.module import DataModule, torch_generator
from lit_attn.schema.errors import ConfigError
from lit_attn.training.trainer_data import TrainerData

CPU = torch.device("cpu")
AUGMENT = ({"kind": "crop", "padding": 1}, {"kind": "randaugment"}, "normalize", "erasing", "mix")


@pytest.fixture
def noise(tmp_path: Path) -> Npz:
    """Return a file of 40 training and 10 test images of 8 x 8 pixels."""
    path = noise_images.write(tmp_path / "noise.npz")
    return Npz(name="noise", path=path, size=8, classes=4, batch_size=16)


def on_device(data: Images, rank: int, devices: int, step: int = 0) -> ImageData:
    """Return the data as rank `rank` of `devices` sees it after `step` training steps."""
    return on_rank(ImageData(data, 0, CPU), rank, devices, step)


def equal(one: Batch, other: Batch) -> bool:
    return all(map(torch.equal, one, other))


def test_epochs_are_permutations_and_passes(noise: Npz) -> None:
    """An epoch of three passes has every image three times; the last partial batch is dropped."""
    data = noise.model_copy(update={"epoch_length": 3, "batch_size": 11})
    images = ImageData(data, 0, CPU)
    assert images.steps_per_epoch == 120 // 11
    order = images.draw_order(0)
    assert order.bincount().tolist() == [3] * 40
    assert sorted(order[:40].tolist()) == list(range(40))
    assert not torch.equal(order[:40], order[40:80])
    assert not torch.equal(order, images.draw_order(1))
    assert not torch.equal(order, ImageData(data, 1, CPU).draw_order(0))
    indices = torch.cat([images.rows(step, images.draw_order) for step in range(10)])
    assert torch.equal(indices, order[:110])
    assert torch.equal(images.rows(10, images.draw_order), images.draw_order(1)[:11])


def test_the_last_partial_batch_is_kept_or_dropped(noise: Npz) -> None:
    assert ImageData(noise, 0, CPU).steps_per_epoch == 2
    with_partial_batch = ImageData(noise.model_copy(update={"drop_last": False}), 0, CPU)
    assert with_partial_batch.steps_per_epoch == 3
    assert [len(targets) for _, targets in with_partial_batch.train_batches(0, 4)] == [
        16,
        16,
        8,
        16,
    ]
    with pytest.raises(ConfigError, match="64 is more than the 40 samples"):
        ImageData(noise.model_copy(update={"batch_size": 64}), 0, CPU)


def test_a_batch_is_a_function_of_seed_and_step() -> None:
    """Earlier requests have no effect."""
    data = Digits(augment=AUGMENT)
    several = list(ImageData(data, 0, CPU).train_batches(0, 21))
    assert len(several) == 21
    alone = ImageData(data, 0, CPU)
    for step in (20, 5, 0, 17):
        (batch,) = alone.train_batches(step, step + 1)
        assert equal(batch, several[step])
    assert not torch.equal(several[0][0], several[1][0])
    (other,) = ImageData(data, 1, CPU).train_batches(0, 1)
    assert not torch.equal(several[0][0], other[0])


@pytest.mark.gpu
def test_batches_are_the_same_on_the_gpu() -> None:
    data = Digits(augment=("flip", *AUGMENT))
    batches = (
        ImageData(data, 0, device).train_batches(0, 9) for device in (CPU, torch.device("cuda"))
    )
    for cpu_part, gpu_parts in zip(*batches, strict=True):
        torch.testing.assert_close(cpu_part, tuple(part.cpu() for part in gpu_parts))


def test_the_loader_resumes_at_the_trainers_step() -> None:
    per_epoch = ImageData(Digits(), 0, CPU).steps_per_epoch
    data = on_device(Digits(), 0, 1, step=per_epoch + 7)
    batches = list(data.train_dataloader())
    assert len(batches) == per_epoch - 7
    assert equal(batches[0], next(data.train_batches(per_epoch + 7, per_epoch + 8)))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, "batch_size: 3 devices cannot share a micro-batch of 16 samples"),
        (
            {"batch_size": 39, "drop_last": False},
            "3 devices cannot share the epoch's last batch of 1",
        ),
    ],
)
def test_uneven_shares_are_refused(noise: Npz, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        on_device(noise.model_copy(update=changes), 0, 3).train_dataloader()


@pytest.mark.parametrize("devices", [1, 3])
def test_evaluation_counts_every_image_once(devices: int) -> None:
    data = Digits(eval_batch_size=100, augment=("flip", "normalize"))
    expected = torch.from_numpy(load_splits(Digits())["test"].labels)
    evaluated = torch.empty_like(expected)
    for rank in range(devices):
        loaded = on_device(data, rank, devices)
        assert loaded.splits == ["val", "test"]
        loader = loaded.val_dataloader()[1]
        batches = list(loader)
        assert len(batches) == len(loader)
        assert max(len(labels) for _, labels in batches) <= 100 // devices
        evaluated[rank::devices] = torch.cat([labels for _, labels in batches])
        assert torch.equal(batches[0][0], next(iter(loader))[0])
    assert torch.equal(evaluated, expected)


def test_normalisation_uses_the_training_images() -> None:
    images = np.random.default_rng(0).integers(256, size=(2100, 3, 4, 5), dtype=np.uint8)
    images[:, 1] = 77
    mean, std = loading.statistics(images)
    assert mean == pytest.approx((images.mean((0, 2, 3)) / 255).tolist())
    assert std == pytest.approx([images[:, 0].std() / 255, 1, images[:, 2].std() / 255])


def test_generators_differ_by_purpose_seed_and_number() -> None:
    seeds = {
        torch_generator(seed, purpose, number).initial_seed()
        for seed in range(3)
        for purpose in ("batch", "order")
        for number in range(50)
    }
    assert len(seeds) == 300


class Linear(L.LightningModule):
    """Softmax regression that records its batches and may stop after a step."""

    def __init__(self, stop_after: int | None = None) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(64, 10)
        torch.nn.init.zeros_(self.layer.weight)
        torch.nn.init.zeros_(self.layer.bias)
        self.stop_after = stop_after
        self.sums: list[float] = []

    def training_step(self, batch: Batch, batch_index: int) -> Tensor:
        images, targets = batch
        self.sums.append(float(images.sum()))
        return F.cross_entropy(self.layer(images.flatten(1)), targets)

    def on_train_batch_end(self, *_: Any) -> None:
        if self.global_step == self.stop_after:
            self.trainer.save_checkpoint(f"{self.trainer.default_root_dir}/stopped.ckpt")
            raise KeyboardInterrupt

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def fit(
    folder: Path, stop_after: int | None = None, resume: Path | None = None, workers: int = 0
) -> Linear:
    model = Linear(stop_after)
    trainer = L.Trainer(
        accelerator="cpu",
        max_epochs=3,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
    )
    data = ImageData(Digits(augment=AUGMENT, batch_size=200, workers=workers), 0, CPU)
    try:
        trainer.fit(model, TrainerData(data), ckpt_path=resume, weights_only=True)
    except (KeyboardInterrupt, SystemExit):
        assert stop_after is not None
    data.stop_workers()
    return model


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*num_workers|.*does not have many workers|.*LeafSpec")
@pytest.mark.filterwarnings("ignore:.*validation_step|.*val_dataloader|.*`srun` command")
def test_resuming_within_an_epoch_is_exact_to_the_bit(tmp_path: Path) -> None:
    """No stop is at the last step of an epoch, because Lightning would skip the next epoch."""
    uninterrupted = fit(tmp_path)
    assert len(uninterrupted.sums) == 18
    for stop, workers in ((5, 0), (7, 2), (17, 0)):
        stopped = fit(tmp_path, stop_after=stop, workers=workers)
        resumed = fit(tmp_path, resume=tmp_path / "stopped.ckpt", workers=workers)
        assert stopped.sums + resumed.sums == uninterrupted.sums
        assert torch.equal(resumed.layer.weight, uninterrupted.layer.weight)


def test_a_data_module_without_a_required_method_is_refused() -> None:
    message = "class Mine does not define batch, evaluation_loader, fingerprint, which"
    with pytest.raises(ConfigError, match=message):

        class Mine(DataModule):
            pass
