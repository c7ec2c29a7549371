"""Work folders of runs that were killed before they could remove them."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

DAY = 86400.0


def remove(folder: Path, prefix: str) -> None:
    """Remove folders in `folder` whose name starts with `prefix` and in which nothing was written for a day."""
    for left in folder.glob(f"{prefix}*"):
        try:
            last_written = max(path.stat().st_mtime for path in (left, *left.iterdir()))
        except OSError:  # another process removes it
            continue
        if time.time() - last_written > DAY:
            shutil.rmtree(left, ignore_errors=True)
