"""Models of configuration files of mmsegmentation: what is built, and what is refused."""

import copy
import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.mmseg_files import CLASSES, CROP, NETWORKS, VIT, make_head, make_network, write_file
from pydantic import ValidationError
from torch import Tensor, nn

from lit_attn.attention.layer import Attention
from lit_attn.attention.spec import PRESETS
from lit_attn.extras import require_mmseg
from lit_attn.models import factory
from lit_attn.models.base import Model
from lit_attn.replace.search import count_layers
from lit_attn.schema.errors import ConfigError, explain
from lit_attn.schema.trust import foreign_file
from lit_attn.segmentation.label_masks import IGNORED
from lit_attn.segmentation.mmseg_models import MMSegConfig
from lit_attn.segmentation.scenes import Scenes
from lit_attn.signatures import ImageMasks

pytest.importorskip("mmseg")
require_mmseg("tests")

from mmengine.config import ConfigDict  # noqa: E402
from mmengine.registry import DefaultScope  # noqa: E402
from mmengine.structures import PixelData  # noqa: E402
from mmseg.registry import MODELS  # noqa: E402
from mmseg.structures import SegDataSample  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:torch.meshgrid")

SIGNATURE = ImageMasks((3, CROP, CROP), CLASSES, IGNORED)
SCENES = Scenes()


def read(path: Path, network: dict[str, Any], **changes: Any) -> MMSegConfig:
    """Return the configuration of a model whose file has `network`."""
    values = {"config": str(write_file(path / "network.py", network)), **changes}
    return MMSegConfig.model_validate(values)


def make_batch() -> dict[str, Any]:
    """Return two images of windows with their labels, some of which are no class."""
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (2, 3, CROP, CROP), generator=generator, dtype=torch.uint8)
    labels = torch.randint(0, CLASSES, (2, 1, CROP, CROP), generator=generator)
    labels[:, :, :5] = IGNORED
    samples = []
    for item in labels:
        meta = {"img_shape": (CROP, CROP), "ori_shape": (CROP, CROP)}
        samples.append(SegDataSample(gt_sem_seg=PixelData(data=item), metainfo=meta))
    return {"inputs": list(images), "data_samples": samples}


def compute_losses(network: Any) -> dict[str, Tensor]:
    """Return the losses of all heads, without dropout and with the statistics of evaluation."""
    network.double().eval()
    prepared = network.data_preprocessor(make_batch(), training=True)
    prepared["inputs"] = prepared["inputs"].double()
    losses: dict[str, Tensor] = network.loss(**prepared)
    return losses


@pytest.mark.parametrize("name", NETWORKS)
def test_the_network_with_standard_attention_is_that_of_mmsegmentation(
    name: str, tmp_path: Path
) -> None:
    """The losses of all heads are equal, with the weights of the new layers in the old ones."""
    content = make_network(name)
    model = read(tmp_path, content)
    torch.manual_seed(0)
    ours: Any = model.build(SIGNATURE)
    assert any(isinstance(module, Attention) for module in ours.backbone.modules())
    plain = json.loads(json.dumps(content).replace("SyncBN", "BN"))
    with DefaultScope.overwrite_default_scope("mmseg"), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Default ``avg_non_ignore``")
        theirs = MODELS.build(ConfigDict(plain))
    # The replacement copies weights, so a second replacement compares networks of equal weights.
    torch.manual_seed(0)
    original = build_original(model)
    theirs.load_state_dict(original.state_dict())
    expected = compute_losses(theirs)
    losses = compute_losses(ours)
    assert losses.keys() == expected.keys()
    for key, value in expected.items():
        torch.testing.assert_close(losses[key], value, rtol=1e-9, atol=1e-9)


def build_original(model: MMSegConfig) -> nn.Module:
    """Return the network of `model` before its attention is replaced, with its initial values."""
    from lit_attn.models.seeded_draws import by_shape
    from lit_attn.segmentation import mmseg_models

    with by_shape():
        network = mmseg_models.build_network(mmseg_models.clean_types(model.resolved))
        mmseg_models.initialise(network)
    return network


@pytest.mark.slow
@pytest.mark.parametrize("name", ["vit", "segformer", "swin"])
def test_parameters_are_matched_and_flops_counted(name: str, tmp_path: Path) -> None:
    standard = read(tmp_path, make_network(name))
    other = standard.model_copy(update={"attention": PRESETS["mgk"]})
    matched = factory.resolve(other, standard, SCENES)
    target = factory.describe(standard, SCENES)
    budget = factory.describe(matched, SCENES)
    assert budget.parameters == pytest.approx(target.parameters, rel=0.02)
    assert matched.ffn is not None
    assert budget.ffn_width == matched.ffn.width
    assert budget.flops > 10**5
    assert target.ffn_width == {"vit": 64, "segformer": 32, "swin": 64}[name]
    network = matched.build(SIGNATURE).eval()
    assert factory.count(network) == budget.parameters
    assert network(torch.zeros(1, 3, CROP, CROP)).isfinite().all()


def test_variants_of_a_seed_share_their_initial_values(tmp_path: Path) -> None:
    model = read(tmp_path, make_network("vit"))

    def start(preset: str) -> dict[str, Tensor]:
        torch.manual_seed(3)
        network = model.model_copy(update={"attention": PRESETS[preset]}).build(SIGNATURE)
        return dict(network.named_parameters())

    standard = start("standard")
    other = start("belief2")
    assert len(other) > len(standard)
    for name, value in standard.items():
        assert torch.equal(other[name], value), name


def test_the_identity_has_the_content_of_the_file_and_not_its_path(tmp_path: Path) -> None:
    content = make_network("vit")
    model = read(tmp_path, content)
    (tmp_path / "elsewhere").mkdir()
    base = write_file(tmp_path / "elsewhere" / "base.py", content, "unused = 3")
    inherited = tmp_path / "elsewhere" / "inherited.py"
    inherited.write_text(f'_base_ = ["{base.name}"]\n')
    again = MMSegConfig.model_validate({"config": str(inherited)})
    assert again.identity() == model.identity()
    changed = tmp_path / "elsewhere" / "changed.py"
    changed.write_text(f'_base_ = ["{base.name}"]\nmodel = dict(backbone=dict(num_layers=3))\n')
    other = MMSegConfig.model_validate({"config": str(changed)})
    assert other.resolved["backbone"]["num_layers"] == 3
    assert other.identity() != model.identity()
    assert str(tmp_path) not in model.identity_json()


def test_the_reduced_keys_of_segformer_are_kept_by_skip(tmp_path: Path) -> None:
    """A published SegFormer reduces its keys, where Belief-attention has no meaning."""
    content = change("segformer", "backbone.sr_ratios", [8, 4, 2, 1])
    skip = "backbone.layers.[0-2]"
    model = read(tmp_path, content, attention=PRESETS["belief2"], skip=skip)
    assert model.identity()["skip"] == skip
    network = model.build(SIGNATURE, "meta")
    assert count_layers(network) == (1, 4)
    network.eval()(*SIGNATURE.sample())


def test_a_cell_does_not_need_the_file(tmp_path: Path) -> None:
    model = read(tmp_path, make_network("segformer"))
    (tmp_path / "network.py").unlink()
    assert Model.parse(json.loads(model.model_dump_json())) == model


def test_the_file_of_a_foreign_cell_is_code_and_is_not_executed(tmp_path: Path) -> None:
    model = read(tmp_path, make_network("vit"))
    executed = tmp_path / "executed"
    before = f"from pathlib import Path\nPath({str(executed)!r}).touch()"
    path = write_file(tmp_path / "network.py", make_network("vit"), before)
    with (
        pytest.raises(ConfigError, match="x: this run executes the code in"),
        foreign_file("x", "add it", is_trusted=False),
    ):
        Model.parse({"kind": "mmseg", "config": str(path)})
    with (
        pytest.raises(ConfigError, match="x: this run executes the code in resolved"),
        foreign_file("x", "add it", is_trusted=False),
    ):
        model.build(SIGNATURE)
    assert not executed.exists()


@pytest.mark.parametrize(
    "name", ["os.system", "mmengine.fileio.load", "mmengine.load", "mmseg.models.build_loss"]
)
def test_a_type_cannot_call_any_function(name: str, tmp_path: Path) -> None:
    content = make_network("vit")
    content["backbone"] = {"type": name, "command": f"touch {tmp_path}/executed", "file": "x.pkl"}
    with pytest.raises((ConfigError, ValueError), match=r"not a subclass|registry") as caught:
        read(tmp_path, content).build(SIGNATURE, "meta")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "executed").exists()


def test_a_class_of_modules_can_be_written_with_its_module(tmp_path: Path) -> None:
    content = make_network("vit")
    content["backbone"] = VIT | {"type": "mmseg.models.backbones.vit.VisionTransformer"}
    network: Any = read(tmp_path, content).build(SIGNATURE, "meta")
    assert type(network.backbone).__name__ == "VisionTransformer"


def change(name: str, keys: str, value: Any) -> dict[str, Any]:
    """Return a network with another value of the key with the dotted path `keys`."""
    content = copy.deepcopy(make_network(name))
    node: Any = content
    *path, last = keys.split(".")
    for key in path:
        node = node[int(key)] if key.isdecimal() else node[key]
    node[last] = value
    return content


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            change("vit", "decode_head.num_classes", 19),
            r"config: decode_head\.num_classes is 19, but the data have 13 classes",
        ),
        (
            change("swin", "auxiliary_head.1.num_classes", 150),
            r"config: auxiliary_head\[1\]\.num_classes is 150, but the data have 13",
        ),
        (
            change("vit", "auxiliary_head.ignore_index", 0),
            r"config: auxiliary_head\.ignore_index is 0, but .* the label 255",
        ),
        (
            change("vit", "data_preprocessor.size", (64, 64)),
            r"config: data_preprocessor\.size is \[64, 64\], but training windows are \[32, 32\]",
        ),
        (change("vit", "data_preprocessor", None), "config: model has no data_preprocessor; add"),
        (change("vit", "decode_head.out_channels", 1), "^config: "),
        (change("vit", "backbone.type", "VisionTransfomer"), "config: .*VisionTransfomer"),
        (change("vit", "backbone.num_hedas", 2), "config: .*num_hedas"),
        (
            change("segformer", "backbone.sr_ratios", [8, 4, 2, 1]),
            r"attention: backbone\.layers\.0\.1\.0\.attn\.attn \(.*\): .*; name it in `skip`",
        ),
        (
            make_network("vit")
            | {"decode_head": make_head(16) | {"type": "DAHead", "pam_channels": 8}},
            r"attention: decode_head\.pam|config: ",
        ),
        (
            make_network("vit")
            | {
                "backbone": {"type": "ResNet", "depth": 18, "out_indices": (0, 1, 2, 3)},
                "decode_head": make_head(512),
            },
            "attention: EncoderDecoder has no self-attention layers",
        ),
    ],
)
def test_a_model_that_does_not_fit_is_one_line(
    content: dict[str, Any], message: str, tmp_path: Path
) -> None:
    model = read(tmp_path, content, attention=PRESETS["belief2"])
    with pytest.raises((ConfigError, ValueError), match=message) as caught:
        model.build(SIGNATURE, "meta")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = 3", "network.py has no `model`; name a complete configuration"),
        ("model = dict(type='EncoderDecoder')", "network.py: model has no backbone"),
        ("model = dict(backbone={}, decode_head={}, x=object())", "lists and mappings only"),
        ("custom_imports = dict(imports=['os'])\nmodel = {}", "custom_imports.*`parts` of the"),
        ("_base_ = ['absent.py']", "network.py: .*absent.py"),
        ("model = dict(", "network.py.*SyntaxError"),
        ("raise SystemExit(3)", "network.py:1: calls sys.exit"),
        (None, "config: no file .*network.py"),
    ],
)
def test_a_file_without_a_usable_model_is_refused_in_one_line(
    text: str | None, message: str, tmp_path: Path
) -> None:
    path = tmp_path / "network.py"
    if text is not None:
        path.write_text(text)
    with pytest.raises((ConfigError, ValidationError)) as caught:
        MMSegConfig.model_validate({"config": str(path)})
    error = caught.value
    shown = explain(error, "x") if isinstance(error, ValidationError) else error
    assert "\n" not in str(shown)
    with pytest.raises(ConfigError, match=message):
        raise ConfigError(str(shown))


def test_pretrained_weights_fix_the_width(tmp_path: Path) -> None:
    weights = {"type": "Pretrained", "checkpoint": "absent.pth"}
    model = read(tmp_path, change("vit", "backbone.init_cfg", weights))
    with pytest.raises(ValueError, match=r"ffn\.width: pretrained weights .*`match: none`"):
        model.with_width(48).build(SIGNATURE, "meta")
    assert factory.count(model.with_width(64).build(SIGNATURE, "meta")) > 0
    with pytest.raises(ValueError, match=r"config: .*absent\.pth"):
        model.build(SIGNATURE)
