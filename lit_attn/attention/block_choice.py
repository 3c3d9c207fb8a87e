"""Choice of few blocks of keys for each query (MoBA).

Lu et al. 2025, "MoBA: Mixture of Block Attention for Long-Context LLMs",
https://arxiv.org/abs/2502.13189, section 2.2, eq. 2-6.

Shapes: B batch, H heads, n queries, m keys: the cached tokens, and then those of the queries.
"""

from typing import Any

import torch
from pydantic import Field, PositiveInt
from torch import Tensor

from lit_attn.attention.filters import ActiveFilterConfig, Filter, KeyBlocks
from lit_attn.attention.parts import LayerShape
from lit_attn.attention.precision import wide


class BlockChoiceConfig(ActiveFilterConfig, kind="moba"):
    """Keys of the query's own block and of the blocks with the largest mean logits (MoBA).

    Lu et al. 2025, https://arxiv.org/abs/2502.13189, eq. 2-6. The tokens of a sequence stand in
    blocks of `block` tokens. The first block of a query starts with the first token that the query
    sees, so padding and other documents before a sequence are in no block. The product of a query
    and the mean key of a block is the mean of the block's logits, so any similarity has such a
    choice; only keys that the query sees count. The choice has no gradient. On a GPU,
    flex_attention skips the other blocks of calls without further masks and biases. All other calls
    choose from all logits, so memory and time are those of attention to all keys.
    """

    needs_row_terms = False
    needs_order = "chooses blocks of neighbouring tokens"
    block: PositiveInt = Field(64, description="tokens of a block")
    blocks: PositiveInt = Field(3, description="blocks that a query sees, its own one included")

    def find_document_problem(self) -> str:
        return ""

    def build(self, shape: LayerShape) -> Any:
        return BlockChoice(self, shape)

    def reference(
        self, module: Any, logits: Tensor, visible: Tensor, present: Tensor | None
    ) -> Tensor:
        return logits

    def reference_visible(self, module: Any, logits: Tensor, visible: Tensor) -> Tensor:
        """Lu et al. 2025, eq. 2-6: query by query, and block by block."""
        batch, heads, n, _ = logits.shape
        visible = visible.expand(logits.shape)
        chosen = torch.zeros_like(visible)
        for b in range(batch):
            for h in range(heads):
                for i in range(n):
                    shown = visible[b, h, i].nonzero().flatten().tolist()
                    # Blocks start with the first token that the query sees.
                    first = shown[0] if shown else 0
                    visible_keys = visible[b, h, i, first:]
                    for number in self._choose_blocks(
                        logits[b, h, i, first:], visible_keys, i - first
                    ):
                        start = first + number * self.block
                        chosen[b, h, i, start : start + self.block] = True
        return visible & chosen

    def _choose_blocks(self, logits: Tensor, visible: Tensor, i: int) -> list[int]:
        """Return the blocks of query i, from its logits (n,) and the keys that it sees (n,)."""
        own_block = i // self.block
        means = {}
        for start in range(0, len(logits), self.block):
            block_logits = logits[start : start + self.block][visible[start : start + self.block]]
            if len(block_logits) and start // self.block != own_block:
                means[start // self.block] = float(block_logits.detach().mean())
        ranked = sorted(means, key=lambda number: means[number], reverse=True)
        return [own_block, *ranked[: self.blocks - 1]]


class BlockChoice(Filter):
    """Visibility of the keys in the query's own block and in those with the largest mean logits."""

    chooses_blocks = True

    @torch.no_grad()
    def choose_blocks(self, q: Tensor, k: Tensor, is_causal: bool) -> KeyBlocks:
        """Return the chosen blocks from the mean key of each block, which has the mean logit."""
        n, m = q.shape[-2], k.shape[-2]
        size = self.part.block
        count = -(-m // size)
        padded = torch.nn.functional.pad(wide(k), (0, 0, 0, count * size - m))
        numbers = torch.arange(count, device=k.device)
        sizes = (m - numbers * size).clamp_max(size).unsqueeze(-1)
        mean_keys = padded.unflatten(-2, (count, size)).sum(-2) / sizes
        means = wide(q) @ mean_keys.mT
        if is_causal:
            own_blocks = torch.arange(n, device=q.device).unsqueeze(-1) // size
            means = means.masked_fill(numbers > own_blocks, -torch.inf)
        return KeyBlocks(self._choose_largest(means, m), size)

    def choose_keys(self, a: Tensor, visible: Tensor | None) -> Tensor | None:
        chosen = self._choose(a.detach(), visible)
        return chosen if visible is None else visible & chosen

    def _choose(self, a: Tensor, visible: Tensor | None) -> Tensor:
        """Return (B, H, n, m), True for the keys of the chosen blocks."""
        m = a.shape[-1]
        size = self.part.block
        a = wide(a)
        if visible is None:
            means = _average_blocks(a, torch.ones_like(a, dtype=torch.bool), size)
            return self._choose_largest(means, m).repeat_interleave(size, dim=-1)[..., :m]
        is_visible = visible.expand_as(a)
        # Blocks start with the first token that a query sees; 0 for a query that sees none.
        first = visible.byte().argmax(-1, keepdim=True)
        keys = torch.arange(m, device=a.device)
        place = (keys + first).clamp_max(m - 1).expand_as(a)
        is_after = keys + first < m
        means = _average_blocks(a.gather(-1, place), is_visible.gather(-1, place) & is_after, size)
        chosen = self._choose_largest(means, m, first)
        number = (keys - first).clamp_min(0) // size
        return chosen.gather(-1, number.expand_as(a))

    def _choose_largest(self, means: Tensor, keys: int, first: Tensor | int = 0) -> Tensor:
        """Return (B, H, n, blocks), True for the own block and those with the largest `means`.

        `first` is the first token of the first block, for each query.
        """
        n, count = means.shape[-2:]
        tokens = torch.arange(keys - n, keys, device=means.device).unsqueeze(-1)
        own_blocks = (tokens - first).clamp_min(0) // self.part.block
        is_own = own_blocks == torch.arange(count, device=means.device)
        means = means.masked_fill(is_own, torch.inf)
        best = means.topk(min(self.part.blocks, count), dim=-1).indices
        return torch.zeros_like(means, dtype=torch.bool).scatter(-1, best, True)


def _average_blocks(a: Tensor, is_visible: Tensor, size: int) -> Tensor:
    """Return the mean of the visible logits of each block, -inf for a block without them."""
    missing = -a.shape[-1] % size
    sums = _sum_blocks(a.masked_fill(~is_visible, 0), size, missing)
    numbers = _sum_blocks(is_visible.to(sums.dtype), size, missing)
    return (sums / numbers.clamp_min(1)).masked_fill(numbers == 0, -torch.inf)


def _sum_blocks(a: Tensor, size: int, missing: int) -> Tensor:
    """Return the sums of each block of keys, (B, H, n, blocks); the last block can be shorter."""
    padded = torch.nn.functional.pad(a, (0, missing))
    return padded.unflatten(-1, (-1, size)).sum(-1)
