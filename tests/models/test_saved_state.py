"""A network's state dict and configuration determine what it computes."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from helpers.saved_state import forget_values
from torch import Tensor, nn

from lit_attn import signatures
from lit_attn.extras import require_mmseg
from lit_attn.models import (
    columns,
    language,
    translation,
    vit,
)
from lit_attn.models.base import Model
from lit_attn.replace import timm_models, transformers_models
from lit_attn.replace.external import ExternalModel
from lit_attn.segmentation import segmenter_config

# Importing these modules registers the kinds of models.
REGISTERED = (
    columns,
    language,
    segmenter_config,
    timm_models,
    transformers_models,
    translation,
    vit,
)

SMALL: dict[str, Any] = {"dim": 16, "depth": 2, "heads": 2, "ffn": {"width": 16}}
IMAGES = signatures.ImageLabels((3, 16, 16), classes=5)
STREAM = signatures.TokenStream(vocabulary=11, context=9)
LABELLED = signatures.LabelledTokens(vocabulary=11, context=9, classes=5)
PAIRS = signatures.LabelledTokens(vocabulary=11, context=9, classes=5, pairs=True)
PARALLEL = signatures.ParallelTokens(vocabulary=11, context=9)
POSITIONS = ["learned", "rotary", "sinusoidal", "fairseq"]

CASES: list[tuple[dict[str, Any], signatures.Signature]] = [
    ({"kind": "vit", "patch": 4}, IMAGES),
    ({"kind": "vit", "patch": 4, "patchify": "shifted", "local_self_attention": True}, IMAGES),
    ({"kind": "image-vit", "patch": 4}, IMAGES),
    ({"kind": "image-vit", "patch": 4, "positions": "sincos", "pool": "average"}, IMAGES),
    ({"kind": "gpt", "attention": "dcmha"}, STREAM),
    ({"kind": "gpt", "head": "adaptive", "cutoffs": [3, 6]}, STREAM),
    ({"kind": "gpt", "head": "untied", "qk_norm": True, "attention": "mgk-soft-e"}, STREAM),
    ({"kind": "sequence-classifier"}, LABELLED),
    ({"kind": "sequence-classifier"}, PAIRS),
    ({"kind": "encoder-decoder"}, PARALLEL),
    ({"kind": "feature-transformer"}, signatures.ColumnLabels(3, (12, 14), classes=5)),
    ({"kind": "segmenter", "patch": 4}, signatures.ImageMasks((3, 16, 16), 5, 255)),
]
CASES += [({"kind": "gpt", "positions": positions}, STREAM) for positions in POSITIONS]
CASES += [({"kind": "encoder-decoder", "positions": name}, PARALLEL) for name in POSITIONS]

# Networks of other packages, whose buffers are their own.
EXTERNAL: list[tuple[dict[str, Any], signatures.Signature]] = [
    ({"kind": "timm", "name": name, "arguments": arguments}, IMAGES)
    for name, arguments in (
        ("swinv2_cr_tiny_ns_224", {"patch_size": 4, "window_size": 2}),
        ("eva02_tiny_patch14_224", {"patch_size": 4}),
        ("beit_base_patch16_224", {"patch_size": 4, "embed_dim": 48, "num_heads": 4}),
    )
]


def build(choices: dict[str, Any], signature: signatures.Signature, device: str) -> nn.Module:
    if choices["kind"] == "segmenter":
        pytest.importorskip("mmseg")
        require_mmseg("tests")
    model_class = Model.family[choices["kind"]]
    is_external = issubclass(model_class, ExternalModel)
    model = model_class.model_validate(choices if is_external else SMALL | choices)
    torch.manual_seed(0)
    with torch.device(device):
        network: nn.Module = model.build(signature, device)
    return network.eval()


def inputs(signature: signatures.Signature) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(1)
    for part in signature.sample():
        if part.dtype.is_floating_point:
            yield torch.randn(part.shape, generator=generator)
        elif part.dtype == torch.bool:
            yield torch.ones(part.shape, dtype=torch.bool)
        else:
            yield torch.randint(1, 11, part.shape, generator=generator)


def name_case(value: object) -> str:
    if not isinstance(value, dict):
        return type(value).__name__
    return "-".join(str(choice) for choice in value.values() if isinstance(choice, str))


@pytest.mark.parametrize(("choices", "signature"), CASES, ids=name_case)
def test_a_network_from_the_meta_device_computes_what_the_saved_network_computes(
    choices: dict[str, Any], signature: signatures.Signature
) -> None:
    network, loaded = (build(choices, signature, device) for device in ("cpu", "meta"))
    forget_values(loaded)
    loaded.load_state_dict(network.state_dict(), strict=True)
    sample = tuple(inputs(signature))
    assert torch.equal(loaded(*sample), network(*sample))
    # A buffer without elements has a type and a device, and no value that could be lost.
    unsaved = [name for name, buffer in loaded.named_buffers() if buffer.numel()]
    assert set(unsaved) <= loaded.state_dict().keys()


def test_every_kind_of_model_is_covered() -> None:
    kinds = {choices["kind"] for choices, _ in CASES}
    external = {kind for kind, model in Model.family.items() if issubclass(model, ExternalModel)}
    packaged = {
        kind for kind, model in Model.family.items() if model.__module__.startswith("lit_attn.")
    }
    assert packaged <= kinds | external


@pytest.mark.slow
@pytest.mark.parametrize(("choices", "signature"), EXTERNAL, ids=name_case)
def test_only_modules_of_other_packages_have_buffers_outside_the_state_dict(
    choices: dict[str, Any], signature: signatures.Signature
) -> None:
    """The other packages fill these buffers again; this package's modules have none."""
    for name, module in build(choices, signature, "meta").named_modules():
        if type(module).__module__.startswith("lit_attn."):
            assert not module._non_persistent_buffers_set, name
