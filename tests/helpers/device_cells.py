"""Program that trains cells on one and on two devices at once: `python device_cells.py FOLDER`.

It runs outside the test's process, which has threads and whose output pytest captures. Variants
whose names end in 1 and 2 are the same cell on one and on two devices. The name of every other
variant says how its cell ends.
"""

import importlib
import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L

import lit_attn.train
from helpers.digit_folders import experiment, write
from helpers.mmseg_files import make_network
from helpers.paths import EXPERIMENTS
from helpers.training_cells import cell_of, digits_cell, scenes_cell, text_cell
from lit_attn.ablate import runner
from lit_attn.ablate.display import make_display
from lit_attn.ablate.job import Job
from lit_attn.ablate.launch import TRAINING, Launcher
from lit_attn.ablate.runner import Runner
from lit_attn.ablate.slots import Slots
from lit_attn.config.cell import Cell
from lit_attn.schema.plugins import load_parts
from lit_attn.training import checkpoints
from lit_attn.training.recording import Progress

# The fork server imports this module, and so everything that its cells need.
for module in TRAINING:
    importlib.import_module(module)

# The ranks agree before every step, so that a stopped cell stops at a known step.
checkpoints.AGREEMENT_SECONDS = 0.0

MIXERS = EXPERIMENTS / "token_mixers" / "token_mixers.py"
load_parts([MIXERS])

# Dropout draws other random numbers on another number of devices.
EXACT = {"dropout": 0.0, "drop_path": 0.0}
STOPPED_AT = 6
# Relative to the folder that `_main` receives.
FOLDERS, SINGLE = Path("digits"), Path("single")


def cut_short(devices: int) -> Cell:
    training = {"devices": devices, "clip": 0.1, "max_steps": 6}
    return digits_cell(model=EXACT, training=training)


def early(devices: int) -> Cell:
    """Return a cell that stops after its second evaluation, because its weights do not change."""
    training = {"devices": devices, "stop": {"patience": 1}}
    return digits_cell(model=EXACT, optimizer={"lr": 1e-30}, training=training)


def text(devices: int) -> Cell:
    """Return a language-model cell whose steps have two micro-batches."""
    return text_cell(model={"dropout": 0.0}, training={"devices": devices})


def growing(devices: int) -> Cell:
    """Return a cell that reads images from disk, without mixing, which differs between devices."""
    sections = experiment(
        FOLDERS,
        data={"sizes": [8], "repeats": 2, "augment": {"policy": "rand-m9-mstd0.5-inc1"}},
        model={"drop_path": 0.0},
        training={"average": {"decay": 0.9}, "devices": devices},
    )
    return cell_of(sections)


def scenes(devices: int) -> Cell:
    """Return a segmentation cell whose devices have unequal numbers of labelled pixels."""
    model = {"drop_path": 0.0, "decoder_dropout": 0.0}
    return scenes_cell(
        Path(), model=model, training={"average": {"decay": 0.9}, "devices": devices}
    )


def counted(devices: int) -> Cell:
    """Return a cell whose M-step counts the tokens of two micro-batches on all devices."""
    model = {"dropout": 0.0, "attention": "mgk-soft-e"}
    return text_cell(model=model, training={"devices": devices})


def values(devices: int) -> Cell:
    """Return a cell that leaves parameters without a gradient."""
    model = {"attention": {"residual": "value"}, "qk_norm": True, "dropout": 0.0}
    return text_cell(model=model, training={"devices": devices})


def normed(devices: int) -> Cell:
    """Return a cell that trains a user's network with batch norms.

    They cancel biases, whose gradients are rounding errors. Adam would make whole steps of these.
    """
    optimizer = {"kind": "sgd", "lr": 0.1}
    cell = digits_cell(optimizer=optimizer, training={"devices": devices}).model_dump(mode="json")
    cell["experiment"]["model"] = {"kind": "module", "import": "helpers.normed_network:Normed"}
    return Cell.model_validate(cell)


def configured(devices: int) -> Cell:
    """Return a cell of a model in the form of a configuration file of mmsegmentation."""
    cell = scenes_cell(Path(), training={"devices": devices}).model_dump(mode="json")
    # A file that is read has lists instead of tuples.
    resolved = json.loads(json.dumps(make_network("segmenter")))
    cell["experiment"]["model"] = {"kind": "mmseg", "resolved": resolved}
    return Cell.model_validate(cell)


def hybrid() -> Cell:
    """Return a cell whose first layer is a gated delta rule, and whose second one is recorded."""
    recorded = {"devices": 2, "diagnostics": {"kinds": ["residual", "rank", "maps", "heads"]}}
    delta = {"kind": "module", "import": "token_mixers:GatedDeltaRule"}
    cell = digits_cell(
        model={"attention": delta | {"layers": {"last": 1, "use": "standard"}}}, training=recorded
    )
    return cell.model_copy(update={"parts": (MIXERS,)})


def few(devices: int) -> Cell:
    """Return a cell that evaluates one image."""
    model = {"drop_path": 0.0, "decoder_dropout": 0.0}
    data = {"evaluation_images": 1}
    return scenes_cell(Path("few"), data=data, model=model, training={"devices": devices})


def single(devices: int) -> Cell:
    """Return a cell that evaluates one image of a folder."""
    sections = experiment(
        SINGLE,
        data={"augment": {}},
        model={"drop_path": 0.0},
        training={"average": {"decay": 0.9}, "devices": devices},
    )
    return cell_of(sections)


def cells() -> dict[str, Cell]:
    compared: list[Callable[[int], Cell]] = [cut_short, early, text, growing, scenes]
    compared += [counted, values, normed, configured, few, single]
    by_name = {f"{make_cell.__name__}-{n}": make_cell(n) for make_cell in compared for n in (1, 2)}
    by_name |= {name: hybrid() for name in ("whole", "stopped")}
    by_name["diverged"] = digits_cell(
        optimizer={"lr": 1e30}, schedule={"warmup": 0}, training={"devices": 2}
    )
    by_name["killed"] = digits_cell(training={"devices": 2, "epochs": 1000})
    return {name: cell.model_copy(update={"variant": name}) for name, cell in by_name.items()}


def run_cell(folder: Path, *, smoke: bool = False) -> None:
    rank = os.environ.get("LOCAL_RANK")
    number = {"stopped": signal.SIGTERM, "killed": signal.SIGKILL}.get(folder.name)
    if number is not None and rank == "1" and not (folder / "attempts" / "2").exists():
        _signal_itself(number)
    lit_attn.train.run_cell(folder, smoke=smoke)


def _signal_itself(number: signal.Signals) -> None:
    original = Progress.on_train_batch_end

    def end_batch(self: Progress, trainer: L.Trainer, *arguments: Any) -> None:
        original(self, trainer, *arguments)
        if trainer.global_step == STOPPED_AT:
            os.kill(os.getpid(), number)

    Progress.on_train_batch_end = end_batch  # type: ignore[method-assign]


def _main(root: Path) -> None:
    os.chdir(root)
    write(FOLDERS, train=8, val=3)
    # An odd number of images to evaluate.
    (FOLDERS / "val" / "n3" / "2.JPEG").unlink()
    write(SINGLE, train=8, val=1)
    for label in range(1, 4):
        (SINGLE / "val" / f"n{label}" / "0.JPEG").unlink()
    jobs = []
    for name, cell in cells().items():
        settings = cell.model_dump(mode="json", exclude={"study", "variant", "seed"})
        job = Job(root / name, cell.study, cell.variant, cell.seed, cell.fingerprint, settings)
        jobs.append(job)
    runner.RETRIES.clear()
    launcher = Launcher("helpers.device_cells:run_cell")
    for again in (jobs, [job for job in jobs if job.variant == "stopped"]):
        Runner(launcher, Slots([None] * 6), make_display(sys.stdout)).run(again)


if __name__ == "__main__":
    _main(Path(sys.argv[1]))
