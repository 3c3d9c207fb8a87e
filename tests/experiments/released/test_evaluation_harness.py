"""The adapter of lm-evaluation-harness, on a local task without a network."""

import importlib
import json
import sys
from pathlib import Path

import pytest
import torch
from helpers.paths import EXPERIMENTS

from lit_attn.schema.errors import ConfigError
from lit_attn.schema.plugins import load_parts
from lit_attn.schema.yaml_text import format_yaml

load_parts([EXPERIMENTS / "released" / "evaluation_harness.py"])
harness = importlib.import_module("evaluation_harness")


def log_p(loaded: object, ids: list[int]) -> torch.Tensor:
    """Return log p of every next token, (n, V), from the complete sequence."""
    tokens = torch.tensor([ids]).to(loaded.device)
    with torch.no_grad():
        return loaded.network(tokens)[0].double().log_softmax(-1)


@pytest.mark.slow
def test_scores_of_a_continuation_equal_a_computation_by_hand(model: Path) -> None:
    loaded = harness.load_model(model)
    scorer = harness.Scorer(loaded)
    ids = list(b"The layer")
    total, is_greedy = scorer.score(ids[:4], ids[4:])
    rows = log_p(loaded, ids)
    assert total == pytest.approx(sum(rows[i - 1, ids[i]].item() for i in range(4, 9)), rel=1e-5)
    assert is_greedy is False
    best = int(rows[-1].argmax())
    assert scorer.score(ids, [best])[1] is True


def test_a_document_is_scored_once_token_by_token(model: Path) -> None:
    """The first window starts after the end of a document, the next ones after one token."""
    scorer = harness.Scorer(harness.load_model(model))
    ids = list(b"abcdefgh")
    expected = scorer.score([0], ids)[0]
    assert scorer.score_document("abcdefgh") == pytest.approx(expected)
    scorer.window = 4
    parts = [([0], ids[:4]), ([ids[3]], ids[4:])]
    expected = sum(scorer.score(*part)[0] for part in parts)
    assert scorer.score_document("abcdefgh") == pytest.approx(expected)


def test_a_long_context_loses_its_first_tokens(model: Path) -> None:
    scorer = harness.Scorer(harness.load_model(model))
    scorer.window = 5
    expected = scorer.score(list(b"efgh"), list(b"ij"))
    assert scorer.score(list(b"abcdefgh"), list(b"ij")) == expected


def test_greedy_continuations_end_at_a_stop(model: Path) -> None:
    loaded = harness.load_model(model)
    scorer = harness.Scorer(loaded)
    text = scorer.generate("The ", {"max_gen_toks": 12})
    ids = list(b"The ")
    for _ in range(12):
        ids.append(int(log_p(loaded, ids)[-1].argmax()))
    assert text == bytes(ids[4:]).decode(errors="replace")
    stop = text[3:5]
    assert (
        scorer.generate("The ", {"max_gen_toks": 12, "until": [stop]}) == text[: text.index(stop)]
    )


def write_task(folder: Path) -> None:
    """Write a task with two choices whose data are in the same folder."""
    folder.mkdir()
    documents = [
        {"question": "Grass is", "choices": ["green", "loud"], "answer": 0},
        {"question": "Snow is", "choices": ["hot", "white"], "answer": 1},
    ]
    data = folder / "data.jsonl"
    data.write_text("\n".join(map(json.dumps, documents)))
    task = {
        "task": "local_choice",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(data)}},
        "test_split": "test",
        "fewshot_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "{{question}}",
        "doc_to_target": "{{answer}}",
        "doc_to_choice": "{{choices}}",
        "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
    }
    (folder / "local_choice.yaml").write_text(format_yaml(task))


def write_race_task(folder: Path) -> None:
    """Write the shipped task for a file in the same folder, with the columns of its data set."""
    words = ["red", "blue", "green", "black"]
    questions = [("Sky.", "It is", "B"), ("Sky.", "At night it is", "D"), ("Grass.", "It is", "C")]
    rows = [
        {"article": a, "question": q, "options": words, "answer": letter, "example_id": "1"}
        for a, q, letter in questions
    ]
    data = folder / "race.jsonl"
    data.write_text("\n".join(map(json.dumps, rows)))
    task = {
        "include": str(EXPERIMENTS / "released" / "harness_tasks" / "race_middle.yaml"),
        "task": "race_local",
        "dataset_path": "json",
        "dataset_name": None,
        "dataset_kwargs": {"data_files": {"test": str(data)}},
    }
    (folder / "race_local.yaml").write_text(format_yaml(task))


# The words of each prompt, of which the first one is right. The shipped task of RACE asks the last
# question of an article.
CHOICES = {
    "Grass is": ["green", "loud"],
    "Snow is": ["white", "hot"],
}
SKY = "Article: Sky.\n\nQuestion: It is\nAnswer: blue\nAt night it is"
RACE = {
    SKY: ["black", "red", "blue", "green"],
    "Article: Grass.\n\nIt is": ["green", "red", "blue", "black"],
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_local_tasks_have_the_accuracy_of_the_scores(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("lm_eval")
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    write_task(tmp_path / "tasks")
    write_race_task(tmp_path / "tasks")
    names = ["local_choice", "race_local"]
    arguments = [str(model), "--tasks", *names, "--include", str(tmp_path / "tasks")]
    assert harness.main([*arguments, f"--out={tmp_path}"]) == 0
    scorer = harness.Scorer(harness.load_model(model))

    def is_hit(prompt: str, words: list[str]) -> bool:
        scores = [scorer.score(list(prompt.encode()), list(f" {w}".encode()))[0] for w in words]
        return scores[0] == max(scores)

    results = json.loads((tmp_path / "harness-0.json").read_text())
    lines = (tmp_path / "harness-0.csv").read_text().splitlines()
    assert lines[0] == "task,metric,value"
    for name, prompts in zip(names, (CHOICES, RACE), strict=True):
        accuracy = sum(is_hit(*prompt) for prompt in prompts.items()) / 2
        assert results[name]["acc,none"] == accuracy
        assert results[name]["sample_len"] == 2
        assert f"{name},acc,{accuracy}" in lines


def test_results_of_other_tasks_remain(tmp_path: Path) -> None:
    path = tmp_path / "harness-0.csv"
    harness.merge_results(path, [("piqa", "acc", 0.5), ("sciq", "acc", 0.25)])
    harness.merge_results(path, [("piqa", "acc", 0.75)])
    assert path.read_text() == "task,metric,value\npiqa,acc,0.75\nsciq,acc,0.25\n"


@pytest.mark.slow
def test_an_unknown_task_and_a_missing_harness_are_one_line(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("lm_eval")
    assert harness.main([str(model), "--tasks", "no_such_task"]) == 2
    assert "--tasks: the harness has no task 'no_such_task'" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "lm_eval.evaluator", None)
    assert harness.main([str(model), "--tasks", "piqa"]) == 2
    assert "pip install 'lit_attn[harness]'" in capsys.readouterr().err


def test_a_tokenizer_without_an_end_is_refused(model: Path) -> None:
    loaded = harness.load_model(model)
    loaded.encoder.end = None
    with pytest.raises(ConfigError, match="no token between documents"):
        harness.Scorer(loaded)
