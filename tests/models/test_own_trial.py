"""Trial of attention layers with parts of users, and of models of users, before they train."""

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers import studies
from torch import Tensor, nn

from lit_attn.attention.parts import Part
from lit_attn.attention.spec import PRESETS, AttentionSpec
from lit_attn.models.network_trial import try_network
from lit_attn.models.own_trial import PartsTrial, Use, try_use
from lit_attn.replace.external import ModuleConfig
from lit_attn.schema import plugins
from lit_attn.schema.base import Kind
from lit_attn.schema.errors import ConfigError
from lit_attn.signatures import TokenStream

CHEATS = Path(__file__).parent.parent / "helpers" / "cheating_parts.py"
CPU = torch.device("cpu")
FAMILIES = [base for base in Kind.__subclasses__() if issubclass(base, Part)]


@pytest.fixture(autouse=True, scope="module")
def _register() -> Iterator[None]:
    """Register the parts of the file for these tests alone."""
    spec = importlib.util.spec_from_file_location("cheating_parts", CHEATS)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["cheating_parts"] = module
    spec.loader.exec_module(module)
    yield
    del sys.modules["cheating_parts"]
    for base in FAMILIES:
        for kind in [kind for kind in base.family if kind.startswith("cheating-")]:
            del base.family[kind]


def use(is_causal: bool = True, **parts: Any) -> Use:
    kinds = {family: f"cheating-{name}" for family, name in parts.items()}
    return Use(AttentionSpec.model_validate(kinds), 16, 2, 12, is_causal, has_padding=False)


LATER = "this task needs causal order, but a later token changes an earlier output"
SAMPLE = "a sample of a batch changes the output of another sample"


@pytest.mark.parametrize(
    ("family", "name", "reason"),
    [
        ("residual", "NextToken", LATER),
        ("residual", "HiddenNextToken", LATER),
        ("residual", "TrainedNextToken", f"in training {LATER}"),
        ("residual", "LongNextToken", LATER),
        ("residual", "OddNextToken", LATER),
        ("residual", "BatchMean", SAMPLE),
        ("residual", "BatchSize", "the size of the batch changes the output of a sample"),
        ("residual", "NotFinite", "returns numbers that are not finite"),
        ("gate", "LateGate", LATER),
        ("normaliser", "LateQueries", LATER),
        ("values", "LateValues", LATER),
    ],
)
def test_a_part_that_cheats_is_refused_in_one_line(family: str, name: str, reason: str) -> None:
    with pytest.raises(ConfigError) as caught:
        try_use(use(**{family: name}), "fp32", CPU)
    message = str(caught.value)
    (line,) = message.splitlines()
    assert line.startswith(f"attention: {family} 'cheating-{name}' (class {name}, {CHEATS}:")
    assert line.endswith(reason)


def test_a_part_that_fails_names_its_line() -> None:
    with pytest.raises(ConfigError, match=r"class Failing, .*: RuntimeError: no kernel"):
        try_use(use(residual="Failing"), "fp32", CPU)


def test_only_the_part_that_cheats_is_named() -> None:
    with pytest.raises(ConfigError, match=r"^attention: gate 'cheating-LateGate' ") as caught:
        try_use(use(residual="Honest", gate="LateGate"), "fp32", CPU)
    assert "Honest" not in str(caught.value)


def test_a_part_passes_with_what_its_task_allows() -> None:
    try_use(use(residual="Honest"), "fp32", CPU)
    # Without an order, every token may be read; other samples never.
    try_use(use(is_causal=False, residual="NextToken"), "fp32", CPU)
    with pytest.raises(ConfigError, match=SAMPLE):
        try_use(use(is_causal=False, residual="BatchMean"), "fp32", CPU)


def list_shipped() -> list[AttentionSpec]:
    """Return presets and layers of one part, which together have every shipped part."""
    specs: list[AttentionSpec] = []
    parts: set[Part] = set()
    for spec in PRESETS.values():
        if not parts.issuperset(spec.parts.values()):
            specs.append(spec)
            parts.update(spec.parts.values())
    kinds = {(type(part), part.kind) for part in parts}
    for base in FAMILIES:
        for kind, member in base.family.items():
            is_shipped = member.__module__.startswith("lit_attn.")
            if is_shipped and (member, kind) not in kinds:
                specs.append(AttentionSpec.model_validate({base.family_name(): kind}))
    return specs


def test_shipped_parts_and_presets_pass() -> None:
    """A false alarm would blame a user's part for a shipped one."""
    for spec in list_shipped():
        torch.manual_seed(0)
        PartsTrial(Use(spec, 16, 4, 6, is_causal=True, has_padding=True), ["residual"]).run()


def test_a_study_refuses_the_part_before_the_first_cell(tmp_path: Path) -> None:
    body = "baseline: a\ncells: {a: {}, b: {attention: {residual: cheating-BatchMean}}}"
    with pytest.raises(ConfigError, match=SAMPLE) as caught:
        studies.variants(tmp_path, body)
    place = f"{tmp_path / 'ablations.yaml'}:8: tiny: variant 'b': model: attention: residual "
    assert str(caught.value).startswith(place)


class Block(nn.Module):
    """Causal attention; `leak` chooses a mistake."""

    def __init__(self, attention: Any, leak: str) -> None:
        super().__init__()
        self.leak = leak
        self.attn = attention(8, 2)
        self.norm = nn.BatchNorm1d(8) if leak == "norm" else nn.Identity()
        # Zero at the start, as the last layer of many networks.
        self.scale = nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.leak == "next" and self.training:
            x = x + x.roll(-1, 1)
        elif self.leak == "samples":
            x = x - x.mean(0)
        x = self.norm(x.mT).mT
        mixed: Tensor = x + self.scale * self.attn(x, is_causal=True)
        return mixed


class Net(nn.Module):
    """Language model of a user."""

    def __init__(
        self,
        vocabulary: int,
        context: int,
        attention: Any,
        leak: str = "",
        takes_length: bool = True,
    ) -> None:
        super().__init__()
        self.context = None if takes_length else context
        self.embed = nn.Embedding(vocabulary, 8)
        blocks = [Block(attention, place) for place in ("", leak, "")]
        self.blocks = nn.Sequential(*blocks)
        self.dropout = nn.Dropout(0.5)
        self.head = nn.Linear(8, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        assert self.context in (None, tokens.shape[1])
        logits: Tensor = self.head(self.dropout(self.blocks(self.embed(tokens))))
        return logits


class NextNet(Net):
    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens).roll(-1, 1)


def try_own_network(name: str, **arguments: Any) -> None:
    written = {"kind": "module", "import": f"{__name__}:{name}", "arguments": arguments}
    data: Any = SimpleNamespace(signature=lambda: TokenStream(20, 12))
    try_network(ModuleConfig.model_validate(written), data, CPU)


@pytest.mark.parametrize(
    ("name", "leak", "message"),
    [
        ("Net", "next", rf"model: class Block, .*: in training {LATER}"),
        ("Net", "samples", rf"model: class Block, .*: {SAMPLE}"),
        ("Net", "norm", rf"model: class Block, .*: in training {SAMPLE}"),
        ("NextNet", "", rf"model: class NextNet, .*: {LATER}"),
    ],
)
def test_a_network_that_cheats_is_refused_with_its_class(
    name: str, leak: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(plugins.FILE_HASHES, Path(__file__), "")
    for takes_length in (True, False):
        with pytest.raises(ConfigError, match=message) as caught:
            try_own_network(name, leak=leak, takes_length=takes_length)
        assert f", {__file__}:" in str(caught.value)
        assert "\n" not in str(caught.value)


def test_an_honest_network_passes_with_dropout() -> None:
    try_own_network("Net")
    try_own_network("Net", takes_length=False)
