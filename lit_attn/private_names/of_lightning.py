"""Use of Lightning's private names; NAMES in lit_attn.private_names explains each."""

import traceback

from lightning.pytorch.trainer.connectors.checkpoint_connector import _CheckpointConnector

RESTORING = {
    _CheckpointConnector._restore_modules_and_callbacks.__code__,
    _CheckpointConnector.restore_training_state.__code__,
}
"""Code that restores a checkpoint; other methods of its class write one, or wait for all ranks."""


def is_raised_by_restoring(error: BaseException) -> bool:
    """Return True if Lightning was restoring a checkpoint when `error` was raised."""
    frames = traceback.walk_tb(error.__traceback__)
    return any(frame.f_code in RESTORING for frame, _ in frames)
