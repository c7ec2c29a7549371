"""Where the project's files lie; the package is installed in place (`pip install -e .`)."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BOOK = ROOT / "book"
SCALES = BOOK / "scales"
RECORDS = BOOK / "records"
CLAIMS = BOOK / "claims.yml"
