"""Length, precision and devices of a cell's training, and what is recorded meanwhile."""

import importlib.util
from abc import abstractmethod
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field, FiniteFloat, PositiveFloat, PositiveInt, field_validator

from lit_attn.config.callbacks import CallbackConfig
from lit_attn.files import one_at_a_time
from lit_attn.optim.averaging import WeightAverage
from lit_attn.schema.base import Config, Kind, consistency_check, must_be, outside_identity
from lit_attn.schema.errors import ConfigError
from lit_attn.schema.publish import has_secret

if TYPE_CHECKING:
    from lightning.pytorch.loggers.logger import Logger

DiagnosticKind = Literal["residual", "rank", "maps", "heads", "mixture", "keys", "likelihood"]

# Diagnostics that need samples; the others read weights only.
SAMPLED_KINDS = {"residual", "rank", "maps", "keys", "likelihood"}


class DiagnosticsConfig(Config):
    """Quantities of the attention layers that the papers plot, recorded at evaluations.

    *residual*: norms and angles of MH and Delta (BeliefFormer Fig. 3); *rank*: ranks of the
    attention matrices (MGK Fig. 2, 7); *maps*: the attention matrices of one sample (MGK Fig. 6);
    *heads*: diversity of the QK and OV circuits (DCMHA Fig. 5); *mixture*: the learned pi (MGK
    Table 8); *keys*: W_K and the keys of one sample (MGK Fig. 13, 14); *likelihood*: the negative
    log-likelihood of the queries (MGK section 3.4). A layer without such a quantity, for example
    linear keys without a likelihood, records nothing, because a study compares mechanisms.
    """

    kinds: tuple[DiagnosticKind, ...] = Field(min_length=1, description="quantities to record")
    samples: PositiveInt = Field(32, description="samples of the first evaluation batches to read")
    every: PositiveInt = Field(
        1, description="evaluations between records; the last evaluation is always recorded"
    )
    first_epoch_every: PositiveInt | None = Field(
        None, description="steps between further records in the first epoch; null: none"
    )


class MetricLogger(Kind):
    """Logger of an experiment tracker, which receives the metrics beside the cell's own records."""

    package: ClassVar[str]
    """Module of the tracker's Python package."""

    def check_files(self) -> None:
        """Raise ConfigError if the tracker's package is not installed."""
        if importlib.util.find_spec(self.package) is None:
            raise ConfigError(
                f"{self.kind} needs {self.package}, which is not installed:"
                " pip install 'lit_attn[trackers]'"
            )

    @abstractmethod
    def build(self, study: str, name: str, identity: str, folder: Path) -> "Logger":
        """Return Lightning's logger for the cell `name` (VARIANT/SEED) of `study`.

        Further attempts of the cell continue the run with this `identity`; `folder` is the cell's.
        """

    def close(self, logger: "Logger", has_succeeded: bool) -> None:
        """End the run at the end of an attempt."""
        status = "success" if has_succeeded else "failed"
        logger.finalize(status)


class MLflowLogger(MetricLogger, kind="mlflow"):
    """MLflow: a study is an experiment, and a cell is a run with the tag `identity`."""

    package: ClassVar[str] = "mlflow"
    uri: str = Field(description="http://host:5000 of a server, or sqlite:////path/mlflow.db")

    @field_validator("uri")
    @classmethod
    def _has_no_secret(cls, uri: str) -> str:
        """Refuse a password, which config.yaml of every cell would contain."""
        if has_secret(uri):
            raise ValueError(
                "contains a password or token, which the files of every cell would contain; "
                "remove it, and set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, "
                "or the password file of your database"
            )
        return uri

    def build(self, study: str, name: str, identity: str, folder: Path) -> "Logger":
        from lightning.pytorch.loggers import MLFlowLogger
        from mlflow.tracking import MlflowClient

        if self.uri.startswith("sqlite:///"):
            shared_path = Path(self.uri.removeprefix("sqlite:///"))
        else:
            shared_path = folder.absolute().parents[1]
        # Cells that create the tables of a database, or an experiment, at the same time would fail.
        with one_at_a_time(shared_path.parent, shared_path.name):
            client = MlflowClient(self.uri)
            experiment = client.get_experiment_by_name(study)
            run_id = None
            if experiment is not None:
                tag = f"tags.identity = '{identity}'"
                runs = client.search_runs([experiment.experiment_id], tag)
                if runs:
                    run_id = runs[0].info.run_id
            logger = MLFlowLogger(
                study,
                run_name=name,
                run_id=run_id,
                tracking_uri=self.uri,
                tags={"identity": identity},
            )
            _ = logger.experiment  # Creates the experiment and the run.
            return logger


class WandbLogger(MetricLogger, kind="wandb"):
    """Weights & Biases: a study is a group of a project, and a cell is a run."""

    package: ClassVar[str] = "wandb"
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
        exit_code = 0 if has_succeeded else 1
        logger.experiment.finish(exit_code=exit_code)


class Stopping(Config):
    """Early stopping: after `patience` evaluations without an improvement, or past `threshold`."""

    metric: Annotated[
        str, must_be(lambda name: name.startswith("val/"), "a metric of validation, as val/loss")
    ] = Field("val/loss", description="metric of the validation split")
    patience: PositiveInt = Field(description="evaluations without an improvement")
    threshold: FiniteFloat | None = Field(
        None,
        description="value beyond which the metric ends the training, as .99 of an accuracy, which "
        "is logged as a fraction; null: none",
    )


class StartWeights(Config):
    """Weights of another training, with which the cells of a study start.

    The file is a cell's `checkpoints/weights.pt`, a checkpoint of Lightning or timm, or a file of
    safetensors. An attention layer keeps the initial values of the tensors that the file lacks,
    because the variants of a study differ in their layers.
    """

    name: str = Field(description="name of the weights, which stands for them in the identity")
    path: Path = Field(description="file of the weights", json_schema_extra={"identity": False})
    new: tuple[str, ...] = Field(
        (),
        description="patterns of parameters that keep their initial values, such as `head.*`",
    )

    def check_files(self) -> None:
        """Raise ConfigError if there is no such file."""
        if not self.path.is_file():
            raise ConfigError(f"path: no file {self.path}")


class Training(Config):
    """Length, precision and devices of a cell's training."""

    epochs: PositiveInt = Field(description="passes over data, or multiples of `data.epoch_steps`")
    precision: Literal["fp32", "tf32", "bf16", "fp16"] = Field(
        "fp32",
        description="arithmetic of the forward and backward pass; tf32: float32 tensors, whose "
        "matrix products and convolutions round their factors to 10 bits (GPUs from Ampere on); "
        "the others compute no product in TF32",
    )
    evaluation: Literal["fp32", "as-training"] = Field(
        "fp32", description="arithmetic of evaluations; as-training: the same as `precision`"
    )
    clip: PositiveFloat | None = Field(None, description="largest gradient norm; null: no clipping")
    max_steps: PositiveInt | None = Field(
        None, description="training steps after which the cell stops; null: all epochs"
    )
    stretch: PositiveFloat = Field(
        1.0,
        description="factor on the number of training steps, rounded to whole steps; the schedule "
        "is stretched with them (the `match: flops | time` of a study sets it)",
    )
    weights: StartWeights | None = Field(
        None, description="weights of another training to start with; null: those of the model"
    )
    freeze: tuple[str, ...] = Field(
        (), description="patterns of the names of parameters that are not trained: `blocks.0.*`"
    )
    evaluate_every: PositiveInt = Field(1, description="epochs between evaluations")
    average: WeightAverage | None = Field(None, description="average of the weights to evaluate")
    stop: Stopping | None = Field(None, description="early stopping; null: never")
    compile: Literal["auto", "blocks", "step", "none"] = outside_identity(
        "auto",
        "use of torch.compile; blocks: each block of the network is compiled; auto: blocks on a "
        "GPU, none on a CPU; step: blocks, and the whole training step is recorded as one CUDA "
        "graph, for small models on a GPU whose batches have one shape; none: nothing is compiled",
    )
    accelerator: Literal["auto", "cpu", "cuda"] = outside_identity("auto", "device to train on")
    devices: PositiveInt = outside_identity(1, "devices that share every batch")
    strategy: Literal["ddp", "fsdp"] = outside_identity(
        "ddp",
        "division of the training among devices; ddp: each device has all weights; fsdp: each "
        "device keeps a part of every weight, gradient and state of the optimiser, for models "
        "larger than a device",
    )
    recompute: Literal["none", "blocks"] = outside_identity(
        "none",
        "parts that are computed once more for the gradient, to save memory; blocks: each block of "
        "the network, which keeps its input only",
    )
    checkpoint_every: PositiveFloat = outside_identity(60.0, "seconds between checkpoints")
    diagnostics: DiagnosticsConfig | None = outside_identity(
        None, "records of attention layers; null: none"
    )
    loggers: tuple[MetricLogger, ...] = outside_identity(
        (), "experiment trackers that receive the metrics; tensorboard and csv are always written"
    )

    log_every: PositiveInt = outside_identity(
        50,
        "training steps between two whose values TensorBoard shows, as Lightning's "
        "log_every_n_steps; shorter epochs have one such step",
    )
    histograms: tuple[str, ...] = outside_identity(
        (),
        "patterns of the names of parameters, such as `*norm*`, whose histograms TensorBoard shows "
        "at every evaluation",
    )
    profiler: Literal["simple", "advanced", "pytorch"] | None = outside_identity(
        None, "Lightning's profiler, which writes to the folder of the cell; null: none"
    )
    callbacks: tuple[CallbackConfig, ...] = Field(
        (),
        description="callbacks of Lightning, which run after those of the cell; one that can "
        "change a result is part of the identity",
    )

    @consistency_check
    def _has_different_callbacks(self) -> None:
        """Refuse two equal callbacks, whose states in a checkpoint would be one."""
        for number, callback in enumerate(self.callbacks):
            if callback in self.callbacks[:number]:
                raise ValueError("callbacks: the same callback stands there twice; remove one")

    @consistency_check
    def _has_a_device_with_tf32(self) -> None:
        if self.precision == "tf32" and self.accelerator == "cpu":
            raise ValueError("precision: tf32 needs a GPU, and `accelerator` is cpu; write fp32")

    @consistency_check
    def _records_whole_steps(self) -> None:
        if self.compile == "step" and self.recompute == "blocks":
            raise ValueError(
                "compile: step records the network, and recompute: blocks computes each block "
                "again outside of that record; write compile: blocks or recompute: none"
            )

    def identity(self) -> dict[str, Any]:
        """Return the identity, without the callbacks that change no result."""
        # A copy, because the identity of the base class is cached.
        identity = dict(super().identity())
        identity.pop("callbacks", None)
        if self.changing_callbacks:
            identity["callbacks"] = [callback.identity() for callback in self.changing_callbacks]
        return identity

    @property
    def changing_callbacks(self) -> list[CallbackConfig]:
        """The callbacks that can change a result, for example by ending the training."""
        return [callback for callback in self.callbacks if not callback.is_observer]

    @property
    def is_distributed(self) -> bool:
        """True if several processes, each with a device of its own, train a cell together."""
        return self.devices > 1

    @property
    def is_sharded(self) -> bool:
        """True if the weights are sharded; one device has nothing to share."""
        return self.strategy == "fsdp" and self.is_distributed

    @property
    def is_compiled_by_block(self) -> bool:
        """True if `compile` cannot compile the network as a whole."""
        return self.is_sharded or self.recompute == "blocks"

    @field_validator(
        "loggers",
        mode="before",
        json_schema_input_type=tuple[MetricLogger | Literal["tensorboard", "csv"], ...],
    )
    @classmethod
    def _name_own_records(cls, value: Any) -> Any:
        """Accept the records that every cell writes in the list, and drop them from it."""
        if not isinstance(value, list | tuple):
            return value
        return [item for item in value if item not in ("tensorboard", "csv")]

    def steps(self, steps_per_epoch: int) -> int:
        """Return the number of training steps."""
        steps = self.epochs * steps_per_epoch
        if self.max_steps is not None:
            steps = min(steps, self.max_steps)
        return max(1, round(self.stretch * steps))
