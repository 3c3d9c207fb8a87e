"""Plug-in for the network and the schedule of nanochat.

The experiments of this folder name this file under `parts`, and docs/modern.md describes it.

Source: nanochat/gpt.py and scripts/base_train.py of github.com/karpathy/nanochat at 92d63d4.

Shapes: B batch, n tokens, d width.
"""

import math
from collections.abc import Callable, Sequence
from typing import ClassVar

import torch
from pydantic import Field, NonNegativeInt, PositiveInt
from torch import Tensor, nn
from torch.nn import functional as F

from lit_attn.attention.cache import Cache
from lit_attn.attention.layer import Attention
from lit_attn.models.language import GPT, GPTConfig
from lit_attn.models.layers import Device
from lit_attn.models.seeded_draws import outside_composers
from lit_attn.models.token_transformer import Init, TokenTransformer
from lit_attn.models.trunk import Block, Trunk
from lit_attn.models.value_embedding import ValueEmbedding
from lit_attn.optim.schedules import Rate, Schedule
from lit_attn.schema.base import Share, consistency_check

SMEAR_CHANNELS = 24
"""Components of an embedding that the gate of the previous embedding reads."""

LAST_EMBEDDING = "last embedding"
"""Name in a cache of the normalised embedding of the last token, (B, 1, d)."""


class NanochatTrunk(Trunk):
    """Trunk with normalised embeddings, and with further sums of the residual stream.

    The input of the first block is x_0[t] = e[t] + s sigmoid(w . e'[t]) e[t - 1], where e are the
    normalised embeddings, e' their first 24 components, and s and w are learned. The input of block
    i is r_i x + k_i x_0, where x is the output of the block before it. The final norm reads x - b
    x_m, where x_m is the output of block number depth // 2, counted from 0. r, k and b are learned.
    """

    def __init__(
        self,
        model: TokenTransformer,
        vocabulary: int,
        context: int,
        is_causal: bool,
        device: Device = None,
    ) -> None:
        super().__init__(model, vocabulary, context, is_causal, device)
        self.smear_gate = nn.Linear(SMEAR_CHANNELS, 1, bias=False, device=device)
        self.smear = nn.Parameter(torch.zeros(1, device=device))
        self.stream_factors = nn.Parameter(torch.ones(model.depth, device=device))
        self.input_factors = nn.Parameter(torch.zeros(model.depth, device=device))
        self.middle_factor = nn.Parameter(torch.full((1,), 0.2, device=device))

    def embed(self, tokens: Tensor, positions: Tensor, caches: Sequence[Cache] = ()) -> Tensor:
        embedded = super().embed(tokens, positions)
        x = F.rms_norm(embedded, embedded.shape[-1:], eps=self.model.norm_eps)
        totals = caches[0].totals if caches else {}
        is_start = LAST_EMBEDDING not in totals
        if not is_start:
            x = torch.cat([totals[LAST_EMBEDDING], x], dim=1)
        totals[LAST_EMBEDDING] = x[:, -1:].clone()
        later = x[:, 1:]
        gate = self.smear * torch.sigmoid(self.smear_gate(later[..., :SMEAR_CHANNELS]))
        smeared = later + gate * x[:, :-1]
        return torch.cat([x[:, :1], smeared], dim=1) if is_start else smeared

    def pass_blocks(self, x: Tensor, call_block: Callable[[int, Tensor], Tensor]) -> Tensor:
        first = x
        middle = x
        for number in range(len(self.blocks)):
            x = self.stream_factors[number] * x + self.input_factors[number] * first
            x = call_block(number, x)
            if number == len(self.blocks) // 2:
                middle = x
        return x - self.middle_factor * middle


class NanochatGPT(GPT):
    """GPT with a `NanochatTrunk` and the initial values of nanochat."""

    trunk_class: ClassVar[type[Trunk]] = NanochatTrunk

    def initialise(self, model: GPTConfig) -> None:
        """Fill the parameters in place.

        Matrices that read the residual stream are uniform with the standard deviation 1 / sqrt(d),
        those that write to it are zero.
        """
        draw_nanochat(self, model.depth)


@torch.no_grad()
def draw_nanochat(network: NanochatGPT, depth: int) -> None:
    """Fill the parameters of `network`, in place, as nanochat does."""
    trunk = network.trunk
    assert isinstance(trunk, NanochatTrunk)
    nn.init.normal_(trunk.tokens.weight, std=0.8)
    if isinstance(network.head, nn.Linear):
        nn.init.normal_(network.head.weight, std=0.001)
    nn.init.uniform_(trunk.smear_gate.weight, 0.0, 0.02)
    nn.init.zeros_(trunk.smear)
    nn.init.constant_(trunk.middle_factor, 0.2)
    for number in range(depth):
        share = number / max(depth - 1, 1)
        trunk.stream_factors[number] = 1.15 - 0.10 * share
        trunk.input_factors[number] = 0.20 - 0.15 * share
    for module in outside_composers(network).values():
        if isinstance(module, Attention):
            draw_attention(module)
        elif isinstance(module, Block) and module.ffn is not None:
            draw_inputs(module.ffn.up, 0.4)
            if module.ffn.gate is not None:
                draw_inputs(module.ffn.gate, 0.4)
            nn.init.zeros_(module.ffn.down.weight)
        elif isinstance(module, ValueEmbedding):
            bound = (3 / module.embedding.embedding_dim) ** 0.5
            nn.init.uniform_(module.embedding.weight, -bound, bound)
            nn.init.uniform_(module.gate.weight, 0.0, 0.02)


def draw_attention(layer: Attention) -> None:
    """Draw the matrices of a layer that read the residual stream, and zero those that write it."""
    draw_inputs(layer.qkv)
    for part in (layer.z, layer.similarity.more):
        if isinstance(part, nn.Linear):
            draw_inputs(part)
    outputs = [part for part in layer.residual.modules() if isinstance(part, nn.Linear)]
    for linear in [layer.proj, *outputs]:
        nn.init.zeros_(linear.weight)


def draw_inputs(linear: nn.Linear, factor: float = 1.0) -> None:
    """Draw a matrix from a uniform distribution with deviation factor / sqrt(inputs)."""
    bound = factor * (3 / linear.in_features) ** 0.5
    nn.init.uniform_(linear.weight, -bound, bound)


class NanochatConfig(GPTConfig, kind="nanochat"):
    """Causal language model with the residual stream and the initial values of nanochat."""

    runs_foreign_code = False  # Tests try it out, so a dry run need not.
    builder = (NanochatGPT, "vocabulary", "context")

    def find_mup_problem(self) -> str:
        return "the initial values of nanochat depend on the width already; remove mup"

    @consistency_check
    def _has_its_own_values(self) -> None:
        """Refuse initial values of another rule, biases, and streams that are too narrow."""
        if self.init != Init():
            raise ValueError("init: this model has the initial values of nanochat; remove init")
        if self.bias != "none":
            raise ValueError("bias: this model has no biases; remove bias")
        if self.documents != "joined":
            raise ValueError(
                "documents: this model adds to each token the one before it, also that of another "
                "document; write joined"
            )
        if self.dim < SMEAR_CHANNELS:
            raise ValueError(f"dim: {self.dim} is too narrow; choose at least {SMEAR_CHANNELS}")


class NanochatSchedule(Schedule, kind="nanochat"):
    """Linear warm-up, constant, and linear decay over the last share of all steps.

    Step s of S has the rate lr (s + 1) / w in a warm-up of w steps, and lr (p + (1 - p) end) in the
    decay, where p falls from 1 to 0. Muon's momentum rises from 0.85 to 0.97 in 400 steps, and
    falls to 0.9 in the decay. Muon's weight decay falls to 0 as a cosine over all steps.
    """

    runs_foreign_code = False  # Tests try it out, so a dry run need not import PyTorch.
    warmup_steps: NonNegativeInt = Field(40, description="steps w of the warm-up")
    decay_share: Share = Field(0.65, description="share of all steps in which the rate decays")
    end: Share = Field(0.05, description="rate after the last step, as a share of the peak")
    momentum_steps: PositiveInt = Field(400, description="steps in which the momentum rises")

    def rate_at(self, step: int, peak: float, steps_per_epoch: int, epochs: int) -> float:
        total = steps_per_epoch * epochs
        decay_steps = round(self.decay_share * total)
        if step < self.warmup_steps:
            return peak * (step + 1) / self.warmup_steps
        if step <= total - decay_steps:
            return peak
        remaining = max(0, total - step) / decay_steps
        return peak * (remaining + (1 - remaining) * self.end)

    def rising_steps(self, steps_per_epoch: int) -> int:
        return self.warmup_steps

    def momentum(self, steps_per_epoch: int, epochs: int) -> Rate | None:
        total = steps_per_epoch * epochs
        decay_steps = round(self.decay_share * total)

        def momentum_at(step: int) -> float:
            if step < self.momentum_steps:
                share = step / self.momentum_steps
                return (1 - share) * 0.85 + share * 0.97
            if step < total - decay_steps or not decay_steps:
                return 0.97
            share = (step - (total - decay_steps)) / decay_steps
            return (1 - share) * 0.97 + share * 0.90

        return momentum_at

    def weight_decay(self, steps_per_epoch: int, epochs: int) -> Rate | None:
        total = steps_per_epoch * epochs
        return lambda step: (1 + math.cos(math.pi * min(step, total) / total)) / 2
