"""Single layers equal those of released code, by value and gradient."""

import numpy as np
import pytest

from released import mechanisms
from released.mechanism_sources import SOURCES


@pytest.mark.parametrize("name", mechanisms.CASES)
def test_a_layer_equals_the_released_layer(name: str) -> None:
    with np.load(mechanisms.RECORDS) as records:
        stored = {key: records[key] for key in records if key.startswith(f"{name}/")}
    case = mechanisms.CASES[name]
    source = SOURCES[case.source]
    origin = [source.repository, source.commit, source.licence, source.path]
    assert stored.pop(f"{name}/origin").tolist() == origin
    ours = {f"{name}/{key}": array for key, array in mechanisms.replay(case).items()}
    assert ours.keys() == stored.keys()
    for key, theirs in stored.items():
        scale = np.abs(theirs).max()
        assert scale > 0, key
        allowed = case.tolerance * scale
        np.testing.assert_allclose(ours[key], theirs, rtol=0, atol=allowed, err_msg=key)
