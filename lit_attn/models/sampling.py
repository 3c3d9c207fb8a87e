"""Text from a language model, token by token.

Shapes: n tokens, V vocabulary.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from lit_attn.models.gpt import GPT


class Sampling(NamedTuple):
    """How a token is drawn: from softmax(logits / temperature) over the `top_k` likeliest.

    Temperature 0 takes the likeliest; equal seeds draw equal tokens on one kind of device.
    """

    temperature: float = 1.0
    top_k: int | None = None
    seed: int = 0


def continuation(
    network: GPT, prompt: list[int], count: int, vocabulary: int, how: Sampling
) -> Iterator[int]:
    """`count` ids that follow those of `prompt`, none of them `vocabulary` or beyond.

    The prompt goes through the network in one piece, then each token alone. Raises ValueError past
    the positions that the network learned, and where it is in training.
    """
    device = network.trunk.tokens.weight.device
    draws = torch.Generator().manual_seed(how.seed)
    caches = network.trunk.new_caches()
    new = prompt
    for _ in range(count):
        with torch.no_grad():
            hidden = network.trunk(torch.tensor([new], device=device), caches=caches)
            logits = network.logits(hidden[:, -1:])[0, 0, :vocabulary]
        new = [drawn(logits.double().cpu(), how, draws)]
        yield new[0]


def drawn(logits: Tensor, how: Sampling, draws: torch.Generator) -> int:
    """One id by its logit, (V,)."""
    if how.temperature == 0:
        return int(logits.argmax())
    kept, ids = logits.topk(min(how.top_k or len(logits), len(logits)))
    # The largest first: nothing overflows however small the temperature is.
    weights = ((kept - kept[0]) / how.temperature).softmax(-1)
    return int(ids[torch.multinomial(weights, 1, generator=draws)])
