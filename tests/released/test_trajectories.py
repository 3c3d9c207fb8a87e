"""Recorded training steps of released code, and the same steps of this project."""

from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from released import (
    lra,
    mgk_language_model,
    modded_nanogpt,
    nanogpt,
    recording,
    replaying,
    spt_lsa_vit,
    vit_small,
)

SETUPS: dict[str, ModuleType] = {
    "lra": lra,
    "mgk_language_model": mgk_language_model,
    "modded_nanogpt": modded_nanogpt,
    "nanogpt": nanogpt,
    "spt_lsa_vit": spt_lsa_vit,
    "vit_small": vit_small,
}


def runs() -> list[tuple[str, str]]:
    """Return the set-up and the name of every recorded run; a name ends with the run's seed."""
    recorded = []
    for name in SETUPS:
        with np.load(recording.FOLDER / f"{name}.npz") as record:
            recorded += [(name, key.split("/")[0]) for key in record if key.endswith("/loss")]
    return recorded


@pytest.mark.parametrize(("name", "run"), runs())
def test_training_steps_agree_with_released_code(name: str, run: str, tmp_path: Path) -> None:
    setup = SETUPS[name]
    with np.load(recording.FOLDER / f"{name}.npz") as record:
        theirs = {k.split("/")[1]: v for k, v in record.items() if k.startswith(f"{run}/")}
    ours = replaying.run(setup.replay(run, tmp_path), tmp_path)
    assert ours["names"].tolist() == theirs["names"].tolist()
    assert ours["shapes"].tolist() == theirs["shapes"].tolist()
    for key in ("lr", "beta1", "beta2", "decay"):
        np.testing.assert_allclose(ours[key], theirs[key], rtol=1e-12, atol=1e-18, err_msg=key)
    for key, tolerance in setup.TOLERANCES.items():
        np.testing.assert_allclose(
            ours[key], theirs[key], rtol=tolerance, atol=tolerance, err_msg=key
        )
