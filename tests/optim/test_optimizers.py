"""Optimisers that the configurations build."""

import copy

import pytest
import torch

from lit_attn.optim.base import Optimizer
from lit_attn.optim.muon import Muon, OtherParameters
from lit_attn.optim.standard import SGD, Adafactor, Adam, AdamW, Lion, ModuleOptimizer
from lit_attn.schema.errors import ConfigError


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


class Hidden(torch.nn.Module):
    """A network with every sort of parameter: embedding, hidden matrices, norm, and an output."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = torch.nn.Embedding(5, 4)
        self.fc1 = torch.nn.Linear(4, 6)
        self.norm = torch.nn.LayerNorm(6)
        self.positions = torch.nn.Parameter(torch.randn(3, 6))
        self.head = torch.nn.Linear(6, 5)

    def no_weight_decay(self) -> set[str]:
        return {"positions"}

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.norm(self.fc1(self.tokens(ids))) + self.positions
        return self.head(hidden)


def train(optimizer: torch.optim.Optimizer, network: torch.nn.Module, steps: int) -> None:
    ids = torch.tensor([[0, 1, 2], [3, 4, 0]])
    for _ in range(steps):
        optimizer.zero_grad()
        network(ids).square().sum().backward()
        optimizer.step()


def test_muon_takes_the_matrices_of_hidden_layers() -> None:
    network = Hidden()
    muon = Muon(lr=0.02)
    assert list(muon.list_matrices(network)) == ["fc1.weight"]
    groups = muon.build(network).param_groups
    assert [id(p) for p in groups[0]["params"]] == [id(network.fc1.weight)]
    others = {id(p) for group in groups[1:] for p in group["params"]}
    expected = {id(p) for name, p in network.named_parameters() if name != "fc1.weight"}
    assert others == expected
    assert [group.get("lr_scale") for group in groups] == [None, *[3e-4 / 0.02] * 2]


def test_the_rules_of_weight_decay_hold_for_the_other_parameters_of_muon() -> None:
    network = Hidden()
    other = OtherParameters(lr=1e-3, weight_decay=0.1, decay="weights")
    groups = Muon(lr=0.02, adamw=other).build(network).param_groups
    names = {id(p): name for name, p in network.named_parameters()}
    decayed = [names[id(p)] for g in groups if g["weight_decay"] for p in g["params"]]
    assert decayed == ["tokens.weight", "head.weight"]


def test_muon_equals_its_two_optimisers_alone() -> None:
    torch.manual_seed(0)
    network = Hidden()
    again = copy.deepcopy(network)
    train(
        Muon(lr=0.02, weight_decay=0.1, adamw=OtherParameters(lr=0.01)).build(network), network, 3
    )
    hidden = torch.optim.Muon([again.fc1.weight], lr=0.02, weight_decay=0.1)
    rest = [p for name, p in again.named_parameters() if name != "fc1.weight"]
    adamw = torch.optim.AdamW(rest, lr=0.01, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    ids = torch.tensor([[0, 1, 2], [3, 4, 0]])
    for _ in range(3):
        again.zero_grad()
        again(ids).square().sum().backward()
        hidden.step()
        adamw.step()
    for name, parameter in network.named_parameters():
        torch.testing.assert_close(parameter, again.get_parameter(name), rtol=0, atol=0)


def test_a_stopped_training_with_muon_goes_on_exactly() -> None:
    torch.manual_seed(0)
    undisturbed = Hidden()
    stopped = copy.deepcopy(undisturbed)
    train(Muon(lr=0.02).build(undisturbed), undisturbed, 4)
    first = Muon(lr=0.02).build(stopped)
    train(first, stopped, 2)
    state = copy.deepcopy(first.state_dict())
    second = Muon(lr=0.02).build(stopped)
    second.load_state_dict(state)
    train(second, stopped, 2)
    for name, parameter in undisturbed.named_parameters():
        torch.testing.assert_close(parameter, stopped.get_parameter(name), rtol=0, atol=0)


def test_a_network_without_hidden_matrices_is_refused_by_muon() -> None:
    with pytest.raises(ConfigError, match="muon: the network has no matrix of a hidden layer"):
        Muon(lr=0.02).build(torch.nn.LayerNorm(3))


@pytest.mark.parametrize(
    ("optimizer", "expected"),
    [
        (Lion(lr=1e-4, weight_decay=0.1), "Lion"),
        (Adafactor(lr=1e-2), "Adafactor"),
        (ModuleOptimizer(lr=1e-2, target="torch.optim:NAdam", arguments={"eps": 1e-6}), "NAdam"),
    ],
)
def test_optimisers_of_libraries_train(optimizer: Optimizer, expected: str) -> None:
    torch.manual_seed(0)
    network = Hidden()
    built = optimizer.build(network)
    assert type(built).__name__ == expected
    ids = torch.tensor([[0, 1, 2]])
    before = network(ids).square().sum().item()
    train(built, network, 5)
    assert network(ids).square().sum().item() < before


def test_arguments_that_an_optimiser_does_not_know_are_refused() -> None:
    unknown = ModuleOptimizer(lr=0.1, target="torch.optim:NAdam", arguments={"nesterovv": True})
    with pytest.raises(ConfigError, match=r"torch.optim:NAdam does not accept lr, nesterovv: "):
        unknown.build(Hidden())
    with pytest.raises(ConfigError, match=r"torch\.nn:Linear"):
        ModuleOptimizer(lr=0.1, target="torch.nn:Linear").build(Hidden())
    with pytest.raises(ConfigError, match=r"optimizer: torch.optim:LBFGS needs a closure, with wh"):
        ModuleOptimizer(lr=0.1, target="torch.optim:LBFGS").build(Hidden())
