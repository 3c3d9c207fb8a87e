"""Tests over all architectures of timm: each is replaced completely, or refused with a reason.

The models stand on the meta device, where an output has a shape and no values. That the values stay
the same is tested in test_replace.py for a small model of each class of attention modules.
"""

import re
from collections import Counter
from importlib.util import find_spec
from typing import Any

import pytest
import timm
import torch
from helpers.paths import ROOT
from torch import nn
from torch.overrides import TorchFunctionMode

from lit_attn import replace_attention
from lit_attn.attention.layer import Attention
from lit_attn.extras import require_mmseg
from lit_attn.replace import ADAPTERS, UNFIT
from lit_attn.replace.search import POOLING_CLASSES, load_adapter
from lit_attn.schema.base import load
from lit_attn.schema.errors import ConfigError

PAGE = (ROOT / "docs" / "own-models.md").read_text(encoding="utf-8")

# Models of modules whose first model has no attention, or another one than most of its models.
EXAMPLES = {
    "byoanet": "botnet26t_256",
    "byobnet": "bat_resnext26ts",
    "fastvit": "fastvit_sa12",
    "maxxvit": "coatnet_rmlp_nano_rw_224",
    "metaformer": "caformer_s18",
    "mobilenetv3": "mobilenetv4_hybrid_medium",
    "vision_transformer": "vit_tiny_patch16_224",
}

# Images of models that compute token by token, whose own images take ten seconds.
SMALL_IMAGES = {"sequencer": 64}

# Classes that compute a softmax and are not replaced: they pool tokens.
POOLING = {"AttentionPoolLatent", "MaskUnitAttention", "MultiScaleAttention"}

# Classes with a softmax in models that are refused because they have no attention.
NO_ATTENTION = {"EfficientViM", "HSMSSD"}


class Softmaxes(TorchFunctionMode):
    """Counts the classes of modules that compute a softmax, except within our attention layers."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.stack: list[nn.Module] = []
        self.classes: Counter[str] = Counter()
        for module in model.modules():
            module.register_forward_pre_hook(lambda module, _: self.stack.append(module))
            module.register_forward_hook(self.leave, always_call=True)

    def leave(self, *_: object) -> None:
        self.stack.pop()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_softmax = getattr(func, "__name__", "") in ("softmax", "scaled_dot_product_attention")
        if is_softmax and not any(isinstance(module, Attention) for module in self.stack):
            # torch.nn.Softmax is a child of the module that computes the attention.
            owner = [m for m in self.stack if type(m).__module__.startswith("timm.")][-1]
            self.classes[type(owner).__name__] += 1
        return func(*args, **kwargs or {})


def count_softmaxes(model: nn.Module, size: tuple[int, int, int]) -> Counter[str]:
    with torch.no_grad(), Softmaxes(model) as softmaxes:
        model(torch.empty(1, *size, device="meta"))
    return softmaxes.classes


def read_page() -> dict[str, str]:
    """Return what the table of docs/own-models.md says of each module of timm."""
    rows = re.findall(r"^\| ([^|]*) \| ([a-z0-9_, ]+) \|$", PAGE, re.M)
    return {name: result for result, names in rows for name in names.split(", ")}


def first_model(module: str) -> str:
    names = sorted(timm.list_models(module=module), key=lambda name: (len(name), name))
    return EXAMPLES.get(module, names[0])


def describe(module: str) -> str | None:
    """Replace the attention of a model of `module` and return the page's word for the result."""
    name = first_model(module)
    changes: dict[str, Any] = {}
    if module in SMALL_IMAGES:
        changes["img_size"] = SMALL_IMAGES[module]
    with torch.device("meta"):
        model = timm.create_model(name, **changes).eval()
    size = model.pretrained_cfg["input_size"]
    if module in SMALL_IMAGES:
        size = (3, SMALL_IMAGES[module], SMALL_IMAGES[module])
    try:
        replace_attention(model, "standard")
    except ConfigError as error:
        message = str(error)
        assert "\n" not in message
        if message.endswith("has no self-attention layers"):
            assert not set(count_softmaxes(model, size)) - NO_ATTENTION
            return None
        return message.rpartition(": ")[2]
    assert not set(count_softmaxes(model, size)) - POOLING
    return "replaced"


# The layers of Hiera that pool queries stay, and a warning says so.
@pytest.mark.filterwarnings("ignore:.*attention layers:UserWarning")
@pytest.mark.slow
@pytest.mark.parametrize("module", timm.list_modules())
def test_each_module_of_timm_is_replaced_or_refused_as_the_page_says(module: str) -> None:
    if timm.list_models(module=module):
        assert describe(module) == read_page().get(module)


def test_every_named_class_exists() -> None:
    has_mmseg = find_spec("mmseg") is not None
    if has_mmseg:
        require_mmseg("tests")
    for name, adapter in ADAPTERS.items():
        if has_mmseg or not name.startswith("mmseg."):
            assert isinstance(load(name), type)
        assert callable(load_adapter(adapter))
    assert all(issubclass(load(name), nn.Module) for name in {*UNFIT, *POOLING_CLASSES})


def test_the_page_names_every_reason() -> None:
    results = set(read_page().values())
    # Only some models of a module have parallel attention and FFN, or differential attention.
    rare = {"its projections also compute the FFN", "it subtracts two softmaxes"}
    assert results == {"replaced", *UNFIT.values()} - rare
    assert all(reason in PAGE for reason in rare)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("vit_pwee_patch16_reg1_gap_256", r"blocks\.0 \(ParallelScalingBlock\): its projections"),
        ("vit_dwee_patch16_reg1_gap_256", r"blocks\.0\.attn \(DiffAttention\): it subtracts two"),
        ("mobilevitv2_050", r"attn \(LinearSelfAttention\): its weights do not compare"),
    ],
)
def test_a_model_without_plain_softmax_attention_is_refused(name: str, message: str) -> None:
    with torch.device("meta"):
        model = timm.create_model(name)
    with pytest.raises(ConfigError, match=message):
        replace_attention(model, "standard")
