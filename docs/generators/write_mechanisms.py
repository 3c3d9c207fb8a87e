"""Generator of the page of all presets, run in the root of the repository:

    python docs/generators/write_mechanisms.py > docs/mechanisms.md

The formulas and sentences are in mechanism_entries.py, compared_entries.py and
mechanism_parity.py. Parts, files and parameters are read from the code. A test fails if
docs/mechanisms.md is out of date.
"""

from mechanism_entries import ENTRIES, WITHOUT_PRESET
from mechanism_formulas import LINKS
from mechanism_parity import PARITY

from lit_attn.attention.layer import Attention, attn_layer
from lit_attn.attention.spec import PRESETS
from lit_attn.schema.base import Config

DIM, HEADS = 192, 12

HEAD = f"""\
<!-- python docs/generators/write_mechanisms.py > docs/mechanisms.md writes this page. -->

# Mechanisms

Every value of `attention:`. *Parameters* are those that a layer of width {DIM} with {HEADS} heads
has beyond the standard layer.

| preset | mechanism | paper | parameters |
|---|---|---|---:|"""

NOTATION = """\

## How to read an entry

Notation: token $i$ of $n$, heads $m$ of $H$, head width $D$; $q_i, k_i, v_i, z_i$ are a head's
query, key, value and $z$; $h_i = \\sum_j a_{ij} v_j$ is a head's output, $\\mathrm{MH}_i$ and
$V_i$ are the outputs and the values of all heads side by side, $W$ is the output projection. The
standard layer is

$$s_{ij} = \\frac{q_i \\cdot k_j}{\\sqrt D}, \\qquad
a_{ij} = \\frac{e^{s_{ij}}}{\\sum_l e^{s_{il}}}, \\qquad
x_i \\leftarrow x_i + \\mathrm{MH}_i W .$$

An entry shows only the formulas that differ from these. [costs.md](costs.md) has measured
times and memory, and the command that measures them on your machine. *Released code* names the code
whose layer computes the same values and gradients in float64, from the same parameters
(`tests/released/mechanisms.py`), or says why there is no such comparison.

## Formulas"""

PATHS = """
## The kernel of a layer

`choose_path` in [attention/dispatch.py](../lit_attn/attention/dispatch.py) selects how a layer with
logits is computed. The first row that matches counts; a test checks this table. *Weights* are
`blocks` for `moba` with one softmax, one key for each token, only the causal mask and no cache;
`formed` if heads are composed, a filter acts on the logits, or the normaliser is none of softmax,
differential softmax, offset and sink (these, too, for a single query, and the differential one with
dropout or masks that differ between heads); and a `sink` for the normaliser `sink` or an offset.
*Mask* is `order` for a window or local self-attention without another mask, and `other` for a
padding or additive mask, a bias of pairs, or a cache that is not empty. *Device* is `flex` on a GPU
for float32 or half precision, widths from 16 to 256 and several queries; `meta` counts FLOPs.
Linear attention has no logits and computes running sums. A query that sees no key gets zero on
every path.

| similarity | weights | mask | dropout | device | path |
|---|---|---|---|---|---|
| any | blocks | any | any | flex | FLEX |
| any | blocks | any | any | any | FORMED |
| any | formed | any | any | any | FORMED |
| hard mixture or z z | any | any | any | flex | FLEX |
| any | any | order | any | flex | FLEX |
| M > 1 keys | any | not none | any | flex | FLEX |
| M > 1 keys | any | any | yes | flex | FLEX |
| hard mixture | any | any | any | any | FORMED |
| M > 1 keys | any | any | yes | any | FORMED |
| M > 1 keys or z z | no sink | causal | no | not meta | MERGED |
| z z | no sink | none | no | not meta | MERGED |
| any | any | any | any | any | ONE_CALL |

- FORMED: the weights are formed; beyond 384 keys for one chunk of queries at a time, and again in
  the backward pass.
- FLEX: one call of flex_attention, compiled. A hard mixture keeps one bit for each pair of tokens,
  and blocks of keys skip tiles that no query has chosen. Dropout needs a second call. Blocks and
  dropout on this path have not run on a GPU; tests compare them with the reference on a CPU.
- MERGED: one kernel call with all M n keys for each slice of the batch; in causal order one call
  for each of the M keys, merged by log-sum-exp. It keeps only its inputs for the backward pass. On
  a CPU ONE_CALL takes .8 to 1.05 of its time up to 512 tokens, but a mixture over 8,192 tokens
  would keep 417 instead of 21 MiB ([LOG.md](../LOG.md)).
- ONE_CALL: one call of scaled-dot-product attention with all M n keys. A number that belongs to a
  key (norms and priors of Gaussian keys, in causal order ALiBi and forgetting gates) is the product
  of further features. A sink is one token in front (`attend_with_sink` in
  [attention/sink.py](../lit_attn/attention/sink.py), for any model). Differential attention is two
  calls. In float32 a logit is rounded to about 6e-8 of the bias of its key.

*Second derivatives* (`create_graph=True`): FORMED has them with at most 384 keys, filters and
compiled code at any length, and ONE_CALL inside `torch.nn.attention.sdpa_kernel(SDPBackend.MATH)`.
MERGED and FLEX raise an error in their backward pass. Running sums have them.
"""


def write_page() -> str:
    """Return the page in Markdown."""
    standard = count_parameters(attn_layer("standard"))
    added = {name: count_parameters(attn_layer(name)) - standard for name in PRESETS}
    lines = [HEAD]
    for name in PRESETS:
        entry = ENTRIES[name]
        paper = LINKS[entry.paper].partition("](")[2].removesuffix(")")
        shown = f"[{entry.paper}]({paper})" if paper else entry.paper
        cells = [f"[{name}](#{name})", entry.name, shown, f"{added[name]:+,}"]
        lines.append(f"| {' | '.join(cells)} |")
    lines.append(NOTATION)
    for name in PRESETS:
        entry = ENTRIES[name]
        lines += [
            f"\n### {name}\n",
            f"{entry.name}: {LINKS[entry.paper]}, {entry.where}.\n",
            f"$${entry.formula}$$\n",
            f"{entry.difference}\n",
            f"- Parameters: {added[name]:+,}.",
            f"- Code: {', '.join(code_of(name))}.",
            f"- Crossing with another part: `attention: {entry.cross}`",
        ]
        if name in PARITY:
            lines.append(f"- Released code: {PARITY[name]}")
    return "\n".join(lines) + "\n" + WITHOUT_PRESET + PATHS


def count_parameters(layer: type[Attention]) -> int:
    """Return the number of parameters of a layer of width DIM with HEADS heads."""
    built = layer(DIM, HEADS, qkv_bias=True, device="meta")
    return sum(parameter.numel() for parameter in built.parameters())


def code_of(name: str) -> list[str]:
    """Return a link to every part that is not the standard one."""
    standard = PRESETS["standard"].parts
    links: list[str] = []
    for family, part in PRESETS[name].parts.items():
        is_own = part.kind != standard[family].kind or name == "standard"
        if is_own and part.kind != "none":
            links.append(_link(part))
    latent = PRESETS[name].latent
    if latent is not None:
        links.append(_link(latent))
    return list(dict.fromkeys(links))


def _link(part: Config) -> str:
    """Return a link to the configuration of a part, beside its formula and its module."""
    configuration = type(part)
    file = configuration.__module__.rpartition(".")[2]
    return f"`{configuration.__name__}` in [attention/{file}.py](../lit_attn/attention/{file}.py)"


if __name__ == "__main__":
    print(write_page(), end="")
