"""Perplexities of local texts, compared with a computation by hand, and their place in Table 4."""

import importlib
import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers.paths import EXPERIMENTS

from lit_attn.papers.published import make_entries
from lit_attn.papers.source import read_paper
from lit_attn.schema.plugins import load_parts

load_parts([EXPERIMENTS / "released" / "text_perplexity.py"])
perplexity = importlib.import_module("text_perplexity")


def write_lines(path: Path, *records: object) -> Path:
    path.write_text("\n".join(json.dumps(record) for record in records) + "\n")
    return path


def nll(folder: Path, ids: list[int], start: int) -> float:
    """Return the negative log-likelihood of the tokens from `start` on, from one forward pass."""
    loaded = perplexity.load_model(folder)
    with torch.no_grad():
        log_p = loaded.network(torch.tensor([ids]).to(loaded.device))[0].double().log_softmax(-1)
    return -sum(log_p[i - 1, ids[i]].item() for i in range(start, len(ids)))


def read_results(path: Path) -> dict[tuple[str, str], float]:
    lines = path.read_text().splitlines()
    assert lines[0] == "task,metric,value"
    rows = [line.split(",") for line in lines[1:]]
    return {(task, metric): float(value) for task, metric, value in rows}


@pytest.mark.slow
def test_joined_documents_are_scored_once_in_windows(model: Path, tmp_path: Path) -> None:
    """Byte 0 ends a document; a window of 8 tokens predicts 8, and the last one the rest."""
    file = write_lines(tmp_path / "a.jsonl", {"text": "The layer", "meta": {}}, {"text": "of"})
    (tmp_path / "b.txt").write_text("x")
    arguments = [str(model), str(file), str(tmp_path / "b.txt"), f"--out={tmp_path}"]
    assert perplexity.main([*arguments, "--window=8"]) == 0
    ids = list(b"The layer\0of\0x\0")
    total = nll(model, ids[:9], 1) + nll(model, ids[8:], 1)
    results = read_results(tmp_path / "harness-0.csv")
    assert results["pile", "tokens"] == len(ids) - 1 == 14
    assert results["pile", "perplexity"] == pytest.approx(math.exp(total / 14), rel=1e-5)


def test_only_the_targets_of_an_example_count(model: Path, tmp_path: Path) -> None:
    examples = [{"inputs": "2 + 2 =", "targets": "4"}, {"inputs": "", "targets": "no"}]
    file = write_lines(tmp_path / "flan.jsonl", *examples)
    assert perplexity.main([str(model), str(file), "--name=flan", f"--out={tmp_path}"]) == 0
    total = nll(model, list(b"2 + 2 = 4"), 7) + nll(model, list(b"\0 no"), 1)
    results = read_results(tmp_path / "harness-0.csv")
    assert results["flan", "tokens"] == 5
    assert results["flan", "perplexity"] == pytest.approx(math.exp(total / 5), rel=1e-5)


def test_long_inputs_lose_their_first_tokens(model: Path) -> None:
    loaded = perplexity.load_model(model)
    loss = perplexity.score_example(loaded, perplexity.Example("abcdefgh", "ij"), 5)
    assert loss.tokens == 3
    assert loss.total == pytest.approx(nll(model, list(b"fgh ij"), 3), rel=1e-5)


def test_results_stand_beside_those_of_the_harness_in_table_4(model: Path, tmp_path: Path) -> None:
    """A second run replaces its own rows only."""
    folder = tmp_path / "released-weights" / "pythia-2.8b"
    folder.mkdir(parents=True)
    (folder / "harness-0.csv").write_text("task,metric,value\npiqa,acc,0.75\npile,perplexity,9\n")
    file = write_lines(tmp_path / "pile.jsonl", {"text": "The layer"})
    assert perplexity.main([str(model), str(file), f"--out={folder}"]) == 0
    value = read_results(folder / "harness-0.csv")["pile", "perplexity"]
    source = replace(read_paper("dcmha", "", EXPERIMENTS / "papers"), runs=tmp_path)
    grid = make_entries(source, source.paper.tables["4"], {})
    shown = {(e.row, e.column): e.values[0] for line in grid for e in line if e.ours}
    row = "0-shot / Pythia-2.8B"
    assert shown == {(row, "PIQA"): 75.0, (row, "Pile ppl /Δppl"): pytest.approx(value)}
    assert value != 9


@pytest.mark.parametrize(
    ("content", "options", "message"),
    [
        ('{"text": 1}\n', [], "t.jsonl:1: needs `text`, or `inputs` and `targets`"),
        ('{"text": "a"}\n[\n', [], "t.jsonl:2: not JSON: "),
        ("\n", [], "t.jsonl: has no token to predict"),
        ('{"text": "a"}\n', ["--window=0"], "--window: '0' is not a number from 1 on"),
        ('{"text": "a"}\n', ["--limit=0"], "--limit: '0' is not a number from 1 on"),
    ],
)
def test_wrong_input_is_one_line(
    model: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    content: str,
    options: list[str],
    message: str,
) -> None:
    (tmp_path / "t.jsonl").write_text(content)
    assert perplexity.main([str(model), str(tmp_path / "t.jsonl"), *options]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_other_columns_of_a_results_file_are_one_line(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "harness-0.csv").write_text("task,value\n")
    file = write_lines(tmp_path / "t.jsonl", {"text": "abc"})
    assert perplexity.main([str(model), str(file), f"--out={tmp_path}"]) == 2
    assert "harness-0.csv: does not have the columns task, metric" in capsys.readouterr().err
