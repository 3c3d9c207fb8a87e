"""TF32 as a precision: settings of PyTorch during training and evaluation, and refusals."""

from pathlib import Path

import pytest
import torch
from helpers.training_cells import digits_cell, folder_of
from pydantic import ValidationError
from torch import Tensor

from lit_attn.schema.errors import ConfigError
from lit_attn.tasks.classification import Classification
from lit_attn.tasks.tf32 import products_in_tf32, require_tf32
from lit_attn.train import run_cell
from lit_attn.training import fit


def settings() -> tuple[str, bool]:
    """Return the precision of products of matrices, and whether convolutions use TF32."""
    return torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32


def test_settings_hold_in_the_context_and_come_back_after_it() -> None:
    before = settings()
    with products_in_tf32(True):
        assert settings() == ("high", True)
        with products_in_tf32(False):
            assert settings() == ("highest", False)
        assert settings() == ("high", True)
    assert settings() == before


def test_settings_come_back_after_an_error() -> None:
    before = settings()
    with pytest.raises(ZeroDivisionError), products_in_tf32(True):
        _ = 1 / 0
    assert settings() == before


FLOAT32, TF32 = ("highest", False), ("high", True)


@pytest.mark.parametrize(
    ("precision", "evaluation", "trained", "evaluated"),
    [
        ("tf32", "fp32", TF32, FLOAT32),
        ("tf32", "as-training", TF32, TF32),
        # PyTorch would compute convolutions in TF32.
        ("fp32", "as-training", FLOAT32, FLOAT32),
    ],
)
def test_training_and_evaluation_are_in_the_configured_precision(
    precision: str,
    evaluation: str,
    trained: tuple[str, bool],
    evaluated: tuple[str, bool],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    used: dict[bool, set[tuple[str, bool]]] = {True: set(), False: set()}
    forward = Classification.evaluate
    loss = Classification.loss

    def record_loss(task: Classification, batch: list[Tensor]) -> Tensor:
        used[True].add(settings())
        return loss(task, batch)

    def record_evaluation(task: Classification, batch: list[Tensor]) -> tuple[Tensor, Tensor]:
        used[False].add(settings())
        return forward(task, batch)

    monkeypatch.setattr(fit, "require_tf32", lambda device: None)
    monkeypatch.setattr(Classification, "loss", record_loss)
    monkeypatch.setattr(Classification, "evaluate", record_evaluation)
    training = {"precision": precision, "evaluation": evaluation, "accelerator": "auto"}
    before = settings()
    run_cell(folder_of(digits_cell(training={**training, "epochs": 1}), tmp_path))
    assert used == {True: {trained}, False: {evaluated}}
    assert settings() == before


def test_a_cpu_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValidationError, match="tf32 needs a GPU, and `accelerator` is cpu"):
        digits_cell(training={"precision": "tf32"})
    with pytest.raises(ConfigError, match=r"^training.precision: tf32 needs a GPU, but .* 'cpu'"):
        require_tf32(torch.device("cpu"))


@pytest.mark.parametrize(("capability", "is_refused"), [((7, 5), True), ((8, 0), False)])
def test_older_gpus_are_refused(
    capability: tuple[int, int], is_refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "T4")
    if is_refused:
        with pytest.raises(ConfigError, match=r"8.0 or more, but T4 has 7.5. Write fp32."):
            require_tf32(torch.device("cuda"))
    else:
        require_tf32(torch.device("cuda"))


def test_tf32_enters_the_identity() -> None:
    precisions = ("fp32", "tf32", "bf16")
    cells = [
        digits_cell(training={"precision": name, "accelerator": "auto"}) for name in precisions
    ]
    assert len({cell.fingerprint for cell in cells}) == 3
