"""Words that BLEU compares after the compounds of a text are split.

Source: github.com/facebookresearch/fairseq at 3d262bb (scripts/compound_split_bleu.sh).
"""

import re

from lit_attn.data.text.parallel import ParallelData

COMPOUND = re.compile(r"(\S)-(\S)")
"""Hyphen between two characters. A character is next to one hyphen only: a-b-c is split once."""


class CompoundSplitData(ParallelData):
    """Sentence pairs whose words are split at hyphens before BLEU."""

    def words(self, ids: list[int]) -> str:
        """Return the text of token ids, with ##AT##-##AT## as a word in place of each hyphen."""
        return COMPOUND.sub(r"\1 ##AT##-##AT## \2", super().words(ids))
