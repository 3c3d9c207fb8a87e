"""Plans: a trial or a run of some seeds does not change the study's plan and report."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from helpers import studies
from helpers.fake_cells import result
from helpers.runs import count_runs, make_body, run_cli

from lit_attn.ablate import status
from lit_attn.ablate.__main__ import main
from lit_attn.ablate.commands.options import parse_settings
from lit_attn.ablate.plan import Matrix, expand
from lit_attn.cells.records import Plan
from lit_attn.report import write_reports
from lit_attn.report.records.read import read_studies
from lit_attn.report.verdicts.judge import judge_study
from lit_attn.schema.errors import ConfigError


def matrix(folder: Path, *settings: str, body: str = "", **how: bool) -> Matrix:
    source = studies.study(folder, body or make_body("ok", "ok-2"))
    return expand(source, folder / "runs", parse_settings(list(settings)), **how)


def plan(folder: Path, name: str = "tiny") -> Plan:
    return Plan.model_validate_json((folder / "runs" / name / "plan.json").read_bytes())


def list_reported_seeds(folder: Path, name: str = "tiny") -> dict[str, list[int]]:
    """Return the seeds of each variant that a report reads."""
    (study,) = read_studies(folder / "runs", [name])
    return {variant.name: list(study.values(variant.name)) for variant in study.plan.variants}


def describe(where: Path) -> str:
    """Return the output of `status` for a folder of runs or of one study."""
    plans = status.read_plans(where)
    return "\n".join(status.describe(plan, status.read_cells(plan, at)) for plan, at in plans)


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ([], "tiny"),
        (["training.max_steps=20"], "tiny@training.max_steps=20"),
        # Order and notation of the settings do not matter.
        (["zz=with", "data.batch_size=8"], "tiny@data.batch_size=8,zz=with"),
        (["training.clip=0.50"], "tiny@training.clip=0.5"),
        # Settings that do not change what a cell computes, and values of the study itself.
        (["training.devices=2", "training.checkpoint_every=5", "training.epochs=2"], "tiny"),
        (["training.devices=2", "training.epochs=3"], "tiny@training.epochs=3"),
    ],
)
def test_a_trial_is_named_by_what_it_changes(
    tmp_path: Path, settings: list[str], name: str
) -> None:
    expanded = matrix(tmp_path, *settings)
    assert (expanded.name, expanded.folder) == (name, tmp_path / "runs" / name)
    assert {job.study for job in expanded.jobs} == {name}


def test_settings_that_cannot_name_a_folder_become_a_hash_and_stand_in_the_title(
    tmp_path: Path,
) -> None:
    data = "{kind: npz, name: mine, path: a, size: 8, channels: 1, classes: 2, batch_size: 4}"
    source = studies.study(tmp_path, make_body("ok"), studies.with_data(data))

    def named(*settings: str) -> tuple[str, str]:
        expanded = expand(source, tmp_path, parse_settings(list(settings)))
        return expanded.name, expanded.title

    assert named("data.path=/b") == ("tiny", "A tiny study")
    first, title = named("data.name=my images")
    assert first.startswith("tiny@")
    assert len(first) == len("tiny@") + 10
    assert title == "A tiny study (with data.name=my images)"
    # Paths are not part of the name.
    assert named("data.path=/c", "data.name=my images")[0] == first
    assert named("data.name=my pictures")[0] != first


def test_a_setting_that_completes_the_study_is_part_of_the_name(tmp_path: Path) -> None:
    experiment = studies.EXPERIMENT.replace("dim: 16, ", "")
    source = studies.study(tmp_path, make_body("ok"), experiment)
    expanded = expand(source, tmp_path, parse_settings(["model.dim=16", "training.devices=2"]))
    assert expanded.name == "tiny@model.dim=16"


@pytest.mark.slow
def test_a_trial_does_not_change_the_study(tmp_path: Path) -> None:
    studies.write(tmp_path, make_body("ok", "ok-2"))
    assert run_cli(tmp_path)[0] == 0
    study_files = [tmp_path / "runs/tiny/plan.json", tmp_path / "reports/tiny/table.md"]
    before = [path.read_bytes() for path in study_files]
    code, output = run_cli(tmp_path, "--set", "training.max_steps=2", "--limit", "1")
    assert code == 0
    name = "tiny@training.max_steps=2"
    assert (
        f"runs/{name}: side study; study tiny does not change\n4 cells: 0 done, 1 to run" in output
    )
    assert f"the table of {name}" in output
    assert [path.read_bytes() for path in study_files] == before
    assert list_reported_seeds(tmp_path) == {"ok": [0, 1], "ok-2": [0, 1]}
    # The plan of a limited run has all cells.
    assert len(plan(tmp_path, name).cells) == 4
    assert plan(tmp_path, name).title == "A tiny study (with training.max_steps=2)"
    assert list_reported_seeds(tmp_path, name) == {"ok": [0], "ok-2": []}
    assert "tiny: A tiny study\n  4 cells: 4 done\n" in describe(tmp_path / "runs")


@pytest.mark.slow
def test_a_smoke_run_has_its_own_folder_in_every_out_folder(tmp_path: Path) -> None:
    """Results of one step must not be mistaken for results of the study."""
    studies.write(tmp_path, make_body("ok"))
    where = ("--out", "runs", "--reports", "reports")
    assert run_cli(tmp_path, "--smoke", *where)[0] == 0
    assert run_cli(tmp_path, *where)[0] == 0
    assert count_runs(tmp_path) == {"ok/0": 1, "ok/1": 1}
    assert sorted(path.name for path in (tmp_path / "reports").iterdir()) == ["tiny", "tiny@smoke"]
    assert matrix(tmp_path, "zz=with", smoke=True).name == "tiny@zz=with,smoke"


def test_records_with_former_rules_stay_readable(tmp_path: Path) -> None:
    """The rules have left the package: the cells that they had ended are missing."""
    planned = matrix(tmp_path)
    planned.write_plan()
    rules = {"stop": "futility", "gate": {"axis": "size", "level": 0.025}}
    folder = tmp_path / "runs" / "tiny"
    content = json.loads((folder / "plan.json").read_text())
    (folder / "plan.json").write_text(json.dumps(content | rules))
    seals = json.loads((folder / "seals.json").read_text())
    seals["entries"][0] |= rules
    (folder / "seals.json").write_text(json.dumps(seals))
    entry = {"variant": "ok-2", "identity": planned.jobs[1].identity, "rule": "futility"}
    (folder / "endings.json").write_text(json.dumps({"entries": [entry]}))
    (study,) = read_studies(tmp_path / "runs")
    assert study.unreadable == []
    assert judge_study(study).next.cells == 4
    # The same decisions are not sealed again.
    planned.write_plan()
    assert len(json.loads((folder / "seals.json").read_text())["entries"]) == 1


def test_a_count_chooses_the_first_seeds_that_the_study_lists(tmp_path: Path) -> None:
    written = studies.study(tmp_path, make_body("ok"))
    study = written.study.model_copy(update={"seeds": (7, 3, 5)})
    source = replace(written, study=study)
    expected = {None: (7, 3, 5), 2: (7, 3), 5: (7, 3, 5, 8, 9), (0, 1): (0, 1)}
    for choice, seeds in expected.items():
        assert expand(source, tmp_path, seeds=choice).seeds == seeds
    # The plan and the table still have all seeds of the study, and no other.
    assert expand(source, tmp_path, seeds=2).plan().seeds == [7, 3, 5]


def test_the_plan_has_every_started_seed(tmp_path: Path) -> None:
    studies.write(tmp_path, make_body("ok", "crashonce"))
    assert run_cli(tmp_path, "--seeds", "9,4")[0] == 1
    # The seeds of the file are planned, and so they are reported as missing.
    assert plan(tmp_path).seeds == [0, 1, 4, 9]
    assert run_cli(tmp_path, "--seeds", "0,")[0] == 1
    assert plan(tmp_path).seeds == [0, 1, 4, 9]
    assert list_reported_seeds(tmp_path) == {"ok": [0, 4, 9], "crashonce": []}
    output = describe(tmp_path / "runs")
    assert output == describe(tmp_path / "runs" / "tiny")
    assert {"3 done", "3 error", "2 missing"} == set(
        output.splitlines()[1].partition("; ")[0].removeprefix("  8 cells: ").split(", ")
    )
    # Seeds of an earlier version of the study do not count.
    studies.write(tmp_path, make_body("ok", "crashonce").replace("cells", "set: {zz: with}\ncells"))
    run_cli(tmp_path, "--limit", "1")
    assert plan(tmp_path).seeds == [0, 1]


def test_seeds_of_a_simultaneous_command_are_in_the_report(tmp_path: Path) -> None:
    """The command that ends last reports the cells of both commands."""
    expanded = matrix(tmp_path)
    for seed in (7, 0):
        (other,) = expand(expanded.source, tmp_path / "runs", seeds=(seed,)).jobs[:1]
        other.write_config()
        result(other.cell).write(other.folder / "result.json")
    (expanded.folder / "ok" / "8-0123456789").mkdir()
    (expanded.folder / "ok" / "x-0123456789").mkdir()
    (expanded.folder / "ok" / "99999999999-0123456789").mkdir()
    expanded.plan().write(expanded.folder / "plan.json")
    assert expanded.plan().seeds == [0, 1, 7]
    assert list_reported_seeds(tmp_path) == {"ok": [0, 7], "ok-2": []}


def test_report_files_have_the_name_of_the_trial(tmp_path: Path) -> None:
    """The name is valid in LaTeX, in HTML and as a folder."""
    expanded = matrix(tmp_path, "training.max_steps=2")
    for job in expanded.jobs:
        result(job.cell).write(job.folder / "result.json")
    expanded.plan().write(expanded.folder / "plan.json")
    (folder,) = write_reports(tmp_path / "runs", tmp_path / "reports")
    assert folder == tmp_path / "reports" / "tiny@training.max_steps=2"
    assert "(with training.max_steps=2)" in (folder / "table.html").read_text()
    assert "label{tab:tiny-training-max-steps-2}" in (folder / "table.tex").read_text()
    index = (tmp_path / "reports" / "index.html").read_text()
    assert 'href="tiny@training.max_steps=2/table.html"' in index


def test_a_dry_run_names_the_trial(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    studies.write(tmp_path, make_body("ok"))
    monkeypatch.chdir(tmp_path)
    assert main(["ablations.yaml", "--dry-run", "--set", "zz=with"]) == 0
    output = capsys.readouterr().out
    assert output.startswith("tiny@zz=with: A tiny study (with zz=with)\n")


PUBLISHED = """
published: {base: [72.01, 0.2], slow: [70.5, null]}
parity: losses within 1e-12
baseline: base
cells: {base: {}, slow: {optimizer.lr: 1e-4}}
"""


def test_a_kind_of_set_keeps_common_keys_and_names_the_others(tmp_path: Path) -> None:
    """A user's own data keep the batch and the augmentation of the study; so do other sections."""
    settings = [
        "data.kind=npz",
        "data.path=x.npz",
        "data.size=8",
        "data.classes=3",
        "data.name=mine",
    ]
    augmented = studies.EXPERIMENT.replace(
        "batch_size: 64", "batch_size: 7, augment: [flip, normalize]"
    )
    source = studies.study(tmp_path, PUBLISHED, augmented)
    expanded = expand(source, tmp_path, parse_settings(settings))
    data = expanded.baseline.experiment.data.model_dump()
    assert (data["kind"], data["batch_size"], len(data["augment"])) == ("npz", 7, 2)
    assert expanded.dropped == []
    for setting in ("optimizer.kind=muon", "optimizer=muon"):
        changed = matrix(tmp_path, setting, body=PUBLISHED)
        rates = [variant.experiment.optimizer.lr for variant in changed.written]
        assert rates == [1e-3, 1e-4]
    constant = matrix(tmp_path, "schedule.kind=constant", body=PUBLISHED)
    assert constant.dropped == ["schedule.warmup"]
    assert constant.notes[1:] == [
        "tiny@schedule.kind=constant: without schedule.warmup: the kinds of --set do not take "
        "these keys"
    ]
    with pytest.raises(ConfigError, match="'constnat' is not a known schedule"):
        matrix(tmp_path, "schedule.kind=constnat", body=PUBLISHED)


def test_published_numbers_stand_beside_the_experiment_that_they_belong_to(tmp_path: Path) -> None:
    unchanged = matrix(tmp_path, body=PUBLISHED)
    assert unchanged.published == {"base": (72.01, 0.2), "slow": (70.5, None)}
    assert unchanged.plan().parity == "losses within 1e-12"
    # Settings that compute the same change nothing.
    assert matrix(tmp_path, "training.devices=2", body=PUBLISHED).published == unchanged.published
    # Only `base` has another rate.
    slow = PUBLISHED.replace("1e-4", "1e-4, training.clip: 0.5")
    partly = matrix(tmp_path, "optimizer.lr=1e-4", body=slow)
    assert partly.published == {"slow": (70.5, None)}
    for setting in ("training.epochs=3", "data.batch_size=7", "schedule.kind=constant"):
        changed = matrix(tmp_path, setting, body=PUBLISHED)
        assert (changed.published, changed.plan().parity) == ({}, "")
