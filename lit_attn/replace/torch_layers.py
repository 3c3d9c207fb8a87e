"""Adapter of torch.nn.MultiheadAttention for `replace_attention`.

Shapes: B batch, n tokens, d width.
"""

from typing import Any

import torch
from torch import Tensor, nn

from lit_attn.attention.spec import AttentionSpec
from lit_attn.replace.adapter import Adapter, describe_cross_problem
from lit_attn.replace.projections import Projections, linear


class Torch(Adapter):
    """torch.nn.MultiheadAttention, as self-attention or as cross-attention.

    The keys and values of cross-attention are those of one tensor, the memory.
    """

    keeps_tokens = True
    adds_to_logits = False
    moved = ("in_proj_weight", "in_proj_bias", "out_proj")
    known = (
        "add_zero_attn",
        "batch_first",
        "bias_k",
        "bias_v",
        "dropout",
        "embed_dim",
        "head_dim",
        "k_proj_weight",
        "kdim",
        "num_heads",
        "q_proj_weight",
        "v_proj_weight",
        "vdim",
    )

    @classmethod
    def check_place(cls, parent: nn.Module, name: str, spec: AttentionSpec) -> None:
        problem = spec.find_cross_problem()
        if problem and reads_memory(parent, name):
            raise ValueError(f"{describe_cross_problem(problem)}; name it in `skip` to keep it")

    def check_call(self, values: tuple[Any, ...], named: dict[str, Any]) -> None:
        arguments = dict(zip(("query", "key", "value"), values, strict=False)) | named
        problem = self.find_problem(arguments["query"], arguments["key"], arguments["value"])
        if problem:
            raise self.refusal(problem)

    def detach(self) -> None:
        super().detach()
        # nn.TransformerEncoderLayer reads it to find out that its fused kernel does not apply.
        self.original.in_proj_bias = None

    def read(self, original: nn.MultiheadAttention) -> Projections:
        if original.in_proj_weight is None or original.bias_k is not None or original.add_zero_attn:
            raise ValueError("it has keys or values of another width, or additional ones")
        return Projections(
            heads=original.num_heads,
            qkv=linear(original.in_proj_weight, original.in_proj_bias),
            proj=original.out_proj,
            attn_drop=original.dropout,
        )

    def find_problem(self, query: Tensor, key: Tensor, value: Tensor) -> str:
        """Return why the layer cannot compute a call with these tensors, or an empty text."""
        if query.is_nested:
            return "it is called with nested tensors"
        if not is_same(key, value):
            return "it is called with other values than keys, which the layer cannot separate"
        if not is_same(query, key) and self.layer.cross_problem:
            return describe_cross_problem(self.layer.cross_problem)
        return ""

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, None]:
        """Return the output and None in place of the weights.

        Boolean masks are True where a query must not attend. Raises ValueError, which begins with
        the path of the layer, for a call that the layer cannot compute.
        """
        problem = self.find_problem(query, key, value)
        if problem:
            raise self.refusal(problem)
        if is_causal and attn_mask is None:
            raise self.refusal("it is called with `is_causal` and without `attn_mask`")
        x = self._to_batches(query)
        memory = None if is_same(query, key) else self._to_batches(key)
        mask = self._join_masks(x, attn_mask, key_padding_mask)
        out = self.layer(x, mask, memory=memory)
        if query.ndim == 2:
            return out.squeeze(0), None
        return out if self.batch_first else out.transpose(0, 1), None

    def _join_masks(
        self, x: Tensor, attn_mask: Tensor | None, key_padding_mask: Tensor | None
    ) -> Tensor | None:
        """Return PyTorch's two masks as one mask of the layer, or None without a mask.

        A boolean mask of PyTorch is True where a query must not attend.
        """
        masks = []
        if attn_mask is not None:
            if attn_mask.ndim == 3:
                attn_mask = attn_mask.unflatten(0, (-1, self.num_heads))
            masks.append(attn_mask)
        if key_padding_mask is not None:
            masks.append(key_padding_mask.view(-1, 1, 1, key_padding_mask.shape[-1]))
        if not masks:
            return None
        if len(masks) == 1 and masks[0].dtype == torch.bool:
            return ~masks[0]
        total = x.new_zeros(())
        for mask in masks:
            if mask.dtype == torch.bool:
                mask = torch.zeros_like(mask, dtype=x.dtype).masked_fill(mask, float("-inf"))
            total = total + mask
        return total

    def _to_batches(self, tokens: Tensor) -> Tensor:
        """Return tokens (B, n, d) of a batch in the module's order, or of one sequence (n, d)."""
        if tokens.ndim == 2:
            return tokens.unsqueeze(0)
        return tokens if self.batch_first else tokens.transpose(0, 1)


def reads_memory(parent: nn.Module, name: str) -> bool:
    """Return True if the class of `parent` calls its child `name` as cross-attention.

    False also stands for a class whose calls are not known; the call itself is then checked.
    """
    if isinstance(parent, nn.TransformerDecoderLayer):
        return name == "multihead_attn"
    # mmsegmentation's MixVisionTransformer and Twins: keys are those of a smaller map.
    bases = {base.__name__ for base in type(parent).__mro__}
    return "EfficientMultiheadAttention" in bases and getattr(parent, "sr_ratio", 1) > 1


def is_same(a: Tensor, b: Tensor) -> bool:
    """Return True if both are one tensor, or equal views of one tensor (mmcv transposes twice)."""
    if a is b:
        return True
    if a.shape != b.shape or a.stride() != b.stride() or a.dtype != b.dtype:
        return False
    # Tensors without values have no address that could be compared.
    is_one_storage = a.untyped_storage() is b.untyped_storage()
    return is_one_storage and bool(a.storage_offset() == b.storage_offset())
