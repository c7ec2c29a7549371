"""Where torch arrays live, and how independent runs share the processor."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

import torch

from benign_attention.parameters import ParameterError

Job = TypeVar("Job")
Result = TypeVar("Result")
NAMES = ("auto", "cpu", "cuda", "mps")


def available() -> list[str]:
    """Names of the devices of this machine, fastest first."""
    found = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    return [name for name, there in found.items() if there]


def resolve(device: str) -> torch.device:
    """The torch device called `device`; `auto` is the fastest one that is there.

    Raises
    ------
    ParameterError
        For an unknown name, or a device that this machine does not have.
    """
    here = available()
    if device not in NAMES:
        raise ParameterError(f"device must be one of {', '.join(NAMES)}, got {device!r}")
    if device != "auto" and device not in here:
        raise ParameterError(
            f"device must be one of auto, {', '.join(here)} on this machine: {device} is not available here"
        )
    return torch.device(here[0] if device == "auto" else device)


@contextmanager
def one_thread() -> Iterator[None]:
    """Torch on a single thread, for small models.

    Nearly as fast on idle cores, up to tens of times faster where other programs use them too (threads wait for each
    other at every product), and no number depends on how many cores there are.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def map_runs(function: Callable[[Job], Result], jobs: Iterable[Job], device: torch.device) -> list[Result]:
    """`function` on every job, in order of the jobs.

    On the CPU as many jobs run side by side as torch has threads, each on a single one: faster for small
    models than sharing every product, and no number depends on how many cores there are. Other devices take
    the jobs one after the other.
    """
    jobs = list(jobs)
    if device.type != "cpu":
        return [function(job) for job in jobs]
    threads = torch.get_num_threads()
    with one_thread(), ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        return list(pool.map(function, jobs))
