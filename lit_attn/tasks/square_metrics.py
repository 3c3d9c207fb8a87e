"""Metrics made of squares: R², explained variance, relative squared error and NRMSE.

torchmetrics subtracts sums of squares from each other, which cancels most digits of targets around
1e6, and takes sums below 1e-4 for 0. These classes have the names and arguments of torchmetrics.
They keep means and squared deviations from these means, which are merged over batches and processes
(Chan, Golub & LeVeque 1979). Shapes: targets and predictions (N,) or (N, K).
"""

from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torchmetrics import Metric

from lit_attn.tasks.exact_metrics import UndefinedValueError

__all__ = [
    "ExplainedVariance",
    "NormalizedRootMeanSquaredError",
    "R2Score",
    "RelativeSquaredError",
]

Average = Literal["raw_values", "uniform_average", "variance_weighted"]


class Moments(NamedTuple):
    """Mean and sum of squared deviations of some samples, (K,) or of no axis."""

    mean: Tensor
    squares: Tensor


def measure_moments(values: Tensor) -> Moments:
    """Return the moments of values (N, ...) over the first axis; equal values have exactly 0."""
    first = values[0]
    mean = first + (values - first).mean(0)
    return Moments(mean, (values - mean).square().sum(0))


def merge_moments(one: Moments, one_count: Tensor, other: Moments, other_count: Tensor) -> Moments:
    """Return the moments of two groups of samples together; at least one group has samples."""
    difference = other.mean - one.mean
    # Integers divide to float32.
    share = other_count.double() / (one_count + other_count)
    mean = one.mean + difference * share
    squares = one.squares + other.squares + difference.square() * one_count * share
    return Moments(mean, squares)


class SquareMetric(Metric):
    """Moments of targets and of errors (target minus prediction), from which subclasses compute."""

    full_state_update = False
    count: Tensor
    target_mean: Tensor
    target_squares: Tensor
    error_mean: Tensor
    error_squares: Tensor

    def __init__(self) -> None:
        super().__init__()
        # Processes have means of their own, which `gather` merges.
        self.add_state("count", torch.tensor(0), dist_reduce_fx=None)
        for name in ("target_mean", "target_squares", "error_mean", "error_squares"):
            self.add_state(name, torch.tensor(0.0, dtype=torch.float64), dist_reduce_fx=None)

    def update(self, predictions: Tensor, targets: Tensor) -> None:
        new_count = torch.tensor(len(targets), device=self.count.device)
        target = measure_moments(targets)
        error = measure_moments(targets - predictions)
        old_target = Moments(self.target_mean, self.target_squares)
        old_error = Moments(self.error_mean, self.error_squares)
        self.target_mean, self.target_squares = merge_moments(
            old_target, self.count, target, new_count
        )
        self.error_mean, self.error_squares = merge_moments(old_error, self.count, error, new_count)
        self.count = self.count + new_count

    def gather(self) -> tuple[Tensor, Moments, Moments]:
        """Return the count, and the moments of targets and errors, of all processes."""
        if self.count.ndim == 0:
            return (
                self.count,
                Moments(self.target_mean, self.target_squares),
                Moments(self.error_mean, self.error_squares),
            )
        # After a synchronisation, the first axis of a state is that of the processes.
        count = torch.zeros_like(self.count[0])
        target = Moments(self.target_mean[0], torch.zeros_like(self.target_squares[0]))
        error = Moments(self.error_mean[0], torch.zeros_like(self.error_squares[0]))
        for process, new_count in enumerate(self.count):
            if new_count == 0:
                continue
            new_target = Moments(self.target_mean[process], self.target_squares[process])
            new_error = Moments(self.error_mean[process], self.error_squares[process])
            target = merge_moments(target, count, new_target, new_count)
            error = merge_moments(error, count, new_error, new_count)
            count = count + new_count
        return count, target, error


def require_samples(name: str, count: Tensor) -> None:
    """Raise UndefinedValueError for fewer than two samples."""
    if count < 2:
        raise UndefinedValueError(f"{name} needs at least two samples")


def average(name: str, scores: Tensor, target_squares: Tensor, how: Average) -> Tensor:
    """Return the average of scores (K,), or of no axis, over the numbers whose targets vary.

    Raises UndefinedValueError if the targets of every number are constant.
    """
    varies = target_squares > 0
    if not varies.any():
        raise UndefinedValueError(f"{name} of constant targets has no value")
    if how == "raw_values":
        return scores.masked_fill(~varies, torch.nan)
    if how == "uniform_average":
        return scores[varies].mean()
    weights = target_squares[varies] / target_squares[varies].sum()
    return (weights * scores[varies]).sum()


def require_average(multioutput: str) -> Average:
    """Return the name of an average; raise ValueError if it is none."""
    for name in ("raw_values", "uniform_average", "variance_weighted"):
        if name == multioutput:
            return name
    raise ValueError(
        f"multioutput: {multioutput!r}; choose from raw_values, uniform_average, variance_weighted"
    )


class R2Score(SquareMetric):
    """R² (coefficient of determination): 1 - squared errors / squared deviations of targets."""

    higher_is_better = True
    plot_upper_bound = 1.0

    def __init__(self, adjusted: int = 0, multioutput: str = "uniform_average") -> None:
        super().__init__()
        if not isinstance(adjusted, int) or adjusted < 0:
            raise ValueError(f"adjusted: {adjusted!r} is no whole number from 0")
        self.adjusted = adjusted
        self.multioutput = require_average(multioutput)

    def compute(self) -> Tensor:
        count, target, error = self.gather()
        require_samples("R²", count)
        squared_errors = error.squares + count * error.mean.square()
        scores = 1 - squared_errors / target.squares
        score = average("R²", scores, target.squares, self.multioutput)
        if not self.adjusted:
            return score
        freedom = count - self.adjusted - 1
        if freedom < 1:
            raise UndefinedValueError(
                f"R² adjusted for {self.adjusted} regressors needs more than"
                f" {self.adjusted + 1} samples"
            )
        return 1 - (1 - score) * (count - 1) / freedom


class ExplainedVariance(SquareMetric):
    """Explained variance: 1 - variance of errors / variance of targets."""

    higher_is_better = True
    plot_upper_bound = 1.0

    def __init__(self, multioutput: str = "uniform_average") -> None:
        super().__init__()
        self.multioutput = require_average(multioutput)

    def compute(self) -> Tensor:
        count, target, error = self.gather()
        require_samples("explained variance", count)
        scores = 1 - error.squares / target.squares
        return average("explained variance", scores, target.squares, self.multioutput)


class RelativeSquaredError(SquareMetric):
    """Squared errors / squared deviations of targets, or the root of it; mean over K numbers."""

    higher_is_better = False
    plot_lower_bound = 0.0

    def __init__(self, num_outputs: int = 1, squared: bool = True) -> None:
        super().__init__()
        self.num_outputs = num_outputs
        self.squared = squared

    def compute(self) -> Tensor:
        count, target, error = self.gather()
        require_samples("relative squared error", count)
        ratios = (error.squares + count * error.mean.square()) / target.squares
        scores = ratios if self.squared else ratios.sqrt()
        return average("relative squared error", scores, target.squares, "uniform_average")


class NormalizedRootMeanSquaredError(SquareMetric):
    """Root mean squared error (K,) / the mean, range, deviation or length of the targets."""

    higher_is_better = False
    plot_lower_bound = 0.0
    lowest: Tensor
    highest: Tensor

    def __init__(
        self,
        normalization: Literal["mean", "range", "std", "l2"] = "mean",
        num_outputs: int = 1,
    ) -> None:
        super().__init__()
        if normalization not in ("mean", "range", "std", "l2"):
            raise ValueError(f"normalization: {normalization!r}; choose from mean, range, std, l2")
        self.normalization = normalization
        self.num_outputs = num_outputs
        infinity = torch.tensor(torch.inf, dtype=torch.float64)
        self.add_state("lowest", infinity, dist_reduce_fx="min")
        self.add_state("highest", -infinity, dist_reduce_fx="max")

    def update(self, predictions: Tensor, targets: Tensor) -> None:
        super().update(predictions, targets)
        self.lowest = torch.minimum(self.lowest, targets.amin(0))
        self.highest = torch.maximum(self.highest, targets.amax(0))

    def compute(self) -> Tensor:
        count, target, error = self.gather()
        root = (error.squares / count + error.mean.square()).sqrt()
        divisors = {
            "mean": target.mean,
            "range": self.highest - self.lowest,
            "std": (target.squares / count).sqrt(),
            "l2": (target.squares + count * target.mean.square()).sqrt(),
        }
        divisor = divisors[self.normalization]
        if (divisor == 0).any():
            raise UndefinedValueError(f"the {self.normalization} of the targets is 0")
        return root / divisor
