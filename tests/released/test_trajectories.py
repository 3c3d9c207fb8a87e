"""Recorded training steps of released code, and the same steps of this project."""

from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from released import nanogpt, recording, replaying, spt_lsa_vit, vit_small

SETUPS = {"nanogpt": nanogpt, "spt_lsa_vit": spt_lsa_vit, "vit_small": vit_small}


def runs() -> list[tuple[str, int]]:
    """Return the name and the seed of every recorded run."""
    found = []
    for name in SETUPS:
        with np.load(recording.FOLDER / f"{name}.npz") as record:
            found += [(name, int(k.split("/")[0])) for k in record if k.endswith("/loss")]
    return found


@pytest.mark.parametrize(("name", "seed"), runs())
def test_training_steps_agree_with_released_code(name: str, seed: int, tmp_path: Path) -> None:
    setup: ModuleType = SETUPS[name]
    with np.load(recording.FOLDER / f"{name}.npz") as record:
        theirs = {k.split("/")[1]: v for k, v in record.items() if k.startswith(f"{seed}/")}
    ours = replaying.run(setup.replay(seed, tmp_path), tmp_path, seed)
    assert ours["names"].tolist() == theirs["names"].tolist()
    assert ours["shapes"].tolist() == theirs["shapes"].tolist()
    for key in ("lr", "beta1", "beta2", "decay"):
        np.testing.assert_allclose(ours[key], theirs[key], rtol=1e-12, atol=1e-18, err_msg=key)
    for key, tolerance in setup.TOLERANCES.items():
        np.testing.assert_allclose(
            ours[key], theirs[key], rtol=tolerance, atol=tolerance, err_msg=key
        )
