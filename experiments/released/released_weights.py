"""Convert released language models.

    python experiments/released/released_weights.py SOURCE OUT

SOURCE is a downloaded folder of the Hugging Face hub with config.json, the weights (safetensors or
pytorch_model.bin, in one file or in shards) and, optionally, tokenizer.json. Its `model_type` is
`gpt2` (GPT-2), `gpt_neox` (Pythia), `dcpythia` (DCPythia) or `dcformer` (DCFormer). OUT becomes a
folder as `lit-attn export hub` writes it, which `lit_attn.hub.load_exported` reads. Precision is
unchanged.

The logits are those of the released classes, up to rounding, for a prompt that is processed at
once. DCPythia's class differs from itself in decoding: a token that it generates sees one key less
in a window than the same token of a prompt. With `query_wise` both classes leave out the key-wise
maps in decoding only; the converted model always leaves them out.
"""

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from lit_attn.files import read_text, write_atomic, write_json
from lit_attn.schema.errors import ConfigError, OneLineParser, command, suggest

if TYPE_CHECKING:
    from torch import Tensor

    from lit_attn.config.cell import Cell

Tensors = dict[str, "Tensor"]

ACTIVATIONS = {"gelu": "gelu", "gelu_new": "gelu-tanh", "gelu_pytorch_tanh": "gelu-tanh"}
ACTIVATIONS |= {"gelu_fast": "gelu-tanh", "relu": "relu"}

# Windows of the layers in turn by the `window_type` of DCFormer and DCPythia: True is a window.
# A null is LG.
WINDOW_TYPES = {
    "LG": (True, False),
    "LGLL": (True, False, True, True),
    "LGL6": (True, False, True, True, True, True, True, True),
}

# Composition maps of a released layer, in the order in which their weights are stored.
SIDES = ("pre.sides.query", "pre.sides.key", "post.sides.query", "post.sides.key")

CARD = """\
---
library_name: lit_attn
---

# {name}

Converted from released weights of the class `{model_type}`. `lit_attn.hub.load_exported` reads this
folder. The license is that of the released weights.
"""


class Released(NamedTuple):
    """A class of released models: the keys of its configuration, and the names of its tensors.

    `model` returns the keys of `model` in YAML, and `rename` returns the tensors under the names of
    this project. `vocabulary` and `context` are names of keys.
    """

    model: Callable[[dict[str, Any]], dict[str, Any]]
    rename: Callable[[Tensors, dict[str, Any]], Tensors]
    vocabulary: str
    context: str


@command
def main(arguments: list[str] | None = None) -> int:
    """Convert a folder; return exit code 0, or 2 for a folder that cannot be converted."""
    parser = OneLineParser(
        prog="python experiments/released/released_weights.py", description=__doc__
    )
    parser.add_argument("source", type=Path, metavar="SOURCE", help="downloaded folder")
    parser.add_argument("out", type=Path, metavar="OUT", help="folder to write")
    options = parser.parse_args(arguments)
    print(convert(options.source, options.out))
    return 0


def convert(source: Path, out: Path) -> Path:
    """Write the converted weights, configuration, tokenizer and card to `out`; return `out`."""
    path = source / "config.json"
    config = read_json(path)
    cell = read_cell(config, path, source.name)
    if out.exists() and any(out.iterdir()):
        raise ConfigError(f"{out}: is not empty")

    from safetensors.torch import save_model

    from lit_attn.models import factory

    experiment = cell.experiment
    network = factory.build(experiment.model, experiment.data, "meta")
    released = RELEASED[config["model_type"]]
    tensors = released.rename(read_weights(source), config)
    try:
        network.load_state_dict(tensors, assign=True)
    except RuntimeError as error:
        problems = [line.strip() for line in str(error).splitlines()[1:]]
        raise ConfigError(f"{source}: the weights do not fit {path}: {problems[0]}") from error
    out.mkdir(parents=True, exist_ok=True)
    save_model(network, str(out / "model.safetensors"))
    if (source / "tokenizer.json").exists():
        shutil.copyfile(source / "tokenizer.json", out / "tokenizer.json")
    card = CARD.format(name=source.name, model_type=config["model_type"])
    write_atomic(out / "README.md", card)
    write_json(out / "config.json", json.loads(cell.model_dump_json()))
    return out


def read_json(path: Path) -> dict[str, Any]:
    """Return the mapping in a JSON file; raise ConfigError if there is none."""
    try:
        value = json.loads(read_text(path))
    except json.JSONDecodeError as error:
        raise ConfigError(f"{path}: not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path}: must be a mapping")
    return value


def read_cell(config: dict[str, Any], path: Path, name: str) -> "Cell":
    """Return the configuration of a released model as a cell; ConfigError if it has no equal.

    Data and optimizer of the cell say what the model reads; nothing was trained with them here.
    """
    from pydantic import ValidationError

    from lit_attn.config.cell import Cell
    from lit_attn.schema.errors import explain

    kind = str(config.get("model_type"))
    released = RELEASED.get(kind)
    if released is None:
        raise ConfigError(f"{path}: model_type: unknown '{kind}'{suggest(kind, RELEASED)}")
    try:
        tokenizer = {"kind": "gpt-neox", "size": config[released.vocabulary]}
        data = {
            "kind": "shards",
            "name": name,
            "folder": ".",
            "tokenizer": {**tokenizer, "file": "tokenizer.json"},
            "context": config[released.context],
        }
        experiment = {
            "task": "language-modelling",
            "data": data,
            "model": {"kind": "gpt", "positions": "rotary", **released.model(config)},
            "optimizer": {"kind": "adamw", "lr": 1e-4},
            "training": {"epochs": 1},
        }
    except KeyError as error:
        raise ConfigError(f"{path}: lacks the key {error}") from error
    except ValueError as error:
        raise ConfigError(f"{path}: {error}") from error
    metric = {"name": "val/loss"}
    fields = {"study": "released-weights", "variant": kind, "seed": 0, "metric": metric}
    try:
        return Cell.model_validate({**fields, "experiment": experiment})
    except ValidationError as error:
        raise explain(error, str(path)) from error


def read_weights(source: Path) -> Tensors:
    """Return all tensors of a folder; ConfigError if a file is missing or cannot be read."""
    import torch
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    files: list[Path] = []
    for name in ("model.safetensors", "pytorch_model.bin"):
        index = source / f"{name}.index.json"
        if index.exists():
            parts = set(read_json(index)["weight_map"].values())
            files = [source / part for part in sorted(parts)]
        elif (source / name).exists():
            files = [source / name]
        if files:
            break
    if not files:
        raise ConfigError(f"{source}: has no model.safetensors and no pytorch_model.bin")
    tensors: Tensors = {}
    for file in files:
        try:
            if file.suffix == ".safetensors":
                tensors |= load_file(file)
            else:
                tensors |= torch.load(file, map_location="cpu", weights_only=True, mmap=True)
        except (OSError, RuntimeError, SafetensorError) as error:
            raise ConfigError(f"{file}: {str(error).splitlines()[0]}") from error
    return tensors


def gpt2_model(config: dict[str, Any]) -> dict[str, Any]:
    """Return the keys of `model` for GPT-2."""
    if not config.get("scale_attn_weights", True):
        raise ValueError("scale_attn_weights: false is not supported")
    for key in ("scale_attn_by_inverse_layer_idx", "add_cross_attention"):
        if config.get(key):
            raise ValueError(f"{key}: true is not supported")
    activation = config.get("activation_function", "gelu_new")
    if activation not in ACTIVATIONS:
        hint = suggest(activation, ACTIVATIONS)
        raise ValueError(f"activation_function: '{activation}' is not supported{hint}")
    return {
        "dim": config["n_embd"],
        "depth": config["n_layer"],
        "heads": config["n_head"],
        "positions": "learned",
        "norm": "layernorm",
        "norm_eps": config.get("layer_norm_epsilon", 1e-5),
        "bias": "all",
        "ffn": {
            "width": config.get("n_inner") or 4 * config["n_embd"],
            "activation": ACTIVATIONS[activation],
        },
        "head": "tied" if config.get("tie_word_embeddings", True) else "untied",
    }


def gpt2_tensors(tensors: Tensors, config: dict[str, Any]) -> Tensors:
    """Return the tensors of GPT-2, whose matrices are stored as (inputs, outputs)."""
    names = {
        # The files of the published models lack this part.
        "transformer.": "",
        "wte.": "trunk.tokens.",
        "wpe.": "trunk.positions.",
        "ln_f.": "trunk.norm.",
        "h.": "trunk.blocks.",
        "lm_head.": "head.",
        ".ln_1.": ".norm1.",
        ".ln_2.": ".norm2.",
        ".attn.c_attn.": ".attn.qkv.",
        ".attn.c_proj.": ".attn.proj.",
        ".mlp.c_fc.": ".ffn.up.",
        ".mlp.c_proj.": ".ffn.down.",
    }
    masks = (".attn.bias", ".attn.masked_bias")
    turned = {}
    for name, tensor in tensors.items():
        if name.endswith(masks):
            continue
        is_turned = ".c_" in name and name.endswith(".weight")
        turned[name] = tensor.T.contiguous() if is_turned else tensor
    renamed = rename(turned, names)
    if config.get("tie_word_embeddings", True):
        renamed.pop("head.weight", None)
    return renamed


def neox_model(config: dict[str, Any]) -> dict[str, Any]:
    """Return the keys of `model` for GPT-NeoX and Pythia, of any version of transformers."""
    rope = config.get("rope_parameters") or {}
    kind = rope.get("rope_type", "default")
    if kind != "default" or config.get("rope_scaling"):
        raise ValueError(f"rope_type: '{kind}' or scaled positions are not supported")
    activation = config.get("hidden_act", "gelu")
    if activation not in ACTIVATIONS:
        hint = suggest(activation, ACTIVATIONS)
        raise ValueError(f"hidden_act: '{activation}' is not supported{hint}")
    share = rope.get("partial_rotary_factor", config.get("rotary_pct", 0.25))
    base = rope.get("rope_theta", config.get("rotary_emb_base", 10_000))
    return {
        "dim": config["hidden_size"],
        "depth": config["num_hidden_layers"],
        "heads": config["num_attention_heads"],
        "rotary_share": share,
        "rotary_base": base,
        "branches": "parallel" if config.get("use_parallel_residual", True) else "sequential",
        "norm": "layernorm",
        "norm_eps": config.get("layer_norm_eps", 1e-5),
        "bias": "all" if config.get("attention_bias", True) else "ffn",
        "ffn": {
            "width": config["intermediate_size"],
            "activation": ACTIVATIONS[activation],
        },
        "head": "tied" if config.get("tie_word_embeddings") else "untied",
    }


def neox_tensors(tensors: Tensors, config: dict[str, Any]) -> Tensors:
    """Return the tensors of GPT-NeoX; rows of q, k and v, stored by head, are stored in turn."""
    names = {
        "gpt_neox.embed_in.": "trunk.tokens.",
        "gpt_neox.final_layer_norm.": "trunk.norm.",
        "embed_out.": "head.",
        "lm_head.": "head.",
        "gpt_neox.layers.": "trunk.blocks.",
        ".input_layernorm.": ".norm1.",
        ".post_attention_layernorm.": ".norm2.",
        ".attention.query_key_value.": ".attn.qkv.",
        ".attention.dense.": ".attn.proj.",
        ".mlp.dense_h_to_4h.": ".ffn.up.",
        ".mlp.dense_4h_to_h.": ".ffn.down.",
    }
    # Older files also store masks and rotary frequencies.
    buffers = (".attention.bias", ".attention.masked_bias", ".rotary_emb.inv_freq")
    renamed = rename(
        {name: tensor for name, tensor in tensors.items() if not name.endswith(buffers)}, names
    )
    if config.get("tie_word_embeddings"):
        renamed.pop("head.weight", None)
    heads = config["num_attention_heads"]
    for name, tensor in renamed.items():
        if ".attn.qkv." in name:
            by_head = tensor.unflatten(0, (heads, 3, -1))
            renamed[name] = by_head.transpose(0, 1).flatten(0, 2).contiguous()
    return renamed


def composed_model(config: dict[str, Any]) -> dict[str, Any]:
    """Return the keys of `model` that DCPythia and DCFormer share."""
    if config.get("n_local_heads", -1) not in (-1, config["n_head"]):
        raise ValueError("n_local_heads: shared keys and values are not supported")
    if not config.get("use_dcmha", True):
        raise ValueError("use_dcmha: false is not supported; the released inference ignores it")
    window_type = config.get("window_type") or "LG"
    if window_type not in WINDOW_TYPES:
        hint = suggest(window_type, WINDOW_TYPES)
        raise ValueError(f"window_type: unknown '{window_type}'{hint}")
    kind = "query" if config.get("query_wise") else "query+key"
    return {
        "dim": config["dim"],
        "depth": config["n_layer"],
        "heads": config["n_head"],
        "norm_eps": config.get("norm_eps", 1e-5),
        "qk_norm": config.get("use_qk_norm", False),
        "head": "untied",
        "attention": {"compose": {"kind": kind}},
    }


def windows(config: dict[str, Any], extra: int) -> list[int | None]:
    """Return the windows of the layers in turn, `extra` keys larger than the released number."""
    size = config.get("window_size", 256)
    if size is None:
        return [None]
    pattern = WINDOW_TYPES[config.get("window_type") or "LG"]
    return [size + extra if has_window else None for has_window in pattern]


def dcpythia_model(config: dict[str, Any]) -> dict[str, Any]:
    """Return the keys of `model` for DCPythia; its mask shows a token and `window_size` others."""
    parallel = config.get("use_parallel_residual", True)
    width = config.get("intermediate_size") or 4 * config["dim"]
    return composed_model(config) | {
        "rotary_share": config.get("rotary_pct", 0.25),
        "rotary_base": config.get("rope_base", 10_000),
        "branches": "parallel" if parallel else "sequential",
        "norm": "layernorm",
        "bias": "all" if config.get("use_linear_bias", True) else "none",
        "ffn": {"width": width, "activation": "gelu"},
        "windows": windows(config, 1),
    }


def dcformer_model(config: dict[str, Any]) -> dict[str, Any]:
    """Return the keys of `model` for DCFormer."""
    if config.get("mgate"):
        raise ValueError("mgate: gates of the feed-forward network are not supported")
    return composed_model(config) | {
        "rotary_base": config.get("rope_base", 500_000),
        "norm": "rmsnorm",
        "ffn": {"width": config["intermediate_size"], "activation": "swiglu"},
        "windows": windows(config, 0),
    }


def composed_tensors(tensors: Tensors, config: dict[str, Any]) -> Tensors:
    """Return the tensors of DCPythia or DCFormer, whose maps are stored for all sides together."""
    import torch

    gated = config["model_type"] == "dcformer"
    names = {
        "tok_embeddings.": "trunk.tokens.",
        "norm.": "trunk.norm.",
        "output.": "head.",
        "layers.": "trunk.blocks.",
        ".attention.wqkv.": ".attn.qkv.",
        ".attention.wo.": ".attn.proj.",
        ".attention.q_norm.scale": ".attn.q_norm.weight",
        ".attention.k_norm.scale": ".attn.k_norm.weight",
        ".attention_norm.": ".norm1.",
        ".ffn_norm.": ".norm2.",
        ".feed_forward.w1.": ".ffn.gate." if gated else ".ffn.up.",
        ".feed_forward.w2.": ".ffn.down.",
        ".feed_forward.w3.": ".ffn.up.",
    }
    maps = {name: tensor for name, tensor in tensors.items() if ".dyn_w_proj." in name}
    renamed = rename({n: t for n, t in tensors.items() if n not in maps}, names)
    for number in range(config["n_layer"]):
        ours = f"trunk.blocks.{number}.attn"
        theirs = f"layers.{number}.attention.dyn_w_proj"
        for part in ("weight", "bias"):
            separate = [f"trunk.blocks.{number}.attention.w{letter}.{part}" for letter in "qkv"]
            if all(name in renamed for name in separate):
                renamed[f"{ours}.qkv.{part}"] = torch.cat([renamed.pop(n) for n in separate])
        # The released classes derive the merged copies (dw_m, qkw_m) from these tensors.
        for name in ("dw1", "qkw", "dd"):
            if f"{theirs}.{name}" not in maps:
                raise ConfigError(f"the weights lack {theirs}.{name}")
        into = maps[f"{theirs}.dw1"].squeeze(1)
        out = maps[f"{theirs}.qkw"].squeeze(0)
        gates = maps[f"{theirs}.dd"].squeeze(1).chunk(len(SIDES), 1)
        for side, place in enumerate(SIDES):
            if config.get("query_wise") and place.endswith("key"):
                continue
            composer = f"{ours}.composers.{place}"
            # Copies, because a file stores no two tensors that share memory.
            copies = {
                f"{composer}.into.weight": into[:, side].T,
                f"{composer}.out": out[side].flatten(1),
                f"{composer}.gate.weight": gates[side].T,
            }
            layout = torch.contiguous_format
            renamed |= {name: part.clone(memory_format=layout) for name, part in copies.items()}
    return renamed


def rename(tensors: Tensors, names: dict[str, str]) -> Tensors:
    """Replace the first part of each pair by the second one in every name.

    A part without a leading dot stands for the beginning of a name only.
    """
    renamed: Tensors = {}
    for name, tensor in tensors.items():
        for old, new in names.items():
            if old.startswith("."):
                name = name.replace(old, new)
            elif name.startswith(old):
                name = new + name.removeprefix(old)
        renamed[name] = tensor
    return renamed


RELEASED = {
    "gpt2": Released(gpt2_model, gpt2_tensors, "vocab_size", "n_positions"),
    "gpt_neox": Released(neox_model, neox_tensors, "vocab_size", "max_position_embeddings"),
    "dcpythia": Released(dcpythia_model, composed_tensors, "vocab_size", "block_size"),
    "dcformer": Released(dcformer_model, composed_tensors, "vocab_size", "block_size"),
}


if __name__ == "__main__":
    sys.exit(main())
