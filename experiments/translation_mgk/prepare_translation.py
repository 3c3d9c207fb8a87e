"""Prepare the sentence pairs of IWSLT 2014 or WMT 2014 as fairseq's scripts do.

    python experiments/translation_mgk/prepare_translation.py iwslt14 --out data/iwslt14
    python experiments/translation_mgk/prepare_translation.py wmt14 --out data/wmt14

The folder --out gets train, valid and test in both languages, with tokens between spaces. The text
has no byte-pair encoding: `data: parallel-text` learns it. Perl programs of Moses normalise,
tokenise, clean and lower-case the text; --moses names a checkout of moses-smt/mosesdecoder. The
folder --downloads keeps the archives. An archive that is there is not downloaded again, so a
machine without a network can use copies. Without --moses the checkout is cloned into this folder.

Source: github.com/facebookresearch/fairseq at 3d262bb, examples/translation: prepare-iwslt14.sh and
prepare-wmt14en2de.sh --icml17 (docs/setups.md, section 16).
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import urllib.request
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from lit_attn.files import require_writable, write_atomic
from lit_attn.schema.errors import ConfigError, OneLineParser, command

MOSES = "https://github.com/moses-smt/mosesdecoder.git"
IWSLT14 = "https://dl.fbaipublicfiles.com/fairseq/data/iwslt14/de-en.tgz"
IWSLT14_TESTS = ("TED.dev2010", "TEDX.dev2012", "TED.tst2010", "TED.tst2011", "TED.tst2012")
"""Sets whose concatenation, in this order, is the test split."""
WMT14 = {
    "training/europarl-v7.de-en": "https://www.statmt.org/wmt13/training-parallel-europarl-v7.tgz",
    "commoncrawl.de-en": "https://www.statmt.org/wmt13/training-parallel-commoncrawl.tgz",
    "training/news-commentary-v9.de-en": "https://www.statmt.org/wmt14/training-parallel-nc-v9.tgz",
}
"""Training corpora of WMT 2014, in their order, and their archives."""
WMT14_TEST = "https://www.statmt.org/wmt14/test-full.tgz"
VOCABULARY = 32_768
"""Subwords in translation_mgk/wmt14.yaml, by whose numbers the pairs of WMT 2014 are filtered."""
SPLITS = ("train", "valid", "test")
TAGS = re.compile(rb"</?(?:title|description)>")
OPENING = re.compile(rb'<seg id="[0-9]*">\s*')
CLOSING = re.compile(rb"\s*</seg>\s*")

IWSLT14_LENGTH = 175  # Most tokens of a sentence.
WMT14_LENGTH = 250  # Most subwords of a sentence.
RATIO = "1.5"  # Largest ratio of the lengths of a pair.

Lines = Iterable[bytes]


@command
def main(arguments: list[str] | None = None) -> int:
    """Prepare a data set and print its numbers of pairs; return exit code 0, or 2 for an error."""
    parser = OneLineParser(
        prog="python experiments/translation_mgk/prepare_translation.py", description=__doc__
    )
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("source", choices=list(SOURCES))
    parser.add_argument("--out", type=Path, required=True, metavar="PATH", help="folder to write")
    text = "folder of the archives (default: data/downloads)"
    default = Path("data/downloads")
    parser.add_argument("--downloads", type=Path, default=default, metavar="PATH", help=text)
    text = "checkout of moses-smt/mosesdecoder (default: cloned into --downloads)"
    parser.add_argument("--moses", type=Path, metavar="PATH", help=text)
    options = parser.parse_args(arguments)
    require_writable(options.out, "--out")
    options.out.mkdir(parents=True, exist_ok=True)
    moses = find_moses(options.moses, options.downloads)
    with tempfile.TemporaryDirectory(prefix=".prepare-", dir=options.out) as work:
        languages = SOURCES[options.source](Tools(options.downloads, moses, Path(work)))
        for split in SPLITS:
            counts = {count_lines(Path(work) / f"{split}.{name}") for name in languages}
            if len(counts) != 1:
                raise ConfigError(f"{options.source}: the sides of {split} differ in length")
            print(f"{split}: {counts.pop():,} pairs")
        for split in SPLITS:
            for language in languages:
                name = f"{split}.{language}"
                write_atomic(options.out / name, (Path(work) / name).read_bytes())
    return 0


class Tools(NamedTuple):
    """Folders of the archives, of Moses's checkout and of temporary files."""

    downloads: Path
    moses: Path
    work: Path

    def read(self, url: str, member: str) -> Iterator[bytes]:
        """Yield the lines of a file in an archive, which is downloaded if it is absent."""
        path = self.downloads / url.rpartition("/")[2]
        if not path.exists():
            download(url, path)
        try:
            with tarfile.open(path) as archive:
                for entry in archive:
                    if entry.name.removeprefix("./") == member and entry.isfile():
                        file = archive.extractfile(entry)
                        assert file is not None
                        yield from file
                        return
        except (tarfile.TarError, EOFError, OSError) as error:
            raise ConfigError(f"{path}: cannot be read: {error}. Delete it.") from error
        raise ConfigError(f"{path}: contains no file {member}")

    def write(self, lines: Lines, name: str, *programs: tuple[str, ...]) -> None:
        """Append lines to the temporary file `name` after Moses's `programs`, one after another."""
        source = self.work / "lines"
        with source.open("wb") as file:
            file.writelines(lines)
        for number, (program, *arguments) in enumerate(programs, 1):
            is_last = number == len(programs)
            target = self.work / (name if is_last else f"lines-{number}")
            with source.open("rb") as stdin, target.open("ab" if is_last else "wb") as stdout:
                self.run(program, *arguments, stdin=stdin, stdout=stdout)
            source.unlink()
            source = target

    def tokenizer(self, language: str, *options: str) -> tuple[str, ...]:
        """Return Moses's tokeniser for a language, as `write` expects it."""
        threads = str(min(8, os.cpu_count() or 1))
        return "tokenizer/tokenizer.perl", "-q", "-threads", threads, *options, "-l", language

    def clean(self, name: str, languages: tuple[str, str], longest: int) -> list[int]:
        """Write the pairs of `name` that Moses keeps to cleaned.LANGUAGE; return their numbers."""
        corpus, cleaned, kept = (str(self.work / part) for part in (name, "cleaned", "kept"))
        limits = ("1", str(longest))
        program = ("training/clean-corpus-n.perl", "-ratio", RATIO)
        self.run(*program, corpus, *languages, cleaned, *limits, kept)
        return [int(number) for number in Path(kept).read_text().split()]

    def run(self, program: str, *arguments: str, **streams: Any) -> None:
        """Run a program of Moses; raise ConfigError with its last line if it fails."""
        command = ["perl", str(self.moses / "scripts" / program), *arguments]
        done = subprocess.run(command, stderr=subprocess.PIPE, check=False, **streams)
        if done.returncode:
            reason = done.stderr.decode(errors="replace").strip().rpartition("\n")[2]
            raise ConfigError(f"{command[1]}: {reason or f'exit code {done.returncode}'}")


def prepare_iwslt14(tools: Tools) -> tuple[str, str]:
    """Write the splits of IWSLT 2014 in lower case; return the languages."""
    languages = ("de", "en")
    for language in languages:
        lines = tools.read(IWSLT14, f"de-en/train.tags.de-en.{language}")
        tools.write(remove_tags(lines), f"tokens.{language}", tools.tokenizer(language))
    tools.clean("tokens", languages, IWSLT14_LENGTH)
    lower = ("tokenizer/lowercase.perl",)
    for language in languages:
        with (tools.work / f"cleaned.{language}").open("rb") as file:
            tools.write(file, f"lower.{language}", lower)
        hold_out(tools.work, f"lower.{language}", language, every=23)
        for name in IWSLT14_TESTS:
            lines = tools.read(IWSLT14, f"de-en/IWSLT14.{name}.de-en.{language}.xml")
            programs = tools.tokenizer(language), lower
            tools.write(read_segments(lines), f"test.{language}", *programs)
    return languages


def prepare_wmt14(tools: Tools) -> tuple[str, str]:
    """Write the splits of WMT 2014; return the languages.

    As in fairseq's script, the lengths that limit training and validation pairs are numbers of
    subwords, which are learned from the training pairs before any is dropped.
    """
    languages = ("en", "de")
    for language, side in zip(languages, ("src", "ref"), strict=True):
        tokenizer = tools.tokenizer(language, "-a")
        normalize = ("tokenizer/normalize-punctuation.perl", language)
        programs = normalize, ("tokenizer/remove-non-printing-char.perl",), tokenizer
        for corpus, url in WMT14.items():
            lines = tools.read(url, f"{corpus}.{language}")
            tools.write(lines, f"tokens.{language}", *programs)
        lines = tools.read(WMT14_TEST, f"test-full/newstest2014-deen-{side}.{language}.sgm")
        tools.write(read_segments(lines), f"test.{language}", tokenizer)
        hold_out(tools.work, f"tokens.{language}", language, every=100)
    limit_subwords(tools, languages)
    return languages


SOURCES = {"iwslt14": prepare_iwslt14, "wmt14": prepare_wmt14}


def limit_subwords(tools: Tools, languages: tuple[str, str]) -> None:
    """Drop pairs of train and valid with too many subwords or too different numbers of them."""
    from lit_attn.data.text.parallel import Subwords
    from lit_attn.data.text.streams import read_text

    sides = [
        read_text(tools.work / f"train.{name}").removesuffix("\n").split("\n") for name in languages
    ]
    encoder = Subwords(sides, VOCABULARY)
    del sides
    for split in ("train", "valid"):
        for language in languages:
            source = tools.work / f"{split}.{language}"
            with source.open("rb") as lines, (tools.work / f"ids.{language}").open("w") as file:
                while chunk := [line.decode().rstrip("\n") for line in islice(lines, 100_000)]:
                    file.writelines(" ".join(map(str, ids)) + "\n" for ids in encoder.encode(chunk))
        kept = set(tools.clean("ids", languages, WMT14_LENGTH))
        for language in languages:
            path = tools.work / f"{split}.{language}"
            limited = tools.work / "limited"
            with path.open("rb") as lines, limited.open("wb") as file:
                file.writelines(line for number, line in enumerate(lines, 1) if number in kept)
            limited.replace(path)


def remove_tags(lines: Lines) -> Iterator[bytes]:
    """Yield the sentences of a training file, titles and descriptions included."""
    for line in lines:
        if not any(tag in line for tag in (b"<url>", b"<talkid>", b"<keywords>")):
            yield TAGS.sub(b"", line)


def read_segments(lines: Lines) -> Iterator[bytes]:
    """Yield the sentences of an XML or SGM file, with straight apostrophes."""
    for line in lines:
        if b"<seg id" in line:
            sentence = CLOSING.sub(b"", OPENING.sub(b"", line)).rstrip(b"\n")
            yield sentence.replace("\N{RIGHT SINGLE QUOTATION MARK}".encode(), b"'") + b"\n"


def hold_out(folder: Path, name: str, language: str, every: int) -> None:
    """Write the lines whose numbers `every` divides to valid.LANGUAGE, and the others to train."""
    with (
        (folder / name).open("rb") as lines,
        (folder / f"train.{language}").open("wb") as train,
        (folder / f"valid.{language}").open("wb") as valid,
    ):
        for number, line in enumerate(lines, 1):
            (train if number % every else valid).write(line)


def find_moses(checkout: Path | None, downloads: Path) -> Path:
    """Return a checkout of Moses, cloned if there is none; raise ConfigError if it is unusable."""
    if shutil.which("perl") is None:
        raise ConfigError("perl: is not installed, and Moses's programs need it")
    moses = downloads / "mosesdecoder" if checkout is None else checkout
    program = moses / "scripts" / "tokenizer" / "tokenizer.perl"
    if checkout is None and not program.exists():
        downloads.mkdir(parents=True, exist_ok=True)
        command = ["git", "clone", "--quiet", "--depth", "1", MOSES, str(moses)]
        try:
            subprocess.run(command, check=True, capture_output=True, text=True)
        except (OSError, subprocess.CalledProcessError) as error:
            reason = str(getattr(error, "stderr", error)).strip().rpartition("\n")[2]
            text = f"{MOSES}: cannot be cloned: {reason}. Name a checkout with --moses."
            raise ConfigError(text) from error
    if not program.exists():
        raise ConfigError(f"--moses {moses}: contains no scripts/tokenizer/tokenizer.perl")
    return moses


def download(url: str, path: Path) -> None:
    """Download a file; raise ConfigError, which names the place of a copy, if that fails."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.part")
    print(f"downloading {url}", file=sys.stderr)
    try:
        with urllib.request.urlopen(url, timeout=60) as response, part.open("wb") as file:
            # A server can redirect to an address without encryption.
            if url.startswith("https:") and not response.geturl().startswith("https:"):
                raise OSError(f"the server redirects to {response.geturl()}, which is not https")
            shutil.copyfileobj(response, file)
            if response.length:
                raise OSError(f"{response.length:,} bytes are missing")
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        text = f"{url}: cannot be downloaded: {error}. Save a copy as {path}."
        raise ConfigError(text) from error
    part.replace(path)


def count_lines(path: Path) -> int:
    with path.open("rb") as lines:
        return sum(1 for _ in lines)


if __name__ == "__main__":
    sys.exit(main())
