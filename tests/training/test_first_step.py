"""Check before the first cell: a training step and an evaluation of each variant on real data."""

import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from helpers import studies
from helpers.commands import run_python
from helpers.fake_cells import result
from helpers.fake_gpu import rehearsal
from helpers.paths import ROOT
from helpers.training_cells import text_cell

from lit_attn import signatures
from lit_attn.ablate.launch import find_proven
from lit_attn.ablate.plan import Matrix, expand
from lit_attn.attention import flex
from lit_attn.checks import layers
from lit_attn.data.log import collect_warnings
from lit_attn.schema import plugins
from lit_attn.tasks import classification
from lit_attn.training import first_step
from lit_attn.training.first_step import Mistake, find_mistake

MINE = """
from typing import ClassVar
import lightning as L
from torch import nn
from lit_attn import Normaliser, NormaliserConfig


class Plain(L.LightningModule):
    def __init__(self, network):
        super().__init__()
        self.network = network

    def training_step(self, batch, index):
        images, labels = batch
        return nn.functional.cross_entropy(self.network(images), labels)

    def validation_step(self, batch, index):
        images, labels = batch
        self.log("loss", nn.functional.cross_entropy(self.network(images), labels))


class ThreeParts(Plain):
    def training_step(self, batch, index):
        images, labels, weights = batch
        return nn.functional.cross_entropy(self.network(images), labels)


class WrongEvaluation(Plain):
    def validation_step(self, batch, index):
        self.log("loss", nn.functional.cross_entropy(self.network(batch[0]), batch[1][:2]))


class NotFinite(Plain):
    def training_step(self, batch, index):
        return super().training_step(batch, index) / 0


class Broken(Normaliser):
    def forward(self, logits, visible):
        # The trial of the part has two samples.
        return (logits - logits) / (len(logits) < 3)


class BrokenConfig(NormaliserConfig, kind="broken"):
    def build(self, shape):
        return Broken(self, shape)

    def reference(self, module, logits, visible):
        return logits
"""

BODY = "baseline: a\nparts: [mine.py]\ncells: {a: {}, b: {optimizer.lr: 1}}"
ALONE = "baseline: a\ncells: {a: {}, b: {optimizer.lr: 1}, c: {attention: belief2}}"


def write_study(folder: Path, task: str, body: str = BODY, measures: str = "") -> Matrix:
    """Write a study with the classes of MINE, and return its cells."""
    (folder / "mine.py").write_text(MINE)
    written = studies.EXPERIMENT
    if task:
        written += f"task: {{kind: module, import: 'mine:{task}'{measures}}}\n"
        body += "\nmetric: {name: val/loss, label: loss, goal: min}"
    return expand(studies.study(folder, body, written), folder / "runs")


@pytest.fixture(autouse=True)
def _forget_mine() -> Iterator[None]:
    search_path = list(sys.path)
    yield
    sys.path[:] = search_path
    sys.modules.pop("mine", None)


def check(matrix: Matrix) -> Mistake | None:
    """Check the first cell of each variant with a step."""
    cells = [job.config for job in matrix.jobs if job.seed == 0]
    return find_mistake(cells, untried=range(len(cells)))


def check_wrong(matrix: Matrix) -> Mistake:
    """Return the mistake in the cells of a study, whose message must be one line."""
    mistake = check(matrix)
    assert mistake is not None
    assert "\n" not in mistake.message
    return mistake


@pytest.mark.parametrize(
    ("task", "message"),
    [
        (
            "ThreeParts",
            r"the first step: \S+/mine.py:24: ValueError: not enough values to unpack"
            r" \(expected 3, got 2\); the training batch is images \(64, 1, 8, 8\), labels \(64,\)",
        ),
        (
            "WrongEvaluation",
            r"the first step: \S+/mine.py:30: ValueError: Expected input batch_size .*;"
            r" the batch of val is images \(\d+, 1, 8, 8\), labels \(\d+,\)",
        ),
        (
            "NotFinite",
            "the first step: loss is inf at step 0, although the output of every module is finite",
        ),
    ],
)
def test_a_mistake_in_an_own_task_is_one_line(tmp_path: Path, task: str, message: str) -> None:
    assert re.fullmatch(message, check_wrong(write_study(tmp_path, task)).message)


def test_a_measure_that_is_not_logged_is_found(tmp_path: Path) -> None:
    mistake = check_wrong(write_study(tmp_path, "Plain", measures=", measures: [loss, wrongg]"))
    assert mistake.message.startswith("task: validation_step does not log 'wrongg' of `measures`")


def test_the_first_module_that_is_not_finite_is_named(tmp_path: Path) -> None:
    body = BODY.replace("a: {}", "a: {}, c: {attention: {normaliser: broken}}")
    mistake = check_wrong(write_study(tmp_path, "", body))
    assert re.fullmatch(
        r"model: loss is nan at step 0; the first module whose output is not finite is"
        r" 'blocks\.0\.attn\.\w+' \(Broken, \S+/mine.py:38\)",
        mistake.message,
    )


def test_a_mistake_of_lit_attn_in_a_step_is_told_as_such(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(plugins, "FILE_HASHES", {})
    monkeypatch.setattr(plugins, "PACKAGE_VERSIONS", {})
    monkeypatch.delattr(classification, "_sum_per_sample")
    mistake = check_wrong(write_study(tmp_path, "", ALONE))
    assert mistake.is_own
    assert re.match(
        r"the first step: this is a mistake of lit_attn \(NameError: .*classification\.py:\d+\); "
        r"its traceback is in \S+, please report it; the batch of val is images ",
        mistake.message,
    )


def test_a_check_that_ends_early_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    matrix = write_study(tmp_path, "", ALONE)
    monkeypatch.delattr(first_step, "prepare_for_devices")
    with collect_warnings() as warnings:
        assert check(matrix) is None
    assert len(warnings) > 0
    assert warnings[0].startswith("the check of a variant ended early: ")
    assert "NameError: name 'prepare_for_devices'" in warnings[0]


def test_a_step_for_which_the_machine_has_no_memory_is_not_silent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    matrix = write_study(tmp_path, "", ALONE)
    monkeypatch.setattr(first_step, "make_step", Mock(side_effect=MemoryError("no room")))
    with collect_warnings() as warnings:
        assert check(matrix) is None
    assert warnings == ["the first step of a variant was not checked: MemoryError: no room"]


def test_a_result_of_the_present_code_proves_its_variant(tmp_path: Path) -> None:
    matrix = expand(studies.study(tmp_path, ALONE), tmp_path / "runs")
    assert find_proven([matrix]) == set()
    done = matrix.jobs[1]
    done.folder.mkdir(parents=True)
    record = result(done.cell)
    record.write(done.folder / "result.json")
    assert find_proven([matrix]) == {("tiny", "b")}
    stale = record.model_copy(update={"inputs": {str(tmp_path / "ablations.yaml"): "old"}})
    stale.write(done.folder / "result.json")
    assert find_proven([matrix]) == set()


def test_the_page_has_the_parts_of_every_batch() -> None:
    page = (ROOT / "docs" / "own-tasks.md").read_text(encoding="utf-8")
    members = [value for value in vars(signatures).values() if isinstance(value, type)]
    named = [member for member in members if getattr(member, "batch_names", ())]
    assert len(named) == 8
    for member in named:
        (row,) = [line for line in page.splitlines() if f"(`{member.__name__}`)" in line]
        places = [row.split("|")[2].index(f" {name} (") for name in member.batch_names]
        assert places == sorted(places)


@pytest.mark.process
def test_a_study_with_a_wrong_task_starts_no_cell(tmp_path: Path) -> None:
    """On several cores, several processes find the mistake, each in another variant."""
    cells = ", ".join(f"v{n}: {{training.clip: {1 + n}}}" for n in range(9))
    write_study(tmp_path, "ThreeParts", f"baseline: v0\nparts: [mine.py]\ncells: {{{cells}}}")
    done = run_python(tmp_path, "-m", "lit_attn.ablate", "ablations.yaml")
    assert done.returncode == 2
    assert re.fullmatch(
        r"ablations.yaml:\d+: tiny: variant 'v0': the first step: \S+/mine.py:24: .*"
        r"; \S+first-step.log has the traceback\n",
        done.stderr,
    )
    assert "training_step" in (tmp_path / "runs" / "first-step.log").read_text()
    assert list((tmp_path / "runs").glob("*")) == [tmp_path / "runs" / "first-step.log"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU to run on")
def test_the_step_of_the_check_compiles_no_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """A compilation of flex_attention took half a minute on a GPU, before any cell had begun."""
    calls: list[str] = []
    compiled = flex.weighted_sums

    def count(*arguments: Any) -> Any:
        calls.append("flex")
        return compiled(*arguments)

    cell = text_cell(model={"attention": "belief2", "dim": 32}, training={"accelerator": "cuda"})
    with rehearsal():
        monkeypatch.setattr(flex, "_compiled", lambda: count)
        # The simulated GPU computes no numbers.
        monkeypatch.setattr(layers, "require_formulas", lambda *arguments: None)
        assert find_mistake([cell.model_dump(mode="json")], untried=[0]) is None
        assert calls == []
