"""The converter of released weights: logits of the original classes, file formats, bad input."""

import importlib
import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.commands import run_python
from helpers.paths import EXPERIMENTS, ROOT
from safetensors.torch import load_file, save_file
from torch import Tensor

from lit_attn.hub import load_exported
from lit_attn.schema.errors import ConfigError
from lit_attn.schema.plugins import load_parts

transformers = pytest.importorskip("transformers")
load_parts([EXPERIMENTS / "released" / "released_weights.py"])
released = importlib.import_module("released_weights")

SIZES: dict[str, Any] = {
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "intermediate_size": 40,
    "vocab_size": 60,
    "max_position_embeddings": 32,
}
COMPOSED = {"n_layer": 1, "n_head": 4, "dim": 16, "vocab_size": 20, "block_size": 8}


def save_neox(folder: Path, **changes: Any) -> torch.nn.Module:
    """Save a GPT-NeoX with random weights, also in norms and biases, and return it in float64."""
    torch.manual_seed(0)
    config = transformers.GPTNeoXConfig(**SIZES | changes)
    return save_random(transformers.GPTNeoXForCausalLM(config), folder)


def save_gpt2(folder: Path, **changes: Any) -> torch.nn.Module:
    """Save a GPT-2 with random weights, also in norms and biases, and return it in float64."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"vocab_size": 60, "n_positions": 32, "n_embd": 48, "n_layer": 2}
    config = transformers.GPT2Config(**sizes | {"n_head": 3} | changes)
    return save_random(transformers.GPT2LMHeadModel(config), folder)


def save_random(model: Any, folder: Path) -> torch.nn.Module:
    """Change all weights of a model at random, save it, and return it in float64."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.2)
    model.save_pretrained(folder)
    float64: torch.nn.Module = model.double().eval()
    return float64


def tokens() -> Tensor:
    return torch.randint(60, (2, 20), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def assert_converts(model: torch.nn.Module, folder: Path, out: Path) -> torch.nn.Module:
    """Convert `folder` and compare the logits with those of `model`; return the network."""
    assert released.main([str(folder), str(out)]) == 0
    network = load_exported(out).double()
    torch.testing.assert_close(network(tokens()), model(tokens()).logits, rtol=1e-10, atol=1e-10)
    return network


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"use_parallel_residual": False},
        {"hidden_act": "gelu_new", "attention_bias": False},
        {"tie_word_embeddings": True},
        {
            "rope_parameters": {
                "rope_type": "default",
                "partial_rotary_factor": 0.5,
                "rope_theta": 50,
            }
        },
        {
            "rope_parameters": {
                "rope_type": "default",
                "partial_rotary_factor": 1.0,
                "rope_theta": 1e5,
            }
        },
    ],
)
def test_pythia_has_the_logits_of_transformers(changes: dict[str, Any], tmp_path: Path) -> None:
    model = save_neox(tmp_path / "source", **changes)
    assert_converts(model, tmp_path / "source", tmp_path / "out")


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"n_inner": 40, "activation_function": "relu", "layer_norm_epsilon": 1e-3},
        {"tie_word_embeddings": False},
    ],
)
def test_gpt2_has_the_logits_of_transformers(changes: dict[str, Any], tmp_path: Path) -> None:
    model = save_gpt2(tmp_path / "source", **changes)
    assert_converts(model, tmp_path / "source", tmp_path / "out")


def test_the_released_files_of_gpt2_are_read(tmp_path: Path) -> None:
    """The files lack the part `transformer.` of the names and the head, and have masks."""
    source = tmp_path / "gpt2"
    model = save_gpt2(source)
    state = load_file(source / "model.safetensors")
    released_state = {name.removeprefix("transformer."): state[name] for name in state}
    released_state.pop("lm_head.weight", None)
    released_state["h.0.attn.bias"] = torch.ones(1, 1, 32, 32)
    released_state["h.0.attn.masked_bias"] = torch.tensor(-1e4)
    save_file(released_state, source / "model.safetensors")
    assert_converts(model, source, tmp_path / "out")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scale_attn_weights": False}, "scale_attn_weights: false is not supported"),
        (
            {"scale_attn_by_inverse_layer_idx": True},
            "scale_attn_by_inverse_layer_idx: true is not supported",
        ),
        ({"activation_function": "silu"}, "activation_function: 'silu' is not supported"),
    ],
)
def test_a_gpt2_without_an_equal_is_refused(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    save_gpt2(tmp_path / "source", **changes)
    with pytest.raises(ConfigError, match=message):
        released.convert(tmp_path / "source", tmp_path / "out")


def test_the_released_files_of_pythia_are_read(tmp_path: Path) -> None:
    """The folder has older keys, masks, and two files of weights; the head can have a new name."""
    source = tmp_path / "pythia"
    model = save_neox(source)
    config = json.loads((source / "config.json").read_text())
    config |= {"rotary_pct": 0.25, "rotary_emb_base": 10_000}
    del config["rope_parameters"]
    (source / "config.json").write_text(json.dumps(config))
    state = load_file(source / "model.safetensors")
    state["lm_head.weight"] = state.pop("embed_out.weight")
    state["gpt_neox.layers.0.attention.bias"] = torch.ones(1, 1, 32, 32, dtype=torch.bool)
    state["gpt_neox.layers.0.attention.masked_bias"] = torch.tensor(-1e9)
    state["gpt_neox.layers.0.attention.rotary_emb.inv_freq"] = torch.ones(2)
    names = sorted(state)
    files = {name: f"part-{number % 2}.bin" for number, name in enumerate(names)}
    for file in set(files.values()):
        torch.save({n: state[n] for n in names if files[n] == file}, source / file)
    index = {"weight_map": files}
    (source / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    (source / "model.safetensors").unlink()
    (source / "tokenizer.json").write_text("{}")
    assert_converts(model, source, tmp_path / "out")
    assert (tmp_path / "out" / "tokenizer.json").read_text() == "{}"
    assert "# pythia" in (tmp_path / "out" / "README.md").read_text()


def test_half_precision_is_stored_as_it_is(tmp_path: Path) -> None:
    save_neox(tmp_path / "source")
    weights = tmp_path / "source" / "model.safetensors"
    save_file({name: tensor.half() for name, tensor in load_file(weights).items()}, weights)
    released.convert(tmp_path / "source", tmp_path / "out")
    converted = load_file(tmp_path / "out" / "model.safetensors")
    assert {tensor.dtype for tensor in converted.values()} == {torch.float16}


def test_released_sizes_have_the_published_numbers_of_parameters() -> None:
    """Pythia-6.9B has 6,857,302,016 parameters (its model card)."""
    from lit_attn.models import factory

    sizes = {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32}
    sizes |= {"intermediate_size": 16_384, "vocab_size": 50_432, "max_position_embeddings": 2048}
    config = {"model_type": "gpt_neox", "rotary_pct": 0.25, **sizes}
    experiment = released.read_cell(config, Path("config.json"), "pythia-6.9b").experiment
    network = factory.build(experiment.model, experiment.data, "meta")
    assert factory.count(network) == 6_857_302_016


def test_windows_follow_the_class() -> None:
    """A window of DCPythia shows one key more than one of DCFormer."""
    keys = {"window_size": 4, "intermediate_size": 8, **COMPOSED}
    assert released.dcpythia_model(keys)["windows"] == [5, None]
    assert released.dcformer_model(keys)["windows"] == [4, None]
    lgll = released.dcformer_model({**keys, "window_type": "LGLL"})
    assert lgll["windows"] == [4, None, 4, 4]
    assert released.dcformer_model({**keys, "window_size": None})["windows"] == [None]


def composed_state() -> dict[str, Tensor]:
    """Return zeros under the names of a released class with separate q, k and v."""
    shapes = {
        "tok_embeddings.weight": (20, 16),
        "norm.weight": (16,),
        "output.weight": (20, 16),
        "layers.0.attention.wo.weight": (16, 16),
        "layers.0.attention_norm.weight": (16,),
        "layers.0.ffn_norm.weight": (16,),
        "layers.0.feed_forward.w1.weight": (24, 16),
        "layers.0.feed_forward.w2.weight": (16, 24),
        "layers.0.feed_forward.w3.weight": (24, 16),
        "layers.0.attention.dyn_w_proj.dw1": (16, 1, 4, 16),
        "layers.0.attention.dyn_w_proj.qkw": (1, 4, 16, 4, 4),
        "layers.0.attention.dyn_w_proj.dd": (16, 1, 16),
        "layers.0.attention.dyn_w_proj.dw_m": (1,),
    }
    shapes |= {f"layers.0.attention.w{letter}.weight": (16, 16) for letter in "qkv"}
    state = {name: torch.zeros(shape) for name, shape in shapes.items()}
    state["layers.0.attention.wk.weight"] += 1
    return state


def save_dcformer(folder: Path, **changes: Any) -> None:
    folder.mkdir()
    config = {"model_type": "dcformer", "intermediate_size": 24, **COMPOSED, **changes}
    (folder / "config.json").write_text(json.dumps(config))
    save_file(composed_state(), folder / "model.safetensors")


def test_separate_projections_of_dcformer_are_joined(tmp_path: Path) -> None:
    save_dcformer(tmp_path / "source")
    network = load_exported(released.convert(tmp_path / "source", tmp_path / "out"))
    q, k, v = network.trunk.blocks[0].attn.qkv.weight.chunk(3)
    assert (q == 0).all()
    assert (k == 1).all()
    assert (v == 0).all()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "dcpythi"}, "model_type: unknown 'dcpythi'; did you mean 'dcpythia'?"),
        ({"mgate": True}, "mgate: gates of the feed-forward network are not supported"),
        ({"n_local_heads": 2}, "n_local_heads: shared keys and values are not supported"),
        ({"use_dcmha": False}, "use_dcmha: false is not supported"),
        ({"window_type": "LGL"}, "window_type: unknown 'LGL'; did you mean 'LGLL'?"),
        ({"dim": 18}, "heads: 4 heads do not divide dim 18"),
        ({"dim": 32}, "the weights do not fit .*: size mismatch for trunk.tokens.weight"),
        ({"n_layer": 2}, "the weights lack layers.1.attention.dyn_w_proj.dw1"),
    ],
)
def test_what_cannot_be_converted_is_one_line(
    changes: dict[str, Any], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_dcformer(tmp_path / "source", **changes)
    assert released.main([str(tmp_path / "source"), str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    with pytest.raises(ConfigError, match=message):
        raise ConfigError(error)
    assert not (tmp_path / "out").exists()


def test_missing_and_torn_files_are_one_line(tmp_path: Path) -> None:
    save_dcformer(tmp_path / "source")
    source = tmp_path / "source"
    out = tmp_path / "out"
    (source / "model.safetensors").write_bytes(b"torn")
    with pytest.raises(ConfigError, match=r"model.safetensors: "):
        released.convert(source, out)
    (source / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"has no model.safetensors and no pytorch_model.bin"):
        released.convert(source, out)
    (source / "config.json").write_text("[")
    with pytest.raises(ConfigError, match=r"config.json: not JSON"):
        released.convert(source, out)
    (source / "config.json").write_text('{"model_type": "dcformer"}')
    with pytest.raises(ConfigError, match=r"config.json: lacks the key 'vocab_size'"):
        released.convert(source, out)
    out.mkdir()
    (out / "kept").touch()
    save_dcformer(tmp_path / "second")
    with pytest.raises(ConfigError, match=r"out: is not empty"):
        released.convert(tmp_path / "second", out)


def test_unsupported_positions_and_activations_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="rope_type: 'yarn'"):
        released.neox_model({"rope_parameters": {"rope_type": "yarn"}})
    with pytest.raises(ValueError, match="hidden_act: 'silu'"):
        released.neox_model({"hidden_act": "silu"})


@pytest.mark.slow
def test_the_commands_of_the_page_run(tmp_path: Path) -> None:
    """A text of one task stands for the 74 tasks, which are published elsewhere."""
    page = (ROOT / "docs" / "released-weights.md").read_text()
    study, script, commands = (
        re.findall(rf"```{language}\n(.*?)```", page, re.DOTALL)[0]
        for language in ("yaml", "python", "console")
    )
    (tmp_path / "experiments").symlink_to(EXPERIMENTS)
    (tmp_path / "small.yaml").write_text(study)
    tasks = tmp_path / "DCFormer" / "data" / "synthetic_dataset.jsonl"
    tasks.parent.mkdir(parents=True)
    tasks.write_text(json.dumps({"task_id": "task0", "texts": "Ann has a kind of [ animal ]\n"}))
    (tmp_path / "random_weights.py").write_text(script)
    for line in ("python random_weights.py", *commands.splitlines()):
        line = line.replace("lit-attn", "python -m lit_attn")
        arguments = []
        for word in shlex.split(line)[1:]:
            arguments += [str(path) for path in tmp_path.glob(word)] or [word]
        finished = run_python(tmp_path, *arguments)
        assert finished.returncode == 0, line + finished.stdout + finished.stderr
    (scored,) = tmp_path.glob("runs/small-language-models/dcmha/*/published-tasks/overall.csv")
    # One answer has no standard error.
    assert scored.read_text().endswith(",1,\n")
    assert (tmp_path / "converted" / "heads" / "head_diversity.csv").exists()
    (composition,) = tmp_path.glob("runs/small-language-models/dcmha/*/heads/composition.csv")
    assert "query-projection" in composition.read_text()
