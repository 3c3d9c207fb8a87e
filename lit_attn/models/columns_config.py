"""Configuration of the transformer over the columns of a table."""

from typing import Any, ClassVar, Literal

from pydantic import Field

from lit_attn import signatures
from lit_attn.models.language_config import Init, TokenTransformer


class FeatureTransformerConfig(TokenTransformer, kind="feature-transformer"):
    """Transformer over one token for each column of a table, and a class token.

    It is the FT-Transformer of Gorishniy et al. 2021 (arXiv:2106.11959), but for its ReGLU and the
    norm before the first attention, which that model leaves out.
    """

    takes = (signatures.ColumnLabels, signatures.ColumnTargets)
    builder: ClassVar[tuple[str, ...]] = (
        "lit_attn.models.columns:FeatureTransformer",
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
        if any(self.windows):
            raise ValueError(
                "windows: columns have no order, so a window has no meaning; remove it"
            )
