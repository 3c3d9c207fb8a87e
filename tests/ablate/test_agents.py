"""The loop of AGENTS.md: a program decides by JSON alone, and its temptations leave traces."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import studies
from helpers.answers import read_answer
from helpers.commands import run_python
from helpers.fake_cells import result
from helpers.paths import ROOT

from lit_attn.__main__ import main
from lit_attn.ablate.plan import expand
from lit_attn.answer_schemas import make_schema

EFFECTS = {"standard": 0.0, "idea": 0.004, "better-idea": 0.03}


class Program:
    """A program that knows the answers of the commands, and nothing else."""

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.folder = folder
        self.capsys = capsys

    def write(self, *variants: str, seeds: str = "6", extra: str = "") -> None:
        """Write the file of the study."""
        rates = {variant: rate for rate, variant in enumerate(EFFECTS, start=1)}
        cells = [f"{variant}: {{optimizer.lr: {rates[variant]}}}" for variant in variants]
        body = f"baseline: standard\ncells: {{{', '.join(cells)}}}{extra}"
        path = studies.write(self.folder, body)
        path.write_text(path.read_text().replace("    seeds: 2\n", f"    seeds: {seeds}\n"))

    def ask(self, *words: str) -> dict[str, Any]:
        """Return the answer of a command about the only study."""
        assert main([*words, "--json"]) in (0, 1)
        return read_answer(self.capsys.readouterr().out)["studies"][0]

    def train(self, *options: str) -> int:
        """Give every missing cell a result, as `run` would, and return their number."""
        study = self.ask("run", "--dry-run", *options)
        missing = {c["identity"] for c in study["cells"] if c["state"] == "missing"}
        seeds = tuple(study["seeds"])
        source = studies.read_studies(self.folder / "ablations.yaml")["tiny"]
        matrix = expand(source, Path("runs"), seeds=seeds)
        # The runner writes the plan, and seals it, before the first cell.
        matrix.write_plan()
        for job in matrix.jobs:
            if job.identity in missing:
                noise = np.random.default_rng([job.seed, 7]).normal(0, 0.002)
                own_noise = np.random.default_rng([job.seed, len(job.variant)])
                accuracy = 0.7 + EFFECTS[job.variant] + noise + own_noise.normal(0, 0.002)
                job.folder.mkdir(parents=True)
                record = result(job.cell, {"test/accuracy": float(accuracy)})
                record.write(job.folder / "result.json")
        return len(missing)


@pytest.fixture
def program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Program:
    monkeypatch.chdir(tmp_path)
    return Program(tmp_path, capsys)


def test_a_program_adds_a_variant_to_a_sealed_study_and_stops(program: Program) -> None:
    program.write("standard", "idea", seeds="8")
    assert program.train() == 16
    first = program.ask("judge")
    assert first["sealed"]["is_before_results"]
    verdicts = {variant["variant"]: variant["verdict"] for variant in first["variants"]}
    assert set(verdicts) == {"idea"}

    program.write("standard", "idea", "better-idea", seeds="8")
    states = program.ask("run", "--dry-run")["counts"]
    assert states == {"done": 16, "missing": 8}
    program.train()
    second = program.ask("judge")
    assert second["sealed"]["added_variants"] == ["better-idea"]
    variants = {variant["variant"]: variant for variant in second["variants"]}
    assert variants["better-idea"]["verdict"] == "better"
    assert variants["better-idea"]["is_final"]
    # One more comparison makes the corrected p of the first idea no smaller.
    assert variants["idea"]["p"] >= first["variants"][0]["p"]


def test_the_next_action_ends_with_a_decision(program: Program) -> None:
    program.write("standard", "better-idea", seeds="3")
    program.train()
    judged = program.ask("judge")
    assert judged["next"]["kind"] == "add-seeds"
    words = judged["next"]["command"].split()
    seeds = words[words.index("--seeds") + 1]
    assert program.train("--seeds", seeds) == judged["next"]["cells"]
    after = program.ask("judge")
    assert after["look"] == 2
    assert after["level"] == 0.0125
    assert [variant["verdict"] for variant in after["variants"]] == ["better"]
    assert after["next"]["kind"] == "none"


def test_dropped_seeds_and_changed_decisions_leave_traces(program: Program) -> None:
    program.write("standard", "idea", seeds="6")
    program.train()
    program.write("standard", "idea", seeds="[0, 1, 2, 4, 5]", extra="\nmetric: {margin: 5.0}")
    program.train()
    judged = program.ask("judge")
    # A seed that was trained stays in the plan.
    assert judged["variants"][0]["seeds"]["planned"] == 6
    for folder in Path("runs/tiny").glob("*/3-*"):
        shutil.rmtree(folder)
    program.train()
    sealed = program.ask("judge")["sealed"]
    assert sealed["removed_seeds"] == ["3"]
    assert "metric.margin (before: null)" in sealed["changed_decisions"]
    program.write("standard", "better-idea", seeds="[0, 1, 2, 4, 5]")
    program.train()
    assert program.ask("judge")["sealed"]["removed_variants"] == ["idea"]


def test_a_look_before_the_end_is_not_final(program: Program) -> None:
    program.write("standard", "better-idea", seeds="8")
    program.train()
    last = sorted(Path("runs/tiny/better-idea").iterdir())[-1]
    (last / "result.json").unlink()
    judged = program.ask("judge")
    assert judged["is_interim"]
    assert not judged["variants"][0]["is_final"]
    assert judged["next"]["kind"] == "run"
    assert main(["judge"]) == 1


@pytest.mark.process
def test_the_loop_trains_the_digits(tmp_path: Path) -> None:
    body = "baseline: standard\ncells: {standard: {}, xsa: {attention: xsa}}"
    experiment = studies.EXPERIMENT.replace("epochs: 2", "epochs: 1").replace("warmup: 1", "end: 0")
    studies.write(tmp_path, body, experiment)

    def ask(*words: str) -> dict[str, Any]:
        done = run_python(tmp_path, "-m", "lit_attn", *words, "--json")
        return read_answer(done.stdout)["studies"][0]

    assert ask("run", "--dry-run")["counts"] == {"missing": 4}
    done = run_python(tmp_path, "-m", "lit_attn", "run", "--jobs", "1")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "tiny (below its floor): against standard, xsa is undecided" in done.stdout
    assert ask("status")["counts"] == {"done": 4}
    judged = ask("judge")
    assert judged["variants"][0]["seeds"] == {"done": 2, "planned": 2, "failed": 0, "pairs": 2}
    assert judged["next"]["kind"] in ("add-seeds", "stop")


def test_the_instructions_name_keys_that_exist() -> None:
    text = (ROOT / "AGENTS.md").read_text(encoding="utf-8")
    parts = make_schema("judge")["$defs"]
    for key in ("added_variants", "removed_variants", "removed_seeds", "changed_decisions"):
        assert f"`{key}`" in text
        assert key in parts["SealedPlan"]["properties"]
    assert {"verdict", "is_final"} <= parts["JudgedVariant"]["properties"].keys()
    assert {"none", "stop"} <= set(parts["Action"]["properties"]["kind"]["enum"])
