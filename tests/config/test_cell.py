"""Cells in config.yaml files."""

from pathlib import Path

import pytest
from helpers import studies
from helpers.training_cells import digits_cell, text_cell

from lit_attn.ablate.plan import expand
from lit_attn.config.cell import Cell
from lit_attn.schema.errors import ConfigError


def test_a_cell_is_read_as_it_was_written(tmp_path: Path) -> None:
    body = "baseline: a\ncells: {a: {}, b: {attention: belief2, optimizer.lr: 1e-4}}"
    cell = expand(studies.study(tmp_path, body), tmp_path).jobs[1].cell
    cell.write(tmp_path / "config.yaml")
    restored = Cell.read(tmp_path / "config.yaml")
    assert restored == cell
    assert restored.fingerprint == cell.fingerprint
    assert restored.match_to is not None


def test_cells_that_differ_only_in_the_seed_have_one_kind() -> None:
    cells = [
        digits_cell(seed=0),
        digits_cell(seed=1),
        digits_cell(optimizer={"lr": 2.0}),
        digits_cell(training={"devices": 2, "accelerator": "cpu"}),
    ]
    # The identities are computed first, as in a runner. They do not depend on the devices.
    assert len({cell.fingerprint for cell in cells}) == 3
    assert cells[0].kind == cells[1].kind
    assert len({cell.kind for cell in cells}) == 3


@pytest.mark.parametrize(
    ("section", "word", "key"),
    [
        ("training", "grad_clip", "training.clip"),
        ("training", "log_every_n_steps", "training.log_every"),
        ("data", "block_size", "data.context"),
        ("model", "block_size", "data.context"),
        ("model", "n_layer", "model.depth"),
        ("optimizer", "min_lr", "schedule.end"),
        ("schedule", "warmup_steps", "schedule.warmup: N steps"),
    ],
)
def test_a_word_of_another_program_is_answered_with_the_key(
    section: str, word: str, key: str
) -> None:
    written = digits_cell(schedule={"kind": "cosine"}).model_dump(mode="json")
    written["experiment"][section][word] = 1
    with pytest.raises(ConfigError, match=rf"unknown key '{word}'; write '{key}'"):
        Cell.parse(written, "config.yaml")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "config.yaml: cannot be read: No such file or directory"),
        ("a: [", "config.yaml:1: not YAML: "),
        ("{}", "config.yaml: study: this key is required"),
        ("studi: x", "config.yaml: studi: unknown key 'studi'; did you mean 'study'?"),
    ],
)
def test_a_damaged_cell_is_one_error_line(tmp_path: Path, text: str | None, message: str) -> None:
    if text is not None:
        (tmp_path / "config.yaml").write_text(text)
    with pytest.raises(ConfigError, match=r"config.yaml") as caught:
        Cell.read(tmp_path / "config.yaml")
    assert message in str(caught.value)


def test_a_cell_without_its_identity_names_the_folder(tmp_path: Path) -> None:
    (tmp_path / "belief" / "0-0123456789").mkdir(parents=True)
    with pytest.raises(ConfigError) as caught:
        Cell.read(tmp_path / "belief" / "0" / "config.yaml")
    folder = tmp_path / "belief" / "0"
    hint = f"did you mean '{folder}-0123456789'?"
    assert str(caught.value) == f"{folder}: is not the folder of a cell; {hint}"


def test_floors_depend_on_the_data_and_on_the_number_of_steps() -> None:
    cell = text_cell()
    same = [
        text_cell(optimizer={"lr": 0.5}),
        text_cell(model={"depth": 3}),
        cell.model_copy(update={"seed": 5}),
    ]
    others = [
        text_cell(data={"batch_size": 4}),
        text_cell(data={"context": 8}),
        text_cell(training={"max_steps": 3}),
        text_cell(training={"stretch": 2.0}),
    ]
    assert {other.floor_inputs for other in same} == {cell.floor_inputs}
    assert len({other.floor_inputs for other in [cell, *others]}) == 5
