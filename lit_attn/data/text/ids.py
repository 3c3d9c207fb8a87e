"""Ids of tokens with a meaning, and names that the data sets of text share."""

# Target that is not to be predicted: padding, or a token that an earlier window predicts.
IGNORED = -100

# Ids in sentence pairs: padding, the end of a sentence (also the decoder's first input), unknown.
PADDING, END, UNKNOWN = range(3)

SPLITS = ("train", "val", "test")
VOCABULARY = "vocabulary.txt"  # File of the words beside shards, one word a line.
CHARACTERS = "characters.json"  # File of the characters beside shards, one text.
# Tokenizers of the texts that `lit-attn prepare NAME` writes as shards.
PREPARED = {"openwebtext": "gpt2", "fineweb": "gpt2", "wikitext103": "words"}
TOKEN_TYPES = ("uint8", "uint16", "uint32", "int32", "int64")  # Types of ids in shards.
