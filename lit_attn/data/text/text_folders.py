"""Text files in folders of classes: path/SPLIT/CLASS/*.txt."""

from pathlib import Path
from typing import Literal

from pydantic import Field

from lit_attn import files
from lit_attn.data.base import require_split_folders
from lit_attn.data.class_folders import TEXTS, ClassTree, read_class_folders
from lit_attn.data.folders import natural_order
from lit_attn.data.log import LOG
from lit_attn.data.text.labelled import Labelled, Sample, TokenizedLabels, sample_ids
from lit_attn.data.text.tokenizers import Encoder, encoding
from lit_attn.schema.base import outside_identity
from lit_attn.schema.errors import plural

EMPTY_TEXT = " "  # Text of an empty file: a sample needs a token.


class TextFolder(TokenizedLabels, Labelled, kind="text-folder"):
    """Text files in folders of classes: path/train/CLASS/*.txt, and path/test or path/val."""

    path: Path = outside_identity(..., "folder of train, and of test or val or both")
    pairs: Literal[False] = Field(False, description="a sample is one text")

    def read_samples(self) -> dict[str, list[Sample]]:
        return read_text_folder(self)

    def check_files(self) -> None:
        super().check_files()
        require_split_folders("data.path", self.path)


def read_text_folder(data: TextFolder) -> dict[str, list[Sample]]:
    """Return the samples of "train", "test" and, if it exists, "val".

    A single evaluated folder is "test". Raises ConfigError for folders that do not match `data` and
    for a file that is not UTF-8. Warns about empty files.
    """
    trees = read_class_folders(data.path, data.classes, TEXTS)
    labels = {name: number for number, name in enumerate(trees["train"].files)}
    texts = {split: _read_texts(tree) for split, tree in trees.items()}
    # A vocabulary of words is learned from the training texts.
    encoder = data.tokenizer.encoder(text for _, text in texts["train"])
    samples = {}
    for split, named_texts in texts.items():
        with encoding(split):
            samples[split] = _make_samples(named_texts, labels, encoder)
    return samples


def _read_texts(tree: ClassTree) -> list[tuple[str, str]]:
    """Return (class, text) of every file of a split, in the natural order of the paths."""
    texts = []
    empty_files = 0
    for name, paths in tree.files.items():
        for path in sorted(paths, key=lambda path: natural_order(str(path))):
            text = files.read_text(path)
            if not text:
                empty_files += 1
            texts.append((name, text or EMPTY_TEXT))
    if empty_files:
        LOG.warning(
            "data.path: %s: %s of %s are empty, and each is read as one space",
            tree.folder,
            f"{empty_files:,}",
            plural(len(texts), "text"),
        )
    return texts


def _make_samples(
    named_texts: list[tuple[str, str]], labels: dict[str, int], encoder: Encoder
) -> list[Sample]:
    """Return a sample for each (class, text)."""
    encoded = encoder.encode([text for _, text in named_texts])
    samples = []
    for (name, _), document in zip(named_texts, encoded, strict=True):
        samples.append(Sample((sample_ids(document, encoder),), labels[name]))
    return samples
