"""Choices that do not fit together are errors with their line, without an import of Lightning."""

from pathlib import Path

import pytest
import torch
from helpers import studies
from helpers.commands import run_new_python
from helpers.paths import EXPERIMENTS, ROOT
from pydantic import ValidationError

from lit_attn.ablate.__main__ import main
from lit_attn.ablate.variants import resolve
from lit_attn.config.experiment import Experiment
from lit_attn.config.source import load
from lit_attn.models import factory
from lit_attn.schema.errors import ConfigError, find_nearest_divisor
from lit_attn.schema.plugins import load_parts
from lit_attn.schema.yaml_text import Mapping

# A change of one variant, and the error message.
MISTAKES = [
    ("kv_heads: 3", "model: attention.kv_heads: 3 key heads do not divide 2 heads; the nearest that"
     " do are 2"),
    ("model.patch: 3", "model: patch: patches of 3 do not tile images of 8 x 8; the nearest that do"
     " are of 2"),
    ("optimizer.betas: [0.9, 1.2]", "optimizer.betas.1: input should be less than 1, not 1.2"),
    ("optimizer.betas: [-0.1, 0.9]", "optimizer.betas.0: input should be greater than or equal to"),
    ("data.batch_size: 1201", "data: batch_size: 1201 is more than the 1200 samples of an epoch;"
     " 1200 at most"),
    ("data.validation: 9", "data.validation: '9' is not a choice"),
    ("{attention: linear, model.local_self_attention: true}",
     "model: local_self_attention: linear keys never form the logits"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "message"), MISTAKES, ids=[change for change, _ in MISTAKES])
def test_a_variant_that_does_not_fit_is_refused(tmp_path: Path, change: str, message: str) -> None:
    change = change if change.startswith("{") else f"\n      {change}"
    body = f"baseline: a\ncells:\n  a: {{}}\n  b: {change}"
    with pytest.raises(ConfigError) as caught:
        resolve(studies.study(tmp_path, body))
    line = 10 if change.startswith("{") else 11
    place = f"{tmp_path / 'ablations.yaml'}:{line}: tiny: variant 'b': "
    assert str(caught.value).startswith(place + message)


def test_an_error_names_the_line_of_the_key(tmp_path: Path) -> None:
    experiment = studies.EXPERIMENT.replace(
        "model: {kind: vit, dim: 16, depth: 1, heads: 2, patch: 4, ffn: {width: 32}}",
        "model:\n  kind: vit\n  dim: 16\n  depth: 1\n  heads: 3\n  patch: 4\n  ffn: {width: 32}",
    )
    with pytest.raises(ConfigError, match=r"experiment.yaml:6: tiny: variant 'a': model: heads: 3"):
        resolve(studies.study(tmp_path, "baseline: a\ncells: {a: {}}", experiment))


@pytest.mark.parametrize(
    ("experiment", "section", "changes", "message"),
    [
        (
            "imagenet_local_vit/experiment",
            "data",
            {"sizes": [100]},
            "patches of 16 do not tile images of 100",
        ),
        (
            "imagenet_local_vit/experiment",
            "model",
            {"patch": 15},
            "of 15 do not tile .* do are of 14",
        ),
        ("scenes_segmenter", "model", {"patch": 15}, "tile windows of 32 x 32 .* are of 16"),
        ("scenes_segmenter", "data", {"validation": 2000}, "2000 of 2000 samples leave none"),
        ("python_text_gpt", "model", {"heads": 5}, "5 heads do not divide dim .* no head_dim"),
        (
            "wikitext103_mgk/experiment",
            "model",
            {"cutoffs": [10, 267735]},
            "267735 is beyond the vocabulary",
        ),
        (
            "long_range_arena/listops",
            "data",
            {"train": 3},
            "batch_size: .* is more than the 3 samples",
        ),
    ],
)
def test_models_and_data_that_do_not_fit_are_refused(
    experiment: str, section: str, changes: dict[str, object], message: str
) -> None:
    wikitext = EXPERIMENTS / "wikitext103_mgk"
    parts = [wikitext / "transformer_xl_schedule.py", wikitext / "reversed_positions.py"]
    load_parts([EXPERIMENTS / "imagenet_local_vit" / "imagenet_local_vit.py", *parts])
    sections = load(EXPERIMENTS / f"{experiment}.yaml")
    for key, value in changes.items():
        sections[section][key] = value
    with pytest.raises(ValueError, match=message):
        Experiment.model_validate(sections)


def test_a_dry_run_reports_a_mistake_without_lightning_and_compiler(tmp_path: Path) -> None:
    studies.write(tmp_path, "baseline: a\ncells: {a: {}, b: {kv_heads: 3}}")
    code = (
        "import sys; from lit_attn.ablate.__main__ import main\n"
        "code = main(['ablations.yaml', '--dry-run'])\n"
        "heavy = {'lightning', 'torch._dynamo'} & set(sys.modules)\n"
        "sys.exit(', '.join(heavy) or code)"
    )
    done = run_new_python(tmp_path, "-c", code)
    assert done.returncode == 2
    assert done.stderr.startswith("ablations.yaml:8: tiny: variant 'b': model: attention.kv_heads")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("change", "line", "message"),
    [
        ("{model.depth: 2}", "ablations.yaml:10", "match: parameters: "),
        (
            "{similarity: {kind: mixture, prior: clamped, prior_scope: position, positions: 3}}",
            "ablations.yaml:10",
            "model: 5 tokens, but the mixture's weights are for 3 positions",
        ),
    ],
)
def test_a_dry_run_with_params_names_the_variant(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], change: str, line: str, message: str
) -> None:
    """Only the built model can detect these mistakes; the variant has changed the model."""
    path = studies.write(tmp_path, f"baseline: a\ncells:\n  a: {{}}\n  b: {change}")
    assert main([str(path), "--dry-run"]) == 0
    capsys.readouterr()
    assert main([str(path), "--dry-run", "--params"]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"{tmp_path / line}: tiny: variant 'b': {message}")


def test_a_model_that_cannot_be_built_is_a_configuration_error() -> None:
    """The failure of such a cell is classified as a bad configuration."""
    sections: Mapping = load(ROOT / "experiments" / "digits_vit.yaml")
    experiment = Experiment.model_validate(sections)
    spec = experiment.model.attention.model_copy(update={"kv_heads": 7})
    model = experiment.model.model_copy(update={"attention": spec})
    with pytest.raises(ConfigError, match="model: kv_heads: 7 key heads do not divide"):
        factory.build(model, experiment.data, device=str(torch.device("meta")))


def test_the_nearest_divisor_is_found() -> None:
    divisors = [find_nearest_divisor(number, 12) for number in (1, 3, 5, 7, 8, 9, 99)]
    assert divisors == [1, 3, 4, 6, 6, 6, 12]
    assert find_nearest_divisor(7, 10**400 + 1) in range(1, 10**400)
    assert find_nearest_divisor(10**300, 2 * 10**300 + 3) == 1


def test_a_loss_that_the_task_would_ignore_is_refused() -> None:
    path = ROOT / "experiments" / "python_text_gpt.yaml"
    smoothed = {"loss": {"kind": "cross-entropy", "label_smoothing": 0.1}}
    with pytest.raises(ValidationError, match="modelling` has a loss of its own; remove `loss`"):
        Experiment.model_validate({**load(path), **smoothed})
    default = Experiment.model_validate({**load(path), "loss": {"kind": "cross-entropy"}})
    assert default == Experiment.model_validate(load(path))
