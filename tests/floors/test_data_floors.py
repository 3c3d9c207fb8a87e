"""Floors of data sets: what the data modules return, against rules written out by hand."""

import re

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits

from lit_attn.config.experiment import Experiment
from lit_attn.data.text.batches import read_spread
from lit_attn.data.text.streams import Source, Stream
from lit_attn.floors.samples import Samples, class_floors, number_floors

CPU = torch.device("cpu")


def test_digits_have_their_nearest_neighbour_and_logistic_regression() -> None:
    experiment = Experiment.model_validate(
        {
            "data": {"kind": "digits", "augment": ["normalize", {"kind": "crop", "padding": 1}]},
            "model": {"kind": "vit", "dim": 8, "depth": 1, "heads": 2, "patch": 4, "ffn": None},
            "optimizer": {"kind": "adamw", "lr": 1e-3},
            "schedule": {"kind": "constant"},
            "training": {"epochs": 1},
        }
    )
    module = experiment.data.build(0, CPU)
    floors = {floor.rule: floor.values["accuracy"] for floor in module.floors("test", 10)}
    assert tuple(floors) == experiment.data.floor_rules
    train, test = (module.tensors[split] for split in ("train", "test"))
    # The nearest neighbour by hand, on the pixels of scikit-learn.
    distances = torch.cdist(test[0].flatten(1).double(), train[0].flatten(1).double())
    nearest = train[1][distances.argmin(1)]
    accuracy = (nearest == test[1]).double().mean().item()
    assert floors["1 nearest neighbour"] == pytest.approx(accuracy)
    assert floors["1 nearest neighbour"] == pytest.approx(0.98889, abs=1e-5)
    assert floors["logistic regression"] == pytest.approx(0.964, abs=0.01)
    frequent = int(np.bincount(train[1].numpy()).argmax())
    assert floors["most frequent class"] == (test[1] == frequent).double().mean().item()
    assert len(load_digits().target) == sum(len(module.tensors[s][1]) for s in module.tensors)


def test_classes_and_numbers_have_the_floors_of_scikit_learn() -> None:
    generator = np.random.default_rng(0)
    features = generator.normal(size=(600, 3))
    targets = features @ [[1.0], [2.0], [0.0]] + generator.normal(scale=0.1, size=(600, 1))
    train = Samples(features[:400], targets[:400])
    test = Samples(features[400:], targets[400:])
    floors = {floor.rule: floor.values for floor in number_floors(train, test)}
    assert floors["mean"]["r2"] == pytest.approx(0, abs=0.05)
    assert floors["ridge regression"]["rmse"] == pytest.approx(0.1, rel=0.15)
    assert floors["mean"]["loss"] == pytest.approx(floors["mean"]["rmse"] ** 2)
    labels = (targets[:, 0] > 0).astype(int)
    floors = {
        floor.rule: floor.values
        for floor in class_floors(
            Samples(features[:400], labels[:400]), Samples(features[400:], labels[400:])
        )
    }
    assert floors["logistic regression"]["accuracy"] > 0.95
    assert floors["most frequent class"]["accuracy"] < 0.65


def test_a_text_counts_what_a_cell_sees() -> None:
    experiment = Experiment.model_validate(
        {
            "task": "language-modelling",
            "data": {"kind": "python-text", "context": 32, "batch_size": 4, "epoch_steps": 5,
                     "eval_windows": 64},
            "model": {"kind": "gpt", "dim": 8, "depth": 1, "heads": 2, "ffn": None},
            "optimizer": {"kind": "adamw", "lr": 1e-3},
            "schedule": {"kind": "constant"},
            "training": {"epochs": 1},
        }
    )  # fmt: skip
    module = experiment.data.build(0, CPU)
    module.data = module.data.model_copy(update={"eval_tokens": 20_000})
    floors = module.floors("test", 50)
    limited, every, compressed = floors
    # A dry run does not know the number of tokens.
    rules = [re.sub(r"\d tokens", "preceding tokens", floor.rule) for floor in floors]
    assert tuple(rules) == experiment.data.floor_rules
    assert limited.conditions == f"{50 * 4 * 33:,} training tokens"
    # More text is a better floor, and any floor is better than equal probabilities.
    assert every.values["bits_per_byte"] < limited.values["bits_per_byte"] < 8
    assert compressed.values["bits_per_byte"] < 8


def test_a_long_text_is_read_in_blocks_from_beginning_to_end() -> None:
    stream = Stream([Source("text", np.arange(50_000) % 250)], 250)
    np.testing.assert_array_equal(read_spread(stream, 50_000), stream.read(0, 50_000)[None])
    rows = read_spread(stream, 30_000)
    assert rows.shape == (3, 10_000)
    for row, start in zip(rows, (0, 20_000, 40_000), strict=True):
        np.testing.assert_array_equal(row, stream.read(start, 10_000))
    assert read_spread(stream, 300).shape == (1, 300)
