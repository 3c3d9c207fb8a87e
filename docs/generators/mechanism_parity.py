"""Released code that each later preset was compared with, or the reason why there is none."""


def link(repository: str, commit: str, path: str, note: str = "") -> str:
    """Return the sentence of a comparison, with a link to the file at its commit."""
    name = path.rpartition("/")[2]
    address = f"https://github.com/{repository}/blob/{commit}/{path}"
    return f"[{repository}, {name}]({address}). {note}".rstrip()


GATED = link(
    "qiuzh20/gated_attention",
    "49645df63aafe9e680bc44a9c0ca280d4aefa8e9",
    "modeling_qwen3.py",
    "Without its rotation and its norms of q and k.",
)
GPT_OSS = "src/transformers/models/gpt_oss/modeling_gpt_oss.py"
NO_KNOCKING = "none was found."
PARITY = {
    "gated": GATED,
    "gated-heads": GATED,
    "gated-xsa": "not compared: the layer of modded-nanogpt needs FlashAttention on a GPU.",
    "sigmoid": link(
        "apple/ml-sigmoid-attention",
        "9273b493f234ccbb184cab1131010dd0e965d8ce",
        "attention_simulator/src/attention_simulator/layers/attention.py",
        "With its bias set to -log n, and without causal order.",
    ),
    "off-by-one": link(
        "huggingface/transformers",
        "v5.23.0",
        GPT_OSS,
        "With sinks of 0, which give the same weights.",
    ),
    "sink": link("huggingface/transformers", "v5.23.0", GPT_OSS),
    "softpick": link(
        "zaydzuhri/softpick-attention",
        "c97f4dc5f9fcec2e8afc2932db2cba6d7d7e5465",
        "naive_softpick_attn.py",
        "Its gradients differ by 1e-8, because it differentiates the factor of its epsilon.",
    ),
    "capped": link(
        "huggingface/transformers", "v5.23.0", "src/transformers/models/gemma2/modeling_gemma2.py"
    ),
    "differential": link(
        "microsoft/unilm",
        "768a3c873f598bb9b4d4dfb9267b099e35f8fe56",
        "Diff-Transformer/multihead_diffattn.py",
        "Two layers, without rotation.",
    ),
    "ssmax": link(
        "gdevos010/Scalable-Softmax",
        "108e969f50956b47f134e9712a0fa7bdf521718d",
        "src/scalable_softmax.py",
        "Code of another author, which takes the complete length as n; the comparison is without "
        "causal order. The paper's authors have released none that was found.",
    ),
    "forgetting": link(
        "fla-org/flash-linear-attention",
        "bc3b101dcb713ddc5bd8924b66754eb68b5ccf89",
        "fla/ops/forgetting_attn/naive.py",
        "The layer of the authors needs Triton.",
    ),
    "alibi": link(
        "huggingface/transformers",
        "v5.23.0",
        "src/transformers/models/bloom/modeling_bloom.py",
        "With 6 heads.",
    ),
    "t5": link(
        "huggingface/transformers",
        "v5.23.0",
        "src/transformers/models/t5/modeling_t5.py",
        "The buckets of an encoder. T5 does not divide logits by the root of D.",
    ),
    "knocking-heads": NO_KNOCKING,
    "knocking-heads-mlp": NO_KNOCKING,
    "value-residual": link(
        "Zcchill/Value-Residual-Learning",
        "95652f64aba7db6c095f4e92eafb9e76e6ed9e02",
        "src/modeling/modeling_llama_resformer.py",
        "Three layers, without rotation.",
    ),
    "value-residual-learned": "not compared: the authors' code has fixed factors.",
    "selective": link(
        "lucidrains/x-transformers",
        "9252ed7838021ee61e6c5be0930b3a9a88efdf06",
        "x_transformers/attend.py",
        "Code of another author; the paper's authors have released none that was found.",
    ),
    "multi-token": link(
        "facebookresearch/RAM",
        "e6f051fbcfaef4cab69bf2ea1b25f500f94c0c64",
        "projects/mta/mta_transformer.py",
        "With kernels of 3 queries and 5 keys and groups of 3 of 6 heads, without rotation; and "
        "the layer of its toy task, with kernels of 2 queries and 9 keys of the logits alone.",
    ),
    "differential-2": link(
        "microsoft/unilm",
        "31646c58ba06272ce1771bf07681751f0114abd0",
        "Diff-Transformer/Diff-Transformer-V2/multihead_flashdiffv2.py",
        "With PyTorch's attention instead of FlashAttention, without rotation.",
    ),
    "mla": link(
        "huggingface/transformers",
        "v5.23.0",
        "src/transformers/models/deepseek_v3/modeling_deepseek_v3.py",
        "Values, with torch's RMSNorm in place of its norm in float32 "
        "(`tests/attention/test_latent.py`).",
    ),
    "moba": link(
        "MoonshotAI/MoBA",
        "61e456bc956c5a25fd9c84e5496b661329cb1b72",
        "moba/moba_naive.py",
        "Sums, with float64 in place of its float32 (`tests/attention/test_block_choice.py`).",
    ),
}
