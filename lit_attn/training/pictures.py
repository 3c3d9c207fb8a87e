"""Files and TensorBoard entries of a cell's pictures."""

import io
from pathlib import Path

from PIL import Image
from torch.utils.tensorboard import SummaryWriter

from lit_attn.files import write_atomic
from lit_attn.tasks.pictures import Pictures, draw_legend


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
