"""Turn text into shards of tokens: `python -m lit_attn.data.prepare SOURCE --out FOLDER`.

Source `listops` writes the Long Range Arena's expressions as text instead.

A run that was stopped goes on where it was when it is started again. The folder is complete when
meta.json is in it, which says what was made of what, with counts and SHA-256 sums.
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
    """Exit code 0 when the folder is complete, 2 for what cannot be had, 130 when interrupted."""
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
        print("stopped; the same command goes on from here", file=sys.stderr)
        return 130
    return 0


def prepare(options: argparse.Namespace) -> None:
    """Raises ConfigError where the source, the tokenizer or the folder will not do."""
    from rich.console import Console
    from rich.progress import Progress, TextColumn, TimeElapsedColumn

    from lit_attn.data.text.sources import SOURCES, Files, Source
    from lit_attn.data.text.tokenizers import Encoder, WordEncoder, encoder
    from lit_attn.data.text.writer import ShardWriter

    if options.source == "text":
        if options.train is None or options.val is None:
            raise ConfigError("prepare text: needs --train FILE and --val FILE")
        paths = {"train": options.train, "val": options.val, "test": options.test}
        source: Source = Files({split: path for split, path in paths.items() if path is not None})
    elif options.train or options.val or options.test:
        raise ConfigError(f"prepare {options.source}: --train, --val and --test go with 'text'")
    else:
        source = SOURCES[options.source]

    name = options.tokenizer or TOKENIZERS[options.source]
    encode: Encoder
    if name == "words":
        training = (text for split, text in source.documents(0) if split == "train")
        encode = WordEncoder.of(training, None)
    else:
        chosen = config.Gpt2(folder=options.gpt2_folder) if name == "gpt2" else config.Bytes()
        encode = encoder(chosen, ())
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
    """The Long Range Arena's files, the same ones every time."""
    from lit_attn.config.data.labelled import ListOps
    from lit_attn.data.text.labelled import write_listops

    print("100,000 expressions, which takes some minutes", file=sys.stderr)
    write_listops(folder, ListOps())
    print(f"{folder}: basic_train.tsv, basic_val.tsv, basic_test.tsv")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m lit_attn.data.prepare", description=__doc__)
    parser.add_argument("source", choices=[*TOKENIZERS, "listops"])
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--tokenizer", choices=["bytes", "gpt2", "words"])
    parser.add_argument(
        "--gpt2-folder", type=Path, metavar="FOLDER", help="of encoder.json and vocab.bpe"
    )
    parser.add_argument("--limit", type=int, metavar="TOKENS", help="stop after about so many")
    for split in ("train", "val", "test"):
        parser.add_argument(f"--{split}", type=Path, metavar="FILE", help="for source 'text'")
    return parser


if __name__ == "__main__":
    sys.exit(main())
