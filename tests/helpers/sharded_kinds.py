"""Program that trains a cell of every kind of model alone and on two sharded ranks, in float64.

`python -m helpers.sharded_kinds FOLDER` writes the cells to FOLDER/KIND/alone and
FOLDER/KIND/sharded. The cells of a kind differ in their devices only, and in the recomputation of
blocks.
"""

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lightning.pytorch.plugins import DoublePrecision, Precision

from helpers.mmseg_files import make_network, write_file
from helpers.paths import EXPERIMENTS
from helpers.training_cells import digits_cell, scenes_cell, text_cell
from lit_attn import train
from lit_attn.config.cell import Cell
from lit_attn.schema.plugins import load_parts
from lit_attn.training import trainer

Fields = dict[str, Any]

MIXERS = EXPERIMENTS / "token_mixers" / "token_mixers.py"
WORDS = ("der hund sieht", "the dog sees"), ("kind ruft", "child calls"), ("hund ruft", "dog calls")
# Adam makes whole steps of gradients that are rounding errors alone, unless eps exceeds them.
ADAM = {"kind": "adamw", "lr": 0.01, "eps": 1e-3}
SWIN = {"depths": [1, 2], "num_heads": [1, 2], "embed_dim": 8, "window_size": 2, "patch_size": 2}
GPT2 = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "n_inner": 8}
GPT2 |= {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}


def write_fields(cell: Cell) -> Fields:
    """Return the content of a cell's file, in which a test can replace the model and the task."""
    return cell.model_dump(mode="json", by_alias=True)


def images(model: Fields, **training: Any) -> Fields:
    """Return a cell of two steps."""
    data = {"augment": ["normalize"]}
    cell = digits_cell(data=data, optimizer=ADAM, training={"epochs": 1, "max_steps": 2})
    fields = write_fields(cell)
    fields["experiment"]["model"] = model
    fields["experiment"]["training"] |= training
    return fields


def texts(model: Fields, **changes: Any) -> Fields:
    """Return a cell of two steps of two micro-batches."""
    data = {"epoch_steps": 1}
    cell = text_cell(data=data, optimizer=ADAM, training={"epochs": 2})
    fields = write_fields(cell)
    fields["experiment"]["model"] = model | changes
    return fields


def own_module(folder: Path) -> Fields:
    """Return a cell of a LightningModule, whose steps call its `forward`, and of an own network.

    The network has frozen weights and batch norms. The cell has clipped gradients, an average of
    epochs and early stopping.
    """
    model = {"kind": "module", "import": "helpers.block_networks:Blocks"}
    longer = {"epochs": 2, "max_steps": 5, "stop": {"patience": 1}}
    fields = images(model, **longer, clip=0.5, average={"epochs": 2})
    task = {"kind": "module", "import": "helpers.block_networks:Task"}
    fields["experiment"]["task"] = task | {"measures": ["loss", "error"]}
    fields["metric"] = {"name": "test/error", "goal": "min"}
    return fields


def timm(folder: Path) -> Fields:
    """Return a cell of a hierarchical model."""
    model = {"kind": "timm", "name": "swin_tiny_patch4_window7_224"}
    return images(model | {"arguments": SWIN | {"drop_path_rate": 0.0}})


def transformers(folder: Path) -> Fields:
    """Return a cell of a model whose projections are transposed, with a tied head."""
    return texts({"kind": "transformers", "architecture": "gpt2", "arguments": GPT2})


def token_mixer(folder: Path) -> Fields:
    """Return a cell with a layer of a user, before layers that mix in the first layer's values."""
    load_parts([MIXERS])
    mixer = {"kind": "module", "import": "token_mixers:StateSpace", "arguments": {"state": 2}}
    model = {"kind": "gpt", "dim": 8, "depth": 3, "heads": 2, "ffn": {"width": 8}}
    attention = {"values": "first", "layers": {"last": 1, "use": mixer}}
    return texts(model, attention=attention) | {"parts": [str(MIXERS)]}


def translation(folder: Path) -> Fields:
    """Return a cell with one embedding for both languages and a beam search in the end."""
    for name in ("train", "valid", "test"):
        for number, language in enumerate(("de", "en")):
            lines = [pair[number] for pair in WORDS] * 4
            (folder / f"{name}.{language}").write_text("\n".join(lines) + "\n")
    data = {"kind": "parallel-text", "name": "words", "folder": str(folder), "vocabulary": 40}
    sizes = {"dim": 8, "depth": 1, "heads": 2, "ffn": {"width": 8}, "embeddings": "all"}
    fields = {
        "task": {"kind": "translation", "label_smoothing": 0.1, "beams": 2},
        "data": data | {"batch_size": 64, "context": 16, "eval_batch_size": 5},
        "model": {"kind": "encoder-decoder", **sizes},
        "optimizer": ADAM,
        "training": {"epochs": 1, "max_steps": 2, "accelerator": "cpu"},
    }
    names = {"study": "t", "variant": "v", "seed": 0, "metric": {"name": "test/bleu"}}
    return {**names, "experiment": fields}


def mmseg(folder: Path) -> Fields:
    """Return a cell of a configuration file, which devices evaluate unequally often."""
    path = write_file(folder / "network.py", make_network("segmenter"))
    training = {"epochs": 1, "max_steps": 1, "average": {"decay": 0.9}}
    fields = write_fields(scenes_cell(folder / "scenes", training=training))
    fields["experiment"]["model"] = {"kind": "mmseg", "config": str(path)}
    return fields


KINDS: dict[str, Callable[[Path], Fields]] = {
    "own module": own_module,
    "timm": timm,
    "token mixer": token_mixer,
    "translation": translation,
}
if importlib.util.find_spec("transformers"):
    KINDS["transformers"] = transformers
if importlib.util.find_spec("mmseg"):
    KINDS["mmseg"] = mmseg

RECOMPUTED = ("timm", "translation", "token mixer")
"""Kinds whose blocks are recomputed on the sharded ranks."""


def make_precision(*_: object) -> Precision:
    return DoublePrecision()


def main(root: Path) -> int:
    trainer._make_precision = make_precision
    for kind, make_fields in KINDS.items():
        (root / kind).mkdir()
        fields = make_fields(root / kind)
        alone = fields["experiment"]["training"]
        sharded = {**alone, "devices": 2, "strategy": "fsdp"}
        if kind in RECOMPUTED:
            sharded["recompute"] = "blocks"
        for name, training in (("alone", alone), ("sharded", sharded)):
            folder = root / kind / name
            folder.mkdir()
            fields["experiment"]["training"] = training
            Cell.model_validate(fields).write(folder / "config.yaml")
            if train.main([str(folder)]) != 0:
                return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
