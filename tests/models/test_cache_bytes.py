"""Bytes that decoding stores for each token: counted on the meta device, in records and tables."""

import json
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from helpers import attention_cases, gpt_cases
from helpers.fake_study import report, write_study
from helpers.gpt_cases import CONTEXT, VOCABULARY
from torch import nn

from lit_attn.attention.cache import count_bytes
from lit_attn.attention.layer import Attention
from lit_attn.attention.spec import PRESETS, AttentionSpec
from lit_attn.models.factory import count_cache_bytes
from lit_attn.models.language import GPT, GPTConfig, SequenceClassifierConfig
from lit_attn.models.translation import EncoderDecoderConfig
from lit_attn.schema.plugins import FILE_HASHES
from lit_attn.signatures import LabelledTokens, ParallelTokens, TokenStream

DIM, DEPTH, HEADS = 24, 4, 3
WIDTH = DIM // HEADS
SIZES: dict[str, Any] = {"dim": DIM, "depth": DEPTH, "heads": HEADS, "ffn": {"width": 32}}
SIGNATURE = TokenStream(VOCABULARY, CONTEXT)


def build(device: str = "meta", **changes: Any) -> GPT:
    model = GPTConfig.model_validate(SIZES | changes)
    network: GPT = model.build(SIGNATURE, device)
    return network.eval()


def count(**changes: Any) -> int | None:
    with torch.no_grad():
        return count_cache_bytes(build(**changes), SIGNATURE)


KEYS_AND_VALUES = 4 * 2 * DIM
"""Bytes of the key and the value of all heads in float32."""

NUMBERS: dict[str, tuple[dict[str, Any], float]] = {
    "standard": ({}, DEPTH * KEYS_AND_VALUES),
    "key heads": ({"attention": {"kv_heads": 1}}, DEPTH * KEYS_AND_VALUES / HEADS),
    "z": ({"attention": "belief2"}, DEPTH * KEYS_AND_VALUES * 1.5),
    "latent": (
        {"attention": {"latent": {"rank": 10, "rotary": 4}}, "positions": "none"},
        DEPTH * 4 * (10 + 4),
    ),
    "shared keys": (
        {"attention": {"layers": {"every": 2, "use": {"kv_from": "previous"}}}},
        DEPTH / 2 * KEYS_AND_VALUES,
    ),
    # Later tokens see the last 4 of 16 tokens.
    "window": ({"windows": [5]}, DEPTH * KEYS_AND_VALUES * 4 / CONTEXT),
    "windows": ({"windows": [5, None]}, DEPTH / 2 * KEYS_AND_VALUES * (1 + 4 / CONTEXT)),
    # The last 2 vectors of q, k and v stay, however many tokens there are.
    "convolution": (
        {"attention": {"convolution": {"kind": "short", "width": 3}}},
        DEPTH * (KEYS_AND_VALUES + 4 * 2 * 3 * DIM / CONTEXT),
    ),
    "sums": ({"attention": "linear"}, DEPTH * 4 * HEADS * (WIDTH * WIDTH + WIDTH) / CONTEXT),
}


@pytest.mark.parametrize("name", NUMBERS)
def test_the_bytes_follow_from_the_specification(name: str) -> None:
    changes, numbers = NUMBERS[name]
    assert count(**changes) == numbers


FITTING = {name: PRESETS[name] for name in gpt_cases.FITTING}
# Every choice of the presets once.
CHOICES = attention_cases.covering(FITTING.values())


@pytest.mark.parametrize("preset", [name for name in FITTING if FITTING[name] in CHOICES])
def test_the_count_equals_the_caches_of_a_decoded_sequence(preset: str) -> None:
    network = build("cpu", attention=PRESETS[preset])
    caches = network.trunk.new_caches()
    with torch.no_grad():
        for token in torch.zeros(2, CONTEXT, dtype=torch.long).split(1, dim=1):
            network(token, caches)
    assert count(attention=PRESETS[preset]) == round(count_bytes(caches) / CONTEXT)


def test_a_decoder_stores_its_tokens_and_those_of_the_source() -> None:
    signature = ParallelTokens(VOCABULARY, CONTEXT)
    model = EncoderDecoderConfig.model_validate(SIZES)
    with torch.no_grad():
        counted = count_cache_bytes(model.build(signature, "meta").eval(), signature)
    assert counted == 2 * DEPTH * KEYS_AND_VALUES


class Identity(nn.Module):
    """Layer of a user, whose cache only its own code knows."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


def test_networks_without_a_cache_have_no_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    mixer = AttentionSpec.model_validate({"kind": "module", "import": f"{__name__}:Identity"})
    assert count(attention=mixer) is None
    signature = LabelledTokens(VOCABULARY, CONTEXT, classes=2)
    classifier = SequenceClassifierConfig.model_validate(SIZES)
    assert count_cache_bytes(classifier.build(signature, "meta").eval(), signature) is None
    network = build()
    monkeypatch.setattr(type(network.trunk), "can_be_cached", False)
    assert count_cache_bytes(network, SIGNATURE) is None


@pytest.mark.parametrize("error", [ValueError("no cache"), NotImplementedError("no values")])
def test_only_code_of_a_user_may_have_no_cache(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error of our own code would be told as a network without a cache."""

    def fail(_: Attention) -> None:
        raise error

    monkeypatch.setattr(Attention, "new_cache", fail)
    with pytest.raises(type(error), match=str(error)):
        count()
    # Now this file, which has raised the error, counts as a plug-in.
    monkeypatch.setitem(FILE_HASHES, Path(__file__), b"hash")
    assert count() is None


def read_table(root: Path, cache_bytes: int | None) -> tuple[str, pd.DataFrame]:
    """Return the full table of a study and its table.csv; without bytes, its records are old."""
    folder = write_study(root / "runs")
    for path in folder.rglob("result.json"):
        content = json.loads(path.read_text())
        del content["cache_bytes"]
        if cache_bytes is not None:
            content["cache_bytes"] = cache_bytes
        path.write_text(json.dumps(content))
    tables = report(root)
    return (tables / "table.full.md").read_text(), pd.read_csv(tables / "table.csv")


def test_the_full_table_has_the_bytes_and_old_records_have_none(tmp_path: Path) -> None:
    text, table = read_table(tmp_path / "new", 12_345)
    assert "cache (bytes per token)" in text
    assert "12,345" in text
    assert set(table["cache_bytes"]) == {12_345}
    text, table = read_table(tmp_path / "old", None)
    assert "cache (bytes" not in text
    assert table["cache_bytes"].isna().all()
