"""Probes of memory: facts in the weights, a sequence in one vector, and tokens to be kept in order.

Source: `memorisation`, `compression` and `selective-copying` are three of the six tasks of Poli et
al. 2024, "Mechanistic Design and Scaling of Hybrid Architectures" (arXiv:2403.17844), in the
arrangement of github.com/athms/mad-lab. Tests compare sequences made here with recorded sequences
of that code, made from the same draws.

Shapes: B sequences, n tokens, d width, V vocabulary. Ids are int64.
"""

from typing import Any

import numpy as np
import torch
from probes import FIXED, IGNORED, Ids, Probe
from pydantic import Field, PositiveInt
from torch import Tensor, nn

from lit_attn.data.module import numpy_generator
from lit_attn.models.language import GPT, GPTConfig
from lit_attn.models.seeded_draws import draw_parameters
from lit_attn.schema.base import consistency_check


class MemorisationConfig(Probe, kind="memorisation"):
    """Keys, each followed by a blank; the target at the blank is the key's value.

    The value of a key is the same in all sequences, so it has to be kept in the weights.
    """

    ids: PositiveInt = Field(256, description="token ids: keys, values and the blank")
    length: PositiveInt = Field(32, description="tokens of a training sequence, an even number")

    @property
    def vocabulary(self) -> int:
        return self.ids

    @property
    def num_keys(self) -> int:
        """Number of keys."""
        return (self.ids - 1) // 2

    @property
    def floor(self) -> float:
        """Accuracy of always giving one value."""
        return 1 / self.num_keys

    def draw(
        self, generator: np.random.Generator, count: int, length: int, is_training: bool
    ) -> tuple[Ids, Ids]:
        fixed = numpy_generator(FIXED, "table", self.ids)
        values = self.num_keys + fixed.permutation(self.ids - 1 - self.num_keys)
        keys = generator.integers(self.num_keys, size=(count, length // 2))
        return arrange_memorisation(keys, values[: self.num_keys], self.ids - 1)

    @consistency_check
    def _has_pairs(self) -> None:
        """Refuse an odd number of tokens, and ids without two keys."""
        for name, tokens in (("length", self.length), ("longer", self.longer)):
            if tokens is not None and tokens % 2:
                raise ValueError(f"{name}: keys and blanks are an even number of tokens")
        if self.num_keys < 2:
            raise ValueError(f"ids: {self.ids} ids have {self.num_keys} keys; 5 ids at least")


def arrange_memorisation(keys: Ids, table: Ids, blank: int) -> tuple[Ids, Ids]:
    """Return tokens and targets (B, n) for keys (B, n / 2) and the value of each key (K,)."""
    count, pairs = keys.shape
    tokens = np.full((count, 2 * pairs), blank)
    tokens[:, 0::2] = keys
    targets = np.full_like(tokens, IGNORED)
    targets[:, 1::2] = table[keys]
    return tokens, targets


class SelectiveCopyingConfig(Probe, kind="selective-copying"):
    """Tokens among blanks, then a mark and as many blanks; the targets are the tokens in order."""

    ids: PositiveInt = Field(16, description="token ids, the blank and the mark included")
    copied: PositiveInt = Field(16, description="tokens to copy")
    length: PositiveInt = Field(256, description="tokens of a training sequence")

    @property
    def vocabulary(self) -> int:
        return self.ids

    @property
    def floor(self) -> float:
        """Accuracy of guessing one of the tokens."""
        return 1 / (self.ids - 2)

    def draw(
        self, generator: np.random.Generator, count: int, length: int, is_training: bool
    ) -> tuple[Ids, Ids]:
        copied = generator.integers(self.ids - 2, size=(count, self.copied))
        num_blanks = length - 2 * self.copied - 1
        # A blank stands directly before one of the copied tokens, or before other blanks there.
        slots = generator.integers(self.copied, size=(count, num_blanks))
        return arrange_selective_copying(copied, slots, blank=self.ids - 2, mark=self.ids - 1)

    @consistency_check
    def _tokens_fit(self) -> None:
        """Refuse more tokens to copy than the sequence has room for."""
        least = 2 * self.copied + 2
        if self.length < least:
            raise ValueError(f"length: copying {self.copied} tokens needs {least} tokens at least")
        if self.ids < 4:
            raise ValueError("ids: the blank, the mark and two tokens are 4 ids at least")


def arrange_selective_copying(copied: Ids, slots: Ids, blank: int, mark: int) -> tuple[Ids, Ids]:
    """Return tokens and targets (B, n) for copied tokens (B, c) and the slots (B, b) of the blanks.

    A blank with slot i stands before copied token i.
    """
    count, size = copied.shape
    num_blanks = slots.shape[1]
    length = 2 * size + 1 + num_blanks
    tokens = np.full((count, length), blank)
    blanks_before = (slots[:, :, None] <= np.arange(size)).sum(axis=1)
    np.put_along_axis(tokens, np.arange(size) + blanks_before, copied, axis=1)
    tokens[:, size + num_blanks] = mark
    targets = np.full_like(tokens, IGNORED)
    targets[:, -size:] = copied
    return tokens, targets


class CompressionConfig(Probe, kind="compression"):
    """Random tokens and a mark; the model `compressor` rebuilds all of them from one vector."""

    ids: PositiveInt = Field(16, description="token ids, the mark included")
    length: PositiveInt = Field(32, description="tokens of a training sequence, with the mark")

    @property
    def vocabulary(self) -> int:
        return self.ids

    @property
    def floor(self) -> float:
        """Accuracy of guessing the tokens; the mark is always known."""
        guessed = (self.length - 1) / (self.ids - 1)
        return (1 + guessed) / self.length

    def draw(
        self, generator: np.random.Generator, count: int, length: int, is_training: bool
    ) -> tuple[Ids, Ids]:
        tokens = generator.integers(self.ids - 1, size=(count, length))
        tokens[:, -1] = self.ids - 1
        return tokens, tokens.copy()

    @consistency_check
    def _has_one_length(self) -> None:
        """Refuse longer sequences, whose last places the decoder has never seen."""
        if self.longer is not None:
            raise ValueError("longer: a compressor rebuilds sequences of one length; remove it")


class Compressor(GPT):
    """GPT whose hidden vector of the last token is decoded to the logits of all tokens.

    The decoder adds a sinusoidal vector of the place to the hidden vector and applies two layers.
    """

    def __init__(
        self, model: "CompressorConfig", vocabulary: int, context: int, device: Any = None
    ):
        super().__init__(model, vocabulary, context, device)
        self.decoder = nn.Sequential(
            nn.RMSNorm(model.dim, device=device),
            nn.Linear(model.dim, model.dim, device=device),
            nn.GELU(),
            nn.RMSNorm(model.dim, device=device),
            nn.Linear(model.dim, model.dim, device=device),
            nn.GELU(),
            nn.RMSNorm(model.dim, device=device),
        )
        draw_parameters(self.decoder, self._reset_decoder)

    def hidden(self, tokens: Tensor, caches: Any = None) -> Tensor:
        """Return the decoded vectors (B, n, d) of the tokens (B, n) themselves."""
        last = self.trunk(tokens)[:, -1:]
        places = sinusoids(tokens.shape[1], last.shape[-1], last.device).to(last.dtype)
        return self.decoder(last + places)

    def _reset_decoder(self) -> None:
        """Draw the decoder's weights as PyTorch does."""
        for layer in self.decoder:
            if isinstance(layer, nn.Linear):
                layer.reset_parameters()


class CompressorConfig(GPTConfig, kind="compressor"):
    """GPT that compresses a sequence into its last vector, for the probe `compression`."""

    runs_foreign_code = False

    def build(self, signature: Any, device: Any = None) -> Compressor:
        return Compressor(self, signature.vocabulary, signature.context, device)


def sinusoids(length: int, width: int, device: torch.device) -> Tensor:
    """Return the sinusoidal vectors (n, d) of the places 0 to n - 1 (Vaswani et al. 2017)."""
    places = torch.arange(length, device=device)[:, None]
    rates = 10_000 ** -(torch.arange(0, width, 2, device=device) / width)
    angles = places * rates
    return torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(1)[:, :width]
