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
    "gated": "[Gated Attention for Large Language Models](https://arxiv.org/abs/2505.06708)",
    "gated XSA": "[modded-nanogpt, pull request 264]"
    "(https://github.com/KellerJordan/modded-nanogpt/pull/264)",
    "off-by-one": "[Attention Is Off By One](https://www.evanmiller.org/attention-is-off-by-one.html)",
    "sink": "[gpt-oss-120b & gpt-oss-20b Model Card](https://arxiv.org/abs/2508.10925)",
    "softpick": "[Softpick](https://arxiv.org/abs/2504.20966)",
    "capped": "[Gemma 2](https://arxiv.org/abs/2408.00118)",
    "ssmax": "[Scalable-Softmax Is Superior for Attention](https://arxiv.org/abs/2501.19399)",
    "forgetting": "[Forgetting Transformer](https://arxiv.org/abs/2503.02130)",
    "alibi": "[Train Short, Test Long](https://arxiv.org/abs/2108.12409)",
    "t5": "[Exploring the Limits of Transfer Learning](https://arxiv.org/abs/1910.10683)",
    "knocking heads": "[Knocking-Heads Attention](https://arxiv.org/abs/2510.23052)",
    "differential 2": "[Differential Transformer V2]"
    "(https://github.com/microsoft/unilm/tree/master/Diff-Transformer/Diff-Transformer-V2)",
    "selective": "[Selective Attention Improves Transformer](https://arxiv.org/abs/2410.02703)",
    "multi-token": "[Multi-Token Attention](https://arxiv.org/abs/2504.00927)",
    "value residual": "[Value Residual Learning](https://arxiv.org/abs/2410.17897)",
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
    # What people compare with the five papers' mechanisms in 2026.
    "gated": Entry(
        "Gated attention, in each element",
        "gated",
        "section 2.2, position G1",
        r"x_i \leftarrow x_i + (\mathrm{MH}_i \odot \sigma(x_i W_g)) W",
        "A gate from the layer's input multiplies each element of the attention output.",
        "{preset: gated, residual: perpendicular}",
    ),
    "gated-heads": Entry(
        "Gated attention, in each head",
        "gated",
        "section 2.2, position G1, head-wise",
        r"x_i \leftarrow x_i + \mathrm{concat}_m(h_i\, \sigma(x_i \cdot w_m)) W",
        "As `gated`, with one gate for each head.",
        "{preset: gated-heads, zz: with}",
    ),
    "gated-xsa": Entry(
        "Exclusive Self Attention (XSA) with a learned strength",
        "gated XSA",
        "the merged record of gated XSA",
        rf"x_i \leftarrow x_i + \mathrm{{concat}}_m(h_i - \tanh(a_m) \beta_i v_i) W, \qquad {BETA}",
        "As `xsa`, with a strength of each head that starts at 0, where the layer is the standard "
        "one.",
        "{preset: gated-xsa, gate: head}",
    ),
    "sigmoid": Entry(
        "Sigmoid attention",
        "sigmoid",
        "section 2",
        r"a_{ij} = \frac{1}{1 + e^{-(s_{ij} + b)}}, \qquad b = -\log n",
        "Weights of a query need not add up to 1. n is the number of keys that the query sees.",
        "{preset: sigmoid, zz: with}",
    ),
    "off-by-one": Entry(
        "Off-by-one softmax",
        "off-by-one",
        "the equation of softmax one",
        r"a_{ij} = \frac{e^{s_{ij}}}{1 + \sum_l e^{s_{il}}}",
        "A query can attend to nothing.",
        "{preset: off-by-one, residual: perpendicular}",
    ),
    "sink": Entry(
        "Learned attention sink",
        "sink",
        "section 2.3",
        r"a_{ij} = \frac{e^{s_{ij}}}{e^{b_m} + \sum_l e^{s_{il}}}",
        "As `off-by-one`, with a learned number of each head instead of 1.",
        "{preset: sink, compose: query}",
    ),
    "softpick": Entry(
        "Softpick",
        "softpick",
        "eq. 3",
        r"a_{ij} = \frac{\max(e^{s_{ij}} - 1, 0)}{\sum_l |e^{s_{il}} - 1|}",
        "Weights can be exactly 0, and their sum can be less than 1.",
        "{preset: softpick, zz: with}",
    ),
    "capped": Entry(
        "Softmax of capped logits",
        "capped",
        "section 2, with c = 50",
        r"a_{ij} = \frac{e^{c \tanh(s_{ij} / c)}}{\sum_l e^{c \tanh(s_{il} / c)}}",
        "No logit exceeds c.",
        "{preset: capped, normaliser: {cap: 30.0}}",
    ),
    "differential": Entry(
        "Differential attention",
        "differential",
        "eq. 1-3, with lambda_init of section 2.1",
        r"a_{ij} = \mathrm{softmax}_j(s^{2m}_{ij}) - \lambda\, \mathrm{softmax}_j(s^{2m+1}_{ij}), "
        r"\qquad \lambda_{init} = 0.8 - 0.6\, e^{-0.3\, l}",
        "The weights of two heads are subtracted; l is the number of the layer, from 0. The norm "
        "of a pair of heads has learned weights, as in the released code.",
        "{preset: differential, zz: with}",
    ),
    "ssmax": Entry(
        "Scalable softmax (SSMax)",
        "ssmax",
        "eq. 2",
        r"s_{ij} = c_m \log(n_i)\, \frac{q_i \cdot k_j}{\sqrt D}",
        "Logits grow with the number n_i of keys that a query sees, by a learned factor of each "
        "head.",
        "{preset: ssmax, similarity: mixture}",
    ),
    "forgetting": Entry(
        "Forgetting attention",
        "forgetting",
        "eq. 5-7, without rotary positions",
        r"s_{ij} = \frac{q_i \cdot k_j}{\sqrt D} "
        r"+ \sum_{t=j+1}^{i} \log \sigma(x_t \cdot w_m + b_m)",
        "A gate of each token lowers the logits of all keys before it.",
        "{preset: forgetting, gate: element}",
    ),
    "alibi": Entry(
        "Attention with linear biases (ALiBi)",
        "alibi",
        "section 3",
        r"s_{ij} = \frac{q_i \cdot k_j}{\sqrt D} - \mu_m |i - j|",
        "A fixed slope of each head lowers the logits of distant keys.",
        "{preset: alibi, residual: split}",
    ),
    "t5": Entry(
        "T5's relative position bias",
        "t5",
        "section 2.1",
        r"s_{ij} = \frac{q_i \cdot k_j}{\sqrt D} + b_{m, \mathrm{bucket}(j - i)}",
        "A learned number for each head and bucket of distances. Every layer has its own table.",
        "{preset: t5, bias: {direction: before}}",
    ),
    "knocking-heads": Entry(
        "Knocking heads, linear",
        "knocking heads",
        "KHA-Linear",
        r"q_i \leftarrow q_i T_Q, \qquad k_i \leftarrow k_i T_K, \qquad v_i \leftarrow v_i T_V",
        "All heads share three D x D maps that start as the identity.",
        "{preset: knocking-heads, transform: {maps: v}}",
    ),
    "knocking-heads-mlp": Entry(
        "Knocking heads, MLP",
        "knocking heads",
        "KHA-MLP",
        r"v_i \leftarrow 2\, (v_i W_{up} \odot \sigma(v_i W_{gate}))\, W_{down}",
        "All heads share a gated map of the values that starts as the identity.",
        "{preset: knocking-heads-mlp, residual: perpendicular}",
    ),
    "value-residual": Entry(
        "Value residual (ResFormer)",
        "value residual",
        "section 3, ResFormer",
        r"v_i \leftarrow \tfrac{1}{2} v_i^{(0)} + \tfrac{1}{2} v_i",
        "Layers after the first mix their values with those of the first layer, which is "
        "unchanged. Everything in the layer uses the mixed values. The network brings the values "
        "to its layers, so `replace_attention` refuses it.",
        "{preset: value-residual, residual: perpendicular}",
    ),
    "value-residual-learned": Entry(
        "Value residual with learned factors",
        "value residual",
        "section 3, learnable ResFormer",
        r"v_i \leftarrow \lambda_1 v_i^{(0)} + \lambda_2 v_i",
        "As `value-residual`, with two learned numbers of each layer that start at 1/2.",
        "{preset: value-residual-learned, values: {first: 2.0}}",
    ),
    "selective": Entry(
        "Selective attention",
        "selective",
        "section 3",
        r"s_{ij} \leftarrow s_{ij} - \sum_{u=j+1}^{i-1} \max(s^{1}_{uj}, 0)",
        "A token can ask all later tokens to ignore a token before it, by the logits of the first "
        "head. The sum leaves out the first token, and no token asks for itself. The logits are "
        "those that the softmax would get, after compositions and biases. The weights are formed "
        "for all queries at once.",
        "{preset: selective, residual: perpendicular}",
    ),
    "multi-token": Entry(
        "Multi-token attention",
        "multi-token",
        "section 3, in the form of the released code",
        r"s_{ij} \leftarrow \mathrm{heads} \sum_{u, w} K_{uw}\, s_{i-5+u,\, j-5+w}, \qquad "
        r"a_{ij} \leftarrow \mathrm{heads}' \sum_{u, w} K'_{uw}\, a_{i-5+u,\, j-5+w}, \qquad "
        r"h_i \leftarrow \bar h_i\, \sigma(\bar h_i \cdot w + b)",
        "Each head convolves its logits, and then its weights, over 6 queries and 11 keys, and "
        "matrices mix the heads; hidden numbers count as 0. The bar is an RMSNorm. This is the "
        "form of the released configurations. The paper's text has a factor of the norm that "
        "grows with depth instead of the gate: `filter: {gate: false, rescale: depth}`. The "
        "weights are formed for all queries at once.",
        "{preset: multi-token, filter: {queries: 3, keys: 5}}",
    ),
    "differential-2": Entry(
        "Differential attention, version 2",
        "differential 2",
        "the released code of January 2026",
        r"h_i = h^{1}_i - \sigma(x_i \cdot w_m)\, h^{2}_i",
        "Each head has two queries for its key and its value, and a factor of each token subtracts "
        "the second result from the first. There is no norm of the heads and no lambda_init. The "
        "second queries have a projection of their own, so the weights of a standard layer fit.",
        "{preset: differential-2, residual: perpendicular}",
    ),
}

NORMALISERS = rf"""
## Offset softmax

`normaliser: offset-softmax` ({LINKS["MGK"]}, released language models) is the softmax with
`offset`, 1e-6 by default, added to the sum over keys,

$$a_{{ij}} = \frac{{e^{{s_{{ij}}}}}}{{\epsilon + \sum_j e^{{s_{{ij}}}}}} .$$

With the default it matters only where all Gaussian logits of a query are far below zero;
`off-by-one` has an offset of 1. Added parameters: none.
"""
