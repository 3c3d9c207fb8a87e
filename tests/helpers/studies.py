"""Small studies and experiments for the tests of the grammar and the runner."""

from pathlib import Path

from lit_attn.ablate.variants import Variant, resolve
from lit_attn.config.study import StudySource, read_studies

EXPERIMENT = """\
data: {kind: digits, batch_size: 64}
model: {kind: vit, dim: 16, depth: 1, heads: 2, patch: 4, ffn: {width: 32}}
optimizer: {kind: adamw, lr: 1e-3}
schedule: {kind: cosine, warmup: 1}
training:
  epochs: 2
"""

STUDY = """\
studies:
  tiny:
    title: A tiny study
    experiment: experiment.yaml
    default: true
    seeds: 2
"""


def with_data(data: str) -> str:
    """Return EXPERIMENT with another section `data`."""
    return f"data: {data}\n" + EXPERIMENT.partition("\n")[2]


def write(folder: Path, body: str, experiment: str = EXPERIMENT) -> Path:
    """Write an ablations.yaml with one study; `body` is the rest of the study, not indented."""
    (folder / "experiment.yaml").write_text(experiment)
    path = folder / "ablations.yaml"
    lines = (f"    {line}" if line else line for line in body.strip("\n").split("\n"))
    path.write_text(STUDY + "\n".join(lines) + "\n")
    return path


def study(folder: Path, body: str, experiment: str = EXPERIMENT) -> StudySource:
    return read_studies(write(folder, body, experiment))["tiny"]


def variants(folder: Path, body: str, experiment: str = EXPERIMENT) -> dict[str, Variant]:
    """Return the resolved variants of a study with this body, by name."""
    return {variant.name: variant for variant in resolve(study(folder, body, experiment))}
