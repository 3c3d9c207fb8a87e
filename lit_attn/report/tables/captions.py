"""Short captions: MOST_SENTENCES at most, beside the complete caption of a table or figure."""

import re
from collections.abc import Sequence

MOST_SENTENCES = 5
"""Sentences of a short caption; one more sentence leads to the complete caption."""

END_OF_SENTENCE = re.compile(r"(?<=[.?!])\s+(?=[A-Z*†‡\N{EM DASH}])")


def split_sentences(text: str) -> list[str]:
    """Return the sentences of a text; each but the first starts with a capital letter."""
    return [sentence for sentence in END_OF_SENTENCE.split(" ".join(text.split())) if sentence]


def shorten(notes: Sequence[str]) -> list[str]:
    """Return the first MOST_SENTENCES sentences of a caption, or all if there is only one more."""
    sentences = split_sentences(" ".join(notes))
    if len(sentences) <= MOST_SENTENCES + 1:
        return list(notes)
    return [" ".join(sentences[:MOST_SENTENCES])]
