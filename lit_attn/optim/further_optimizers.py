"""Optimisers of torch and timm beyond Adam, several optimisers as one, and those of a user.

Sources: Muon, Jordan et al. 2024, https://kellerjordan.github.io/posts/muon, and Liu et al. 2025,
https://arxiv.org/abs/2502.16982 (`adjust: match-adamw`); Lion, Chen et al. 2023,
https://arxiv.org/abs/2302.06675; Adafactor, Shazeer & Stern 2018, https://arxiv.org/abs/1804.04235.
"""

import inspect
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field, PositiveFloat, PositiveInt

from lit_attn.optim.base import AdamW, Optimizer, find_declared
from lit_attn.schema.base import Config, OwnClass, Share, load
from lit_attn.schema.errors import ConfigError

if TYPE_CHECKING:
    import torch
    from torch import nn


JOINED = "lit_attn.optim.joined_optimizer"
"""Module of the optimiser that joins several; it is loaded at first use, because it needs torch."""


class Lion(Optimizer, kind="lion"):
    """Lion (Chen et al. 2023), of timm: steps of the sign of a momentum, decoupled weight decay."""

    betas: tuple[Share, Share] = Field(
        (0.9, 0.99), description="shares of the momentum in a step, and decay of the momentum"
    )

    def build(self, module: "nn.Module", fused: bool = True) -> "torch.optim.Optimizer":
        optimizer_class = load("timm.optim:Lion")
        parameters = self.grouped_parameters(module)
        built: torch.optim.Optimizer = optimizer_class(
            parameters, lr=self.lr, betas=self.betas, weight_decay=self.weight_decay
        )
        return built


class Adafactor(Optimizer, kind="adafactor"):
    """Adafactor (Shazeer & Stern 2018), of torch: mean squares of rows and of columns alone.

    The step of a tensor is scaled by the root mean square of the tensor, so `lr` is relative.
    """

    # torch's code changes norms of rows and columns in place, which those of shards do not allow.
    takes_shards = False
    beta2_decay: float = Field(-0.8, le=0, description="exponent of the decay of the mean squares")
    clip_threshold: PositiveFloat = Field(1.0, description="largest root mean square of a step")

    def build(self, module: "nn.Module", fused: bool = True) -> "torch.optim.Optimizer":
        import torch

        return torch.optim.Adafactor(
            self.grouped_parameters(module),
            lr=self.lr,
            beta2_decay=self.beta2_decay,
            d=self.clip_threshold,
            weight_decay=self.weight_decay,
        )


class OtherParameters(Config):
    """AdamW's settings for the parameters that Muon leaves out."""

    lr: PositiveFloat = Field(3e-4, description="peak learning rate, which the schedule scales")
    weight_decay: float = Field(0.0, ge=0, description="weight-decay coefficient")
    betas: tuple[Share, Share] = Field(
        (0.9, 0.95), description="decays of the means of gradients and of their squares"
    )
    eps: PositiveFloat = Field(1e-8, description="added to the root of the mean square")
    decay: Literal["all", "matrices", "weights"] = Field(
        "all", description="parameters with weight decay, as for `adamw`"
    )


class Muon(Optimizer, kind="muon"):
    """Muon for the matrices of hidden layers, and AdamW for all other parameters.

    Muon makes the momentum of a matrix orthogonal by Newton-Schulz steps (torch.optim.Muon). The
    others are vectors, embeddings, convolutions, outputs, and parameters that the parts of a
    network exempt from weight decay. The schedule scales both learning rates by the same factor.
    """

    adamw: OtherParameters = Field(
        OtherParameters(), description="settings of AdamW for all other parameters"
    )
    momentum: Share = Field(0.95, description="decay of the momentum")
    nesterov: bool = Field(True, description="Nesterov's momentum")
    steps: PositiveInt = Field(5, description="Newton-Schulz steps")
    adjust: Literal["original", "match-adamw"] = Field(
        "original",
        description="factor of the step of an A x B matrix; original: sqrt(max(1, A / B)); "
        "match-adamw: 0.2 sqrt(max(A, B)), so that learning rates of AdamW can be kept",
    )
    outputs: tuple[str, ...] = Field(
        ("*head.weight", "*head.*.weight", "*classifier.*weight", "*classes.weight"),
        description="patterns of the names of output projections, which Muon leaves out",
    )

    def build(self, module: "nn.Module", fused: bool = True) -> "torch.optim.Optimizer":
        """Raise ConfigError if the network has no matrix of a hidden layer."""
        import torch

        matrices = self.list_matrices(module)
        if not matrices:
            raise ConfigError(
                "optimizer: muon: the network has no matrix of a hidden layer; choose adamw"
            )
        adjustments = {"original": "original", "match-adamw": "match_rms_adamw"}
        parameters = self.group_by_layer(module, list(matrices.values()))
        muon = torch.optim.Muon(
            parameters,
            lr=self.lr,
            momentum=self.momentum,
            nesterov=self.nesterov,
            ns_steps=self.steps,
            weight_decay=self.weight_decay,
            adjust_lr_fn=adjustments[self.adjust],
        )
        chosen = {id(parameter) for parameter in matrices.values()}
        others = load(f"{JOINED}:PartialModule")(module, chosen)
        settings = AdamW(**dict(self.adamw), layer_decay=self.layer_decay)
        adamw = settings.build(others, fused)
        for group in adamw.param_groups:
            group["lr_scale"] = group.get("lr_scale", 1.0) * (self.adamw.lr / self.lr)
        joined: torch.optim.Optimizer = load(f"{JOINED}:JoinedOptimizer")([muon, adamw])
        return joined

    def list_matrices(self, module: "nn.Module") -> dict[str, "nn.Parameter"]:
        """Return the trainable matrices of hidden layers by name."""
        from torch import nn

        embeddings = set()
        for part in module.modules():
            if isinstance(part, nn.Embedding):
                embeddings.add(id(part.weight))
        exempt = [*self.outputs, *find_declared(module, "no_weight_decay")]
        exempt += find_declared(module, "stacked_vectors")
        matrices = {}
        for name, parameter in module.named_parameters():
            is_matrix = parameter.requires_grad and parameter.ndim == 2
            is_exempt = any(fnmatchcase(name, pattern) for pattern in exempt)
            if is_matrix and not is_exempt and id(parameter) not in embeddings:
                matrices[name] = parameter
        return matrices


class ModuleOptimizer(OwnClass, Optimizer, kind="module"):
    """An optimiser class of a user or of another package.

    It is called with the trainable parameters, `lr`, the `arguments`, and `weight_decay` if it is
    not 0. The schedule sets `lr` in every group of parameters.
    """

    base_class: ClassVar[str] = "torch.optim:Optimizer"
    runs_foreign_code: ClassVar[bool] = True

    def build(self, module: "nn.Module", fused: bool = True) -> "torch.optim.Optimizer":
        """Raise ConfigError if the class does not accept its arguments, or needs a closure."""
        optimizer_class = self.load()
        closure = inspect.signature(optimizer_class.step).parameters.get("closure")
        if closure is not None and closure.default is inspect.Parameter.empty:
            raise ConfigError(
                f"optimizer: {self.target} needs a closure, with which it computes the loss several"
                " times in a step, and a step of this training computes the loss once; choose an"
                " optimiser whose `step` needs no closure, such as adamw"
            )
        arguments = {"lr": self.lr, **self.arguments}
        if self.weight_decay:
            arguments["weight_decay"] = self.weight_decay
        parameters = self.grouped_parameters(module)
        try:
            built: torch.optim.Optimizer = optimizer_class(parameters, **arguments)
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"optimizer: {self.target} does not accept {', '.join(arguments)}: {error}"
            ) from error
        return built
