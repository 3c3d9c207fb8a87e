"""Growth of an attention layer's memory with the number of tokens, measured in bytes."""

from pathlib import Path

import pytest
import torch
from helpers import attention_cases
from helpers.tables import read_table

from lit_attn.attention import formed
from lit_attn.attention.compose import NoComposeConfig
from lit_attn.attention.formed import ONE_CHUNK_UP_TO
from lit_attn.attention.linear import LinearConfig
from lit_attn.attention.mixture import MixtureConfig
from lit_attn.attention.spec import PRESETS, AttentionSpec
from lit_attn.bench import attention
from lit_attn.bench.__main__ import main
from lit_attn.bench.measure import Footprint, Setup, Step, measure_memory

DIM, HEADS = 24, 3


def forms_logits(spec: AttentionSpec) -> bool:
    hard = isinstance(spec.similarity, MixtureConfig) and spec.similarity.assignment == "hard"
    return hard or not isinstance(spec.compose, NoComposeConfig)


CHUNKED = [name for name, spec in PRESETS.items() if forms_logits(spec)]
LINEAR = [name for name, spec in PRESETS.items() if isinstance(spec.similarity, LinearConfig)]


def has_matrix(spec: AttentionSpec) -> bool:
    """Return True for a bias of pairs, and for weights that are formed, filtered or counted."""
    is_formed = spec.normaliser.kind not in ("softmax", "sigmoid", "offset-softmax", "sink")
    is_counted = spec.similarity.counts_queries
    return is_formed or is_counted or spec.bias.kind != "none" or spec.filter.kind != "none"


MATRIX = [name for name, spec in PRESETS.items() if has_matrix(spec)]
# Every choice of the other presets once.
OTHERS = {name: PRESETS[name] for name in PRESETS if name not in CHUNKED + LINEAR + MATRIX}
CHOICES = attention_cases.covering(OTHERS.values())


def measure(name: str, tokens: int, causal: bool = False) -> Footprint:
    torch.manual_seed(0)
    layer = attention.build_layer(name, attention.Shape(1, tokens, DIM, HEADS))
    return measure_memory(Step(layer, torch.randn(1, tokens, DIM), causal), "cpu")


def logits_bytes(tokens: int) -> int:
    """Return the bytes of one n x n x H tensor."""
    return 4 * HEADS * tokens**2


def saved_bytes(name: str, tokens: int, causal: bool) -> int:
    """Return the bytes that autograd saves for the backward pass; each storage counts once."""
    shape = attention.Shape(1, tokens, DIM, HEADS, causal=causal)
    layer, x = attention.build_layer(name, shape), torch.randn(1, tokens, DIM)
    storages = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = layer(x, is_causal=causal)
    out.sum().backward()
    return sum(storage.nbytes() for storage in storages.values())


@pytest.mark.slow
@pytest.mark.parametrize("name", CHUNKED)
def test_chunks_save_no_tensor_of_n_by_n_by_heads(name: str) -> None:
    """The saved bytes are a small part of one such tensor and grow with n."""
    n = 1024
    assert n > 2 * ONE_CHUNK_UP_TO
    saved = saved_bytes(name, n, causal=True)
    assert saved < 0.2 * logits_bytes(n)
    assert saved < 2.05 * saved_bytes(name, n // 2, causal=True)


@pytest.mark.parametrize("name", ["smgk-hard", "talking-heads", "dcmha-gate"])
def test_the_peak_of_chunks_grows_with_n(name: str) -> None:
    half, full = measure(name, 512), measure(name, 1024)
    assert full.peak < 2.1 * half.peak
    assert full.held < 2.1 * half.held
    assert full.held < 0.2 * logits_bytes(1024)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", LINEAR)
def test_linear_keys_grow_with_n(name: str, causal: bool) -> None:
    half, full = measure(name, 1024, causal), measure(name, 2048, causal)
    assert 1.8 * half.peak < full.peak < 2.1 * half.peak
    assert full.peak < 0.3 * logits_bytes(2048)
    assert saved_bytes(name, 2048, causal) < 2.05 * saved_bytes(name, 1024, causal)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in OTHERS if OTHERS[name] in CHOICES])
def test_a_single_kernel_keeps_no_logits_bytes(name: str) -> None:
    half, full = measure(name, 512), measure(name, 1024)
    assert full.held < 2.1 * half.held
    assert full.peak < logits_bytes(1024)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", ["belief2", "mgk", "smgk"])
def test_joined_keys_grow_with_n(name: str, causal: bool) -> None:
    half, full = measure(name, 1024, causal), measure(name, 2048, causal)
    assert full.held < 2.05 * half.held
    assert full.peak < 2.05 * half.peak


def test_the_table_contains_every_length(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    arguments = "memory --presets linear --tokens 256 512 1024 --dim 24 --heads 3 --rounds 2"
    assert main([*arguments.split(), "--out", str(tmp_path)]) == 0
    text = (tmp_path / "memory-cpu.md").read_text()
    assert text in capsys.readouterr().out
    rows = read_table(tmp_path / "memory-cpu.csv")
    assert [(row["causal"], row["tokens"]) for row in rows] == [
        (causal, tokens) for causal in ("False", "True") for tokens in ("256", "512", "1024")
    ]
    assert int(rows[2]["peak"]) == pytest.approx(2 * int(rows[1]["peak"]), rel=0.05)
    assert int(rows[2]["logits"]) == 4 * 3 * 1024**2


@pytest.mark.gpu
@pytest.mark.parametrize("name", [*CHUNKED, *LINEAR])
def test_memory_on_a_gpu(name: str) -> None:
    """The peak grows with n; a chunk of formed weights needs a multiple of its logits."""
    shapes = [attention.Shape(1, n, 384, 6) for n in (4096, 8192)]
    setup = Setup("cuda", torch.bfloat16, rounds=2)
    half, full = (attention.measure_layer(name, s, setup) for s in shapes)
    assert full.peak < 2.2 * half.peak
    of_chunks = 16 * formed.FEW_BYTES if name in CHUNKED else 0
    assert full.peak < max(full.logits, of_chunks)
