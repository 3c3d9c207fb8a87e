"""lit_attn: ablations of attention mechanisms that a reviewer believes."""

import sys
from importlib.util import find_spec
from typing import Any

__version__ = "0.2.0"


def _find_lack() -> str:
    """Return what this Python lacks for every command, or an empty text."""
    # pip checks this, but a clone can be used without pip.
    if sys.version_info < (3, 11):  # noqa: UP036
        version = f"{sys.version_info[0]}.{sys.version_info[1]}"
        return f"lit_attn needs Python 3.11 or newer, and {sys.executable} is Python {version}"
    # Packages that also the commands without PyTorch import.
    needed = ("jinja2", "numpy", "pandas", "pydantic", "rich", "ruamel", "scipy")
    missing = [package for package in needed if find_spec(package) is None]
    if not missing:
        return ""
    return (
        f"{', '.join(missing)}: not installed for {sys.executable}; activate the environment of "
        "lit_attn, or install it as in README.md: pip install -e ."
    )


_lack = _find_lack()
if _lack:
    # The name of the program while Python looks for the module of `python -m`.
    if sys.argv[:1] == ["-m"]:
        sys.exit(_lack)
    raise ImportError(_lack)

# Types of the same names for editors and mypy stand in __init__.pyi. As imports of this file, even
# under TYPE_CHECKING, they would let every package of lit_attn import every other one.
_PUBLIC = {
    # Functions and classes to call.
    "Study": "lit_attn.study:Study",
    "attn_layer": "lit_attn.attention.layer:attn_layer",
    "compare": "lit_attn.report:compare",
    "find_laws": "lit_attn.judging.laws:find_laws",
    "judge": "lit_attn.judging.runs:judge",
    "load_exported": "lit_attn.hub:load_exported",
    "read_runs": "lit_attn.report:read_runs",
    "replace_attention": "lit_attn.replace:replace_attention",
    # Configurations of an attention layer and of its parts.
    "AttentionSpec": "lit_attn.attention.spec:AttentionSpec",
    "BiasConfig": "lit_attn.attention.bias:BiasConfig",
    "ComposeConfig": "lit_attn.attention.compose:ComposeConfig",
    "FilterConfig": "lit_attn.attention.filters:FilterConfig",
    "GateConfig": "lit_attn.attention.gate:GateConfig",
    "LayerShape": "lit_attn.attention.parts:LayerShape",
    "NormaliserConfig": "lit_attn.attention.normaliser:NormaliserConfig",
    "PairConfig": "lit_attn.attention.pairs:PairConfig",
    "ResidualConfig": "lit_attn.attention.residual:ResidualConfig",
    "ScaleConfig": "lit_attn.attention.scale:ScaleConfig",
    "SimilarityConfig": "lit_attn.attention.similarity:SimilarityConfig",
    "TransformConfig": "lit_attn.attention.transform:TransformConfig",
    "ConvolutionConfig": "lit_attn.attention.convolution:ConvolutionConfig",
    "ValuesConfig": "lit_attn.attention.first_values:ValuesConfig",
    # Modules of the parts, and the cache of a token mixer.
    "Bias": "lit_attn.attention.bias:Bias",
    "Cache": "lit_attn.attention.cache:Cache",
    "Composer": "lit_attn.attention.compose:Composer",
    "Filter": "lit_attn.attention.filters:Filter",
    "Gate": "lit_attn.attention.gate:Gate",
    "Normaliser": "lit_attn.attention.normaliser:Normaliser",
    "Pair": "lit_attn.attention.pairs:Pair",
    "Residual": "lit_attn.attention.residual:Residual",
    "Scale": "lit_attn.attention.scale:Scale",
    "Similarity": "lit_attn.attention.similarity:Similarity",
    "Transform": "lit_attn.attention.transform:Transform",
    "Convolution": "lit_attn.attention.convolution:Convolution",
    "Values": "lit_attn.attention.first_values:Values",
    # Families of an experiment.
    "AddedMetric": "lit_attn.tasks.metrics:AddedMetric",
    "Augmentation": "lit_attn.data.augment.base:Augmentation",
    "CallbackConfig": "lit_attn.config.callbacks:CallbackConfig",
    "Data": "lit_attn.data.base:Data",
    "Loss": "lit_attn.tasks.task:Loss",
    "MetricLogger": "lit_attn.config.training:MetricLogger",
    "Model": "lit_attn.models.base:Model",
    "Optimizer": "lit_attn.optim.base:Optimizer",
    "SceneAugmentation": "lit_attn.segmentation.scene_steps:SceneAugmentation",
    "Schedule": "lit_attn.optim.schedules:Schedule",
    "Task": "lit_attn.tasks.task:Task",
    "Tokenizer": "lit_attn.data.text.tokenizers:Tokenizer",
    # Types that their members return or derive from.
    "DataModule": "lit_attn.data.module:DataModule",
    "EvaluationLoader": "lit_attn.data.module:EvaluationLoader",
    "FFN": "lit_attn.models.base:FFN",
    "MetricInfo": "lit_attn.tasks.metrics:MetricInfo",
    "Signature": "lit_attn.signatures:Signature",
    "TaskModule": "lit_attn.tasks.base:TaskModule",
}
"""Public names, and where each of them is defined."""

__all__ = ["__version__", *_PUBLIC]


def __getattr__(name: str) -> Any:
    """Import a public name when it is used, so that `import lit_attn` imports no PyTorch."""
    if name not in _PUBLIC:
        raise AttributeError(f"module 'lit_attn' has no attribute '{name}'")
    from lit_attn.schema.base import load

    return load(_PUBLIC[name])


def __dir__() -> list[str]:
    """Return all names of the module, also those that have not been imported yet."""
    return sorted({*globals(), *_PUBLIC})
