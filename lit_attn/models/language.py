"""Causal language models, from GPT-2 to Transformer++, and the classifier of token sequences.

Sources of the shapes that the experiments use:
- GPT-2: github.com/karpathy/nanoGPT, and the branch `casted` of
  github.com/KellerJordan/modded-nanogpt, whose rounded weights are a plug-in of its experiment
- Transformer++ for DCMHA (arXiv:2405.08553): github.com/Caiyun-AI/DCFormer
- WikiText-103 and the Long Range Arena (Tay et al. 2021, arXiv:2011.04006) for MGK
  (arXiv:2110.08678): github.com/minhtannguyen/transformer-mgk, whose arena code comes from
  github.com/mlpen/Nystromformer

Shapes: B batch, n tokens, d width, V vocabulary. tokens: (B, n) int64 -> logits: (B, n, V).
"""

import math
from collections.abc import Iterator
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from pydantic import Field, PositiveFloat, PositiveInt
from torch import Tensor, nn
from torch.nn import functional as F

from lit_attn import signatures
from lit_attn.attention.cache import Cache
from lit_attn.data.text.ids import IGNORED
from lit_attn.models.layers import AdaptiveSoftmax, Device
from lit_attn.models.mup import WidthScaled
from lit_attn.models.seeded_draws import draw_parameters
from lit_attn.models.token_loss import cap_logits, token_losses
from lit_attn.models.token_transformer import TokenTransformer
from lit_attn.models.trunk import Trunk, initialise
from lit_attn.models.value_embedding import ValueEmbeddings
from lit_attn.schema.base import Share, consistency_check


class GPT(nn.Module):
    """Causal trunk with a tied, untied or adaptive head."""

    trunk_class: ClassVar[type[Trunk]] = Trunk

    def __init__(
        self, model: "GPTConfig", vocabulary: int, context: int, device: Device = None
    ) -> None:
        """Build a network for at most `context` tokens; initialise it except on "meta"."""
        super().__init__()
        rows = math.ceil(vocabulary / model.vocabulary_multiple) * model.vocabulary_multiple
        self.trunk = self.trunk_class(model, rows, context, is_causal=True, device=device)
        self.dropout = nn.Dropout(model.head_dropout)
        self.logit_cap = model.logit_cap
        # muP divides the logits of tied weights by the growth of the width.
        self.output_scale = 1.0
        self.z_loss = model.z_loss
        self.head: nn.Module | None = None
        if model.head == "untied":
            self.head = nn.Linear(model.dim, rows, bias=False, device=device)
        elif model.head == "adaptive":
            self.head = AdaptiveSoftmax(rows, model.dim, model.cutoffs, device)
        draw_parameters(self, lambda: self.initialise(model))

    def initialise(self, model: "GPTConfig") -> None:
        """Fill the parameters, in place."""
        initialise(self, model, tied=model.head != "untied")

    def forward(self, tokens: Tensor, caches: list[Cache] | None = None) -> Tensor:
        """Return logits; an adaptive head returns log-probabilities.

        With `caches` (from `trunk.new_caches`), `tokens` follow the tokens already cached.
        """
        return self.logits(self.hidden(tokens, caches))

    def hidden(self, tokens: Tensor, caches: list[Cache] | None = None) -> Tensor:
        """Return the vectors (B, n, d) from which the head computes the logits."""
        return self.trunk(tokens, caches=caches)

    def target_logits(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Return the logits (N, V) of the N tokens whose target is not IGNORED."""
        chosen = self.hidden(tokens)[targets != IGNORED]
        return self.logits(chosen[:, None]).squeeze(1)

    def fill_caches(self, tokens: Tensor) -> list[Cache] | None:
        """Return caches with `tokens` (B, n), or None if the trunk cannot have caches."""
        if not self.trunk.can_be_cached:
            return None
        caches = self.trunk.new_caches()
        self.trunk(tokens, caches=caches)
        return caches

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits of the trunk's output, (B, n, d) -> (B, n, V)."""
        hidden = self._prepare_head(hidden)
        if isinstance(self.head, AdaptiveSoftmax):
            flat = self.head.log_probabilities(hidden.flatten(0, 1), self.trunk.tokens.weight)
            return flat.unflatten(0, hidden.shape[:2])
        if self.head is not None:
            logits = self.head(hidden)
        else:
            logits = F.linear(hidden, self.trunk.tokens.weight)
        return cap_logits(logits, self.logit_cap)

    def _prepare_head(self, hidden: Tensor) -> Tensor:
        """Return the trunk's output after its dropout and the scale of muP."""
        hidden = self.dropout(hidden)
        return hidden if self.output_scale == 1 else hidden * self.output_scale

    def nll(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Return -log p(target) in nats, (B, n), at least float32; 0 where a target is IGNORED.

        In training, `z_loss` adds its term.
        """
        flat_targets = targets.flatten()
        hidden = self._prepare_head(self.hidden(tokens)).flatten(0, 1)
        if not isinstance(self.head, AdaptiveSoftmax):
            weight = self.trunk.tokens.weight if self.head is None else self.head.weight
            assert isinstance(weight, Tensor)
            losses = token_losses(
                hidden,
                weight,
                flat_targets,
                logit_cap=self.logit_cap,
                z_loss=self.z_loss if self.training else 0.0,
            )
            return losses.unflatten(0, targets.shape)
        is_predicted = flat_targets != IGNORED
        predicted_nll = self.head.nll(
            hidden[is_predicted], flat_targets[is_predicted], self.trunk.tokens.weight
        )
        zeros = predicted_nll.new_zeros(targets.numel())
        nll = zeros.masked_scatter(is_predicted, predicted_nll)
        return nll.unflatten(0, targets.shape)


class GPTConfig(WidthScaled, TokenTransformer, kind="gpt"):
    """Causal language model.

    `head: tied` and `adaptive` use the weights of the embedding. `adaptive` is the softmax by
    frequency classes of Grave et al. 2017 with divisor 1.
    """

    takes = (signatures.CausalTokens,)
    builder: ClassVar[tuple[Any, ...]] = (GPT, "vocabulary", "context")
    head: Literal["tied", "untied", "adaptive"] = Field(
        "tied",
        description="output layer: the embedding's weights (tied), its own weights "
        "(untied), or an adaptive softmax with tied weights",
    )
    cutoffs: tuple[PositiveInt, ...] = Field(
        (), description="first ids of the rarer classes (adaptive)"
    )
    head_dropout: Share = Field(0.0, description="dropout rate of hidden vectors before the head")
    vocabulary_multiple: PositiveInt = Field(1, description="round the vocabulary up to a multiple")
    value_embeddings: ValueEmbeddings | None = Field(
        None, description="embeddings of the tokens that layers add to their values; null: none"
    )
    logit_cap: PositiveFloat | None = Field(
        None,
        description="c: the head's logits l become c tanh(l / c), as in Gemma 2; null: unchanged",
    )
    z_loss: float = Field(
        0.0,
        ge=0,
        description="z: in training, z times the squared log-sum-exp of its logits is added to the "
        "loss of each token, as in PaLM (z = 1e-4)",
    )
    documents: Literal["joined", "separate"] = Field(
        "joined",
        description="separate: in packed text, no token attends to another document, and positions "
        "start again with each; a document starts with the token that separates it from the last",
    )

    def build(self, signature: Any, device: Device = None) -> Any:
        network: Any = super().build(signature, device)
        if self.documents == "separate":
            network.trunk.document_end = signature.document_end
        return network

    def scale_output(self, network: Any) -> None:
        if self.head == "tied":
            network.output_scale = self.base_model().dim / self.dim

    def find_mup_problem(self) -> str:
        if isinstance(self.init.matrices, str) or isinstance(self.init.embedding, str):
            return (
                "needs numbers in init.matrices and init.embedding, because PyTorch's values "
                "depend on the width already"
            )
        if self.head == "adaptive":
            return "does not scale `head: adaptive`; choose tied or untied"
        return ""

    @consistency_check
    def _documents_can_be_separate(self) -> None:
        """Refuse separate documents in layers that a mask of pairs of tokens cannot separate."""
        if self.documents == "joined":
            return
        for spec in self.attention.mechanisms:
            problem = spec.find_document_problem()
            if problem:
                raise ValueError(
                    f"attention.{problem}, which `documents: separate` cannot separate; "
                    "choose another part, or write `documents: joined`"
                )

    def value_embeddings_of(self, layer: int) -> ValueEmbeddings | None:
        chosen = self.value_embeddings
        return chosen if chosen is not None and chosen.has_layer(layer, self.depth) else None

    @consistency_check
    def _layers_take_value_embeddings(self) -> None:
        """Refuse value embeddings of layers without values, and gates wider than their input."""
        if self.value_embeddings is None:
            return
        channels = self.value_embeddings.channels
        if channels > self.dim:
            raise ValueError(
                f"value_embeddings.channels: {channels} exceeds dim {self.dim};"
                f" choose at most {self.dim}"
            )
        for layer in range(self.depth):
            if self.value_embeddings_of(layer) is None:
                continue
            spec = self.attention_of(layer)
            if spec.shares_keys or spec.latent is not None:
                key = "latent" if spec.latent is not None else "kv_from: previous"
                raise ValueError(
                    f"value_embeddings: layer {layer + 1} has `{key}` and no values of its own;"
                    " remove value_embeddings, or choose another `every`"
                )
            if self.attention_of(layer).mixer is not None:
                raise ValueError(
                    f"value_embeddings: layer {layer + 1} is of `kind: module` and has no values;"
                    " remove value_embeddings, or choose another `every`"
                )

    @consistency_check
    def _cutoffs_are_for_adaptive(self) -> None:
        """Refuse cutoffs without an adaptive head, and cutoffs in another order."""
        is_adaptive = self.head == "adaptive"
        if is_adaptive != bool(self.cutoffs):
            raise ValueError("cutoffs: `head: adaptive` needs cutoffs, and no other head has them")
        if list(self.cutoffs) != sorted(set(self.cutoffs)):
            raise ValueError("cutoffs: must increase")
        if is_adaptive and self.vocabulary_multiple > 1:
            raise ValueError("vocabulary_multiple: has no effect with `head: adaptive`")
        if is_adaptive and self.logit_cap is not None:
            raise ValueError("logit_cap: `head: adaptive` has no logits of all ids; remove one")
        if is_adaptive and self.z_loss:
            raise ValueError("z_loss: `head: adaptive` has no logits of all ids; remove one")

    def check(self, signature: Any) -> None:
        super().check(signature)
        if self.documents == "separate" and signature.document_end is None:
            raise ValueError(
                "documents: separate needs a token that separates documents, and the data has "
                "none; choose the tokenizer bytes, gpt2 or gpt-neox, or write joined"
            )
        size = signature.vocabulary
        if self.cutoffs and self.cutoffs[-1] >= size:
            raise ValueError(
                f"cutoffs: {self.cutoffs[-1]} is beyond the vocabulary of {size};"
                f" {size - 1} at most"
            )


class SequenceClassifier(nn.Module):
    """Bidirectional trunk, mean pooling unless tokens are classified, then Linear, ReLU, Linear.

    tokens: (B, n), or (B, 2, n) for pairs of documents; `present` has the same shape and is False
    where a token is padding. For pairs of documents the classifier sees [x0, x1, x0 x1, x0 - x1] of
    their pooled vectors.
    """

    def __init__(
        self,
        model: "SequenceClassifierConfig",
        vocabulary: int,
        context: int,
        classes: int,
        pairs: bool = False,
        are_tagged: bool = False,
        device: Device = None,
    ) -> None:
        """Build a network for at most `context` tokens; initialise it except on "meta"."""
        super().__init__()
        self.pool = model.pool
        self.pairs = pairs
        self.are_tagged = are_tagged
        self.trunk = Trunk(model, vocabulary, context, is_causal=False, device=device)
        features = 4 * model.dim if pairs else model.dim
        self.classifier = nn.Sequential(
            nn.Linear(features, model.classifier_width, device=device),
            nn.ReLU(),
            nn.Linear(model.classifier_width, classes, device=device),
        )
        draw_parameters(self, lambda: initialise(self, model, tied=False))

    def forward(self, tokens: Tensor, present: Tensor) -> Tensor:
        if self.pairs:
            first = self.document(tokens[:, 0], present[:, 0])
            second = self.document(tokens[:, 1], present[:, 1])
            features = torch.cat([first, second, first * second, first - second], dim=-1)
        elif self.are_tagged:
            features = self.trunk(tokens, present)
        else:
            features = self.document(tokens, present)
        return self.classifier(features)

    def document(self, tokens: Tensor, present: Tensor) -> Tensor:
        """Return the pooled vector of each document, (B, d)."""
        hidden = self.trunk(tokens, present)
        weights = present.to(hidden.dtype)[..., None]
        total = (hidden * weights).sum(1)
        if self.pool == "zero-padded":
            return total / tokens.shape[1]
        return total / weights.sum(1)


class SequenceClassifierConfig(TokenTransformer, kind="sequence-classifier"):
    """Bidirectional encoder, mean pooling, and a classifier of Linear, ReLU and Linear.

    If the words of a sequence have classes, the classifier is applied to every token.
    The model of MGK's experiments on the Long Range Arena, whose code has `pool: zero-padded`.
    """

    takes = (signatures.LabelledTokens, signatures.TaggedTokens)
    builder = (
        SequenceClassifier,
        "vocabulary",
        "context",
        "classes",
        "pairs",
        "are_tagged",
    )

    pool: Literal["tokens", "zero-padded"] = Field(
        "tokens",
        description="tokens: the mean over the tokens; zero-padded: their sum divided by the "
        "context, so that padding counts as zero vectors",
    )
    classifier_width: PositiveInt = Field(128, description="hidden units of the classifier")

    def check(self, signature: Any) -> None:
        super().check(signature)
        if signature.are_tagged and self.pool != "tokens":
            raise ValueError("pool: nothing is pooled if every token is classified; remove it")


class Sampling(NamedTuple):
    """Rule for drawing a token: softmax(logits / temperature) over the `top_k` largest logits.

    Temperature 0 takes the largest logit. Equal seeds draw equal tokens on one kind of device.
    """

    temperature: float = 1.0
    top_k: int | None = None
    seed: int = 0


def continuation(
    network: GPT, prompt: list[int], count: int, vocabulary: int, sampling: Sampling
) -> Iterator[int]:
    """Yield `count` ids below `vocabulary` that continue `prompt`.

    The prompt goes through the network in one piece, then each token alone. With reversed
    positions, which change with every token, all tokens go through it again. Raises ValueError
    past the positions that the network learned, and if the network is in training mode.
    """
    device = network.trunk.tokens.weight.device
    generator = torch.Generator().manual_seed(sampling.seed)
    caches = network.trunk.new_caches() if network.trunk.can_be_cached else None
    tokens = list(prompt)
    new = tokens
    for _ in range(count):
        with torch.no_grad():
            hidden = network.trunk(torch.tensor([new], device=device), caches=caches)
            logits = network.logits(hidden[:, -1:])[0, 0, :vocabulary]
        tokens.append(sample_token(logits.double().cpu(), sampling, generator))
        new = tokens if caches is None else tokens[-1:]
        yield tokens[-1]


def sample_token(logits: Tensor, sampling: Sampling, generator: torch.Generator) -> int:
    """Draw one id by its logit, (V,)."""
    if sampling.temperature == 0:
        return int(logits.argmax())
    count = min(sampling.top_k or len(logits), len(logits))
    kept, ids = logits.topk(count)
    # Relative to the largest logit, so that nothing overflows at a small temperature.
    probabilities = ((kept - kept[0]) / sampling.temperature).softmax(-1)
    place = torch.multinomial(probabilities, 1, generator=generator)
    return int(ids[place])
