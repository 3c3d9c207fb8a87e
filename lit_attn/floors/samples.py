"""Floors of single samples: frequent classes, nearest neighbours and models of scikit-learn.

Shapes: N samples, F features (float), classes (N,) int, or K numbers to predict (N, K).
"""

import warnings
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lit_attn.floors.base import FREQUENT_CLASS, Floor, spread_places

Features = NDArray[np.floating[Any]]

CLASS_RULES = (FREQUENT_CLASS, "1 nearest neighbour", "logistic regression")
NUMBER_RULES = ("mean", "ridge regression", "gradient-boosted trees")

MOST_NEIGHBOURS = 20_000
"""Most training samples that a nearest neighbour is searched among."""

MOST_FITTED = 5_000
"""Most training samples that a model of scikit-learn is fitted to."""

MOST_EVALUATED = 2_000
"""Most evaluated samples, evenly spread over the split."""


class Samples(NamedTuple):
    """Features (N, F) and classes (N,) or numbers (N, K) of one split, without augmentation."""

    features: Features
    targets: NDArray[Any]

    def spread(self, most: int) -> "Samples":
        """Return at most `most` samples, evenly spread."""
        places = spread_places(len(self.targets), most)
        return Samples(self.features[places], self.targets[places])


def class_floors(train: Samples, evaluated: Samples) -> list[Floor]:
    """Return the accuracies of the most frequent class, a neighbour and logistic regression."""
    from sklearn.linear_model import LogisticRegression
    from sklearn.neighbors import KNeighborsClassifier
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    frequent = np.bincount(train.targets).argmax()
    accuracy = float((evaluated.targets == frequent).mean())
    floors = [Floor(FREQUENT_CLASS, {"accuracy": accuracy}, _conditions(train, evaluated))]
    logistic = make_pipeline(StandardScaler(), LogisticRegression(max_iter=500))
    models = ((KNeighborsClassifier(1), MOST_NEIGHBOURS), (logistic, MOST_FITTED))
    for name, (model, most) in zip(CLASS_RULES[1:], models, strict=True):
        floors.append(_score(name, model, train.spread(most), evaluated.spread(MOST_EVALUATED)))
    return floors


def _score(name: str, model: Any, train: Samples, evaluated: Samples) -> Floor:
    """Return the accuracy of a classifier of scikit-learn."""
    with warnings.catch_warnings():
        # A regression that has not converged is a lower floor, and no mistake.
        warnings.simplefilter("ignore")
        model.fit(train.features, train.targets)
    accuracy = float((model.predict(evaluated.features) == evaluated.targets).mean())
    return Floor(name, {"accuracy": accuracy}, _conditions(train, evaluated))


def number_floors(train: Samples, evaluated: Samples) -> list[Floor]:
    """Return the errors of the mean, ridge regression and gradient-boosted trees."""
    from sklearn.dummy import DummyRegressor
    from sklearn.ensemble import HistGradientBoostingRegressor
    from sklearn.linear_model import Ridge
    from sklearn.multioutput import MultiOutputRegressor
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    trees = MultiOutputRegressor(HistGradientBoostingRegressor(random_state=0))
    models = (DummyRegressor(), make_pipeline(StandardScaler(), Ridge()), trees)
    fitted, scored = train.spread(MOST_FITTED), evaluated.spread(MOST_EVALUATED)
    floors = []
    for name, model in zip(NUMBER_RULES, models, strict=True):
        model.fit(fitted.features, fitted.targets)
        predicted = np.asarray(model.predict(scored.features)).reshape(scored.targets.shape)
        values = _regression_values(predicted, scored.targets)
        floors.append(Floor(name, values, _conditions(fitted, scored)))
    return floors


def _regression_values(predicted: NDArray[Any], targets: NDArray[Any]) -> dict[str, float]:
    """Return mean absolute error, root mean squared error, mean squared error and R squared."""
    from sklearn.metrics import mean_absolute_error, mean_squared_error, r2_score

    wanted = targets.astype(np.float64)
    loss = float(mean_squared_error(wanted, predicted))
    values = {
        "mae": float(mean_absolute_error(wanted, predicted)),
        "rmse": loss**0.5,
        "loss": loss,
    }
    wanted_columns = wanted.reshape(len(wanted), -1)
    varies = wanted_columns.max(0) > wanted_columns.min(0)
    if varies.any():
        # Constant targets have no R squared, as in lit_attn.tasks.square_metrics.
        predicted_columns = predicted.reshape(len(wanted), -1)
        values["r2"] = float(r2_score(wanted_columns[:, varies], predicted_columns[:, varies]))
    return values


def _conditions(train: Samples, evaluated: Samples) -> str:
    """Return the words for the numbers of samples."""
    return f"{len(train.targets):,} training samples, {len(evaluated.targets):,} evaluated"
