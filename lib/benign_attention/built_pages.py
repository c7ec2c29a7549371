"""Pages made from the records of all chapters: ledger, findings, status of the book."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from html import escape
from pathlib import Path

import nbformat
import yaml

from benign_attention import chapters, ledger_page, paths
from benign_attention.claims import load_claims
from benign_attention.experiments import CHAPTERS
from benign_attention.ledger import from_records
from benign_attention.records import Metric, Record

NUMBER = re.compile(r"\{(\w+):([^{}\s]+)\}")  # {chapter:metric}
EMPHASIS = re.compile(r"\*([^*]+)\*")
KINDS = {
    "disagreement": "Where theory and measurement disagree",
    "fault": "Where a figure, a statement or code of a paper has a fault",
    "new": "What nobody had measured",
}


@dataclass(frozen=True)
class Build:
    """One build of the book. executed: folder of the executed notebooks; images: where pages find their pictures;
    link: from a label to the address of the figure or section that has it."""

    executed: Path
    images: Path
    link: Callable[[str], str]

    def notebook(self, chapter: str) -> dict | None:
        file = self.executed / "book" / f"{chapter}.ipynb"
        return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else None

    def records(self) -> dict[str, Record | None]:
        return {chapter: record_in(self.notebook(chapter)) for chapter in CHAPTERS}


def record_in(notebook: dict | None) -> Record | None:
    """The record that an executed notebook shows, if there is one."""
    data = chapters.record_in(nbformat.from_dict(notebook)) if notebook else None
    return Record(**{**data, "metrics": {name: Metric(**m) for name, m in data["metrics"].items()}}) if data else None


def figure_in(notebook: dict | None, name: str) -> tuple[bytes, str] | None:
    """The picture that the cell with the figure `name` shows, and its alternative text."""
    for cell in notebook["cells"] if notebook else []:
        shown = cell["metadata"].get("mystnb", {})
        if shown.get("figure", {}).get("name") == name:
            for output in cell.get("outputs", []):
                if png := output.get("data", {}).get("image/png"):
                    return base64.b64decode(png), shown.get("image", {}).get("alt", "")
    return None


def ledger(build: Build) -> str:
    return ledger_page.page(from_records(load_claims(), build.records()), build.link)


def load_findings(path: Path = paths.BOOK / "findings.yml") -> list[dict]:
    """The findings: dictionaries of id, kind, title, text, chapter, figure and claims."""
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def findings(build: Build) -> str:
    """Two sentences and a figure each; every number in them is taken from a record."""
    records, found = build.records(), load_findings()
    sections = []
    for kind, heading in KINDS.items():
        items = "".join(_finding(one, records, build) for one in found if one["kind"] == kind)
        sections.append(f'<section id="findings-{kind}"><h2>{heading}</h2>{items}</section>')
    other = sorted({record.scale for record in records.values() if record} - {"reader"})
    note = (
        f"<p><strong>These numbers were made at {' and '.join(other)} scale. The sentences are about the reader scale."
        "</strong></p>"
        if other
        else ""
    )
    return f'<div class="findings">{note}{"".join(sections)}</div>'


def _finding(one: dict, records: dict[str, Record | None], build: Build) -> str:
    picture = figure_in(build.notebook(one["chapter"]), one["figure"])
    address = escape(build.link(one["figure"]))
    image = ""
    if picture:
        png, alternative = picture
        build.images.mkdir(parents=True, exist_ok=True)
        (build.images / f"finding-{one['id']}.png").write_bytes(png)
        source = f"../_images/finding-{one['id']}.png"
        image = f'<a href="{address}"><img src="{source}" alt="{escape(alternative)}" loading="lazy"/></a>'
    claims = ", ".join(one.get("claims", []))
    return (
        f'<article class="finding" id="finding-{one["id"]}"><h3>{escape(one["title"])}</h3>'
        f"<p>{sentence(one['text'], records)}</p>{image}"
        f'<p class="where"><a href="{address}">chapter {one["chapter"]}</a>{f"; claims {claims}" if claims else ""}</p>'
        "</article>"
    )


def sentence(text: str, records: dict[str, Record | None]) -> str:
    """Text as HTML, with `{chapter:metric}` replaced by that number and its interval, *words* emphasised."""

    def number(match: re.Match) -> str:
        record = records.get(match[1])
        metric = record.metrics.get(match[2]) if record else None
        return f"<b>{escape(str(metric))}</b>" if metric else "<i>(not measured at this scale)</i>"

    return EMPHASIS.sub(r"<em>\1</em>", NUMBER.sub(number, escape(text)))


def status(build: Build) -> str:
    """One row a chapter: scale, seeds, when, how long, how much memory, and with what it was made."""
    head = ("Chapter", "Scale", "Seeds", "Device", "Seconds", "Memory (MB)", "Made (UTC)", "Commit", "Library")
    rows = "".join(_status_row(chapter, record) for chapter, record in build.records().items())
    made = [record for record in build.records().values() if record]
    versions = sorted({f"{name} {v}" for record in made for name, v in record.provenance["versions"].items()})
    machines = sorted({f"{r.provenance['machine']}, Python {r.provenance['python']}" for r in made})
    return (
        f'<div class="record status"><table><thead><tr>{"".join(f"<th>{h}</th>" for h in head)}</tr></thead>'
        f"<tbody>{rows}</tbody></table><p>Versions: {escape(', '.join(versions))}. Machine: "
        f"{escape('; '.join(machines))}.</p></div>"
    )


def _status_row(chapter: str, record: Record | None) -> str:
    name = f'<th><a href="{chapter}.html">{chapter}</a></th>'
    if record is None:
        return f'<tr>{name}<td colspan="8">no record</td></tr>'
    p = record.provenance
    cells = (
        record.scale,
        record.parameters["n_seeds"],
        record.parameters["device"],
        p["seconds"],
        p["peak_memory_mb"],
        p["made"].replace("T", " ").rstrip("Z"),
        p.get("commit", "unknown"),
        p.get("library", "unknown"),
    )
    return f"<tr>{name}{''.join(f'<td>{escape(str(cell))}</td>' for cell in cells)}</tr>"
