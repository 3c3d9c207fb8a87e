"""Parameters and FLOPs of a model, and the FFN width that matches one model's count to another's.

Everything is measured on the meta device: nothing is allocated, nothing is computed.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from lit_attn.config.composition import HeadComposition
from lit_attn.config.data import Data, Images
from lit_attn.config.errors import ConfigError
from lit_attn.config.image_folder import ClassFolders
from lit_attn.config.imagenet import ImageViT, JiT, LocalViT
from lit_attn.config.language import GPT, SequenceClassifier
from lit_attn.config.model import Model, ViT
from lit_attn.config.segmentation import Scenery, Segmenter
from lit_attn.config.sequence import Labelled
from lit_attn.config.text import Tokens
from lit_attn.models import gpt, imagenet_vit, jit, local_vit, segmenter, sequence, vit

OF_IMAGES: dict[type[Model], Callable[..., nn.Module]] = {
    ViT: vit.build,
    ImageViT: imagenet_vit.build,
    LocalViT: local_vit.build,
    JiT: jit.build,
    Segmenter: segmenter.build,
}


class Budget(NamedTuple):
    """What one model costs; `flops` is one forward pass of one sample, multiply-add = 2.

    They are those of matrix products, attention's among them, and of convolutions, as torch counts
    them: softmax, norms, epilogues and other element-wise work are left out.
    """

    parameters: int
    flops: int
    ffn_width: int | None


def build(model: Model, data: Data, device: str | None = None) -> nn.Module:
    """The network of any kind of model for `data`, initialised except on the meta device.

    Raises ConfigError where the model's parts do not go together.
    """
    with _named():
        return _built(model, data, device)


def _built(model: Model, data: Data, device: str | None) -> nn.Module:
    if isinstance(data, Tokens):
        assert isinstance(model, GPT)
        return gpt.build(model, data.tokenizer.vocabulary, data.context, device)
    if isinstance(data, HeadComposition):
        assert isinstance(model, GPT)
        return gpt.build(model, data.vocabulary, data.context, device)
    if isinstance(data, Labelled):
        assert isinstance(model, SequenceClassifier)
        return sequence.build(
            model, data.vocabulary, data.context, data.num_classes, data.pairs, device
        )
    assert isinstance(data, Images | ClassFolders | Scenery)
    return OF_IMAGES[type(model)](model, data.image_shape, data.num_classes, device)


def sample(data: Data) -> tuple[Tensor, ...]:
    """What a network is called with for one sample of `data`, on the meta device."""
    if isinstance(data, Tokens | HeadComposition):
        return (torch.empty(1, data.context, dtype=torch.long, device="meta"),)
    if isinstance(data, Labelled):
        shape = (1, 2, data.context) if data.pairs else (1, data.context)
        return (
            torch.empty(shape, dtype=torch.long, device="meta"),
            torch.empty(shape, dtype=torch.bool, device="meta"),
        )
    assert isinstance(data, Images | ClassFolders | Scenery)
    return (torch.empty(1, *data.image_shape, device="meta"),)


def describe(model: Model, data: Data) -> Budget:
    """Count the parameters and FLOPs of `model` on one sample of `data`.

    Raises ConfigError where the model's parts do not go together.
    """
    network = build(model, data, device="meta").eval()
    counter = FlopCounterMode(display=False)
    with torch.no_grad(), counter, _named():
        network(*sample(data))
    width = None if model.ffn is None else model.ffn.width
    return Budget(count(network), counter.get_total_flops(), width)


def resolve(model: Model, match_to: Model | None, data: Data) -> Model:
    """`model` with the FFN width that brings its parameter count nearest `match_to`'s.

    The count is affine in the width, so two builds say where the target lies. Raises ConfigError
    where there is no FFN to widen, or where even a width of 1 is too much.
    """
    if match_to is None:
        return model
    if model.ffn is None:
        raise ConfigError("match: parameters: there is no FFN whose width could be solved for")

    def parameters(candidate: Model) -> int:
        return count(build(candidate, data, device="meta"))

    target = parameters(match_to)
    at_one, at_two = (parameters(with_width(model, width)) for width in (1, 2))
    width = 1 + round((target - at_one) / (at_two - at_one))
    if width < 1:
        raise ConfigError(
            f"match: parameters: {at_one:,} parameters with the narrowest FFN already exceed the "
            f"{target:,} to match"
        )
    return with_width(model, width)


@contextlib.contextmanager
def _named() -> Iterator[None]:
    """What a part of a model refuses, as the ConfigError that it is to those who wrote it."""
    try:
        yield
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(f"model: {error}") from error


def with_width(model: Model, width: int) -> Model:
    """`model` with an FFN of `width` hidden units."""
    assert model.ffn is not None
    return model.model_copy(update={"ffn": model.ffn.model_copy(update={"width": width})})


def count(network: nn.Module) -> int:
    """Trainable scalars."""
    return sum(p.numel() for p in network.parameters() if p.requires_grad)
