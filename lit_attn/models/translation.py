"""Encoder-decoder for translation (Vaswani et al. 2017), and beam search with key/value caches.

The search is that of github.com/facebookresearch/fairseq: a hypothesis ends among the best `beams`
candidates, a sentence with its first `beams` hypotheses; the best has the largest mean log p.

Shapes: B batch, m source tokens, n target tokens, d width, V vocabulary, K beams. Id 0 is padding.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lit_attn.attention.precision import wide
from lit_attn.config.data.text import END, PADDING
from lit_attn.config.models.language import EncoderDecoderConfig
from lit_attn.config.tasks import TranslationConfig
from lit_attn.models.layers import Device
from lit_attn.models.seeded_draws import draw_parameters
from lit_attn.models.trunk import Memory, Trunk, initialise


class EncoderDecoder(nn.Module):
    """Bidirectional encoder of the source, and causal decoder with cross-attention to it."""

    def __init__(
        self, model: EncoderDecoderConfig, vocabulary: int, context: int, device: Device = None
    ) -> None:
        """Build a network for at most `context` tokens; initialise it except on "meta"."""
        super().__init__()
        self.encoder = Trunk(model, vocabulary, context, is_causal=False, device=device)
        self.decoder = Trunk(model, vocabulary, context, True, device, cross=model.cross)
        if model.embeddings == "all":
            self.decoder.tokens = self.encoder.tokens
        self.head = None
        if model.embeddings == "separate":
            self.head = nn.Linear(model.dim, vocabulary, bias=False, device=device)
        specs = (*model.attention.mechanisms, *model.cross.mechanisms)
        self.hides_queries = any(spec.similarity.counts_queries for spec in specs)
        draw_parameters(self, lambda: self._initialise(model))

    @torch.no_grad()
    def _initialise(self, model: EncoderDecoderConfig) -> None:
        initialise(self, model, tied=self.head is None)
        if model.init.matrices == "fairseq":
            for trunk in (self.encoder, self.decoder):
                trunk.tokens.weight[PADDING] = 0

    def forward(self, source: Tensor, inputs: Tensor) -> Tensor:
        """Return logits (B, n, V) of the tokens that follow `inputs` (B, n)."""
        (tokens, mask), present = self.encode(source), None
        if self.hides_queries:
            present = inputs != PADDING
            mask = mask & present[:, None, :, None]
        return self.logits(self.decoder(inputs, present, memory=(tokens, mask)))

    def encode(self, source: Tensor) -> Memory:
        """Return the memory of the sentences `source` (B, m)."""
        present = source != PADDING
        return self.encoder(source, present), present[:, None, None, :]

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits of the decoder's output, (B, n, d) -> (B, n, V)."""
        if self.head is not None:
            return self.head(hidden)
        return F.linear(hidden, self.decoder.tokens.weight)


@torch.no_grad()
def translate(
    network: EncoderDecoder, source: Tensor, search: TranslationConfig
) -> list[list[int]]:
    """Return the ids of the best translation of every sentence of `source` (B, m), without END."""
    batch, beams, device = len(source), search.beams, source.device
    lengths = (source != PADDING).sum(1).tolist()
    # END is not counted by the limits of fairseq.
    limits = [1 + int(search.ratio * length + search.extra) for length in lengths]
    if network.decoder.max_tokens is not None:
        limits = [min(limit, network.decoder.max_tokens) for limit in limits]
    last_steps = torch.tensor(limits, device=device) - 1
    hidden, mask = (part.repeat_interleave(beams, 0) for part in network.encode(source))
    memory, caches = (hidden, mask), network.decoder.new_caches()
    first_rows = torch.arange(0, batch * beams, beams, device=device).unsqueeze(1)
    tokens = torch.full((batch * beams, 1), END, device=device)
    # All beams of a sentence start equal, so only the first one counts.
    scores = torch.full((batch, beams), -torch.inf, device=device, dtype=hidden.dtype)
    scores[:, 0] = 0
    finished: list[list[tuple[float, list[int]]]] = [[] for _ in range(batch)]
    for step in range(max(limits)):
        hidden = network.decoder(tokens[:, -1:], None, caches, memory)
        log_p = wide(network.logits(hidden[:, -1])).log_softmax(-1).view(batch, beams, -1)
        vocabulary = log_p.shape[-1]
        log_p[..., PADDING] = -torch.inf
        if step == 0:
            log_p[..., END] = -torch.inf
        is_last = last_steps <= step
        log_p[is_last, :, :END] = log_p[is_last, :, END + 1 :] = -torch.inf
        candidates = (scores.unsqueeze(-1) + log_p).flatten(1)
        values, places = candidates.topk(min(2 * beams, beams * vocabulary))
        rows, ids = first_rows + places // vocabulary, places % vocabulary
        is_end = (ids == END) & values.isfinite()
        for sentence, column in is_end[:, :beams].nonzero().tolist():
            if len(finished[sentence]) < beams:
                score = values[sentence, column].item() / (step + 1) ** search.length_penalty
                hypothesis = tokens[rows[sentence, column], 1:].tolist()
                finished[sentence].append((score, hypothesis))
        if all(
            len(done) == beams or limit <= step + 1
            for done, limit in zip(finished, limits, strict=True)
        ):
            break
        scores, columns = values.masked_fill(ids == END, -torch.inf).topk(beams)
        chosen = rows.gather(1, columns).flatten()
        tokens = torch.cat([tokens[chosen], ids.gather(1, columns).view(-1, 1)], dim=1)
        # The caches of cross-attention, every second one, are equal for all beams of a sentence.
        for cache in caches[::2]:
            cache.select(chosen)
    return [max(done)[1] for done in finished]
