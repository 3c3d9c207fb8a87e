"""Plug-in for translations whose compounds are split before BLEU.

The study of WMT 2014 names this file under `parts`. Its torch code is in
compound_splitting_words.py, which a cell imports when it is built.

Source: github.com/facebookresearch/fairseq at 3d262bb, scripts/compound_split_bleu.sh
(docs/setups.md, section 16).
"""

from typing import Any, ClassVar

from lit_attn.data.base import method
from lit_attn.data.text.parallel import ParallelText


class CompoundSplitText(ParallelText, kind="compound-split-text"):
    """Parallel text whose words are split at hyphens before BLEU."""

    runs_foreign_code = False  # Tests try it out, so a dry run need not import PyTorch.
    build: ClassVar = method("compound_splitting_words:CompoundSplitData")

    def identity(self) -> dict[str, Any]:
        """Return the identity from the time when `parallel-text` of the package had this option."""
        return {**super().identity(), "kind": "parallel-text", "split_compounds": True}
