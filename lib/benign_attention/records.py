"""Metrics with intervals, the record a chapter leaves, and its provenance."""

from __future__ import annotations

import errno
import json
import math
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path

import numpy as np
import yaml
from scipy import stats

from benign_attention import paths
from benign_attention.cache_key import library_key
from benign_attention.parameters import ChapterParams, ParameterError

MIME = "application/vnd.benign-attention.record+json"
SCALE_NAMES = ("smoke", "reader", "paper")
_STARTED = time.perf_counter()


@dataclass(frozen=True)
class Metric:
    """One measured number. `low`/`high` are what `kind` says; None means undefined."""

    value: float | None
    low: float | None
    high: float | None
    n_seeds: int
    per_seed: list[float | None]
    kind: str

    def __str__(self) -> str:
        if self.value is None:
            return "undefined"
        if self.low is None or self.high is None:
            return f"{self.value:.3g}"
        return f"{self.value:.3g} [{self.low:.3g}, {self.high:.3g}]"


def seed_metric(per_seed, bounds: tuple[float, float] = (-math.inf, math.inf)) -> Metric:
    """Mean over seeds with a 95 % Student t interval, clipped to `bounds`.

    Values that are not finite are undefined for their seed and are left out; with fewer than two
    defined values there is no interval. Where all seeds agree the interval has no width: it then says nothing about how
    often another seed would differ.
    """
    values = [float(x) if np.isfinite(x) else None for x in np.asarray(per_seed, float).ravel()]
    defined = np.array([x for x in values if x is not None])
    if defined.size == 0:
        return Metric(None, None, None, len(values), values, "undefined")
    mean = float(defined.mean())
    if defined.size == 1:
        return Metric(mean, None, None, len(values), values, "one seed: no interval")
    half = stats.t.ppf(0.975, defined.size - 1) * defined.std(ddof=1) / math.sqrt(defined.size)
    low, high = max(mean - half, bounds[0]), min(mean + half, bounds[1])
    return Metric(mean, float(low), float(high), len(values), values, "95 % t interval over seeds")


def fraction_metric(per_seed) -> Metric:
    """`seed_metric` for accuracies, probabilities and attention masses, which lie in [0, 1]."""
    return seed_metric(per_seed, (0.0, 1.0))


@dataclass(frozen=True)
class Record:
    """What one run of one chapter leaves behind."""

    chapter: str
    scale: str
    parameters: dict
    metrics: dict[str, Metric]
    provenance: dict = field(default_factory=dict)

    def as_json(self) -> dict:
        return asdict(self)


def make_record(chapter: str, params: ChapterParams, metrics: dict[str, Metric]) -> Record:
    """The record of a finished run; also written to `params.record_path` when that is set."""
    parameters = {k: v for k, v in params.model_dump().items() if k != "record_path"}
    record = Record(chapter, scale_of(chapter, params), parameters, metrics, provenance())
    if params.record_path:
        write_json(Path(params.record_path), record.as_json(), parameter="record_path")
    return record


def read_record(path: Path) -> Record:
    data = json.loads(Path(path).read_text(encoding="utf-8"), parse_constant=_not_a_number)
    return Record(**{**data, "metrics": {name: Metric(**m) for name, m in data["metrics"].items()}})


def _not_a_number(text: str) -> float:
    raise ValueError(f"{text} is no number")


def scale_values(chapter: str, scale: str) -> dict:
    """The parameters that `scale` changes in `chapter`; the reader scale is the chapter's defaults."""
    if scale not in SCALE_NAMES:
        raise ParameterError(f"scale must be one of {', '.join(SCALE_NAMES)}, got {scale!r}")
    file = paths.SCALES / scale / f"{chapter}.yml"
    if scale == "reader":
        return {}
    if not file.exists():
        raise ParameterError(
            f"scale must be one that {chapter} has a file for, got {scale!r} (no {file.relative_to(paths.ROOT)})"
        )
    return yaml.safe_load(file.read_text(encoding="utf-8")) or {}


def scale_of(chapter: str, params: ChapterParams) -> str:
    """The name of the scale whose parameters these are exactly (device and file apart), else `custom`."""
    for scale in SCALE_NAMES:
        there = type(params)(**scale_values(chapter, scale))
        if params.replace(device=there.device, record_path=there.record_path) == there:
            return scale
    return "custom"


def provenance() -> dict:
    """Where and when the numbers were made: commit, hash of the library's code, versions, machine, seconds, memory."""
    packages = ("benign-attention", "numpy", "scipy", "torch")
    return {
        "commit": _commit(),
        "library": library_key(),
        "made": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "seconds": round(time.perf_counter() - _STARTED, 1),
        "peak_memory_mb": round(
            resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**20 if sys.platform == "darwin" else 2**10)
        ),
        "python": platform.python_version(),
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores",
        "versions": {name: version(name) for name in packages},
    }


def _commit() -> str:
    """The commit that is checked out, short; `unknown` outside a git checkout."""
    asked = ["git", "-C", str(paths.ROOT), "rev-parse", "--short=12", "HEAD"]
    try:
        return subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def write_json(path: Path, data: dict, parameter: str = "path") -> None:
    """Write whole or not at all: to a temporary file beside `path`, then rename.

    Raises
    ------
    ParameterError
        The file cannot be written; the line names `parameter`.
    """
    text = json.dumps(data, indent=1, allow_nan=False) + "\n"
    temporary = _draft_beside(path, parameter)
    try:
        temporary.write_text(text, encoding="utf-8")
        temporary.chmod(0o644)
        os.replace(temporary, path)
    except OSError as error:
        raise _not_writable(path, parameter, error) from None
    finally:
        temporary.unlink(missing_ok=True)


def require_writable(path: Path, parameter: str = "path") -> None:
    """Refuse a path that `write_json` could not write, before any work is done for it."""
    try:
        is_folder = path.is_dir()
    except (OSError, ValueError) as error:
        raise _not_writable(path, parameter, error) from None
    if is_folder:
        raise _not_writable(path, parameter, IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR)))
    _draft_beside(path, parameter).unlink()


def _draft_beside(path: Path, parameter: str) -> Path:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    except (OSError, ValueError) as error:
        raise _not_writable(path, parameter, error) from None
    os.close(descriptor)
    return Path(name)


def _not_writable(path: Path, parameter: str, error: OSError | ValueError) -> ParameterError:
    reason = getattr(error, "strerror", None) or error
    return ParameterError(f"{parameter} must be a file that can be written, got {str(path)!r} ({reason})")
