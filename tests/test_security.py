"""Tests of untrusted files: studies, records and checkpoints execute no code."""

import json
import os
import pickle
from pathlib import Path

import pytest
import torch
from helpers import fake_study, studies
from helpers.training_cells import digits_cell, folder_of
from hypothesis import given, settings
from hypothesis import strategies as st

from lit_attn.ablate.plan import expand
from lit_attn.config.study import read_studies
from lit_attn.judging.prepare import Choices
from lit_attn.judging.runs import prepare_metrics
from lit_attn.judging.table import read_table
from lit_attn.report import write_reports
from lit_attn.schema.errors import ConfigError
from lit_attn.schema.names import is_file_name
from lit_attn.train import run_cell

OUTSIDE = ["..", ".", "../up", "/etc", "a/b", ".hidden", "", " ", "a b", "x" * 121, "\u202e"]


class Payload:
    """Object that runs a command when it is unpickled."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> object:
        return os.system, (self.command,)


@pytest.mark.parametrize("name", OUTSIDE)
def test_the_name_of_a_variant_cannot_lead_out_of_its_folder(tmp_path: Path, name: str) -> None:
    study = studies.study(tmp_path, f'baseline: a\ncells: {{a: {{}}, "{name}": {{zz: with}}}}')
    with pytest.raises(ConfigError, match="cannot name a folder"):
        expand(study, tmp_path / "runs")


@pytest.mark.parametrize("name", OUTSIDE)
def test_the_name_of_a_study_cannot_lead_out_of_the_output(tmp_path: Path, name: str) -> None:
    path = studies.write(tmp_path, "baseline: a\ncells: {a: {}, b: {zz: with}}")
    path.write_text(path.read_text().replace("  tiny:", f'  "{name}":'))
    (study,) = read_studies(path).values()
    with pytest.raises(ConfigError, match="cannot name a folder"):
        expand(study, tmp_path / "runs")


def test_a_value_of_an_axis_cannot_name_a_path(tmp_path: Path) -> None:
    study = studies.study(tmp_path, "baseline: ..\naxes: {data.root: [../../etc, ..]}")
    with pytest.raises(ConfigError, match="cannot name a folder"):
        expand(study, tmp_path / "runs")


def test_yaml_creates_no_objects(tmp_path: Path) -> None:
    touched = tmp_path / "touched"
    path = studies.write(tmp_path, "baseline: a\ncells: {a: {}}")
    tag = "!!python/object/apply:os.system"
    for evil in (f"{tag} ['touch {touched}']", f"{tag} 'touch'", "!!python/name:os.system x"):
        path.write_text(f"x: {evil}\n" + studies.STUDY)
        with pytest.raises(ConfigError):
            read_studies(path)
    assert not touched.exists()


def test_a_checkpoint_runs_no_code(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A checkpoint with code is set aside like an unreadable one."""
    touched = tmp_path / "touched"
    folder = folder_of(digits_cell(training={"max_steps": 2}), tmp_path)
    (folder / "checkpoints").mkdir()
    torch.save(Payload(f"touch {touched}"), folder / "checkpoints" / "step-000000001.ckpt")
    (folder / "checkpoints" / "step-000000002.ckpt").write_bytes(
        pickle.dumps(Payload(f"touch {touched}"), protocol=2)
    )
    run_cell(folder)
    assert not touched.exists()
    assert capsys.readouterr().out.count("does not load") == 2
    assert (folder / "result.json").exists()


def test_a_plan_cannot_redirect_its_report(tmp_path: Path) -> None:
    folder = fake_study.write_study(tmp_path / "runs")
    plan = folder / "plan.json"
    plan.write_text(plan.read_text().replace('"study": "fake"', '"study": "../../up"'))
    with pytest.raises(ConfigError, match=r"is the plan of '\.\./\.\./up', not of 'fake'"):
        write_reports(tmp_path / "runs", tmp_path / "reports")
    assert {path.name for path in tmp_path.iterdir()} == {"runs"}


@pytest.mark.parametrize(
    "name", ["../up", "..", ".", "/etc", "a/b", "a\\b", ".hidden", "a\0b", "a\nb", "x" * 300]
)
def test_the_names_in_a_plan_cannot_lead_out_of_the_reports(tmp_path: Path, name: str) -> None:
    folder = fake_study.write_study(tmp_path / "runs")
    plan = json.loads((folder / "plan.json").read_text())
    (folder / "plan.json").write_text(json.dumps(plan | {"family": name}))
    with pytest.raises(ConfigError, match=r"family: .* cannot name a folder"):
        write_reports(tmp_path / "runs", tmp_path / "reports")
    assert {path.name for path in tmp_path.iterdir()} == {"runs"}


def test_the_name_of_a_table_cannot_lead_out_of_the_reports(tmp_path: Path) -> None:
    path = tmp_path / "in" / "...csv"
    path.parent.mkdir()
    path.write_text("variant,seed,a/b,../c\n" + "x,0,1,1\nx,1,2,3\ny,0,2,2\ny,1,3,5\n")
    choices = Choices(pairs="seed", baseline="x")
    for prepared in prepare_metrics(read_table(path), choices, ["a/b:max", "../c:max"]):
        assert is_file_name(prepared.study.plan.study)


@given(st.text(max_size=12) | st.sampled_from(OUTSIDE))
@settings(max_examples=200, deadline=None)
def test_a_file_name_stays_in_its_folder(name: str) -> None:
    if is_file_name(name):
        assert Path("reports", name).parent == Path("reports")
        assert Path(os.path.normpath(Path("reports", name))) == Path("reports", name)
