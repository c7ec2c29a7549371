"""Independent runs side by side, one process a core and one thread a process."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

from joblib import Parallel, cpu_count, delayed, parallel_config

Job = TypeVar("Job")
Result = TypeVar("Result")


def map_processes(function: Callable[[Job], Result], jobs: Iterable[Job], batch: int | str = "auto") -> list[Result]:
    """`function` on every job, in order of the jobs; both must pickle. No number depends on how many cores there are.

    On the small matrices of these models a second BLAS thread costs more than it gives, so cores are spent on runs.
    """
    with parallel_config(backend="loky", n_jobs=cpu_count(), inner_max_num_threads=1):
        return list(Parallel(batch_size=batch)(delayed(function)(job) for job in jobs))
