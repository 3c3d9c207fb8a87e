"""The number of replaced attention layers, from `replace_attention` to the table of a study."""

import json
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import timm
from helpers import fake_study, studies
from helpers.finished_cells import train_cell
from helpers.training_cells import digits_cell
from torch import nn

from lit_attn import replace_attention
from lit_attn.__main__ import main
from lit_attn.attention.spec import AttentionSpec
from lit_attn.cells.records import Result
from lit_attn.config.cell import Cell
from lit_attn.replace import ADAPTERS, Adapter, Projections
from lit_attn.replace.external import ModuleConfig
from lit_attn.replace.search import count_layers
from lit_attn.replace.timm_models import TimmConfig, build_timm
from lit_attn.replace.transformers_models import TransformersConfig
from lit_attn.signatures import ImageLabels, TokenStream

IMAGES = ImageLabels((1, 8, 8), 10)
VIT = {"patch_size": 4, "embed_dim": 16, "depth": 4, "num_heads": 2}
LLAMA = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
HIERA = {"img_size": 64, "embed_dim": 16, "num_heads": 1, "stages": (1, 1, 2, 1)}


def make_vit(**changes: Any) -> TimmConfig:
    values = {"name": "vit_tiny_patch16_224", "arguments": VIT} | changes
    return TimmConfig.model_validate(values)


class Own(nn.Module):
    """Attention of a user, with the index of its layer."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.index = index
        self.qkv = nn.Linear(8, 24)
        self.proj = nn.Linear(8, 8)


class OwnAdapter(Adapter):
    def read(self, original: Any) -> Projections:
        return Projections(2, original.qkv, original.proj)


def leave_even(original: Own, spec: AttentionSpec) -> OwnAdapter | None:
    return OwnAdapter(original, spec) if original.index % 2 else None


def test_layers_that_pool_their_queries_are_warned_about() -> None:
    model = timm.create_model("hiera_tiny_224", **HIERA)
    with pytest.warns(UserWarning, match=r"2 of 5 attention layers of Hiera are replaced; these"):
        replace_attention(model, "belief2")
    assert count_layers(model) == (2, 5)
    model = timm.create_model("sam2_hiera_tiny")
    with pytest.warns(UserWarning, match=r"9 of 12 attention layers of HieraDet are replaced"):
        replace_attention(model, "belief2")
    assert count_layers(model) == (9, 12)


def test_layers_that_an_adapter_of_a_user_leaves_are_warned_about(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(ADAPTERS, f"{__name__}:Own", leave_even)
    model = nn.Sequential(*[Own(index) for index in range(4)])
    with pytest.warns(UserWarning, match=r"2 of 4 attention layers of Sequential .* 0 \(Own\), 2 "):
        replace_attention(model, {"layers": {"last": 1, "use": "xsa"}})
    assert count_layers(model) == (2, 4)
    # The rules count the layers that are replaced.
    assert [model[index].layer.spec.residual.kind for index in (1, 3)] == ["full", "perpendicular"]


@pytest.mark.parametrize("rules", [["standard", "standard", "xsa"], {"last": 1, "use": "xsa"}])
def test_rules_count_the_replaced_layers_only(rules: Any) -> None:
    model = timm.create_model("hiera_tiny_224", **HIERA | {"stages": (2, 2, 1, 1)})
    with pytest.warns(UserWarning, match="3 of 6"):
        replace_attention(model, {"layers": rules})
    kinds = [m.layer.spec.residual.kind for m in model.modules() if isinstance(m, Adapter)]
    assert kinds == ["full", "full", "perpendicular"]


def test_a_complete_replacement_and_chosen_layers_are_no_reason_for_a_warning() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = timm.create_model("vit_tiny_patch16_224", img_size=8, **VIT)
        assert count_layers(replace_attention(model, "belief2")) == (4, 4)
        model = timm.create_model("vit_tiny_patch16_224", img_size=8, **VIT)
        assert count_layers(replace_attention(model, "belief2", skip=[0, -1])) == (2, 4)


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ({}, [0, 1, 2, 3]),
        ({"only": -1}, [3]),
        ({"only": "blocks.[01]"}, [0, 1]),
        ({"skip": ["blocks.0.attn", 3]}, [1, 2]),
        ({"only": [0, 1], "skip": 0}, [1]),
    ],
)
def test_layers_are_chosen_in_yaml(choice: dict[str, Any], expected: list[int]) -> None:
    network: Any = build_timm(make_vit(attention="xsa", **choice), IMAGES, "meta")
    kinds = {index: type(block.attn).__module__ for index, block in enumerate(network.blocks)}
    assert [index for index, name in kinds.items() if name.startswith("lit_attn.")] == expected
    # The keys belong to the identity only if they are written.
    assert make_vit(**choice).identity() == make_vit().identity() | {
        key: list(value) if isinstance(value, list) else value for key, value in choice.items()
    }


@pytest.mark.parametrize(
    ("model", "signature", "message"),
    [
        (make_vit(skip="head"), IMAGES, r"^skip: 'head' names no attention layer; choose from bl"),
        (make_vit(only=9), IMAGES, r"^only: the model has 4 layers, so there is no layer 9"),
        (make_vit(skip="blocks"), IMAGES, r"^`only` and `skip` leave no layer to replace"),
        (
            TransformersConfig(architecture="llama", only="model.layers.7", arguments=LLAMA),
            TokenStream(50, 16),
            r"^only: 'model\.layers\.7' names no attention layer; did you mean 'model\.layers\.0",
        ),
    ],
)
def test_a_wrong_choice_in_yaml_is_one_line(model: Any, signature: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        model.build(signature, "meta")


class Builds(nn.Module):
    def __init__(self, attention: Any) -> None:
        super().__init__()
        self.attn = attention(8, 2)


def test_a_module_that_builds_its_attention_has_no_layers_to_choose() -> None:
    model = ModuleConfig.model_validate({"import": f"{__name__}:Builds", "skip": 0})
    with pytest.raises(ValueError, match=r"skip: .*Builds builds its layers from its parameter"):
        model.build(IMAGES, "meta")


def skipping_cell() -> Cell:
    values = digits_cell().model_dump(mode="json")
    model = {"kind": "timm", "name": "vit_tiny_patch16_224", "arguments": VIT, "skip": [0]}
    values["experiment"]["model"] = model
    values["experiment"]["training"]["max_steps"] = 1
    return Cell.parse(values, "cell")


@pytest.mark.slow
def test_the_record_of_a_cell_counts_its_layers(tmp_path: Path) -> None:
    result = Result.read(train_cell(skipping_cell(), tmp_path) / "result.json")
    assert result is not None
    assert (result.replaced_layers, result.attention_layers) == (3, 4)


BODY = """
baseline: a
match: none
cells: {a: {}, b: {model.skip: 0}, c: {attention: xsa, model.skip: [0, 1]}}
"""
RECIPE = """\
data: {kind: digits, batch_size: 64}
model:
  kind: timm
  name: vit_tiny_patch16_224
  arguments: {patch_size: 4, embed_dim: 16, depth: 4, num_heads: 2}
optimizer: {kind: adamw, lr: 1e-3}
training: {epochs: 2}
"""


def test_a_dry_run_counts_the_layers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = studies.write(tmp_path, BODY, RECIPE)
    assert main(["run", str(path), "--dry-run", "--params", "--out", str(tmp_path / "runs")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any("warning: b: model: 3 of 4 attention layers have the mech" in line for line in lines)
    assert any("warning: c: model: 2 of 4 attention layers have the mech" in line for line in lines)
    # The columns of the layers, of the bytes of a cache, and of the FFN's width.
    counts = re.findall(r"(\d of 4) +none +", "\n".join(lines))
    assert counts == ["4 of 4", "3 of 4", "2 of 4"]
    assert main(["run", str(path), "--dry-run", "--json", "--out", str(tmp_path / "runs")]) == 0
    (study,) = json.loads(capsys.readouterr().out)["studies"]
    starts = [line[:16] for line in study["warnings"]]
    assert starts == ["b: model: 3 of 4", "c: model: 2 of 4"]


OTHER_LAYERS = """
from typing import Literal

from torch import Tensor, nn

from lit_attn import Model
from lit_attn.signatures import ImageLabels


class Network(nn.Module):
    def __init__(self, signature: ImageLabels) -> None:
        super().__init__()
        width = signature.shape[-1]
        self.attention = nn.MultiheadAttention(width, 2, batch_first=True)
        self.head = nn.Linear(width, signature.classes)

    def forward(self, images: Tensor) -> Tensor:
        rows = images[:, 0]
        return self.head(self.attention(rows, rows, rows)[0].mean(1))


class Other(Model, kind="other-layers"):
    takes = (ImageLabels,)
    kind: Literal["other-layers"] = "other-layers"
    ffn: None = None

    def build(self, signature: ImageLabels, device: str) -> nn.Module:
        return Network(signature).to(device)
"""


def test_a_dry_run_warns_of_a_model_without_layers_of_the_package(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "other.py").write_text(OTHER_LAYERS)
    before, rest = RECIPE.split("model:")
    after = rest[rest.index("optimizer:") :]
    recipe = f"{before}model: {{kind: other-layers}}\n{after}"
    body = "parts: [other.py]\nbaseline: a\nmatch: none\ncells: {a: {}, b: {attention: xsa}}\n"
    path = studies.write(tmp_path, body, recipe)
    assert main(["run", str(path), "--dry-run", "--out", str(tmp_path / "runs")]) == 0
    output = capsys.readouterr().out
    assert "warning: all variants: model: has no attention layer of lit_attn" in output


def test_the_caption_says_which_variants_keep_layers(tmp_path: Path) -> None:
    folder = fake_study.write_study(tmp_path / "runs", seeds=2)
    for path in sorted(folder.rglob("result.json")):
        result = json.loads(path.read_text())
        replaced, total = {"belief2": (9, 12), "belief": (0, 0)}.get(result["variant"], (12, 12))
        path.write_text(
            json.dumps(result | {"replaced_layers": replaced, "attention_layers": total})
        )
    report = fake_study.report(tmp_path)
    for name in ("table.md", "table.full.md", "table.html"):
        text = " ".join((report / name).read_text().split())
        assert "belief2: 9 of 12 attention layers have the mechanism of their variant" in text
        assert "belief: the model has no attention layer of lit_attn" in text.replace("\\", "")
    assert "standard: " not in (report / "table.md").read_text()
