"""AdamW with values in bfloat16, which tests/released compares with JAX code."""

import pytest
import torch

from lit_attn.optim.jax_adamw import JaxAdamW

pytestmark = pytest.mark.slow


def test_the_weights_of_norms_stay_one_in_bfloat16() -> None:
    network = torch.nn.Sequential(torch.nn.RMSNorm(8), torch.nn.Linear(8, 8))
    start = network[1].weight.detach().clone()
    optimizer = JaxAdamW(lr=3e-4, weight_decay=0.1, bfloat16=("0.*",)).build(network, fused=False)
    for _ in range(5):
        optimizer.zero_grad()
        network(torch.randn(4, 8)).square().sum().backward()
        optimizer.step()
    assert network[0].weight.tolist() == [1] * 8
    assert not torch.equal(network[1].weight, start)
    assert not torch.equal(network[1].weight, network[1].weight.bfloat16().float())


def test_parameters_are_rounded_before_the_first_step() -> None:
    network = torch.nn.Linear(8, 8)
    JaxAdamW(lr=1e-3, bfloat16=("weight",)).build(network)
    assert torch.equal(network.weight, network.weight.bfloat16().float())
    assert not torch.equal(network.bias, network.bias.bfloat16().float())


def test_the_first_moment_counts_in_bfloat16() -> None:
    """After two gradients of 1, the moment is 0.1 + bf16(bf16(0.9) bf16(0.1))."""
    network = torch.nn.Linear(1, 1, bias=False)
    optimizer = JaxAdamW(lr=1e-3, moment="bfloat16").build(network, fused=False)
    moments = []
    for _ in range(2):
        network.weight.grad = torch.ones(1, 1)
        optimizer.step()
        moments.append(0.9 * optimizer.state[network.weight]["exp_avg"].item())
    first = (torch.tensor(0.9).bfloat16() * torch.tensor(0.1).bfloat16()).item()
    assert moments[0] == pytest.approx(first, rel=1e-6)
    second = (torch.tensor(0.9).bfloat16() * torch.tensor(0.1 + first).bfloat16()).item()
    assert moments[1] == pytest.approx(second, rel=1e-6)
    assert moments[1] != pytest.approx(0.9 * 0.19, rel=1e-3)


def test_gradients_are_clipped_to_the_norm_itself() -> None:
    """PyTorch's function adds 1e-6 to the norm, which changes a small one."""
    network = torch.nn.Linear(2, 1, bias=False)
    network.weight.grad = torch.tensor([[3e-6, 4e-6]])
    config = JaxAdamW(lr=1e-3)
    config.clip([network.weight], 1e-5)
    assert network.weight.grad.tolist() == torch.tensor([[3e-6, 4e-6]]).tolist()
    config.clip([network.weight], 1e-6)
    torch.testing.assert_close(network.weight.grad, torch.tensor([[6e-7, 8e-7]]), atol=0, rtol=1e-6)


def test_gradients_and_decay_of_rounded_parameters_are_rounded() -> None:
    network = torch.nn.Sequential(torch.nn.Linear(8, 8, bias=False), torch.nn.Linear(8, 8))
    config = JaxAdamW(lr=1e-3, weight_decay=0.1, bfloat16=("0.*",))
    optimizer = config.build(network, fused=False)
    network(torch.randn(4, 8)).square().sum().backward()
    optimizer.step()
    gradients = [parameter.grad for parameter in (network[0].weight, network[1].weight)]
    assert [torch.equal(g, g.bfloat16().float()) for g in gradients] == [True, False]
    decays = {p: group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    assert decays[network[0].weight] == torch.tensor(0.1).bfloat16().item()
    assert decays[network[1].weight] == 0.1
