"""Tests of token streams, shards, and the batches cut from them."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.data_ranks import on_rank
from pydantic import ValidationError

from lit_attn.data.text import plain_text, streams
from lit_attn.data.text.batches import TextData, Tokens
from lit_attn.data.text.ids import IGNORED
from lit_attn.data.text.plain_text import PythonText, TextFiles
from lit_attn.data.text.shards import Shards
from lit_attn.data.text.streams import Source, Stream
from lit_attn.data.text.tokenizers import Words
from lit_attn.schema.errors import ConfigError

CPU = torch.device("cpu")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder of nanoGPT's files: train counts from 0 to 99, val from 0 to 20."""
    np.arange(100, dtype=np.uint16).tofile(tmp_path / "train.bin")
    np.arange(21, dtype=np.uint16).tofile(tmp_path / "val.bin")
    return tmp_path


def shards(folder: Path, **changes: object) -> Shards:
    fields = {"name": "counting", "folder": folder, "context": 8, "batch_size": 4, **changes}
    return Shards.model_validate(fields)


def data(folder: Path, seed: int = 0, **changes: object) -> TextData:
    return TextData(shards(folder, **changes), seed, CPU)


def test_targets_are_the_next_tokens(folder: Path) -> None:
    inputs, targets = data(folder).batch(0)
    assert inputs.shape == (4, 8)
    assert (targets == inputs + 1).all()


@pytest.mark.parametrize("order", ["random", "sequential"])
def test_a_batch_depends_on_seed_and_step_alone(folder: Path, order: str) -> None:
    first, again = data(folder, order=order), data(folder, order=order)
    again.batch(0)
    torch.testing.assert_close(first.batch(5)[0], again.batch(5)[0])
    assert not torch.equal(first.batch(5)[0], first.batch(6)[0])
    other = data(folder, seed=1, order=order)
    assert torch.equal(first.batch(5)[0], other.batch(5)[0]) == (order == "sequential")


def test_random_offsets_reach_both_ends(folder: Path) -> None:
    module = data(folder)
    offsets = np.concatenate([module.offsets(step) for step in range(300)])
    assert offsets.min() == 0
    assert offsets.max() == 100 - 9


def test_sequential_order_continues_and_wraps_around(folder: Path) -> None:
    module = data(folder, order="sequential")
    assert module.steps_per_epoch == 3
    batches = [module.batch(step)[0].flatten().tolist() for step in range(4)]
    assert batches[0] + batches[1] + batches[2] == list(range(96))
    assert batches[3] == batches[0]


def test_the_end_of_a_file_that_fills_no_batch_is_left_out(tmp_path: Path) -> None:
    """modded-nanogpt goes to the next shard if fewer than a batch and one more token remain."""
    for name, tokens in (("train_1", 49), ("train_2", 16), ("train_3", 40), ("val", 20)):
        np.arange(tokens, dtype=np.uint16).tofile(tmp_path / f"{name}.bin")
    module = data(tmp_path, order="files", batch_size=2)
    assert module.per_pass == 3 + 0 + 2
    offsets = [module.offsets(step).tolist() for step in range(6)]
    assert offsets == [[0, 8], [16, 24], [32, 40], [65, 73], [81, 89], [0, 8]]


def test_columns_are_read_side_by_side(folder: Path) -> None:
    """In Transformer-XL's order, the text has batch_size columns; a batch is a block of rows.

    The last block is shorter.
    """
    module = data(folder, order="columns", batch_size=2, context=8)
    tokens = len(module.streams["train"])
    column = tokens // 2
    full, rest = divmod(column - 1, 8)
    assert rest
    assert module.per_pass == full + 1
    offsets = [module.offsets(step).tolist() for step in range(module.per_pass + 1)]
    assert offsets[:2] == [[0, column], [8, column + 8]]
    assert offsets[-1] == offsets[0]
    last_inputs, last_targets = module.batch(full)
    assert last_inputs.shape == last_targets.shape == (2, rest)
    assert module.batch(full + 1)[0].shape == (2, 8)
    text = module.streams["train"].read(0, 2 * column).reshape(2, column)
    assert last_targets.tolist() == text[:, -rest:].tolist()


def test_floors_are_counted_over_the_end_of_a_pass_in_columns(folder: Path) -> None:
    """The last block of a pass is shorter than the others, and is left out."""
    module = data(folder, order="columns", batch_size=2, context=8)
    floors = {floor.rule: floor for floor in module.floors("val", 2 * module.per_pass)}
    (rule,) = (name for name in floors if name.endswith("(seen)"))
    blocks = 2 * (module.per_pass - 1)
    assert floors[rule].conditions == f"{blocks * 2 * 9:,} training tokens"


def test_ranks_share_the_batch(folder: Path) -> None:
    full_batch = data(folder).batch(2)[0]
    for rank in (0, 1):
        torch.testing.assert_close(on_rank(data(folder), rank, 2).batch(2)[0], full_batch[rank::2])


def test_uneven_shares_are_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match="3 devices cannot share a micro-batch of 4 samples"):
        on_rank(data(folder), 0, 3).train_dataloader()


def test_micro_batches_make_up_the_batch_and_resume(folder: Path) -> None:
    module = on_rank(data(folder, accumulate=2, epoch_steps=5), 0, 1, step=7)
    loader = module.train_dataloader()
    parts = list(loader)
    assert len(loader) == 10
    # Steps 7, 8 and 9 are left of the second epoch.
    assert [len(inputs) for inputs, _ in parts] == [2] * 6
    torch.testing.assert_close(torch.cat([parts[0][0], parts[1][0]]), module.batch(7)[0])


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("stride", [None, 8, 3, 1])
def test_every_token_is_evaluated_once(folder: Path, stride: int | None, world: int) -> None:
    targets, batches = [], set()
    for rank in range(world):
        changes = {"batch_size": 6, "eval_stride": stride, "eval_batch_size": 2}
        module = on_rank(data(folder, **changes), rank, world)
        (loader,) = module.val_dataloader()
        batches.add(len(list(loader)))
        assert len(loader) in batches
        for number, (inputs, predicted) in enumerate(loader):
            counted = predicted != IGNORED
            assert (predicted[counted] == inputs[counted] + 1).all()
            # A rank without windows has a batch of padding, which the task does not count.
            if loader.count_samples(number):
                targets += predicted[counted].tolist()
    assert sorted(targets) == list(range(1, 21))
    assert len(batches) == 1


def test_sliding_window_scores_last_positions_with_full_context(folder: Path) -> None:
    module = data(folder, eval_stride=1, eval_batch_size=1)
    windows = [(i[0], t[0]) for i, t in module.val_dataloader()[0]]
    inputs, targets = windows[3]
    assert inputs.tolist() == [3, 4, 5, 6, 7, 8, 9, 10]
    assert targets.tolist() == [IGNORED] * 7 + [11]


def test_evaluation_on_the_first_tokens(folder: Path) -> None:
    (loader,) = data(folder, eval_tokens=10).val_dataloader()
    predicted = torch.cat([targets.flatten() for _, targets in loader])
    assert predicted[predicted != IGNORED].tolist() == list(range(1, 11))


def test_evaluation_windows_are_spaced_evenly_over_the_split(folder: Path) -> None:
    full_loader = data(folder, eval_batch_size=1).val_dataloader()[0]
    all_windows = torch.cat([inputs for inputs, _ in full_loader])
    for count in (1, 2, len(all_windows), 1000):
        (loader,) = data(folder, eval_windows=count, eval_batch_size=2).val_dataloader()
        rows = torch.cat([targets for _, targets in loader])
        kept = (rows != IGNORED).any(1)
        inputs = torch.cat([inputs for inputs, _ in loader])[kept]
        expected = min(count, len(all_windows))
        places = [(2 * i + 1) * len(all_windows) // (2 * expected) for i in range(expected)]
        assert torch.equal(inputs, all_windows[places])
        assert (loader.count, loader.units[0][0]) == (expected, 0)


def test_a_stream_reads_across_its_sources() -> None:
    sources = [Source(str(i), np.arange(3 * i, 3 * i + 3, dtype=np.uint8)) for i in range(4)]
    joined = Stream(sources, vocabulary=12)
    for start in range(12):
        for count in range(1, 13 - start):
            assert joined.read(start, count).tolist() == list(range(start, start + count))
    assert joined.head(7).read(0, 7).tolist() == list(range(7))
    assert len(joined.head(6)) == 6
    assert joined.head(12) is joined


def test_fingerprint_sees_every_token_of_small_data(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "BLOCK", 4)
    ids = np.arange(10, dtype=np.uint16)
    fingerprints = {Stream([Source("x", ids)], 50).fingerprint}
    for place in range(10):
        changed = ids.copy()
        changed[place] += 7
        fingerprints.add(Stream([Source("x", changed)], 50).fingerprint)
    assert len(fingerprints) == 11
    # The file and the type of the ids change nothing.
    parts = [Source("a", ids[:3].astype(np.uint32)), Source("b", ids[3:])]
    assert Stream(parts, 50).fingerprint in fingerprints


def test_an_id_beyond_the_vocabulary_is_an_error(tmp_path: Path) -> None:
    for split in ("train", "val"):
        np.array([5] * 12 + [50_257] + [5] * 9, dtype=np.uint16).tofile(tmp_path / f"{split}.bin")
    with pytest.raises(
        ConfigError, match=r"train.bin: token 12 is 50257, beyond the vocabulary of 50257"
    ):
        data(tmp_path).fingerprint()
    with pytest.raises(ConfigError, match=r"val.bin: token 12 is 50257"):
        list(data(tmp_path).val_dataloader()[0])


def test_empty_and_missing_shards_are_refused(folder: Path) -> None:
    (folder / "val.bin").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"val.bin: is empty"):
        data(folder)
    (folder / "val.bin").unlink()
    with pytest.raises(ConfigError, match=r"no file of the split val; .* are train\.bin"):
        data(folder)


def test_an_absent_folder_of_a_known_text_names_the_command_that_writes_it(tmp_path: Path) -> None:
    (tmp_path / "finewebs").mkdir()
    absent = tmp_path / "fineweb"
    with pytest.raises(ConfigError) as caught:
        Shards(name="fineweb", folder=absent, context=4, batch_size=2).check_files()
    command = f"lit-attn prepare fineweb --out {absent}"
    assert str(caught.value) == f"data.folder: no folder {absent}; `{command}` writes it"
    with pytest.raises(ConfigError, match=r"data.folder: no file .*; did you mean 'finewebs'"):
        Shards(name="own", folder=absent, context=4, batch_size=2).check_files()


def test_headers_of_shards_are_read(folder: Path) -> None:
    """modded-nanogpt's header is 256 int32 (magic, version, count); uint16 tokens follow."""
    header = np.zeros(256, dtype=np.int32)
    header[:3] = 20240520, 1, 30
    for number in (1, 2):
        path = folder / f"fineweb_train_{number:06d}.bin"
        path.write_bytes(header.tobytes() + np.full(30, number, dtype=np.uint16).tobytes())
    (folder / "train.bin").unlink()
    train = shards(folder).streams()["train"]
    assert train.read(0, len(train)).tolist() == [1] * 30 + [2] * 30
    header[2] = 31
    path.write_bytes(header.tobytes() + np.full(30, 2, dtype=np.uint16).tobytes())
    with pytest.raises(ConfigError, match="its header counts 31 tokens, its size 30"):
        shards(folder).streams()


def test_shards_of_another_vocabulary_are_refused(folder: Path) -> None:
    (folder / "meta.json").write_text(json.dumps({"vocabulary": 256, "tokenizer": "bytes"}))
    with pytest.raises(ConfigError, match=r"its vocabulary is 256 \(bytes\), configured is 50257"):
        data(folder)


@pytest.mark.parametrize(
    ("meta", "message"),
    [
        ("{", "Expecting property name"),
        ("[]", "has no 'vocabulary' and 'tokenizer'"),
        ('{"vocabulary": 50257}', "has no 'vocabulary' and 'tokenizer'"),
        (
            '{"vocabulary": 50257, "tokenizer": "gpt2", "dtype": "uint17"}',
            "dtype 'uint17' is not one of uint8, uint16, uint32",
        ),
    ],
)
def test_a_malformed_meta_file_is_refused(folder: Path, meta: str, message: str) -> None:
    (folder / "meta.json").write_text(meta)
    with pytest.raises(ConfigError, match=rf"meta.json: cannot be used: {message}"):
        data(folder)


def test_text_shorter_than_a_sequence_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"data.context: train has 100 tokens, at least 101"):
        data(folder, context=100)
    with pytest.raises(ConfigError, match=r"data.batch_size: 50 sequences of 8 are more than"):
        data(folder, batch_size=50, order="sequential")
    assert data(folder, batch_size=50).steps_per_epoch == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"eval_stride": 9}, "eval_stride: 9 would skip tokens; choose at most 8"),
        ({"accumulate": 3}, "accumulate: 3 does not divide the batch of 4"),
    ],
)
def test_bad_configurations_are_refused(
    folder: Path, changes: dict[str, int], message: str
) -> None:
    with pytest.raises(ValidationError, match=message):
        shards(folder, **changes)


def test_paths_do_not_change_an_identity(folder: Path) -> None:
    elsewhere = shards(folder.parent, accumulate=4)
    assert shards(folder).identity() == elsewhere.identity()


def test_text_files_are_split_and_encoded(tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_text("a line\n" * 20)
    streams = TextFiles(name="lines", train=path).streams()
    # Cut after a whole line, and each part's end is a token too.
    assert (len(streams["train"]), len(streams["val"])) == (18 * 7 + 1, 2 * 7 + 1)
    assert streams["val"].text_bytes == 14
    words = TextFiles(name="lines", train=path, val=path, tokenizer=Words(size=3))
    assert len(words.streams()["val"]) == 60
    encoder = words.encoder()
    assert encoder.decode(encoder.encode(["a line"])[0]) == "a line \n"


def test_bytes_per_token(tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_text("a line\n" * 20)

    def measure(**changes: object) -> float | None:
        fields = {"name": "lines", "train": path, "val": path, "context": 8, **changes}
        return TextData(TextFiles.model_validate(fields), 0, CPU).bytes_per_token("val")

    # 140 bytes and the end of the document, of which all but the first are predicted.
    assert measure() == 140 / 140
    # Cut short, bytes are still bytes.
    assert measure(eval_tokens=20) == 21 / 20
    # 17 windows of 8 bytes and one of 4 with the end of the document.
    assert measure(eval_windows=18) == measure()
    assert measure(eval_windows=3) == 1
    assert measure(tokenizer={"kind": "words", "size": 3}) == 140 / 59


def test_cut_bytes_leave_out_the_ends_of_documents() -> None:
    chosen = PythonText(context=16, eval_tokens=8_000)
    data = TextData(chosen, 0, CPU)
    ids = data.evaluated("test").read(0, 8_001)
    ends = int((ids == 0).sum())
    assert ends > 0
    assert data.bytes_per_token("test") == (8_001 - ends) / 8_000


def test_the_files_of_a_folder_are_documents(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "books"
    (folder / "2").mkdir(parents=True)
    with pytest.raises(ConfigError, match=r"^data\.train: .*books has no \.txt files$"):
        TextFiles(name="none", train=folder).texts()
    for name, text in {"10.txt": "ten\n" * 8, "9.txt": "nine\n", "2/a.txt": "two\n" * 8}.items():
        (folder / name).write_text(text)
    (folder / "notes.md").touch()
    texts = TextFiles(name="books", train=folder).texts()
    names = [str(Path(name).relative_to(folder)) for name, _ in texts["train"]]
    assert names == ["2/a.txt", "9.txt", "10.txt"]
    # The last tenth of 69 characters is within the last file, and begins with a line.
    assert [text for _, text in texts["val"]] == ["ten\n" * 2]
    assert "".join(text for _, text in texts["train"]) == "two\n" * 8 + "nine\n" + "ten\n" * 6
    assert caplog.messages == [
        f"data.train: {folder}: left out 1 file: .md (1); files that are read end in .txt"
    ]
    # A cut between two files leaves no empty document.
    (folder / "10.txt").write_text("ten\n")
    texts = TextFiles(name="books", train=folder, val=folder / "2", test=folder / "9.txt").texts()
    assert [text for _, text in texts["val"]] == ["two\n" * 8]
    assert [text for _, text in texts["test"]] == ["nine\n"]


def test_files_that_are_not_text_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    with pytest.raises(ConfigError, match=r"text.txt: cannot be read: No such file"):
        TextFiles(name="none", train=path).streams()
    path.write_text("")
    with pytest.raises(ConfigError, match=r"text.txt: is empty"):
        TextFiles(name="none", train=path).streams()
    path.write_bytes(b"abc\xff")
    with pytest.raises(ConfigError, match=r"text.txt:1: not UTF-8 text \(byte 3\)"):
        TextFiles(name="none", train=path).streams()


def test_pythons_text_is_the_same_for_all_seeds() -> None:
    chosen = PythonText(context=16)
    first, again = TextData(chosen, 0, CPU), TextData(chosen, 1, CPU)
    assert first.splits == ["val", "test"]
    assert first.fingerprint() == again.fingerprint()
    assert len(first.streams["train"]) > 3 * len(first.streams["test"]) > 1000
    assert first.streams["train"].text_bytes < len(first.streams["train"])


def test_documents_of_python_go_to_splits_by_their_names() -> None:
    names = [name for name, _ in plain_text.python_documents()]
    assert len(set(names)) == len(names) > 300
    assert not [name for name in names if "site-packages" in name or "/test/" in name]
    assert "library/_sysconfigdata" not in " ".join(names)
    assert {plain_text.split_of(name) for name in names} == {"train", "val", "test"}


def test_pythons_text_is_read_as_bytes() -> None:
    with pytest.raises(ValidationError, match="tokenizer: this text is read as bytes"):
        PythonText(tokenizer=Words(size=5))
    assert isinstance(PythonText(), Tokens)
