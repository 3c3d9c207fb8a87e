"""Folders in the layout of the Hugging Face hub.

`export` writes a folder with the weights (model.safetensors), the configuration of the cell without
the paths of this machine (config.json), a model card (README.md), and the code in `parts` if the
network needs it. `read` returns the network of such a folder.
"""

import pickle
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_model, save_model
from torch import nn

from lit_attn.attention.spec import PRESETS, AttentionSpec
from lit_attn.cells.folder import read_result
from lit_attn.cells.inputs import collect_modules
from lit_attn.cells.records import Result
from lit_attn.config.cell import Cell
from lit_attn.files import write_json
from lit_attn.models import factory
from lit_attn.schema.errors import ConfigError
from lit_attn.schema.mistakes import first_line
from lit_attn.schema.publish import hide_in_text, hide_private


def export(folder: Path, out: Path, *, trust_code: bool = False) -> Path:
    """Write the weights that the study evaluates, the configuration and the card; return `out`.

    With `trust_code`, the files in `parts` and their neighbours that they import are copied too.
    Raises ConfigError for a cell without a result, and for one whose network or data need code
    that is not trusted.
    """
    with Cell.open_foreign(folder / "config.yaml", is_trusted=trust_code) as cell:
        result = read_result(folder, cell.fingerprint)
        if result is None:
            raise ConfigError(f"{folder}: has no result; finish it with `lit-attn train {folder}`")
        if out.exists() and any(out.iterdir()):
            raise ConfigError(f"--out: {out} is not empty")
        name = "averaged.pt" if cell.metric.averaged else "weights.pt"
        network = load_network(folder / "checkpoints" / name, cell, "cpu")
        modules = _list_part_files(cell.parts) if trust_code else {}

    out.mkdir(parents=True, exist_ok=True)
    for relative, path in modules.items():
        (out / relative).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, out / relative)
    save_model(network, str(out / "model.safetensors"))
    _write_card(cell, result, out / "README.md", trust_code)
    write_json(out / "config.json", _exported_fields(cell))
    return out


def _list_part_files(parts: Sequence[Path]) -> dict[str, Path]:
    """Return the files of parts and their imported neighbours, by path from the part's folder."""
    files: dict[str, Path] = {}
    paths = [Path(name) for name in collect_modules(parts)] if parts else []
    folders = [part.absolute().parent for part in parts]
    for folder in dict.fromkeys(folders):
        for path in paths:
            if not path.is_relative_to(folder):
                continue
            relative = path.relative_to(folder).as_posix()
            if files.setdefault(relative, path) != path:
                raise ConfigError(f"parts: {path} and {files[relative]} cannot be in one folder")
    return files


def _exported_fields(cell: Cell) -> dict[str, Any]:
    """Return the cell's configuration without the paths of this machine and published weights."""
    fields = hide_private(cell.model_dump(mode="json"))
    fields["parts"] = [part.name for part in cell.parts]
    for model in (fields["experiment"]["model"], fields["match_to"]):
        if model is None:
            continue
        # The exported weights replace published ones.
        model.pop("pretrained", None)
        model.pop("checkpoint", None)
    return fields


def read(folder: Path, *, trust_code: bool) -> nn.Module:
    """Return the network of an exported folder in evaluation mode, on the CPU."""
    path = folder / "config.json"
    weights = path.with_name("model.safetensors")
    remedy = "set trust_code=True"
    with Cell.open_foreign(path, is_trusted=trust_code, remedy=remedy) as cell:
        return load_network(weights, cell, "cpu")


def load_network(path: Path, cell: Cell, device: str) -> nn.Module:
    """Return the cell's network with the weights in `path`; ConfigError if they do not fit."""
    if not path.exists():
        raise ConfigError(f"{path}: is missing. A cell writes its weights there when it finishes.")

    experiment = cell.experiment
    model = factory.resolve(experiment.model, cell.match_to, experiment.data)
    network = factory.build(model, experiment.data, device)
    unfit = (OSError, EOFError, RuntimeError, TypeError, pickle.UnpicklingError, SafetensorError)
    try:
        if path.suffix == ".safetensors":
            load_model(network, str(path))
        else:
            network.load_state_dict(torch.load(path, map_location=device, weights_only=True))
    except unfit as error:
        raise ConfigError(
            f"{path}: are not the weights of this cell ({first_line(error)})"
        ) from error
    return network.eval()


def _write_card(cell: Cell, result: Result, path: Path, has_code: bool) -> None:
    """Write the model card: the template model_card.md with the values of a cell and its result."""
    from huggingface_hub import EvalResult, ModelCard, ModelCardData

    metric = cell.metric
    value = result.metrics[metric.name]
    # The names of the data and of the metric are free text of the user.
    data = hide_in_text(getattr(cell.experiment.data, "name", cell.experiment.data.kind))
    label = hide_in_text(metric.label)
    evaluation = EvalResult(cell.experiment.task.kind, data, data, metric.name, value)
    header = ModelCardData(
        model_name=f"{cell.study}-{cell.variant}",
        library_name="lit_attn",
        eval_results=[evaluation],
    )
    card = ModelCard.from_template(
        header,
        str(Path(__file__).with_name("model_card.md")),
        cell=cell,
        model=cell.experiment.model,
        result=result,
        data=data,
        has_code=has_code,
        label=label,
        value=value * metric.scale,
        attention=_describe_attention(cell.experiment.model.attention),
    )
    card.save(path)


def _describe_attention(attention: AttentionSpec) -> str:
    """Return the presets that equal the mechanism, and its parts that differ from the defaults."""
    descriptions = [name for name, spec in PRESETS.items() if spec == attention]
    parts = attention.identity_json()
    if parts != "{}":
        descriptions.append(parts)
    return ", ".join(descriptions)
