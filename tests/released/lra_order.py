"""Order of the samples in the Long Range Arena code, and in experiments/long_range_arena.

The script is run_tasks.py of transformer-mgk itself with its own data set, whose shuffles take the
random orders of this project. Each sample is its own number, and the model notes the batches.
`train` has the samples of every step, `val` those of every evaluation, and `test` those of the last
one. The run `retrieval` evaluates fewer batches than val has, as the options of MGK's README do.
"""

import pickle
import random
import sys
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from helpers.data_ranks import on_rank
from numpy.typing import NDArray

from lit_attn.data.module import numpy_generator
from released.pictures import Comparison
from released.record import Clone
from released.recording import Arrays
from released.replaying import shipped_cell

REPOSITORY, COMMIT, RUNS = "minhtannguyen/transformer-mgk", "73608b3", ["text", "retrieval"]
EXPERIMENT, LIBRARIES = (
    "experiments/long_range_arena/text.yaml, experiments/long_range_arena/retrieval.yaml",
    ("torch",),
)
SAMPLES = {"train": 30, "val": 22, "test": 17}
TOLERANCES = dict.fromkeys(SAMPLES, 0.0)
SEED, STEPS, EVERY, BATCH, CONTEXT = 1, 24, 4, 4, 2
VAL_BATCHES = {"text": SAMPLES["val"] // BATCH, "retrieval": 3}


class Reader(torch.nn.Module):
    """Model that notes the numbers of the samples of each batch."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.read: dict[bool, list[int]] = {True: [], False: []}

    @property
    def module(self) -> "Reader":
        """Return this model, which the script has in nn.DataParallel."""
        return self

    def forward(self, input_ids_0: torch.Tensor, **_: torch.Tensor) -> dict[str, torch.Tensor]:
        self.read[self.training] += (input_ids_0[:, 0] - 1).tolist()
        return {"loss": self.weight.sum(), "accu": self.weight.detach().sum() + 1}


def record(clone: Clone, run: str) -> Arrays:
    """Run the released script and return the order of the samples of each split."""
    reader = Reader()
    # The noting model takes the place of the released ones.
    sys.modules["model_wrapper"] = wrapper = ModuleType("model_wrapper")
    for name in ("ModelForSC", "ModelForSCDual", "ModelForSCProbing", "ModelForSCDualProbing"):
        setattr(wrapper, name, lambda _: reader)
    clone.load("dataset", "lra/dataset.py", {})
    passes = dict.fromkeys(SAMPLES, 0)

    def shuffle(examples: list[dict[str, Any]]) -> None:
        (split,) = (name for name, count in SAMPLES.items() if count == len(examples))
        passes[split] += 1
        in_order = sorted(examples, key=lambda example: example["input_ids_0"][0])
        order = numpy_generator(SEED, split, passes[split]).permutation(len(examples))
        examples[:] = [in_order[place] for place in order]

    settings = {"batch_size": BATCH, "num_train_steps": STEPS, "warmup": 2}
    settings |= {"eval_frequency": EVERY, "num_eval_steps": VAL_BATCHES[run]}
    options = [word for name, value in settings.items() for word in (f"--{name}", str(value))]
    options += ["--model", "softmax", "--task", run]
    with tempfile.TemporaryDirectory() as folder:
        for split, count in SAMPLES.items():
            examples = [
                {"input_ids_0": [number + 1, 0], "input_ids_1": [1, 0], "label": 0}
                for number in range(count)
            ]
            path = Path(folder, f"{run}.{'dev' if split == 'val' else split}.pickle")
            path.write_bytes(pickle.dumps(examples))
        with (
            patch.object(sys, "argv", ["", *options, "--chk_path", folder]),
            patch.object(torch.Tensor, "cuda", lambda tensor: tensor),
            patch.object(random, "shuffle", shuffle),
        ):
            clone.run(
                "lra/run_tasks.py",
                {
                    "from fvcore.nn import FlopCountAnalysis\n": "",
                    "import wandb\n": "",
                    "model = model.cuda()\n": "",
                    "model = nn.DataParallel(model, device_ids = device_ids)\n": "",
                    "'../../../Nystromformer/LRA/datasets'": "FOLDER",
                    "max(args.batch_size // len(device_ids) // 32, 1)": "1",
                },
                {"FOLDER": folder},
            )
    evaluated = STEPS // EVERY * VAL_BATCHES[run] * BATCH
    val, test = reader.read[False][:evaluated], reader.read[False][evaluated:]
    return {"train": np.array(reader.read[True]), "val": np.array(val), "test": np.array(test)}


def replay(run: str, folder: Path) -> Arrays:
    """Return the order in which the data module of the shipped experiment reads the samples."""
    for split, count in SAMPLES.items():
        # The id of a byte is one more than the byte.
        second = "\ta" if run == "retrieval" else ""
        rows = "".join(f"{number % 2}\t{chr(number + 32)}{second}\n" for number in range(count))
        (folder / f"{split}.tsv").write_text(rows)
    changes: dict[str, Any] = {"data.folder": str(folder), "data.epoch_steps": EVERY}
    changes |= {"data.batch_size": BATCH, "data.eval_batch_size": BATCH}
    changes |= {"data.context": CONTEXT, "data.max_tokens": CONTEXT}
    if run == "retrieval":
        changes["data.val_batches"] = VAL_BATCHES[run]
    cell = shipped_cell(f"long_range_arena/{run}.yaml", changes, SEED)
    data = cell.experiment.data.build(SEED, torch.device("cpu"))
    train = [number for step in range(STEPS) for number in numbers(data.batch(step))]
    val: list[int] = []
    for epoch in range(STEPS // EVERY):
        read = {}
        loaders = on_rank(data, step=(epoch + 1) * data.steps_per_epoch).val_dataloader()
        for split, loader in zip(data.splits, loaders, strict=True):
            read[split] = [number for batch in loader for number in numbers(batch)]
        val += read["val"]
    return {"train": np.array(train), "val": np.array(val), "test": np.array(read["test"])}


def numbers(batch: tuple[torch.Tensor, ...]) -> list[int]:
    """Return the numbers of the samples in a batch."""
    first: list[int] = (batch[0].flatten(1)[:, 0] - 33).tolist()
    return first


def compare(name: str, ours: Arrays, theirs: Arrays) -> Comparison:
    """Compare the numbers of the samples at each place."""
    agreeing: NDArray[np.bool_] = ours[name] == theirs[name]
    return Comparison(agreeing.size, int(agreeing.sum()), float(not agreeing.all()))
