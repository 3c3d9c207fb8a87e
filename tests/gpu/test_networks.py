"""Every network and every preset on a fake GPU: no operand stays on the CPU.

The docstring of `fake_gpu` lists what such a test can detect.
"""

import importlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import gpt_cases
from helpers.attention_cases import all_specs
from helpers.fake_gpu import rehearsal
from helpers.paths import EXPERIMENTS, ROOT
from torch import Tensor, nn
from torch.nn import functional as F

from lit_attn.ablate.plan import expand
from lit_attn.attention.layer import attn_layer
from lit_attn.attention.linear import LinearConfig
from lit_attn.attention.network import number_layers
from lit_attn.attention.spec import PRESETS, AttentionSpec
from lit_attn.config.study import read_studies
from lit_attn.data.augment.base import ImageFormat
from lit_attn.data.augment.pipeline import Pipeline
from lit_attn.data.images import Images
from lit_attn.data.module import torch_generator
from lit_attn.models import language, vit
from lit_attn.models.base import FFN
from lit_attn.models.language import Sampling, SequenceClassifierConfig, continuation
from lit_attn.models.layers import HeadNorm
from lit_attn.models.vit import ImageViTConfig, ViTConfig
from lit_attn.optim.base import Optimizer
from lit_attn.schema.plugins import load_parts
from lit_attn.signatures import ImageLabels

PLUGINS = ("imagenet_jit", "imagenet_local_vit")
load_parts([EXPERIMENTS / name / f"{name}.py" for name in PLUGINS])
jit = importlib.import_module("imagenet_jit")
local_vit = importlib.import_module("imagenet_local_vit")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU to run on"),
]

ABLATIONS = ROOT / "ablations.yaml"
GPU = torch.device("cuda")
IMAGE, CLASSES, VOCABULARY = (3, 16, 16), 5, 50
ADAMW, SET_ADAM = (Optimizer.parse({"kind": kind, "lr": 1e-3}) for kind in ("adamw", "set-adam"))

Loss = Callable[[Any], Tensor]


def images(network: nn.Module) -> Tensor:
    x, y = torch.zeros(2, *IMAGE, device=GPU), torch.zeros(2, dtype=torch.long, device=GPU)
    return F.cross_entropy(network(x), y)


def text(network: language.GPT) -> Tensor:
    tokens = torch.zeros(2, network.trunk.context, dtype=torch.long, device=GPU)
    return network.nll(tokens, tokens).mean()


def padded(network: language.SequenceClassifier) -> Tensor:
    tokens = torch.zeros(2, 2, network.trunk.context, dtype=torch.long, device=GPU)
    return network(tokens, tokens > 0).sum()


def step(network: nn.Module, loss: Loss, bf16: bool) -> list[str]:
    """Train one step on the GPU and return the waits; every parameter must have a gradient."""
    with rehearsal() as reads:
        network.to(GPU).train()
        optimizer = (SET_ADAM if bf16 else ADAMW).build(network)
        reads.clear()
        with torch.autocast("cuda", torch.bfloat16, enabled=bf16):
            result = loss(network)
        result.backward()
        optimizer.step()
        on_cpu = [name for name, part in network.state_dict().items() if part.device.type != "cuda"]
        idle = [n for n, p in network.named_parameters() if p.requires_grad and p.grad is None]
    assert (on_cpu, idle) == ([], [])
    return reads


def test_the_fake_gpu_refuses_tensors_on_two_devices() -> None:
    on_cpu, number = torch.ones(3), torch.zeros(1, dtype=torch.long)
    with rehearsal() as reads:
        on_gpu = torch.ones(3, device=GPU)
        refused: list[Callable[[], object]] = [
            lambda: on_gpu + on_cpu,
            lambda: on_gpu + torch.arange(3),
            lambda: torch.cat([on_gpu, on_cpu]),
            lambda: torch.where(on_gpu > 0, on_gpu, on_cpu),
            lambda: on_gpu.masked_fill(on_cpu > 0, 0.0),
            lambda: F.linear(on_gpu, on_cpu.view(1, 3)),
            lambda: nn.Embedding(3, 1).to(GPU)(number),
            lambda: F.scaled_dot_product_attention(*[on_gpu.view(1, 1, 3)] * 3, on_cpu.view(1, 3)),
            lambda: on_cpu[number.to(GPU)],
            lambda: torch.tensor(1.0).add_(on_gpu[0]),
            lambda: torch.rand(3, device=GPU, generator=torch.Generator()),
            lambda: on_gpu.numpy(),
        ]
        for call in refused:
            with pytest.raises((RuntimeError, TypeError)):
                call()
        reads.clear()
        # A GPU takes these.
        computed = [
            on_gpu * torch.tensor(2.0),
            on_gpu[number],
            on_gpu.clone().copy_(on_cpu),
            on_cpu.to(GPU),
        ]
        assert {tensor.device.type for tensor in computed} == {"cuda"}
        assert torch.equal(on_cpu * 2, torch.full((3,), 2.0))
        # Both copies wait.
        assert len(reads) == 2
        assert (on_gpu.tolist(), bool(on_gpu[0] > 1)) == ([0, 0, 0], True)
        assert reads


def test_autocast_casts_as_on_a_gpu() -> None:
    linear, norm = nn.Linear(4, 4), nn.LayerNorm(4)
    with rehearsal():
        linear.to(GPU), norm.to(GPU)
        with torch.autocast("cuda", torch.bfloat16):
            x = linear(torch.zeros(2, 4, device=GPU))
            y = norm(x)
            with torch.autocast("cuda", enabled=False):
                output = linear(y)
        (F.gelu(x) + y + output).sum().backward()
    assert (x.dtype, y.dtype, output.dtype) == (torch.bfloat16, torch.float32, torch.float32)
    assert {parameter.grad.dtype for parameter in linear.parameters()} == {torch.float32}


def build_network(specs: Sequence[AttentionSpec], kind: str) -> tuple[nn.Module, Loss]:
    """Return a network with one block per specification, and its loss function."""
    every: dict[str, Any] = {"dim": 16, "depth": len(specs), "heads": 2, "ffn": None}
    network: Any
    if kind == "images":
        network, loss = vit.build(ViTConfig(patch=4, **every), IMAGE, CLASSES), images
        blocks = network.blocks
    elif kind == "padded":
        model = SequenceClassifierConfig(classifier_width=8, **every)
        network, loss = language.SequenceClassifier(model, VOCABULARY, 12, 3, pairs=True), padded
        blocks = network.trunk.blocks
    else:
        # With windows, several chunks of queries.
        context = 160 if kind == "windows" else 16
        model = gpt_cases.config("transformer++", **every)
        network, loss = language.GPT(model, VOCABULARY, context), text
        blocks = network.trunk.blocks
    for block, spec in zip(blocks, specs, strict=True):
        # A latent has norms of its own.
        has_norms = kind == "causal" and spec.latent is None
        block.attn = attn_layer(spec)(16, 2, qk_norm=has_norms, norm_layer=HeadNorm)
        # Each layer is the first one of its network, because others may have other key heads.
        number_layers(block.attn)
    return network, loss


def has_windows(spec: AttentionSpec) -> bool:
    return not isinstance(spec.similarity, LinearConfig) and spec.filter.kind == "none"


@pytest.mark.parametrize(
    ("kind", "bf16"), [("images", False), ("causal", True), ("windows", False), ("padded", True)]
)
def test_every_preset_trains(kind: str, bf16: bool) -> None:
    """No layer makes a step wait for the GPU."""
    specs = list(PRESETS.values())
    if kind == "windows":
        bounded = [spec for spec in specs if has_windows(spec)]
        specs = [AttentionSpec.model_validate({**dict(spec), "window": 5}) for spec in bounded]
    assert step(*build_network(specs, kind), bf16) == []


def test_every_choice_decodes() -> None:
    network, _ = build_network(all_specs(), "causal")
    assert isinstance(network, language.GPT)
    with rehearsal():
        network.to(GPU).eval()
        drawn = continuation(network, [1, 2, 3, 4, 5], 2, VOCABULARY, Sampling(top_k=5))
        assert len(list(drawn)) == 2


def small(**changes: Any) -> dict[str, Any]:
    every = {"dim": 16, "depth": 2, "heads": 2, "patch": 4, "attention": PRESETS["belief2"]}
    return {**every, "ffn": FFN(width=16), **changes}


def language_model(name: str) -> Callable[[], nn.Module]:
    return lambda: language.GPT(gpt_cases.config(name, dropout=0.5), VOCABULARY, 16)


def shifted() -> nn.Module:
    choices = {"patchify": "shifted", "local_self_attention": True}
    return vit.build(ViTConfig(drop_path=0.5, dropout=0.5, **small(**choices)), IMAGE, CLASSES)


def local() -> nn.Module:
    ffn = FFN(width=16, activation="hard-swish")
    return local_vit.LocalViTConfig(**small(ffn=ffn)).build(ImageLabels(IMAGE, CLASSES))


def modulated() -> nn.Module:
    ffn = FFN(width=16, activation="swiglu")
    return jit.JiTConfig(bottleneck=4, **small(ffn=ffn)).build(ImageLabels(IMAGE, CLASSES))


NETWORKS: dict[str, tuple[Callable[[], nn.Module], Loss]] = {
    "shifted": (shifted, images),
    "local": (local, images),
    "jit": (modulated, images),
    # The images are smaller than its own.
    "resampled": (
        lambda: vit.build_image_vit(ImageViTConfig(**small()), (3, 32, 32), CLASSES),
        images,
    ),
    **{name: (language_model(name), text) for name in gpt_cases.CHOICES},
}


@pytest.mark.parametrize("name", NETWORKS)
def test_every_network_trains(name: str) -> None:
    make, loss = NETWORKS[name]
    reads = step(make(), loss, bf16=True)
    # An adaptive softmax asks which targets there are.
    assert (reads == []) == (name != "wikitext")


def test_no_augmentation_waits_for_the_gpu(tmp_path: Path) -> None:
    """The test covers every augmentation of the shipped studies."""
    pipelines = {
        variant.experiment.data.augment: variant.experiment.data
        for study in read_studies(ABLATIONS).values()
        for variant in expand(study, tmp_path).variants
        if isinstance(variant.experiment.data, Images)
    }
    assert len(pipelines) >= 5
    for data in pipelines.values():
        shape, classes = data.image_shape, data.num_classes
        images = ImageFormat(shape, classes, [0.5] * shape[0], [0.2] * shape[0])
        pipeline = Pipeline(data.augment, images, GPU)
        place = "cpu" if any(part.stage == "bytes" for part in data.augment) else GPU
        with rehearsal() as reads:
            x = torch.zeros(40, *shape, dtype=torch.uint8, device=place)
            labels = torch.zeros(40, dtype=torch.long, device=place)
            batch, targets = pipeline.apply(x, labels, torch_generator(0, "batch", 0))
            assert reads == []
        assert batch.shape == (40, *shape)
        assert targets.shape in ((40,), (40, classes))
        assert {batch.device.type, targets.device.type} == {"cuda"}
