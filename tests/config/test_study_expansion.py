"""Expansion of studies: names, order, precedence, matching of parameters, and identities."""

from pathlib import Path

import pytest
from helpers import studies
from pydantic import TypeAdapter

from lit_attn.ablate import plan
from lit_attn.ablate.axes import combine_axes
from lit_attn.ablate.plan import expand
from lit_attn.ablate.variants import resolve
from lit_attn.attention.residual import PerpendicularConfig, SplitConfig
from lit_attn.attention.spec import PRESETS
from lit_attn.config.study import choose, read_studies
from lit_attn.optim.schedules import Constant
from lit_attn.optim.standard import Adam, AdamW
from lit_attn.schema.errors import ConfigError
from lit_attn.schema.yaml_text import Mapping, Where


def test_cells_have_names_and_may_choose_presets(tmp_path: Path) -> None:
    body = "baseline: standard\ncells:\n" + "\n".join(
        f"  {name}: {{attention: {name}}}" for name in PRESETS
    )
    variants = studies.variants(tmp_path, body)
    assert list(variants) == list(PRESETS)
    assert {n: v.experiment.model.attention for n, v in variants.items()} == PRESETS


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("{attention: {preset: belief2, zz: without}}", {"zz": False, "residual": SplitConfig()}),
        (
            "{attention: {preset: belief2, residual: {activation: silu}}}",
            {"zz": True, "residual": SplitConfig(activation="silu")},
        ),
        ("{attention: {preset: belief2, residual: perpendicular}}",
         {"residual": PerpendicularConfig()}),
        ("{residual: perpendicular, zz: with}", {"zz": True, "residual": PerpendicularConfig()}),
        # The shorter path is applied first, wherever it is written.
        ("{residual: perpendicular, attention: belief2}", {"residual": PerpendicularConfig()}),
        ("{residual.activation: tanh, attention: belief2}",
         {"residual": SplitConfig(activation="tanh")}),
        ("{attention.residual.scope: both, residual: perpendicular}",
         {"residual": PerpendicularConfig(scope="both")}),
        ("{model: {attention: {residual: split}}}", {"residual": SplitConfig()}),
    ],
)  # fmt: skip
def test_an_override_refines_the_attention_layer(
    tmp_path: Path, override: str, expected: dict[str, object]
) -> None:
    cells = f"baseline: a\ncells:\n  a: {{optimizer.lr: 1}}\n  b: {override}"
    spec = studies.variants(tmp_path, cells)["b"].experiment.model.attention
    assert {key: getattr(spec, key) for key in expected} == expected


def test_a_part_of_another_kind_replaces_the_whole_part(tmp_path: Path) -> None:
    variants = studies.variants(
        tmp_path,
        """
baseline: a
cells:
  a: {}
  refined: {optimizer: {weight_decay: 0.1}}
  replaced: {optimizer: {kind: adam, lr: 2e-3}}
  by-name: {schedule: constant}
  none: {ffn: none, match: none}
  narrow: {ffn: {width: 8}, match: none}
  with: {ffn: with, optimizer.lr: 5}
""",
    )
    assert variants["refined"].experiment.optimizer == AdamW(lr=1e-3, weight_decay=0.1)
    assert variants["replaced"].experiment.optimizer == Adam(lr=2e-3)
    assert variants["by-name"].experiment.schedule == Constant()
    assert variants["none"].experiment.model.ffn is None
    widths = [variants[n].experiment.model.ffn.width for n in ("narrow", "with")]
    assert widths == [8, 32]


def test_the_last_axis_of_a_product_varies_fastest(tmp_path: Path) -> None:
    variants = studies.variants(
        tmp_path,
        """
baseline: residual=full,zz=without
axes:
  residual: [full, perpendicular]
  zz: [with, without]
""",
    )
    assert list(variants) == [
        "residual=full,zz=with",
        "residual=full,zz=without",
        "residual=perpendicular,zz=with",
        "residual=perpendicular,zz=without",
    ]


def test_one_axis_is_named_by_its_values(tmp_path: Path) -> None:
    body = """
baseline: '0.001'
axes:
  optimizer.lr: [1e-3, 3e-4, 5]
"""
    variants = studies.variants(tmp_path, body)
    rates = {name: variant.experiment.optimizer.lr for name, variant in variants.items()}
    assert rates == {"0.001": 1e-3, "0.0003": 3e-4, "5": 5.0}


def test_exclude_cells_and_set_combine(tmp_path: Path) -> None:
    variants = studies.variants(
        tmp_path,
        """
set: {training.epochs: 7}
axes:
  size:
    small: {data.batch_size: 32, optimizer.lr: 1e-3}
    large: {data.batch_size: 64, optimizer.lr: 2e-3}
  residual: [full, {kind: split, activation: silu}]
  recipe: {short: {training.epochs: 1}, long: {}}
exclude:
  - {residual: full, recipe: short}
  - {size: large, recipe: [long]}
cells: {"residual=value,short": {residual: value, training.epochs: 1, ffn: none, match: none}}
baseline: small,residual=full,long
""",
    )
    assert list(variants) == [
        "small,residual=full,long",
        "small,residual=split+activation=silu,short",
        "small,residual=split+activation=silu,long",
        "large,residual=split+activation=silu,short",
        "residual=value,short",
    ]
    epochs = [variant.experiment.training.epochs for variant in variants.values()]
    assert epochs == [7, 1, 7, 1, 1]
    assert variants["residual=value,short"].experiment.model.ffn is None


def test_later_changes_take_precedence(tmp_path: Path) -> None:
    """The order is: experiment, `set`, cell, command line."""
    source = studies.study(
        tmp_path,
        """
baseline: a
set: {training.epochs: 20, data.batch_size: 20, optimizer.lr: 20, optimizer.weight_decay: 20}
cells:
  a: {data.batch_size: 30, optimizer.lr: 30, optimizer.weight_decay: 30}
""",
    )
    changes = Mapping(Where("--set"))
    changes.put("optimizer.weight_decay", 50, Where("--set"))
    experiment = resolve(source, changes)[0].experiment
    assert experiment.training.epochs == 20
    assert experiment.data.batch_size == 30
    assert (experiment.optimizer.lr, experiment.optimizer.weight_decay) == (30, 50)


def test_variants_match_the_baseline_unless_the_model_is_the_same(tmp_path: Path) -> None:
    variants = studies.variants(
        tmp_path,
        """
baseline: standard
cells:
  standard: {attention: standard}
  belief2: {attention: belief2}
  unmatched: {attention: xsa, match: none}
  same-model: {optimizer.lr: 1}
""",
    )
    baseline = variants["standard"].experiment.model
    matched = {name: variant.match_to for name, variant in variants.items()}
    assert matched == {
        "standard": None, "belief2": baseline, "unmatched": None, "same-model": None,
    }  # fmt: skip


def test_one_variant_can_match_alone(tmp_path: Path) -> None:
    body = """
baseline: a
match: none
cells:
  a: {}
  b: {attention: xsa}
  c: {attention: xsa, match: parameters}
"""
    variants = studies.variants(tmp_path, body)
    assert variants["b"].match_to is None
    assert variants["c"].match_to == variants["a"].experiment.model


@pytest.mark.parametrize(
    ("axis", "baseline", "name"),
    [
        ("optimizer.lr: [1, 2]", "1", "1"),
        ("optimizer.lr: [1e-4, 2]", "1e-4", "0.0001"),
        ("model.dropout: [null, 0.5]", "null", "none"),
        ("zz: [false, true]", "false", "false"),
    ],
)
def test_a_baseline_is_named_as_axes_name_it(
    tmp_path: Path, axis: str, baseline: str, name: str
) -> None:
    """A baseline can be a number or a boolean in YAML."""
    study = studies.study(tmp_path, f"baseline: {baseline}\naxes: {{{axis}}}")
    assert study.study.baseline == combine_axes(study)[0].name == name


CELLS = "baseline: a\ncells: {a: {}, b: {attention: belief2}}"


def test_every_seed_is_complete_before_the_next(tmp_path: Path) -> None:
    jobs = expand(studies.study(tmp_path, CELLS), tmp_path / "runs").jobs
    assert [(j.seed, j.variant) for j in jobs] == [
        (0, "a"), (0, "b"), (1, "a"), (1, "b"),
    ]  # fmt: skip
    assert jobs[1].folder == tmp_path / "runs" / "tiny" / "b" / f"0-{jobs[1].identity}"


def identities(folder: Path, body: str, experiment: str = studies.EXPERIMENT) -> dict[str, str]:
    folder.mkdir()
    jobs = expand(studies.study(folder, body, experiment), folder).jobs
    return {job.name: job.identity for job in jobs}


def test_identity_ignores_order_comments_defaults_paths_and_devices(tmp_path: Path) -> None:
    spelled_out = """\
# The same experiment with all defaults, in another order.
training: {epochs: 2, compile: blocks, accelerator: cpu, precision: fp32, checkpoint_every: 9}
schedule: {warmup: 1.0, kind: cosine, end: 0}
optimizer: {lr: 0.001, kind: adamw, betas: [0.9, 0.999]}
model:
  ffn: {width: 32, activation: gelu}
  attention: standard
  kind: vit
  patch: 4
  heads: 2
  depth: 1
  dim: 16
data: {batch_size: 64, kind: digits}
"""
    body = "cells: {b: {attention: {preset: belief2, similarity: dot}}, a: {zz: without}}"
    assert identities(tmp_path / "1", CELLS) == identities(
        tmp_path / "2", f"baseline: a\n{body}", spelled_out
    )


@pytest.mark.parametrize(
    "changed",
    ["set: {optimizer.lr: 2e-3}", "set: {attention: xsa}", "metric: {selection: best-validation}"],
)
def test_identity_changes_with_the_computation(tmp_path: Path, changed: str) -> None:
    before = identities(tmp_path / "1", CELLS)
    after = identities(tmp_path / "2", f"{CELLS}\n{changed}")
    assert all(before[name] != after[name] for name in before if name.startswith("tiny/a"))


def test_a_new_seed_or_variant_leaves_other_identities_alone(tmp_path: Path) -> None:
    before = identities(tmp_path / "1", CELLS)
    body = "baseline: a\ncells: {a: {}, new: {attention: xsa}, b: {attention: belief2}}"
    (tmp_path / "2").mkdir()
    source = studies.study(tmp_path / "2", body)
    after = {job.name: job.identity for job in expand(source, tmp_path, seeds=(0, 1, 7)).jobs}
    assert len(after) == 9
    assert before.items() < after.items()


@pytest.mark.slow
def test_shared_parts_are_validated_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The work grows with the number of values, not of cells: 10,000 cells take less than 1 s."""
    values = ", ".join(str(i) for i in range(1, 23))
    body = f"""
baseline: lr=1,batch_size=1,epochs=1
axes:
  optimizer.lr: [{values}]
  data.batch_size: [{values}]
  training.epochs: [{values}]
"""
    source = studies.study(tmp_path, body)
    resolve(source)
    validated = []
    original = TypeAdapter.validate_python

    def count_calls(self: TypeAdapter[object], value: object) -> object:
        validated.append(value)
        return original(self, value)

    monkeypatch.setattr(TypeAdapter, "validate_python", count_calls)
    assert len(resolve(source)) == 10_648
    assert len(validated) == 3 * 22 + 2


def test_a_plan_contains_published_numbers_and_seeds(tmp_path: Path) -> None:
    source = studies.study(tmp_path, CELLS + "\npublished: {a: [72.01, 0.20], b: 76}")
    written = expand(source, tmp_path).plan()
    assert [variant.published for variant in written.variants] == [(72.01, 0.20), (76.0, None)]
    assert written.seeds == [0, 1]
    assert [cell.path for cell in written.cells] == [
        str(job.folder.relative_to(tmp_path / "tiny")) for job in expand(source, tmp_path).jobs
    ]


def test_studies_are_chosen_by_name_or_default(tmp_path: Path) -> None:
    path = studies.write(tmp_path, CELLS)
    path.write_text(path.read_text().replace("studies:\n", "studies:\n  other: &head\n"
        "    title: t\n    experiment: experiment.yaml\n    seeds: [3]\n    baseline: x\n"
        "    cells: {x: {}}\n  child:\n    <<: *head\n    title: child\n    seeds: [4]\n"
    ))  # fmt: skip
    sources = read_studies(path)
    assert [s.name for s in choose(sources, [], path)] == ["tiny"]
    assert [s.name for s in choose(sources, ["tiny", "other"], path)] == ["other", "tiny"]
    path.write_text(path.read_text().replace("default: true", "default: false"))
    with pytest.raises(ConfigError, match="name one with --study: other, child, tiny"):
        choose(read_studies(path), [], path)
    assert (sources["child"].study.title, sources["child"].study.seeds) == ("child", (4,))


def test_the_number_of_variants_and_cells_is_limited(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = ", ".join(str(number) for number in range(1, 101))
    axes = ", ".join(
        f"{key}: [{values}]" for key in ("optimizer.lr", "data.batch_size", "training.epochs")
    )
    with pytest.raises(ConfigError) as caught:
        resolve(studies.study(tmp_path, f"baseline: x\naxes: {{{axes}}}"))
    assert str(caught.value) == (
        f"{tmp_path / 'ablations.yaml'}:8: tiny.axes: 1,000,000 combinations exceed the limit of"
        " 100,000 variants; use fewer values, or split the study"
    )
    monkeypatch.setattr(plan, "MAX_CELLS", 3)
    with pytest.raises(ConfigError, match=r":6: tiny.seeds: 2 variants x 2 seeds = 4 cells exceed"):
        expand(studies.study(tmp_path, CELLS), tmp_path)


def test_a_typing_error_in_an_axis_is_reported_before_a_missing_name(tmp_path: Path) -> None:
    body = "baseline: a\naxes: {residual: [ful, value]}"
    with pytest.raises(ConfigError, match=r":8: tiny: variant 'ful'"):
        resolve(studies.study(tmp_path, body))
