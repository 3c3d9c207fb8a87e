"""The plug-in that splits compounds before BLEU."""

import importlib
from pathlib import Path

import pytest
import torch
from helpers.paths import EXPERIMENTS

from lit_attn.data.text.parallel import ParallelText
from lit_attn.schema.plugins import load_parts
from lit_attn.tasks.translation import TranslationScores

pytest.importorskip("sacrebleu")

load_parts([EXPERIMENTS / "translation_mgk" / "compound_splitting.py"])
CompoundSplitText = importlib.import_module("compound_splitting").CompoundSplitText

TEXT = "the dog - a-b-c @-@ big-dog"


def make_text(folder: Path, kind: type[ParallelText]) -> ParallelText:
    for split in ("train", "valid", "test"):
        for language in ("de", "en"):
            (folder / f"{split}.{language}").write_text(f"{TEXT}\n" * 4)
    return kind(name="compounds", folder=folder, vocabulary=60, context=64, batch_size=128)


def test_words_are_split_at_every_hyphen_between_two_characters(tmp_path: Path) -> None:
    """A character is next to one hyphen only."""
    data = make_text(tmp_path, CompoundSplitText).build(0, torch.device("cpu"))
    (ids,) = data.encoder.encode([TEXT])
    assert data.words(ids.tolist()) == (
        "the dog - a ##AT##-##AT## b-c @ ##AT##-##AT## @ big ##AT##-##AT## dog"
    )


def test_parts_of_a_compound_count_in_bleu(tmp_path: Path) -> None:
    """Without splitting, a compound with one wrong part has no word of the reference."""
    values = {}
    for kind in (ParallelText, CompoundSplitText):
        data = make_text(tmp_path, kind).build(0, torch.device("cpu"))
        reference, hypothesis = data.encoder.encode(["a b big-dog a b", "a b big-the a b"])
        scores = TranslationScores(data)
        target = torch.tensor([[*reference.tolist(), 1]])
        translation = torch.tensor([hypothesis.tolist()])
        scores.update(torch.zeros(target.shape), target, translation)
        values[kind] = scores.compute()["bleu"].item()
    assert values[CompoundSplitText] > values[ParallelText] + 0.1


def test_the_identity_is_that_of_recorded_cells(tmp_path: Path) -> None:
    """Cells have this identity since the package itself could split compounds."""
    plain = make_text(tmp_path, ParallelText).identity()
    split = make_text(tmp_path, CompoundSplitText).identity()
    assert split == {**plain, "split_compounds": True}
    assert split["kind"] == "parallel-text"
