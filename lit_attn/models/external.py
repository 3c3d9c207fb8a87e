"""Builders of models from elsewhere: timm, transformers, and modules of a user.

The attention layers are replaced (lit_attn.models.replace). Initial values are those of the model's
own code, drawn so that variants of one seed share them (lit_attn.models.seeded_draws).
"""

import dataclasses
import inspect
import pickle
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import timm
import torch
from timm.models.maxxvit import MaxxVit
from torch import Tensor, nn

from lit_attn.attention.layer import attn_layer, number_layers
from lit_attn.attention.spec import AttentionSpec
from lit_attn.config import signatures
from lit_attn.config.models.external import ModuleConfig, TimmConfig, TransformersConfig
from lit_attn.extras import require
from lit_attn.models.factory import count
from lit_attn.models.ffn_resize import resize_ffns
from lit_attn.models.layers import Device
from lit_attn.models.replace import replace_attention
from lit_attn.models.seeded_draws import by_shape
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
    width, ratio = model.ffn.width, {}
    if width is not None:
        with torch.device("meta"):
            original = create_timm(model.name, size, options)
            # A little more than the width, because timm rounds the product with the ratio down.
            value = (width + 1e-6) / original.feature_info[0]["num_chs"]
            ratio, parameters = {RATIOS.get(type(original), "mlp_ratio"): value}, count(original)
            try:
                matched = create_timm(model.name, size, options | ratio)
            except ValueError:
                ratio, matched = {}, resize_ffns(original, width)
        if model.pretrained and count(matched) != parameters:
            raise ValueError("ffn.width: pretrained weights have another width; set `match: none`")

    def create() -> nn.Module:
        is_loaded = model.pretrained and torch.empty(0).device.type != "meta"
        network = create_timm(model.name, size, options | ratio, is_loaded, model.checkpoint)
        return network if width is None or ratio else resize_ffns(network, width)

    return _build(create, model.attention, device)


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
        original = Path(checkpoint).suffix == ".npz"
        overlay = {"file": str(checkpoint), "custom_load": original, "hf_hub_id": None}
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
        text = f"cannot load '{name}' from {source}: {reason}; `checkpoint` can name a local file"
        raise ValueError(f"pretrained: {text}") from error


def build_transformers(model: TransformersConfig, signature: Any, device: Device) -> nn.Module:
    """Return a network that maps what data with `signature` contain to logits."""
    transformers = require("transformers", "model.kind", "transformers")
    task, call = next(HEADS[t] for t in type(signature).__mro__ if t in HEADS)
    factory = getattr(transformers, f"AutoModelFor{task}")
    if hasattr(signature, "shape"):
        channels, *size = signature.shape
        values = {"image_size": size, "num_channels": channels, "num_labels": signature.outputs}
    else:
        values = {"vocab_size": signature.vocabulary, "max_position_embeddings": signature.context}
        # BERT and its relatives see the tokens to predict unless they are decoders.
        values["is_decoder"] = isinstance(signature, signatures.CausalTokens)
        # The embedding of padding is not trained, and without padding id 0 is a token.
        values["pad_token_id"] = None if values["is_decoder"] else 0
        values["num_labels"] = getattr(signature, "classes", 2)
    if model.name is not None:
        try:
            # Code in the folder or repository of the weights is never executed.
            pretrained = transformers.AutoConfig.from_pretrained(
                model.name, trust_remote_code=False
            )
        except (OSError, ValueError) as error:
            raise ValueError(f"name: '{model.name}': {str(error).splitlines()[0]}") from error
        positions = getattr(pretrained, "max_position_embeddings", None)
        if positions is not None and values.pop("max_position_embeddings", 0) > positions:
            raise ValueError(f"name: '{model.name}' has {positions} positions, fewer than context")
        values.pop("vocab_size", None)
        config_class, values = type(pretrained), pretrained.to_diff_dict() | values
    else:
        mapping, name = transformers.CONFIG_MAPPING, str(model.architecture)
        errors.require("architecture: transformers has no", name, mapping.keys())
        config_class = mapping[name]
        # The defaults are ids of the tokenizer of published weights.
        values |= {"bos_token_id": None, "eos_token_id": None}
    if config_class not in factory._model_mapping:
        raise ValueError(f"transformers has no {factory.__name__} for '{config_class.model_type}'")
    keys = {*config_class.__dataclass_fields__, *config_class.attribute_map, "num_labels"}
    for key in model.arguments:
        errors.require("arguments: unknown key", key, keys)
    values = {key: value for key, value in values.items() if key in keys} | model.arguments
    if model.ffn.width is not None:
        width_key = next((key for key in WIDTH_KEYS if key in keys), None)
        if width_key is None:
            raise ValueError(f"ffn.width: {config_class.__name__} has no key for it")
        values[width_key] = model.ffn.width
    config = config_class(**values)

    def create() -> nn.Module:
        if model.name is None or torch.empty(0).device.type == "meta":
            return factory.from_config(config, trust_remote_code=False)
        return factory.from_pretrained(
            model.name, config=config, ignore_mismatched_sizes=True, trust_remote_code=False
        )

    return Logits(_build(create, model.attention, device), call)


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


def call_labelled(model: Any, tokens: Tensor, present: Tensor) -> Any:
    if tokens.is_meta:
        # FLOPs are counted on the meta device, where neither a mask nor padding can be read.
        model.config.pad_token_id = None
        return model(input_ids=tokens)
    return model(input_ids=tokens, attention_mask=present)


HEADS: dict[type[signatures.Signature], tuple[str, Callable[..., Any]]] = {
    signatures.ImageSignature: (
        "ImageClassification",
        lambda model, images: model(pixel_values=images),
    ),
    signatures.LabelledTokens: ("SequenceClassification", call_labelled),
    signatures.TaggedTokens: ("TokenClassification", call_labelled),
    # Without a cache, transformers reads positions, which the meta device does not have.
    signatures.CausalTokens: ("CausalLM", lambda model, x: model(input_ids=x, use_cache=x.is_meta)),
}
"""Class of transformers and its call, by the type of the signature."""


def build_module(model: ModuleConfig, signature: Any, device: Device) -> nn.Module:
    """Return what the class or function `model.target` returns."""
    target = model.load()
    parameters = inspect.signature(target).parameters
    offered = {f.name: getattr(signature, f.name) for f in dataclasses.fields(signature)}
    offered["signature"] = signature
    if "attention" in parameters:
        if model.attention.layers is not None:
            raise ValueError(
                f"attention.layers: {model.target} builds all layers from its parameter "
                "`attention`; without this parameter its layers are replaced, and can differ"
            )
        offered["attention"] = attn_layer(model.attention)
    if model.ffn.width is not None:
        if "ffn_width" not in parameters:
            text = "has no parameter `ffn_width`; add one, or set `match: none` in the study"
            raise ValueError(f"ffn.width: {model.target} {text}")
        offered["ffn_width"] = model.ffn.width
    arguments = {key: value for key, value in offered.items() if key in parameters}
    spec = None if "attention" in parameters else model.attention

    def create() -> Any:
        try:
            network = target(**arguments | model.arguments)
        except Exception as error:
            # Code of a user can raise any exception.
            raise ValueError(explain_failure(error, f"arguments: {model.target}")) from error
        if not isinstance(network, nn.Module):
            raise ValueError(f"import: {model.target} makes {type(network).__name__}, no nn.Module")
        return network

    return _build(create, spec, device)


def _build(
    create: Callable[[], nn.Module], spec: AttentionSpec | None, device: Device
) -> nn.Module:
    """Return what `create` returns, on `device`, with replaced attention layers if `spec`."""
    with torch.device(device or torch.get_default_device()), by_shape():
        network = create()
        try:
            if spec is not None:
                return replace_attention(network, spec, "attention")
        except ConfigError as error:
            raise ValueError(str(error)) from error
        number_layers(network)
        return network
