"""Loggers of experiment trackers, which receive a cell's metrics beside its own records.

Every cell writes metrics.csv and TensorBoard's files. `training.loggers` adds services such as
MLflow or Weights & Biases, through Lightning's loggers. They are not part of a cell's identity.
"""

import importlib.util
from abc import abstractmethod
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field

from lit_attn.schema.base import Kind
from lit_attn.schema.errors import ConfigError

if TYPE_CHECKING:
    from lightning.pytorch.loggers.logger import Logger


class MetricLogger(Kind):
    """Base of the loggers of experiment trackers."""

    package: ClassVar[str]
    """Module of the tracker's Python package."""

    def check_files(self) -> None:
        """Raise ConfigError if the tracker's package is not installed."""
        if importlib.util.find_spec(self.package) is None:
            raise ConfigError(
                f"{self.kind} needs {self.package}, which is not installed: "
                "pip install 'lit_attn[trackers]'"
            )

    @abstractmethod
    def build(self, study: str, name: str, identity: str, folder: Path) -> "Logger":
        """Return Lightning's logger for the cell `name` (VARIANT/SEED) of `study`.

        A further attempt of the cell continues the same run, which `identity` finds. `folder` is
        the cell's folder.
        """

    def close(self, logger: "Logger", has_succeeded: bool) -> None:
        """End the run at the end of an attempt."""
        logger.finalize("success" if has_succeeded else "failed")


class MLflowLogger(MetricLogger):
    """MLflow: a study is an experiment, and a cell is a run with the tag `identity`."""

    package: ClassVar[str] = "mlflow"
    kind: Literal["mlflow"] = "mlflow"
    uri: str = Field(
        description="address of the server or the database, as in http://host:5000 or "
        "sqlite:////path/mlflow.db"
    )

    def build(self, study: str, name: str, identity: str, folder: Path) -> "Logger":
        from lightning.pytorch.loggers import MLFlowLogger
        from mlflow.tracking import MlflowClient

        client = MlflowClient(self.uri)
        experiment = client.get_experiment_by_name(study)
        runs = experiment and client.search_runs(
            [experiment.experiment_id], f"tags.identity = '{identity}'"
        )
        run_id = runs[0].info.run_id if runs else None
        tags = {"identity": identity}
        return MLFlowLogger(study, run_name=name, tracking_uri=self.uri, tags=tags, run_id=run_id)


class WandbLogger(MetricLogger):
    """Weights & Biases: a study is a group of a project, and a cell is a run."""

    package: ClassVar[str] = "wandb"
    kind: Literal["wandb"] = "wandb"
    project: str = Field(description="name of the project")
    entity: str | None = Field(None, description="user or team; null: your default")
    offline: bool = Field(False, description="write to the cell's folder only, for `wandb sync`")

    def build(self, study: str, name: str, identity: str, folder: Path) -> "Logger":
        from lightning.pytorch.loggers import WandbLogger

        return WandbLogger(
            project=self.project,
            entity=self.entity,
            offline=self.offline,
            group=study,
            name=name,
            id=identity,
            resume="allow",
            save_dir=folder,
        )

    def close(self, logger: Any, has_succeeded: bool) -> None:
        logger.experiment.finish(exit_code=0 if has_succeeded else 1)
