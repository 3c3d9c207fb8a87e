"""Fine-tuning: the weights to start with, frozen parameters, and rates that decay by layer."""

import os
import re
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from helpers.finished_cells import assert_same_weights, read_weights, train_cell
from helpers.mistakes import find_message
from helpers.stopping import run_until
from helpers.training_cells import digits_cell, folder_of, result_of, text_cell
from pydantic import ValidationError
from safetensors.torch import save_file
from timm.optim import param_groups_layer_decay

from lit_attn.config.cell import Cell
from lit_attn.models import factory
from lit_attn.optim.base import find_depths
from lit_attn.replace import replace_attention
from lit_attn.schema.errors import ConfigError
from lit_attn.train import run_cell
from lit_attn.training.build import build
from lit_attn.training.first_step import find_mistake
from lit_attn.training.start_weights import freeze_parameters, prepare_start

CPU = torch.device("cpu")


def starting_cell(path: Path, *, new: tuple[str, ...] = (), **changes: Any) -> Cell:
    """Return a cell of the digits that starts with the weights in a file."""
    weights = {"name": "mine", "path": str(path), "new": new}
    training = {"epochs": 1, "weights": weights, **changes.pop("training", {})}
    return digits_cell(training=training, **changes)


def build_network(cell: Cell) -> torch.nn.Module:
    return factory.build(cell.experiment.model, cell.experiment.data)


def write_weights(path: Path, cell: Cell) -> dict[str, torch.Tensor]:
    """Write the weights of a new network of `cell`, changed in every number, and return them."""
    weights = {name: tensor + 1 for name, tensor in build_network(cell).state_dict().items()}
    torch.save(weights, path)
    return weights


@pytest.mark.process
def test_a_cell_starts_with_the_weights_of_another_one(uninterrupted: Path, tmp_path: Path) -> None:
    weights = uninterrupted / "checkpoints" / "weights.pt"
    folder = train_cell(starting_cell(weights, optimizer={"lr": 1e-30}), tmp_path)
    assert_same_weights(folder, uninterrupted)
    before = result_of(uninterrupted)
    after = result_of(folder)
    assert after.metrics["test/loss"] == pytest.approx(before.metrics["test/loss"], rel=1e-6)
    assert str(weights) in after.inputs


@pytest.mark.parametrize("form", ["plain", "lightning", "timm", "safetensors", "module"])
def test_weights_are_read_in_the_forms_of_other_programs(form: str, tmp_path: Path) -> None:
    path = tmp_path / ("w.safetensors" if form == "safetensors" else "w.pt")
    weights = write_weights(path, digits_cell())
    if form == "safetensors":
        save_file(weights, path)
    elif form == "lightning":
        named = {f"network.{name}": tensor for name, tensor in weights.items()}
        torch.save({"state_dict": named, "epoch": 3}, path)
    elif form == "timm":
        torch.save({"model": weights, "args": {"lr": 1.0}}, path)
    elif form == "module":
        torch.save({f"module.{name}": tensor for name, tensor in weights.items()}, path)
    cell = starting_cell(path)
    network = build_network(cell)
    assert prepare_start(network, cell.experiment.training) == ""
    for name, tensor in network.state_dict().items():
        assert torch.equal(tensor, weights[name])


def test_a_variant_keeps_the_initial_values_that_only_its_layers_have(tmp_path: Path) -> None:
    path = tmp_path / "w.pt"
    weights = write_weights(path, digits_cell())
    cell = starting_cell(path, model={"attention": "belief2"})
    network = build_network(cell)
    initial = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    message = prepare_start(network, cell.experiment.training)
    further = sorted(initial.keys() - weights.keys())
    assert further
    assert all(".attn." in name for name in further)
    assert message.startswith(f"training.weights: {len(further)} tensors of the network keep their")
    for name, tensor in network.state_dict().items():
        expected = initial[name] if name in further else weights[name]
        assert torch.equal(tensor, expected), name


def test_a_projection_that_is_a_copy_of_w_is_a_copy_of_the_read_one(tmp_path: Path) -> None:
    """Belief2, Proposition 1: with the identity the layer computes what the pretrained one did."""
    path = tmp_path / "w.pt"
    write_weights(path, digits_cell())
    pretrained = build_network(digits_cell())
    pretrained.load_state_dict(torch.load(path))
    residual = {"kind": "split", "activation": "identity", "init": "copy"}
    cell = starting_cell(path, model={"attention": {"residual": residual}})
    network = build_network(cell)
    assert prepare_start(network, cell.experiment.training) == ""
    for block in network.get_submodule("blocks"):
        assert torch.equal(block.attn.residual.projected.weight, block.attn.proj.weight)
    images = torch.randn(2, *cell.experiment.data.signature().shape, dtype=torch.double)
    networks = [built.eval().double() for built in (network, pretrained)]
    with torch.no_grad():
        torch.testing.assert_close(networks[0](images), networks[1](images))


def test_a_standard_layer_leaves_out_what_a_mechanism_has_learned(tmp_path: Path) -> None:
    path = tmp_path / "w.pt"
    weights = write_weights(path, digits_cell(model={"attention": "belief2"}))
    network = build_network(digits_cell())
    assert prepare_start(network, starting_cell(path).experiment.training) == ""
    assert all(torch.equal(t, weights[name]) for name, t in network.state_dict().items())


def test_a_new_head_is_named(tmp_path: Path) -> None:
    path = tmp_path / "w.pt"
    weights = write_weights(path, digits_cell())
    weights["head.weight"] = torch.ones(100, 16)
    torch.save(weights, path)
    network = build_network(digits_cell())
    message = r"'head.weight' has the shape \(100, 16\) in the file and \(10, 16\) in the network"
    with pytest.raises(ConfigError, match=message):
        prepare_start(network, starting_cell(path).experiment.training)
    head = network.get_parameter("head.weight").clone()
    prepare_start(network, starting_cell(path, new=("head.*",)).experiment.training)
    assert torch.equal(network.get_parameter("head.weight"), head)
    assert torch.equal(network.get_parameter("blocks.0.norm1.weight"), torch.full((16,), 2.0))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"remove": "head.bias"}, "the file lacks head.bias; change the model, or add"),
        ({"add": "decoder.weight"}, "the network lacks decoder.weight; change the model, or add"),
        ({"new": "haed.*"}, "training.weights.new: 'haed.*' matches no parameter; did you mean"),
        ({"text": "not weights"}, "cannot be read as weights: "),
        ({"content": {"epoch": 1}}, "has no tensors by name"),
    ],
)
def test_weights_that_do_not_fit_are_one_line_before_the_first_cell(
    change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    path = tmp_path / "w.pt"
    weights = write_weights(path, digits_cell())
    if "remove" in change:
        del weights[change["remove"]]
        torch.save(weights, path)
    elif "add" in change:
        torch.save(weights | {change["add"]: torch.ones(1)}, path)
    elif "text" in change:
        path.write_text(change["text"])
    elif "content" in change:
        torch.save(change["content"], path)
    new = (change["new"],) if "new" in change else ()
    assert message in find_message(starting_cell(path, new=new))


def test_weights_that_change_make_no_cell_stale_by_their_time_alone(tmp_path: Path) -> None:
    """The shapes of a file are read again after a change."""
    path = tmp_path / "w.pt"
    weights = write_weights(path, digits_cell())
    cell = starting_cell(path).model_dump(mode="json")
    assert find_mistake([cell]) is None
    del weights["head.bias"]
    torch.save(weights, path)
    os.utime(path, ns=(1, 1))
    assert find_mistake([cell]) is not None


def test_the_name_of_the_weights_is_in_the_identity_and_their_path_is_not() -> None:
    one = starting_cell(Path("/a/w.pt"))
    assert one.fingerprint == starting_cell(Path("/b/v.pt")).fingerprint
    others = [
        starting_cell(Path("/a/w.pt"), training={"weights": None}),
        starting_cell(Path("/a/w.pt"), new=("head.*",)),
        starting_cell(Path("/a/w.pt"), training={"freeze": ["head.*"]}),
        starting_cell(Path("/a/w.pt"), optimizer={"layer_decay": 0.7}),
    ]
    assert len({cell.fingerprint for cell in [one, *others]}) == 5
    plain = digits_cell()
    assert digits_cell(training={"weights": None, "freeze": []}).fingerprint == plain.fingerprint
    assert digits_cell(optimizer={"layer_decay": None}).fingerprint == plain.fingerprint


@pytest.mark.process
def test_frozen_parameters_do_not_change_and_a_stopped_cell_continues(tmp_path: Path) -> None:
    cell = digits_cell(training={"epochs": 1, "freeze": ["patch_embed.*", "blocks.0.*", "pos*"]})
    names = [name for name, _ in build_network(cell).named_parameters()]
    start = build(cell, CPU).task.network.state_dict()
    before = {name: tensor.clone() for name, tensor in start.items()}
    undisturbed = train_cell(cell, tmp_path / "undisturbed")
    after = read_weights(undisturbed)
    frozen = [name for name in names if torch.equal(before[name], after[name])]
    assert any(name.startswith("blocks.0.") for name in frozen)
    expected = [name for name in names if re.match(r"patch_embed\.|blocks\.0\.|pos", name)]
    assert set(frozen) >= set(expected)
    assert not any(name.startswith(("blocks.1.", "head.")) for name in frozen)
    stopped = folder_of(cell, tmp_path / "stopped")
    run_until(2, stopped)
    run_cell(stopped)
    assert_same_weights(stopped, undisturbed)


@pytest.mark.parametrize(
    ("patterns", "message"),
    [
        (["block.0.*"], "training.freeze: 'block.0.*' matches no parameter; did you mean 'blocks"),
        (["*"], "training.freeze: freezes all parameters, so nothing is trained"),
    ],
)
def test_a_wrong_pattern_is_one_line(patterns: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        freeze_parameters(build_network(digits_cell()), patterns)


def test_rates_decay_by_layer_as_in_timm() -> None:
    model = timm.create_model("vit_tiny_patch16_224", depth=3, embed_dim=24, num_heads=3)
    by_timm = param_groups_layer_decay(
        model, 0.05, no_weight_decay_list=model.no_weight_decay(), layer_decay=0.65
    )
    scales = {}
    for group in by_timm:
        for parameter in group["params"]:
            scales[id(parameter)] = group["lr_scale"]
    names = {name: scales[id(parameter)] for name, parameter in model.named_parameters()}
    replace_attention(model, "standard")
    depths, output = find_depths(model)
    ours = {name: 0.65 ** (output - depths[id(p)]) for name, p in model.named_parameters()}
    assert ours == pytest.approx(names)
    assert len(set(ours.values())) == 5


@pytest.mark.parametrize(
    "optimizer",
    [
        {"kind": "adamw", "weight_decay": 0.1, "decay": "weights"},
        {"kind": "sgd"},
        {"kind": "lion"},
        {"kind": "muon", "adamw": {"lr": 1e-4}},
        {"kind": "module", "import": "torch.optim:RAdam"},
    ],
)
def test_every_optimiser_has_rates_by_layer(optimizer: dict[str, Any]) -> None:
    cell = digits_cell(optimizer={"layer_decay": 0.5, "lr": 1e-2, **optimizer})
    network = build_network(cell)
    built = cell.experiment.optimizer.build(network, fused=False)
    plain = digits_cell(optimizer={"lr": 1e-2, **optimizer}).experiment.optimizer
    factors = {}
    for group in plain.build(network, fused=False).param_groups:
        for parameter in group["params"]:
            factors[id(parameter)] = (group.get("lr_scale", 1.0), group["weight_decay"])
    depths, output = find_depths(network)
    assert output == 3
    covered = 0
    for group in built.param_groups:
        for parameter in group["params"]:
            factor, decay = factors[id(parameter)]
            assert group["lr_scale"] == pytest.approx(factor * 0.5 ** (3 - depths[id(parameter)]))
            assert group["weight_decay"] == decay
            covered += 1
    assert covered == len(list(network.parameters()))


def test_the_head_has_the_complete_rate_where_adamw_has_nothing_of_the_blocks() -> None:
    """Muon leaves to AdamW the parameters outside of the blocks alone, if these have no vectors."""
    changes = {"norm": "rmsnorm-unweighted", "head": "untied", "positions": "rotary"}
    cell = text_cell(model=changes, optimizer={"kind": "muon", "layer_decay": 0.5, "lr": 3e-4})
    network = build_network(cell)
    optimizer = cell.experiment.optimizer.build(network, fused=False)
    scales = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            scales[id(parameter)] = group["lr_scale"]
    by_name = {name: scales[id(parameter)] for name, parameter in network.named_parameters()}
    ratio = cell.experiment.optimizer.adamw.lr / 3e-4
    assert by_name["head.weight"] == pytest.approx(ratio)
    assert by_name["trunk.tokens.weight"] == pytest.approx(ratio * 0.5**3)


@pytest.mark.process
def test_a_training_with_rates_by_layer_continues_exactly(tmp_path: Path) -> None:
    cell = text_cell(optimizer={"layer_decay": 0.5}, training={"epochs": 2})
    undisturbed = train_cell(cell, tmp_path / "whole")
    folder = folder_of(cell, tmp_path / "stopped")
    run_until(3, folder)
    run_cell(folder)
    assert_same_weights(folder, undisturbed)
    plain = read_weights(train_cell(text_cell(training={"epochs": 2}), tmp_path / "plain"))
    first = next(iter(plain))
    assert not torch.equal(plain[first], read_weights(undisturbed)[first])


def test_a_factor_that_does_not_decay_is_refused() -> None:
    with pytest.raises(ValidationError, match="less than 1"):
        digits_cell(optimizer={"layer_decay": 1.5})
