"""Tests of the encoders: text to ids and back, and one line for each error."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from helpers.paths import SHARED

from lit_attn.data.text.streams import encode_texts
from lit_attn.data.text.tokenizers import (
    ByteEncoder,
    Characters,
    Encoder,
    Gpt2,
    GptNeox,
    WordEncoder,
)
from lit_attn.schema.errors import ConfigError


def test_bytes_end_with_a_zero() -> None:
    (ids,) = ByteEncoder().encode(["né"])
    assert ids.tolist() == [110, 195, 169, 0]
    assert ByteEncoder().decode(ids[:-1]) == "né"


def test_words_have_ids_by_falling_frequency() -> None:
    encoder = WordEncoder.learn(["b a b\n\nc a b\n"], size=4)
    # b three times, <eos> three times (the blank line has one), a twice, c once.
    assert encoder.words == ["<eos>", "b", "a", "c"]
    assert encoder.encode(["b\n\na c\n"])[0].tolist() == [1, 0, 0, 2, 3, 0]
    assert encoder.decode([1, 0, 2]) == "b \n a"


def test_only_line_feeds_end_lines() -> None:
    """Lines of WikiText contain other characters that Python counts as line ends."""
    encoder = WordEncoder.learn(["a\u2028b\x0cc\n"], size=4)
    assert len(encoder.encode(["a\u2028b\x0cc\n"])[0]) == 4


def test_last_line_without_a_line_feed_ends_too() -> None:
    encoder = WordEncoder.learn(["a b"], size=3)
    assert encoder.encode(["a b"])[0].tolist() == encoder.encode(["a b\n"])[0].tolist()


def test_size_of_the_vocabulary_is_checked() -> None:
    with pytest.raises(ConfigError, match=r"tokenizer.size: 5, but .* has 4 different words"):
        WordEncoder.learn(["b a c\n"], size=5)


def test_unknown_words_become_unk_or_errors() -> None:
    assert WordEncoder.learn(["a <unk>"], None).encode(["b"])[0].tolist() == [1, 0]
    with pytest.raises(ConfigError, match="'b' is not in the vocabulary, which has no <unk>"):
        WordEncoder.learn(["a"], None).encode(["b"])


def test_characters_have_ids_by_code_point() -> None:
    tokenizer = Characters(size=5)
    encoder = tokenizer.encoder(["né\n", "\r\ufeff"])
    assert encoder.encode(["\né"])[0].tolist() == [0, 3]
    assert encoder.prompt("n\r") == [2, 1]
    assert encoder.decode([4, 2, 3, 1]) == "\ufeffné\r"
    with pytest.raises(ConfigError, match="'x' is not among the 5 characters of the training"):
        encoder.prompt("nx")
    with pytest.raises(ConfigError, match="'x', 'y' are not among the 5 characters"):
        encoder.prompt("yxn")
    texts = {"train": [("a.txt", "né\n"), ("b.txt", "\r\ufeff")], "val": [("c.txt", "nx")]}
    with pytest.raises(ConfigError, match=r"^data\.val: 'x' is not among"):
        encode_texts(tokenizer, texts)
    with pytest.raises(ConfigError, match=r"tokenizer\.size: 5, but .* has 2 different .* set 2$"):
        tokenizer.encoder(["ab"])


@pytest.fixture
def tiny_bpe(tmp_path: Path) -> Path:
    """Write GPT-2's two files for its 256 bytes and two merges: "th" and "the"."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    characters = [chr(b) for b in printable] + [chr(256 + i) for i in range(256 - len(printable))]
    ids = {c: i for i, c in enumerate(characters)} | {"th": 256, "the": 257, "<|endoftext|>": 258}
    (tmp_path / "encoder.json").write_text(json.dumps(ids))
    (tmp_path / "vocab.bpe").write_text("#version: 0.2\nt h\nth e\n")
    return tmp_path


def gpt2(folder: Path | None) -> Encoder:
    encoder: Encoder = Gpt2(folder=folder).encoder(())
    return encoder


def test_encoding_from_two_files(tiny_bpe: Path) -> None:
    encoder = gpt2(tiny_bpe)
    (ids,) = encoder.encode(["the th"])
    space = 256 - 68 + 32  # the 33rd of the bytes that are not printable themselves
    assert ids.tolist() == [257, space, 256, 258]
    assert encoder.decode(ids[:-1]) == "the th"


def test_inconsistent_encoding_files_are_refused(tiny_bpe: Path) -> None:
    (tiny_bpe / "vocab.bpe").write_text("#version: 0.2\nt h\nth ere\n")
    with pytest.raises(ConfigError, match="Token `ere` out of vocabulary"):
        gpt2(tiny_bpe)


def test_a_missing_encoding_file_is_named(tiny_bpe: Path) -> None:
    (tiny_bpe / "vocab.bpe").unlink()
    with pytest.raises(ConfigError, match=r"data\.tokenizer\.folder: .*No such file"):
        gpt2(tiny_bpe)


def test_a_missing_library_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ConfigError, match=r"pip install 'lit_attn\[text\]'"):
        gpt2(None)


@pytest.fixture
def tokenizer_json(tmp_path: Path) -> Path:
    """Write a tokenizer.json whose added tokens have ids 0, 4 and 50,280."""
    tokens = {"<|endoftext|>": 0, "a": 1, "b": 2, "ab": 3}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(tokens, [("a", "b")]))
    content = json.loads(tokenizer.to_str())
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    content["added_tokens"] = [
        {"id": number, "content": text, "special": number == 0, **flags}
        for number, text in ((0, "<|endoftext|>"), (4, "c"), (50_280, "ba"))
    ]
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(content))
    return path


def test_a_tokenizer_json_gives_its_ids(tokenizer_json: Path) -> None:
    """Tokens beyond the vocabulary do not take part: "ba" is two tokens."""
    encoder = GptNeox(file=tokenizer_json).encoder(())
    (ids,) = encoder.encode(["abcba"])
    assert ids.tolist() == [3, 4, 2, 1, 0]
    assert ids.dtype == np.uint32
    assert encoder.prompt("ab") == [3]


def test_the_name_of_a_special_token_in_a_text_is_ordinary_text(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A text is no end of a document, and the log counts how often it occurs."""
    letters = ["<|endoftext|>", *tokenizers.pre_tokenizers.ByteLevel.alphabet()]
    ids = {letter: number for number, letter in enumerate(letters)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(ids, []))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|endoftext|>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    encoder = GptNeox(file=tmp_path / "tokenizer.json").encoder(())
    text = "a<|endoftext|>b"
    (document,) = encoder.encode([text])
    assert document.tolist().count(encoder.end) == 1
    assert document[-1] == encoder.end
    assert encoder.decode(document[:-1]) == text
    assert encoder.prompt(text) == document[:-1].tolist()
    (message,) = caplog.messages
    assert "contain the text <|endoftext|> 1 times" in message
    caplog.clear()
    encoder.encode(["ab"])
    assert not caplog.messages


def test_unusable_tokenizer_files_are_named(tokenizer_json: Path) -> None:
    with pytest.raises(ConfigError, match=r"data\.tokenizer\.file: .*missing\.json cannot be read"):
        GptNeox(file=Path("missing.json")).encoder(())
    tokenizer_json.write_text(tokenizer_json.read_text().replace("<|endoftext|>", "end"))
    with pytest.raises(ConfigError, match=r"has no token <\|endoftext\|>"):
        GptNeox(file=tokenizer_json).encoder(())
    tokenizer_json.write_text("{}")
    with pytest.raises(
        ConfigError, match=r"data\.tokenizer\.file: .*tokenizer\.json cannot be read"
    ):
        GptNeox(file=tokenizer_json).encoder(())


def test_the_published_file_gives_the_ids_of_gpt_neox() -> None:
    """In Pythia, "Hello world" has the ids 12092 and 1533; two spaces have the last id, 50276."""
    path = SHARED / "gpt-neox-tokenizer" / "tokenizer.json"
    if not path.exists():
        pytest.skip("GPT-NeoX's tokenizer.json is not at hand")
    encoder = GptNeox(file=path).encoder(())
    assert encoder.encode(["Hello world"])[0].tolist() == [12092, 1533, 0]
    assert encoder.encode(["  "])[0].tolist() == [50276, 0]
    assert encoder.tokenizer.get_vocab_size() == encoder.vocabulary == 50_277


def test_the_published_files_give_the_ids_of_gpt2() -> None:
    """In GPT-2, "Hello world" has the ids 15496 and 995, and the vocabulary has 50,257 ids."""
    folder = SHARED / "gpt2-bpe"
    if not folder.exists():
        pytest.skip("GPT-2's encoder.json and vocab.bpe are not at hand")
    encoder = gpt2(folder)
    (ids,) = encoder.encode(["Hello world"])
    assert ids.tolist() == [15496, 995, 50256]
    assert encoder.tokenizer.get_vocab_size() == encoder.vocabulary == 50_257
    text = "It's 1,234.5 \t\n\n  naïve — 日本語 🎉 they'll"
    assert encoder.decode(encoder.encode([text])[0][:-1]) == text


def test_penn_treebank_has_its_known_size() -> None:
    path = SHARED / "ptb" / "ptb.train.txt"
    if not path.exists():
        pytest.skip("the Penn Treebank is not at hand")
    encoder = WordEncoder.learn([path.read_text()], size=10_000)
    (ids,) = encoder.encode([path.read_text()])
    assert len(ids) == 929_589
    assert (np.diff(np.bincount(ids)) <= 0).all()
