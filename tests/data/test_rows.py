"""Tests of CSV and JSON files: every cell is read as written, and mistakes are named."""

import csv
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lit_attn.data.rows import read_csv, read_json
from lit_attn.data.table_sets import TableImages, TableLabels, TableTags, TableText
from lit_attn.data.tables import load_rows
from lit_attn.schema.errors import ConfigError

WORDS_OF_GAPS = ["null", "NULL", "NA", "N/A", "n/a", "None", "nan", "NaN", "#N/A", "-", "<NA>"]
WORDS_OF_NUMBERS = ["007", "1.0", "1e5", "True", "2020-01-01", "0x1F", "1_000", " 3 ", "inf"]
ANY_TEXT = st.text(st.characters(blacklist_categories=["Cs"]), max_size=8)
CELLS = st.one_of(
    ANY_TEXT, st.sampled_from([*WORDS_OF_GAPS, *WORDS_OF_NUMBERS, '"', "\r\n", "\u2028"])
)


def labels_table(path: Path, **changes: Any) -> TableLabels:
    fields = {"name": "t", "train": path, "test": path, "context": 32, "batch_size": 1, **changes}
    return TableLabels.model_validate(fields)


def text_table(path: Path, **changes: Any) -> TableText:
    return TableText.model_validate({"name": "t", "train": path, "val": path, **changes})


@settings(max_examples=60, deadline=None)
@given(
    rows=st.lists(st.tuples(CELLS, CELLS), min_size=1, max_size=5),
    separator=st.sampled_from([",", ";", "\t", "|"]),
    ending=st.sampled_from(["\n", "\r\n"]),
    has_mark=st.booleans(),
)
def test_every_csv_cell_is_its_text_or_missing(
    tmp_path_factory: pytest.TempPathFactory,
    rows: list[tuple[str, str]],
    separator: str,
    ending: str,
    has_mark: bool,
) -> None:
    path = tmp_path_factory.mktemp("rows") / "a.csv"
    content = io.StringIO(newline="")
    quoting = csv.QUOTE_ALL
    csv.writer(content, delimiter=separator, lineterminator=ending, quoting=quoting).writerows(
        [("text", "label"), *rows]
    )
    path.write_bytes(content.getvalue().encode("utf-8-sig" if has_mark else "utf-8"))
    table = read_csv(path, ["text", "label"])
    assert table.columns["text"] == [text or None for text, _ in rows]
    assert table.columns["label"] == [label or None for _, label in rows]
    assert len(table) == len(rows)


@settings(max_examples=40, deadline=None)
@given(
    rows=st.lists(
        st.fixed_dictionaries({"text": st.one_of(CELLS, st.none(), st.integers(), st.booleans())}),
        min_size=1,
        max_size=5,
    ),
    is_list=st.booleans(),
    has_mark=st.booleans(),
)
def test_every_json_value_keeps_its_type(
    tmp_path_factory: pytest.TempPathFactory,
    rows: list[dict[str, Any]],
    is_list: bool,
    has_mark: bool,
) -> None:
    lines = "\n".join(json.dumps(row, ensure_ascii=False) for row in rows) + "\n"
    text = json.dumps(rows, ensure_ascii=False) if is_list else lines
    for name in ("a.json",) if is_list else ("a.json", "a.jsonl"):
        path = tmp_path_factory.mktemp("rows") / name
        path.write_bytes(text.encode("utf-8-sig" if has_mark else "utf-8"))
        assert read_json(path).columns["text"] == [row["text"] for row in rows]


@pytest.mark.parametrize("word", ["null", "NaN", "-", "007", "True", "2020-01-01"])
def test_words_for_gaps_numbers_and_dates_are_texts_and_labels(word: str, tmp_path: Path) -> None:
    csv_path = tmp_path / "a.csv"
    json_path = tmp_path / "a.jsonl"
    csv_path.write_text(f"text,label\n{word},{word}\nb,x\n")
    json_path.write_text(
        json.dumps({"text": word, "label": word}) + '\n{"text": "b", "label": "x"}'
    )
    for path in (csv_path, json_path):
        assert text_table(path).texts()["train"] == [("train row 0", word), ("train row 1", "b")]
        first, _ = labels_table(path).read_samples()["train"]
        assert bytes((first.documents[0] - 1).tolist()) == word.encode()
        assert first.label == sorted([word, "x"]).index(word)


def test_rows_that_are_left_out_are_counted_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    train = tmp_path / "train.csv"
    val = tmp_path / "val.csv"
    train.write_text('text,x\na,1\n,2\n"",3\nb,4\n')
    val.write_text("text,x\na,1\n")
    text_table(train, val=val).texts()
    message = f"data.train: {train}: 2 of 4 rows are left out, because the cell of 'text' is empty"
    assert [record.getMessage() for record in caplog.records] == [message]


def test_empty_texts_with_a_label_are_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    train = tmp_path / "train.csv"
    test = tmp_path / "test.csv"
    train.write_text("text,label\na,0\n,1\n")
    test.write_text("text,label\na,0\n")
    labels_table(train, test=test).read_samples()
    message = (
        f"data.train: {train}: 1 of 2 rows have an empty cell 'text', which is read as one space"
    )
    assert [record.getMessage() for record in caplog.records] == [message]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("text,label\na,b,0\n", r"line 2: has 3 cells and the header 2; write texts that contain"),
        ("text,label\na\n", r"line 2: has 1 cells and the header 2"),
        ("text,label\na,0,\nb,1,\n", r"line 2: has 3 cells and the header 2"),
        ("text,label,label\na,0,1\n", r"its header has the column 'label' 2 times"),
        ('text,label\n"a,0\nb,1\n', r"line 3: unexpected end of data"),
        ('text,label\n"a" b,0\n', r"line 2: ',' expected after '\"'"),
        ("", "it is empty"),
    ],
)
def test_malformed_csv_files_are_refused(content: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text(content)
    with pytest.raises(ConfigError, match=rf"^data\.train: .*a\.csv cannot be read: {message}"):
        load_rows(labels_table(path))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"text": "a"}\n[]\n', "line 2: is no object"),
        ('[{"text": "a"}, 3]', "row 1 is no object"),
        ('{"text": "a", "text": "b"}', "line 1: an object has the key 'text' twice"),
        ('[{"text": "a"', "Expecting"),
        ('{"text": "a"}\n{"text"', "line 2: "),
    ],
)
def test_malformed_json_files_are_refused(content: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text(content)
    with pytest.raises(ConfigError, match=rf"^data\.train: .*a\.json cannot be read: {message}"):
        load_rows(text_table(path))


@pytest.mark.parametrize(
    ("encoding", "message"),
    [("utf-16", "it is UTF-16 text; save it as UTF-8"), ("latin-1", "it is not UTF-8 text; save")],
)
@pytest.mark.parametrize(
    ("name", "content"),
    [("a.csv", "text\nä\n"), ("a.json", '[{"text": "ä"}]'), ("a.jsonl", '{"text": "ä"}\n')],
)
def test_other_encodings_are_refused(
    name: str, content: str, encoding: str, message: str, tmp_path: Path
) -> None:
    path = tmp_path / name
    path.write_text(content, encoding=encoding)
    with pytest.raises(ConfigError, match=rf"{name} cannot be read: {message}"):
        text_table(path).texts()


def test_blank_lines_and_a_last_line_without_an_end_are_no_rows(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("text,label\n\na,0\n\n\nb,1")
    assert read_csv(path, ["text"]).columns == {"text": ["a", "b"], "label": ["0", "1"]}


def test_a_long_document_is_one_cell(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("text\n" + "x" * 200_000 + "\n")
    ((_, text),) = text_table(path).texts()["train"]
    assert len(text) == 200_000


def test_files_of_tabs_are_tables(tmp_path: Path) -> None:
    path = tmp_path / "a.tsv"
    path.write_text("text\tlabel\na, b\t0\nc;d\t1\n")
    first, second = labels_table(path).read_samples()["train"]
    assert (first.label, second.label, len(first.documents[0])) == (0, 1, 4)


def test_cells_of_json_that_are_no_text_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    for value in ("3", '["a"]', "true"):
        path.write_text(f'{{"text": {value}}}\n')
        with pytest.raises(ConfigError, match=r"^data\.train: .*: row 0: 'text' is .* no text"):
            text_table(path).texts()


def test_a_missing_word_is_no_word(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"tokens": ["a", null], "tags": [0, 1]}\n')
    data = TableTags(name="t", train=path, test=path, context=8)
    with pytest.raises(ConfigError, match="row 0: a word is empty"):
        data.read_samples()


def test_a_missing_image_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("image,label\n,0\n")
    data = TableImages(name="t", train=path, test=path, size=4, classes=1)
    with pytest.raises(ConfigError, match=r"^data\.train: .*row 0: the cell of 'image' is empty"):
        data.read_splits()


def test_a_table_of_two_splits_is_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "a.csv"
    path.write_text("text\na\n")
    (tmp_path / "link.csv").symlink_to(path)
    text_table(path, val=tmp_path / "link.csv").texts()
    (record,) = caplog.records
    assert record.getMessage().startswith(f"data.val: {tmp_path / 'link.csv'} is also the file of")


@pytest.mark.parametrize("kind", ["characters", "bytes", "words"])
def test_a_sample_has_all_of_its_text(kind: str, tmp_path: Path) -> None:
    """Characters have no end of a document, which other tokenizers append."""
    path = tmp_path / "t.jsonl"
    rows = [{"text": "good +", "label": 1}, {"text": "good -", "label": 0}]
    path.write_text("\n".join(json.dumps(row) for row in rows))
    sizes = {"characters": 6, "words": 4}
    tokenizer: dict[str, Any] = {"kind": kind}
    if kind in sizes:
        tokenizer["size"] = sizes[kind]
    data = labels_table(path, tokenizer=tokenizer)
    encoder = data.tokenizer.encoder(row["text"] for row in rows)
    for sample, row in zip(data.read_samples()["train"], rows, strict=True):
        assert encoder.decode([number - 1 for number in sample.documents[0]]) == row["text"]


def test_words_beyond_two_bytes_keep_their_ids(tmp_path: Path) -> None:
    words = [f"w{number}" for number in range(70_000)]
    path = tmp_path / "t.jsonl"
    path.write_text(json.dumps({"text": " ".join(words), "label": 0}))
    tokenizer = {"kind": "words", "size": 70_001}  # <eos> is one of them.
    data = labels_table(path, tokenizer=tokenizer, vocabulary=70_002, classes=1)
    (sample,) = data.read_samples()["train"]
    ids = np.unique(sample.documents[0])
    assert len(ids) == 70_000
    assert ids.min() > 0


def test_a_text_that_cannot_be_encoded_is_named_with_its_split(tmp_path: Path) -> None:
    for split, text in (("train", "ab"), ("test", "abc")):
        (tmp_path / f"{split}.jsonl").write_text(json.dumps({"text": text, "label": 0}))
    tokenizer = {"kind": "characters", "size": 2}
    paths = {"train": tmp_path / "train.jsonl", "test": tmp_path / "test.jsonl"}
    data = labels_table(paths["train"], test=paths["test"], tokenizer=tokenizer, classes=1)
    with pytest.raises(ConfigError, match=r"^data\.test: 'c' is not among the 2 characters"):
        data.read_samples()
