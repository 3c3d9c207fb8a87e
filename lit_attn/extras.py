"""Optional dependencies."""

import contextlib
import importlib
import io
import warnings
from types import ModuleType

from lit_attn.schema.errors import ConfigError


def require(package: str, key: str, extra: str) -> ModuleType:
    """Import and return `package`.

    Raises ConfigError, which begins with the configuration's `key`, if it is not installed.
    """
    try:
        return importlib.import_module(package)
    except ModuleNotFoundError as error:
        text = f"which is not installed: pip install 'lit_attn[{extra}]'"
        raise ConfigError(f"{key}: needs {error.name}, {text}") from error


def require_mmseg(key: str) -> None:
    """Import mmsegmentation; raise ConfigError, which begins with `key`, if it is missing."""
    # mmsegmentation prints that the client of a commercial service is not installed, and warns
    # about mmcv's compiled operations, which are not used.
    with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Fail to import ``MultiScaleDeformable")
        for package in ("mmseg.datasets", "mmseg.models"):
            require(package, key, "segmentation")
