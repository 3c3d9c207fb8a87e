"""Optional dependencies."""

import contextlib
import importlib
import io
import warnings

from lit_attn.schema.errors import ConfigError


def require_mmseg(key: str) -> None:
    """Import mmsegmentation; ConfigError named by the configuration's `key` where it is missing."""
    try:
        # It prints that a commercial service's client is not installed, ...
        with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
            # ... and warns of mmcv's compiled operations, of which nothing here makes use.
            warnings.filterwarnings("ignore", message="Fail to import ``MultiScaleDeformable")
            for module in ("mmseg.datasets", "mmseg.models"):
                importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"{key}: needs {error.name}, which is not installed: "
            "pip install 'lit_attn[segmentation]'"
        ) from error
