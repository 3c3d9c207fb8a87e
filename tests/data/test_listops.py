"""ListOps: values of expressions, generated expressions, and the arena's files."""

import statistics
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
from helpers.paths import SHARED
from pydantic import ValidationError

from lit_attn.data.text.ids import SPLITS
from lit_attn.data.text.listops import TOKENS, ListOps, evaluate, generate, parse
from lit_attn.schema.errors import ConfigError

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


def test_expressions_are_drawn_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = ListOps(**SMALL, batch_size=8, root=tmp_path)
    drawn = chosen.read_samples()
    expected = generate(0, (5, 40), 4, 10)
    for split in SPLITS:
        for sample in drawn[split]:
            ids, value = next(expected)
            assert sample.documents[0].tolist() == ids
            assert sample.documents[0].dtype == np.uint16
            assert sample.label == value
    (kept,) = tmp_path.glob("*.npz")
    # Other keys draw other expressions.
    other = chosen.model_copy(update={"lengths": (6, 40)}).read_samples()
    assert len(list(tmp_path.glob("*.npz"))) == 2
    assert min(len(sample.documents[0]) for sample in other["train"]) == 6
    # The second cell draws nothing.
    monkeypatch.delattr("lit_attn.data.text.listops.generate")
    again = chosen.read_samples()
    for split in SPLITS:
        assert [sample.label for sample in again[split]] == [s.label for s in drawn[split]]
    assert chosen.input_paths() == []
    kept.write_bytes(kept.read_bytes()[:50])
    with pytest.raises(ConfigError, match=r"^data\.root: .*npz is damaged; delete it$"):
        chosen.read_samples()


def test_files_of_the_arena_are_read(tmp_path: Path) -> None:
    chosen = ListOps(**SMALL, batch_size=8, root=tmp_path / "drawn")
    for split, samples in chosen.read_samples().items():
        rows = []
        for sample in samples:
            expression = " ".join(TOKENS[i] for i in sample.documents[0])
            rows.append(f"{expression}\t{sample.label}")
        (tmp_path / f"basic_{split}.tsv").write_text("\n".join(["Source\tTarget", *rows]) + "\n")
    read = chosen.model_copy(update={"folder": tmp_path}).read_samples()
    for split, samples in chosen.read_samples().items():
        assert [s.label for s in samples] == [s.label for s in read[split]]
        assert [s.documents[0].tolist() for s in samples] == [
            s.documents[0].tolist() for s in read[split]
        ]


def test_a_wrong_label_in_a_file(tmp_path: Path) -> None:
    for split in SPLITS:
        (tmp_path / f"basic_{split}.tsv").write_text(
            "Source\tTarget\n[MAX 1 2 ]\t2\n[MIN 1 2 ]\t2\n"
        )
    with pytest.raises(ConfigError, match=r"basic_train.tsv:3: the value is 1, not 2"):
        ListOps(folder=tmp_path).read_samples()
    (tmp_path / "basic_train.tsv").write_text("Source\tTarget\n")
    with pytest.raises(ConfigError, match=r"basic_train.tsv: has no samples"):
        ListOps(folder=tmp_path).read_samples()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lengths": (50, 20)}, "lengths: 50 is more than 20"),
        ({"depth": 2}, "lengths: trees of depth"),
    ],
)
def test_bad_configurations_are_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        ListOps.model_validate(changes)
