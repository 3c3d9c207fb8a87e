"""Images and histograms for TensorBoard: predictions, maps, parameters, and pictures of tasks."""

import io
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor
from torch.utils.tensorboard import SummaryWriter

from lit_attn.files import write_atomic
from lit_attn.models.sharding import is_sharded, to_plain
from lit_attn.signatures import ImageSignature
from lit_attn.tasks.pictures import Pictures, draw_legend
from lit_attn.training.recording import MetricsFile

SAMPLES = 8
"""Images of the first evaluation batch whose predictions are drawn."""
SMALLEST_SIDE = 96  # Pixels of the shorter side; smaller images are enlarged.
CAPTION_HEIGHT = 16  # Pixels.
MAP_SIDE = 64  # Pixels of the side of a map; smaller maps are enlarged.


class BoardImages(L.Callback):
    """Callback that writes predictions of the last evaluation, and histograms of every one.

    `patterns` are those of the names of parameters with a histogram. Pictures are drawn from step
    `first_last_step` on, for tasks with images that say so (`has_sample_pictures`). The weights of
    a sharded network stay where they are, so it has histograms and no pictures.
    """

    def __init__(
        self, metrics: MetricsFile, patterns: tuple[str, ...], first_last_step: int
    ) -> None:
        self.metrics = metrics
        self.patterns = patterns
        self.first_last_step = first_last_step

    def on_validation_batch_end(
        self,
        trainer: L.Trainer,
        module: Any,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        is_first = batch_idx == 0 and dataloader_idx == 0
        is_last_evaluation = trainer.global_step >= self.first_last_step
        if not is_first or not is_last_evaluation or not trainer.is_global_zero:
            return
        has_images = isinstance(module.data.signature, ImageSignature)
        if module.has_sample_pictures and has_images and not is_sharded(module.network):
            self._draw_samples(trainer, module, batch)

    def on_validation_end(self, trainer: L.Trainer, module: Any) -> None:
        if not self.patterns:
            return
        for name, parameter in module.network.named_parameters():
            if any(fnmatchcase(name, pattern) for pattern in self.patterns):
                # Every rank has to gather a sharded parameter.
                values = to_plain(parameter.detach())
                if trainer.is_global_zero:
                    events = self.metrics.events
                    events.add_histogram(f"weights/{name}", values.cpu(), trainer.global_step)

    def _draw_samples(self, trainer: L.Trainer, module: Any, batch: Any) -> None:
        """Write the first images of a batch, each above its target and its prediction."""
        *inputs, targets = (part[:SAMPLES] for part in batch)
        # Lightning opens this context for the steps of an evaluation, and not for callbacks.
        precision = trainer.precision_plugin.val_step_context()
        with (
            torch.no_grad(),
            precision,
            module.evaluation_context(),
            # A smaller batch would be compiled again. The stance changes when the object is made,
            # so it must be made after that of `evaluation_context`.
            torch.compiler.set_stance("force_eager"),
        ):
            predictions = module.network(*inputs).float()
        for number, image in enumerate(inputs[0]):
            caption = describe_prediction(targets[number], predictions[number])
            picture = draw_sample(image.float().cpu().numpy(), caption)
            self.metrics.events.add_image(
                f"pictures/{number}", picture, trainer.global_step, dataformats="HWC"
            )


def describe_prediction(target: Tensor, prediction: Tensor) -> str:
    """Return target and prediction of a sample: classes by number, or the first two numbers."""
    if not target.is_floating_point():
        return f"class {int(target)}, predicted {int(prediction.argmax())}"
    return f"{_list_numbers(target)}; predicted {_list_numbers(prediction)}"


def _list_numbers(values: Tensor) -> str:
    return ", ".join(f"{value:.3g}" for value in values.flatten()[:2].tolist())


def draw_sample(image: NDArray[np.float32], caption: str) -> NDArray[np.uint8]:
    """Return an image (C, H, W) with any scale as RGB (h, w, 3), with a caption below it."""
    low, high = image.min(), image.max()
    scaled = (255 * (image - low) / max(high - low, 1e-12)).astype(np.uint8)
    colours = np.repeat(scaled[:1], 3, axis=0) if len(scaled) != 3 else scaled
    picture = Image.fromarray(colours.transpose(1, 2, 0))
    factor = -(-SMALLEST_SIDE // min(picture.size))
    picture = picture.resize(
        (factor * picture.width, factor * picture.height), Image.Resampling.BOX
    )
    font = ImageFont.load_default()
    width = max(picture.width, int(font.getlength(caption)) + 4)
    drawn = Image.new("RGB", (width, picture.height + CAPTION_HEIGHT), "white")
    drawn.paste(picture, (0, 0))
    ImageDraw.Draw(drawn).text((2, picture.height + 2), caption, fill="black", font=font)
    return np.asarray(drawn)


def draw_maps(maps: NDArray[Any]) -> NDArray[np.float32]:
    """Return the attention maps (H, n, n) of a layer side by side, each as a share of its maximum.

    The result is (h, w), with 1 for the largest weight of a head, and a white line between heads.
    """
    factor = -(-MAP_SIDE // maps.shape[-1])
    panels = []
    for weights in maps:
        largest = weights.max()
        share = weights / largest if largest > 0 else weights
        panel = np.kron(share, np.ones((factor, factor)))
        panels.append(np.pad(panel, ((0, 0), (0, 2)), constant_values=1.0))
    return np.concatenate(panels, axis=1).astype(np.float32)


def write_pictures(pictures: Pictures, folder: Path, events: SummaryWriter, step: int) -> None:
    """Write the pictures to `folder` (0.png, ..., legend.json) and to TensorBoard.

    Pictures of an earlier attempt are removed.
    """
    for path in folder.glob("*.png"):
        path.unlink()
    pictures.legend.write(folder / "legend.json")
    for number, picture in enumerate(pictures.drawn):
        content = io.BytesIO()
        Image.fromarray(picture).save(content, format="PNG")
        write_atomic(folder / f"{number}.png", content.getvalue())
        events.add_image(f"pictures/{number}", picture, step, dataformats="HWC")
    events.add_image("pictures/legend", draw_legend(pictures.legend), step, dataformats="HWC")
