"""Beam search of translations, with key/value caches.

The search is that of github.com/facebookresearch/fairseq: a hypothesis ends among the best `beams`
candidates, a sentence with its first `beams` hypotheses; the best has the largest mean log p.

Shapes: B batch, m source tokens, n target tokens, V vocabulary, K beams. Id 0 is padding.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from lit_attn.attention.precision import wide
from lit_attn.data.text.ids import END, PADDING
from lit_attn.models.translation import EncoderDecoder
from lit_attn.tasks.task import TranslationConfig


@torch.no_grad()
def translate(
    network: EncoderDecoder, source: Tensor, search: TranslationConfig
) -> list[list[int]]:
    """Return the ids of the best translation of every sentence of `source` (B, m), without END."""
    beam_search = BeamSearch(network, source, search)
    for step in range(beam_search.max_steps):
        beam_search.advance(step)
        if beam_search.is_done(step):
            break
    return [max(hypotheses).tokens for hypotheses in beam_search.finished]


class Hypothesis(NamedTuple):
    """A complete translation; its score is the mean log p of its tokens."""

    score: float
    tokens: list[int]


class BeamSearch:
    """Beam search for all sentences of a batch at once.

    `tokens` (B K, n) begin with END, and `scores` (B, K) are sums of log p of unfinished beams.
    `limits` has the largest number of tokens of each sentence.
    """

    def __init__(self, network: EncoderDecoder, source: Tensor, search: TranslationConfig) -> None:
        batch = len(source)
        beams = search.beams
        device = source.device
        self.network = network
        self.search = search
        self.limits = self._find_limits(source)
        self.max_steps = max(self.limits)
        self.last_steps = torch.tensor(self.limits, device=device) - 1
        hidden, mask = network.encode(source)
        self.memory = (
            hidden.repeat_interleave(beams, 0),
            mask.repeat_interleave(beams, 0),
        )
        self.caches = network.decoder.new_caches()
        self.first_rows = torch.arange(0, batch * beams, beams, device=device).unsqueeze(1)
        self.tokens = torch.full((batch * beams, 1), END, device=device)
        # All beams of a sentence start equal, so only the first one counts.
        self.scores = torch.full((batch, beams), -torch.inf, device=device, dtype=hidden.dtype)
        self.scores[:, 0] = 0
        self.finished: list[list[Hypothesis]] = [[] for _ in range(batch)]

    def _find_limits(self, source: Tensor) -> list[int]:
        """Return the largest number of tokens of each translation."""
        max_tokens = self.network.decoder.max_tokens
        limits = []
        for length in (source != PADDING).sum(1).tolist():
            # END is not counted by the limits of fairseq.
            limit = 1 + int(self.search.ratio * length + self.search.extra)
            if max_tokens is not None:
                limit = min(limit, max_tokens)
            limits.append(limit)
        return limits

    def advance(self, step: int) -> None:
        """Extend all beams by one token, and collect the hypotheses that end with it."""
        log_p = self._score_next_tokens(step)
        beams, vocabulary = log_p.shape[1:]
        candidates = (self.scores.unsqueeze(-1) + log_p).flatten(1)
        # Every beam may end, so at most half of the candidates are ends.
        count = min(2 * beams, beams * vocabulary)
        values, places = candidates.topk(count)
        rows = self.first_rows + places // vocabulary
        ids = places % vocabulary
        self._collect_ends(step, values, rows, ids)
        self.scores, columns = values.masked_fill(ids == END, -torch.inf).topk(beams)
        chosen_rows = rows.gather(1, columns).flatten()
        chosen_ids = ids.gather(1, columns).view(-1, 1)
        self.tokens = torch.cat([self.tokens[chosen_rows], chosen_ids], dim=1)
        # The caches of cross-attention, every second one, are equal for all beams of a sentence.
        for cache in self.caches[::2]:
            cache.select(chosen_rows)

    def _score_next_tokens(self, step: int) -> Tensor:
        """Return log p of every token after every beam, (B, K, V); impossible ones have -inf."""
        batch, beams = self.scores.shape
        hidden = self.network.decoder(self.tokens[:, -1:], None, self.caches, self.memory)
        logits = wide(self.network.logits(hidden[:, -1]))
        log_p = logits.log_softmax(-1).view(batch, beams, -1)
        log_p[..., PADDING] = -torch.inf
        if step == 0:
            log_p[..., END] = -torch.inf
        must_end = self.last_steps <= step
        log_p[must_end, :, :END] = -torch.inf
        log_p[must_end, :, END + 1 :] = -torch.inf
        return log_p

    def _collect_ends(self, step: int, values: Tensor, rows: Tensor, ids: Tensor) -> None:
        """Add the hypotheses that end among the best `beams` candidates (B, 2 K)."""
        beams = self.search.beams
        is_end = (ids == END) & values.isfinite()
        for sentence, column in is_end[:, :beams].nonzero().tolist():
            if len(self.finished[sentence]) == beams:
                continue
            total = values[sentence, column].item()
            score = total / (step + 1) ** self.search.length_penalty
            tokens = self.tokens[rows[sentence, column], 1:].tolist()
            self.finished[sentence].append(Hypothesis(score, tokens))

    def is_done(self, step: int) -> bool:
        """Return True if every sentence has K hypotheses or has reached its limit."""
        for hypotheses, limit in zip(self.finished, self.limits, strict=True):
            if len(hypotheses) < self.search.beams and limit > step + 1:
                return False
        return True
