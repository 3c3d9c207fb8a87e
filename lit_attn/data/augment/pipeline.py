"""Augmentation of the batches of one data set: all steps in their order."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lit_attn.data.augment.base import Augmentation, Batch, BatchStep, ImageFormat, Parameters, Step
from lit_attn.data.loading import start_copy


class Plan(NamedTuple):
    """Random parameters of one batch, for the rows that one process needs.

    `rows` chooses these rows from the batch: the samples of the process, and the images that they
    are mixed with. Among these rows, `samples` chooses the samples of the process and `partners`
    their partners, in the same order.
    """

    rows: Tensor | slice
    samples: Tensor | slice
    partners: Tensor | slice
    before: list[Parameters]
    """Parameters of the steps before the normalisation."""
    after: list[Parameters]
    """Parameters of the normalisation and of the steps after it."""
    mixture: Any


ALL = slice(None)


class Pipeline:
    """Augmentation of the batches of one data set.

    `normalize` can set another mean and standard deviation than those of `images`. The steps before
    the normalisation work on bytes, wherever the images are: on the CPU, perhaps in a worker
    process, or on the device. The other steps work on `device`.
    """

    def __init__(
        self, steps: Sequence[Augmentation], images: ImageFormat, device: torch.device
    ) -> None:
        for config in steps:
            images = config.with_statistics(images)
        self.before: list[Step] = []
        self.after: list[Step] = []
        self.mix: BatchStep | None = None
        for config in steps:
            step = config.build(images)
            if config.stage == "batch":
                self.mix = step
            elif config.stage == "normalize" or self.after:
                self.after.append(step)
            else:
                self.before.append(step)
        self.device = device

    @property
    def normalize(self) -> Step:
        """Step that turns bytes into normalised floats."""
        return self.after[0]

    def plan(self, n: int, generator: torch.Generator, rank: int = 0, world: int = 1) -> Plan:
        """Draw the parameters of a batch of `n` images of which this process trains on a share.

        The generator decides on all parameters, in the order of the steps.
        """
        before = [step.draw(n, generator) for step in self.before]
        after = [step.draw(n, generator) for step in self.after]
        mixture = None
        partners = None
        if self.mix is not None:
            mixture = self.mix.draw(n, generator)
            partners = self.mix.partners(mixture)
        if world == 1:
            return Plan(ALL, ALL, ALL if partners is None else partners, before, after, mixture)
        samples = torch.arange(rank, n, world)
        mixed_with = samples if partners is None else partners[samples]
        rows = torch.cat([samples, mixed_with]).unique()
        return Plan(
            rows=rows,
            samples=torch.searchsorted(rows, samples),
            partners=torch.searchsorted(rows, mixed_with),
            before=[_choose(parameters, rows) for parameters in before],
            after=[_choose(parameters, rows) for parameters in after],
            mixture=mixture,
        )

    def prepare(self, images: Tensor, plan: Plan) -> Tensor:
        """Return the rows of a plan, in bytes, after the steps before the normalisation."""
        for step, parameters in zip(self.before, plan.before, strict=True):
            images = step.apply(images, parameters)
        return images

    def finish(self, images: Tensor, labels: Tensor, plan: Plan) -> Batch:
        """Return the samples of this process, on `device`, from prepared rows and their labels."""
        images = start_copy(images, self.device)
        labels = start_copy(labels, self.device)
        for step, parameters in zip(self.after, plan.after, strict=True):
            images = step.apply(images, parameters)
        samples = _to_device(plan.samples, self.device)
        if self.mix is None:
            return images[samples], labels[samples]
        partners = _to_device(plan.partners, self.device)
        return self.mix.mix(
            images[samples], labels[samples], images[partners], labels[partners], plan.mixture
        )

    def apply(self, images: Tensor, labels: Tensor, generator: torch.Generator) -> Batch:
        """Return an augmented batch; the generator decides on all of its parameters."""
        plan = self.plan(len(images), generator)
        return self.finish(self.prepare(images, plan), labels, plan)


def _choose(parameters: Parameters, rows: Tensor) -> Parameters:
    return tuple(parameter[rows] for parameter in parameters)


def _to_device(rows: Tensor | slice, device: torch.device) -> Tensor | slice:
    return rows if isinstance(rows, slice) else start_copy(rows, device)
