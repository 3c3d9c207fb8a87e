"""Tests of the script that prepares the Pile, and of the order in which its records are read."""

import importlib
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from helpers.data_ranks import on_rank
from helpers.paths import EXPERIMENTS

from lit_attn.data.text.batches import TextData
from lit_attn.data.text.shards import Shards
from lit_attn.data.text.tokenizers import GptNeox
from lit_attn.schema.plugins import load_parts

load_parts([EXPERIMENTS / "pile_dcmha" / "prepare_pile.py"])
prepare = importlib.import_module("prepare_pile")
RECORD = prepare.RECORD

CPU = torch.device("cpu")


def make_example(ids: np.ndarray) -> bytes:
    """Serialise a tf.train.Example with the features `extra` and `input_ids`."""
    file = descriptor_pb2.FileDescriptorProto(name="example.proto", package="t", syntax="proto3")

    def field(message, name, number, kind, label=1, type_name=None):  # type: ignore[no-untyped-def]
        message.field.add(name=name, number=number, type=kind, label=label, type_name=type_name)

    ints = file.message_type.add(name="Int64List")
    field(ints, "value", 1, 3, label=3)
    feature = file.message_type.add(name="Feature")
    field(feature, "int64_list", 3, 11, type_name=".t.Int64List")
    features = file.message_type.add(name="Features")
    field(features, "feature", 1, 11, label=3, type_name=".t.Features.FeatureEntry")
    entry = features.nested_type.add(name="FeatureEntry")
    entry.options.map_entry = True
    field(entry, "key", 1, 9)
    field(entry, "value", 2, 11, type_name=".t.Feature")
    example = file.message_type.add(name="Example")
    field(example, "features", 1, 11, type_name=".t.Features")
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    built = message_factory.GetMessageClass(pool.FindMessageTypeByName("t.Example"))()
    built.features.feature["extra"].int64_list.value.extend([1, 2])
    built.features.feature["input_ids"].int64_list.value.extend(ids.tolist())
    content: bytes = built.SerializeToString()
    return content


def write_records(path: Path, records: np.ndarray) -> None:
    """Write a TFRecord file; the checksums are zero, because nobody reads them."""
    examples = map(make_example, records)
    path.write_bytes(b"".join(struct.pack("<QI", len(e), 0) + e + bytes(4) for e in examples))


def draw_records(seed: int, count: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(50_277, size=(count, RECORD))


@pytest.fixture
def tfrecords(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    folder.mkdir()
    write_records(folder / "pile.tfrecord.b10", draw_records(2, 2))
    write_records(folder / "pile.tfrecord.b9", draw_records(1, 3))
    write_records(folder / "val_with_eos.tfrecord", draw_records(0, 3))
    return folder


def shards(folder: Path, **choices: object) -> Shards:
    return Shards.model_validate(
        {"name": "pile", "folder": folder, "tokenizer": "gpt-neox", "context": RECORD - 1}
        | {"order": "records", "batch_size": 2, "eval_batch_size": 2, **choices}
    )


def test_tfrecords_are_read_in_the_order_of_their_numbers(tfrecords: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert prepare.main([f"--files={tfrecords}", f"--out={out}"]) == 0
    train = np.fromfile(out / "train.bin", np.uint16).reshape(-1, RECORD)
    assert (train == np.concatenate([draw_records(1, 3), draw_records(2, 2)])).all()
    assert (np.fromfile(out / "val.bin", np.uint16) == draw_records(0, 3).ravel()).all()
    data = TextData(shards(out), seed=0, device=CPU)
    assert data.steps_per_epoch == 2
    (inputs, targets) = next(iter(data.train_dataloader()))
    assert (inputs.numpy() == train[:2, :-1]).all()
    assert (targets.numpy() == train[:2, 1:]).all()


def test_each_record_is_evaluated_once_on_every_number_of_processes(
    tfrecords: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    prepare.main([f"--files={tfrecords}", f"--out={out}"])
    data = TextData(shards(out), seed=0, device=CPU)
    rows = []
    for rank in range(2):
        on_rank(data, rank, 2)
        for inputs, targets in data.val_dataloader()[0]:
            rows += [(i, t) for i, t in zip(inputs, targets, strict=True) if (t >= 0).any()]
    assert sorted(tuple(i[:5].tolist()) for i, _ in rows) == sorted(
        tuple(record[:5]) for record in draw_records(0, 3).tolist()
    )
    assert all((targets >= 0).all() for _, targets in rows)


def test_a_limit_cuts_training_alone(tfrecords: Path, tmp_path: Path) -> None:
    import lit_attn.data.text.shard_writer as writing

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(writing, "DOCUMENTS_AT_ONCE", 1)
        limit = f"--limit={4 * RECORD}"
        prepare.main([f"--files={tfrecords}", f"--out={tmp_path / 'out'}", limit])
    sizes = {path.stem: path.stat().st_size for path in (tmp_path / "out").glob("*.bin")}
    assert sizes == {"val": 2 * 3 * RECORD, "train": 2 * RECORD}


def test_samples_of_gpt_neox_follow_the_index_maps(tmp_path: Path) -> None:
    """Documents are joined in the order of doc_idx, cut into samples, and samples are shuffled."""
    rng = np.random.default_rng(0)
    documents = [rng.integers(50_277, size=size).astype(np.uint16) for size in (3000, 900, 4000)]
    folder = tmp_path / "source"
    folder.mkdir()
    np.concatenate(documents).tofile(folder / "pile_document.bin")
    sizes = np.array([len(part) for part in documents], np.int32)
    starts = np.concatenate([[0], np.cumsum(sizes)[:-1]]).astype(np.int64) * 2
    head = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 8, 3, 4)
    tail = np.arange(4, dtype=np.int64).tobytes()
    (folder / "pile_document.idx").write_bytes(head + sizes.tobytes() + starts.tobytes() + tail)
    for split, order, shuffle in (("train", [2, 0, 1], [1, 0, 2]), ("valid", [1, 0], [0])):
        joined = [documents[i] for i in order]
        cuts = [0]
        places = np.concatenate([[(i, j) for j in range(len(d))] for i, d in enumerate(joined)])
        cuts = places[:: RECORD - 1][: len(shuffle) + 1]
        name = f"pile_document_{split}_0_indexmap_9ns_2048sl_1234s"
        np.save(folder / f"{name}_doc_idx.npy", np.array(order, np.int32))
        np.save(folder / f"{name}_sample_idx.npy", cuts.astype(np.int32))
        np.save(folder / f"{name}_shuffle_idx.npy", np.array(shuffle, np.uint32))
    out = tmp_path / "out"
    assert prepare.main([f"--files={folder}", f"--out={out}"]) == 0
    text = np.concatenate([documents[i] for i in (2, 0, 1)])
    expected = [text[i * 2048 : i * 2048 + RECORD] for i in (1, 0, 2)]
    assert (np.fromfile(out / "train.bin", np.uint16) == np.concatenate(expected)).all()
    val = np.concatenate([documents[1], documents[0]])[:RECORD]
    assert (np.fromfile(out / "val.bin", np.uint16) == val).all()


def test_torn_and_missing_files_are_named(
    tfrecords: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").mkdir()
    assert prepare.main([f"--files={tmp_path / 'empty'}", f"--out={tmp_path / 'a'}"]) == 2
    assert "has neither *tfrecord* files nor one .idx file" in capsys.readouterr().err
    path = tfrecords / "pile.tfrecord.b10"
    path.write_bytes(path.read_bytes()[:-10])
    assert prepare.main([f"--files={tfrecords}", f"--out={tmp_path / 'c'}"]) == 2
    assert "pile.tfrecord.b10: ends within a record" in capsys.readouterr().err


def test_the_vocabulary_is_the_tokenizers() -> None:
    assert prepare.Records.vocabulary == GptNeox().vocabulary == 50_277
