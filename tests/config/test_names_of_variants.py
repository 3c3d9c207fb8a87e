"""A name is one mechanism in the shipped studies and in the evidence."""

import functools
import json
import tarfile
from collections import defaultdict
from pathlib import Path

import pytest
from helpers.paths import ROOT
from helpers.shipped import shipped_matrix

from lit_attn.ablate.plan import expand
from lit_attn.attention.spec import PRESETS, AttentionSpec
from lit_attn.config.study import read_studies
from lit_attn.schema.yaml_text import parse_plain

FILES = ("ablations.yaml", "experiments/papers/small.yaml", "lit_attn/starter/ablations.yaml")
UNNAMED = {"product", "paper-mgk-small", "paper-mgk-small-data", "zoology-attention"}
"""Folders of the evidence in which no variant has the name of a preset."""
ARCHIVES = sorted((ROOT / "reports" / "evidence").glob("*/records.tar.xz"))


def begins_with_a_preset(name: str) -> bool:
    """Return True for `belief2` and `belief2-without-zz`, False for `released-mgk-4`."""
    return any(name == preset or name.startswith(f"{preset}-") for preset in PRESETS)


@functools.cache
def find_attention_by_name() -> dict[str, dict[str, set[str]]]:
    """Return by name of a variant the studies of each attention layer that has this name."""
    layers: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    for file in FILES:
        for study, source in read_studies(ROOT / file).items():
            for variant in expand(source, Path("runs")).written:
                attention = getattr(variant.experiment.model, "attention", None)
                if isinstance(attention, AttentionSpec):
                    layers[variant.name][attention.model_dump_json()].add(study)
    return layers


def test_a_variant_with_the_name_of_a_preset_is_this_preset() -> None:
    named = find_attention_by_name()
    assert len(named.keys() & PRESETS.keys()) >= 40
    others = {
        name: studies
        for name in named.keys() & PRESETS.keys()
        for layer, studies in named[name].items()
        if layer != AttentionSpec.model_validate(name).model_dump_json()
    }
    assert others == {}


def test_a_name_that_begins_with_a_preset_is_one_attention_layer() -> None:
    named = find_attention_by_name()
    divided = {
        name: list(layers.values())
        for name, layers in named.items()
        if begins_with_a_preset(name) and len(layers) > 1
    }
    assert divided == {}


@pytest.mark.parametrize("archive", ARCHIVES, ids=lambda path: path.parent.name)
def test_a_record_with_the_name_of_a_preset_is_of_this_preset(archive: Path) -> None:
    checked = set()
    with tarfile.open(archive) as records:
        for member in records:
            path = Path(member.name)
            variant = path.parts[1].partition("@")[0] if len(path.parts) > 1 else ""
            if path.name != "config.yaml" or variant not in PRESETS or path.parts[:2] in checked:
                continue
            checked.add(path.parts[:2])
            file = records.extractfile(member)
            assert file is not None
            config = parse_plain(file.read().decode(), "text")
            assert config["variant"].partition("@")[0] == variant
            recorded = AttentionSpec.model_validate(config["experiment"]["model"]["attention"])
            assert recorded == AttentionSpec.model_validate(variant), path
    assert checked or archive.parent.name in UNNAMED


def test_a_seal_has_the_old_name_and_the_identity_of_a_renamed_variant() -> None:
    """The hash of a seal covers the names, so a seal keeps those of its day."""
    for study in ("text", "text-tuned", "text-longer-tuned"):
        path = ROOT / "reports" / "evidence" / study / "seals.json"
        sealed = json.loads(path.read_text())["entries"][-1]["variants"]
        matrix = shipped_matrix(study)
        identities = {v.name: v.cell(study, 0).fingerprint for v in matrix.written}
        assert sealed["attentionx"] == identities["attentionx-half"]
