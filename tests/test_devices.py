import pytest
import torch

from benign_attention import devices
from benign_attention.parameters import ParameterError


def test_auto_takes_the_fastest_device_there_is():
    assert devices.resolve("auto").type == devices.available()[0]
    assert devices.resolve("cpu") == torch.device("cpu")


def test_an_absent_or_unknown_device_is_refused_in_one_line(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ParameterError, match=r"^device must be one of auto, .*cpu.*: cuda is not available here$"):
        devices.resolve("cuda")
    with pytest.raises(ParameterError, match=r"^device must be one of auto, cpu, cuda, mps, got 'tpu'$"):
        devices.resolve("tpu")


def test_runs_keep_their_order_run_on_one_thread_each_and_leave_the_setting_as_it_was():
    before = torch.get_num_threads()
    found = devices.map_runs(lambda job: (job, torch.get_num_threads()), range(7), torch.device("cpu"))
    assert found == [(job, 1) for job in range(7)]
    assert torch.get_num_threads() == before


def test_an_error_in_a_run_comes_through():
    with pytest.raises(ZeroDivisionError):
        devices.map_runs(lambda job: 1 // job, [1, 0], torch.device("cpu"))
