"""Optimisers that the configurations build."""

import torch

from lit_attn.config.optimizers import SGD, Adam, AdamW


def test_sgd_uses_nesterov_momentum() -> None:
    """v = mu v + g; w -= lr (g + mu v), with the decayed weights in g."""
    layer = torch.nn.Linear(2, 1, bias=False)
    weight, momentum = layer.weight.detach().clone(), torch.zeros(1, 2)
    optimizer = SGD(lr=0.1, momentum=0.8, weight_decay=0.01).build(layer)
    for gradient in (torch.tensor([[1.0, -2.0]]), torch.tensor([[0.5, 3.0]])):
        layer.weight.grad = gradient.clone()
        optimizer.step()
        decayed = gradient + 0.01 * weight
        momentum = 0.8 * momentum + decayed
        weight = weight - 0.1 * (decayed + 0.8 * momentum)
    torch.testing.assert_close(layer.weight.detach(), weight)


def test_a_configuration_builds_its_optimiser() -> None:
    module = torch.nn.Linear(3, 2)
    adam = Adam(lr=1e-4).build(module)
    assert (adam.defaults["betas"], adam.defaults["weight_decay"]) == ((0.9, 0.999), 0)
    all_decayed = AdamW(lr=1e-3, weight_decay=0.05).build(module)
    assert [group["weight_decay"] for group in all_decayed.param_groups] == [0.05, 0.05]
    matrices = AdamW(lr=1e-3, weight_decay=0.05, decay="matrices").build(module)
    assert [group["weight_decay"] for group in matrices.param_groups] == [0.05, 0.0]
