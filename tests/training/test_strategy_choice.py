"""Keys of the strategy and of the recomputation: what is refused, and what they leave unchanged."""

from pathlib import Path
from typing import Any

import pytest
from helpers import studies
from helpers.training_cells import digits_cell, text_cell
from helpers.two_ranks import transformer

from lit_attn.ablate.__main__ import main
from lit_attn.config.cell import Cell
from lit_attn.schema.errors import ConfigError
from lit_attn.training.first_step import find_mistake
from lit_attn.training.several_devices import ShardedStrategy, choose_strategy


def test_neither_enters_the_identity() -> None:
    plain = digits_cell().fingerprint
    for training in (
        {"strategy": "fsdp"},
        {"strategy": "fsdp", "devices": 2},
        {"recompute": "blocks"},
    ):
        assert digits_cell(training=training).fingerprint == plain


def test_one_device_has_nothing_to_shard() -> None:
    training = digits_cell(training={"strategy": "fsdp"}).experiment.training
    assert not training.is_sharded
    assert choose_strategy(transformer("standard"), 1, 1, is_sharded=False) == "auto"
    strategy = choose_strategy(transformer("standard"), 2, 1, is_sharded=True)
    assert isinstance(strategy, ShardedStrategy)


def own_model(name: str, **training: Any) -> dict[str, Any]:
    cell = digits_cell(training=training).model_dump(mode="json", by_alias=True)
    cell["experiment"]["model"] = {"kind": "module", "import": f"helpers.normed_network:{name}"}
    return cell


@pytest.mark.parametrize(
    ("training", "key"),
    [
        ({"strategy": "fsdp", "devices": 2}, "training.strategy: fsdp"),
        ({"recompute": "blocks"}, "training.recompute: blocks"),
    ],
)
def test_a_model_without_known_blocks_is_refused_when_it_is_read(
    training: dict[str, Any], key: str
) -> None:
    Cell.model_validate(own_model("Normed"))
    with pytest.raises(ConfigError) as caught:
        Cell.parse(own_model("Normed", **training), "config.yaml")
    message = str(caught.value)
    assert message.startswith(
        f"config.yaml: experiment: {key}: the attention layer 'attn' is in no"
    )
    assert "\n" not in message


@pytest.mark.parametrize("key", ["training.strategy=fsdp", "training.recompute=blocks"])
def test_a_dry_run_refuses_a_model_without_known_blocks(
    key: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = studies.write(tmp_path, "baseline: a\ncells: {a: {}}\n")
    model = "model={kind: module, import: 'helpers.normed_network:Normed'}"
    changes = ["--set", model, "--set", "training.devices=2", "--set", key]
    assert main([str(path), "--dry-run", *changes]) == 2
    error = capsys.readouterr().err
    assert f"{key.replace('=', ': ')}: the attention layer 'attn' is in no block" in error
    assert error.count("\n") == 1


def test_the_models_of_the_package_are_accepted() -> None:
    training = {"strategy": "fsdp", "devices": 2, "recompute": "blocks"}
    cells = [digits_cell(training=training), text_cell(training=training)]
    assert find_mistake([cell.model_dump(mode="json", by_alias=True) for cell in cells]) is None
