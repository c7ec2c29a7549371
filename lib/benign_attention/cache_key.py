"""What an executed notebook depends on besides its own code, as one key.

jupyter-cache recognises a notebook by its code cells alone, so a change in the library would leave
every number on the pages as it was (MyST-NB issue 621).
"""

from __future__ import annotations

import ast
import hashlib
import json
import shutil
from pathlib import Path

import yaml

from benign_attention import paths

N_KEPT = 4


def cache_key(scale: str, root: Path = paths.ROOT) -> str:
    """A name for `scale`, the code in `lib/`, the pins, the claims and the scale files.

    Comments, docstrings and layout do not enter: rewording them re-executes nothing.
    """
    digest = hashlib.sha256(scale.encode())
    for file in _inputs(root):
        digest.update(f"\0{file.relative_to(root).as_posix()}\0{_content(file)}".encode())
    return f"{scale}-{digest.hexdigest()[:16]}"


def library_key(root: Path = paths.ROOT) -> str:
    """A name for the code in `lib/` alone; comments, docstrings and layout do not enter."""
    digest = hashlib.sha256()
    for file in sorted((root / "lib").rglob("*.py")):
        digest.update(f"\0{file.relative_to(root).as_posix()}\0{_content(file)}".encode())
    return digest.hexdigest()[:12]


def prune(caches: Path, keep: Path) -> None:
    """Touch the cache `keep`, and delete all but the `N_KEPT` latest used beside it."""
    keep.touch()
    latest_first = sorted(caches.iterdir(), key=lambda folder: folder.stat().st_mtime, reverse=True)
    for folder in [folder for folder in latest_first if folder != keep][N_KEPT - 1 :]:
        shutil.rmtree(folder)


def code_without_words(source: str) -> str:
    """The syntax tree of Python code, without comments, docstrings and positions."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            if ast.get_docstring(node, clean=False) is not None:
                del node.body[0]
    return ast.dump(tree)


def _inputs(root: Path) -> list[Path]:
    library = [
        file
        for file in (root / "lib").rglob("*")
        if file.is_file() and not any(part == "__pycache__" or part.endswith(".egg-info") for part in file.parts)
    ]
    read_by_chapters = [root / "book" / "claims.yml", *(root / "book" / "scales").rglob("*.yml")]
    return sorted([*library, *read_by_chapters, root / "constraints.txt"])


def _content(file: Path) -> str:
    if file.suffix == ".py":
        return code_without_words(file.read_text(encoding="utf-8"))
    if file.suffix == ".yml":
        return json.dumps(yaml.safe_load(file.read_text(encoding="utf-8")), sort_keys=True, default=str)
    return hashlib.sha256(file.read_bytes()).hexdigest()
