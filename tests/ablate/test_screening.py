"""Screening and confirmation: `design:` of a study."""

import json
import re
from pathlib import Path

import pytest
from helpers import designs, studies

from lit_attn.ablate.plan import Matrix, expand
from lit_attn.ablate.rerun import select_cells
from lit_attn.cells.decisions import Looks, Seals
from lit_attn.cells.records import Plan
from lit_attn.config.study import read_studies
from lit_attn.report.records.looks import record_look
from lit_attn.report.records.read import read_studies as read_records
from lit_attn.schema.errors import ConfigError
from lit_attn.schema.yaml_text import Mapping, Where

VALUES = {"base": 0.5, "a": 0.4, "b": 0.6, "c": 0.45, "d": 0.7}


def list_seeds(matrix: Matrix) -> tuple[set[int], set[int]]:
    """Return the seeds of the screening and those of the confirmation."""
    screened = {job.seed for job in matrix.screening_jobs}
    confirmed = {job.seed for job in matrix.jobs}
    planned = {cell.seed for cell in matrix.plan().cells}
    return screened, confirmed | planned


def test_all_variants_are_screened_before_any_is_confirmed(tmp_path: Path) -> None:
    designs.write(tmp_path)
    matrix = designs.read(tmp_path)
    cells = [(job.variant, job.seed) for job in matrix.screening_jobs]
    assert cells == [(name, seed) for seed in (0, 1) for name in designs.NAMES]
    assert matrix.jobs == []
    plan = matrix.plan()
    assert [variant.name for variant in plan.variants] == list(designs.NAMES)
    assert plan.cells == []
    assert len(plan.trials) == 10
    assert plan.seeds == [1000, 1001, 1002]


def test_the_best_variants_and_the_baseline_are_confirmed_with_fresh_seeds(tmp_path: Path) -> None:
    designs.write(tmp_path)
    matrix = designs.finish_screening(tmp_path, VALUES)
    assert designs.kept(matrix) == ["b", "d"]
    confirmed = [(job.variant, job.seed) for job in matrix.jobs]
    names = ("base", "b", "d")
    assert confirmed == [(name, seed) for seed in (1000, 1001, 1002) for name in names]
    plan = Plan.load(tmp_path / "runs/tiny/plan.json")
    assert [variant.name for variant in plan.variants] == list(names)
    assert [cell.identity for cell in plan.cells] == [job.identity for job in matrix.jobs]
    # The baseline is confirmed also if it is not among the best.
    assert matrix.screening is not None
    assert [entry.variant for entry in matrix.screening.screened_out] == ["c", "a"]
    # The measured metric is scaled as printed.
    entry = matrix.screening.screened_out[0]
    assert entry.mean == pytest.approx(45)
    assert entry.by_seed == pytest.approx({"0": 46, "1": 44})


def test_test_results_choose_no_variant(tmp_path: Path) -> None:
    designs.write(tmp_path)
    matrix = designs.read(tmp_path)
    for job in matrix.screening_jobs:
        value = VALUES[job.variant]
        designs.finish(job, value, test=1 - value)
    assert designs.kept(designs.read(tmp_path)) == ["b", "d"]


@pytest.mark.parametrize(("screen", "confirm"), [(1, 3), (7, 1), (100, 3), (2, 40)])
def test_no_seed_of_the_screening_confirms_a_variant(
    tmp_path: Path, screen: int, confirm: int
) -> None:
    designs.write(tmp_path, f"{{screen: {screen}, keep: 2, confirm: {confirm}}}")
    matrix = designs.finish_screening(tmp_path, VALUES)
    screened, confirmed = list_seeds(matrix)
    assert screened == set(range(screen))
    assert len(confirmed) == confirm
    assert not screened & confirmed
    # Seeds of an earlier, longer confirmation stay in the plan; those of a screening never enter.
    designs.write(tmp_path, "{screen: 1, keep: 2, confirm: 1}")
    for job in matrix.jobs:
        designs.finish(job, 0.5)
    screened, confirmed = list_seeds(designs.finish_screening(tmp_path, VALUES))
    assert screened == {0}
    assert confirmed == set(range(1000, 1000 + confirm))


def test_variants_that_tie_with_the_last_kept_one_are_kept(tmp_path: Path) -> None:
    designs.write(tmp_path)
    # 0.1 + 0.2 and 0.3 differ in the last digit.
    matrix = designs.read(tmp_path)
    sums = {"base": (0.0, 0.0), "a": (0.1, 0.1), "b": (0.1, 0.2), "c": (0.2, 0.1), "d": (0.3, 0.0)}
    for job in matrix.screening_jobs:
        designs.finish(job, sums[job.variant][job.seed])
    assert designs.kept(designs.read(tmp_path)) == ["b", "c", "d"]


def test_a_variant_with_a_diverged_seed_is_screened_out(tmp_path: Path) -> None:
    designs.write(tmp_path)
    matrix = designs.read(tmp_path)
    for job in matrix.screening_jobs:
        if job.variant == "d" and job.seed == 0:
            designs.fail(job, "diverged")
        elif job.variant != "d":
            designs.finish(job, VALUES[job.variant])
    matrix = designs.read(tmp_path)
    assert designs.kept(matrix) == ["b", "c"]
    # Its other seed is not needed.
    names = [job.name for job in matrix.screening_jobs if job.variant == "d"]
    assert names == ["tiny/d/0"]
    assert matrix.screening is not None
    assert matrix.screening.screened_out[-1].variant == "d"
    assert matrix.screening.screened_out[-1].mean is None


def test_fewer_variants_than_planned_are_kept_if_the_others_diverge(tmp_path: Path) -> None:
    designs.write(tmp_path)
    values = dict.fromkeys(designs.NAMES) | {"base": 0.5, "c": 0.5}
    matrix = designs.finish_screening(tmp_path, values)
    assert designs.kept(matrix) == ["c"]
    assert {job.variant for job in matrix.jobs} == {"base", "c"}


def test_without_any_value_nothing_is_confirmed(tmp_path: Path) -> None:
    designs.write(tmp_path)
    matrix = designs.finish_screening(tmp_path, dict.fromkeys(designs.NAMES))
    assert designs.kept(matrix) == []
    assert matrix.jobs == []
    assert [variant.name for variant in matrix.plan().variants] == ["base"]
    # The study is not decided: a screening that is repeated can keep variants.
    for job in matrix.screening_jobs:
        designs.finish(job, VALUES[job.variant])
    assert designs.kept(designs.read(tmp_path)) == ["b", "d"]


def test_a_failed_cell_keeps_the_screening_open(tmp_path: Path) -> None:
    designs.write(tmp_path)
    for job in designs.read(tmp_path).screening_jobs:
        if job.name == "tiny/a/1":
            designs.fail(job, "killed")
        else:
            designs.finish(job, VALUES[job.variant])
    matrix = designs.read(tmp_path)
    assert designs.kept(matrix) is None
    assert matrix.jobs == []


def test_a_result_that_is_computed_again_chooses_no_other_variants(tmp_path: Path) -> None:
    designs.write(tmp_path)
    matrix = designs.finish_screening(tmp_path, VALUES)
    before = (tmp_path / "runs/tiny/screening.json").read_bytes()
    for job in matrix.screening_jobs:
        designs.finish(job, 1 - VALUES[job.variant])
    matrix = designs.read(tmp_path)
    matrix.write_plan()
    assert designs.kept(matrix) == ["b", "d"]
    assert (tmp_path / "runs/tiny/screening.json").read_bytes() == before
    # Another variant is another question.
    designs.write(tmp_path, names=(*designs.NAMES, "e"))
    matrix = designs.read(tmp_path)
    assert designs.kept(matrix) is None
    assert [job.name for job in matrix.screening_jobs if job.state() != "done"] == [
        "tiny/e/0",
        "tiny/e/1",
    ]
    for job in matrix.screening_jobs:
        designs.finish(job, 1 - VALUES.get(job.variant, 0.0))
    assert designs.kept(designs.read(tmp_path)) == ["a", "e"]


def test_a_damaged_record_chooses_no_other_variants(tmp_path: Path) -> None:
    designs.write(tmp_path)
    matrix = designs.finish_screening(tmp_path, VALUES)
    for job in matrix.screening_jobs:
        designs.finish(job, 1 - VALUES[job.variant])
    (tmp_path / "runs/tiny/screening.json").write_text("{")
    with pytest.raises(ConfigError, match=r"screening\.json: cannot be read; move it away"):
        designs.read(tmp_path)


def test_a_study_that_goes_back_to_seeds_has_no_screening(tmp_path: Path) -> None:
    path = designs.write(tmp_path)
    designs.finish_screening(tmp_path, VALUES)
    record = tmp_path / "runs/tiny/screening.json"
    assert record.exists()
    path.write_text(path.read_text().replace(f"design: {designs.DESIGN}", "seeds: 3"))
    matrix = designs.read(tmp_path)
    matrix.write_plan()
    assert matrix.screening is None
    # The seeds of the screening are cells of the study.
    assert [job.seed for job in matrix.jobs if job.state() == "done"] == [0] * 5 + [1] * 5
    assert not record.exists()


def test_more_fresh_seeds_are_a_look_and_change_no_decision(tmp_path: Path) -> None:
    designs.write(tmp_path)
    matrix = designs.finish_screening(tmp_path, VALUES)
    for job in matrix.jobs:
        designs.finish(job, 0.5)
    designs.write(tmp_path, "{screen: 2, keep: 2, confirm: 5}")
    matrix = designs.read(tmp_path)
    matrix.write_plan()
    assert designs.kept(matrix) == ["b", "d"]
    seals = Seals.read(tmp_path / "runs/tiny/seals.json")
    assert seals is not None
    assert seals.added_seeds == [(1003, 1004)]
    assert not any(seals.changes().values())
    # Another number of kept variants is a changed decision.
    designs.write(tmp_path, "{screen: 2, keep: 1, confirm: 5}")
    designs.read(tmp_path).write_plan()
    seals = Seals.read(tmp_path / "runs/tiny/seals.json")
    assert seals is not None
    (changed,) = seals.changes()["changed_decisions"]
    assert changed.startswith("design (before: ")


def test_the_seal_before_the_first_cell_has_the_design(tmp_path: Path) -> None:
    designs.write(tmp_path)
    matrix = designs.read(tmp_path)
    first = matrix.seal(matrix.list_seeds())
    assert first.design is not None
    assert (first.design["keep"], first.design["seeds"]) == (2, [0, 1])
    assert first.design["select"]["name"] == "val/accuracy"
    assert first.seeds == [1000, 1001, 1002]
    matrix = designs.finish_screening(tmp_path, VALUES)
    # The choice of the screening is no decision of the user.
    assert matrix.seal(matrix.list_seeds()).hash == first.hash


def test_a_seal_of_a_study_with_seeds_is_written_as_before(tmp_path: Path) -> None:
    matrix = expand(studies.study(tmp_path, "baseline: a\ncells: {a: {}}"), tmp_path / "runs")
    seal = matrix.seal([0, 1])
    assert "design" not in seal.model_dump_json()
    assert list(json.loads(seal.model_dump_json())) == [
        "time",
        "results",
        "hash",
        "variants",
        "baseline",
        "seeds",
        "metric",
        "match",
        "tune",
        "exclude",
    ]


MISTAKES = [
    ("{screen: 2, keep: 0, confirm: 3}", "", "design.keep: input should be greater than 0, not 0"),
    ("{screen: 2, keep: 4, confirm: 3}", "", "design.keep: 4 keeps all 4 variants beside the base"),
    (
        "{screen: 0, keep: 2, confirm: 3}",
        "",
        "design.screen: input should be greater than or equal",
    ),
    ("{screen: 101, keep: 2, confirm: 3}", "", "design.screen: input should be less than or equal"),
    ("{screen: 2, keep: 2}", "", "design: needs all of {screen: 2, keep: 5, confirm: 12}"),
    (
        "{select: val/loss}",
        "",
        "design: needs all of {screen: 2, keep: 5, confirm: 12}",
    ),
    ("{screne: 2}", "", "design.screne: unknown key 'screne'; did you mean 'screen'?"),
    (
        "{screen: 2, keep: 2, confirm: 3, select: test/accuracy}",
        "",
        "design.select: needs a validation metric: val/loss",
    ),
    (
        "{screen: 2, keep: 2, confirm: 3, select: val/acuracy}",
        "",
        "design.select: 'val/acuracy' is not measured; did you mean 'val/accuracy'?",
    ),
    (designs.DESIGN, "seeds: 3", "design: cannot stand beside `seeds`, because it decides the see"),
    (designs.DESIGN, "match: [parameters, flops]", "design: needs one criterion of `match`, becau"),
    (
        designs.DESIGN,
        "tune: {optimizer.weight_decay: [0, 1], select: val/loss, seeds: [1001]}",
        "tune.seeds: {1001} are seeds of the final cells",
    ),
    (
        designs.DESIGN,
        "tune: {optimizer.weight_decay: [0, 1], select: val/loss, seeds: [1]}",
        "tune.seeds: {1} are seeds of the final cells",
    ),
    (
        designs.DESIGN,
        "metric: {name: train/loss}",
        "",
    ),
]


@pytest.mark.parametrize(("design", "more", "message"), MISTAKES)
def test_mistakes_are_one_error_line(tmp_path: Path, design: str, more: str, message: str) -> None:
    designs.write(tmp_path, design, more=more)
    if not message:
        # The loss of training has its counterpart on the validation split.
        matrix = designs.read(tmp_path)
        assert matrix.screening is not None
        assert matrix.screening.select.name == "val/loss"
        return
    with pytest.raises(ConfigError) as caught:
        designs.read(tmp_path)
    text = str(caught.value)
    assert message in text
    assert re.match(r"\S+ablations\.yaml:\d+: ", text)
    assert "\n" not in text


def test_a_study_needs_seeds_or_a_design(tmp_path: Path) -> None:
    path = studies.write(tmp_path, "baseline: a\ncells: {a: {}}")
    path.write_text(path.read_text().replace("    seeds: 2\n", ""))
    with pytest.raises(ConfigError, match=r"yaml:2: studies\.tiny\.seeds: this key is required, "):
        read_studies(path)


def test_products_levels_and_papers_keep_their_seeds(tmp_path: Path) -> None:
    product = (
        "baseline: 'lr=0.1,weight_decay=0'\ndesign: {screen: 2, keep: 2, confirm: 3}\n"
        "axes: {optimizer.lr: [0.1, 0.2, 0.3], optimizer.weight_decay: [0, 1]}"
    )
    levels = (
        "baseline: a\ndesign: {screen: 2, keep: 2, confirm: 3}\ncompare_within: [size]\n"
        "axes: {size: {small: {}, large: {model.dim: 32}}}"
    )
    paper = (
        "baseline: a\ndesign: {screen: 2, keep: 2, confirm: 3}\npaper: {file: x.yaml}\n"
        "cells: {a: {}}"
    )
    messages = {
        product: "design: is not for a product of several axes",
        levels: "design: cannot stand beside `compare_within`",
        paper: "design: cannot stand beside `paper`",
    }
    for body, message in messages.items():
        path = studies.write(tmp_path, body)
        path.write_text(path.read_text().replace("    seeds: 2\n", ""))
        with pytest.raises(ConfigError, match=re.escape(message)):
            read_studies(path)


def test_data_without_a_validation_split_are_refused(tmp_path: Path) -> None:
    path = designs.write(tmp_path)
    path.write_text(path.read_text().replace("a: {", "a: {data: {kind: cifar10, root: x}, "))
    with pytest.raises(ConfigError, match="design: variant 'a': its data have no validation split"):
        designs.read(tmp_path)


def test_seeds_of_the_command_line_are_refused(tmp_path: Path) -> None:
    designs.write(tmp_path)
    source = read_studies(tmp_path / "ablations.yaml")["tiny"]
    with pytest.raises(ConfigError, match="design: decides the seeds, so leave out --seeds"):
        expand(source, tmp_path / "runs", seeds=(0, 1))


def test_variants_are_tuned_before_they_are_screened(tmp_path: Path) -> None:
    tune = "tune: {optimizer.weight_decay: [0, 0.5], select: val/loss, seeds: [100]}"
    designs.write(tmp_path, more=tune)
    matrix = designs.read(tmp_path)
    assert len(matrix.trials) == 10
    assert matrix.screening_jobs == matrix.jobs == []
    for job in matrix.trials:
        if job.variant.startswith("d@"):
            designs.fail(job, "diverged")
        else:
            decay = job.cell.experiment.optimizer.weight_decay
            designs.finish(job, 0.5 + 0.1 * decay)
    matrix = designs.read(tmp_path)
    assert matrix.screening is not None
    # The metric of the search ranks the variants, too.
    assert matrix.screening.select.name == "val/loss"
    variants = {job.variant for job in matrix.screening_jobs}
    assert variants == {"base", "a", "b", "c"}
    assert {j.cell.experiment.optimizer.weight_decay for j in matrix.screening_jobs} == {0.5}
    for job in matrix.screening_jobs:
        designs.finish(job, VALUES[job.variant])
    matrix = designs.read(tmp_path)
    # A variant whose trials have all diverged is screened out.
    assert designs.kept(matrix) == ["b", "c"]
    assert matrix.unplanned == []
    decays = {job.cell.experiment.optimizer.weight_decay for job in matrix.jobs}
    assert decays == {0.5}


def test_equal_flops_hold_in_both_stages(tmp_path: Path) -> None:
    path = designs.write(tmp_path, more="match: flops")
    path.write_text(path.read_text().replace("d: {", "d: {attention: belief2, "))
    matrix = designs.finish_screening(tmp_path, VALUES)
    stretches = {}
    for job in (*matrix.screening_jobs, *matrix.jobs):
        stretch = job.cell.experiment.training.stretch
        assert stretches.setdefault(job.variant, stretch) == stretch
    assert stretches["b"] == 1
    assert stretches["d"] != 1


def test_step_times_are_measured_before_the_screening(tmp_path: Path) -> None:
    designs.write(tmp_path, more="match: time")
    matrix = designs.read(tmp_path)
    assert not matrix.is_measured
    assert {job.variant for job in matrix.screening_jobs} == {"base"}
    assert designs.kept(matrix) is None


def test_a_side_study_has_a_screening_of_its_own(tmp_path: Path) -> None:
    designs.write(tmp_path)
    designs.finish_screening(tmp_path, VALUES)
    changes = Mapping(Where("--set"))
    changes.put("training.max_steps", 3, Where("--set"))
    side = designs.read(tmp_path, changes)
    assert side.name == "tiny@training.max_steps=3"
    assert designs.kept(side) is None
    smoke = expand(read_studies(tmp_path / "ablations.yaml")["tiny"], tmp_path, smoke=True)
    assert {job.variant for job in smoke.screening_jobs} == set(designs.NAMES)


def test_cells_of_both_stages_can_be_run_again(tmp_path: Path) -> None:
    designs.write(tmp_path)
    matrix = designs.finish_screening(tmp_path, VALUES)
    for name in ("tiny/a/0", "tiny/d/1002"):
        assert [job.name for job in select_cells([matrix], name)] == [name]


def test_a_look_is_one_at_fresh_seeds(tmp_path: Path) -> None:
    designs.write(tmp_path, "{screen: 8, keep: 2, confirm: 12}")
    matrix = designs.finish_screening(tmp_path, VALUES)
    (record,) = read_records(tmp_path / "runs")
    record_look(record, tmp_path / "runs/tiny")
    # Eight seeds of the screening are none of the confirmation.
    assert not (tmp_path / "runs/tiny/looks.json").exists()
    for job in matrix.jobs:
        if job.seed < 1010:
            designs.finish(job, 0.5)
    (record,) = read_records(tmp_path / "runs")
    record_look(record, tmp_path / "runs/tiny")
    looks = Looks.read(tmp_path / "runs/tiny/looks.json")
    assert looks is not None
    (look,) = looks.entries
    assert (look.seeds, look.planned) == (10, 12)
