"""muP: activations keep their size when the width grows from 64 to 1,024 (docs/modern.md)."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.finished_cells import train_cell
from helpers.paths import ROOT
from helpers.training_cells import SMALL_TEXT, digits_cell, result_of, text_cell
from pydantic import ValidationError
from torch import Tensor, nn

from lit_attn.ablate.plan import expand
from lit_attn.attention.layer import Attention
from lit_attn.attention.spec import AttentionSpec
from lit_attn.config.study import read_studies
from lit_attn.models.language import GPTConfig
from lit_attn.models.vit import ViTConfig
from lit_attn.optim.schedules import set_constants
from lit_attn.optim.standard import AdamW
from lit_attn.schema.errors import ConfigError
from lit_attn.schema.yaml_text import format_yaml
from lit_attn.signatures import CausalTokens, ImageLabels

BASE, WIDE = 64, 1024
HEADS = 4
STEPS = 10
FEW_STEPS = 3
RATE = 0.01

TEXT = CausalTokens(context=12, vocabulary=32)
IMAGES = ImageLabels(shape=(3, 8, 8), classes=5)


def make_config(kind: str, dim: int, heads: int = HEADS, **changes: Any) -> Any:
    sizes = {"dim": dim, "depth": 2, "heads": heads, "ffn": {"width": 4 * dim}}
    if kind == "vit":
        return ViTConfig.model_validate(sizes | {"kind": "vit", "patch": 4} | changes)
    return GPTConfig.model_validate(sizes | {"kind": "gpt"} | changes)


def build(config: Any) -> nn.Module:
    torch.manual_seed(0)
    network: nn.Module = config.build(IMAGES if config.kind == "vit" else TEXT)
    return network


def compute_loss(network: Any, kind: str) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    if kind == "vit":
        images = torch.randn(8, 3, 8, 8, generator=generator)
        labels = torch.randint(5, (8,), generator=generator)
        return nn.functional.cross_entropy(network(images), labels)
    tokens = torch.randint(32, (8, 13), generator=generator)
    loss: Tensor = network.nll(tokens[:, :-1], tokens[:, 1:]).mean()
    return loss


def size(x: Tensor) -> float:
    return x.detach().double().square().mean().sqrt().item()


def measure(network: Any, kind: str) -> dict[str, float]:
    """Return the sizes of the logits, of the attention logits and of the residual stream."""
    sizes: dict[str, float] = {}
    blocks = network.blocks if kind == "vit" else network.trunk.blocks
    layer: Attention = blocks[-1].attn
    stream: list[Tensor] = []
    handle = blocks[-1].register_forward_hook(lambda *call: stream.append(call[-1]))
    attention_input: list[Tensor] = []
    other = layer.register_forward_pre_hook(lambda _, values: attention_input.append(values[0]))
    with torch.no_grad():
        if kind == "vit":
            output = network(torch.ones(1, 3, 8, 8).cumsum(-1) / 4 - 1)
        else:
            output = network(torch.arange(12).unsqueeze(0))
        inputs = layer.inputs(attention_input[0], None, kind != "vit", None)
        factor = 1.0 if inputs.factor is None else inputs.factor
        logits = factor * (inputs.q @ inputs.keys.squeeze(2).mT) * layer.head_dim**-0.5
    handle.remove()
    other.remove()
    sizes["logits"] = size(output)
    sizes["attention logits"] = size(logits)
    sizes["stream"] = size(stream[0])
    return sizes


def train(config: Any, kind: str, steps: int = STEPS) -> dict[str, float]:
    """Return the sizes after some steps of Adam."""
    network = build(config)
    optimizer = AdamW(lr=RATE).build(network)
    for _ in range(steps):
        set_constants(optimizer.param_groups, 0, lambda step: RATE)
        optimizer.zero_grad()
        compute_loss(network, kind).backward()
        optimizer.step()
    return measure(network, kind)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "changes"),
    [("gpt", {"head": "tied"}), ("gpt", {"head": "untied"}), ("vit", {})],
    ids=["gpt tied", "gpt untied", "vit"],
)
def test_activations_keep_their_size_with_mup_and_not_without(
    kind: str, changes: dict[str, Any]
) -> None:
    """The heads are as many at every width, so that they grow from 16 to 256.

    At the start, logits of attention are smaller in wide heads; the trained part does not shrink.
    """
    base = train(make_config(kind, BASE, **changes), kind)
    mup = {"dim": BASE, "heads": HEADS}
    scaled = train(make_config(kind, WIDE, mup=mup, **changes), kind)
    unscaled = train(make_config(kind, WIDE, **changes), kind, FEW_STEPS)
    for name, value in base.items():
        assert 1 / 3 < scaled[name] / value < 3, (name, value, scaled[name])
    assert max(unscaled[name] / value for name, value in base.items()) > 10


def test_the_base_model_is_that_without_mup() -> None:
    mup = {"dim": BASE, "heads": HEADS}
    for kind in ("gpt", "vit"):
        plain = build(make_config(kind, BASE))
        scaled = build(make_config(kind, BASE, mup=mup))
        assert [*scaled.state_dict()] == [*plain.state_dict()]
        for a, b in zip(scaled.parameters(), plain.parameters(), strict=True):
            assert torch.equal(a, b)
        assert torch.equal(compute_loss(scaled, kind), compute_loss(plain, kind))


def test_rates_and_initial_values_are_those_of_the_table() -> None:
    """Table 3 of the paper: a width of four times the base."""
    dim = 4 * BASE
    plain = build(make_config("gpt", dim, head="untied"))
    scaled: Any = build(make_config("gpt", dim, head="untied", mup={"dim": BASE, "heads": HEADS}))
    expected = {
        "trunk.tokens.weight": (1.0, 1.0),
        "trunk.positions.weight": (1.0, 1.0),
        "trunk.blocks.0.norm1.weight": (1.0, 1.0),
        "trunk.blocks.0.attn.qkv.weight": (1 / 2, 1 / 4),
        "trunk.blocks.0.attn.proj.weight": (1 / 2, 1 / 4),
        "trunk.blocks.0.ffn.up.weight": (1 / 2, 1 / 4),
        "trunk.blocks.0.ffn.down.weight": (1 / 2, 1 / 4),
        "head.weight": (1 / 4, 1 / 4),
    }
    optimizer = AdamW(lr=RATE, weight_decay=0.1).build(scaled)
    groups = {id(p): group for group in optimizer.param_groups for p in group["params"]}
    for name, (initial, rate) in expected.items():
        value = scaled.get_parameter(name)
        torch.testing.assert_close(value, initial * plain.get_parameter(name))
        group = groups[id(value)]
        assert group["lr_scale"] == rate
        # The product of rate and weight decay stays.
        assert group["lr_scale"] * group["weight_decay"] == pytest.approx(0.1)
    assert sum(len(group["params"]) for group in optimizer.param_groups) == len(
        list(scaled.parameters())
    )


def test_the_logits_of_attention_are_divided_by_the_width_of_heads() -> None:
    scaled: Any = build(make_config("gpt", 256, mup={"dim": BASE, "heads": HEADS}))
    plain: Any = build(make_config("gpt", 256))
    same_heads: Any = build(make_config("gpt", 256, heads=16, mup={"dim": BASE}))
    x = torch.randn(1, 3, 256)
    layer = scaled.trunk.blocks[0].attn
    factor = layer.inputs(x, None, True, None).factor
    # 1 / 64 and not 1 / sqrt(64), with 1 / sqrt(16) in the base model.
    torch.testing.assert_close(factor * 64**-0.5, torch.full_like(factor, 16**0.5 / 64))
    assert plain.trunk.blocks[0].attn.inputs(x, None, True, None).factor is None
    assert same_heads.trunk.blocks[0].attn.inputs(x, None, True, None).factor is None


@pytest.mark.parametrize(
    "attention", ["belief2", "mgk", "dcmha", "xsa", "linear", {"layers": {"last": 1, "use": "mgk"}}]
)
def test_other_mechanisms_are_scaled(attention: Any) -> None:
    spec = AttentionSpec.model_validate(attention)
    network: Any = build(make_config("gpt", 128, attention=spec, mup={"dim": BASE, "heads": 4}))
    compute_loss(network, "gpt").backward()
    optimizer = AdamW(lr=RATE).build(network)
    rates = {group["lr_scale"] for group in optimizer.param_groups}
    assert rates == {1.0, 0.5}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mup": {"dim": 48}}, "mup.dim: 4 heads of a width of 128 have no counterpart in a width"),
        ({"mup": {"dim": 64, "heads": 5}}, "mup.heads: 5 heads do not divide mup.dim 64"),
        ({"init": {"matrices": "torch"}}, "mup: needs numbers in init.matrices and init.embedding"),
        ({"head": "adaptive", "cutoffs": [8]}, "mup: does not scale `head: adaptive`"),
        ({"attention": "ssmax"}, "mup.heads: the width of heads differs from the base, and scale"),
    ],
)
def test_what_cannot_be_scaled_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        make_config("gpt", 128, **{"mup": {"dim": 64, "heads": 4}} | changes)


def test_initial_values_that_know_the_width_are_refused_in_a_vit() -> None:
    with pytest.raises(ValidationError, match="mup: needs `init: timm`, because the values of `xa"):
        make_config("vit", 128, init="xavier", mup={"dim": 64})


def test_another_optimiser_has_no_rates_by_width() -> None:
    cell = digits_cell(
        model={"mup": {"dim": 8}, "dropout": 0.0, "drop_path": 0.0},
        optimizer={"kind": "lion"},
    )
    network = cell.experiment.model.build(cell.experiment.data.signature())
    with pytest.raises(ConfigError, match="optimizer: 'lion' has no learning rates by width"):
        cell.experiment.optimizer.build(network)


def test_mup_belongs_to_the_identity_of_a_cell() -> None:
    plain = text_cell()
    scaled = text_cell(model={"mup": {"dim": plain.experiment.model.dim}})
    assert plain.fingerprint != scaled.fingerprint


@pytest.mark.slow
def test_the_study_of_the_page_trains_every_variant(tmp_path: Path) -> None:
    """The page's example: a rate for each width, here with few steps and a short text."""
    page = (ROOT / "docs" / "modern.md").read_text()
    section = page.partition("## Rates that follow the width")[2].partition("\n## ")[0]
    experiment, study = re.findall(r"```yaml\n(.*?)```", section, re.DOTALL)
    others = {
        "task": "language-modelling",
        "data": {**SMALL_TEXT, "val": SMALL_TEXT["test"], "epoch_steps": 2},
        "training": {"epochs": 1, "accelerator": "cpu"},
    }
    (tmp_path / "gpt.yaml").write_text(experiment + format_yaml(others))
    (tmp_path / "ablations.yaml").write_text(study)
    (source,) = read_studies(tmp_path / "ablations.yaml").values()
    cells = [job.cell for job in expand(source, tmp_path / "runs").jobs if job.seed == 0]
    assert [cell.experiment.model.dim for cell in cells] == [64, 64, 256, 256]
    losses = set()
    for cell in cells:
        folder = train_cell(cell, tmp_path / "cells")
        losses.add(result_of(folder).metrics["val/loss"])
    assert len(losses) == 4
