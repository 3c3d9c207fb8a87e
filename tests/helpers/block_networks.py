"""Networks and a LightningModule of a user, with blocks of attention layers that FSDP can shard."""

import lightning as L
import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Blocks(nn.Module):
    """Two blocks on the rows of an image, with a frozen embedding and a batch norm."""

    def __init__(self, ffn_width: int = 16) -> None:
        super().__init__()
        self.embed = nn.Linear(8, 8).requires_grad_(False)
        layer = nn.TransformerEncoderLayer(8, 2, ffn_width, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.norm = nn.BatchNorm1d(8)
        self.head = nn.Linear(8, 10)

    def forward(self, images: Tensor) -> Tensor:
        hidden = self.encoder(self.embed(images.flatten(1, 2)))
        return self.head(self.norm(hidden.mean(1)))


class Penalised(Blocks):
    """Network that reads a weight of a block outside the block."""

    def forward(self, images: Tensor) -> Tensor:
        weight = self.encoder.layers[0].linear1.weight
        return super().forward(images) + weight.square().mean()


class ReadsValues(Blocks):
    """Network that reads values, which the meta device does not have."""

    def forward(self, images: Tensor) -> Tensor:
        return super().forward(images) * images.mean().item()


class ReadsShapes(Blocks):
    """Network that reads the shape, the type and the device of a block's weight, but no value."""

    def forward(self, images: Tensor) -> Tensor:
        weight = self.encoder.layers[0].linear1.weight
        assert weight.device == images.device
        return super().forward(images.to(weight.dtype)) * weight.shape[0]


class Task(L.LightningModule):
    """LightningModule with a parameter, which a step reads before and after `forward`."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network
        self.temperature = nn.Parameter(torch.ones(1))

    def forward(self, images: Tensor) -> Tensor:
        return self.network(images)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_index: int) -> Tensor:
        images, labels = batch
        return F.cross_entropy(self(images * self.temperature) * self.temperature, labels)

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_index: int) -> None:
        images, labels = batch
        logits = self(images * self.temperature) * self.temperature
        self.log("loss", F.cross_entropy(logits, labels))
        self.log("error", (logits.argmax(1) != labels).double().mean())


class Regularised(Task):
    """LightningModule whose loss reads a weight of a block outside the network's forward pass."""

    def training_step(self, batch: tuple[Tensor, Tensor], batch_index: int) -> Tensor:
        weight = self.network.encoder.layers[0].linear1.weight
        return super().training_step(batch, batch_index) + weight.square().mean()


class Multiplied(Task):
    """LightningModule that multiplies a weight of a block outside the network's forward pass."""

    def training_step(self, batch: tuple[Tensor, Tensor], batch_index: int) -> Tensor:
        weight = self.network.encoder.layers[0].linear1.weight
        logits = F.linear(batch[0].flatten(2)[:, 0, :8], weight)
        return super().training_step(batch, batch_index) + logits.square().mean()
