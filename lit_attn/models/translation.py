"""Encoder-decoder for translation (Vaswani et al. 2017), and beam search with key/value caches.

The shapes and initial values of the experiments are those of github.com/facebookresearch/fairseq
(docs/setups.md), whose search this is: a hypothesis ends among the best `beams` candidates, a
sentence with its first `beams` hypotheses, and the best of these has the largest mean log p.

Shapes: B batch, m source tokens, n target tokens, d width, V vocabulary, K beams. Id 0 is padding.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lit_attn.attention.cache import Cache
from lit_attn.attention.precision import wide
from lit_attn.attention.rotary import Rotary
from lit_attn.config.data.parallel import END, PADDING
from lit_attn.config.models.translation import EncoderDecoderConfig
from lit_attn.models.layers import Device, norm
from lit_attn.models.seeded_draws import draw_parameters
from lit_attn.models.trunk import Block, Trunk, build_attention, initialise


class Memory(NamedTuple):
    """Output of the encoder (B, m, d), and the mask of its padding (B, 1, 1 or n, m)."""

    tokens: Tensor
    mask: Tensor


class DecoderBlock(Block):
    """Block with cross-attention to the memory between self-attention and FFN."""

    def __init__(self, model: EncoderDecoderConfig, number: int, device: Device) -> None:
        super().__init__(model, number, device)
        self.norm3 = norm(model.norm, model.dim, model.norm_eps, device)
        self.cross = build_attention(model, model.cross, device)

    def forward(
        self,
        x: Tensor,
        attn_mask: Tensor | None,
        is_causal: bool,
        rotary: Rotary | None,
        caches: Sequence[Cache] = (),
        memory: Memory | None = None,
    ) -> Tensor:
        assert memory is not None
        x = self.attend(x, attn_mask, is_causal, rotary, *caches[:1])
        cache = caches[1] if caches else None
        # After the first call the cache has the keys and values of the memory.
        tokens = memory.tokens[:, :0] if cache is not None and cache.length else memory.tokens
        normed = self.norm3(x) if self.pre else x
        x = x + self.attention_scale * self.cross(
            normed, attn_mask=memory.mask, cache=cache, memory=tokens
        )
        return self.feed(x if self.pre else self.norm3(x))


class EncoderDecoder(nn.Module):
    """Bidirectional encoder of the source, and causal decoder with cross-attention to it."""

    def __init__(
        self, model: EncoderDecoderConfig, vocabulary: int, context: int, device: Device = None
    ) -> None:
        """Build a network for at most `context` tokens; initialise it except on "meta"."""
        super().__init__()
        self.encoder = Trunk(model, vocabulary, context, is_causal=False, device=device)
        self.decoder = Trunk(
            model, vocabulary, context, is_causal=True, device=device, block=DecoderBlock
        )
        if model.embeddings == "all":
            self.decoder.tokens = self.encoder.tokens
        self.head = None
        if model.embeddings == "separate":
            self.head = nn.Linear(model.dim, vocabulary, bias=False, device=device)
        specs = (model.attention, model.cross)
        self.hides_queries = any(spec.similarity.counts_queries for spec in specs)
        draw_parameters(self, lambda: initialise(self, model, tied=self.head is None))

    def forward(self, source: Tensor, inputs: Tensor) -> Tensor:
        """Return logits (B, n, V) of the tokens that follow `inputs` (B, n)."""
        memory, present = self.encode(source), None
        if self.hides_queries:
            present = inputs != PADDING
            memory = memory._replace(mask=memory.mask & present[:, None, :, None])
        return self.logits(self.decoder(inputs, present, None, memory))

    def encode(self, source: Tensor) -> Memory:
        """Return the memory of the sentences `source` (B, m)."""
        present = source != PADDING
        return Memory(self.encoder(source, present), present[:, None, None, :])

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits of the decoder's output, (B, n, d) -> (B, n, V)."""
        weight = self.decoder.tokens.weight if self.head is None else self.head.weight
        return F.linear(hidden, weight)


class Search(NamedTuple):
    """Beam search: the score is the sum of log p divided by length^`length_penalty`.

    A translation has at most `ratio` times the tokens of its source, plus `extra`, both with their
    ends.
    """

    beams: int = 5
    length_penalty: float = 1.0
    ratio: float = 1.2
    extra: int = 10


@torch.no_grad()
def translate(network: EncoderDecoder, source: Tensor, search: Search) -> list[list[int]]:
    """Return the ids of the best translation of every sentence of `source` (B, m), without END.

    Raises ValueError if the network is in training mode.
    """
    batch, beams, device = len(source), search.beams, source.device
    limits = [
        int(search.ratio * length + search.extra) for length in (source != PADDING).sum(1).tolist()
    ]
    if network.decoder.longest is not None:
        limits = [min(limit, network.decoder.longest) for limit in limits]
    last_steps = torch.tensor(limits, device=device) - 1
    memory = Memory(*(part.repeat_interleave(beams, 0) for part in network.encode(source)))
    caches = network.decoder.new_caches()
    first_rows = torch.arange(0, batch * beams, beams, device=device).unsqueeze(1)
    tokens = torch.full((batch * beams, 1), END, device=device)
    # All beams of a sentence start equal, so only the first one counts.
    scores = torch.full((batch, beams), -torch.inf, device=device, dtype=memory.tokens.dtype)
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
            len(done) == beams or limit == step + 1
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
