"""Small attention layers, and the comparison of a layer with the reference."""

import torch
from torch import Tensor, nn

from lit_attn.attention import reference
from lit_attn.attention.layer import Attention, attn_layer
from lit_attn.attention.network import number_layers
from lit_attn.attention.spec import AttentionSpec

DIM, HEADS = 24, 4


def make(spec: AttentionSpec, seed: int = 0, lsa: bool = False) -> Attention:
    """Return a float64 layer with nonzero parameters."""
    torch.manual_seed(seed)
    layer = attn_layer(spec, local_self_attention=lsa)(DIM, HEADS, qkv_bias=True).double()
    number_layers(layer)
    layer.eval()  # the M-step would change pi between the two computations
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return layer


def tokens(n: int, batch: int = 2, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, n, DIM, dtype=torch.double, generator=generator)


def assert_same(layer: Attention, x: Tensor, **masks: Tensor | bool) -> None:
    """Check that values, input gradient and parameter gradients agree to rounding."""
    results = []
    weights = torch.randn(x.shape, dtype=x.dtype, generator=torch.Generator().manual_seed(2))
    parameters = dict(layer.named_parameters())
    for compute in (layer, lambda *a, **k: reference.attention(layer, *a, **k)):
        inputs = x.clone().requires_grad_()
        out = compute(inputs, **masks)
        gradients = torch.autograd.grad(
            (out * weights).sum(), [inputs, *parameters.values()], allow_unused=True
        )
        results.append([out, *gradients])
    for name, fast, plain in zip(["out", "x", *parameters], *results, strict=True):
        assert (fast is None) == (plain is None), name
        if fast is not None:
            torch.testing.assert_close(
                fast, plain, rtol=1e-9, atol=1e-10, msg=lambda m, n=name: f"{n}: {m}"
            )


def compute_outputs(
    model: nn.Module, layer_class: type[Attention], images: Tensor
) -> tuple[list[float], bool]:
    """Return the outputs of a model that was sent to this process, and if its class is the same.

    A spawned process can import this module: its folder is on the path of modules.
    """
    with torch.no_grad():
        return model(images).flatten().tolist(), isinstance(model.blocks[0].attn, layer_class)
