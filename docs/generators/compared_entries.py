"""Entries of docs/mechanisms.md for the presets that are not mechanisms of the five papers.

People compare these with the mechanisms of the five papers in 2026.
"""

from mechanism_formulas import BETA, Entry

COMPARED: dict[str, Entry] = {
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
        r"a_{ij} = \frac{\max(e^{s_{ij}} - 1, 0)}{\sum_l |e^{s_{il}} - 1| + 10^{-8}\, e^{\mu_i}}, "
        r"\qquad \mu_i = \max(0, \max_l s_{il})",
        "Weights can be exactly 0, and their sum can be less than 1. The paper's epsilon is not "
        "scaled by the largest logit; the released code scales it, to compute without overflow.",
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
        "A gate of each token lowers the logits of all keys before it. Without causal order, which "
        "the paper does not have, the sum is over the tokens between query and key in both "
        "directions.",
        "{preset: forgetting, gate: element}",
    ),
    "alibi": Entry(
        "Attention with linear biases (ALiBi)",
        "alibi",
        "section 3",
        r"s_{ij} = \frac{q_i \cdot k_j}{\sqrt D} - \mu_m |i - j|",
        "A fixed slope of each head lowers the logits of distant keys. The paper has causal order; "
        "without it, keys after the query are lowered by their distance too.",
        "{preset: alibi, residual: split}",
    ),
    "t5": Entry(
        "T5's relative position bias",
        "t5",
        "section 2.1",
        r"s_{ij} = \frac{q_i \cdot k_j}{\sqrt D} + b_{m, \mathrm{bucket}(j - i)}",
        "A learned number for each head and bucket of distances. Every layer has its own table. In "
        "causal order all 32 buckets are for keys before the query, as in T5's decoder, and "
        "otherwise half of them, as in its encoder; `direction` chooses one of both. The row `t5` "
        "of reports/evidence/text-mechanisms-tuned, a causal model, was trained with `both`.",
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
        "to its layers; `replace_attention` does so within a stack whose first layer is replaced.",
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
        "head. The sum leaves out the first token, and no token asks for itself. Without causal "
        "order, which the paper does not have, keys after the query lose no votes. The logits are "
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
        "grows with depth instead of the gate: `filter: {gate: false, rescale: depth}`. Without "
        "causal order, which the paper does not have, a kernel sees keys after the query, but no "
        "later queries. The weights are formed for all queries at once. `weights`, `head_maps`, "
        "`norm` and `gate` can be false each; the authors' toy task has none of them.",
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
    "mla": Entry(
        "Multi-head latent attention",
        "MLA",
        "section 2.1, eq. 9-19",
        r"k_j = [\,k^R_j;\; W_{UK} c_j\,], \qquad v_j = W_{UV} c_j, \qquad "
        r"[\,k^R_j;\; \tilde c_j\,] = x_j W_D, \qquad c_j = \mathrm{RMSNorm}(\tilde c_j)",
        "All heads have their keys and values from one latent of each token, and a cache stores "
        "the latent and the rotated part of the keys alone. The latent is four heads wide, and the "
        "rotated part one head ([keys and values from a latent]"
        "(#keys-and-values-from-a-latent)).",
        "{preset: mla, latent: {rank: 64, query_rank: 96}}",
    ),
    "moba": Entry(
        "Mixture of block attention",
        "MoBA",
        "section 2.2, eq. 2-6",
        r"s_{ij} \leftarrow -\infty \text{ unless } j \text{ is in the block of } i "
        r"\text{ or in one of the blocks } B \text{ with the largest } "
        r"\frac{1}{|B|} \sum_{l \in B} s_{il}",
        "A query sees its own block of 64 tokens and two others, so the layer is the standard one "
        "up to 192 tokens. Time is saved on a GPU alone ([blocks of keys](#blocks-of-keys)).",
        "{preset: moba, filter: {block: 16, blocks: 4}}",
    ),
}
