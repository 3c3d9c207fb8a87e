"""The decoding benchmark: bytes of caches, and ratios within a round."""

import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.paths import ROOT
from helpers.tables import read_table

from lit_attn.ablate.plan import expand
from lit_attn.attention import cache
from lit_attn.bench import decoding
from lit_attn.bench.__main__ import main
from lit_attn.bench.measure import Setup
from lit_attn.config.study import read_studies
from lit_attn.models.language import GPTConfig

DIM, HEADS, DEPTH, PROMPT, GENERATED = 24, 3, 2, 7, 3
WIDTH = DIM // HEADS
SHAPE = decoding.Shape(
    batch=2,
    generate=GENERATED,
    dim=DIM,
    depth=DEPTH,
    heads=HEADS,
    vocabulary=11,
    windows=(4, None),
)
SMALL = (
    f"decoding --device cpu --batch 2 --tokens {PROMPT} --generate {GENERATED} --dim {DIM} "
    f"--depth {DEPTH} --heads {HEADS} --vocabulary 11 --windows 4 none --rounds 2"
).split()


def measure(*names: str) -> list[decoding.Row]:
    return decoding.run(names, [PROMPT], SHAPE, Setup("cpu", torch.float32, rounds=2))


def cells(printed: str, name: str) -> list[str]:
    (line,) = (line for line in printed.splitlines() if line.startswith(f"| {name} |"))
    return [cell.strip() for cell in line.strip("|").split("|")]


def make_decoder(name: str, shape: decoding.Shape = SHAPE) -> decoding.Decoder:
    return decoding.Decoder(name, shape, PROMPT, "cpu", torch.double)


@pytest.mark.parametrize("name", ["standard", "mgk", "dcmha/windows"])
def test_the_timed_calls_decode_greedily(name: str) -> None:
    """The model returns the same tokens with its caches as without them."""
    timed = make_decoder(name)
    decoded = []
    timed.prefill()
    for step in range(GENERATED):
        decoded.append(timed.last)
        timed.generate = 1
        timed.decode()
        assert all(cache.position == PROMPT + step + 1 for cache in timed.caches)
    sequence = timed.prompt
    with torch.no_grad():
        for token in decoded:
            assert torch.equal(timed.network(sequence)[:, -1:].argmax(-1), token)
            sequence = torch.cat([sequence, token], dim=1)


def test_decoding_continues_from_the_prompt_of_its_round() -> None:
    timed = make_decoder("standard")
    for _ in range(2):
        timed.prefill()
        timed.decode()
        assert [cache.position for cache in timed.caches] == [PROMPT + GENERATED] * DEPTH


def test_ratios_are_within_a_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test computes every column from fixed seconds."""
    fixed_seconds = {
        "prefill": {"standard": [8, 9], "standard/windows": [7, 7], "xsa/windows": [4, 4]},
        "decode": {"standard": [3, 6], "standard/windows": [1.5, 3], "xsa/windows": [6, 12]},
    }

    def interleaved(
        calls: dict[str, Callable[[], None]], rounds: int, *_: str
    ) -> dict[str, list[float]]:
        for call in calls.values():
            call()
        assert rounds == 1
        return {name: [fixed_seconds[name.split()[0]][name.split()[1]].pop(0)] for name in calls}

    monkeypatch.setattr(decoding.measure, "measure_seconds", interleaved)
    standard, same, xsa = measure("xsa/windows")
    assert [row.name for row in (standard, same)] == ["standard", "standard/windows"]
    assert standard.ratio == (1, 0)
    assert standard.beside is None
    assert same.ratio == (2, 0)
    assert (xsa.ratio, xsa.beside) == ((0.5, 0), (0.25, 0))
    assert xsa.prefill == (4, 0)
    assert xsa.token.median == 9 / GENERATED
    assert xsa.rate == 2 * GENERATED / 9
    assert standard.prefill == (8.5, 1.5)


@pytest.mark.parametrize(("name", "numbers"), [("standard", 2 * DIM), ("belief2", 3 * DIM)])
def test_cache_bytes(name: str, numbers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bytes do not depend on the batch; tests/attention/test_decoding.py has the mechanisms."""
    monkeypatch.setattr(cache, "SPARE", 0)
    assert measure(name)[-1].cache == DEPTH * (PROMPT + GENERATED) * 4 * numbers


def test_cache_bytes_of_running_sums() -> None:
    assert measure("mlk")[-1].cache == DEPTH * 4 * HEADS * (WIDTH * WIDTH + WIDTH)


@pytest.mark.parametrize("name", ["xsa", "dcmha"])
def test_a_window_bounds_the_cache_of_its_layer(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first layer stores the last 3 tokens, and the second layer stores all 10."""
    monkeypatch.setattr(cache, "SPARE", 0)
    full, windowed = measure(name, name + "/windows")[-2:]
    assert windowed.cache == full.cache * (3 + 10) // 20


@pytest.mark.slow
def test_one_model_at_a_time_is_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """The largest models of the paper do not fit on a device together."""
    built: list[weakref.ref[decoding.Decoder]] = []

    class Watched(decoding.Decoder):
        def __init__(self, *arguments: Any) -> None:
            gc.collect()
            assert [decoder() for decoder in built] == [None] * len(built)
            super().__init__(*arguments)
            built.append(weakref.ref(self))

    monkeypatch.setattr(decoding, "Decoder", Watched)
    rows = decoding.run(["dcmha/windows"], [6], SHAPE, Setup("cpu", torch.float32, 2))
    assert (len(built), len(rows)) == (6, 3)


def test_the_models_are_those_of_table_6() -> None:
    """The FFN widths are those of LLaMA 7B, 13B, 33B and of Transformer++ 2.8B and 405M."""
    for dim, width in ((4096, 11008), (5120, 13824), (6656, 17920), (2560, 6912), (1024, 2816)):
        model = decoding.configure("dcmha/windows", SHAPE._replace(dim=dim, heads=dim // 64))
        assert model.ffn is not None
        assert (model.ffn.width, model.ffn.activation) == (width, "swiglu")
    assert (model.positions, model.norm, model.head) == ("rotary", "rmsnorm", "untied")
    assert model.windows == (4, None)
    assert decoding.configure("dcmha", SHAPE).windows == (None,)


def test_the_training_study_of_table_6_has_the_same_widths(tmp_path: Path) -> None:
    studies = read_studies(ROOT / "ablations.yaml").values()
    sizes = [study for study in studies if study.family == "dcmha-overhead"]
    variants = [variant for size in sizes for variant in expand(size, tmp_path).variants]
    widths = {}
    for variant in variants:
        model = variant.experiment.model
        assert isinstance(model, GPTConfig)
        assert model.ffn is not None
        if model.attention == decoding.PRESETS["standard"]:
            widths[model.dim] = model.ffn.width
            configured = decoding.configure(
                "standard", SHAPE._replace(dim=model.dim, heads=model.heads)
            )
            assert configured.ffn == model.ffn
    assert sorted(widths) == [1024, 1536, 2048]


def test_the_table_states_its_conditions(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    arguments = [*SMALL, "--presets", "belief2", "dcmha/windows", "--clock", "cpu"]
    assert main([*arguments, "--tokens", "5", "6", "--out", str(tmp_path)]) == 0
    text = (tmp_path / "decoding-cpu.md").read_text()
    assert text in capsys.readouterr().out
    for text_part in (
        "load average",
        "CPU time",
        f"{DEPTH} layers, width {DIM}, {HEADS} heads, vocabulary of 11, batch 2",
        "the layers in turn see 4 tokens, all",
        f"then {GENERATED} tokens",
        "2 interleaved rounds",
    ):
        assert text_part in text
    header, rule = (line for line in text.splitlines() if line.startswith(("| name", "| ---")))
    assert header.count("|") == rule.count("|") == len(cells(text.split("| 6 |")[0], "belief2")) + 1
    rows = read_table(tmp_path / "decoding-cpu.csv")
    names = ["standard", "standard/windows", "belief2", "dcmha/windows"]
    assert [(row["tokens"], row["name"]) for row in rows] == [
        (tokens, name) for tokens in "56" for name in names
    ]
    for row in rows:
        for column in ("prefill", "prefill_iqr", "token", "token_iqr", "rate"):
            assert float(row[column]) >= 0
        assert (row["beside"] != "") == row["name"].endswith("/windows")
        assert row["torch"] == torch.__version__
    assert int(rows[4]["cache"]) - int(rows[0]["cache"]) == DEPTH * 4 * 2 * DIM


def test_without_windows_there_is_no_baseline_with_windows() -> None:
    assert [row.name for row in measure("xsa")] == ["standard", "xsa"]


def test_models_decode_in_half_precision(capsys: pytest.CaptureFixture[str]) -> None:
    names = ["belief2", "mgk-hard", "mlk", "talking-heads", "dcmha/windows"]
    assert main([*SMALL, "--presets", *names, "--dtype", "float16"]) == 0
    assert "float16" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--presets dcmah", "did you mean 'dcmha'?"),
        ("--presets dcmha/window", "did you mean 'dcmha/windows'?"),
        ("--presets mgk/half-heads", "unknown preset 'mgk/half-heads'"),
        ("--presets mlk/windows", "attention: window: linear keys never form the logits"),
        ("--windows 256 nome", "'nome' is not a number from 1 on"),
        ("--windows 0", "'0' is not a number from 1 on"),
        ("--dim 10 --heads 3", "3 heads do not divide a width of 10"),
        ("--dim 9 --heads 3", "heads of an even width, not 3"),
        ("--heads 0", "'0' is not a number from 1 on"),
        ("--tokens 8 -1", "'-1' is not a number from 1 on"),
        ("--generate 0", "'0' is not a number from 1 on"),
        ("--rounds 1", "an interquartile range needs at least 2"),
    ],
)
def test_bad_arguments_are_refused(
    arguments: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code = main(["decoding", *arguments.split()])
    except SystemExit as error:
        code = error.code
    assert code == 2
    assert message in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.gpu
def test_models_are_measured_on_a_gpu(tmp_path: Path) -> None:
    arguments = (
        "decoding --device cuda --tokens 300 --generate 8 --dim 128 --depth 2 --heads 4 "
        "--vocabulary 100 --rounds 2"
    )
    assert main([*arguments.split(), "--out", str(tmp_path)]) == 0
    for row in read_table(tmp_path / "decoding-cuda.csv"):
        assert float(row["token"]) > 0
        assert float(row["ratio"]) > 0
        assert int(row["cache"]) > 0
