"""One folder for downloads, trained weights and cached features, whose content is checked each time it is used."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path

import platformdirs

from benign_attention import leftovers
from benign_attention.parameters import ParameterError

VARIABLE = "BENIGN_ATTENTION_CACHE"
MANIFEST = "manifest.json"
MAKING = ".making-"


def folder() -> Path:
    """The cache folder: the environment variable BENIGN_ATTENTION_CACHE, else the user's cache folder."""
    chosen = os.environ.get(VARIABLE)
    return Path(chosen) if chosen else Path(platformdirs.user_cache_dir("benign-attention"))


def kept(name: str, make: Callable[[Path], None]) -> Path:
    """The entry `name` of the cache: a folder of files that `make(empty_folder)` writes if it is not there yet.

    An entry appears complete or not at all, together with the SHA-256 of its files. One that has been altered since,
    or truncated, is made again. Two processes may make the same entry at once; one of the copies stays. What a killed
    process left half-made is removed a day later.

    Raises
    ------
    ParameterError
        If the cache folder cannot be written; the line names the variable that chooses another.
    """
    entry = folder() / name
    try:
        if os.path.lexists(entry):
            if _is_intact(entry):
                return entry
            warnings.warn(f"{name} in the cache was altered or truncated: it is made again", stacklevel=2)
            shutil.rmtree(entry) if entry.is_dir() and not entry.is_symlink() else entry.unlink()
        entry.parent.mkdir(parents=True, exist_ok=True)
        leftovers.remove(entry.parent, MAKING)
        making = Path(tempfile.mkdtemp(prefix=MAKING, dir=entry.parent))
    except OSError as error:
        raise ParameterError(
            f"{VARIABLE} must be a folder that can be written, got {str(folder())!r} ({error.strerror or error})"
        ) from None
    try:
        make(making)
        files = {file.name: _sha256(file) for file in sorted(making.iterdir())}
        (making / MANIFEST).write_text(json.dumps(files), encoding="utf-8")
        try:
            os.replace(making, entry)
        except OSError:  # another process was faster
            if not _is_intact(entry):
                raise
    finally:
        shutil.rmtree(making, ignore_errors=True)
    return entry


def _is_intact(entry: Path) -> bool:
    try:
        files = json.loads((entry / MANIFEST).read_text(encoding="utf-8"))
        present = {file.name for file in entry.iterdir() if not file.name.startswith(".")}
        return (
            bool(files)
            and present == {MANIFEST, *files}
            and all(_sha256(entry / name) == files[name] for name in files)
        )
    except (OSError, ValueError, TypeError):
        return False


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
