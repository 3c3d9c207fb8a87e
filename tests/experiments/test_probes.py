"""The probes: recorded sequences of published generators, floors, lengths, and a trained cell."""

import importlib
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from helpers.paths import ROOT
from helpers.training_cells import cell_of, folder_of
from pydantic import ValidationError

from lit_attn.cells.records import Result
from lit_attn.models.language import GPTConfig
from lit_attn.schema.plugins import load_parts
from lit_attn.schema.yaml_text import parse_plain
from lit_attn.train import run_cell
from lit_attn.training import build

PROBES = ROOT / "experiments" / "probes"
load_parts([PROBES / f"{name}.py" for name in ("recall", "memory", "search", "tracking")])
probes = importlib.import_module("probes")
probe_task = importlib.import_module("probe_task")
recall = importlib.import_module("recall")
memory = importlib.import_module("memory")
search = importlib.import_module("search")
tracking = importlib.import_module("tracking")

CPU = torch.device("cpu")
IGNORED = -100

PUBLISHED = json.loads((Path(__file__).parent / "published_probes.json").read_text())
"""Sequences that the published generators made, with their commits and parameters."""

CONFIGS = {
    config.model_fields["kind"].default: config
    for config in (
        recall.RecallConfig,
        recall.ContextRecallConfig,
        recall.NoisyRecallConfig,
        recall.FuzzyRecallConfig,
        memory.MemorisationConfig,
        memory.SelectiveCopyingConfig,
        memory.CompressionConfig,
        search.InductionConfig,
        search.NeedleConfig,
        search.OverwrittenNeedleConfig,
        search.FindBlockConfig,
        tracking.ParityConfig,
        tracking.PermutationsConfig,
    )
}


def read_published(name: str) -> tuple[Any, np.ndarray, np.ndarray]:
    """Return the configuration with the parameters of the record, its tokens and its targets."""
    record = PUBLISHED[name]
    kind = name.removesuffix("-training")
    config = CONFIGS[kind].model_validate(record["parameters"])
    return config, np.array(record["tokens"]), np.array(record["targets"])


def draw(config: Any, count: int = 64, seed: int = 0, is_training: bool = False) -> Any:
    return config.draw(np.random.default_rng(seed), count, config.length, is_training)


def test_recall_equals_the_published_sequences() -> None:
    config, tokens, targets = read_published("recall")
    context = 2 * config.pairs
    keys, values = tokens[:, 0:context:2], tokens[:, 1:context:2]
    gaps = np.empty_like(keys)
    for row, place in zip(*np.nonzero(targets != IGNORED), strict=True):
        pair = values[row].tolist().index(targets[row, place])
        gaps[row, pair] = (place - context) // 2
    arranged = recall.arrange_recall(keys, values, gaps, np.zeros_like(tokens))
    np.testing.assert_array_equal(arranged[0], tokens)
    np.testing.assert_array_equal(arranged[1], targets)


@pytest.mark.parametrize("mode", ["", "-training"])
@pytest.mark.parametrize("kind", ["context-recall", "noisy-recall"])
def test_context_recall_equals_the_published_sequences(kind: str, mode: str) -> None:
    config, tokens, targets = read_published(kind + mode)
    # The last value is a target only.
    stream = np.concatenate([tokens, targets[:, -1:]], axis=1).reshape(len(tokens), -1, 2)
    is_noise = stream[:, :, 0] >= config.signal_ids
    keys = np.where(is_noise, 0, stream[:, :, 0])
    table = np.zeros((len(tokens), config.signal_ids // 2), dtype=np.int64)
    rows, places = np.nonzero(~is_noise)
    table[rows, keys[rows, places]] = stream[rows, places, 1]
    arranged = recall.arrange_context_recall(keys, table, is_noise, stream, mode == "-training")
    np.testing.assert_array_equal(arranged[0], tokens)
    np.testing.assert_array_equal(arranged[1], targets)


def test_fuzzy_recall_equals_the_published_sequences() -> None:
    config, tokens, targets = read_published("fuzzy-recall")
    num_keys = (config.ids - 1) // 2
    for row, wanted in zip(tokens.tolist(), targets.tolist(), strict=True):
        last_value = [token for token in wanted if token != IGNORED][-1]
        stream = [token for token in [*row, last_value] if token != config.ids - 1]
        pairs: list[tuple[list[int], list[int]]] = []
        for token in stream:
            is_key = token < num_keys
            if is_key and (not pairs or pairs[-1][1]):
                pairs.append(([], []))
            pairs[-1][0 if is_key else 1].append(token)
        as_tuples = [(tuple(key), tuple(value)) for key, value in pairs]
        arranged, recalled = recall.arrange_fuzzy_recall(as_tuples)
        assert arranged == stream
        assert recalled[1:] == wanted[-len(stream) + 1 :]


def test_fuzzy_recall_predicts_every_next_token_in_training() -> None:
    _, tokens, targets = read_published("fuzzy-recall-training")
    np.testing.assert_array_equal(tokens[:, 1:], targets[:, :-1])
    config = CONFIGS["fuzzy-recall"](length=48)
    drawn_tokens, drawn_targets = draw(config, is_training=True)
    np.testing.assert_array_equal(drawn_tokens[:, 1:], drawn_targets[:, :-1])


def test_memorisation_equals_the_published_sequences() -> None:
    config, tokens, targets = read_published("memorisation")
    table = np.zeros(config.num_keys, dtype=np.int64)
    table[tokens[:, 0::2]] = targets[:, 1::2]
    arranged = memory.arrange_memorisation(tokens[:, 0::2], table, config.ids - 1)
    np.testing.assert_array_equal(arranged[0], tokens)
    np.testing.assert_array_equal(arranged[1], targets)


def test_selective_copying_equals_the_published_sequences() -> None:
    config, tokens, targets = read_published("selective-copying")
    blank, mark = config.ids - 2, config.ids - 1
    copied = targets[:, -config.copied :]
    part = tokens[:, : -config.copied - 1]
    # A blank's slot is the number of copied tokens before it.
    copied_before = (part != blank).cumsum(axis=1)
    slots = copied_before[part == blank].reshape(len(tokens), -1)
    arranged = memory.arrange_selective_copying(copied, slots, blank, mark)
    np.testing.assert_array_equal(arranged[0], tokens)
    np.testing.assert_array_equal(arranged[1], targets)


def test_compression_equals_the_published_sequences() -> None:
    config, tokens, targets = read_published("compression")
    np.testing.assert_array_equal(tokens, targets)
    drawn_tokens, drawn_targets = draw(config)
    np.testing.assert_array_equal(drawn_tokens, drawn_targets)
    # The mark ends every sequence, and stands nowhere else.
    for array in (tokens, drawn_tokens):
        assert (array[:, -1] == config.ids - 1).all()
        assert (array[:, :-1] < config.ids - 1).all()


@pytest.mark.parametrize("kind", ["recall", "context-recall", "noisy-recall", "fuzzy-recall"])
def test_every_recalled_value_stands_behind_its_key(kind: str) -> None:
    config = CONFIGS[kind]()
    tokens, targets = draw(config)
    counted = targets != IGNORED
    assert counted.any(axis=1).all()
    if kind == "fuzzy-recall":
        return
    for row, place in zip(*np.nonzero(counted), strict=True):
        key, value = tokens[row, place], targets[row, place]
        earlier = [p for p in range(0, place - 1, 2) if tokens[row, p] == key]
        assert earlier, "the key stands before its query"
        assert tokens[row, earlier[0] + 1] == value


def test_states_are_products_of_the_permutations() -> None:
    config = CONFIGS["permutations"](length=6, elements=4)
    tokens, targets = draw(config, 20)
    group = tracking.permutations(range(4))
    matrices = np.stack([np.eye(4, dtype=int)[list(p)] for p in group])
    state = matrices[tokens[:, 0]]
    for place in range(1, 6):
        # The matrix of p has row i equal to unit vector p(i), so products stand in reverse.
        state = state @ matrices[tokens[:, place]]
        np.testing.assert_array_equal(matrices[targets[:, place]], state)


def test_parity_counts_the_bits() -> None:
    tokens, targets = draw(CONFIGS["parity"](length=8))
    for row, wanted in zip(tokens.tolist(), targets.tolist(), strict=True):
        assert [sum(row[: i + 1]) % 2 for i in range(8)] == wanted


def test_distinct_places_follow_their_weights() -> None:
    weights = np.array([4.0, 2.0, 1.0, 1.0])
    drawn = recall.draw_distinct(np.random.default_rng(0), weights, 20_000, 2)
    assert (drawn[:, 0] != drawn[:, 1]).all()
    first = np.bincount(drawn[:, 0], minlength=4) / len(drawn)
    np.testing.assert_allclose(first, weights / 8, atol=0.012)
    # After the first place with weight 4, the others have weights 2, 1 and 1.
    second = np.bincount(drawn[drawn[:, 0] == 0, 1], minlength=4)
    np.testing.assert_allclose(second / second.sum(), [0, 0.5, 0.25, 0.25], atol=0.02)


# Rules without the ability that the probe needs: each returns one guess for every token.
def guess_values(config: Any, tokens: np.ndarray, generator: np.random.Generator) -> np.ndarray:
    """Guess one of the values of the sequence."""
    chosen = generator.integers(config.pairs, size=tokens.shape)
    return np.take_along_axis(tokens, 2 * chosen + 1, axis=1)


def guess_ids(first: int, last: int) -> Any:
    """Guess one of the ids from `first` to below `last`."""

    def guess(config: Any, tokens: np.ndarray, generator: np.random.Generator) -> np.ndarray:
        return generator.integers(first, last, size=tokens.shape)

    return guess


def guess_states(config: Any, tokens: np.ndarray, generator: np.random.Generator) -> np.ndarray:
    """Copy the first token, whose state it is, and guess all others."""
    guesses = generator.integers(config.vocabulary, size=tokens.shape)
    guesses[:, 0] = tokens[:, 0]
    return guesses


def guess_tokens(config: Any, tokens: np.ndarray, generator: np.random.Generator) -> np.ndarray:
    """Guess all tokens but the mark at the end."""
    guesses = generator.integers(config.ids - 1, size=tokens.shape)
    guesses[:, -1] = config.ids - 1
    return guesses


def guess_written(config: Any, tokens: np.ndarray, generator: np.random.Generator) -> np.ndarray:
    """Guess one of the values that stand behind the key of the question."""
    guesses = np.zeros_like(tokens)
    for row, guess in zip(tokens, guesses, strict=True):
        places = np.flatnonzero(row[:-1] == row[-1])
        guess[-1] = row[generator.choice(places) + 1]
    return guesses


def guess_asked(config: Any, tokens: np.ndarray, generator: np.random.Generator) -> np.ndarray:
    """Guess a letter of the question that has not come yet, or any other that has not."""
    guesses = np.full_like(tokens, config.vocabulary - 1)
    size = config.block
    for row, guess in zip(tokens, guesses, strict=True):
        question = row[-size - config.question : -size]
        for place in range(size):
            come = row[len(row) - size : len(row) - size + place]
            candidates = np.setdiff1d(question, come)
            if not len(candidates):
                candidates = np.setdiff1d(np.arange(config.letters), come)
            guess[place - size - 1] = generator.choice(candidates)
    return guesses


RULES = {
    "recall": guess_values,
    "context-recall": guess_ids(8, 16),
    "noisy-recall": guess_ids(8, 16),
    "fuzzy-recall": guess_ids(7, 15),
    "memorisation": guess_ids(127, 255),
    "selective-copying": guess_ids(0, 14),
    "compression": guess_tokens,
    "induction": guess_ids(0, 15),
    "needle": guess_ids(8, 16),
    "overwritten-needle": guess_written,
    "find-block": guess_asked,
    "parity": guess_states,
    "permutations": guess_states,
}


@pytest.mark.parametrize("kind", CONFIGS)
def test_the_floor_is_the_accuracy_of_a_rule_without_the_ability(kind: str) -> None:
    config = CONFIGS[kind]()
    generator = np.random.default_rng(1)
    correct = counted = 0
    for seed in range(8):
        tokens, targets = draw(config, 256, seed)
        guesses = RULES[kind](config, tokens, generator)
        correct += int((guesses == targets)[targets != IGNORED].sum())
        counted += int((targets != IGNORED).sum())
    accuracy = correct / counted
    error = (accuracy * (1 - accuracy) / counted) ** 0.5
    assert abs(accuracy - config.floor) < 4 * error + 0.001


@pytest.mark.parametrize("kind", CONFIGS)
def test_tokens_have_their_length_and_range(kind: str) -> None:
    config = CONFIGS[kind]()
    for is_training in (False, True):
        tokens, targets = draw(config, 8, is_training=is_training)
        assert tokens.shape == targets.shape == (8, config.length)
        assert tokens.min() >= 0
        assert tokens.max() < config.vocabulary
        counted = targets[targets != IGNORED]
        assert counted.min() >= 0
        assert counted.max() < config.vocabulary


def test_evaluated_sequences_are_equal_for_all_seeds_and_batches_are_not() -> None:
    config = CONFIGS["needle"](length=16, longer=40, eval_sequences=10, eval_batch_size=4)
    first, second = config.build(0, CPU), config.build(1, CPU)
    assert first.splits == ["val", "test", "longer"]
    assert first.fingerprint() == second.fingerprint()
    for split, length in (("val", 16), ("test", 16), ("longer", 40)):
        batches = list(first.evaluation_loader(split))
        assert [tuple(batch[0].shape) for batch in batches] == [(4, length)] * 3
        # Padding rows have no target.
        assert [int((batch[1] != IGNORED).sum()) for batch in batches] == [4, 4, 2]
    assert not torch.equal(first.batch(0)[0], second.batch(0)[0])
    assert torch.equal(first.batch(5)[0], config.build(0, CPU).batch(5)[0])
    val, test = (first.sequences[split][0] for split in ("val", "test"))
    assert not np.array_equal(val, test)


def test_the_table_of_a_memorisation_is_fixed() -> None:
    config = CONFIGS["memorisation"](ids=32, length=16)
    answers: dict[int, set[int]] = {}
    for seed in range(3):
        tokens, targets = draw(config, 32, seed)
        for key, value in zip(tokens[:, 0::2].ravel(), targets[:, 1::2].ravel(), strict=True):
            answers.setdefault(int(key), set()).add(int(value))
    assert all(len(values) == 1 for values in answers.values())
    assert len(set.union(*answers.values())) == len(answers), "keys have different values"


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        ("recall", {"pairs": 16}, "15 at most"),
        ("recall", {"pairs": 8, "length": 24}, "need 32 tokens"),
        ("context-recall", {"length": 64}, "length: pairs without the last value"),
        ("context-recall", {"longer": 10}, "longer: pairs without the last value"),
        ("context-recall", {"noise_share": 0.1}, "needs `noise_ids`"),
        ("fuzzy-recall", {"length": 16}, "need 18 tokens"),
        ("memorisation", {"length": 7}, "even number"),
        ("selective-copying", {"copied": 16, "length": 30}, "needs 34 tokens"),
        ("compression", {"longer": 64}, "remove it"),
        ("induction", {"gap": 8, "length": 18}, "needs 19 tokens"),
        ("permutations", {"elements": 9}, "2 to 6"),
    ],
)
def test_impossible_probes_are_refused(kind: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        CONFIGS[kind].model_validate(changes)


def test_metrics_count_only_targets() -> None:
    metrics = probe_task.ProbeMetrics()
    logits = torch.zeros(2, 3, 4)
    logits[0, 0, 1] = logits[0, 1, 2] = logits[1, 2, 3] = 5.0
    targets = torch.tensor([[1, IGNORED, IGNORED], [IGNORED, 0, 3]])
    metrics.update(logits[targets != IGNORED], targets)
    values = metrics.compute()
    # Equal logits count as id 0, so all three targets are right.
    assert values["accuracy"] == 1
    assert values["solved"] == 1
    assert values["errors"] == 0
    chosen = -torch.log_softmax(torch.tensor([5.0, 0, 0, 0]), 0)[0]
    expected = (2 * chosen + torch.log(torch.tensor(4.0))) / 3
    torch.testing.assert_close(values["loss"].float(), expected)
    sums = probe_task.ProbeTask.unit_values(SimpleNamespace(), logits[targets != IGNORED], targets)
    # Loss, targets and right answers of each sequence.
    assert sums[:, 1:].tolist() == [[1, 1], [2, 2]]
    torch.testing.assert_close(sums[:, 0].sum() / 3, expected)
    # One wrong target of two, and a row of padding, which is no sequence.
    padded = torch.tensor([[1, IGNORED, IGNORED], [IGNORED, 2, 3], [IGNORED] * 3])
    metrics.reset()
    metrics.update(logits[targets != IGNORED], padded)
    assert metrics.compute()["errors"] == 0.5


def build_language_model(config: Any, **keys: Any) -> Any:
    """Return a small model of a configuration class for sequences of 8 tokens."""
    sizes = {"dim": 16, "depth": 1, "heads": 2, "ffn": {"width": 16}}
    signature = CONFIGS["compression"](length=8).signature()
    return config.model_validate(sizes | keys).build(signature, CPU).eval()


@pytest.mark.parametrize(
    ("config", "keys"),
    [
        (GPTConfig, {}),
        (memory.CompressorConfig, {}),
        (GPTConfig, {"head": "adaptive", "cutoffs": [4]}),
    ],
)
def test_logits_of_targets_are_those_of_all_tokens(config: Any, keys: dict[str, Any]) -> None:
    network = build_language_model(config, **keys)
    tokens = torch.randint(15, (3, 8))
    targets = tokens.masked_fill(torch.rand(3, 8) < 0.5, IGNORED)
    expected = network(tokens)[targets != IGNORED]
    torch.testing.assert_close(network.target_logits(tokens, targets), expected)


def test_a_compressor_sees_all_tokens_through_its_last_vector() -> None:
    network = build_language_model(memory.CompressorConfig)
    tokens = torch.randint(15, (1, 8))
    changed = tokens.clone()
    changed[0, 3] = (tokens[0, 3] + 1) % 15
    difference = (network(tokens) - network(changed)).abs().amax(-1)[0]
    # One vector carries the change to the logits of every place.
    assert (difference > 0).all()


def test_a_compressor_trains_on_the_logits_that_it_is_evaluated_on() -> None:
    network = build_language_model(memory.CompressorConfig)
    tokens = torch.randint(15, (2, 8))
    losses = torch.nn.functional.cross_entropy(
        network(tokens).transpose(1, 2), tokens, reduction="none"
    )
    torch.testing.assert_close(network.nll(tokens, tokens), losses)


def test_a_cell_records_each_split_and_whether_it_is_solved(tmp_path: Path) -> None:
    experiment = parse_plain((PROBES / "recall.yaml").read_text(), "text")
    experiment["data"] |= {"kind": "needle", "length": 8, "longer": 12, "epoch_steps": 3}
    for key in ("pairs", "ids"):
        del experiment["data"][key]
    experiment["training"]["epochs"] = 2
    experiment["schedule"]["warmup"] = 0
    metric = {"name": "longer/accuracy"}
    cell = cell_of(experiment, metric=metric, parts=[str(PROBES / "search.py")])
    folder = folder_of(cell, tmp_path)
    run_cell(folder)
    metrics = Result.read(folder / "result.json").metrics
    for split in ("val", "test", "longer"):
        assert metrics[f"{split}/solved"] == 0
        assert 0 <= metrics[f"{split}/accuracy"] < 0.9
        # No evaluation of the six steps solves it.
        assert metrics[f"{split}/unsolved_steps"] == 6


def test_the_loss_that_trains_is_the_mean_of_the_targets() -> None:
    cell = cell_of(parse_plain((PROBES / "recall.yaml").read_text(), "text"))
    task = build.build(cell, CPU).task.eval()
    tokens = torch.randint(16, (3, 16))
    targets = torch.full((3, 16), IGNORED)
    targets[0, 9], targets[1, 11], targets[1, 13] = 8, 9, 10
    logits, _ = task.evaluate((tokens, targets))
    expected = torch.nn.functional.cross_entropy(logits, targets[targets != IGNORED])
    torch.testing.assert_close(task.loss((tokens, targets)), expected)
    # Without a target there is nothing to learn.
    assert task.loss((tokens, torch.full((3, 16), IGNORED))) == 0


def test_unsolved_steps_end_at_the_first_evaluation_that_solves_and_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cell = cell_of(parse_plain((PROBES / "recall.yaml").read_text(), "text"))

    def evaluate(task: Any, step: int, solved: float) -> float:
        monkeypatch.setattr(type(task), "global_step", step, raising=False)
        monkeypatch.setattr(type(task), "trainer", SimpleNamespace(max_steps=200), raising=False)
        values: dict[str, float] = task.values_of_training("val/", {"val/solved": solved})
        return values["val/unsolved_steps"]

    task = build.build(cell, CPU).task
    assert task.chance_levels("val") == {"accuracy": 0.25}
    # All planned steps, until an evaluation solves it.
    assert evaluate(task, 10, 0.0) == 200
    assert evaluate(task, 20, 0.0) == 200
    assert evaluate(task, 30, 1.0) == 20
    checkpoint: dict[str, Any] = {}
    task.on_save_checkpoint(checkpoint)
    resumed = build.build(cell, CPU).task
    resumed.on_load_checkpoint(checkpoint)
    # A later evaluation that fails again changes nothing.
    assert evaluate(resumed, 40, 0.0) == 20
    other = build.build(cell, CPU).task
    assert evaluate(other, 10, 1.0) == 0
