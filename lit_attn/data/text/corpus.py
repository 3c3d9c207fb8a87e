"""A configuration's splits as token streams, with the encoder that made them."""

from pathlib import Path

from lit_attn.config.data.text import PythonText, Shards, TextFiles, Tokens, Words
from lit_attn.data.text import embedded, shards
from lit_attn.data.text.stream import Source, Stream
from lit_attn.data.text.tokenizers import Encoder, WordEncoder, count_words, encoder
from lit_attn.schema.errors import ConfigError


def load(data: Tokens) -> dict[str, Stream]:
    """The splits of `data`: "train", "val" and, where there is one, "test".

    Raises ConfigError naming the file that is missing, empty or not what it should be.
    """
    if isinstance(data, Shards):
        return shards.streams(data.folder, data.tokenizer.vocabulary)
    texts = _texts(data)
    encode = text_encoder(data, texts)
    return {split: _stream(documents, encode) for split, documents in texts.items()}


def text_encoder(data: Tokens, texts: dict[str, list[tuple[str, str]]] | None = None) -> Encoder:
    """What turns text into the ids of `data` and back; `texts` spares reading them again."""
    if isinstance(data, Shards):
        if isinstance(data.tokenizer, Words):
            path = data.folder / shards.VOCABULARY
            return WordEncoder(read_text(path).splitlines())
        return encoder(data.tokenizer, ())
    training = (texts or _texts(data))["train"] if isinstance(data.tokenizer, Words) else []
    return encoder(data.tokenizer, (text for _, text in training))


def read_text(path: Path) -> str:
    """A UTF-8 file; ConfigError where it is missing, empty or something else."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 text (byte {error.start:,})") from error
    if not text:
        raise ConfigError(f"{path}: is empty")
    return text


def _texts(data: Tokens) -> dict[str, list[tuple[str, str]]]:
    """(name, text) of every document of every split."""
    if isinstance(data, PythonText):
        found: dict[str, list[tuple[str, str]]] = {"train": [], "val": [], "test": []}
        for name, text in embedded.documents(data.parts):
            found[embedded.split_of(name)].append((name, text))
        return found
    assert isinstance(data, TextFiles)
    paths = {"train": data.train, "val": data.val, "test": data.test}
    found = {
        split: [(str(path), read_text(path))] for split, path in paths.items() if path is not None
    }
    if data.val is None:
        name, text = found["train"][0]
        # Cut after a whole line where there is one.
        share = round(len(text) * (1 - data.holdout))
        kept = text.rfind("\n", 0, share) + 1 or share
        found["train"], found["val"] = [(name, text[:kept])], [(name, text[kept:])]
    return found


def _stream(documents: list[tuple[str, str]], encode: Encoder) -> Stream:
    encoded = encode.encode([text for _, text in documents])
    sources = [Source(name, ids) for (name, _), ids in zip(documents, encoded, strict=True)]
    text_bytes = sum(len(text.encode()) for _, text in documents)
    words = sum(count_words(text) for _, text in documents)
    return Stream(sources, encode.vocabulary, text_bytes, words)
