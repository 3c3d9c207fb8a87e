"""Models from elsewhere in YAML: the examples of docs/own-models.md, and what is refused."""

import re
import sys
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest
import torch
from helpers.commands import run_python
from helpers.paths import ROOT
from helpers.replaced_models import Renamed
from torch import nn

from lit_attn.ablate.__main__ import main
from lit_attn.attention.layer import Attention, attn_layer
from lit_attn.attention.spec import PRESETS
from lit_attn.cells.records import Plan, Result
from lit_attn.config import experiment
from lit_attn.models.base import Model
from lit_attn.models.factory import describe
from lit_attn.models.seeded_draws import by_shape
from lit_attn.replace.external import ModuleConfig
from lit_attn.replace.timm_models import TimmConfig
from lit_attn.replace.transformers_models import TransformersConfig
from lit_attn.signatures import ImageLabels, ImageTargets, LabelledTokens, TaggedTokens, TokenStream

IMAGES = ImageLabels((1, 8, 8), 10)
TEXT = TokenStream(50, 16)
VIT = {"patch_size": 4, "embed_dim": 16, "depth": 1, "num_heads": 2}
MAXVIT = {"embed_dim": (64, 64), "depths": (1, 1)}
DECODER = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
GPT2 = DECODER | {"n_inner": 24}
DECODER |= {"intermediate_size": 24}


class WithWidth(nn.Sequential):
    """Tokens, an attention layer and an FFN, whose width is an argument."""

    def __init__(self, ffn_width: int = 48) -> None:
        layer = nn.TransformerEncoderLayer(8, 2, ffn_width, batch_first=True)
        super().__init__(nn.Flatten(1, 2), nn.TransformerEncoder(layer, 1), nn.Flatten())
        self.append(nn.Linear(64, 10))


class WithoutWidth(WithWidth):
    def __init__(self) -> None:
        super().__init__(48)


def make_timm(name: str = "vit_tiny_patch16_224", **changes: Any) -> TimmConfig:
    return TimmConfig.model_validate({"name": name, "arguments": VIT} | changes)


def make_hub(architecture: str, **changes: Any) -> TransformersConfig:
    values = {"architecture": architecture, "arguments": DECODER} | changes
    return TransformersConfig.model_validate(values)


def write_page(folder: Path) -> None:
    text = (ROOT / "docs" / "own-models.md").read_text(encoding="utf-8")
    (module,) = re.findall(r"```python\n(.*?)```", text, re.S)
    (folder / "net.py").write_text(module)
    *experiments, studies = re.findall(r"```yaml\n(.*?)```", text, re.S)
    for name, recipe in zip(("timm", "llama", "net"), experiments, strict=True):
        (folder / f"own-{name}.yaml").write_text(recipe)
    (folder / "studies.yaml").write_text(studies)


def ablate(folder: Path, *words: str) -> CompletedProcess[str]:
    return run_python(folder, "-m", "lit_attn.ablate", "studies.yaml", *words)


@pytest.mark.parametrize(
    ("file", "before", "after", "message"),
    [
        ("own-net.yaml", "dim: 16", "dim: 15", "model: {folder}/net.py:{line}: AssertionError: "),
        ("net.py", ".mean(1)", ".mean(1)[:, None] @ images", "{folder}/net.py:{last}: Runtime"),
        (
            "own-net.yaml",
            "dim: 16",
            "dmi: 16",
            "own-net.yaml:2: own-net: variant 'standard': model: arguments: net:Net: TypeError: ",
        ),
        (
            "net.py",
            "Linear(dim, classes)",
            "Linear(dim, 7)",
            "model: must return a tensor of shape [1, 10] for one sample, but returns [1, 7]",
        ),
        ("net.py", "return self.head(", "return (0, ", "[1, 10] for one sample, but returns tuple"),
        ("own-net.yaml", "net:Net", "net:Nett", "own-net.yaml:2: own-net: variant 'standard': "),
    ],
)
def test_a_mistake_in_a_module_names_its_line(
    file: str,
    before: str,
    after: str,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    write_page(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "net", raising=False)
    experiment._try_member.cache_clear()
    path = tmp_path / file
    assert before in path.read_text()
    path.write_text(path.read_text().replace(before, after))
    lines = (tmp_path / "net.py").read_text().splitlines()
    (line,) = (n for n, text in enumerate(lines, 1) if "nn.TransformerEncoderLayer" in text)
    assert main(["studies.yaml", "--study", "own-net", "--dry-run"]) == 2
    (problem,) = capsys.readouterr().err.splitlines()
    assert message.format(folder=tmp_path, line=line, last=len(lines)) in problem


@pytest.mark.process
def test_the_studies_of_the_page_run(tmp_path: Path) -> None:
    write_page(tmp_path)
    finished = ablate(tmp_path, "--jobs", "2")
    assert finished.returncode == 0, finished.stdout + finished.stderr
    for name in ("timm", "llama", "net"):
        folder = tmp_path / "runs" / f"own-{name}"
        plan = Plan.model_validate_json((folder / "plan.json").read_text())
        results = [
            Result.model_validate_json((folder / cell.path / "result.json").read_text())
            for cell in plan.cells
        ]
        parameters = {result.variant: result.parameters for result in results}
        assert parameters["belief2"] == pytest.approx(parameters["standard"], rel=0.02)
        assert all(result.flops > 0 and result.steps > 0 for result in results)


@pytest.mark.parametrize(
    ("model", "signature"),
    [
        (make_timm(), IMAGES),
        (make_timm(), ImageTargets((3, 8, 8), 2)),
        (make_timm("eva02_tiny_patch14_224"), IMAGES),
        (make_hub("vit", arguments=DECODER | {"patch_size": 4}), IMAGES),
        (make_hub("bert"), LabelledTokens(50, 16, 3)),
        (make_hub("bert"), TaggedTokens(50, 16, 3)),
        (make_hub("gpt2", arguments=GPT2), TEXT),
        (make_hub("qwen3", arguments=DECODER | {"num_key_value_heads": 1}), TEXT),
    ],
    ids=lambda value: getattr(value, "name", None) or getattr(value, "architecture", None),
)
def test_variants_of_a_seed_share_their_initial_values(model: Model, signature: Any) -> None:
    def start(preset: str) -> nn.Module:
        torch.manual_seed(3)
        return model.model_copy(update={"attention": PRESETS[preset]}).build(signature)

    standard, other = start("standard"), dict(start("belief2").named_parameters())
    assert len(other) > len(list(standard.parameters()))
    for name, value in standard.named_parameters():
        assert torch.equal(other[name], value), name
    inputs = [x.new_zeros(x.shape, device="cpu") for x in signature.sample()]
    assert standard(*inputs).shape[-1] in (10, 2, 3, 50)


def test_more_draws_of_one_shape_leave_other_shapes_unchanged() -> None:
    values = []
    for count in (1, 3):
        torch.manual_seed(0)
        with by_shape():
            for _ in range(count):
                nn.Linear(3, 4)
            values.append(nn.Linear(5, 2).weight)
    assert torch.equal(*values)


@pytest.mark.parametrize(
    ("model", "signature"),
    [
        (make_timm(), IMAGES),
        (make_timm("eva02_tiny_patch14_224"), IMAGES),
        (make_timm("maxvit_tiny_tf_224", arguments=MAXVIT), ImageLabels((3, 64, 64), 5)),
        (make_hub("gpt2", arguments=GPT2), TEXT),
        (make_hub("llama"), TEXT),
    ],
    ids=["vit", "eva02", "maxvit", "gpt2", "llama"],
)
def test_the_ffn_has_the_width_that_matching_finds(model: Model, signature: Any) -> None:
    shapes = {tuple(p.shape) for p in model.with_width(37).build(signature, "meta").parameters()}
    assert any(37 in shape for shape in shapes)


@pytest.mark.parametrize(
    ("model", "width"),
    [
        (make_timm(), 64),
        (make_timm(pretrained=True), 64),
        (make_timm("eva02_tiny_patch14_224"), 42),
        (make_timm().with_width(37), 37),
        (ModuleConfig(target=f"{__name__}:WithWidth"), 48),
        (ModuleConfig(target=f"{__name__}:WithoutWidth"), None),
    ],
    ids=["vit", "pretrained", "eva02", "written", "module", "module-without"],
)
def test_the_ffn_width_of_a_baseline_is_that_of_its_code(model: Model, width: int | None) -> None:
    data = experiment.Data.parse({"kind": "digits"})
    assert describe(model, data).ffn_width == width


@pytest.mark.parametrize(
    ("model", "signature", "message"),
    [
        (make_timm("vit_tny_patch16_224"), IMAGES, "name: .* did you mean 'vit_tiny_patch16_224'"),
        (make_timm(arguments={"widht": 3}), IMAGES, "arguments: .* argument 'widht'"),
        (
            make_timm("xcit_nano_12_p16_224", arguments={}),
            ImageLabels((3, 32, 32), 5),
            r"attention: blocks\.0\.attn \(XCA\): its weights relate channels",
        ),
        (make_hub("lama"), TEXT, "architecture: transformers has no 'lama'; did you mean 'llama'"),
        (
            make_hub("llama", arguments={"hiden_size": 8}),
            TEXT,
            "unknown key 'hiden_size'; did you mean 'hidden_size'",
        ),
        (make_hub("t5"), TEXT, "transformers has no AutoModelForCausalLM for 't5'"),
        (
            make_hub("bert"),
            IMAGES,
            "transformers has no AutoModelForImageClassification for 'bert'",
        ),
        (TransformersConfig(name="no/such/folder"), TEXT, "name: 'no/such/folder': Repo id must"),
        (
            ModuleConfig.model_validate({"import": "nothing_like_it:Net"}),
            IMAGES,
            "import: nothing_like_it:Net: .*; write MODULE:CLASS, with",
        ),
        (
            ModuleConfig(target="torch.nn:Liner"),
            IMAGES,
            "import: module 'torch.nn' has no 'Liner'; did you mean 'Linear'?",
        ),
        (ModuleConfig(target="mine.Net"), IMAGES, "mine.Net: No module .*; write MODULE:CLASS"),
        (
            ModuleConfig(target="torch.nn:Linear", arguments={"widht": 3}),
            IMAGES,
            "^arguments: torch.nn:Linear: TypeError: .* unexpected keyword argument 'widht'",
        ),
        (
            make_timm(arguments={"patch_size": 4, "num_heads": 5}),
            IMAGES,
            "arguments: 'vit_tiny_patch16_224': dim should be divisible by num_heads",
        ),
        (
            ModuleConfig.model_validate({"target": "torch.nn:ReLU", "ffn": {"width": 3}}),
            IMAGES,
            "ffn.width: torch.nn:ReLU has no parameter `ffn_width`; add one, or set `match: none`",
        ),
        (
            ModuleConfig(target="builtins:list"),
            IMAGES,
            "^import: builtins:list is not a subclass of torch.nn.Module; it is the class builtins",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_mistakes_are_one_line_before_anything_runs(
    model: Model, signature: Any, message: str
) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        model.try_out(signature)
    assert "\n" not in str(caught.value)


def test_the_ffn_cannot_be_left_out() -> None:
    with pytest.raises(ValueError, match="cannot do without its FFN; remove `ffn`"):
        make_timm(ffn="none")
    with pytest.raises(ValueError, match="needs either `architecture` or `name`"):
        TransformersConfig()
    with pytest.raises(ValueError, match="does not take pairs"):
        make_hub("bert").check(LabelledTokens(50, 16, 3, pairs=True))


def test_a_class_can_build_its_attention_layers_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    class Net(nn.Module):
        def __init__(self, attention: type[Attention], shape: Any, classes: int) -> None:
            super().__init__()
            self.layer = attention(shape[-1], 2)
            self.head = nn.Linear(shape[-1], classes)

        def forward(self, images: Any) -> Any:
            return self.head(self.layer(images.flatten(1, 2)).mean(1))

    monkeypatch.setattr(torch.nn, "OwnNet", Net, raising=False)
    model = ModuleConfig(target="torch.nn:OwnNet", attention=PRESETS["belief2"])
    network = model.build(IMAGES, "meta")
    assert type(network.layer) is attn_layer("belief2")
    model.try_out(IMAGES)


class WithNamedAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(8, 16)
        self.mix = Renamed()
        self.head = nn.Linear(16, 10)

    def forward(self, images: Any) -> Any:
        return self.head(self.mix(self.embed(images.flatten(1, 2)))[0].mean(1))


def test_an_adapter_is_chosen_by_name_in_yaml() -> None:
    values = {"target": f"{__name__}:WithNamedAttention"}
    values |= {"adapters": {"helpers.replaced_models:Renamed": "Hub"}}
    network = ModuleConfig.model_validate(values).build(IMAGES)
    assert isinstance(network.mix.layer, Attention)
    assert network(torch.randn(2, 1, 8, 8)).shape == (2, 10)
    with pytest.raises(ValueError, match="'os:system' for 'a:B' is no name of an adapter; write"):
        ModuleConfig.model_validate(values | {"adapters": {"a:B": "os:system"}})
    with pytest.raises(ValueError, match=r"^adapters: WithNamed.* has no module of class 'a:B'"):
        ModuleConfig.model_validate(values | {"adapters": {"a:B": "Hub"}}).try_out(IMAGES)


def test_bert_does_not_see_the_tokens_that_it_predicts() -> None:
    network = make_hub("bert").build(TEXT).eval()
    tokens = torch.randint(0, 50, (2, 16))
    others = torch.cat([tokens[:, :8], (tokens[:, 8:] + 1) % 50], 1)
    before, after = network(tokens), network(others)
    assert torch.equal(before[:, :8], after[:, :8])
    assert not torch.equal(before[:, 8:], after[:, 8:])


def test_pretrained_weights_of_a_folder_remain(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(vocab_size=50, n_positions=16, n_embd=16, n_layer=1, n_head=2)
    theirs = transformers.GPT2LMHeadModel(config).eval()
    theirs.save_pretrained(tmp_path)
    tokens = torch.randint(0, 50, (2, 16))
    model = TransformersConfig(name=str(tmp_path))
    ours = model.build(TEXT).eval()
    torch.testing.assert_close(ours(tokens), theirs(tokens).logits, rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match="has 16 positions, fewer than context"):
        model.build(TokenStream(50, 17))


def test_pretrained_weights_of_timm_come_from_the_file(tmp_path: Path) -> None:
    import timm

    theirs = timm.create_model(
        "vit_tiny_patch16_224", img_size=8, in_chans=1, num_classes=10, **VIT
    )
    path = tmp_path / "vit.pth"
    torch.save(theirs.state_dict(), path)
    model = make_timm(pretrained=True, checkpoint=path)
    ours = model.build(IMAGES)
    name = "blocks.0.mlp.fc1.weight"
    assert torch.equal(ours.get_parameter(name), theirs.get_parameter(name))
    assert make_timm(pretrained=True).identity() == model.identity()
    with pytest.raises(ValueError, match=r"model.checkpoint: no file .*nothing\.pth"):
        make_timm(pretrained=True, checkpoint=tmp_path / "nothing.pth").check_files()


def test_a_batch_norm_of_single_values_is_no_mistake(monkeypatch: pytest.MonkeyPatch) -> None:
    def build(attention: Any, classes: int) -> nn.Module:
        head = nn.Linear(16, classes)
        return nn.Sequential(nn.Flatten(2), nn.AvgPool1d(4), nn.Flatten(), nn.BatchNorm1d(16), head)

    monkeypatch.setattr(torch.nn, "OwnNet", build, raising=False)
    assert ModuleConfig(target="torch.nn:OwnNet").try_out(IMAGES).shape == (1, 10)


@pytest.mark.parametrize("architecture", ["gpt2", "llama"])
def test_a_decoder_classifies_the_last_token_of_a_text(architecture: str) -> None:
    signature = LabelledTokens(50, 16, 3)
    model = make_hub(architecture, arguments=GPT2 if architecture == "gpt2" else DECODER)
    assert model.try_out(signature).shape == (1, 3)
    network = model.build(signature).eval()
    tokens = torch.randint(1, 50, (2, 16))
    tokens[0, 9:] = 0
    shorter = network(tokens[:1, :9], tokens[:1, :9] > 0)
    torch.testing.assert_close(network(tokens, tokens > 0)[:1], shorter)


@pytest.mark.parametrize("architecture", ["bert", "gpt2", "llama"])
def test_token_0_of_a_text_is_trained(architecture: str, caplog: pytest.LogCaptureFixture) -> None:
    arguments = GPT2 if architecture == "gpt2" else DECODER
    network = make_hub(architecture, arguments=arguments).build(TEXT)
    network(torch.zeros(1, 16, dtype=torch.long)).square().sum().backward()
    embedding = network.model.get_input_embeddings()
    assert embedding.padding_idx is None
    assert embedding.weight.grad[0].abs().max() > 0
    # The ids of the published tokenizers are no tokens here.
    assert network.model.config.eos_token_id is None
    assert not caplog.records
