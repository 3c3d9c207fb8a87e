"""Papers, the form of an entry, and parts of formulas that several mechanisms share."""

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
    "MLA": "[DeepSeek-V2](https://arxiv.org/abs/2405.04434)",
    "MoBA": "[MoBA: Mixture of Block Attention for Long-Context LLMs]"
    "(https://arxiv.org/abs/2502.13189)",
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
    r"h_i = \frac{\sum_j \varphi(q_i) \cdot \kappa_j\, v_j}"
    r"{10^{-5} \sqrt D + \sum_j \varphi(q_i) \cdot \kappa_j},"
    r"\qquad \varphi = \mathrm{elu} + 1, \qquad "
)


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
    if extra:
        terms.append(extra)
    return composed(*terms)
