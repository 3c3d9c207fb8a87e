"""The preparation of IWSLT 2014 and WMT 2014 from invented archives with small programs of Moses.

The programs of the tests stand in for Moses's Perl programs, which are not part of this project.
"""

import importlib
import io
import os
import shutil
import tarfile
import threading
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from helpers.paths import EXPERIMENTS, SHARED

from lit_attn.schema.plugins import load_parts

load_parts([EXPERIMENTS / "translation_mgk" / "prepare_translation.py"])
prepare = importlib.import_module("prepare_translation")

pytestmark = pytest.mark.skipif(not shutil.which("perl"), reason="no perl")

LOG = 'BEGIN { open L, ">>", "$0.log"; print L "@ARGV\n"; close L; @ARGV = () } '
PROGRAMS = {
    # A point or comma at the end of a word becomes a token.
    "tokenizer/tokenizer.perl": LOG + r"while (<>) { s/^\s+|\s+$//g; s/(\w)([.,])/$1 $2/g; "
    'print "$_\n" }',
    "tokenizer/lowercase.perl": "while (<>) { print lc }",
    "tokenizer/normalize-punctuation.perl": LOG + "while (<>) { s/;/,/g; print }",
    "tokenizer/remove-non-printing-char.perl": r"while (<>) { s/\x07/ /g; print }",
    "training/clean-corpus-n.perl": r"""
        my (undef, $ratio, $corpus, $l1, $l2, $out, $min, $max, $kept) = @ARGV;
        open A, "$corpus.$l1"; open B, "$corpus.$l2"; open K, ">$kept";
        open C, ">$out.$l1"; open D, ">$out.$l2";
        while (my $a = <A>) {
            my $b = <B>; die "too short\n" unless defined $b; $n++;
            my ($i, $j) = map { scalar split " " } $a, $b;
            next if $i < $min || $j < $min || $i > $max || $j > $max;
            next if $i > $ratio * $j || $j > $ratio * $i;
            print C $a; print D $b; print K "$n\n";
        }""",
}
NAMES = [f"{split}.{language}" for split in ("train", "valid", "test") for language in ("de", "en")]


@pytest.fixture
def moses(tmp_path: Path) -> Path:
    """Return a checkout with the programs of the tests."""
    for name, program in PROGRAMS.items():
        path = tmp_path / "moses" / "scripts" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(program)
    return tmp_path / "moses"


def write_archive(path: Path, files: dict[str, str]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w:gz") as archive:
        for name, text in files.items():
            entry = tarfile.TarInfo(f"./{name}")
            entry.size = len(text.encode())
            archive.addfile(entry, io.BytesIO(text.encode()))


def segments(*sentences: str) -> str:
    lines = (f'<seg id="{i}"> {text} </seg>\n' for i, text in enumerate(sentences, 1))
    return f"<doc docid=1>\n{''.join(lines)}</doc>\n"


def write_iwslt14(folder: Path, train: list[tuple[str, str]], test: list[tuple[str, str]]) -> None:
    """Write the archive of IWSLT 2014; its five test sets share the sentences of `test`."""
    files = {}
    size = -(-len(test) // 5)
    for side, language in enumerate(("de", "en")):
        lines = "\n".join(pair[side] for pair in train)
        files[f"de-en/train.tags.de-en.{language}"] = lines + "\n"
        for i, name in enumerate(prepare.IWSLT14_TESTS):
            part = [pair[side] for pair in test[i * size : (i + 1) * size]]
            files[f"de-en/IWSLT14.{name}.de-en.{language}.xml"] = segments(*part)
        files[f"de-en/IWSLT14.TED.dev2012.de-en.{language}.xml"] = segments("unused")
    write_archive(folder / "de-en.tgz", files)


def run(source: str, path: Path, moses: Path) -> dict[str, list[str]]:
    """Prepare a source from the archives in `path`; return the lines of every file."""
    out = path / "out"
    arguments = [source, "--out", out, "--downloads", path / "downloads", "--moses", moses]
    assert prepare.main(list(map(str, arguments))) == 0
    assert sorted(file.name for file in out.iterdir()) == sorted(NAMES)
    return {name: (out / name).read_text().split("\n")[:-1] for name in NAMES}


def test_iwslt14_has_the_splits_of_fairseq(
    tmp_path: Path, moses: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pairs = [(f"Satz {i}.", f"Sentence {i}.") for i in range(1, 50)]
    tags = [(f"<{tag}>x</{tag}>",) * 2 for tag in ("url", "talkid", "keywords")]
    described = ("<description>Ein Titel</description>", "<title> A title</title>")
    dropped = [("eins zwei drei vier", "one two"), ("", "empty"), ("a " * 176, "b " * 176)]
    test = [(f"Prüfung {i}", f"it\N{RIGHT SINGLE QUOTATION MARK}s Test {i}") for i in range(10)]
    write_iwslt14(tmp_path / "downloads", [*tags, described, *dropped, *pairs], test)
    lines = run("iwslt14", tmp_path, moses)
    kept = ["ein titel", *(f"satz {i} ." for i in range(1, 50))]
    assert lines["valid.de"] == kept[22::23] == ["satz 22 .", "satz 45 ."]
    assert lines["train.de"] == [text for i, text in enumerate(kept, 1) if i % 23]
    assert lines["train.en"][:2] == ["a title", "sentence 1 ."]
    assert lines["test.de"] == [f"prüfung {i}" for i in range(10)]
    assert lines["test.en"] == [f"it's test {i}" for i in range(10)]
    assert capsys.readouterr().out == "train: 48 pairs\nvalid: 2 pairs\ntest: 10 pairs\n"
    log = (moses / "scripts" / "tokenizer" / "tokenizer.perl.log").read_text().splitlines()
    assert {line.rpartition("-l ")[2] for line in log} == {"de", "en"}
    assert not any("-a" in line.split() for line in log)


def test_wmt14_has_the_splits_of_fairseq(
    tmp_path: Path, moses: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pairs are dropped by their numbers of subwords, after the validation split was made."""
    monkeypatch.setattr(prepare, "VOCABULARY", 60)
    corpora = dict.fromkeys(prepare.WMT14, 100)
    for number, (corpus, url) in enumerate(prepare.WMT14.items()):
        pairs = [(f"Text {number} {i};", f"Text {number} {i}.") for i in range(corpora[corpus])]
        if number == 1:
            # Equally many words, but many more subwords; in train, and in valid.
            pairs[7] = pairs[99] = ("a", "Donaudampfschifffahrtsgesellschaftskapitän")
        files = {
            f"{corpus}.{language}": "".join(f"{pair[side]}\n" for pair in pairs)
            for side, language in enumerate(("en", "de"))
        }
        write_archive(tmp_path / "downloads" / url.rpartition("/")[2], files)
    tests = {
        f"test-full/newstest2014-deen-{side}.{language}.sgm": segments(f"News, {language}; more.")
        for side, language in (("src", "en"), ("ref", "de"))
    }
    write_archive(tmp_path / "downloads" / "test-full.tgz", tests)
    lines = run("wmt14", tmp_path, moses)
    assert lines["valid.en"] == ["Text 0 99 ,", "Text 2 99 ,"]
    assert lines["valid.de"] == ["Text 0 99 .", "Text 2 99 ."]
    expected = [f"Text {number} {i} ." for number in range(3) for i in range(99)]
    expected.remove("Text 1 7 .")
    assert lines["train.de"] == expected
    # Test sentences are tokenised only.
    assert lines["test.en"] == ["News , en; more ."]
    log = (moses / "scripts" / "tokenizer" / "tokenizer.perl.log").read_text().splitlines()
    assert all("-a" in line.split() for line in log)


@pytest.mark.skipif(not (SHARED / "iwslt14").exists(), reason="no IWSLT 2014")
def test_real_sentences_pass_unchanged(tmp_path: Path, moses: Path) -> None:
    """Tokenised sentences of fairseq have the lengths that cleaning keeps."""
    (moses / "scripts/tokenizer/tokenizer.perl").write_text("print while <STDIN>")
    texts = {
        name: [
            (SHARED / "iwslt14" / f"{name}.{language}").read_text().split("\n")[:-1]
            for language in ("de", "en")
        ]
        for name in ("train-4600", "valid", "test")
    }
    train, valid, test = (list(zip(*sides, strict=True)) for sides in texts.values())
    mixed = [valid[i // 23 - 1] if i % 23 == 0 else train[i - 1] for i in range(1, 4601)]
    write_iwslt14(tmp_path / "downloads", mixed, test)
    lines = run("iwslt14", tmp_path, moses)
    for side, language in enumerate(("de", "en")):
        assert lines[f"test.{language}"] == texts["test"][side]
        assert lines[f"valid.{language}"] == texts["valid"][side][:200]
        assert len(lines[f"train.{language}"]) == 4400


class Archives(BaseHTTPRequestHandler):
    """Server of a complete file and of one whose connection ends too early."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", "9" if "short" in self.path else "4")
        self.end_headers()
        self.wfile.write(b"data")

    def log_message(self, *_: object) -> None:
        """Print nothing."""


@pytest.fixture
def server() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Archives) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_an_archive_is_downloaded_completely_or_not_at_all(tmp_path: Path, server: str) -> None:
    path = tmp_path / "downloads" / "archive.tgz"
    with pytest.raises(ValueError, match=r"cannot be downloaded: 5 bytes are missing\. Save a"):
        prepare.download(f"{server}/short", path)
    assert not path.exists()
    prepare.download(f"{server}/archive.tgz", path)
    assert path.read_bytes() == b"data"


def test_an_encrypted_download_is_not_redirected_to_one_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Redirected(io.BytesIO):
        length = 0

        def geturl(self) -> str:
            return "http://elsewhere/archive.tgz"

    monkeypatch.setattr(urllib.request, "urlopen", lambda *_, **__: Redirected(b"data"))
    with pytest.raises(ValueError, match="redirects to http://elsewhere"):
        prepare.download("https://somewhere/archive.tgz", tmp_path / "archive.tgz")
    assert not (tmp_path / "archive.tgz").exists()
    sources = [prepare.IWSLT14, prepare.WMT14_TEST, *prepare.WMT14.values()]
    assert all(url.startswith("https://") for url in sources)


def test_files_are_on_the_disk_before_they_get_their_names(
    tmp_path: Path, moses: Path, server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A power cut leaves no empty file under the name of a complete one."""
    synced: set[int] = set()
    fsync = os.fsync

    def record(descriptor: int) -> None:
        synced.add(os.fstat(descriptor).st_ino)
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", record)
    prepare.download(f"{server}/archive.tgz", tmp_path / "archive.tgz")
    write_iwslt14(tmp_path / "downloads", [("Satz .", "Sentence .")] * 23, [("Satz", "sentence")])
    run("iwslt14", tmp_path, moses)
    paths = [tmp_path / "archive.tgz", *(tmp_path / "out" / name for name in NAMES)]
    assert [path.name for path in paths if path.stat().st_ino not in synced] == []


@pytest.mark.parametrize(
    ("prepared", "message"),
    [
        ("nothing", "--moses {moses}: contains no scripts/tokenizer/tokenizer.perl"),
        ("moses", "{downloads}/de-en.tgz: contains no file de-en/train.tags.de-en.de"),
        ("damaged", "{downloads}/de-en.tgz: cannot be read: "),
        ("uneven", "{moses}/scripts/training/clean-corpus-n.perl: too short"),
    ],
)
def test_unusable_files_are_one_error_line(
    prepared: str, message: str, tmp_path: Path, moses: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    downloads, out = tmp_path / "downloads", tmp_path / "out"
    write_archive(downloads / "de-en.tgz", {"de-en/other": ""})
    if prepared == "nothing":
        shutil.rmtree(moses)
    elif prepared == "damaged":
        (downloads / "de-en.tgz").write_bytes(b"no archive")
    elif prepared == "uneven":
        names = [f"de-en/train.tags.de-en.{language}" for language in ("de", "en")]
        write_archive(downloads / "de-en.tgz", dict(zip(names, ("a\nb\n", "a\n"), strict=True)))
    arguments = ["iwslt14", "--out", out, "--downloads", downloads, "--moses", moses]
    assert prepare.main(list(map(str, arguments))) == 2
    error = capsys.readouterr().err
    assert error.startswith(message.format(moses=moses, downloads=downloads))
    assert error.count("\n") == 1
    assert not list(out.glob("*"))
