"""Write the experiments of this folder: one file for each depth, by the rule of nanochat.

`python experiments/modern/write_recipes.py` writes d4.yaml, d6.yaml, ..., d12.yaml, and
`python experiments/modern/write_recipes.py 7` writes d7.yaml. A test compares the files with the
rule.

Source: scripts/base_train.py and nanochat/gpt.py of github.com/karpathy/nanochat at 92d63d4.
"""

import math
import sys
from pathlib import Path
from typing import NamedTuple

FOLDER = Path(__file__).parent
DEPTHS = (4, 6, 8, 10, 12)

VOCABULARY = 50_257  # GPT-2's tokenizer; nanochat trains its own with 32,768 ids.
GATE_CHANNELS = 12
TOKENS_PER_PARAMETER = 12
REFERENCE_DEPTH = 12
REFERENCE_BATCH = 2**19  # Tokens of a step at the reference depth.
EVALUATIONS = 10
SEQUENCES = 32  # Sequences of a micro-batch on one GPU.
H100_PEAK = 989e12  # FLOP/s of dense bfloat16 products, NVIDIA's data sheet of the H100 SXM.


class Shape(NamedTuple):
    """Sizes that do not follow from the depth; the defaults are those of nanochat."""

    aspect: int = 64
    head_dim: int = 128
    context: int = 2048
    vocabulary: int = VOCABULARY


NANOCHAT = Shape()


class Recipe(NamedTuple):
    """Everything that follows from the depth. `batch` and `tokens` are numbers of tokens."""

    dim: int
    heads: int
    windows: list[int | None]
    parameters: int
    batch: int
    steps: int
    tokens: int
    lr: float
    weight_decay: float
    head_lr: float
    embedding_lr: float
    scalar_lr: float
    flops_per_token: float

    @property
    def flops(self) -> float:
        """FLOPs of the training."""
        return self.flops_per_token * self.tokens

    def hours(self, utilisation: float) -> float:
        """Hours of one H100 at a share `utilisation` of its peak: counted, not measured."""
        return self.flops / (utilisation * H100_PEAK) / 3600


def find_width(depth: int, shape: Shape) -> int:
    """Return the width: depth times the aspect, rounded up to whole heads."""
    return math.ceil(depth * shape.aspect / shape.head_dim) * shape.head_dim


def count_parameters(depth: int, shape: Shape) -> int:
    """Return the parameters by which nanochat sets the length: matrices of the blocks, and head."""
    dim = find_width(depth, shape)
    layers_with_values = (depth + 1) // 2
    gates = layers_with_values * GATE_CHANNELS * (dim // shape.head_dim)
    return depth * 12 * dim**2 + gates + shape.vocabulary * dim


def find_windows(depth: int, context: int) -> list[int | None]:
    """Return the windows: three of a quarter of the context, then none; the last layer has none.

    A window of nanochat counts the tokens before the query's own, so it has one more key.
    """
    quarter = math.floor(context / 4 / 128) * 128
    windows = [None if layer % 4 == 3 else quarter + 1 for layer in range(depth)]
    windows[-1] = None
    return windows


def make_recipe(depth: int, shape: Shape = NANOCHAT, batch: int | None = None) -> Recipe:
    """Return the recipe of a model with `depth` blocks; `batch` replaces that of the rule."""
    dim = find_width(depth, shape)
    parameters = count_parameters(depth, shape)
    tokens = TOKENS_PER_PARAMETER * parameters
    reference_tokens = TOKENS_PER_PARAMETER * count_parameters(REFERENCE_DEPTH, shape)
    if batch is None:
        exact_batch = REFERENCE_BATCH * (tokens / reference_tokens) ** 0.383
        batch = 2 ** round(math.log2(exact_batch))
    batch_factor = math.sqrt(batch / REFERENCE_BATCH)
    width_factor = (dim / 768) ** -0.5
    windows = find_windows(depth, shape.context)
    # Ten evaluations divide the steps into equal parts.
    steps = tokens // batch // EVALUATIONS * EVALUATIONS
    smear = 24
    keys = sum(window - 1 if window else shape.context for window in windows)
    return Recipe(
        dim=dim,
        heads=dim // shape.head_dim,
        windows=windows,
        parameters=parameters,
        batch=batch,
        steps=steps,
        tokens=steps * batch,
        lr=0.02 * batch_factor,
        weight_decay=0.28 * batch_factor * reference_tokens / tokens,
        head_lr=0.008 * batch_factor * width_factor,
        embedding_lr=0.3 * batch_factor * width_factor,
        scalar_lr=0.5 * batch_factor,
        flops_per_token=6 * (parameters + smear) + 12 * dim * keys,
    )


def write_text(depth: int) -> str:
    """Return the experiment of a depth as YAML."""
    recipe = make_recipe(depth)
    context = NANOCHAT.context
    sequences = recipe.batch // context
    hours = recipe.hours(0.4)
    period = ", ".join("null" if window is None else str(window) for window in recipe.windows)
    return f"""\
# A language model with {depth} blocks by the rule of nanochat (docs/modern.md).
#
# source    github.com/karpathy/nanochat at 92d63d4: scripts/base_train.py and nanochat/gpt.py.
#           write_recipes.py writes this file from the depth alone; edit the rule there.
# data      python -m lit_attn.data.prepare fineweb --out data/fineweb. nanochat trains on
#           another text, with a tokenizer of its own with 32,768 ids.
# metric    Nats per token on the first 10,485,760 tokens of validation, in float32.
# cost      {recipe.tokens:.2e} tokens and {recipe.flops:.1e} FLOPs per cell: {hours:.2f} hours of
#           one H100 at 40 % of its peak. Counted, not measured.
# expected  Not known: nobody has trained it on this text.
task: language-modelling
data:
  kind: shards
  name: fineweb
  folder: ../../data/fineweb
  context: {context}
  batch_size: {sequences}
  accumulate: {max(1, sequences // SEQUENCES)}
  order: files
  epoch_steps: {recipe.steps // EVALUATIONS}
  eval_tokens: 10485760
model:
  kind: nanochat
  dim: {recipe.dim}
  depth: {depth}
  heads: {recipe.heads}
  ffn: {{width: {4 * recipe.dim}, activation: relu2}}
  positions: rotary
  rotary_base: 1.0e+5
  norm: rmsnorm-unweighted
  norm_eps: 1.1920929e-07
  qk_norm: unweighted
  qk_norm_eps: 1.1920929e-07
  qk_gain: 1.2
  windows: [{period}]
  value_embeddings: {{every: 2, channels: {GATE_CHANNELS}, factor: 3.0}}
  head: untied
  logit_cap: 15.0
  vocabulary_multiple: 64
optimizer:
  kind: normuon
  lr: {recipe.lr:.6g}
  weight_decay: {recipe.weight_decay:.6g}
  head_lr: {recipe.head_lr:.6g}
  embedding_lr: {recipe.embedding_lr:.6g}
  scalar_lr: {recipe.scalar_lr:.6g}
schedule: {{kind: nanochat, warmup_steps: 40, decay_share: 0.65, end: 0.05}}
# An epoch is a tenth of all {recipe.steps:,} steps.
training: {{epochs: {EVALUATIONS}, evaluate_every: 1, precision: bf16}}
"""


def write_table() -> str:
    """Return the table of all depths in docs/modern.md."""
    columns = ["depth", "width", "heads", "parameters", "tokens of a step", "steps", "tokens"]
    columns += ["Muon's rate", "weight decay", "FLOPs", "hours of one H100"]
    lines = [f"| {' | '.join(columns)} |", "|" + "---|" * len(columns)]
    for depth in DEPTHS:
        recipe = make_recipe(depth)
        values = [
            str(depth),
            str(recipe.dim),
            str(recipe.heads),
            f"{recipe.parameters / 1e6:.1f}M",
            f"{recipe.batch:,}",
            f"{recipe.steps:,}",
            f"{recipe.tokens / 1e6:,.0f}M",
            f"{recipe.lr:.4f}",
            f"{recipe.weight_decay:.3f}",
            f"{recipe.flops:.1e}",
            f"{recipe.hours(0.4):.2f}",
        ]
        lines.append(f"| {' | '.join(values)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Write the files of the depths on the command line, or of DEPTHS."""
    depths = [int(word) for word in sys.argv[1:]] or DEPTHS
    for depth in depths:
        path = FOLDER / f"d{depth}.yaml"
        path.write_text(write_text(depth))
        recipe = make_recipe(depth)
        print(f"{path.name}: {recipe.steps:,} steps of {recipe.batch:,} tokens")


if __name__ == "__main__":
    main()
