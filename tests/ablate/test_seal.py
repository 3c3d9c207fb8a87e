"""Sealed plans: what was decided before the first result, and what was added later."""

import json
from pathlib import Path

import pytest
from helpers import studies
from helpers.runs import make_body, run_cli

from lit_attn.ablate.plan import expand
from lit_attn.cells.decisions import Seals
from lit_attn.config.study import read_studies


def read_seals(folder: Path) -> Seals:
    return Seals.model_validate_json((folder / "runs/tiny/seals.json").read_bytes())


def seal(folder: Path, **changes: str) -> str:
    """Return the hash of a study of which some texts are replaced."""
    body = make_body("ok", "brief") + "\nmetric: {margin: 1.5}\naxes: {optimizer.lr: [7, 8]}"
    body += "\nexclude: [{optimizer.lr: 8}]"
    for before, after in changes.items():
        assert before in body
        body = body.replace(before, after)
    matrix = expand(read_studies(studies.write(folder, body))["tiny"], folder / "runs")
    return matrix.seal(matrix.plan().seeds).hash


@pytest.mark.slow
def test_the_first_run_seals_the_plan_and_later_runs_seal_additions(tmp_path: Path) -> None:
    studies.write(tmp_path, make_body("ok", "brief"))
    code, printed = run_cli(tmp_path, command=("seal",))
    assert code == 0
    assert not (tmp_path / "runs").exists()
    assert run_cli(tmp_path)[0] == 0
    seals = read_seals(tmp_path)
    (entry,) = seals.entries
    assert entry.hash == json.loads(printed)["hash"]
    assert (seals.is_before_results, entry.results) == (True, 0)
    assert (entry.seeds, set(entry.variants)) == ([0, 1], {"ok", "brief"})
    # A run of the same plan is no look at an extended one.
    assert run_cli(tmp_path)[0] == 0
    assert read_seals(tmp_path) == seals
    # Seeds and variants after results are additions.
    assert run_cli(tmp_path, "--seeds", "2,3")[0] == 0
    studies.write(tmp_path, make_body("ok", "brief", "orphan"))
    assert run_cli(tmp_path, "--seeds", "4")[0] == 0
    seals = read_seals(tmp_path)
    assert [entry.results for entry in seals.entries] == [0, 4, 8]
    assert seals.added_seeds == [(2, 3)]
    assert seals.changes()["added_variants"] == ["orphan"]
    assert seals.is_before_results
    # Results that are older than the seal were seen.
    (tmp_path / "runs/tiny/seals.json").unlink()
    assert run_cli(tmp_path)[0] == 0
    assert not read_seals(tmp_path).is_before_results


@pytest.mark.slow
def test_results_of_removed_variants_were_seen(tmp_path: Path) -> None:
    studies.write(tmp_path, make_body("brief", "ok"))
    assert run_cli(tmp_path)[0] == 0
    body = make_body("orphan").replace("orphan: {optimizer.lr: 1}", "orphan: {optimizer.lr: 3}")
    studies.write(tmp_path, f"{body}\nmetric: {{name: test/loss}}")
    run_cli(tmp_path)
    seals = read_seals(tmp_path)
    assert [entry.results for entry in seals.entries] == [0, 4]
    changes = seals.changes()
    assert (changes["added_variants"], changes["removed_variants"]) == (["orphan"], ["brief", "ok"])
    assert 'metric.goal (before: "max")' in changes["changed_decisions"]


@pytest.mark.slow
def test_changes_before_the_first_result_are_no_additions(tmp_path: Path) -> None:
    studies.write(tmp_path, make_body("crash"))
    assert run_cli(tmp_path)[0] == 1
    studies.write(tmp_path, make_body("ok", "brief"))
    assert run_cli(tmp_path, "--seeds", "3")[0] == 0
    seals = read_seals(tmp_path)
    assert [entry.results for entry in seals.entries] == [0, 0]
    assert (seals.added_seeds, seals.changes()["added_variants"]) == ([], [])


def test_the_hash_covers_every_decision(tmp_path: Path) -> None:
    hashes = [
        seal(tmp_path),
        seal(tmp_path, **{"1.5": "2.5"}),
        seal(tmp_path, **{"optimizer.lr: 8}]": "optimizer.lr: 7}]"}),
        seal(tmp_path, **{"baseline: ok": "baseline: brief"}),
        seal(tmp_path, **{"ok: {optimizer.lr: 1}": "ok: {optimizer.lr: 3}"}),
    ]
    assert len(set(hashes)) == len(hashes)
    assert seal(tmp_path) == hashes[0]


def test_a_torn_seal_is_one_error_line(tmp_path: Path) -> None:
    studies.write(tmp_path, make_body("ok"))
    path = tmp_path / "runs/tiny/seals.json"
    path.parent.mkdir(parents=True)
    path.write_text('{"entries": [')
    code, output = run_cli(tmp_path)
    assert code == 2
    assert output == "runs/tiny/seals.json: cannot be read; move it away to start afresh\n"
