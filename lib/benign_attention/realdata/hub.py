"""Files of the Hugging Face hub: from its cache or downloaded, checked by hash, without long waits."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from urllib.error import HTTPError, URLError
from urllib.request import urlopen

TIMEOUT = 10.0


class CannotBeHad(RuntimeError):  # noqa: N818
    """Why the files are not there, in a few words."""


def snapshot(repository: str, names: Sequence[str]) -> Path:
    """A folder with the files `names` of the repository's main branch.

    A copy in the hub's own cache (HF_HUB_CACHE) is used as it is, unless it was altered or truncated: the cache calls a
    file by the hash of its content. Otherwise the hub is asked once, with a time-out of `TIMEOUT` seconds, and if it
    answers the files are downloaded.

    Raises
    ------
    CannotBeHad
        The hub cannot be reached, or does not hold the files.
    """
    from huggingface_hub import constants, snapshot_download

    found = _in_cache(repository, names)
    if found and all(_is_intact(file) for file in found):
        return found[0].parent
    if constants.HF_HUB_OFFLINE:
        state = (
            "the copy in the hub's cache was altered or truncated" if found else "there is no copy in the hub's cache"
        )
        raise CannotBeHad(f"{state}, and HF_HUB_OFFLINE is set")
    _ask(f"{constants.ENDPOINT}/{repository}/resolve/main/{names[0]}")
    if found:
        warnings.warn(f"{repository} in the hub's cache was altered or truncated: it is fetched again", stacklevel=2)
    try:
        folder = Path(
            snapshot_download(repository, allow_patterns=list(names), etag_timeout=TIMEOUT, force_download=bool(found))
        )
    except Exception as problem:  # httpx, hub and file errors have no common base
        raise CannotBeHad(f"the download failed ({type(problem).__name__})") from problem
    missing = [name for name in names if not (folder / name).exists()]
    if missing:
        raise CannotBeHad(f"the hub does not hold {', '.join(missing)}")
    if not all(_is_intact(folder / name) for name in names):
        raise CannotBeHad("the files that were downloaded are not those that the hub announced")
    return folder


def _in_cache(repository: str, names: Sequence[str]) -> list[Path]:
    """The files, or nothing if one is missing."""
    from huggingface_hub import try_to_load_from_cache

    found = [try_to_load_from_cache(repository, name) for name in names]
    return [Path(file) for file in found] if all(isinstance(file, str) for file in found) else []


def _is_intact(file: Path) -> bool:
    """Whether the content is what the cache's name for it says: SHA-256 for large files, git's SHA-1 for small ones.

    True where the cache is made of plain copies, which carry no hash (systems without symbolic links).
    """
    expected = file.resolve().name
    if expected == file.name:
        return True
    if len(expected) == 64:
        return sha256(file) == expected
    content = file.read_bytes()
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest() == expected


def sha256(file: Path) -> str:
    """SHA-256 of a file; hundreds of megabytes are read once in a process, unless size or time of change are new."""
    state = file.stat()
    return _sha256(file, state.st_size, state.st_mtime_ns)


@lru_cache(maxsize=32)
def _sha256(file: Path, size: int, changed: int) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _ask(address: str) -> None:
    try:
        urlopen(address, timeout=TIMEOUT).close()
    except HTTPError as problem:
        raise CannotBeHad(f"the hub answers {problem.code} {problem.reason}") from None
    except (URLError, OSError, ValueError) as problem:
        raise CannotBeHad(f"the hub cannot be reached ({getattr(problem, 'reason', problem)})") from None
