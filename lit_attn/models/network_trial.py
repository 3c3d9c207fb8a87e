"""Trial of a user's model for a task in which no token may see a later one.

The trial is a part of smoke, because it needs the network with its values
(lit_attn.training.first_step). It names the first of the user's modules that computes what it
should not.

Shapes: B batch, n tokens.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from lit_attn.data.base import Data
from lit_attn.models import factory
from lit_attn.models.base import Model
from lit_attn.models.trial_checks import Region, Trial, add_noise, differ, name_class
from lit_attn.schema.errors import ConfigError
from lit_attn.schema.plugins import find_class_line
from lit_attn.schema.sources import PACKAGE
from lit_attn.signatures import TokenSignature

MAX_TOKENS = 96
"""Tokens of the trial at most, unless the network takes sequences of one length."""

FEW_TOKENS = 17
"""Tokens of the trial with a large vocabulary, whose logits take the time."""

LOGITS = 250_000
"""Logits of a sample above which the trial has FEW_TOKENS."""


def try_network(model: Model, data: Data, device: torch.device) -> None:
    """Try out the network of a user's model for ordered tokens. Raises ConfigError if it is wrong.

    A network that cannot be called is not refused here: its first step says why.
    """
    signature = data.signature()
    is_own = model.has_own_network or not type(model).__module__.startswith(f"{PACKAGE.name}.")
    if not (is_own and signature.is_ordered and isinstance(signature, TokenSignature)):
        return
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices), torch.no_grad():
        torch.manual_seed(0)
        network = factory.build(model, data).to(device)
        add_noise(network)
        trial = NetworkTrial(network.eval(), signature, device)
        lengths = trial.choose_lengths()
        for is_training in (False, True):
            network.train(is_training)
            for tokens in lengths:
                trial.start(tokens)
                trial.check_dependence()


class NetworkTrial(Trial):
    """Trial of a network, whose last input are the ordered tokens.

    `records` are the user's modules and their outputs (B, n, ...) in the last call, in the order in
    which they were computed, and `expected` are those for the unchanged inputs.
    """

    is_causal = True

    def __init__(self, network: nn.Module, signature: TokenSignature, device: torch.device) -> None:
        self.module = network
        self.device = device
        self.vocabulary = signature.vocabulary
        sample = signature.sample()
        self.longest = sample[-1].shape[1]
        self.other_inputs = [self._draw_ids(2, part.shape[1]) for part in sample[:-1]]
        self.records: list[tuple[nn.Module, Tensor]] = []
        self.expected: list[tuple[nn.Module, Tensor]] = []

    def choose_lengths(self) -> list[int]:
        """Return two lengths that the network takes; the longest sequence if it takes no other."""
        few = max(FEW_TOKENS, LOGITS // self.vocabulary)
        shorter = min(self.longest, MAX_TOKENS, few)
        lengths = [shorter, shorter // 2 + 1]
        for tokens in (*lengths, self.longest):
            try:
                self.call(self.draw(tokens))
            except Exception:
                # Code of a user can raise any exception.
                lengths = [self.longest] if tokens != self.longest else []
        return lengths

    def _draw_ids(self, samples: int, tokens: int) -> Tensor:
        """Return random ids; id 0 may be padding."""
        size = (samples, tokens)
        return torch.randint(min(1, self.vocabulary - 1), self.vocabulary, size, device=self.device)

    def draw(self, tokens: int) -> Tensor:
        return self._draw_ids(2, tokens)

    def redraw(self, x: Tensor) -> Tensor:
        return torch.randint_like(x, min(1, self.vocabulary - 1), self.vocabulary)

    def start(self, tokens: int) -> None:
        super().start(tokens)
        self.expected = self.records

    def call(self, x: Tensor, present: Tensor | None = None) -> Tensor:
        if self.module.training:
            torch.manual_seed(self.seed)
        inputs = [part[: len(x)] for part in self.other_inputs]
        with self._record() as records:
            output: Tensor = self.module(*inputs, x)
        self.records = records
        return output

    @contextlib.contextmanager
    def _record(self) -> Iterator[list[tuple[nn.Module, Tensor]]]:
        """Record the outputs of the user's modules in this context."""
        records: list[tuple[nn.Module, Tensor]] = []

        def record(module: nn.Module, inputs: Any, output: Any) -> None:
            if isinstance(output, Tensor) and output.ndim > 1:
                records.append((module, output))

        handles = [
            module.register_forward_hook(record)
            for module in self.module.modules()
            if find_class_line(type(module))
        ]
        try:
            yield records
        finally:
            for handle in handles:
                handle.remove()

    def refuse(self, reason: str, region: Region = ()) -> ConfigError:
        member = type(self.module)
        for (module, output), (_, expected) in zip(self.records, self.expected, strict=False):
            if _has_tokens(output, self.x) and differ(output[region], expected[region]):
                member = type(module)
                break
        mode = " in training" if self.module.training else ""
        return ConfigError(f"model: {name_class(member)}:{mode} {reason}")


def _has_tokens(output: Tensor, x: Tensor) -> bool:
    """Return True if the axes of `output` begin with samples and the tokens of `x`."""
    return output.shape[1] == x.shape[1]
