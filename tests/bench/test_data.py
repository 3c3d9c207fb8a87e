"""The benchmark of the preparation of batches; its times decide nothing."""

from pathlib import Path

import pytest
from helpers import noise_images
from helpers.tables import read_table

from lit_attn.bench.__main__ import main
from lit_attn.bench.data import measure_wait, read_data
from lit_attn.schema.yaml_text import format_yaml

RECIPE = {
    "kind": "cifar100",
    "batch_size": 8,
    "augment": ["autoaugment", "normalize", "erasing", "mix"],
}


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """Write an experiment and 40 images of 8 x 8 pixels; return their folder."""
    noise_images.write(tmp_path / "images.npz")
    (tmp_path / "small.yaml").write_text(format_yaml({"data": RECIPE}))
    return tmp_path


@pytest.mark.process
def test_the_table_has_a_row_for_each_step_and_number_of_workers(files: Path) -> None:
    images = ["--images", str(files / "images.npz"), "--out", str(files)]
    size = ["--rounds", "2", "--steps", "2", "--step", "1", "2", "--workers", "0", "1"]
    assert main(["data", str(files / "small.yaml"), *images, *size]) == 0
    rows = read_table(files / "data-cpu.csv")
    assert [(row["step"], row["workers"]) for row in rows] == [
        ("1.0", "0"),
        ("1.0", "1"),
        ("2.0", "0"),
        ("2.0", "1"),
    ]
    for row in rows:
        assert row["experiment"] == f"{files.name}/small"
        assert float(row["rate"]) > 0
        assert float(row["wait"]) >= 0
    assert (files / "data-cpu.md").read_text().startswith("Preparation of training batches")


def test_the_recipe_of_an_experiment_takes_other_images(files: Path) -> None:
    data = read_data(files / "small.yaml", files / "images.npz")
    assert (data.kind, data.batch_size) == ("npz", 8)
    assert data.prepares_on_cpu


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["missing.yaml"], "missing.yaml"),
        (["small.yaml", "--images", "missing.npz"], "--images: "),
        (["small.yaml"], "small.yaml: "),
        (["small.yaml", "--rounds", "1"], "--rounds: an interquartile range"),
    ],
)
def test_bad_arguments_are_one_line(
    arguments: list[str],
    message: str,
    files: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(files)
    assert main(["data", *arguments]) == 2
    error = capsys.readouterr().err.strip()
    assert message in error
    assert "\n" not in error


def test_batches_that_were_ready_before_are_not_counted() -> None:
    """With one worker, the first three batches of a round may have been prepared before it."""
    read = []

    def stream():  # type: ignore[no-untyped-def]
        for number in range(100):
            read.append(number)
            yield number

    measure_wait(stream(), 1, 0.01, 4)
    assert read == list(range(7))
