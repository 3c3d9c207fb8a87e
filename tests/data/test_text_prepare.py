"""Tests of `python -m lit_attn.data.prepare`: output, resumption, errors."""

import hashlib
import json
import subprocess
import sys
import urllib.error
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from lit_attn.data import prepare
from lit_attn.data.text import shard_writer
from lit_attn.data.text.shard_writer import ShardWriter
from lit_attn.data.text.shards import Shards
from lit_attn.data.text.tokenizers import ByteEncoder, Bytes, Characters, WordEncoder, Words
from lit_attn.schema.errors import ConfigError

RECIPE = {"source": "test", "tokenizer": "bytes"}


def documents(skip: int) -> Iterator[tuple[str, str]]:
    """Yield twenty documents; every fourth belongs to val."""
    for number in range(skip, 20):
        yield ("train" if number % 4 else "val"), f"document {number}"


def written(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def write_all(folder: Path) -> dict[str, bytes]:
    ShardWriter(folder, ByteEncoder(), RECIPE).write(documents, None, lambda tokens: None)
    return written(folder)


@pytest.fixture(autouse=True)
def few_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shard_writer, "DOCUMENTS_AT_ONCE", 3)


def test_written_shards_are_read_again(tmp_path: Path) -> None:
    write_all(tmp_path)
    streams = Shards(name="x", folder=tmp_path, tokenizer=Bytes()).streams()
    val = streams["val"]
    text = bytes(val.read(0, len(val)).tolist()).decode()
    assert text == "".join(f"document {n}\0" for n in range(0, 20, 4))
    assert val.text_bytes == len(text) - 5
    meta = json.loads((tmp_path / "meta.json").read_text())
    assert meta["documents"] == 20
    digest = hashlib.sha256((tmp_path / "val.bin").read_bytes()).hexdigest()
    assert meta["splits"]["val"]["sha256"] == digest


@pytest.mark.parametrize("parts", range(8))
def test_a_stopped_run_resumes(tmp_path: Path, parts: int) -> None:
    """A run stopped anywhere, even with uncounted bytes on disk, ends with the same files."""
    expected = write_all(tmp_path / "whole")
    folder = tmp_path / "stopped"

    def stopping(skip: int) -> Iterator[tuple[str, str]]:
        for number, document in enumerate(documents(skip)):
            if number == 3 * parts + 1:
                raise KeyboardInterrupt
            yield document

    try:
        ShardWriter(folder, ByteEncoder(), RECIPE).write(stopping, None, lambda tokens: None)
    except KeyboardInterrupt:
        for partial in folder.glob("*.partial"):
            with partial.open("ab") as file:
                file.write(b"torn")
    else:
        (folder / "meta.json").unlink()
        # The state of a writer that stopped between the last rename and the end.
        counts = json.loads((tmp_path / "whole" / "meta.json").read_text())["splits"]
        progress = {"recipe": RECIPE, "documents": 20, "splits": counts}
        (folder / "progress.json").write_text(json.dumps(progress))
    ShardWriter(folder, ByteEncoder(), RECIPE).write(documents, None, lambda tokens: None)
    assert written(folder) == expected


def test_a_limit_and_progress(tmp_path: Path) -> None:
    progress: list[int] = []
    ShardWriter(tmp_path, ByteEncoder(), RECIPE).write(documents, 60, progress.append)
    meta = json.loads((tmp_path / "meta.json").read_text())
    assert meta["documents"] == 6
    assert progress == [33, 66]


def test_a_complete_folder_and_another_recipe_are_refused(tmp_path: Path) -> None:
    write_all(tmp_path / "done")
    with pytest.raises(ConfigError, match="is complete already"):
        ShardWriter(tmp_path / "done", ByteEncoder(), RECIPE)
    (tmp_path / "begun").mkdir()
    progress = {"recipe": {"source": "other"}, "documents": 1, "splits": {}}
    (tmp_path / "begun" / "progress.json").write_text(json.dumps(progress))
    with pytest.raises(ConfigError, match=r"was started with \{'source': 'other'\}"):
        ShardWriter(tmp_path / "begun", ByteEncoder(), RECIPE)


def test_a_source_without_text_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="the source has no text"):
        ShardWriter(tmp_path, ByteEncoder(), RECIPE).write(
            lambda skip: iter(()), None, lambda tokens: None
        )


def test_a_large_vocabulary_takes_wider_ids(tmp_path: Path) -> None:
    encoder = WordEncoder([str(number) for number in range(70_000)] + ["<eos>"])
    ShardWriter(tmp_path, encoder, RECIPE).write(
        lambda skip: iter([("train", "69999 1\n"), ("val", "2\n")][skip:]), None, lambda t: None
    )
    assert np.fromfile(tmp_path / "train.bin", dtype=np.uint32).tolist() == [69_999, 1, 70_000]
    chosen = Shards(name="x", folder=tmp_path, tokenizer=Words(size=70_001))
    assert chosen.streams()["val"].read(0, 2).tolist() == [2, 70_000]
    assert chosen.encoder().decode([69_999]) == "69999"


def test_command_line_on_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for split in ("train", "val"):
        (tmp_path / f"{split}.txt").write_text("b a b\n")
    file_options = [f"--{split}={tmp_path / split}.txt" for split in ("train", "val")]
    out = tmp_path / "out"
    assert prepare.main(["text", "--tokenizer=words", f"--out={out}", *file_options]) == 0
    assert "8 tokens, vocabulary 3" in capsys.readouterr().out
    assert (out / "vocabulary.txt").read_text() == "b\n<eos>\na\n"
    assert prepare.main(["text", f"--out={out}", *file_options]) == 2
    assert "is complete already" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["text"], "the following arguments are required: --train, --val"),
        (["fineweb", "--train=x"], "unrecognized arguments: --train=x"),
    ],
)
def test_options_of_other_sources_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert prepare.main([*arguments, f"--out={tmp_path / 'out'}"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("lit-attn prepare")
    assert line.endswith(message)


def test_a_missing_text_file_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = ["--train=none.txt", "--val=none.txt"]
    assert prepare.main(["text", *files, f"--out={tmp_path / 'out'}"]) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "tokens" not in line]
    assert "none.txt: cannot be read" in line


def offline(*_: object, **__: object) -> None:
    raise urllib.error.URLError("no route")


@pytest.mark.parametrize("source", ["wikitext103", "fineweb"])
def test_an_unreachable_hub_is_reported_in_one_line(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    source: str,
) -> None:
    hub = ModuleType("datasets")
    hub.load_dataset = offline
    monkeypatch.setitem(sys.modules, "datasets", hub)
    assert prepare.main([source, "--tokenizer=bytes", f"--out={tmp_path}"]) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "tokens 0:" not in line]
    assert "(no route)" in line


def test_a_missing_datasets_library_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ConfigError, match=r"pip install 'lit_attn\[text\]'"):
        next(prepare.SOURCES["openwebtext"](0))


def test_the_hub_is_streamed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Splits come in turn, lines keep their line feed, and a resumed run skips documents."""
    requests = []

    def load_dataset(name: str, configuration: str, split: str, streaming: bool) -> list[object]:
        requests.append((name, configuration, streaming))
        return [{"text": f"{split} {number}"} for number in range(2)]

    hub = ModuleType("datasets")
    hub.load_dataset = load_dataset
    monkeypatch.setitem(sys.modules, "datasets", hub)
    texts = list(prepare.SOURCES["wikitext103"](1))
    assert requests[0] == ("Salesforce/wikitext", "wikitext-103-v1", True)
    assert texts[:2] == [("train", "train 1\n"), ("val", "validation 0\n")]
    assert len(texts) == 5


def test_the_held_out_share_is_the_configured_one() -> None:
    held_out = [prepare.is_held_out(number, 0.01) for number in range(20_000)]
    assert 150 < sum(held_out) < 250
    assert not any(prepare.is_held_out(number, 0.0) for number in range(100))


def test_help_needs_no_torch() -> None:
    check = "import sys, lit_attn.data.prepare; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check], check=False).returncode == 0


def test_characters_are_kept_beside_the_tokens(tmp_path: Path) -> None:
    file_options = []
    for split, text in (("train", "né\n\u2028"), ("val", "én")):
        (tmp_path / f"{split}.txt").write_text(text)
        file_options.append(f"--{split}={tmp_path / split}.txt")
    out = tmp_path / "shards"
    assert prepare.main(["text", "--tokenizer=characters", f"--out={out}", *file_options]) == 0
    shards = Shards(name="x", folder=out, tokenizer=Characters(size=4))
    assert shards.streams()["val"].read(0, 2).tolist() == [2, 1]
    assert shards.encoder().decode([0, 1, 2, 3]) == "\nné\u2028"
