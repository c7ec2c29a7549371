"""Runs side by side: in order, the same as one after the other, with their errors."""

import os
import time

import numpy as np
import pytest
from threadpoolctl import threadpool_info

from benign_attention import selection
from benign_attention.data import TokenSelectionParams
from benign_attention.parallel import map_processes
from benign_attention.parameters import ParameterError


def train(seed):
    """A short run whose every bit is reported."""
    params = TokenSelectionParams(n_train=6, n_tokens=4, dim=500, signal_norm=10.0)
    training = selection.draw(params, np.random.default_rng(seed))
    (state,) = selection.gradient_descent(training, 0.05, [50])
    return state.query, selection.outputs(training, state).f


def later_jobs_are_faster(k):
    time.sleep(0.02 * (6 - k))
    return k, os.getpid()


def refuse(k):
    if k == 3:
        raise ParameterError(f"signal_norm must be in [1e-15, 1e+15], got {-k}")
    return k


def fail(k):
    raise ZeroDivisionError(f"job {k}")


def threads(_):
    return [pool["num_threads"] for pool in threadpool_info()]


def same(job):
    return job


def test_results_come_in_the_order_of_the_jobs():
    results = map_processes(later_jobs_are_faster, range(6), batch=1)
    assert [k for k, _ in results] == list(range(6))
    assert os.getpid() not in {pid for _, pid in results} or os.cpu_count() == 1


def test_results_are_those_of_a_serial_loop():
    for (query, f), (reference, reference_f) in zip(map_processes(train, range(8)), map(train, range(8)), strict=True):
        np.testing.assert_allclose(query, reference, rtol=1e-12, atol=1e-15)
        np.testing.assert_allclose(f, reference_f, rtol=1e-12)


def test_how_jobs_are_batched_changes_no_bit():
    runs = [map_processes(train, range(8), batch=batch) for batch in ("auto", 1, 3)]
    for other in runs[1:]:
        for (query, f), (reference, reference_f) in zip(other, runs[0], strict=True):
            np.testing.assert_array_equal(query, reference)
            np.testing.assert_array_equal(f, reference_f)


@pytest.mark.parametrize("jobs", [[], (), iter([])], ids=["list", "tuple", "iterator"])
def test_no_jobs_give_no_results(jobs):
    assert map_processes(same, jobs) == []


def test_jobs_may_come_from_a_generator_and_be_anything_that_pickles():
    jobs = [{"dim": 10}, (1, "a"), None, np.arange(3.0)]
    results = map_processes(same, (job for job in jobs))
    assert results[:3] == jobs[:3]
    np.testing.assert_array_equal(results[3], jobs[3])


def test_an_error_in_a_job_comes_through_with_its_type_and_message():
    with pytest.raises(ZeroDivisionError, match="job 0"):
        map_processes(fail, [0])
    with pytest.raises(ParameterError, match=r"^signal_norm must be in "):
        map_processes(refuse, range(6))


def test_work_goes_on_after_an_error():
    with pytest.raises(ZeroDivisionError):
        map_processes(fail, range(4))
    assert map_processes(same, range(4)) == [0, 1, 2, 3]


def test_every_process_computes_on_one_thread():
    for counts in map_processes(threads, range(3)):
        assert counts
        assert set(counts) == {1}
