"""Two token mixers without attention weights: a gated delta rule and a state-space layer.

They are examples of layers of your own (docs/mixers.md). Both are causal, cost O(n) time, and
compute C tokens of a chunk at once. `reference` is the recurrence, one token after the other.

Shapes: B batch, n tokens, d width, H heads, D = d / H, N size of a state, C tokens of a chunk.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lit_attn.attention.cache import Cache
from lit_attn.attention.precision import wide, without_autocast

CHUNK = 32


class StateCache(Cache):
    """Cache of a recurrent layer: its state (B, H, N, D) after all earlier tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.state: Tensor | None = None

    def advance(self, n: int) -> None:
        super().advance(n)
        self.length = self.position

    def tensors(self) -> list[Tensor]:
        return [] if self.state is None else [self.state]


class RecurrentMixer(nn.Module):
    """Base of layers with a state S (N, D) of each head, which decays by a_t in (0, 1) each step.

    A subclass projects the tokens (`project`) and defines what a chunk writes into the state
    (`write`).
    """

    def __init__(self, dim: int, heads: int, state: int) -> None:
        super().__init__()
        if dim % heads:
            raise ValueError(f"{heads} heads do not divide a width of {dim}")
        self.heads = heads
        self.state = state
        self.proj = nn.Linear(dim, dim, bias=False)

    def new_cache(self) -> StateCache:
        """Return an empty cache for decoding one batch of sequences."""
        return StateCache()

    def forward(self, x: Tensor, cache: StateCache | None = None) -> Tensor:
        """Return the output (B, n, d); a cache continues the sequence that it has the state of."""
        with without_autocast(x):
            parts = self.project(wide(x))
            state = None if cache is None else cache.state
            if state is None:
                state = self.empty_state(parts[0])
            outputs = []
            chunks_of_parts = [part.split(CHUNK, dim=2) for part in parts]
            for chunk in zip(*chunks_of_parts, strict=True):
                output, state = self.step(state, *chunk)
                outputs.append(output)
            if cache is not None:
                cache.state = state
            mixed = self.finish(torch.cat(outputs, dim=2) + self.pass_on(parts[2]))
        return mixed.to(x.dtype)

    def empty_state(self, queries: Tensor) -> Tensor:
        """Return the state before the first token."""
        batch = len(queries)
        return queries.new_zeros(batch, self.heads, self.state, self.proj.in_features // self.heads)

    def step(
        self, state: Tensor, q: Tensor, k: Tensor, v: Tensor, beta: Tensor, log_decay: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the outputs (B, H, C, D) of a chunk and the state after it.

        q and k are (B, H, C, N), v is (B, H, C, D), beta and log_decay are (B, H, C). With the
        decay g_t since the start of the chunk, S_t = g_t S_0 + sum over i <= t of
        (g_t / g_i) k_i u_i^T, where u_i is what token i writes.
        """
        total = log_decay.cumsum(-1)
        size = total.shape[-1]
        is_before = torch.ones(size, size, dtype=torch.bool, device=q.device).tril()
        # Ratios of later and earlier decays only: the others could overflow.
        ratios = (total.unsqueeze(-1) - total.unsqueeze(-2)).masked_fill(~is_before, -torch.inf)
        decays = ratios.exp()
        since_start = total.exp().unsqueeze(-1)
        u = self.write(k, v, beta, decays, since_start * (k @ state))
        output = since_start * (q @ state) + (decays * (q @ k.mT)) @ u
        until_end = (total[..., -1:] - total).exp().unsqueeze(-1)
        state = since_start[..., -1:, :] * state + (until_end * k).mT @ u
        return output, state

    def project(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return q, k, v, beta and log_decay of `step` for all tokens."""
        raise NotImplementedError

    def write(
        self, k: Tensor, v: Tensor, beta: Tensor, decays: Tensor, predicted: Tensor
    ) -> Tensor:
        """Return u (B, H, C, D); `predicted` is what the decayed S_0 has for each k."""
        raise NotImplementedError

    def write_next(self, k: Tensor, v: Tensor, beta: Tensor, predicted: Tensor) -> Tensor:
        """Return u (B, H, D) of one token; `predicted` is what the decayed state has for its k."""
        raise NotImplementedError

    def pass_on(self, v: Tensor) -> Tensor:
        """Return what a token adds to its output beside the state; nothing here."""
        return torch.zeros_like(v)

    def finish(self, mixed: Tensor) -> Tensor:
        """Return the layer's output (B, n, d) for the outputs of all heads (B, H, n, D)."""
        return self.proj(mixed.transpose(1, 2).flatten(2))

    def split(self, x: Tensor) -> Tensor:
        """Return x (B, n, H E) as (B, H, n, E)."""
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)

    def reference(self, x: Tensor) -> Tensor:
        """Return the output by the recurrence, one token after the other."""
        q, k, v, beta, log_decay = self.project(x)
        state = self.empty_state(q)
        outputs = []
        for t in range(x.shape[1]):
            state = log_decay[:, :, t].exp()[..., None, None] * state
            predicted = torch.einsum("bhn,bhnd->bhd", k[:, :, t], state)
            u = self.write_next(k[:, :, t], v[:, :, t], beta[:, :, t], predicted)
            state = state + torch.einsum("bhn,bhd->bhnd", k[:, :, t], u)
            outputs.append(torch.einsum("bhn,bhnd->bhd", q[:, :, t], state))
        return self.finish(torch.stack(outputs, dim=2) + self.pass_on(v))


class GatedDeltaRule(RecurrentMixer):
    """S_t = a_t S_(t-1) + k_t u_t^T, u_t = b_t (v_t - a_t S_(t-1)^T k_t); output S_t^T q_t.

    Yang et al. 2025, "Gated Delta Networks", https://arxiv.org/abs/2412.06464, eq. 10, without its
    short convolution and output gate. Keys and queries have norm 1. With `most_beta` 2 the factors
    b_t are below 2 instead of 1, so that a token can turn the state along its key around (Grazzi et
    al. 2025, "Unlocking State-Tracking in Linear RNNs Through Negative Eigenvalues",
    https://arxiv.org/abs/2411.12537). With `decays` False, a_t is 1 (DeltaNet).
    """

    def __init__(self, dim: int, heads: int, most_beta: float = 1.0, decays: bool = True) -> None:
        super().__init__(dim, heads, dim // heads)
        if most_beta not in (1, 2):
            raise ValueError(f"most_beta: {most_beta} is neither 1 nor 2")
        self.most_beta = most_beta
        self.decays = decays
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.gates = nn.Linear(dim, 2 * heads if decays else heads)
        if decays:
            # Decays a = sigmoid(4) = 0.98 at the start.
            nn.init.constant_(self.gates.bias[heads:], 4.0)

    def project(self, x: Tensor) -> tuple[Tensor, ...]:
        q, k, v = (self.split(part) for part in self.qkv(x).chunk(3, dim=-1))
        gates = self.gates(x).transpose(1, 2)
        beta = self.most_beta * gates[:, : self.heads].sigmoid()
        log_decay = F.logsigmoid(gates[:, self.heads :]) if self.decays else torch.zeros_like(beta)
        normed = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
        return *normed, v, beta, log_decay

    def write(
        self, k: Tensor, v: Tensor, beta: Tensor, decays: Tensor, predicted: Tensor
    ) -> Tensor:
        # u_t depends on the u_i before it: (I + L) u = b (v - predicted), L strictly lower.
        weight = beta.unsqueeze(-1)
        lower = (weight * decays * (k @ k.mT)).tril(-1)
        identity = torch.eye(k.shape[-2], dtype=k.dtype, device=k.device)
        errors = weight * (v - predicted)
        return torch.linalg.solve_triangular(
            lower + identity, errors, upper=False, unitriangular=True
        )

    def write_next(self, k: Tensor, v: Tensor, beta: Tensor, predicted: Tensor) -> Tensor:
        return beta.unsqueeze(-1) * (v - predicted)

    def flops(self, tokens: int) -> int:
        """Return the FLOPs of one sequence, multiply-add = 2; torch counts no triangular solver."""
        dim = self.proj.in_features
        heads = self.heads
        width = self.state
        projections = 2 * tokens * dim * (4 * dim + self.gates.out_features)
        # q S, k S and k u^T per token; k k^T, q k^T and weights u, and half as much to solve.
        states = 3 * 2 * tokens * heads * width * width
        chunks = 7 * tokens * min(tokens, CHUNK) * heads * width
        return projections + states + chunks


class StateSpace(RecurrentMixer):
    """h_t = a_t h_(t-1) + dt_t B_t x_t^T, y_t = C_t h_t + skip x_t, with a_t = exp(-dt_t A).

    Dao & Gu 2024, "Transformers are SSMs" (Mamba-2), https://arxiv.org/abs/2405.21060, section 6,
    without its short convolution, gate and norm. B and C, which all heads share, have `state`
    numbers; dt and A > 0 are numbers of each head.
    """

    def __init__(self, dim: int, heads: int, state: int = 16) -> None:
        super().__init__(dim, heads, state)
        self.inputs = nn.Linear(dim, dim + 2 * state + heads, bias=False)
        self.log_a = nn.Parameter(torch.linspace(1, heads, heads).log())
        self.dt_bias = nn.Parameter(torch.full((heads,), -2.0))
        self.skip = nn.Parameter(torch.ones(heads))

    def project(self, x: Tensor) -> tuple[Tensor, ...]:
        width = self.proj.in_features
        values, b, c, dt = self.inputs(x).split([width, self.state, self.state, self.heads], -1)
        steps = F.softplus(dt + self.dt_bias)
        shared = (part.unsqueeze(1).expand(-1, self.heads, -1, -1) for part in (c, b))
        log_decay = -steps * self.log_a.exp()
        return *shared, self.split(values), steps.transpose(1, 2), log_decay.transpose(1, 2)

    def write(
        self, k: Tensor, v: Tensor, beta: Tensor, decays: Tensor, predicted: Tensor
    ) -> Tensor:
        return beta.unsqueeze(-1) * v

    def write_next(self, k: Tensor, v: Tensor, beta: Tensor, predicted: Tensor) -> Tensor:
        return beta.unsqueeze(-1) * v

    def pass_on(self, v: Tensor) -> Tensor:
        return self.skip[:, None, None] * v
