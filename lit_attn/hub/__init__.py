"""Exchange of trained models: folders in the layout of the Hugging Face hub, and generated text.

`load_exported` is the door for Python, and `lit-attn export` and `lit-attn generate` are those of
the command line. `folder.py` writes and reads the folders.
"""

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn


def load_exported(folder: str | Path, *, trust_code: bool = False) -> "nn.Module":
    """Return the network of an exported folder in evaluation mode, on the CPU.

    Raises ConfigError for a folder that was not exported, and for one whose network or data need
    code of their own (`mine:Net`, `parts`), unless you trust that code (`trust_code`).
    """
    # PyTorch is imported only when it is needed.
    from lit_attn.hub.folder import read

    return read(Path(folder), trust_code=trust_code)
