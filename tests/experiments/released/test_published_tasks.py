"""The scorer of DCMHA's tasks: answers, shots, scores by hand, tables, bad input."""

import importlib
import json
import math
from pathlib import Path

import pytest
import torch
from helpers.language_models import train_model
from helpers.paths import EXPERIMENTS, SHARED
from helpers.tables import read_table
from torch.nn.functional import one_hot

from lit_attn.__main__ import main as command_line
from lit_attn.data.text.tokenizers import Bytes, GptNeox
from lit_attn.schema.errors import ConfigError
from lit_attn.schema.plugins import load_parts

load_parts([EXPERIMENTS / "released" / "published_tasks.py"])
tasks = importlib.import_module("published_tasks")

TEXT = "\n< Ann has tea. >. Ann has a kind of drink\n< Bo has a cat. >. Bo has a kind of [ animal ]"
TEXT += "\n< Cy has a bus. >. At [ 5 o'clock ]\n"


def write_tasks(path: Path, *texts: str) -> Path:
    lines = [json.dumps({"task_id": f"task{i // 2}", "texts": t}) for i, t in enumerate(texts)]
    path.write_text("\n".join(lines) + "\n")
    return path


def test_answers_are_words_in_brackets_after_their_examples() -> None:
    pieces = tasks.split_text(TEXT)
    assert [piece for piece in pieces if piece.shots is not None] == [
        (" animal", 1),
        (" 5 o'clock", 2),
    ]
    joined = "".join(piece.text for piece in pieces)
    assert joined == TEXT.replace("[ ", "").replace(" ]", "").removesuffix("\n")


def test_places_are_those_of_the_answers() -> None:
    ids, places = tasks.encode(Bytes().encoder(()), tasks.split_text(TEXT))
    assert [bytes(ids[i] for i in answer) for answer in places] == [b" animal", b" 5 o'clock"]


def test_an_encoder_that_joins_answers_is_refused() -> None:
    class Joining:
        def prompt(self, text: str) -> list[int]:
            return [len(text)]

    with pytest.raises(ConfigError, match="joins answers and their neighbours"):
        tasks.encode(Joining(), tasks.split_text(TEXT))


@pytest.mark.slow
def test_scores_equal_a_computation_by_hand(model: Path) -> None:
    loaded = tasks.load_model(model)
    first, second = tasks.score_text(loaded, "t", TEXT)
    text = TEXT.replace("[ ", "").replace(" ]", "").encode()
    end = text.index(b" animal") + len(b" animal")
    logits = loaded.network(torch.tensor([list(text)]).to(loaded.device))[0]
    log_p = logits.double().log_softmax(-1)
    nll = -sum(log_p[i - 1, text[i]].item() for i in range(end - 7, end))
    assert first.nll == pytest.approx(nll, rel=1e-5)
    assert (first.task, first.shots, first.tokens) == ("t", 1, 7)
    assert (second.shots, second.tokens) == (2, 10)
    greedy = log_p.argmax(-1)
    assert first.is_correct == all(greedy[i - 1] == text[i] for i in range(end - 7, end))


def test_a_model_that_knows_the_text_is_right(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = tasks.load_model(model)

    def know(_: object, ids: list[int], places: list[int]) -> torch.Tensor:
        right = torch.tensor([ids[place] for place in places])
        return (10.0 * one_hot(right, 257)).log_softmax(-1)

    monkeypatch.setattr(type(loaded), "log_probabilities", know)
    scores = tasks.summarise(tasks.score_text(loaded, "t", TEXT))
    assert scores.accuracy == 1
    assert scores.perplexity == pytest.approx(1 + 256 * math.exp(-10))


def test_scores_of_several_answers() -> None:
    answers = [
        tasks.Answer("a", 1, True, 1.0, 1),
        tasks.Answer("a", 2, False, 2.0, 3),
        tasks.Answer("b", 1, False, 3.0, 2),
    ]
    scores = tasks.summarise(answers)
    assert scores[:3] == (1 / 3, pytest.approx(math.exp(1.0)), 3)
    # The losses a token are 1, 2/3 and 3/2, weighted by their tokens.
    assert scores.perplexity_stderr == pytest.approx(0.7847003726970488)
    by_shots = tasks.group(answers, lambda answer: (str(answer.shots),))
    assert {name: part.n for name, part in by_shots.items()} == {("1",): 2, ("2",): 1}


def test_tables_and_summary(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write_tasks(tmp_path / "tasks.jsonl", TEXT, TEXT.replace("cat", "dog"), TEXT)
    assert tasks.main([str(model), str(file)]) == 0
    rows = read_table(model / "published-tasks" / "tasks.csv")
    assert [(row["task"], row["shots"], row["n"]) for row in rows] == [
        ("task0", "1", "2"),
        ("task0", "2", "2"),
        ("task1", "1", "1"),
        ("task1", "2", "1"),
    ]
    by_shots = read_table(model / "published-tasks" / "shots.csv")
    assert [(row["shots"], row["n"]) for row in by_shots] == [("1", "3"), ("2", "3")]
    (overall,) = read_table(model / "published-tasks" / "overall.csv")
    assert overall["n"] == "6"
    printed = capsys.readouterr().out
    assert "| DCPythia-6.9B (published) | 7.36 | 39.0% |" in printed
    assert f"| {model.name} | {float(overall['perplexity']):.2f} |" in printed
    assert tasks.main([str(model), str(file), "--texts", "1", f"--out={tmp_path / 'one'}"]) == 0
    assert read_table(tmp_path / "one" / "overall.csv")[0]["n"] == "4"


def test_an_exported_folder_has_the_same_scores(model: Path, tmp_path: Path) -> None:
    assert command_line(["export", "hub", str(model), f"--out={tmp_path / 'hub'}"]) == 0
    exported = tasks.load_model(tmp_path / "hub")
    assert tasks.score_text(exported, "t", TEXT) == tasks.score_text(
        tasks.load_model(model), "t", TEXT
    )


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ("{", r"tasks.jsonl:1: not JSON"),
        ('{"task_id": 1, "texts": ""}', r"tasks.jsonl:1: needs the texts `task_id` and `texts`"),
        ('{"task_id": "a", "texts": "b"}', r"tasks.jsonl:1: has no answer in brackets"),
        ("", r"tasks.jsonl: is empty"),
    ],
)
def test_malformed_tasks_are_refused(lines: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "tasks.jsonl").write_text(lines)
    with pytest.raises(ConfigError, match=message):
        tasks.read_texts(tmp_path / "tasks.jsonl")


@pytest.mark.slow
def test_wrong_models_and_options_are_one_line(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write_tasks(tmp_path / "tasks.jsonl", TEXT)
    learned = train_model(tmp_path / "learned", positions="learned")
    for arguments, message in (
        ([str(tmp_path)], "config.json"),
        ([str(learned)], "tokens are more than the 16 positions that it learned"),
        ([str(model), "--texts", "0"], "--texts: '0' is not a number from 1 on"),
        ([str(model), "--tokenizer", "none.json"], "no file none.json"),
    ):
        assert tasks.main([*arguments[:1], str(file), *arguments[1:]]) == 2
        error = capsys.readouterr().err
        assert message in error
        assert error.count("\n") == 1


def test_a_cell_with_code_of_its_own_is_not_loaded(tmp_path: Path) -> None:
    for text in ("parts: [mine.py]", "study: t\nparts:\n- mine.py", "{'parts': [mine.py]}"):
        (tmp_path / "config.yaml").write_text(text)
        with pytest.raises(ConfigError, match="this run executes the code in"):
            tasks.load_model(tmp_path)


def test_the_published_tasks_are_read_completely() -> None:
    path = SHARED / "dcmha-tasks" / "synthetic_dataset.jsonl"
    file = SHARED / "gpt-neox-tokenizer" / "tokenizer.json"
    if not (path.exists() and file.exists()):
        pytest.skip("the published tasks and the tokenizer are not at hand")
    encoder = GptNeox(file=file).encoder(())
    texts = tasks.read_texts(path)
    assert len(texts) == 74
    assert {len(members) for members in texts.values()} == {12}
    shots = set()
    for members in texts.values():
        for text in members:
            pieces = tasks.split_text(text)
            _, places = tasks.encode(encoder, pieces)
            assert len(places) == 6
            shots |= {piece.shots for piece in pieces} - {None}
    assert shots == {2, 3, 4, 5, 6, 7}
