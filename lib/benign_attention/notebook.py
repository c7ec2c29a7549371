"""What a chapter shows around its figures: verdict box, computed sentences, record."""

from __future__ import annotations

from html import escape

from IPython.display import DisplayHandle, display

from benign_attention.claims import Verdict, judge, load_claims
from benign_attention.ledger_page import AUTHORS
from benign_attention.parameters import ChapterParams
from benign_attention.records import MIME, Metric, Record, make_record


def say(markdown: str) -> None:
    """Show a computed sentence as prose."""
    display({"text/markdown": markdown, "text/plain": markdown}, raw=True)


def tex(number: float) -> str:
    """A number as TeX source: 1e8 as 10^{8}, 2e7 as 2\\cdot10^{7}, and without powers from 1e-3 to 1e5."""
    if number == 0 or 1e-3 <= abs(number) <= 1e5:
        return f"{number:g}"
    mantissa, exponent = f"{number:.6e}".split("e")
    mantissa = f"{float(mantissa):g}"
    power = f"10^{{{int(exponent)}}}"
    return power if mantissa == "1" else f"{mantissa}\\cdot{power}"


class VerdictBox:
    """The box at the top of a chapter; shown empty at once, filled by the last cell."""

    def __init__(self, chapter: str):
        self.chapter = chapter
        self._handle = DisplayHandle()
        self._handle.display(self._bundle([judge(c, {}) for c in load_claims(chapter)]), raw=True)

    def conclude(self, params: ChapterParams, metrics: dict[str, Metric]) -> Record:
        """Judge the chapter's claims, fill the box, show the record and write it where asked."""
        record = make_record(self.chapter, params, metrics)
        verdicts = [judge(claim, metrics, record.scale) for claim in load_claims(self.chapter)]
        self._handle.update(self._bundle(verdicts), raw=True)
        display({MIME: record.as_json(), "text/html": _provenance_html(record), "text/plain": repr(record)}, raw=True)
        return record

    @staticmethod
    def _bundle(verdicts: list[Verdict]) -> dict:
        def details(verdict: Verdict) -> str:
            lines = "".join(f'<div class="verdict-detail">{escape(line)}</div>' for line in verdict.details)
            claim = verdict.claim
            rule = (
                f"Supported if the whole interval is {claim.supported}, refuted if it is {claim.refuted}. {claim.why}"
            )
            return f'{lines}<details class="verdict-why"><summary>why</summary>{escape(rule)}</details>'

        rows = "".join(
            f'<tr class="verdict-{v.outcome.replace(" ", "-")}"><td>{escape(v.claim.id)}</td>'
            f"<td>{escape(v.claim.says)}"
            f'<div class="verdict-source">{escape(AUTHORS[v.claim.paper])}: {escape(v.claim.place)}</div>'
            f"{details(v)}</td>"
            f'<td class="verdict-outcome">{v.outcome}</td></tr>'
            for v in verdicts
        )
        html = (
            '<div class="verdict-box"><table><thead><tr><th>Claim</th><th>Statement, and the number that decides</th>'
            f"<th>Verdict</th></tr></thead><tbody>{rows}</tbody></table></div>"
        )
        return {"text/html": html, "text/plain": "\n".join(f"{v.claim.id}: {v.outcome}" for v in verdicts)}


def _provenance_html(record: Record) -> str:
    p = record.provenance
    parameters = ", ".join(f"{k}={v}" for k, v in record.parameters.items())
    versions = ", ".join(f"{k} {v}" for k, v in p["versions"].items())
    rows = "".join(
        f"<tr><td><code>{escape(name)}</code></td><td>{escape(str(m))}</td><td>{m.n_seeds}</td><td>{escape(m.kind)}</td></tr>"
        for name, m in record.metrics.items()
    )
    return (
        f'<div class="record"><p>Scale <b>{record.scale}</b>; {escape(parameters)}. Made {p["made"]} '
        f"in {p['seconds']} s, {p['peak_memory_mb']} MB, on {escape(p['machine'])} with Python {p['python']}, "
        f"{escape(versions)}; commit {p['commit']}, library {p['library']}.</p>"
        "<details><summary>All metrics</summary><table><thead><tr><th>Metric</th><th>Value [low, high]</th>"
        f"<th>Seeds</th><th>Interval</th></tr></thead><tbody>{rows}</tbody></table></details></div>"
    )
