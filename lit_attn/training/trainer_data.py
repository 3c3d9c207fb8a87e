"""Data of a cell as Lightning's trainer reads them."""

from typing import Any

import lightning as L

from lit_attn.data.module import DataModule, EvaluationLoader, TrainLoader


class TrainerData(L.LightningDataModule):
    """Lightning's view of `data`, which knows the trainer from the start of a run on."""

    def __init__(self, data: DataModule) -> None:
        super().__init__()
        self.data = data

    def setup(self, stage: str) -> None:
        self.data.trainer = self.trainer

    def train_dataloader(self) -> TrainLoader:
        return self.data.train_dataloader()

    def val_dataloader(self) -> list[EvaluationLoader]:
        return self.data.val_dataloader()

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return self.data.on_after_batch_transfer(batch, dataloader_idx)

    def teardown(self, stage: str) -> None:
        """End the worker processes after a training or an evaluation."""
        self.data.stop_workers()
