"""Only tests that are marked `gpu` need a GPU: the folder tests/gpu has simulations of one."""

from types import SimpleNamespace

import pytest
import torch
from helpers.paths import ROOT


@pytest.mark.parametrize("is_marked", [False, True])
def test_a_folder_called_gpu_skips_no_test(request: pytest.FixtureRequest, is_marked: bool) -> None:
    hooks = request.config.pluginmanager.get_plugin(str(ROOT / "tests" / "conftest.py"))
    marks: list[object] = []
    marker = pytest.mark.gpu if is_marked else None
    item = SimpleNamespace(
        keywords={"gpu": True},
        get_closest_marker=lambda name: marker,
        add_marker=marks.append,
    )
    hooks.skip_gpu_tests([item])
    assert len(marks) == int(is_marked and not torch.cuda.is_available())
