"""Transformer over the columns of a table (Gorishniy et al. 2021, arXiv:2106.11959, section 3.3).

Shapes: B batch, F columns of numbers, C columns of categories, n = 1 + F + C tokens, d width.
"""

from typing import Any, Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F

from lit_attn import signatures
from lit_attn.models.layers import Device, norm
from lit_attn.models.seeded_draws import draw_parameters
from lit_attn.models.token_transformer import Init, TokenTransformer
from lit_attn.models.trunk import Block, initialise


class ColumnTokens(nn.Module):
    """Token of each column: x_j W_j + b_j for a number, E_j[x_j] + b_j for a category.

    numbers (B, F) and categories (B, C) -> (B, n, d), with the class token first. Category j has
    `sizes[j]` + 1 rows in E_j, the first one for values that the training rows lack.
    """

    def __init__(self, numbers: int, sizes: tuple[int, ...], dim: int, device: Device) -> None:
        super().__init__()
        self.sizes = sizes
        self.cls_token = nn.Parameter(torch.empty(1, dim, device=device))
        self.offsets = nn.Parameter(torch.empty(numbers + len(sizes), dim, device=device))
        self.scales: nn.Parameter | None = None
        self.values: nn.Parameter | None = None
        if numbers:
            self.scales = nn.Parameter(torch.empty(numbers, dim, device=device))
        if sizes:
            rows = sum(sizes) + len(sizes)
            self.values = nn.Parameter(torch.empty(rows, dim, device=device))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw all parameters uniformly within 1 / sqrt(d), as the paper's code does."""
        bound = self.cls_token.shape[1] ** -0.5
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -bound, bound)

    def no_weight_decay(self) -> set[str]:
        """Return all parameters: the paper does not decay those of the columns."""
        return {name for name, _ in self.named_parameters()}

    def forward(self, numbers: Tensor, categories: Tensor) -> Tensor:
        tokens = []
        if self.scales is not None:
            tokens.append(numbers[:, :, None] * self.scales)
        if self.values is not None:
            first_row = 0
            for column, size in enumerate(self.sizes):
                rows = categories[:, column : column + 1] + first_row
                tokens.append(F.embedding(rows, self.values))
                first_row += size + 1
        columns = torch.cat(tokens, dim=1) + self.offsets
        first = self.cls_token.expand(len(columns), 1, -1).to(columns.dtype)
        return torch.cat([first, columns], dim=1)


class FeatureTransformer(nn.Module):
    """Blocks over the tokens of the columns, then norm, ReLU and Linear of the class token."""

    def __init__(
        self,
        model: "FeatureTransformerConfig",
        numbers: int,
        categories: tuple[int, ...],
        outputs: int,
        device: Device = None,
    ) -> None:
        """Build a network with `outputs` outputs; initialise it except on "meta"."""
        super().__init__()
        self.columns = ColumnTokens(numbers, categories, model.dim, device)
        self.dropout = nn.Dropout(model.dropout)
        self.blocks = nn.ModuleList(Block(model, number, device) for number in range(model.depth))
        last = norm(model.norm, model.dim, model.norm_eps, device)
        self.norm = last if model.norm_order == "pre" else nn.Identity()
        self.head = nn.Linear(model.dim, outputs, device=device)
        draw_parameters(self, lambda: initialise(self, model, tied=False))

    def forward(self, numbers: Tensor, categories: Tensor) -> Tensor:
        """Return the outputs (B, outputs) of numbers (B, F) and categories (B, C)."""
        x = self.dropout(self.columns(numbers, categories))
        for block in self.blocks:
            x = block(x, None, False, None)
        return self.head(F.relu(self.norm(x[:, 0])))


class FeatureTransformerConfig(TokenTransformer, kind="feature-transformer"):
    """Transformer over one token for each column of a table, and a class token.

    It is the FT-Transformer of Gorishniy et al. 2021 (arXiv:2106.11959), but for its ReGLU and the
    norm before the first attention, which that model leaves out.
    """

    takes = (signatures.ColumnLabels, signatures.ColumnTargets)
    builder = (
        FeatureTransformer,
        "numbers",
        "categories",
        "outputs",
    )

    positions: Literal["learned"] = Field(
        "learned", description="every column has weights of its own, so there are no others"
    )
    embedding_scale: Literal["one"] = Field("one", description="factor of the tokens")
    norm: Literal["layernorm", "layernorm-unbiased", "rmsnorm", "rmsnorm-unweighted"] = Field(
        "layernorm", description="kind of normalisation layer"
    )
    bias: Literal["none", "ffn", "all"] = Field("all", description="Linears with a bias in blocks")
    init: Init = Field(
        Init(matrices="torch", embedding="torch", depth_scaled=False),
        description="initial values of the parameters; those of the columns are uniform within "
        "1 / sqrt(dim)",
    )

    def exempt_parameters(self) -> tuple[str, ...]:
        return ()

    def check(self, signature: Any) -> None:
        super().check(signature)
        reason = "columns have no order"
        if any(self.windows):
            raise ValueError(f"windows: {reason}, so a window has no meaning; remove it")
        for spec in self.attention.mechanisms:
            if spec.window is not None:
                raise ValueError(f"attention.window: {reason}, so it has no meaning; remove it")
            for family, part in spec.parts.items():
                if part.needs_order:
                    raise ValueError(
                        f"attention.{family}: '{part.kind}' {part.needs_order}, and {reason}; "
                        "remove it"
                    )
