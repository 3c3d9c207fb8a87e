"""Hand-written part of docs/mechanisms.md: papers, formulas and differences of all presets."""

from compared_entries import COMPARED
from mechanism_formulas import (
    ALPHA,
    BETA,
    DOTS,
    GAUSS,
    HARD,
    LINEAR,
    LINKS,
    PROJECTED,
    SHIFTED,
    SOFT,
    Entry,
    composed,
    dynamic,
)

MGK = "Mixture of Gaussian Keys (MGK)"
DCMHA = "Dynamically Composable Multi-Head Attention (DCMHA)"
DYNAMIC = "The heads' logits, and then their weights, are mixed at every pair of tokens"
TABLE9 = "eq. 5-8, Table 9"
FIVE_PAPERS: dict[str, Entry] = {
    "standard": Entry(
        "Standard attention",
        "Transformer",
        "eq. 1",
        r"x_i \leftarrow x_i + \mathrm{MH}_i W",
        "This is the baseline: dot products, no composition, softmax, full residual.",
        "{preset: standard, similarity: mixture, residual: perpendicular}",
    ),
    "belief": Entry(
        "Belief-Attention",
        "BeliefFormer",
        "eq. 10-12",
        rf"x_i \leftarrow x_i + (\mathrm{{MH}}_i - \alpha_i V_i) W, \qquad {ALPHA}",
        "The component of the attention output along the token's own values is removed.",
        "{preset: belief, zz: with}",
    ),
    "belief-star": Entry(
        "Belief-Attention*",
        "BeliefFormer",
        "eq. 13-15",
        r"x_i \leftarrow x_i + (\mathrm{MH}_i - \alpha_i V_i) W + \mathrm{concat}_m(h_i - \beta_i "
        rf"v_i) W^l, \qquad {BETA}",
        "As `belief`, plus the same removal within each head, with its own projection.",
        "{preset: belief-star, similarity: mixture}",
    ),
    "xsa": Entry(
        "Exclusive Self Attention (XSA)",
        "XSA",
        "BeliefFormer eq. 13 alone",
        rf"x_i \leftarrow x_i + \mathrm{{concat}}_m(h_i - \beta_i v_i) W, \qquad {BETA}",
        "The component along the token's own value is removed within each head.",
        "{preset: xsa, compose: query}",
    ),
    "attentionx": Entry(
        "AttentionX",
        "AttentionX",
        "eq. 9-10",
        r"x_i \leftarrow x_i + (\gamma V_i - \mathrm{MH}_i) W",
        "The difference of the token's own values and the attention output is passed on; gamma is "
        "1 here, as for the paper's vision transformer.",
        "{preset: attentionx, residual: {gamma: 0.5}, zz: with}",
    ),
    "belief2": Entry(
        "Belief2-Attention",
        "Belief2",
        "eq. 11, 14, 15",
        r"s_{ij} = \frac{q_i \cdot k_j + z_i \cdot z_j}{\sqrt D}, \qquad x_i \leftarrow x_i + "
        rf"(\mathrm{{MH}}_i - \alpha_i V_i) W + \phi(\alpha_i V_i) W_p, \qquad {ALPHA}",
        "The removed component returns through phi (GELU) and its own projection, and a second, "
        "symmetric inner product is added to the logits.",
        "{preset: belief2, similarity: gaussian}",
    ),
    "gaussian": Entry(
        "Gaussian attention",
        "MGK",
        "eq. 7 with one key",
        rf"s_{{ij}} = -{GAUSS}".replace("k_{jr}", "k_j"),
        "Distances replace dot products.",
        "{preset: gaussian, residual: split}",
    ),
    "mgk": Entry(
        MGK,
        "MGK",
        "eq. 7-8, option A",
        SOFT + PROJECTED,
        "Every token has two keys, each with its own projection, and a learned weight in each "
        "head.",
        "{preset: mgk, residual: perpendicular}",
    ),
    "smgk": Entry(
        f"Shifted {MGK}",
        "MGK",
        "eq. 7-8, option B",
        SOFT + SHIFTED,
        "The second key is the first plus a learned offset, so it costs hardly any parameters.",
        "{preset: smgk, compose: static}",
    ),
    "mgk-hard": Entry(
        f"{MGK}, hard assignment",
        "MGK",
        "Hard-E",
        HARD + PROJECTED,
        "The nearest of the two keys counts alone.",
        "{preset: mgk-hard, residual: {kind: perpendicular, scope: head}}",
    ),
    "smgk-hard": Entry(
        f"Shifted {MGK}, hard assignment",
        "MGK",
        "Hard-E, option B",
        HARD + SHIFTED,
        "The nearest of two shifted keys counts alone.",
        "{preset: smgk-hard, zz: with}",
    ),
    "mgk-soft-e": Entry(
        f"{MGK}, soft E-step",
        "MGK",
        "Soft-E, eq. 8",
        SOFT + PROJECTED,
        "As `mgk`, but every training step sets the weights pi to the mean responsibilities of the "
        "keys instead of learning them by gradient.",
        "{preset: mgk-soft-e, residual: split}",
    ),
    "smgk-soft-e": Entry(
        f"Shifted {MGK}, soft E-step",
        "MGK",
        "Soft-E, option B",
        SOFT + SHIFTED,
        "As `mgk-soft-e`, with shifted keys.",
        "{preset: smgk-soft-e, kv_heads: 4}",
    ),
    "softmax-mgk": Entry(
        "Mixture of keys with dot products",
        "MGK",
        "Table 5",
        DOTS + PROJECTED,
        "As `mgk`, with dot products instead of distances.",
        "{preset: softmax-mgk, window: 128}",
    ),
    "softmax-smgk": Entry(
        "Shifted mixture of keys with dot products",
        "MGK",
        "Table 5",
        DOTS + SHIFTED,
        "It computes the same as the standard layer: the offsets add one number to all logits of a "
        "query, and the softmax ignores it.",
        "{preset: softmax-smgk, similarity: {keys: 3}, zz: with}",
    ),
    "linear": Entry(
        "Linear attention",
        "linear",
        "feature map elu + 1",
        LINEAR + r"\kappa_j = \varphi(k_j)",
        "Attention costs O(n) instead of O(n^2), because keys and values are summed before the "
        "query reads them.",
        "{preset: linear, residual: perpendicular}",
    ),
    "mlk": Entry(
        "Mixture of linear keys",
        "MGK",
        "section 2.4",
        LINEAR + r"\kappa_j = \sum_r \pi_r\, \varphi(k_{jr})" + PROJECTED,
        "Linear attention with two keys for every token.",
        "{preset: mlk, residual: split}",
    ),
    "smlk": Entry(
        "Shifted mixture of linear keys",
        "MGK",
        "section 2.4",
        LINEAR + r"\kappa_j = \sum_r \pi_r\, \varphi(k_{jr})" + SHIFTED,
        "As `mlk`, with shifted keys.",
        "{preset: smlk, kv_heads: 4}",
    ),
    "talking-heads": Entry(
        "Talking heads",
        "talking heads",
        "projections of logits and weights",
        composed(r"M a_{ij}", identity=False).replace("0 + ", ""),
        "A learned matrix mixes the heads' logits, and a second one their weights.",
        "{preset: talking-heads, residual: perpendicular}",
    ),
    "static-projection": Entry(
        "Static composition of DCMHA",
        "DCMHA",
        "Table 9, static proj.",
        composed(r"M a_{ij}"),
        "As `talking-heads`, with the identity added to the matrices.",
        "{preset: static-projection, zz: with}",
    ),
    "dcmha": Entry(
        DCMHA,
        "DCMHA",
        "eq. 5-8",
        dynamic("i", "j"),
        f"{DYNAMIC}, with low-rank weights w and gates g computed from the query's and the key's "
        "token (rank 2).",
        "{preset: dcmha, residual: split}",
    ),
    "dcmha-projection": Entry(
        "DCMHA without gates",
        "DCMHA",
        TABLE9,
        dynamic("i", "j", gate=False),
        "As `dcmha`, without gates.",
        "{preset: dcmha-projection, zz: with}",
    ),
    "dcmha-gate": Entry(
        "DCMHA with gates alone",
        "DCMHA",
        TABLE9,
        dynamic("i", "j", low_rank=False),
        "As `dcmha`, with gates alone: heads are scaled and not mixed.",
        "{preset: dcmha-gate, residual: perpendicular}",
    ),
    "dcmha-all": Entry(
        "DCMHA with a static matrix",
        "DCMHA",
        TABLE9,
        dynamic("i", "j", extra="M a_{ij}"),
        "As `dcmha`, plus a learned matrix.",
        "{preset: dcmha-all, window: 128}",
    ),
    "dcmha-query": Entry(
        "DCMHA from the query's token",
        "DCMHA",
        TABLE9,
        dynamic("i"),
        "As `dcmha`, with weights from the query's token alone.",
        "{preset: dcmha-query, similarity: gaussian}",
    ),
    "dcmha-key": Entry(
        "DCMHA from the key's token",
        "DCMHA",
        TABLE9,
        dynamic("j"),
        "As `dcmha`, with weights from the key's token alone.",
        "{preset: dcmha-key, residual: split}",
    ),
    "dcmha-pre": Entry(
        "DCMHA of the logits",
        "DCMHA",
        TABLE9,
        dynamic("i", "j").replace("a_", "s_"),
        "As `dcmha`, before the softmax alone.",
        "{preset: dcmha-pre, similarity: mixture}",
    ),
    "dcmha-post": Entry(
        "DCMHA of the weights",
        "DCMHA",
        TABLE9,
        dynamic("i", "j"),
        "As `dcmha`, after the softmax alone.",
        "{preset: dcmha-post, residual: discrepancy}",
    ),
    "dcmha-rank-1": Entry(
        "DCMHA of rank 1",
        "DCMHA",
        TABLE9,
        dynamic("i", "j"),
        "As `dcmha`, with r = 1 alone.",
        "{preset: dcmha-rank-1, zz: with}",
    ),
    "dcmha-rank-4": Entry(
        "DCMHA of rank 4",
        "DCMHA",
        TABLE9,
        dynamic("i", "j"),
        "As `dcmha`, with r = 1 to 4.",
        "{preset: dcmha-rank-4, compose: {gate: false}}",
    ),
}
"""Presets of the five papers, and of what they build on."""

ENTRIES = FIVE_PAPERS | COMPARED

WITHOUT_PRESET = rf"""
## Offset softmax

`normaliser: offset-softmax` ({LINKS["MGK"]}, released language models) is the softmax with
`offset`, 1e-6 by default, added to the sum over keys,

$$a_{{ij}} = \frac{{e^{{s_{{ij}}}}}}{{\epsilon + \sum_j e^{{s_{{ij}}}}}} .$$

With the default it matters only where all Gaussian logits of a query are far below zero;
`off-by-one` has an offset of 1. Added parameters: none.

## Short convolutions

`convolution: short` ([Physics of Language Models, part 4.1](https://arxiv.org/abs/2512.17351),
Canon B) adds to each component of q, k and v a weighted sum over the token and those before it,

$$x_t \leftarrow x_t + \sum_{{s=0}}^{{w-1}} u_s \odot x_{{t-s}} ,$$

after a map of the heads and before the norms and the rotation. `width` is w, 4 by default, and `on`
names the vectors: `qkv`, `q`, `k`, `v`, `kv`, or `output`, the result of the layer. With
`skip: false` and `activation: silu` it is the `ShortConvolution` of flash-linear-attention. Tokens
that are padding are zero, and the cache of decoding has the last w - 1 vectors. Added parameters:
w for each component. Its products of elements are not counted as FLOPs. Cross-attention, separate
documents and columns refuse it. *Released code:* a test compares it with the `nn.Conv1d` that
`ShortConvolution` extends; the layers of both codes need Triton.

## Keys and values from a latent

`latent: {{rank: 512, query_rank: 1536, rotary: 64}}` (MLA,
[DeepSeek-V2](https://arxiv.org/abs/2405.04434), eq. 9-19) computes the keys and values of all heads
from one latent $c_j$ of each token,

$$k_j = [\,k^R_j;\; W_{{UK}} c_j\,], \qquad v_j = W_{{UV}} c_j, \qquad
[\,k^R_j;\; \tilde c_j\,] = x_j W_D, \qquad c_j = \mathrm{{RMSNorm}}(\tilde c_j) .$$

`rank` is the width of c, by default four times a head's width. `query_rank` is the width of a
latent for queries, with a norm of its own; by default there is none. `rotary` is the width of
$k^R$, by default a head's width: positions rotate this part, all heads have the same one, and
queries have a further part of this width. A model with `positions: rotary` must rotate at most this
width: 64 for heads of 128 is `rotary_share: 0.5`. The logits are divided by the root of both widths
together.

A cache has c and $k^R$ of each token, and no keys or values. Decoding multiplies c by
$W_{{UK}}^\top q$, and $W_{{UV}}$ by the weighted sum of c (the absorbed form). A similarity other
than `dot`, or a projection with a hook or an adapter, computes the keys of cached tokens again.
`normaliser`, `bias`, `compose`, `scale`, `filter`, `gate`, `residual`, `window` and `kv_heads`
combine with it. What acts on keys or values of a head, `zz`, `pair`, `kv_from`, `qk_norm`,
cross-attention and value embeddings are refused. *Released code:* a test compares values with
`DeepseekV3Attention` of transformers in float64, with its RMSNorm, which is in float32, replaced by
torch's.

## Keys and values of another layer

`kv_from: previous` ([cross-layer attention](https://arxiv.org/abs/2405.12981), section 2.2) is for
layers that differ: `layers: {{every: 2, use: {{kv_from: previous}}}}`
([layers.md](layers.md)). Such a layer projects queries alone, and
attends to the keys, after their norm and rotation, and values of the nearest layer before it that
computes its own. It has 2 H' D d parameters less, and no keys or values in the cache.

## Blocks of keys

`filter: moba` ([MoBA](https://arxiv.org/abs/2502.13189), eq. 2-6) hides all keys of a query but
those in its own block of `block` tokens, 64 by default, and in the `blocks` - 1 other blocks, 2 by
default, with the largest product of the query and the mean key,

$$\frac{{q_i}}{{\sqrt D}} \cdot \frac{{1}}{{|B|}} \sum_{{j \in B}} k_j =
\frac{{1}}{{|B|}} \sum_{{j \in B}} s_{{ij}} .$$

This is the mean of the block's logits, so the choice is defined for every similarity, after a
composition and a bias; keys that the query does not see do not count. The first block of a query
starts with the first token that the query sees, so padding and other documents before a sequence
are in no block, and a sequence has the outputs that it has alone. The choice has no gradient.
On a GPU, flex_attention computes a layer without further masks and biases: the mean keys make the
choice, and tiles of 128 queries and 128 keys without a chosen block are skipped. Other calls, and
those on a CPU, choose from all logits, so their time and memory are those of attention to all keys.
Added parameters: none. *Released code:* [MoonshotAI/MoBA,
moba_naive.py](https://github.com/MoonshotAI/MoBA/blob/61e456bc956c5a25fd9c84e5496b661329cb1b72/moba/moba_naive.py),
with float64 instead of its float32, gave the same sums to 2e-15 for 16 lengths and sizes.
"""
