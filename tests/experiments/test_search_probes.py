"""The probes of search: where their answers stand, and sequences without room for them."""

import importlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.paths import ROOT
from helpers.training_cells import cell_of, folder_of

from lit_attn.cells.records import Result
from lit_attn.schema.plugins import load_parts
from lit_attn.schema.yaml_text import parse_plain
from lit_attn.train import run_cell
from lit_attn.training import build

PROBES = ROOT / "experiments" / "probes"
load_parts([PROBES / "search.py"])
search = importlib.import_module("search")

IGNORED = -100


def draw(config: Any, count: int) -> Any:
    return config.draw(np.random.default_rng(0), count, config.length, False)


def test_the_answer_of_an_induction_stands_behind_the_first_mark() -> None:
    config = search.InductionConfig(length=16, gap=3)
    tokens, targets = draw(config, 200)
    first_marks = (tokens == config.ids - 1).argmax(axis=1)
    np.testing.assert_array_equal((tokens == config.ids - 1).sum(axis=1), 2)
    rows = np.arange(len(tokens))
    np.testing.assert_array_equal(targets[:, -1], tokens[rows, first_marks + 4])
    assert (tokens[:, -4] == config.ids - 1).all()


def test_the_key_of_a_needle_stands_once_before_the_question() -> None:
    config = search.NeedleConfig(length=16)
    tokens, targets = draw(config, 200)
    for row, wanted in zip(tokens, targets[:, -1], strict=True):
        (place,) = np.flatnonzero(row[:-1] == row[-1])
        assert row[place + 1] == wanted
    # Every place occurs.
    places = (tokens[:, :-1] == tokens[:, -1:]).argmax(axis=1)
    assert set(places.tolist()) == set(range(14))


def test_the_last_value_of_an_overwritten_needle_counts() -> None:
    config = search.OverwrittenNeedleConfig(length=24, writes=3)
    tokens, targets = draw(config, 200)
    last_places = set()
    for row, wanted in zip(tokens, targets[:, -1], strict=True):
        places = np.flatnonzero(row[:-1] == row[-1])
        values = row[places + 1]
        assert len(set(values.tolist())) == 3
        assert ((values >= 8) & (values < 16)).all()
        assert values[-1] == wanted
        last_places.add(int(places[-1]))
    # Every place of two tokens before the question that two others can precede occurs.
    assert last_places == set(range(4, 22, 2))


def test_an_overwritten_needle_needs_room_for_its_writes() -> None:
    with pytest.raises(ValueError, match="16 tokens have room for 7 at most"):
        search.OverwrittenNeedleConfig(length=16, writes=8)
    with pytest.raises(ValueError, match="3 values are written at most once each"):
        search.OverwrittenNeedleConfig(length=16, values=3)


def test_found_blocks_equal_the_published_sequences() -> None:
    file = Path(__file__).parent / "published_probes.json"
    record = json.loads(file.read_text())["find-block"]
    config = search.FindBlockConfig.model_validate(record["parameters"])
    tokens, targets = np.array(record["tokens"]), np.array(record["targets"])
    blocks = tokens[:, 1:-5].reshape(len(tokens), -1, 4)[:, :, :3]
    arranged = search.arrange_blocks(blocks, tokens[:, -5:-3], tokens[:, -3:], config.letters)
    np.testing.assert_array_equal(arranged[0], tokens)
    np.testing.assert_array_equal(arranged[1], targets)


def test_one_block_has_all_letters_of_the_question() -> None:
    """The sizes of the paper's toy task are the defaults."""
    config = search.FindBlockConfig()
    tokens, targets = draw(config, 200)
    letters, separator, mark, start, end = 26, 26, 27, 29, 30
    assert tokens.shape == (200, 320)
    assert (tokens[:, 0] == start).all()
    np.testing.assert_array_equal((targets != IGNORED).sum(axis=1), 6)
    np.testing.assert_array_equal(targets[:, -6:-1], tokens[:, -5:])
    assert (targets[:, -1] == end).all()
    # 52 blocks of five letters, each with a separator or, the last one, the mark behind it.
    parts = tokens[:, 1:313].reshape(200, 52, 6)
    assert (parts[:, :-1, 5] == separator).all()
    assert (parts[:, -1, 5] == mark).all()
    places = []
    for row, blocks in zip(tokens, parts[:, :, :5], strict=True):
        assert blocks.max() < letters
        assert len({tuple(block) for block in blocks.tolist()}) == 52
        assert all(len(set(block)) == 5 for block in blocks.tolist())
        question, answer = row[313:315], row[315:]
        assert question[0] != question[1]
        has_question = [set(question.tolist()) <= set(block) for block in blocks.tolist()]
        (place,) = np.flatnonzero(has_question)
        np.testing.assert_array_equal(blocks[place], answer)
        places.append(int(place))
    # The answer stands anywhere, and the letters of the question anywhere in it.
    assert len(set(places)) > 40
    first_letter_is_asked = (tokens[:, 313:315] == tokens[:, 315:316]).any(axis=1).mean()
    assert abs(first_letter_is_asked - 0.4) < 0.15


def test_letters_of_blocks_are_uniform_and_equal_blocks_are_drawn_again() -> None:
    # Three of the 28 blocks that do not have both letters of the question are equal quite often.
    config = search.FindBlockConfig(letters=6, block=2, question=2, length=1 + 3 * 4 + 2 + 2)
    tokens, _ = draw(config, 4000)
    blocks = tokens[:, 1:13].reshape(-1, 4, 3)[:, :, :2]
    numbers = np.sort(blocks @ np.array([6, 1]), axis=1)
    assert (numbers[:, 1:] != numbers[:, :-1]).all()
    shares = np.bincount(blocks.ravel(), minlength=6) / blocks.size
    np.testing.assert_allclose(shares, 1 / 6, atol=0.01)
    pairs = np.array([[[0, 1], [2, 3], [0, 1]], [[0, 1], [2, 3], [1, 0]]])
    assert search.has_repeat(pairs).tolist() == [True, False]


def test_a_block_needs_whole_blocks_and_enough_letters() -> None:
    with pytest.raises(ValueError, match="length: whole blocks make 20 tokens or 6, 12,"):
        search.FindBlockConfig(length=321)
    with pytest.raises(ValueError, match="longer: whole blocks make"):
        search.FindBlockConfig(longer=640)
    with pytest.raises(ValueError, match="letters: 5 are too few for 52 blocks"):
        search.FindBlockConfig(letters=5)
    with pytest.raises(ValueError, match="a question of 6 letters needs a block of at least as"):
        search.FindBlockConfig(question=6)


STUDY = parse_plain((PROBES / "studies.yaml").read_text(), "text")["studies"]["multi-token-toy"]


@pytest.mark.parametrize("variant", STUDY["cells"])
def test_both_layers_of_the_toy_task_train(variant: str, tmp_path: Path) -> None:
    experiment = parse_plain((PROBES / STUDY["experiment"]).read_text(), "text")
    assert (experiment["data"]["rows"], experiment["model"]["depth"]) == (1_000_000, 4)
    # Six blocks, one layer, two steps.
    small = {"length": 44, "rows": 64, "batch_size": 32, "epoch_steps": 2, "eval_sequences": 40}
    experiment["data"] |= {**small, "eval_batch_size": 32, "root": str(tmp_path / "rows")}
    experiment["model"] |= {"dim": 32, "depth": 1, "ffn": {"width": 32, "activation": "swiglu"}}
    experiment["model"] |= STUDY["cells"][variant]
    experiment["training"] |= {"epochs": 1, "precision": "fp32"}
    cell = cell_of(experiment, metric=STUDY["metric"], parts=[str(PROBES / "search.py")])
    parts = build.build(cell, torch.device("cpu"))
    task, batch = parts.task, parts.data.batch(0)
    assert [tuple(array.shape) for array in batch] == [(32, 44), (32, 44)]
    task.loss(batch).backward()
    gradients = dict(task.network.named_parameters())
    kernels = [gradients[name].grad for name in gradients if name.endswith("logit_kernel")]
    assert [kernel.shape for kernel in kernels] == ([(2, 2, 9)] if variant != "standard" else [])
    assert all(bool((kernel != 0).all()) for kernel in kernels)
    folder = folder_of(cell, tmp_path)
    run_cell(folder)
    result = Result.read(folder / "result.json")
    assert result.metrics["test/errors"] > 0.9
    assert 0 < result.metrics["test/accuracy"] < 0.5
