"""Floors of the data of a cell, as the record that the report reads."""

import math

import torch

from lit_attn.cells.floors import Floors, FloorValues
from lit_attn.config.cell import Cell


def compute_floors(cell: Cell) -> Floors:
    """Return the floors of every evaluated split of a cell's data, computed on the CPU.

    Raises ConfigError if the data cannot be read.
    """
    experiment = cell.experiment
    data = experiment.data.build(cell.seed, torch.device("cpu"))
    steps = experiment.training.steps(data.steps_per_epoch)
    floors = []
    for split in data.splits:
        for floor in data.floors(split, steps):
            # A perplexity can be beyond the largest float.
            values = {name: value for name, value in floor.values.items() if math.isfinite(value)}
            floors.append(
                FloorValues(
                    rule=floor.rule, split=split, values=values, conditions=floor.conditions
                )
            )
    data.stop_workers()
    return Floors(data=data.fingerprint(), inputs=cell.floor_inputs, floors=floors)
