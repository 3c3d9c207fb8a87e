"""Tests of the Segmenter built of mmsegmentation's parts (docs/setups.md, section 3)."""

import sys
from pathlib import Path

import pytest
import timm
import torch
from torch import Tensor, nn

from lit_attn.attention.residual import SplitConfig
from lit_attn.attention.spec import PRESETS, AttentionSpec
from lit_attn.extras import require_mmseg
from lit_attn.models.base import FFN
from lit_attn.models.factory import build, count, describe
from lit_attn.schema.errors import ConfigError
from lit_attn.segmentation.scenes import Scenes
from lit_attn.segmentation.segmenter_config import SegmenterConfig

pytest.importorskip("mmseg")
require_mmseg("tests")

from mmengine.structures import PixelData  # noqa: E402
from mmseg.registry import MODELS  # noqa: E402
from mmseg.structures import SegDataSample  # noqa: E402

from lit_attn.segmentation import segmenter  # noqa: E402
from lit_attn.segmentation.segmenter import AttentionMaskHead, AttentionViT  # noqa: E402

PRETRAINED = "vit_tiny_patch16_384.augreg_in21k_ft_in1k"

# The published encoder keeps the classifier of its pretrained weights, which nothing uses.
CLASSIFIER = 192 * 1000 + 1000

SMALL = {"dim": 32, "depth": 2, "heads": 2, "patch": 8, "ffn": FFN(width=48), "decoder_depth": 1}


def split(**choices: object) -> AttentionSpec:
    return AttentionSpec(residual=SplitConfig.model_validate({"activation": "identity", **choices}))


def small(size: int = 32, classes: int = 5, **choices: object) -> nn.Module:
    torch.manual_seed(0)
    model = SegmenterConfig.model_validate({**SMALL, **choices})
    return segmenter.build(model, (3, size, size), classes)


@pytest.mark.parametrize(
    ("model", "more"),
    [
        (SegmenterConfig(), 0),
        (SegmenterConfig(attention=split(bias=False), decoder_attention="standard"), 442_368),
        (SegmenterConfig(attention=split(), decoder_attention="standard"), 444_672),
        (SegmenterConfig(attention=split(bias=False)), 516_096),
    ],
)
def test_parameter_counts_equal_the_published_ones(model: SegmenterConfig, more: int) -> None:
    network = segmenter.build(model, (3, 512, 512), 150, "meta")
    assert count(network) + CLASSIFIER == 6_906_388 + more
    standard = segmenter.build(SegmenterConfig(), (3, 512, 512), 150, "meta")
    assert count(standard.decode_head) == 1_029_996


def test_masks_have_a_value_for_every_patch_and_class() -> None:
    network = small().eval()
    assert network(torch.randn(2, 3, 32, 32)).shape == (2, 5, 4, 4)
    # A smaller window that patches do not tile is padded.
    assert network(torch.randn(2, 3, 20, 32)).shape == (2, 5, 3, 4)


def test_the_published_recipe_is_in_the_configuration() -> None:
    network = segmenter.build(SegmenterConfig(), (3, 512, 512), 150, "meta")
    vit, head = network.backbone.vit, network.decode_head
    assert vit.blocks[0].norm1.eps == head.layers[0].norm1.eps == 1e-5
    assert vit.blocks[-1].drop_path1.drop_prob == pytest.approx(0.1)
    assert vit.blocks[0].attn.proj_drop.p == 0
    assert {head.layers[0].attn.attn_drop, head.layers[0].attn.proj_drop.p} == {0.1}
    assert head.layers[0].mlp.drop1.p == head.layers[0].mlp.drop2.p == 0.1
    assert isinstance(head.layers[0].drop_path1, nn.Identity)
    assert network.test_cfg.stride == network.test_cfg.crop_size == (512, 512)
    assert segmenter.MEAN == segmenter.STD == 127.5


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_colours_are_normalised_in_the_type_of_the_network(dtype: torch.dtype) -> None:
    preprocessor = segmenter.Preprocessor(mean=[127.5] * 3, std=[127.5] * 3).to(dtype)
    images = torch.tensor([0, 51, 255], dtype=torch.uint8).expand(3, 2, 3)
    (normalised,) = preprocessor({"inputs": [images]})["inputs"]
    expected = (images[0].to(dtype) - 127.5) / 127.5
    assert normalised.dtype == dtype
    assert torch.equal(normalised[0], expected)
    assert list(preprocessor.state_dict()) == []


def test_new_layers_start_as_published() -> None:
    torch.manual_seed(0)
    head = segmenter.build(SegmenterConfig(), (3, 32, 32), 150).decode_head
    assert head.patch_proj.weight.std().item() == pytest.approx(192**-0.5, rel=0.03)
    assert head.classes_proj.weight.std().item() == pytest.approx(192**-0.5, rel=0.03)
    assert head.cls_emb.std().item() == pytest.approx(0.02, rel=0.05)
    assert head.layers[0].attn.qkv.weight.std().item() == pytest.approx(0.02, rel=0.05)
    assert not head.layers[0].attn.qkv.bias.any()


def test_the_head_with_standard_attention_equals_that_of_mmsegmentation() -> None:
    torch.manual_seed(0)
    model = SegmenterConfig(dim=32, heads=2, ffn=FFN(width=128))
    ours = AttentionMaskHead(model, 5).eval()
    theirs = MODELS.build(
        {
            "type": "SegmenterMaskTransformerHead",
            "in_channels": 32,
            "channels": 32,
            "num_classes": 5,
            "num_layers": 2,
            "num_heads": 2,
            "embed_dims": 32,
            "loss_decode": {"type": "CrossEntropyLoss", "avg_non_ignore": True},
        }
    ).eval()
    names = {
        "attn.qkv.weight": "attn.attn.in_proj_weight",
        "attn.qkv.bias": "attn.attn.in_proj_bias",
        "attn.proj.": "attn.attn.out_proj.",
        "norm1.": "ln1.",
        "norm2.": "ln2.",
        "mlp.fc1.": "ffn.layers.0.0.",
        "mlp.fc2.": "ffn.layers.1.",
    }
    state = {}
    for name, value in ours.state_dict().items():
        for mine, other in names.items():
            name = name.replace(mine, other)
        state[name] = value
    theirs.load_state_dict(state)
    ours, theirs = ours.double(), theirs.double()
    x = (torch.randn(2, 32, 3, 4, dtype=torch.double),)
    torch.testing.assert_close(ours(x), theirs(x))


def test_the_backbone_gives_normed_patches_without_the_class_token() -> None:
    torch.manual_seed(0)
    model = SegmenterConfig.model_validate({**SMALL, "attention": PRESETS["belief2"]})
    backbone = AttentionViT(model, 32).eval()
    x = torch.randn(2, 3, 32, 32)
    (expected,) = backbone.vit.forward_intermediates(x, 1, norm=True, intermediates_only=True)
    torch.testing.assert_close(backbone(x)[0], expected)


def test_the_decoder_can_keep_standard_attention() -> None:
    network = small(attention=PRESETS["belief2"], decoder_attention="standard")
    assert network.backbone.vit.blocks[0].attn.spec == PRESETS["belief2"]
    assert network.decode_head.layers[0].attn.spec == AttentionSpec()
    same = small(attention=PRESETS["belief2"])
    assert same.decode_head.layers[0].attn.spec == PRESETS["belief2"]


def test_without_ffn_encoder_and_decoder_have_none() -> None:
    network = small(ffn="none")
    assert not any("mlp" in name for name, _ in network.named_parameters())
    assert network(torch.randn(1, 3, 32, 32)).shape == (1, 5, 4, 4)


def sample_of(label: Tensor) -> SegDataSample:
    sample = SegDataSample()
    sample.gt_sem_seg = PixelData(data=label[None])
    return sample


def test_the_loss_is_the_mean_over_labelled_pixels() -> None:
    network = small(decoder_dropout=0.0, drop_path=0.0)
    x = torch.randn(1, 3, 32, 32)
    label = torch.randint(5, (32, 32))
    label[:, 10:] = 255
    (loss,) = (v for k, v in network.loss(x, [sample_of(label)]).items() if "loss" in k)
    logits = nn.functional.interpolate(network(x), (32, 32), mode="bilinear")
    expected = nn.functional.cross_entropy(logits, label[None], ignore_index=255)
    torch.testing.assert_close(loss, expected)


@pytest.mark.parametrize("attention", ["standard", "belief2", "dcmha", "smgk"])
def test_every_parameter_gets_a_gradient(attention: str) -> None:
    """Data-parallel training fails if a step does not use a parameter."""
    network = small(attention=PRESETS[attention])
    losses = network.loss(torch.randn(2, 3, 32, 32), [sample_of(torch.randint(5, (32, 32)))] * 2)
    losses["decode.loss_ce"].backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in network.parameters())


def test_flops_equal_a_count_by_hand() -> None:
    """The count covers every matrix product (multiply-add = 2) but not the upsampling of masks."""
    n, d, w, k = 16, 32, 48, 13
    model = SegmenterConfig.model_validate(SMALL)

    def block(tokens: int) -> int:
        return 2 * tokens * d * (4 * d + 2 * w) + 2 * (2 * tokens**2 * d)

    encoder = 2 * n * 3 * 64 * d + 2 * block(n + 1)
    decoder = 2 * n * d * d + block(n + k) + 2 * (n + k) * d * d + 2 * n * k * d
    assert describe(model, Scenes(crop=32)).flops == encoder + decoder


def test_sliding_windows_are_averaged() -> None:
    network = small(stride=16).eval()
    x = torch.randn(1, 3, 32, 72)
    (prediction,) = network.predict(x)
    total, window_counts = torch.zeros(1, 5, 32, 72), torch.zeros(72)
    for left in (0, 16, 32, 40):
        window = network(x[..., left : left + 32])
        total[..., left : left + 32] += nn.functional.interpolate(window, (32, 32), mode="bilinear")
        window_counts[left : left + 32] += 1
    torch.testing.assert_close(
        prediction.seg_logits.data, (total / window_counts)[0], rtol=1e-5, atol=1e-5
    )
    assert prediction.pred_sem_seg.data.shape == (1, 32, 72)


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write random weights of the published shape, with nonzero biases for Proposition 1."""
    torch.manual_seed(0)
    published = timm.create_model("vit_tiny_patch16_384")
    with torch.no_grad():
        for block in published.blocks:
            block.attn.proj.bias.normal_(std=0.1)
        published.pos_embed.normal_()
    path = tmp_path_factory.mktemp("weights") / "vit_tiny.pth"
    torch.save(published.state_dict(), path)
    return path


def pretrained(weights: Path, **choices: object) -> SegmenterConfig:
    return SegmenterConfig.model_validate(
        {"pretrained": PRETRAINED, "checkpoint": weights, **choices}
    )


def test_pretrained_positions_are_resampled_linearly_as_by_the_released_code(
    weights: Path,
) -> None:
    network = segmenter.build(pretrained(weights), (3, 512, 512), 3)
    state = torch.load(weights)
    ours, published = network.backbone.vit.pos_embed, state["pos_embed"]
    assert ours.shape == (1, 1 + 32 * 32, 192)
    torch.testing.assert_close(ours[:, :1], published[:, :1])
    grid = published[:, 1:].reshape(1, 24, 24, 192).permute(0, 3, 1, 2)
    resized = nn.functional.interpolate(grid, (32, 32), mode="bilinear")
    torch.testing.assert_close(ours[:, 1:], resized.flatten(2).mT, rtol=0, atol=0)
    for name in ("patch_embed.proj.weight", "blocks.11.attn.qkv.weight", "norm.bias"):
        torch.testing.assert_close(network.backbone.vit.state_dict()[name], state[name])


def test_belief2_with_init_copy_starts_as_the_standard_model(weights: Path) -> None:
    networks = []
    for attention in (AttentionSpec(), split(init="copy"), split(init="copy", bias=False)):
        torch.manual_seed(0)
        chosen = pretrained(weights, attention=attention)
        networks.append(segmenter.build(chosen, (3, 64, 64), 7).eval())
    standard, *split_ones = networks
    x = torch.randn(2, 3, 64, 64)
    for network in split_ones:
        # Both decoders' new layers are drawn anew; W_p shifts the draws.
        state = standard.decode_head.state_dict()
        network.decode_head.load_state_dict(state, strict=True)
        torch.testing.assert_close(network(x), standard(x), rtol=1e-4, atol=1e-4)
    fresh = segmenter.build(pretrained(weights, attention=split()), (3, 64, 64), 7).eval()
    fresh.decode_head.load_state_dict(standard.decode_head.state_dict())
    assert not torch.allclose(fresh(x), standard(x), rtol=1e-2, atol=1e-2)


@pytest.mark.slow
def test_missing_weights_are_named(
    weights: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = (3, 64, 64)
    with pytest.raises(ValueError, match="'vit_tiny_p16' is not a timm model; did you mean 'vit_"):
        segmenter.build(pretrained(weights, pretrained="vit_tiny_p16"), shape, 7)
    with pytest.raises(ValueError, match=r"cannot load .* from .*nothing\.pth"):
        segmenter.build(pretrained(tmp_path / "nothing.pth"), shape, 7)
    (tmp_path / "broken.pth").write_bytes(b"not weights")
    with pytest.raises(ValueError, match=r"cannot load .* from .*broken\.pth"):
        segmenter.build(pretrained(tmp_path / "broken.pth"), shape, 7)
    with pytest.raises(ValueError, match="size mismatch"):
        segmenter.build(pretrained(weights, ffn=FFN(width=700)), shape, 7)

    def offline(*_: object, **__: object) -> None:
        raise OSError("no connection")

    monkeypatch.setattr(timm, "create_model", offline)
    with pytest.raises(ValueError, match=r"timm's hub: no connection; `checkpoint` can name"):
        segmenter.build(pretrained(weights, checkpoint=None), shape, 7)


def test_a_checkpoint_needs_the_name_of_its_weights() -> None:
    with pytest.raises(ValueError, match="checkpoint: needs `pretrained`"):
        SegmenterConfig(checkpoint=Path("weights.pth"))


def test_a_missing_mmsegmentation_is_reported_in_one_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "mmseg.models", None)
    with pytest.raises(ConfigError, match=r"model\.kind: needs mmseg.*lit_attn\[segmentation\]"):
        build(SegmenterConfig(), Scenes(crop=32))
