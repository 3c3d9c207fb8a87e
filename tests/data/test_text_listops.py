"""Tests of ListOps and labelled sequences: labels, files, batches."""

import statistics
from itertools import islice
from pathlib import Path

import pytest
import torch
from helpers.data_ranks import on_rank
from helpers.paths import SHARED
from pydantic import ValidationError

from lit_attn.config.data.text import IGNORED, LabelledText, ListOps
from lit_attn.data.text import labelled
from lit_attn.data.text.labelled import TOKENS, LabelledData, evaluate, generate, parse
from lit_attn.schema.errors import ConfigError

CPU = torch.device("cpu")

SMALL = {"lengths": (5, 40), "depth": 4, "context": 40, "train": 24, "val": 7, "test": 5}


def evaluate_recursively(tokens: list[str]) -> int:
    """Return the value of an expression by its recursive definition, consuming `tokens`."""
    token = tokens.pop(0)
    if token.isdigit():
        return int(token)
    values = []
    while tokens[0] != "]":
        values.append(evaluate_recursively(tokens))
    tokens.pop(0)
    return {
        "[MIN": min(values),
        "[MAX": max(values),
        "[MED": int(statistics.median(values)),
        "[SM": sum(values) % 10,
    }[token]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("[MAX 4 3 [MIN 2 3 ] 1 0 [MED 1 5 8 9 2 ] ]", 5),
        ("[SM 9 9 9 ]", 7),
        ("[MED 1 2 3 8 ]", 2),
        ("( ( ( [MED 7 ) 8 ) ] )", 7),
        ("3", 3),
    ],
)
def test_values_of_expressions_are_those_computed_by_hand(text: str, value: int) -> None:
    assert evaluate(parse(text)) == value


@pytest.mark.parametrize("text", ["", "[MAX 1 2", "1 2", "[MIN ]", "1 ]", "[AVG 1 2 ]", "11"])
def test_malformed_expressions_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        evaluate(parse(text))


def test_labels_of_the_public_test_set() -> None:
    path = SHARED / "listops" / "test_d20s.tsv"
    if not path.exists():
        pytest.skip("the ListOps test set is not at hand")
    rows = [line.split("\t") for line in path.read_text().splitlines()]
    assert len(rows) == 10_000
    assert [evaluate(parse(text)) for _, text in rows] == [int(label) for label, _ in rows]


def depth_of(ids: list[int]) -> int:
    """Return the number of levels of a tree, digits included."""
    level = deepest = 0
    for number in ids:
        level += (TOKENS[number][0] == "[") - (TOKENS[number] == "]")
        deepest = max(deepest, level)
    return deepest + 1


def test_generated_expressions() -> None:
    samples = list(islice(generate(0, (20, 60), 5, 10), 300))
    assert samples == list(islice(generate(0, (20, 60), 5, 10), 300))
    assert samples[:5] != list(islice(generate(1, (20, 60), 5, 10), 5))
    for ids, value in samples:
        assert 20 <= len(ids) <= 60
        assert depth_of(ids) <= 5
        assert value == evaluate_recursively([TOKENS[i] for i in ids])
    assert len({tuple(ids) for ids, _ in samples}) == 300
    assert {value for _, value in samples} == set(range(10))


def test_default_expressions_have_the_arenas_lengths() -> None:
    (ids, _) = next(generate(0, (500, 2000), 10, 10))
    assert 500 <= len(ids) <= 2000


def data(seed: int = 0, **changes: object) -> LabelledData:
    return LabelledData(ListOps(**{**SMALL, "batch_size": 8, **changes}), seed, CPU)


def test_batches_depend_on_seed_and_step_alone() -> None:
    first, again = data(), data()
    again.batch(3)
    for one, other in zip(first.batch(4), again.batch(4), strict=True):
        torch.testing.assert_close(one, other)
    assert not torch.equal(first.batch(4)[0], data(seed=1).batch(4)[0])
    assert first.fingerprint() == data(seed=1).fingerprint()
    assert first.steps_per_epoch == 3


def test_a_pass_shows_every_sample_once() -> None:
    module = data()
    rows = torch.cat([module.batch(step)[0] for step in range(3)])
    assert len(rows.unique(dim=0)) == 24


def test_padding_is_marked_as_absent() -> None:
    tokens, present, labels = data().batch(0)
    assert tokens.shape == (8, 40)
    assert torch.equal(present, tokens > 0)
    for row, label in zip(tokens, labels, strict=True):
        assert evaluate(row[row > 0].tolist()) == label


@pytest.mark.parametrize("world", [1, 2, 4])
def test_every_sample_is_evaluated_once(world: int) -> None:
    rows, batches = [], set()
    for rank in range(world):
        module = data(eval_batch_size=2)
        on_rank(module, rank, world)
        val, _ = module.val_dataloader()
        batches.add(len(list(val)))
        for tokens, present, labels in val:
            assert present.any(-1).all()
            rows += [tuple(row.tolist()) for row in tokens[labels != IGNORED]]
    assert len(set(rows)) == len(rows) == 7
    assert len(batches) == 1


def test_micro_batches_make_up_the_batch() -> None:
    module = data(accumulate=2)
    parts = list(module.train_dataloader())
    assert len(parts) == len(module.train_dataloader()) == 6
    torch.testing.assert_close(torch.cat([parts[0][0], parts[1][0]]), module.batch(0)[0])


def test_files_of_the_arena_are_read(tmp_path: Path) -> None:
    chosen = ListOps(**SMALL, batch_size=8)
    for split, samples in chosen.read_samples().items():
        expressions = (" ".join(labelled.TOKENS[i] for i in s.documents[0]) for s in samples)
        rows = [f"{text}\t{s.label}" for text, s in zip(expressions, samples, strict=True)]
        (tmp_path / f"basic_{split}.tsv").write_text("\n".join(["Source\tTarget", *rows]) + "\n")
    read = chosen.model_copy(update={"folder": tmp_path}).read_samples()
    for split, samples in chosen.read_samples().items():
        assert [s.label for s in samples] == [s.label for s in read[split]]
        assert [s.documents[0].tolist() for s in samples] == [
            s.documents[0].tolist() for s in read[split]
        ]


def test_a_wrong_label_in_a_file(tmp_path: Path) -> None:
    for split in labelled.SPLITS:
        (tmp_path / f"basic_{split}.tsv").write_text(
            "Source\tTarget\n[MAX 1 2 ]\t2\n[MIN 1 2 ]\t2\n"
        )
    with pytest.raises(ConfigError, match=r"basic_train.tsv:3: the value is 1, not 2"):
        ListOps(folder=tmp_path).read_samples()
    (tmp_path / "basic_train.tsv").write_text("Source\tTarget\n")
    with pytest.raises(ConfigError, match=r"basic_train.tsv: has no samples"):
        ListOps(folder=tmp_path).read_samples()


def text(folder: Path, rows: str, **changes: object) -> LabelledData:
    for split in labelled.SPLITS:
        (folder / f"{split}.tsv").write_text(rows)
    fields = {"name": "x", "folder": folder, "context": 4, "batch_size": 2, **changes}
    return LabelledData(LabelledText.model_validate(fields), 0, CPU)


def test_labelled_text_is_cut_and_padded(tmp_path: Path) -> None:
    tokens, present, labels = text(tmp_path, "1\tabcdef\n0\tg\n").batch(0)
    rows = dict(zip(labels.tolist(), tokens.tolist(), strict=True))
    assert rows == {1: [98, 99, 100, 101], 0: [104, 0, 0, 0]}
    assert present.sum() == 5


def test_positions_beyond_the_tokens_are_padding(tmp_path: Path) -> None:
    """The arena's repositories read 4,000 tokens of a text into 4,096 positions."""
    tokens, present, _ = text(tmp_path, "1\tabcdef\n0\tabcdef\n", max_tokens=3).batch(0)
    assert tokens.tolist() == [[98, 99, 100, 0]] * 2
    assert present.sum() == 6
    with pytest.raises(
        ValidationError, match="max_tokens: 5 tokens do not fit into a context of 4"
    ):
        text(tmp_path, "1\ta\n", max_tokens=5)


def test_pairs_have_an_axis_of_documents(tmp_path: Path) -> None:
    tokens, present, _ = text(tmp_path, "1\tab\tc\n0\td\te\n", pairs=True).batch(0)
    assert tokens.shape == present.shape == (2, 2, 4)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ("1\tab\n2\tc\n", r"train.tsv:2: label '2' is not one of 0 to 1"),
        ("1 ab\n", r"train.tsv:1: needs 2 columns"),
        ("1\t\n", r"train.tsv:1: needs 2 columns with text"),
        ("1\ta\n", r"data.batch_size: 2 is more than the 1 samples of an epoch"),
        ("", r"train.tsv: is empty"),
    ],
)
def test_malformed_labelled_text_is_refused(tmp_path: Path, rows: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        text(tmp_path, rows)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lengths": (50, 20)}, "lengths: 50 is more than 20"),
        ({"depth": 2}, "lengths: trees of depth"),
        ({"batch_size": 5, "accumulate": 2}, "accumulate: 2 does not divide the batch of 5"),
    ],
)
def test_bad_configurations_are_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        ListOps.model_validate(changes)
