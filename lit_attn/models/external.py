"""Builders of models from elsewhere: timm, transformers, and modules of a user.

The attention layers are replaced (lit_attn.replace). Initial values are those of the model's
own code, drawn so that variants of one seed share them (lit_attn.models.seeded_draws).
"""

import dataclasses
import inspect
import pickle
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import timm
import torch
from timm.models.maxxvit import MaxxVit
from torch import Tensor, nn

from lit_attn import signatures
from lit_attn.attention.layer import attn_layer
from lit_attn.attention.network import number_layers
from lit_attn.extras import require
from lit_attn.models.external_config import (
    ExternalModel,
    ModuleConfig,
    TimmConfig,
    TransformersConfig,
)
from lit_attn.models.factory import count
from lit_attn.models.ffn_resize import resize_ffns
from lit_attn.models.layers import Device
from lit_attn.models.seeded_draws import by_shape
from lit_attn.private_names.of_transformers import has_model
from lit_attn.replace import (
    AdapterChoice,
    check_adapted_classes,
    choose,
    find_layers,
    replace_layers,
)
from lit_attn.schema import errors
from lit_attn.schema.errors import ConfigError, suggest
from lit_attn.schema.plugins import explain_failure

RATIOS = {MaxxVit: "transformer_expand_ratio"}
"""Argument for the ratio of FFN width and width by class of timm's models, if not `mlp_ratio`."""

WIDTH_KEYS = ("intermediate_size", "n_inner", "ffn_dim")
"""Names of the FFN width in the configurations of transformers."""

POSITIONS = re.compile(
    r"(position_embeddings|position_embedding|embed_positions|wpe)(\.weight)?$"
    r"|(relative_attention_bias|relative_position_bias_table)(\.weight)?$"
    r"|(cls|mask|distillation|register)_tokens?$"
)
"""Names of positions and additional tokens in the models of transformers."""


def build_timm(model: TimmConfig, signature: Any, device: Device) -> nn.Module:
    """Return timm's model for images of the signature's size; raise ValueError if it has none."""
    channels, *size = signature.shape
    options = {"num_classes": signature.outputs, "in_chans": channels} | model.arguments
    width = model.ffn.width
    ratio = {} if width is None else find_ratio(model, size, options, width)
    has_ratio = bool(ratio)

    def create() -> nn.Module:
        is_loaded = model.pretrained and torch.empty(0).device.type != "meta"
        network: nn.Module = create_timm(
            model.name, size, options | ratio, is_loaded, model.checkpoint
        )
        if width is not None and not has_ratio:
            resize_ffns(network, width)
        return network

    return build_replaced(create, model, device)


def find_ratio(
    model: TimmConfig, size: Any, options: dict[str, Any], width: int
) -> dict[str, float]:
    """Return timm's argument for FFNs of `width` hidden units in the first stage.

    The result is empty if the constructor has no such argument; `resize_ffns` then changes the
    FFNs. Raises ValueError if pretrained weights have another width.
    """
    with torch.device("meta"):
        original = create_timm(model.name, size, options)
        # Counted before `resize_ffns` changes it.
        original_count = count(original)
        name = RATIOS.get(type(original), "mlp_ratio")
        # A little more than the width, because timm rounds the product with the ratio down.
        ratio = {name: (width + 1e-6) / original.feature_info[0]["num_chs"]}
        try:
            matched = create_timm(model.name, size, options | ratio)
        except ValueError:
            ratio = {}
            matched = resize_ffns(original, width)
        if model.pretrained and count(matched) != original_count:
            raise ValueError("ffn.width: pretrained weights have another width; set `match: none`")
    return ratio


def create_timm(
    name: str,
    size: Any,
    options: dict[str, Any],
    pretrained: bool = False,
    checkpoint: str | Path | None = None,
) -> Any:
    """Return timm's model `name` for images of `size` (H, W), if it depends on the size.

    Pretrained weights come from the file `checkpoint` or from timm's hub. Raises ValueError for an
    unknown name, an unknown option, or weights that cannot be loaded.
    """
    if not timm.is_model(name):
        raise ValueError(f"name: '{name}' is not a timm model{suggest(name, timm.list_models())}")
    overlay = None
    if checkpoint is not None:
        # timm's own reader is only for the .npz files of the original release.
        is_original_release = Path(checkpoint).suffix == ".npz"
        overlay = {
            "file": str(checkpoint),
            "custom_load": is_original_release,
            "hf_hub_id": None,
        }
    create = partial(timm.create_model, name, pretrained, pretrained_cfg_overlay=overlay, **options)
    try:
        try:
            return create(img_size=tuple(size))
        except TypeError as error:
            if "img_size" not in str(error):
                raise
            return create()
    except (AssertionError, TypeError) as error:
        raise ValueError(f"arguments: '{name}': {error}") from error
    except (OSError, RuntimeError, pickle.UnpicklingError) as error:
        if not pretrained:
            raise
        source = "timm's hub" if checkpoint is None else str(checkpoint)
        reason = " ".join(str(error).split())[:200]
        raise ValueError(
            f"pretrained: cannot load '{name}' from {source}: {reason}; "
            "`checkpoint` can name a local file"
        ) from error


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
    if not has_model(factory, config_class):
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
        raise ValueError(f"name: '{name}': {str(error).splitlines()[0]}") from error


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
    """End of the name of a class of transformers, and the function that calls its models."""

    task: str
    call: Callable[..., Any]


HEADS: dict[type[signatures.Signature], Head] = {
    signatures.ImageSignature: Head("ImageClassification", call_images),
    signatures.LabelledTokens: Head("SequenceClassification", call_labelled),
    signatures.TaggedTokens: Head("TokenClassification", call_labelled),
    signatures.CausalTokens: Head("CausalLM", call_causal),
}
"""Head by the type of the signature."""


def find_head(signature: signatures.Signature) -> Head:
    """Return the head for the nearest base class of `signature`."""
    for signature_class in type(signature).__mro__:
        if signature_class in HEADS:
            return HEADS[signature_class]
    raise ValueError(f"transformers has no class for {type(signature).__name__}")


def build_module(model: ModuleConfig, signature: Any, device: Device) -> nn.Module:
    """Return the network that the class or function `model.target` makes."""
    target = model.load()
    parameters = inspect.signature(target).parameters
    offered = {
        field.name: getattr(signature, field.name) for field in dataclasses.fields(signature)
    }
    offered["signature"] = signature
    if "attention" in parameters:
        for key in ("only", "skip"):
            if getattr(model, key) is not None:
                raise ValueError(
                    f"{key}: {model.target} builds its layers from its parameter `attention`, so "
                    f"none is replaced; remove {key}"
                )
        if model.attention.layers is not None:
            raise ValueError(
                f"attention.layers: {model.target} builds all layers from its parameter "
                "`attention`; without this parameter its layers are replaced, and can differ"
            )
        offered["attention"] = attn_layer(model.attention)
    if model.ffn.width is not None:
        if "ffn_width" not in parameters:
            raise ValueError(
                f"ffn.width: {model.target} has no parameter `ffn_width`; "
                "add one, or set `match: none` in the study"
            )
        offered["ffn_width"] = model.ffn.width
    arguments = {key: value for key, value in offered.items() if key in parameters}
    arguments |= model.arguments
    builds_attention = "attention" in parameters

    def create() -> Any:
        try:
            network = target(**arguments)
        except Exception as error:
            # Code of a user can raise any exception.
            raise ValueError(explain_failure(error, f"arguments: {model.target}")) from error
        if not isinstance(network, nn.Module):
            raise ValueError(f"import: {model.target} makes {type(network).__name__}, no nn.Module")
        return network

    return build_replaced(create, model, device, replaces=not builds_attention)


def build_replaced(
    create: Callable[[], nn.Module],
    model: ExternalModel,
    device: Device,
    replaces: bool = True,
) -> nn.Module:
    """Return what `create` returns, on `device`, with replaced attention layers if `replaces`."""
    with torch.device(device or torch.get_default_device()), by_shape():
        network = create()
        if not replaces:
            number_layers(network)
            return network
        adapters = dict[str, AdapterChoice](model.adapters)
        try:
            check_adapted_classes(network, adapters)
            layers = choose(find_layers(network, adapters), model.only, model.skip)
            # The dry run and the record of a cell say how many layers are replaced.
            return replace_layers(network, model.attention, "attention", layers).model
        except ConfigError as error:
            raise ValueError(str(error)) from error
