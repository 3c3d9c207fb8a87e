"""Hand-written part of docs/mechanisms.md: papers, formulas and differences of all presets."""

from typing import NamedTuple

LINKS = {
    "Transformer": "[Vaswani et al. 2017](https://arxiv.org/abs/1706.03762)",
    "BeliefFormer": "[BeliefFormer: Belief Attention in Transformer]"
    "(https://openreview.net/forum?id=Ard2QzPAUK)",
    "XSA": "[Exclusive Self Attention](https://arxiv.org/abs/2603.09078)",
    "AttentionX": "[AttentionX: Exploiting Consensus Discrepancy In Attention from A Distributed "
    "Optimization Perspective](https://arxiv.org/abs/2409.04275)",
    "Belief2": "[Improved Belief-Attention in Vision Tasks](https://arxiv.org/abs/2606.00077)",
    "MGK": "[Improving Transformers with Probabilistic Attention Keys]"
    "(https://arxiv.org/abs/2110.08678)",
    "linear": "[Transformers are RNNs](https://arxiv.org/abs/2006.16236)",
    "talking heads": "[Talking-Heads Attention](https://arxiv.org/abs/2003.02436)",
    "DCMHA": "[Improving Transformers with Dynamically Composable Multi-Head Attention]"
    "(https://arxiv.org/abs/2405.08553)",
    "sigmoid": "[Theory, Analysis, and Best Practices for Sigmoid Self-Attention]"
    "(https://arxiv.org/abs/2409.04431)",
    "differential": "[Differential Transformer](https://arxiv.org/abs/2410.05258)",
}


class Entry(NamedTuple):
    """Hand-written description of a preset: paper, place in it, formula, difference, crossing."""

    name: str
    paper: str
    where: str
    formula: str
    difference: str
    cross: str


ALPHA = r"\alpha_i = \frac{\langle \mathrm{MH}_i, V_i \rangle}{\langle V_i, V_i \rangle}"
BETA = r"\beta_i = \frac{\langle h_i, v_i \rangle}{\langle v_i, v_i \rangle}"
GAUSS = r"\frac{\lVert q_i - k_{jr} \rVert^2}{2 \sqrt D}"
SOFT = rf"s_{{ij}} = \log \sum_r \pi_r \exp\left(-{GAUSS}\right)"
HARD = rf"s_{{ij}} = \max_r \left(-{GAUSS}\right)"
DOTS = r"s_{ij} = \log \sum_r \pi_r \exp\left(\frac{q_i \cdot k_{jr}}{\sqrt D}\right)"
SHIFTED = r", \qquad k_{jr} = k_j + b_r"
PROJECTED = r", \qquad k_{jr} = x_j W_{K_r}"
LINEAR = (
    r"h_i = \frac{\sum_j \varphi(q_i) \cdot \kappa_j\, v_j}{\sum_j \varphi(q_i) \cdot \kappa_j},"
    r"\qquad \varphi = \mathrm{elu} + 1, \qquad "
)
MGK, DCMHA = "Mixture of Gaussian Keys (MGK)", "Dynamically Composable Multi-Head Attention (DCMHA)"


def composed(*terms: str, identity: bool = True) -> str:
    """Return the formula of a composition with these terms; a_ij are the heads at tokens (i, j)."""
    start = "a_{ij}" if identity else "0"
    return r"a_{ij} \leftarrow " + " + ".join([start, *terms])


def dynamic(*sides: str, low_rank: bool = True, gate: bool = True, extra: str = "") -> str:
    """Return the formula of a dynamic composition from the tokens `sides`."""
    terms = []
    for side in sides:
        if low_rank:
            terms.append(rf"\sum_r w^2_r(x_{side})\, \left(w^1_r(x_{side}) \cdot a_{{ij}}\right)")
        if gate:
            terms.append(rf"g(x_{side}) \odot a_{{ij}}")
    return composed(*terms, *([extra] if extra else []))


DYNAMIC = "The heads' logits, and then their weights, are mixed at every pair of tokens"
TABLE9 = "eq. 5-8, Table 9"
ENTRIES: dict[str, Entry] = {
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
        "{preset: dcmha-post, residual: value}",
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

NORMALISERS = rf"""
## Normalisers

A normaliser turns logits into weights; the key is `normaliser`. They have no preset and no row in
the committed benchmark. Modules: `Softmax`, `Sigmoid`, `OffsetSoftmax` and `Differential`
in
[attention/normaliser.py](../lit_attn/attention/normaliser.py); formulas: `softmax`, `sigmoid`,
`offset_softmax`, `differential` and `differential_heads` in
[attention/reference.py](../lit_attn/attention/reference.py).

**Sigmoid attention** ({LINKS["sigmoid"]}, section 2):

$$a_{{ij}} = \frac{{1}}{{1 + e^{{-(s_{{ij}} + b)}}}}, \qquad b = -\log n .$$

Weights of a query need not add up to 1. n is the number of keys that the query may attend to.
Added parameters: none. Crossing: `attention: {{normaliser: sigmoid, zz: with}}`.

**Offset softmax** ({LINKS["MGK"]}, released language models): the softmax with `offset`, 1e-6 by
default, added to the sum over keys,

$$a_{{ij}} = \frac{{e^{{s_{{ij}}}}}}{{\epsilon + \sum_j e^{{s_{{ij}}}}}} .$$

It matters only where all Gaussian logits of a query are far below zero. Added parameters: none.

**Differential attention** ({LINKS["differential"]}, eq. 1-3), for heads $2m$ and $2m + 1$:

$$a_{{ij}} = \mathrm{{softmax}}_j(s^{{2m}}_{{ij}}) - \lambda\,
\mathrm{{softmax}}_j(s^{{2m+1}}_{{ij}}), \qquad
\lambda = e^{{\lambda_{{q1}} \cdot \lambda_{{k1}}}} - e^{{\lambda_{{q2}} \cdot \lambda_{{k2}}}} +
\lambda_{{init}} .$$

Both heads use these weights for their values. Their outputs, side by side, are normalised
(RMSNorm) and multiplied by $1 - \lambda_{{init}}$. Added parameters: 4 D, the vectors of lambda.
The number of heads must be even. Crossing: `attention: {{normaliser: differential, zz: with}}`.
"""
