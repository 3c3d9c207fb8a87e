"""Softmax by frequency classes (Grave et al. 2017), tied to the embedding, divisor 1.

Shapes: N tokens, d width, V vocabulary. hidden: (N, d), targets: (N,), embedding: (V, d).

Ids are in order of falling frequency. The head scores the most frequent ids and one column for each
rarer class; p(id) of a rarer one is p(its class) p(id | class).
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lit_attn.schema.errors import ConfigError


class AdaptiveSoftmax(nn.Module):
    """`cutoffs` are the first ids of the rarer classes; a bias for every id, as Transformer-XL."""

    def __init__(
        self,
        vocabulary: int,
        dim: int,
        cutoffs: tuple[int, ...],
        device: torch.device | str | None = None,
    ) -> None:
        """Raise ConfigError for a cutoff that is no id."""
        super().__init__()
        if cutoffs[-1] >= vocabulary:
            raise ConfigError(
                f"model.cutoffs: {cutoffs[-1]} is beyond the vocabulary of {vocabulary}"
            )
        self.edges = (*cutoffs, vocabulary)
        self.classes = nn.Linear(dim, len(cutoffs), device=device)
        self.bias = nn.Parameter(torch.zeros(vocabulary, device=device))

    def nll(self, hidden: Tensor, targets: Tensor, embedding: Tensor) -> Tensor:
        """-log p(target), (N,) float32. Only the classes that have a target are scored."""
        head = self._head(hidden, embedding)
        first = self.edges[0]
        nll = -head.gather(1, targets.clamp_max(first - 1)[:, None]).squeeze(1)
        for number, (start, stop) in enumerate(zip(self.edges, self.edges[1:], strict=False)):
            rows = ((targets >= start) & (targets < stop)).nonzero().squeeze(1)
            within = self._within(hidden[rows], embedding, start, stop)
            found = within.gather(1, (targets[rows] - start)[:, None]).squeeze(1)
            nll = nll.index_copy(0, rows, -head[rows, first + number] - found)
        return nll

    def log_probabilities(self, hidden: Tensor, embedding: Tensor) -> Tensor:
        """log p of every id, (N, V) float32."""
        head = self._head(hidden, embedding)
        first = self.edges[0]
        parts = [head[:, :first]]
        for number, (start, stop) in enumerate(zip(self.edges, self.edges[1:], strict=False)):
            within = self._within(hidden, embedding, start, stop)
            parts.append(head[:, first + number, None] + within)
        return torch.cat(parts, dim=1)

    def _head(self, hidden: Tensor, embedding: Tensor) -> Tensor:
        first = self.edges[0]
        frequent = F.linear(hidden, embedding[:first], self.bias[:first])
        return _log_softmax(torch.cat([frequent, self.classes(hidden)], dim=1))

    def _within(self, hidden: Tensor, embedding: Tensor, start: int, stop: int) -> Tensor:
        return _log_softmax(F.linear(hidden, embedding[start:stop], self.bias[start:stop]))


def _log_softmax(scores: Tensor) -> Tensor:
    return scores.to(torch.promote_types(scores.dtype, torch.float32)).log_softmax(-1)
