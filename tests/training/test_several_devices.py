"""The check before the first cell: models that several devices cannot train."""

from typing import Any

import pytest
from helpers.training_cells import digits_cell, scenes_cell, text_cell

from lit_attn.training.first_step import find_mistake

pytestmark = pytest.mark.slow


def own_model(name: str, devices: int = 2) -> dict[str, Any]:
    cell = digits_cell(training={"devices": devices}).model_dump(mode="json", by_alias=True)
    cell["experiment"]["model"] = {"kind": "module", "import": f"helpers.normed_network:{name}"}
    return cell


def written(cell: Any) -> dict[str, Any]:
    return cell.model_dump(mode="json", by_alias=True)


def test_unused_parameters_are_named_in_one_line() -> None:
    mistake = find_mistake([own_model("Normed"), own_model("Wasteful")])
    assert mistake is not None
    number, error = mistake.number, mistake.message
    assert number == 1
    assert "\n" not in error
    assert error == (
        "training.devices: 2 devices need a gradient for every parameter, but the model's output "
        "does not depend on extra.weight, extra.bias; leave them out, or set the attribute "
        "`leaves_parameters_unused = True` of their module"
    )


@pytest.mark.parametrize(("name", "devices"), [("Wasteful", 1), ("Declared", 2), ("Normed", 2)])
def test_models_that_train_are_accepted(name: str, devices: int) -> None:
    assert find_mistake([own_model(name, devices)]) is None


@pytest.mark.parametrize("name", ["Grouped", "Untracked"])
def test_statistics_that_cannot_be_shared_are_named_in_one_line(name: str) -> None:
    assert find_mistake([own_model(name, 1)]) is None
    mistake = find_mistake([own_model(name, 2)])
    assert mistake is not None
    assert mistake[1].startswith("model: norm (")
    assert "\n" not in mistake[1]


def test_the_packages_parts_are_accepted() -> None:
    cells = []
    for residual, similarity in (
        ("full", "dot"),
        ("full", "mixture"),
        ("full", "linear"),
        ("perpendicular", "mixture"),
        # The value alone has no similarity of a query with keys.
        ("value", "dot"),
    ):
        model = {"attention": {"residual": residual, "similarity": similarity}}
        cells += [make(model=model, training={"devices": 2}) for make in (digits_cell, text_cell)]
    assert find_mistake([written(cell) for cell in cells]) is None


def test_other_heads_are_accepted(tmp_path: Any) -> None:
    """The outputs of these heads do not pass the forward function of an image classifier."""
    devices = {"devices": 2}
    cells = [
        text_cell(model={"head": "adaptive", "cutoffs": [5, 20]}, training=devices),
        text_cell(model={"head": "untied"}, training=devices),
        scenes_cell(tmp_path, training=devices),
    ]
    assert find_mistake([written(cell) for cell in cells]) is None
