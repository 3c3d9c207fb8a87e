"""Turn the text of a source into shards of tokens.

A stopped run resumes when the same command is started again. The folder is complete once it has
meta.json, with source, tokenizer, counts and SHA-256 sums.
"""

import argparse
import hashlib
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.progress import Progress, TextColumn, TimeElapsedColumn

from lit_attn.data.text.ids import PREPARED, SPLITS
from lit_attn.data.text.shard_writer import Documents, ShardWriter
from lit_attn.data.text.streams import read_text
from lit_attn.data.text.tokenizers import Bytes, CharacterEncoder, Encoder, Gpt2, WordEncoder
from lit_attn.extras import require
from lit_attn.schema.errors import ConfigError, OneLineParser, command, program
from lit_attn.schema.mistakes import first_line

LEARNED: dict[str, type[WordEncoder] | type[CharacterEncoder]] = {
    "words": WordEncoder,
    "characters": CharacterEncoder,
}
"""Encoders whose vocabulary comes from the training text."""
VAL_TOKENS = {"fineweb": 100_000_000}  # Tokens in the first shard of modded-nanogpt.


@command
def main(arguments: list[str] | None = None) -> int:
    """Return exit code 0 if the folder is complete, 2 after a ConfigError, 130 if interrupted."""
    prepare(_parser().parse_args(arguments))
    return 0


def prepare(options: argparse.Namespace) -> None:
    """Write the shards of one source; raise ConfigError for an unusable source."""
    name = options.tokenizer
    is_files = options.source == "text"
    source = partial(read_files, vars(options)) if is_files else SOURCES[options.source]
    encoder: Encoder
    if name in LEARNED:
        training = (text for split, text in source(0) if split == "train")
        encoder = LEARNED[name].learn(training, None)
    else:
        tokenizer = Gpt2(folder=options.gpt2_folder) if name == "gpt2" else Bytes()
        encoder = tokenizer.encoder(())
    recipe = {"source": options.source, "tokenizer": name}
    val_tokens = VAL_TOKENS.get(options.source, 0)
    write_shards(source, encoder, recipe, options.out, options.limit, val_tokens)


def write_shards(
    source: Documents,
    encoder: Encoder,
    recipe: dict[str, str],
    folder: Path,
    limit: int | None,
    val_tokens: int = 0,
) -> None:
    """Write the shards of `source` to `folder` as ShardWriter does, and show the progress."""
    writer = ShardWriter(folder, encoder, recipe, val_tokens)
    columns = (TextColumn("{task.fields[tokens]:,} tokens"), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("", total=None, tokens=writer.tokens)
        writer.write(source, limit, lambda tokens: progress.update(task, tokens=tokens))
    print(f"{folder}: {writer.tokens:,} tokens, vocabulary {encoder.vocabulary:,}")


def _parser() -> argparse.ArgumentParser:
    parser = OneLineParser(program("prepare"), page="own-text.md", description=__doc__)
    sources = parser.add_subparsers(dest="source", required=True)
    for name in (*PREPARED, "text"):
        source = sources.add_parser(name, page="own-text.md")
        add_path = partial(source.add_argument, type=Path, metavar="PATH")
        add_path("--out", required=True, help="folder to write")
        source.add_argument("--limit", type=int, help="number of tokens after which to stop")
        default = PREPARED.get(name, "bytes")
        choices = ["bytes", "gpt2", *LEARNED]
        source.add_argument("--tokenizer", choices=choices, default=default)
        add_path("--gpt2-folder", help="folder of encoder.json and vocab.bpe; default: the hub")
        for split in SPLITS if name == "text" else ():
            add_path(f"--{split}", required=split != "test", help="text file")
    return parser


def stream_hub(
    dataset: str,
    configuration: str | None,
    splits: dict[str, str],
    skip: int,
    held_out: float = 0.0,
    lines: bool = False,
) -> Iterator[tuple[str, str]]:
    """Yield (split, text) of a data set of the hub; `splits` maps its splits to train, val, test.

    `held_out` is the share of the training documents that becomes val, by a hash of the document's
    number. (nanoGPT holds out the same 0.0005 of OpenWebText by shuffling, which a stream cannot.)
    `lines` restores the line feed at the end of a document that is one line. Raises ConfigError if
    `datasets` is not installed or the hub cannot be reached.
    """
    library = require("datasets", "prepare", "text")
    number = 0
    for hub_split, split in splits.items():
        try:
            rows = library.load_dataset(dataset, configuration, split=hub_split, streaming=True)
        except OSError as error:
            # The reason of an URLError is an exception or a text.
            reason = getattr(error, "reason", "")
            words = str(reason).partition("\n")[0] or first_line(error)
            raise ConfigError(f"{dataset}: cannot be loaded ({words})") from error
        for row in rows:
            number += 1
            if number <= skip:
                continue
            text = row["text"]
            if lines and not text.endswith("\n"):
                text += "\n"
            yield "val" if is_held_out(number, held_out) else split, text


def read_files(paths: dict[str, Path | None], skip: int) -> Iterator[tuple[str, str]]:
    """Yield one document for each split with a path; raise ConfigError for an unreadable file."""
    number = 0
    for split in SPLITS:
        path = paths[split]
        if path is None:
            continue
        number += 1
        if number > skip:
            yield split, read_text(path)


WIKITEXT = ("Salesforce/wikitext", "wikitext-103-v1")
TRAIN = {"train": "train"}
ALL = TRAIN | {"validation": "val", "test": "test"}
# A source yields (split, text) of its documents from a number on, in a fixed order.
SOURCES: dict[str, Documents] = {
    "openwebtext": partial(stream_hub, "Skylion007/openwebtext", None, TRAIN, held_out=0.0005),
    "fineweb": partial(stream_hub, "HuggingFaceFW/fineweb", "sample-10BT", TRAIN),
    "wikitext103": partial(stream_hub, *WIKITEXT, ALL, lines=True),
}


def is_held_out(number: int, share: float) -> bool:
    """Return True if document `number` is held out, a function of the number alone."""
    digest = hashlib.sha256(f"held out {number}".encode()).digest()
    return int.from_bytes(digest[:8], "big") < share * 2**64


if __name__ == "__main__":
    sys.exit(main())
