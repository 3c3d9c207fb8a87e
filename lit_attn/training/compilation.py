"""Compilation of a cell's network with torch.compile: whether, how, and what follows a failure.

`training.compile` is outside the identity of a cell: it changes the order of sums and the speed,
and not what is computed. `result.json` records whether a cell was compiled.
"""

from typing import Literal

import torch

from lit_attn.config.experiment import Experiment
from lit_attn.private_names.of_compiler import TorchDynamoException
from lit_attn.schema.errors import ConfigError

COMPILED_DEVICES = ("cuda",)
"""Types of devices on which `compile: auto` compiles.

On a CPU, compiling takes longer than the small trainings that run there.
"""

Mode = Literal["default", "reduce-overhead"]
"""Mode of torch.compile; reduce-overhead records CUDA graphs."""

REASON_LENGTH = 300
"""Most characters of torch's reason for a failed compilation that are kept."""


def choose_mode(experiment: Experiment, device: torch.device) -> Mode | None:
    """Return the mode in which a cell on `device` is compiled, or None if it is not compiled.

    Raises ConfigError if the cell cannot have the CUDA graphs that its configuration asks for.
    """
    choice = experiment.training.compile
    if experiment.training.has_cuda_graphs and device.type != "cuda":
        raise ConfigError(
            f"training.compile: {choice} needs a GPU, but this cell trains on '{device}'. "
            "Write auto, which compiles on a GPU only."
        )
    if choice == "cuda-graphs":
        return "reduce-overhead"
    if choice == "auto":
        return "default" if device.type in COMPILED_DEVICES else None
    return "default" if choice else None


def is_compilation_failure(error: BaseException) -> bool:
    """Return True if torch.compile raised `error`, and not the code that it compiles."""
    return isinstance(error, TorchDynamoException)


def read_reason(error: BaseException) -> str:
    """Return torch's reason for a failed compilation in one line."""
    # The paragraphs after the first one say how torch can be made to write more.
    first_paragraph, _, _ = str(error).strip().partition("\n\n")
    reason = " ".join(first_paragraph.split())
    return reason[:REASON_LENGTH] or type(error).__name__
