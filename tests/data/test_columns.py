"""Tables of numbers and categories: what is read, left out, standardised and refused."""

import json
import logging
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.finished_cells import read_weights, train_cell
from helpers.training_cells import cell_of, result_of
from sklearn.metrics import r2_score, root_mean_squared_error

from lit_attn.config.cell import Cell
from lit_attn.data.columns import ColumnClasses, ColumnData, ColumnNumbers, read_columns
from lit_attn.models.columns import ColumnTokens, FeatureTransformer, FeatureTransformerConfig
from lit_attn.schema.errors import ConfigError
from lit_attn.signatures import ColumnLabels
from lit_attn.training.build import build

TRAIN = "age,job,grade\n10,cook,b\n20,smith,a\n30,cook,a\n40,baker,b\n"
TEST = "age,job,grade\n25,smith,b\n60,sailor,a\n"


def write(folder: Path, train: str = TRAIN, test: str = TEST, **changes: Any) -> dict[str, Any]:
    """Write two tables and return the configuration that reads them."""
    (folder / "train.csv").write_text(train)
    (folder / "test.csv").write_text(test)
    return {
        "name": "t",
        "train": folder / "train.csv",
        "test": folder / "test.csv",
        "numbers": ["age"],
        "categories": {"job": 3},
        "label": "grade",
        "batch_size": 2,
        **changes,
    }


def read(folder: Path, train: str = TRAIN, test: str = TEST, **changes: Any) -> Any:
    return read_columns(ColumnClasses.model_validate(write(folder, train, test, **changes)))


def test_numbers_are_standardised_by_the_training_rows_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    splits = read(tmp_path)
    deviation = np.std([10, 20, 30, 40])
    expected = (np.array([[25], [60]]) - 25) / deviation
    np.testing.assert_allclose(splits["test"].numbers, expected, rtol=1e-6)
    np.testing.assert_allclose(splits["train"].numbers.std(), 1, rtol=1e-6)
    # baker, cook, smith; a sailor is unknown to train.
    assert splits["train"].categories[:, 0].tolist() == [2, 3, 2, 1]
    assert splits["test"].categories[:, 0].tolist() == [3, 0]
    assert splits["train"].targets.tolist() == [1, 0, 0, 1]
    assert "1 of 2 rows have a value of 'job' that train lacks" in caplog.text


def test_rows_with_an_empty_cell_are_left_out_and_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    train = TRAIN + ",cook,a\n50,,b\n60,,\n"
    splits = read(tmp_path, train)
    assert len(splits["train"].targets) == 4
    (warning,) = [text for text in caplog.messages if "left out" in text]
    assert warning.endswith("3 of 7 rows are left out, because a cell is empty: age (1), job (2)")


def test_a_label_that_is_missing_does_not_turn_numbers_into_names(tmp_path: Path) -> None:
    rows = "".join(f"{i},cook,{label}\n" for i, label in enumerate([2, 10, 9, 0, "", 10]))
    splits = read(tmp_path, "age,job,grade\n" + rows, "age,job,grade\n1,cook,10\n", classes=11)
    assert splits["train"].targets.tolist() == [2, 10, 9, 0, 10]
    assert splits["test"].targets.tolist() == [10]


def test_nan_and_whole_floats_of_a_table_of_numbers(tmp_path: Path) -> None:
    rows = [{"age": 1.5, "job": "cook", "grade": 1.0}, {"age": 3.5, "job": "cook", "grade": 0.0}]
    rows.append({"age": float("nan"), "job": "cook", "grade": 0.0})
    data = write(tmp_path)
    data["train"] = data["test"] = tmp_path / "rows.json"
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    splits = read_columns(ColumnClasses.model_validate(data))
    assert splits["train"].targets.tolist() == [1, 0]
    np.testing.assert_allclose(splits["train"].numbers[:, 0], [-1, 1])


def test_rows_are_held_out_before_the_standardisation(tmp_path: Path) -> None:
    rows = "".join(f"{i**2},cook,{'ab'[i % 2]}\n" for i in range(20))
    splits = read(tmp_path, "age,job,grade\n" + rows, validation=5)
    again = read(tmp_path, "age,job,grade\n" + rows, validation=5)
    assert (len(splits["train"].targets), len(splits["val"].targets)) == (15, 5)
    np.testing.assert_allclose(splits["train"].numbers.mean(), 0, atol=1e-6)
    assert abs(splits["val"].numbers.mean()) > 1e-3
    np.testing.assert_array_equal(splits["val"].numbers, again["val"].numbers)


@pytest.mark.parametrize(
    ("train", "changes", "message"),
    [
        ("age,job,grade\n1,cook,a\nold,cook,b\n", {}, "train.csv: row 1 of 'age' is 'old', which"),
        ("age,job,grade\nNA,cook,a\n2,cook,b\n", {}, "row 0 of 'age' is 'NA', which is no number;"),
        ("age,job,grade\n,cook,a\nnan,cook,b\n", {}, "row 1 of 'age' is 'nan', which is no number"),
        ("age,job,grade\n1_0,cook,a\n2,cook,b\n", {}, "row 0 of 'age' is '1_0', which is no numb"),
        ("age,job,grade\n1,a,a\n2,b,b\n3,c,b\n", {"categories": {"job": 2}}, "job: 2, but train h"),
        ("age,job,grade\n1,cook,a\n2,cook,c\n", {}, "test.csv: row 0 of 'grade' is 'b', no class"),
        ("age,job,grade\n,cook,a\n", {}, "train.csv: no row has all cells; fill the empty ones"),
        (TRAIN, {"numbers": ["aeg"]}, "data.numbers.aeg: .*no column 'aeg'; did you mean 'age'?"),
        (TRAIN, {"validation": 4}, "data.validation: 4 of 4 rows leave none"),
        ("age,job,grade\n1e300,cook,a\n-1e300,cook,b\n", {}, "values of 'age' are too large"),
    ],
)
def test_a_table_that_cannot_be_used_is_one_error(
    train: str, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        read(tmp_path, train, **changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"numbers": [], "categories": {}}, "numbers: needs a column in `numbers` or `categories`"),
        ({"label": "age"}, "label: column 'age' is also named by `numbers.age`; remove one"),
        ({"numbers": ["age", "job"]}, "column 'job' is also named by"),
    ],
)
def test_columns_that_make_no_sense_are_refused(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=message):
        ColumnClasses.model_validate(write(tmp_path, **changes))


def test_the_order_in_which_categories_are_written_changes_nothing(tmp_path: Path) -> None:
    data = write(tmp_path, numbers=[], categories={"age": 4, "job": 3})
    other = data | {"categories": {"job": 3, "age": 4}}
    one, two = (ColumnClasses.model_validate(values) for values in (data, other))
    assert one.identity_json() == two.identity_json()
    assert one.signature() == two.signature() == ColumnLabels(0, (4, 3), 2)
    np.testing.assert_array_equal(
        read_columns(one)["train"].categories, read_columns(two)["train"].categories
    )


def test_a_constant_column_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    splits = read(tmp_path, "age,job,grade\n5,cook,a\n5,cook,b\n")
    assert "data.numbers: 'age' has one value in all rows of train" in caplog.text
    assert not splits["train"].numbers.any()


def test_an_epoch_has_every_row_once_and_a_step_the_same_rows(tmp_path: Path) -> None:
    rows = "".join(f"{i},cook,{'ab'[i % 2]}\n" for i in range(12))
    fields = write(tmp_path, "age,job,grade\n" + rows, batch_size=4)
    data = ColumnData(ColumnClasses.model_validate(fields), 3, torch.device("cpu"))
    batches = [data.batch(step)[0] for step in range(3)]
    assert len(torch.cat(batches).unique()) == 12
    later = ColumnData(ColumnClasses.model_validate(fields), 3, torch.device("cpu"))
    assert torch.equal(later.batch(2)[0], batches[2])
    assert not torch.equal(torch.cat(batches), torch.cat([data.batch(s)[0] for s in (3, 4, 5)]))


def test_the_tokens_equal_the_formula_in_value_and_gradient() -> None:
    """x_j W_j + b_j for a number, row x_j of E_j plus b_j for a category, after the class token."""
    tokens = ColumnTokens(2, (3, 2), 5, None).double()
    numbers = torch.randn(4, 2, dtype=torch.double, requires_grad=True)
    categories = torch.tensor([[0, 1], [3, 0], [1, 2], [2, 2]])
    assert tokens.scales is not None
    assert tokens.values is not None
    tables = tokens.values.split([4, 3])
    rows = []
    for sample in range(4):
        row = [
            tokens.cls_token[0],
            numbers[sample, 0] * tokens.scales[0] + tokens.offsets[0],
            numbers[sample, 1] * tokens.scales[1] + tokens.offsets[1],
            tables[0][categories[sample, 0]] + tokens.offsets[2],
            tables[1][categories[sample, 1]] + tokens.offsets[3],
        ]
        rows.append(torch.stack(row))
    expected = torch.stack(rows)
    actual = tokens(numbers, categories)
    torch.testing.assert_close(actual, expected)
    weights = torch.randn_like(actual)
    inputs = [numbers, *tokens.parameters()]
    theirs = torch.autograd.grad((expected * weights).sum(), inputs)
    ours = torch.autograd.grad((actual * weights).sum(), inputs)
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize(("numbers", "sizes"), [(3, ()), (0, (2, 4)), (2, (3,))])
def test_the_network_takes_numbers_categories_or_both(numbers: int, sizes: tuple[int, ...]) -> None:
    model = FeatureTransformerConfig(dim=16, depth=1, heads=2, ffn={"width": 16})
    network = FeatureTransformer(model, numbers, sizes, 3)
    x = torch.randn(5, numbers)
    ids = torch.ones(5, len(sizes), dtype=torch.long)
    network(x, ids).square().sum().backward()
    for name, parameter in network.named_parameters():
        assert parameter.grad is not None, name


def test_windows_over_columns_are_refused() -> None:
    model = FeatureTransformerConfig(dim=16, depth=1, heads=2, ffn=None, windows=(2,))
    with pytest.raises(ValueError, match="windows: columns have no order"):
        model.check(ColumnLabels(3, (), 2))


def columns_cell(data: dict[str, Any], task: str, metric: str) -> Cell:
    experiment = {
        "task": task,
        "data": data | {"eval_batch_size": 64},
        "model": {
            "kind": "feature-transformer",
            "dim": 16,
            "depth": 1,
            "heads": 2,
            "ffn": {"width": 16},
        },
        "optimizer": {"kind": "adamw", "lr": 3e-3},
        "training": {"epochs": 4, "accelerator": "cpu"},
    }
    return cell_of(experiment, metric={"name": metric})


def write_learnable(folder: Path) -> dict[str, Any]:
    """Write rows whose class is whether x is above 0 or the category is `up`; y is x + 2 up."""
    draw = np.random.default_rng(0)
    for split, count in (("train", 512), ("test", 200)):
        lines = ["x,way,noise,above,y"]
        for x in draw.normal(size=count):
            way = ("up", "down")[int(draw.integers(2))]
            y = x + 2 * (way == "up")
            lines.append(f"{x},{way},{draw.normal()},{int(y > 1)},{y}")
        (folder / f"{split}.csv").write_text("\n".join(lines) + "\n")
    return {
        "name": "t",
        "train": str(folder / "train.csv"),
        "test": str(folder / "test.csv"),
        "numbers": ["x", "noise"],
        "categories": {"way": 2},
        "batch_size": 16,
    }


def test_classes_of_rows_are_learned(tmp_path: Path) -> None:
    data = write_learnable(tmp_path) | {"kind": "column-labels", "label": "above"}
    cell = columns_cell(data, "tabular-classification", "test/accuracy")
    assert result_of(train_cell(cell, tmp_path)).metrics["test/accuracy"] > 0.9


def test_errors_of_a_regression_equal_those_of_scikit_learn(tmp_path: Path) -> None:
    data = write_learnable(tmp_path) | {"kind": "column-targets", "targets": ["y"]}
    cell = columns_cell(data, "regression", "test/rmse")
    folder = train_cell(cell, tmp_path)
    metrics = result_of(folder).metrics
    parts = build(cell, torch.device("cpu"))
    parts.task.network.load_state_dict(read_weights(folder))
    splits = read_columns(ColumnNumbers.model_validate(cell.experiment.data))
    test = splits["test"]
    with torch.no_grad():
        network = parts.task.network.eval()
        predicted = network(torch.from_numpy(test.numbers), torch.from_numpy(test.categories))
    expected = root_mean_squared_error(test.targets, predicted.numpy())
    assert metrics["test/rmse"] == pytest.approx(expected, rel=1e-5)
    assert metrics["test/r2"] == pytest.approx(r2_score(test.targets, predicted.numpy()), rel=1e-4)
    assert metrics["test/r2"] > 0.5


def test_r_squared_is_right_for_targets_far_from_zero(tmp_path: Path) -> None:
    data = write_learnable(tmp_path) | {"kind": "column-targets", "targets": ["y"]}
    for split in ("train", "test"):
        lines = (tmp_path / f"{split}.csv").read_text().splitlines()
        rows = [line.rpartition(",") for line in lines[1:]]
        far = [f"{cells},{101325 + 10 * float(y)}" for cells, _, y in rows]
        (tmp_path / f"{split}.csv").write_text("\n".join([lines[0], *far]) + "\n")
    cell = columns_cell(data, "regression", "test/r2")
    added = {"name": "R2Score", "record_as": "by-name"}
    fields = cell.model_dump(mode="json")
    fields["experiment"]["metrics"] = [added]
    metrics = result_of(train_cell(Cell.model_validate(fields), tmp_path)).metrics
    splits = read_columns(ColumnNumbers.model_validate(cell.experiment.data))
    variance = splits["test"].targets.astype(np.float64).var()
    expected = 1 - metrics["test/rmse"] ** 2 / variance
    assert metrics["test/r2"] == pytest.approx(expected, rel=1e-5)
    assert metrics["test/by-name"] == metrics["test/r2"]


def test_one_test_row_leaves_r_squared_undefined(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    data = write_learnable(tmp_path) | {"kind": "column-targets", "targets": ["y"]}
    lines = (tmp_path / "test.csv").read_text().splitlines()
    (tmp_path / "test.csv").write_text("\n".join(lines[:2]) + "\n")
    cell = columns_cell(data, "regression", "test/rmse")
    metrics = result_of(train_cell(cell, tmp_path)).metrics
    assert math.isfinite(metrics["test/rmse"])
    assert math.isfinite(metrics["test/mae"])
    assert metrics.get("test/r2") is None or math.isnan(metrics["test/r2"])
    messages = [text for text in caplog.messages if "test/r2 is not defined" in text]
    assert len(messages) == 1
