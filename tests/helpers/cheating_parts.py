"""Parts of attention layers that read what they must not; a test imports this file as a plug-in."""

import torch
from torch import nn

from lit_attn.attention.first_values import FirstValuesConfig, MixedValues
from lit_attn.attention.gate import Gate, GateConfig
from lit_attn.attention.normaliser import Normaliser, NormaliserConfig
from lit_attn.attention.residual import Full, FullConfig


class Honest(Full):
    """Residual part of a user without a mistake, with two dropouts."""

    def forward(self, x, heads, values, project):
        heads = nn.functional.dropout(heads, 0.5, self.training)
        heads = nn.functional.dropout(heads, 0.5, self.training)
        return super().forward(x, heads, values, project)


class NextToken(Full):
    def forward(self, x, heads, values, project):
        return super().forward(x, heads.roll(-1, 1), values, project)


class HiddenNextToken(Full):
    """Mistake behind a factor that starts as zero."""

    def __init__(self, part, shape):
        super().__init__(part, shape)
        self.strength = nn.Parameter(torch.zeros(()))

    def forward(self, x, heads, values, project):
        heads = heads + self.strength * heads.roll(-1, 1)
        return super().forward(x, heads, values, project)


class TrainedNextToken(Full):
    def forward(self, x, heads, values, project):
        if self.training:
            heads = heads.roll(-1, 1)
        return super().forward(x, heads, values, project)


class LongNextToken(Full):
    """Mistake in sequences of more than eight tokens."""

    def forward(self, x, heads, values, project):
        if x.shape[1] > 8:
            heads = heads.roll(-1, 1)
        return super().forward(x, heads, values, project)


class OddNextToken(Full):
    """Mistake in sequences with an odd number of tokens."""

    def forward(self, x, heads, values, project):
        if x.shape[1] % 2:
            heads = heads.roll(-1, 1)
        return super().forward(x, heads, values, project)


class BatchMean(Full):
    def forward(self, x, heads, values, project):
        return super().forward(x, heads - heads.mean(0), values, project)


class BatchSize(Full):
    def forward(self, x, heads, values, project):
        return super().forward(x, heads * len(x), values, project)


class NotFinite(Full):
    def forward(self, x, heads, values, project):
        return super().forward(x, heads, values, project) / 0


class Failing(Full):
    def forward(self, x, heads, values, project):
        if not x.is_meta:
            raise RuntimeError("no kernel")
        return super().forward(x, heads, values, project)


class LateGate(Gate):
    def forward(self, x, project):
        return lambda signal: project(signal * torch.sigmoid(x.roll(-1, 1)))


class LateQueries(Normaliser):
    def forward(self, logits, visible):
        return logits.roll(-1, 2).softmax(-1)


class LateValues(MixedValues):
    def forward(self, v, first):
        return super().forward(v, first.roll(-1, 1))


def register(kind, module, base):
    """Define the configuration class of a part."""

    def build(self, shape):
        return module(self, shape)

    body = {"build": build, "__module__": __name__, "__annotations__": {}}
    return type(base)(f"{module.__name__}Config", (base,), body, kind=kind)


class GateBase(GateConfig):
    """Gate without choices."""


RESIDUALS = (
    Honest,
    NextToken,
    HiddenNextToken,
    TrainedNextToken,
    LongNextToken,
    OddNextToken,
    BatchMean,
    BatchSize,
    NotFinite,
    Failing,
)
for member in RESIDUALS:
    register(f"cheating-{member.__name__}", member, FullConfig)
register("cheating-LateGate", LateGate, GateBase)
register("cheating-LateQueries", LateQueries, NormaliserConfig)
register("cheating-LateValues", LateValues, FirstValuesConfig)
