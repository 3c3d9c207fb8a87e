"""The loss in chunks of tokens, compared with PyTorch's cross-entropy of all logits."""

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lit_attn.data.text.ids import IGNORED
from lit_attn.models import token_loss
from lit_attn.models.token_loss import split_tokens, token_losses, total_loss

VOCABULARY, WIDTH = 11, 5


@pytest.fixture(params=[1, 3 * VOCABULARY, 4 * VOCABULARY + 2], ids=["one", "three", "four"])
def _chunks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """At most one, three or four tokens in a chunk; all have logits, as on a GPU."""
    monkeypatch.setattr(token_loss, "MAX_LOGITS", request.param)
    monkeypatch.setattr(token_loss, "find_targets", lambda targets: None)


def make_inputs(tokens: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    """Return hidden states, weights and targets, of which every third is to be ignored."""
    torch.manual_seed(tokens)
    hidden = torch.randn(tokens, WIDTH, dtype=dtype, requires_grad=True)
    weight = torch.randn(VOCABULARY, WIDTH, dtype=dtype, requires_grad=True)
    targets = torch.randint(VOCABULARY, (tokens,))
    targets[1::3] = IGNORED
    return hidden, weight, targets


def reference(hidden: Tensor, weight: Tensor, targets: Tensor, smoothing: float) -> Tensor:
    return F.cross_entropy(
        hidden @ weight.T,
        targets,
        ignore_index=IGNORED,
        reduction="none",
        label_smoothing=smoothing,
    )


@pytest.mark.usefixtures("_chunks")
@pytest.mark.parametrize("smoothing", [0.0, 0.3])
@pytest.mark.parametrize("tokens", [5, 7, 12])
def test_values_and_gradients_are_those_of_all_logits(tokens: int, smoothing: float) -> None:
    hidden, weight, targets = make_inputs(tokens)
    losses = token_losses(hidden, weight, targets, smoothing)
    expected = reference(hidden, weight, targets, smoothing)
    torch.testing.assert_close(losses, expected, rtol=1e-12, atol=1e-12)
    assert (losses[1::3] == 0).all()
    # Tokens count differently, as with the mean over micro-batches of different lengths.
    direction = torch.randn(tokens, dtype=torch.float64)
    gradients = torch.autograd.grad(losses, (hidden, weight), direction)
    expected_gradients = torch.autograd.grad(expected, (hidden, weight), direction)
    torch.testing.assert_close(gradients, expected_gradients, rtol=1e-12, atol=1e-12)
    total = total_loss(hidden, weight, targets, smoothing)
    torch.testing.assert_close(total, expected.sum(), rtol=1e-12, atol=1e-12)


@pytest.mark.usefixtures("_chunks")
@pytest.mark.parametrize("cap", [None, 0.7])
@pytest.mark.parametrize("z_loss", [0.0, 0.2])
def test_a_cap_and_a_z_loss_are_those_of_all_logits(cap: float | None, z_loss: float) -> None:
    """c tanh(l / c) for each logit l, and w (log sum exp)^2 for each token that has a target."""
    hidden, weight, targets = make_inputs(7)
    losses = token_losses(hidden, weight, targets, 0.3, logit_cap=cap, z_loss=z_loss)
    logits = hidden @ weight.T
    if cap is not None:
        ratio = torch.exp(2 * logits / cap)
        logits = cap * (ratio - 1) / (ratio + 1)
    expected = F.cross_entropy(
        logits, targets, ignore_index=IGNORED, reduction="none", label_smoothing=0.3
    )
    squares = logits.exp().sum(1).log() ** 2
    expected = expected + z_loss * squares * (targets != IGNORED)
    torch.testing.assert_close(losses, expected, rtol=1e-12, atol=1e-12)
    direction = torch.randn(7, dtype=torch.float64)
    gradients = torch.autograd.grad(losses, (hidden, weight), direction)
    expected_gradients = torch.autograd.grad(expected, (hidden, weight), direction)
    torch.testing.assert_close(gradients, expected_gradients, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("limit", [30, 2**26])
@pytest.mark.parametrize("has_target", [True, False])
def test_tokens_without_a_target_have_no_logits(
    limit: int, has_target: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(token_loss, "MAX_LOGITS", limit)
    hidden, weight, targets = make_inputs(12)
    if not has_target:
        targets.fill_(IGNORED)
    chosen = {"label_smoothing": 0.3, "logit_cap": 0.7, "z_loss": 0.2}
    with monkeypatch.context() as patched:
        patched.setattr(token_loss, "find_targets", lambda targets: None)
        expected = token_losses(hidden, weight, targets, **chosen)
        expected_total = total_loss(hidden, weight, targets, 0.3)
    direction = torch.randn(12, dtype=torch.float64)
    expected_gradients = torch.autograd.grad(expected, (hidden, weight), direction)
    # Logits of these numbers would make the gradient of the weights NaN.
    poisoned = hidden.detach().clone()
    poisoned[targets == IGNORED] = torch.nan
    poisoned.requires_grad_()
    losses = token_losses(poisoned, weight, targets, **chosen)
    gradients = torch.autograd.grad(losses, (poisoned, weight), direction)
    torch.testing.assert_close(losses, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(gradients, expected_gradients, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(total_loss(poisoned, weight, targets, 0.3), expected_total)


@pytest.mark.usefixtures("_chunks")
def test_gradients_of_micro_batches_add_up() -> None:
    hidden, weight, targets = make_inputs(12)
    (token_losses(hidden, weight, targets).sum() / 8).backward()
    together = weight.grad
    weight.grad = None
    for start in (0, 6):
        part = slice(start, start + 6)
        (token_losses(hidden[part], weight, targets[part]).sum() / 8).backward()
    torch.testing.assert_close(weight.grad, together, rtol=1e-12, atol=1e-12)


@pytest.mark.usefixtures("_chunks")
def test_tied_weights_get_both_gradients() -> None:
    _, weight, targets = make_inputs(6)
    tokens = torch.randint(VOCABULARY, (6,))
    hidden = F.embedding(tokens, weight).tanh()
    (gradient,) = torch.autograd.grad(token_losses(hidden, weight, targets).sum(), weight)
    hidden = F.embedding(tokens, weight).tanh()
    (expected,) = torch.autograd.grad(reference(hidden, weight, targets, 0).sum(), weight)
    torch.testing.assert_close(gradient, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.usefixtures("_chunks")
def test_weights_alone_can_be_trained() -> None:
    hidden, weight, targets = make_inputs(6)
    losses = token_losses(hidden.detach(), weight, targets)
    (gradient,) = torch.autograd.grad(losses.sum(), weight)
    (expected,) = torch.autograd.grad(reference(hidden, weight, targets, 0).sum(), weight)
    torch.testing.assert_close(gradient, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.usefixtures("_chunks")
def test_half_precision_multiplies_as_autocast_does() -> None:
    hidden, weight, targets = make_inputs(12, torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        losses = token_losses(hidden, weight, targets)
        logits = F.linear(hidden, weight)
    assert logits.dtype == torch.bfloat16
    expected = F.cross_entropy(logits.float(), targets, ignore_index=IGNORED, reduction="none")
    assert losses.dtype == torch.float32
    torch.testing.assert_close(losses, expected)
    gradients = torch.autograd.grad(losses.sum(), (hidden, weight))
    expected_gradients = torch.autograd.grad(expected.sum(), (hidden, weight))
    torch.testing.assert_close(gradients, expected_gradients, rtol=2e-2, atol=2e-2)


def test_few_logits_are_computed_by_torch_bit_for_bit() -> None:
    hidden, weight, targets = make_inputs(12, torch.float32)
    losses = token_losses(hidden, weight, targets)
    # Only tokens with a target count; on some CPUs a product of fewer rows has other last digits.
    counted = targets != IGNORED
    logits = F.linear(hidden[counted], weight)
    expected = torch.zeros(12)
    expected[counted] = F.cross_entropy(logits, targets[counted], reduction="none")
    assert torch.equal(losses, expected)


@pytest.mark.parametrize("tokens", [1, 7, 100])
def test_chunks_cover_every_token_once(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_loss, "MAX_LOGITS", 30)
    chunks = list(split_tokens(tokens, 7))
    places = [place for chunk in chunks for place in range(tokens)[chunk]]
    assert places == list(range(tokens))
    assert all(chunk.stop - chunk.start <= 4 for chunk in chunks)


class LargestTensor(TorchDispatchMode):
    """The number of elements of the largest tensor that an operation returns."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self.elements = max(self.elements, leaf.numel())
        return result


def test_no_tensor_has_the_logits_of_all_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    limit = 10 * VOCABULARY
    monkeypatch.setattr(token_loss, "MAX_LOGITS", limit)
    hidden, weight, targets = make_inputs(200)
    # The hidden states of all tokens are smaller than their logits.
    with LargestTensor() as largest:
        token_losses(hidden[:, :1], weight[:, :1], targets).sum().backward()
    assert largest.elements <= 200 * WIDTH < 200 * VOCABULARY
    with LargestTensor() as largest:
        reference(hidden, weight, targets, 0).sum().backward()
    assert largest.elements == 200 * VOCABULARY


# PyTorch 2.15 uses a function of its own that it has deprecated.
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:FutureWarning")
@pytest.mark.usefixtures("_chunks")
def test_missing_derivatives_are_refused() -> None:
    """The gradient of a sum is constant: without an error its derivative would be taken for 0."""
    hidden, weight, targets = make_inputs(7)
    loss = total_loss(hidden, weight, targets)
    (gradient,) = torch.autograd.grad(loss, hidden, create_graph=True)
    with pytest.raises(RuntimeError, match="has no second derivatives"):
        gradient.square().sum().backward()
    with forward_ad.dual_level(), pytest.raises(RuntimeError, match="derivatives in forward mode"):
        token_losses(forward_ad.make_dual(hidden, hidden), weight, targets)
