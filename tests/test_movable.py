"""Training sets go to a device and keep their numbers."""

import numpy as np
import pytest
import torch

from benign_attention import devices, reduced, selection
from benign_attention.data import TokenSelectionParams
from benign_attention.parameters import ParameterError

SETS = {
    "single head": reduced.draw(4, 50, 2, 0.2, [np.random.default_rng(0)]),
    "token selection": selection.draw(TokenSelectionParams(n_train=4, dim=50), np.random.default_rng(0)),
}


@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("device", devices.available())
def test_every_array_arrives_with_its_numbers(name, device):
    moved = SETS[name].to(torch.device(device))
    assert type(moved) is type(SETS[name])
    for ours, theirs in zip(vars(SETS[name]).values(), vars(moved).values(), strict=False):
        if isinstance(theirs, torch.Tensor):
            assert theirs.device.type == device
            np.testing.assert_allclose(theirs.cpu().numpy(), ours, rtol=1e-6)


@pytest.mark.parametrize("name", SETS)
def test_the_cpu_of_a_chapter_is_numpy(name):
    assert SETS[name].on("cpu") is SETS[name]


@pytest.mark.parametrize("name", SETS)
def test_a_device_that_is_not_there_is_named(name):
    with pytest.raises(ParameterError, match="device must be one of"):
        SETS[name].on("tpu")
