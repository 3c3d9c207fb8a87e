"""Recorded training steps of released code, and the same steps of this project."""

import os
from fnmatch import fnmatch
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.paths import EXPERIMENTS, ROOT
from helpers.shipped import shipped_studies

from released import parity, pictures, record, replaying

PIPELINE_RUNS = [(setup, run) for setup in parity.PIPELINES for run in parity.records(setup)]
RUNS = [(setup, run) for setup in parity.SETUPS for run in parity.records(setup)]

CONVERTED_RUNS = [(s, run) for s in parity.CONVERSIONS for run in parity.records(s)]


@pytest.mark.slow
@pytest.mark.parametrize(("setup", "run"), RUNS)
def test_training_steps_agree_with_released_code(setup: str, run: str, tmp_path: Path) -> None:
    module, theirs = parity.SETUPS[setup], parity.records(setup)[run]
    ours = replaying.replay_run(module, run, tmp_path)
    assert ours["names"].tolist() == theirs["names"].tolist()
    assert ours["shapes"].tolist() == theirs["shapes"].tolist()
    for key in ("lr", "beta1", "beta2", "decay"):
        np.testing.assert_allclose(ours[key], theirs[key], rtol=1e-12, atol=1e-18, err_msg=key)
    for key, tolerance in parity.tolerances(setup, run).items():
        np.testing.assert_allclose(
            ours[key], theirs[key], rtol=tolerance, atol=tolerance, err_msg=key
        )
    differing = parity.initial_differences(ours, theirs)
    stated = getattr(module, "OTHER_INITIAL_VALUES", ())
    assert [name for name in differing if not any(part in name for part in stated)] == []
    assert bool(differing) == bool(stated)


@pytest.mark.slow
@pytest.mark.parametrize(("setup", "run"), PIPELINE_RUNS)
def test_input_pipelines_agree_with_released_code(setup: str, run: str, tmp_path: Path) -> None:
    module, theirs = parity.PIPELINES[setup], parity.records(setup)[run]
    ours = module.replay(run, tmp_path)
    assert set(ours) == set(theirs)
    for name, tolerance in module.TOLERANCES.items():
        assert ours[name].shape == theirs[name].shape, name
        assert parity.comparer(module)(name, ours, theirs).difference <= tolerance, name


@pytest.mark.parametrize(("setup", "run"), CONVERTED_RUNS)
def test_converted_weights_have_the_logits_of_released_code(setup: str, run: str) -> None:
    module, theirs = parity.CONVERSIONS[setup], parity.records(setup)[run]
    assert parity.relative_difference(module.replay(run, theirs), theirs) <= module.OTHER_MACHINE


@pytest.mark.parametrize(("setup", "run"), CONVERTED_RUNS)
def test_converted_weights_agree_with_released_code_on_this_machine(setup: str, run: str) -> None:
    """Set LIT_ATTN_CLONES to a folder of clones; the clone DCFormer must be at the commit."""
    folder = Path(os.environ.get("LIT_ATTN_CLONES", "clones")) / "DCFormer"
    if not folder.is_dir():
        pytest.skip(f"no clone {folder}")
    module = parity.CONVERSIONS[setup]
    with get_context("spawn").Pool(1) as pool:
        theirs = pool.apply(record.record_run, (setup, str(folder), run))
    assert parity.relative_difference(module.replay(run, theirs), theirs) <= module.TOLERANCE


def test_one_changed_value_changes_the_description_of_an_image() -> None:
    image = torch.zeros(3, 24, 24)
    changed = image.clone()
    changed[1, 7, 20] = 1 / 255
    described = pictures.describe("images", [image, changed])
    assert np.abs(np.diff(described["images"], axis=0)).max() > 1e-5
    assert len(set(described["images digests"].tolist())) == 2


def test_initial_values_of_another_distribution_differ() -> None:
    theirs = next(iter(parity.records("nanogpt").values()))
    scaled = theirs | {"deviation": 2 * theirs["deviation"]}
    uniform = np.random.default_rng(0).uniform(-1, 1, theirs["initial"].shape)
    uniform *= np.sqrt(3) * theirs["deviation"][:, None]
    matrices = [str(n) for n, s in zip(theirs["names"], theirs["shapes"], strict=True) if "," in s]
    assert parity.initial_differences(theirs, theirs) == []
    assert set(matrices) <= set(parity.initial_differences(scaled, theirs))
    differing = parity.initial_differences(theirs | {"initial": uniform * 3}, theirs)
    assert set(matrices) <= set(differing)


def test_the_page_has_powers_of_ten_that_no_difference_exceeds() -> None:
    assert [parity.bound(x) for x in (3e-8, 1.01e-8, 1e-8)] == ["1e-07", "1e-07", "1e-08"]
    assert parity.bound(0.0) == parity.bound(9e-13) == "< 1e-12"


def test_the_page_lists_every_record() -> None:
    page = parity.PAGE.read_text()
    setups = {**parity.SETUPS, **parity.PIPELINES, **parity.CONVERSIONS}
    for setup in setups:
        source = parity.origin(setup)
        assert f"| [{source['repository']}]" in page
        assert f"**{setup}.**" in page
        assert source["commit"] in page
    files = {path.stem for path in (Path(parity.__file__).parent / "records").glob("*.npz")}
    # The page of mechanisms names the sources of the records of single layers.
    assert files == {*setups, "mechanisms"}


def test_captions_of_published_studies_state_the_recorded_agreement_and_all_departures() -> None:
    words = {setup: parity.words(setup) for setup in parity.SETUPS}
    others, named = set(words.values()), set()
    for name, source in shipped_studies().items():
        path = source.experiment_path.relative_to(EXPERIMENTS).as_posix()
        setups = [s for s in words if f"experiments/{path}" in parity.SETUPS[s].EXPERIMENT]
        stated = [words[s] for s in setups] or others
        if text := source.study.parity:
            (agreement,) = {w for w in stated if text == parity.caption_words(w, path)}
            named.add(agreement)
        assert not setups or text, name
        assert not source.study.published or text, name
    assert named == others - {words["dcformer_pytorch"]}


def test_every_listed_departure_concerns_a_published_study() -> None:
    sources = shipped_studies().values()
    stating = {
        source.experiment_path.relative_to(EXPERIMENTS).as_posix()
        for source in sources
        if source.study.parity
    }
    departures = parity.departures()
    tables = (ROOT / "docs" / "setups.md").read_text().split("| sentence of the captions |")[1:]
    assert len(tables) == 2
    assert sum(table.split("\n\n")[0].count("\n| ") for table in tables) == len(departures)
    for departure in departures:
        assert departure.sentence.endswith("."), departure
        for pattern in departure.experiments:
            assert any(fnmatch(name, pattern) for name in stating), pattern


def test_the_best_test_epoch_is_shown_where_the_released_code_reports_it() -> None:
    repositories = {parity.SETUPS[s].REPOSITORY for s in ("spt_lsa_vit", "vit_small", "local_vit")}
    for name, source in shipped_studies().items():
        is_reported = source.study.parity.partition(",")[0] in repositories
        is_accuracy = source.study.metric.name == "test/accuracy"
        assert source.study.best_test_epoch == (is_reported and is_accuracy), name
