"""Turn text into shards of tokens: `python -m lit_attn.data.prepare SOURCE --out FOLDER`.

The source `listops` writes the Long Range Arena's expressions as text files instead.

A stopped run resumes when the same command is started again. The folder is complete once it has
meta.json, with source, tokenizer, counts and SHA-256 sums.
"""

import argparse
import sys
from pathlib import Path

from lit_attn.config.data import text as config
from lit_attn.schema.errors import ConfigError

TOKENIZERS = {
    "openwebtext": "gpt2",
    "fineweb": "gpt2",
    "wikitext103": "words",
    "ptb": "words",
    "text": "bytes",
}


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

    from lit_attn.data.text.shards import ShardWriter
    from lit_attn.data.text.sources import SOURCES, Files, Source
    from lit_attn.data.text.tokenizers import Encoder, WordEncoder

    if options.source == "text":
        if options.train is None or options.val is None:
            raise ConfigError("prepare text: add --train FILE and --val FILE")
        paths = {"train": options.train, "val": options.val, "test": options.test}
        source: Source = Files({split: path for split, path in paths.items() if path is not None})
    elif options.train or options.val or options.test:
        raise ConfigError(
            f"prepare {options.source}: --train, --val and --test are only for 'text'"
        )
    else:
        source = SOURCES[options.source]

    name = options.tokenizer or TOKENIZERS[options.source]
    encode: Encoder
    if name == "words":
        training = (text for split, text in source.documents(0) if split == "train")
        encode = WordEncoder.of(training, None)
    else:
        chosen = config.Gpt2(folder=options.gpt2_folder) if name == "gpt2" else config.Bytes()
        encode = chosen.encoder(())
    writer = ShardWriter(options.out, encode, {"source": options.source, "tokenizer": name})
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
        "--limit", type=int, metavar="TOKENS", help="stop after about TOKENS tokens"
    )
    for split in ("train", "val", "test"):
        parser.add_argument(
            f"--{split}", type=Path, metavar="FILE", help="text file, only for source 'text'"
        )
    return parser


if __name__ == "__main__":
    sys.exit(main())
