"""Key `gates`: its mistakes, its seal, the order of the sizes, and the cells that do not run."""

import argparse
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from helpers import fake_cells, studies
from helpers.fake_cells import result

from lit_attn.__main__ import main
from lit_attn.ablate.commands.arguments import add_study_arguments
from lit_attn.ablate.commands.execution import run_stages
from lit_attn.ablate.commands.options import StudyOptions, read_options
from lit_attn.ablate.launch import Launcher
from lit_attn.ablate.outcomes import Summary
from lit_attn.ablate.plan import Job, Matrix
from lit_attn.cells.decisions import Endings, Seal
from lit_attn.config.study import read_studies
from lit_attn.report.comparison import compare_variants
from lit_attn.report.read import read_studies as read_records
from lit_attn.report.results import make_results_table
from lit_attn.report.summary import make_variant_frame
from lit_attn.schema.errors import ConfigError

LADDER = """
baseline: base
compare_within: [size]
gates: size
axes:
  size: {small: {}, medium: {training.epochs: 3}, large: {training.epochs: 4}}
  layer: {base: {}, weak: {optimizer.lr: 2}, good: {optimizer.lr: 3}}
"""
EFFECTS = {"base": 0.0, "weak": -0.05, "good": 0.05}
SIZES = ["tiny-small", "tiny-medium", "tiny-large"]


def write_ladder(folder: Path, body: str = LADDER, seeds: str = "8") -> Path:
    """Write a study over three sizes."""
    path = studies.write(folder, body)
    path.write_text(path.read_text().replace("    seeds: 2\n", f"    seeds: {seeds}\n"))
    return path


def make_options(folder: Path, *arguments: str) -> StudyOptions:
    """Return the options of a run of the study in `folder`."""
    parser = argparse.ArgumentParser()
    add_study_arguments(parser)
    words = [str(folder / "ablations.yaml"), "--out", str(folder / "runs"), *arguments]
    return read_options(parser.parse_args(words))


def finish(job: Job) -> None:
    """Give a cell a result."""
    seed = [job.cell.seed, len(job.cell.variant), len(job.cell.study)]
    noise = np.random.default_rng(seed).normal(0, 0.004)
    job.folder.mkdir(parents=True, exist_ok=True)
    metrics = {"test/accuracy": 0.7 + EFFECTS[job.cell.variant] + noise}
    result(job.cell, metrics).write(job.folder / "result.json")


def run(folder: Path, *arguments: str, end: Callable[[Job], None] = finish) -> list[list[str]]:
    """Run the missing cells; return the variants of each start, as STUDY/VARIANT."""
    options = make_options(folder, *arguments)
    starts = []

    def start(missing: list[Job]) -> Summary:
        for job in missing:
            end(job)
        starts.append(list(dict.fromkeys(job.variant for job in missing)))
        return Summary()

    run_stages(options.expand_studies(), options, Launcher(fake_cells.TARGET), start)
    return starts


def expand(folder: Path) -> list[Matrix]:
    return make_options(folder).expand_studies()


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            "gates: size",
            "gates: sizes",
            ":9: tiny.gates: 'sizes' is no axis of compare_within; did you mean 'size'",
        ),
        ("gates: size", "gates: layer", "tiny.gates: 'layer' is no axis of compare_within"),
        ("compare_within: [size]\n", "", ":8: tiny.gates: needs `compare_within`"),
        (
            "{small: {}, medium: {training.epochs: 3}, large: {training.epochs: 4}}",
            "{small: {}}",
            "tiny.gates: axis 'size' has one value; add a larger one, or leave out `gates`",
        ),
    ],
)
def test_mistakes_are_one_error_line(tmp_path: Path, old: str, new: str, message: str) -> None:
    assert old in LADDER
    with pytest.raises(ConfigError) as caught:
        read_studies(write_ladder(tmp_path, LADDER.replace(old, new)))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("seeds", ["1", "6"])
def test_too_few_seeds_are_refused(tmp_path: Path, seeds: str) -> None:
    """The smallest p of six pairs is 2 / 2^6, and each of two gates has the level 0.025."""
    write_ladder(tmp_path, seeds=seeds)
    with pytest.raises(ConfigError, match=r"tiny-small.gates: with . planned seed.* and 3 sizes"):
        expand(tmp_path)
    write_ladder(tmp_path, seeds="7")
    assert len(expand(tmp_path)) == 3


def test_the_sizes_run_in_their_order_without_worse_variants(tmp_path: Path) -> None:
    write_ladder(tmp_path)
    starts = run(tmp_path)
    assert starts == [
        ["tiny-small/base", "tiny-small/weak", "tiny-small/good"],
        ["tiny-medium/base", "tiny-medium/good"],
        ["tiny-large/base", "tiny-large/good"],
    ]
    for name in SIZES[1:]:
        recorded = Endings.read(tmp_path / "runs" / name / "endings.json")
        assert recorded is not None
        (ending,) = recorded.entries
        assert (ending.variant, ending.rule, ending.size) == ("weak", "gate", "size small")
    # The same command finds the same decisions and nothing to run.
    assert run(tmp_path) == [[], [], []]


def test_a_resumed_run_continues_at_its_size(tmp_path: Path) -> None:
    write_ladder(tmp_path)
    starts = run(tmp_path, "--limit", "20")
    assert len(starts) == 1
    # Four cells of the small size remain.
    starts = run(tmp_path)
    assert starts[0] == ["tiny-small/good", "tiny-small/base", "tiny-small/weak"]
    assert starts[1] == ["tiny-medium/base", "tiny-medium/good"]


def test_a_size_waits_for_the_smaller_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_ladder(tmp_path)
    with pytest.raises(ConfigError, match="tiny-large: gates: waits, because tiny-small has no"):
        run(tmp_path, "--study", "tiny-large")
    # A cell of the small size has no result, so no size follows.
    last = expand(tmp_path)[0].jobs[-1].folder
    assert len(run(tmp_path, end=lambda job: None if job.folder == last else finish(job))) == 1
    assert "tiny-medium: gates: waits, because tiny-small has 1 cell to run" in _read(capsys)
    monkeypatch.chdir(tmp_path)
    assert main(["run", "ablations.yaml", "--dry-run"]) == 0
    assert "gates: waits, because tiny-small has 1 cell to run" in _read(capsys)


def test_a_variant_that_is_worse_at_the_second_size_skips_the_third(tmp_path: Path) -> None:
    """A variant that is equal at the small size runs at the medium one."""
    write_ladder(tmp_path)

    def end(job: Job) -> None:
        finish(job)
        if job.cell.study == "tiny-small" and job.cell.variant == "weak":
            sign = (-1) ** job.cell.seed
            metrics = {"test/accuracy": 0.7 + 0.01 * sign}
            result(job.cell, metrics).write(job.folder / "result.json")

    starts = run(tmp_path, end=end)
    assert "tiny-medium/weak" in starts[1]
    assert starts[2] == ["tiny-large/base", "tiny-large/good"]
    recorded = Endings.read(tmp_path / "runs/tiny-large/endings.json")
    assert recorded is not None
    assert recorded.entries[0].size == "size medium"


def test_trials_are_compared_with_trials(tmp_path: Path) -> None:
    write_ladder(tmp_path)
    options = make_options(tmp_path, "--set", "optimizer.weight_decay=0.1")
    gate = options.expand_studies()[1].gate
    assert gate is not None
    assert gate.before == ["tiny-small@optimizer.weight_decay=0.1"]


def test_sizes_of_two_axes_wait_for_the_same_other_value(tmp_path: Path) -> None:
    body = LADDER.replace("[size]", "[length, size]").replace(
        "axes:", "axes:\n  length: {short: {}, long: {data.batch_size: 32}}"
    )
    sources = read_studies(write_ladder(tmp_path, body))
    assert sources["tiny-long-small"].before == ()
    assert sources["tiny-long-large"].before == ("tiny-long-small", "tiny-long-medium")


def test_the_seal_records_the_rule(tmp_path: Path) -> None:
    write_ladder(tmp_path)
    first, second, _ = [matrix.seal([0]) for matrix in expand(tmp_path)]
    assert first.gate is not None
    assert (first.gate.before, first.gate.level) == ([], 0.025)
    assert second.gate is not None
    assert second.gate.before == ["tiny-small"]
    write_ladder(tmp_path, LADDER.replace("gates: size\n", ""))
    plain = expand(tmp_path)[0].seal([0])
    assert plain.gate is None
    assert plain.hash != first.hash
    # A seal that was written before the key existed is read.
    assert Seal.model_validate(plain.model_dump(exclude={"gate"})) == plain


@pytest.mark.slow
def test_status_dry_run_judge_and_tables_say_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_ladder(tmp_path)
    run(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert "ended: weak not run: worse at size small (p = " in _read(capsys)
    assert main(["status"]) == 0
    status = _read(capsys)
    assert "ended    weak  8 seeds not needed: not run: worse at size small" in status
    assert main(["run", "ablations.yaml", "--dry-run"]) == 0
    assert "not run: worse at size small" in _read(capsys)
    assert main(["judge", "--json"]) == 0
    judged = json.loads(_read(capsys))["studies"]
    large = next(study for study in judged if study["study"] == "tiny-large")
    weak = next(variant for variant in large["variants"] if variant["variant"] == "weak")
    assert (weak["ended"]["rule"], weak["ended"]["power"], weak["is_final"]) == ("gate", None, True)
    assert large["next"]["kind"] == "none"
    (record,) = read_records(tmp_path / "runs", ["tiny-large"])
    comparisons = compare_variants(record)
    table = make_results_table(record, make_variant_frame(record, comparisons), comparisons)
    row = next(row for row in table.rows if row[0].text == "weak")
    assert "0/8, 8 stopped" in [cell.text for cell in row]
    assert any("weak not run: worse at size small" in note for note in table.notes)
    assert any("worse at a smaller size did not run" in sentence for sentence in table.summary)


def _read(capsys: pytest.CaptureFixture[str]) -> str:
    """Return stdout and stderr since the last call."""
    output = capsys.readouterr()
    return output.out + output.err
