"""Files of token ids ("shards") as data.

nanoGPT, modded-nanogpt and `lit_attn.data.prepare` write files that can be read.
"""

from pathlib import Path
from typing import Literal

from pydantic import Field

from lit_attn.data.folders import FolderReader, list_names
from lit_attn.data.log import LOG
from lit_attn.data.splits import WORDS, group_by_split
from lit_attn.data.text.batches import NamedTokens
from lit_attn.data.text.ids import PREPARED, SPLITS
from lit_attn.data.text.streams import Source, Stream
from lit_attn.data.text.token_files import META, choose_type, open_tokens, read_meta
from lit_attn.data.text.tokenizers import Encoder, Gpt2, Tokenizer
from lit_attn.schema.base import outside_identity
from lit_attn.schema.errors import ConfigError, program

ENDINGS = (".bin", ".npy")  # Endings of files of token ids.


class Shards(NamedTokens, kind="shards"):
    """Files of token ids in `folder`: .bin or .npy files of train, val and, optionally, test.

    A word in the name states the split, as in `fineweb_val_000001.bin`; letters beside a word are
    another word (`pretrain`). The formats are nanoGPT's (plain uint16), the same with the header of
    modded-nanogpt and llm.c, NumPy's .npy, and that of `python -m lit_attn.data.prepare`, whose
    meta.json states the integer type. For plain files of another type set `dtype`.
    """

    tokenizer: Tokenizer = Field(Gpt2(), description="tokeniser that made the ids")
    folder: Path = outside_identity(..., "folder of the files of train and val")
    dtype: Literal["uint8", "uint16", "uint32", "int32", "int64"] | None = outside_identity(
        None, "integer type of the ids in .bin files; null: as meta.json states, or uint16"
    )

    def streams(self) -> dict[str, Stream]:
        return streams(self.folder, self.tokenizer.vocabulary, self.dtype)

    def encoder(self) -> Encoder:
        return self.tokenizer.encoder_of_shards(self.folder)

    def check_files(self) -> None:
        if self.name in PREPARED and not self.folder.exists():
            command = program("prepare", self.name, "--out", self.folder)
            raise ConfigError(f"data.folder: no folder {self.folder}; `{command}` writes it")
        super().check_files()
        group_files(self.folder)


def streams(folder: Path, vocabulary: int, dtype: str | None = None) -> dict[str, Stream]:
    """Return the splits in `folder`, whose .bin files have ids of `dtype` (None: not stated).

    Raises ConfigError for a torn, empty or missing file, and as `open_tokens`.
    """
    meta = read_meta(folder)
    if meta and meta["vocabulary"] != vocabulary:
        raise ConfigError(
            f"{folder / META}: its vocabulary is {meta['vocabulary']} ({meta['tokenizer']}), "
            f"configured is {vocabulary}"
        )
    stated = choose_type(dtype, meta, folder)
    counts = meta.get("splits", {})
    splits = {}
    for split, paths in list_files(folder).items():
        sources = [Source(str(path), open_tokens(path, stated, vocabulary)) for path in paths]
        recorded = counts.get(split, {})
        stream = Stream(sources, vocabulary, recorded.get("bytes") or None)
        expected = recorded.get("tokens", len(stream))
        if len(stream) != expected:
            raise ConfigError(
                f"{folder / META}: counts {expected:,} tokens of {split}, but its files have "
                f"{len(stream):,}; prepare the folder again, or delete {META}"
            )
        splits[split] = stream
    return splits


def group_files(folder: Path) -> dict[str | None, list[Path]]:
    """Return the files of token ids of each split, and those without a split for None.

    Hidden files are no shards. Raises ConfigError if train or val has no file, and for a file in
    two splits.
    """
    paths = FolderReader("data.folder", ENDINGS).list_files(folder)
    groups = group_by_split(paths)
    for split in ("train", "val"):
        if split in groups:
            continue
        words = " or ".join(sorted(WORDS[split]))
        listed_names = "there are none"
        if paths:
            listed_names = f"there are {list_names([path.name for path in paths])}"
        raise ConfigError(
            f"data.folder: {folder}: no file of the split {split}; the name of such a file ends "
            f"in {' or '.join(ENDINGS)} and has the word {words}, as {split}.bin; {listed_names}"
        )
    return groups


def list_files(folder: Path) -> dict[str, list[Path]]:
    """Return the files of token ids of "train", "val" and perhaps "test", in order of their names.

    Raises ConfigError as `group_files`, and for a split in two formats.
    """
    groups = group_files(folder)
    unnamed = groups.pop(None, [])
    if unnamed:
        LOG.warning(
            "%s: %s left out, because no word in the name is a split: %s",
            folder,
            "1 file is" if len(unnamed) == 1 else f"{len(unnamed)} files are",
            ", ".join(path.name for path in unnamed[:3]),
        )
    files = {}
    for split in SPLITS:
        if split not in groups:
            continue
        endings = {path.suffix for path in groups[split]}
        if len(endings) > 1:
            raise ConfigError(
                f"{folder}: {split} has {' and '.join(sorted(endings))} files; keep one of the two "
                "formats"
            )
        files[split] = groups[split]
    return files
