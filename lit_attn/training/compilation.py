"""Compilation of a cell's network with torch.compile: whether, and what follows a failure.

`training.compile` is outside the identity of a cell: it changes the order of sums and the speed,
and not what is computed. `result.json` records whether a cell was compiled.
"""

import torch

from lit_attn.config.experiment import Experiment
from lit_attn.private_names.of_compiler import TorchDynamoException
from lit_attn.schema.errors import ConfigError

COMPILED_DEVICES = ("cuda",)
"""Types of devices on which `compile: auto` compiles.

On a CPU, compiling takes longer than the small trainings that run there.
"""

REASON_LENGTH = 300
"""Most characters of torch's reason for a failed compilation that are kept."""


def should_compile(experiment: Experiment, device: torch.device) -> bool:
    """Return True if a cell on `device` is compiled.

    Raises ConfigError if the cell cannot have the CUDA graph that its configuration asks for.
    """
    choice = experiment.training.compile
    if choice == "step" and device.type != "cuda":
        raise ConfigError(
            f"training.compile: step needs a GPU, but this cell trains on '{device}'. "
            "Write auto, which compiles on a GPU only."
        )
    if choice == "auto":
        return device.type in COMPILED_DEVICES
    return choice != "none"


def is_compilation_failure(error: BaseException) -> bool:
    """Return True if torch.compile raised `error`, and not the code that it compiles."""
    return isinstance(error, TorchDynamoException)


def read_reason(error: BaseException) -> str:
    """Return torch's reason for a failed compilation in one line."""
    # The paragraphs after the first one say how torch can be made to write more.
    first_paragraph, _, _ = str(error).strip().partition("\n\n")
    reason = " ".join(first_paragraph.split())
    return reason[:REASON_LENGTH] or type(error).__name__
