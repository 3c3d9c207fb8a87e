"""Models of transformers, with their attention replaced."""

import re
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from pydantic import Field
from torch import Tensor, nn

from lit_attn import signatures
from lit_attn.extras import require
from lit_attn.models.base import require_one_size
from lit_attn.models.layers import Device
from lit_attn.replace.external import ExternalModel, build_replaced
from lit_attn.schema import errors
from lit_attn.schema.base import consistency_check
from lit_attn.schema.mistakes import first_line

WIDTH_KEYS = ("intermediate_size", "n_inner", "ffn_dim")
"""Names of the FFN width in the configurations of transformers."""

POSITIONS = re.compile(
    r"(position_embeddings|position_embedding|embed_positions|wpe)(\.weight)?$"
    r"|(relative_attention_bias|relative_position_bias_table)(\.weight)?$"
    r"|(cls|mask|distillation|register)_tokens?$"
)
"""Names of positions and additional tokens in the models of transformers."""


class TransformersConfig(ExternalModel, kind="transformers"):
    """A model of transformers with random weights (`architecture`) or pretrained ones (`name`).

    Data set the number of classes, the vocabulary, the positions and the image size. The class for
    image, sequence or token classification, or language modelling, follows from them.
    """

    takes = (
        signatures.ImageLabels,
        signatures.ImageTargets,
        signatures.PaddedTokens,
        signatures.CausalTokens,
    )
    architecture: str | None = Field(
        None, description="model type with random weights, such as llama; `arguments` are its keys"
    )
    name: str | None = Field(
        None, description="folder or hub name of pretrained weights, such as openai-community/gpt2"
    )

    def check(self, signature: Any) -> None:
        if getattr(signature, "pairs", False):
            raise ValueError(f"'{self.kind}' does not take pairs of sequences")
        if hasattr(signature, "shape"):
            require_one_size(self.kind, signature)

    def exempt_parameters(self) -> tuple[str, ...]:
        return ("positions",)

    @consistency_check
    def _has_one_source(self) -> None:
        """Refuse a model with both or none of architecture and name."""
        if (self.architecture is None) == (self.name is None):
            raise ValueError("needs either `architecture` or `name`")

    def build(self, signature: Any, device: Device = None) -> nn.Module:
        self.check(signature)
        return build_transformers(self, signature, device)


def build_transformers(model: TransformersConfig, signature: Any, device: Device) -> nn.Module:
    """Return a network that maps what data with `signature` contain to logits."""
    transformers = require("transformers", "model.kind", "transformers")
    head = find_head(signature)
    factory = getattr(transformers, f"AutoModelFor{head.task}")
    values = list_config_values(signature)
    if model.name is not None:
        pretrained = read_pretrained_config(transformers, model.name)
        positions = getattr(pretrained, "max_position_embeddings", None)
        context = values.pop("max_position_embeddings", 0)
        if positions is not None and context > positions:
            raise ValueError(f"name: '{model.name}' has {positions} positions, fewer than context")
        # The vocabulary of the data may be a part of that of the weights.
        values.pop("vocab_size", None)
        config_class = type(pretrained)
        values = pretrained.to_diff_dict() | values
    else:
        architecture = str(model.architecture)
        config_classes = transformers.CONFIG_MAPPING
        errors.require("architecture: transformers has no", architecture, config_classes.keys())
        config_class = config_classes[architecture]
        # The defaults are ids of the tokenizer of published weights.
        values |= {"bos_token_id": None, "eos_token_id": None}
    if config_class not in getattr(transformers, head.models):
        raise ValueError(f"transformers has no {factory.__name__} for '{config_class.model_type}'")
    config = make_config(model, config_class, values)

    def create() -> nn.Module:
        network: nn.Module
        if model.name is None or torch.empty(0).device.type == "meta":
            network = factory.from_config(config, trust_remote_code=False)
        else:
            network = factory.from_pretrained(
                model.name, config=config, ignore_mismatched_sizes=True, trust_remote_code=False
            )
        return network

    return Logits(build_replaced(create, model, device), head.call)


def list_config_values(signature: Any) -> dict[str, Any]:
    """Return the values that data with `signature` set in a configuration of transformers."""
    if hasattr(signature, "shape"):
        channels, *size = signature.shape
        return {"image_size": size, "num_channels": channels, "num_labels": signature.outputs}
    is_decoder = isinstance(signature, signatures.CausalTokens)
    return {
        "vocab_size": signature.vocabulary,
        "max_position_embeddings": signature.context,
        # BERT and its relatives see the tokens to predict unless they are decoders.
        "is_decoder": is_decoder,
        # The embedding of padding is not trained, and without padding id 0 is a token.
        "pad_token_id": None if is_decoder else 0,
        "num_labels": getattr(signature, "classes", 2),
    }


def read_pretrained_config(transformers: Any, name: str) -> Any:
    """Return the configuration of pretrained weights; raise ValueError if it cannot be read."""
    try:
        # Code in the folder or repository of the weights is never executed.
        return transformers.AutoConfig.from_pretrained(name, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise ValueError(f"name: '{name}': {first_line(error)}") from error


def make_config(model: TransformersConfig, config_class: Any, values: dict[str, Any]) -> Any:
    """Return the configuration of `config_class` with those of `values` that are its keys.

    The arguments of `model` and its FFN width replace them. Raises ValueError for an unknown key.
    """
    keys = {*config_class.__dataclass_fields__, *config_class.attribute_map, "num_labels"}
    for key in model.arguments:
        errors.require("arguments: unknown key", key, keys)
    known_values = {key: value for key, value in values.items() if key in keys}
    known_values |= model.arguments
    if model.ffn.width is not None:
        width_keys = [key for key in WIDTH_KEYS if key in keys]
        if not width_keys:
            raise ValueError(f"ffn.width: {config_class.__name__} has no key for it")
        known_values[width_keys[0]] = model.ffn.width
    return config_class(**known_values)


class Logits(nn.Module):
    """Network that returns the logits of a model of transformers."""

    def __init__(self, model: nn.Module, call: Callable[..., Any]) -> None:
        super().__init__()
        self.model = model
        self.call = call

    def no_weight_decay(self) -> set[str]:
        """Return the parameters without weight decay with `decay: weights`.

        They are the positions and the additional tokens, which have the same names in all models of
        transformers.
        """
        return {name for name, _ in self.named_parameters() if POSITIONS.search(name)}

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.call(self.model, *inputs).logits


def call_images(model: Any, images: Tensor) -> Any:
    """Return the output of `model` for images (B, C, H, W)."""
    return model(pixel_values=images)


def call_labelled(model: Any, tokens: Tensor, present: Tensor) -> Any:
    """Return the output of `model` for tokens (B, n); `present` is False where there is padding."""
    if tokens.is_meta:
        # FLOPs are counted on the meta device, where neither a mask nor padding can be read.
        model.config.pad_token_id = None
        return model(input_ids=tokens)
    return model(input_ids=tokens, attention_mask=present)


def call_causal(model: Any, tokens: Tensor) -> Any:
    """Return the output of `model` for the tokens (B, n) of a language model."""
    # Without a cache, transformers reads positions, which the meta device does not have.
    return model(input_ids=tokens, use_cache=tokens.is_meta)


class Head(NamedTuple):
    """End of the name of a class of transformers, its table of models, and their call."""

    task: str
    models: str
    call: Callable[..., Any]


HEADS: dict[type[signatures.Signature], Head] = {
    signatures.ImageSignature: Head(
        "ImageClassification", "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING", call_images
    ),
    signatures.LabelledTokens: Head(
        "SequenceClassification", "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING", call_labelled
    ),
    signatures.TaggedTokens: Head(
        "TokenClassification", "MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING", call_labelled
    ),
    signatures.CausalTokens: Head("CausalLM", "MODEL_FOR_CAUSAL_LM_MAPPING", call_causal),
}
"""Head by the type of the signature."""


def find_head(signature: signatures.Signature) -> Head:
    """Return the head for the nearest base class of `signature`."""
    for signature_class in type(signature).__mro__:
        if signature_class in HEADS:
            return HEADS[signature_class]
    raise ValueError(f"transformers has no class for {type(signature).__name__}")
