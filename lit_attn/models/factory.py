"""Model factory: builds the network that a model configuration describes."""

import contextlib
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from lit_attn.config.data.base import Data
from lit_attn.config.data.class_folders import ClassFolders
from lit_attn.config.data.composition import HeadCompositionConfig
from lit_attn.config.data.images import Images
from lit_attn.config.data.labelled import Labelled
from lit_attn.config.data.segmentation import Scenery
from lit_attn.config.data.text import Tokens
from lit_attn.config.models.base import Model
from lit_attn.config.models.imagenet import ImageViTConfig, JiTConfig, LocalViTConfig
from lit_attn.config.models.language import GPTConfig, SequenceClassifierConfig
from lit_attn.config.models.segmenter import SegmenterConfig
from lit_attn.config.models.vit import ViTConfig
from lit_attn.models import gpt, imagenet_vit, jit, local_vit, segmenter, sequence, vit
from lit_attn.schema.errors import ConfigError

OF_IMAGES: dict[type[Model], Callable[..., nn.Module]] = {
    ViTConfig: vit.build,
    ImageViTConfig: imagenet_vit.build,
    LocalViTConfig: local_vit.build,
    JiTConfig: jit.build,
    SegmenterConfig: segmenter.build,
}


def build(model: Model, data: Data, device: str | None = None) -> nn.Module:
    """The network of any kind of model for `data`, initialised except on the meta device.

    Raises ConfigError where the model's parts do not go together.
    """
    with _named():
        return _built(model, data, device)


def _built(model: Model, data: Data, device: str | None) -> nn.Module:
    if isinstance(data, Tokens):
        assert isinstance(model, GPTConfig)
        return gpt.build(model, data.tokenizer.vocabulary, data.context, device)
    if isinstance(data, HeadCompositionConfig):
        assert isinstance(model, GPTConfig)
        return gpt.build(model, data.vocabulary, data.context, device)
    if isinstance(data, Labelled):
        assert isinstance(model, SequenceClassifierConfig)
        return sequence.build(
            model, data.vocabulary, data.context, data.num_classes, data.pairs, device
        )
    assert isinstance(data, Images | ClassFolders | Scenery)
    return OF_IMAGES[type(model)](model, data.image_shape, data.num_classes, device)


def sample(data: Data) -> tuple[Tensor, ...]:
    """What a network is called with for one sample of `data`, on the meta device."""
    if isinstance(data, Tokens | HeadCompositionConfig):
        return (torch.empty(1, data.context, dtype=torch.long, device="meta"),)
    if isinstance(data, Labelled):
        shape = (1, 2, data.context) if data.pairs else (1, data.context)
        return (
            torch.empty(shape, dtype=torch.long, device="meta"),
            torch.empty(shape, dtype=torch.bool, device="meta"),
        )
    assert isinstance(data, Images | ClassFolders | Scenery)
    return (torch.empty(1, *data.image_shape, device="meta"),)


@contextlib.contextmanager
def _named() -> Iterator[None]:
    """What a part of a model refuses, as the ConfigError that it is to those who wrote it."""
    try:
        yield
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(f"model: {error}") from error
