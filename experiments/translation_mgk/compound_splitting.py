"""Plug-in for translations whose compounds are split before BLEU.

The study of WMT 2014 names this file under `parts`.

Source: github.com/facebookresearch/fairseq at 3d262bb, scripts/compound_split_bleu.sh
(docs/setups.md, section 16).
"""

import re
from typing import Any

import torch

from lit_attn.data.text.parallel import ParallelData, ParallelText


class CompoundSplitText(ParallelText, kind="compound-split-text"):
    """Parallel text whose words are split at hyphens before BLEU."""

    runs_foreign_code = False  # Tests try it out, so a dry run need not.

    def build(self, seed: int, device: torch.device) -> "CompoundSplitData":
        return CompoundSplitData(self, seed, device)

    def identity(self) -> dict[str, Any]:
        """Return the identity from the time when `parallel-text` of the package had this option."""
        return {**super().identity(), "kind": "parallel-text", "split_compounds": True}


COMPOUND = re.compile(r"(\S)-(\S)")
"""Hyphen between two characters. A character is next to one hyphen only: a-b-c is split once."""


class CompoundSplitData(ParallelData):
    """Sentence pairs whose words are split at hyphens before BLEU."""

    def words(self, ids: list[int]) -> str:
        """Return the text of token ids, with ##AT##-##AT## as a word in place of each hyphen."""
        return COMPOUND.sub(r"\1 ##AT##-##AT## \2", super().words(ids))
