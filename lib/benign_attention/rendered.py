"""What a rendered book must contain: every page of the table of contents, a verdict box and a record in every chapter.

`python -m benign_attention.rendered _build/html` exits 1 and says what is missing: jupyter-book can
exit 0 on a build that left pages out.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import yaml

from benign_attention import paths


def documents(toc: Path = paths.ROOT / "_toc.yml") -> list[str]:
    """The documents of the table of contents in reading order, without suffix, relative to it."""
    entry = yaml.safe_load(toc.read_text(encoding="utf-8"))
    chapters = [*entry.get("chapters", []), *(c for part in entry.get("parts", []) for c in part["chapters"])]
    return [entry["root"], *(chapter["file"] for chapter in chapters)]


def missing(html: Path, root: Path = paths.ROOT) -> list[str]:
    """One line for each page, verdict box or record that should be in the folder `html` and is not."""
    found = []
    for document in documents(root / "_toc.yml"):
        page = html / f"{document}.html"
        if not page.is_file():
            found.append(f"{page}: no such page")
        elif (root / f"{document}.ipynb").is_file():
            text = page.read_text(encoding="utf-8")
            for part in ("verdict-box", "record"):
                if not re.search(rf'<div class="{part}">', text):
                    found.append(f"{page}: no element of class {part}")
    return found


def main() -> int:
    problems = missing(Path(sys.argv[1]))
    print("\n".join(problems), end="\n" if problems else "", file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
