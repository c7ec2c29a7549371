"""The ledger as HTML: one card a claim, readable on a phone, filtered without a server."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from html import escape

from benign_attention.claims import Condition, Outcome, Region
from benign_attention.ledger import Entry
from benign_attention.records import Metric

AUTHORS = {"magen2025": "Magen et al. 2025", "sakamoto2025": "Sakamoto and Sato 2025", "this book": "This book"}
OUTCOMES: tuple[Outcome, ...] = ("supported", "supported in part", "refuted", "inconclusive", "not run")
SPARK_WIDTH, SPARK_HEIGHT = 150, 22
MARGIN = 0.15  # of the drawn range, on either side

Link = Callable[[str], str]


def page(ledger: list[Entry], link: Link, scale: str = "reader") -> str:
    """The whole ledger. link: from the name of a figure to the address of the place that shows it."""
    cards = "\n".join(_card(entry, link, scale) for entry in ledger)
    return f'<div class="ledger">\n{_counts(ledger)}\n{_filters(ledger)}\n{cards}\n</div>\n{_SCRIPT}'


def spark(condition: Condition, metric: Metric | None) -> str:
    """A drawing of one condition: where it is supported (shaded) and refuted (hatched), the interval, every seed."""
    if metric is None or metric.value is None:
        return ""
    seeds = [x for x in metric.per_seed if x is not None]
    ends = [x for x in (metric.low, metric.high) if x is not None]
    edges = [x for r in (condition.supported, condition.refuted) for x in (r.above, r.below) if math.isfinite(x)]
    low, high = min([metric.value, *seeds, *ends, *edges]), max([metric.value, *seeds, *ends, *edges])
    pad = MARGIN * ((high - low) or abs(high) or 1.0)
    low, high = low - pad, high + pad

    def x(value: float) -> float:
        return round((min(max(value, low), high) - low) / (high - low) * SPARK_WIDTH, 1)

    def band(region: Region, kind: str) -> str:
        left, right = x(region.above), x(region.below)
        return f'<rect class="{kind}" x="{left}" y="2" width="{round(right - left, 1)}" height="{SPARK_HEIGHT - 4}"/>'

    middle = SPARK_HEIGHT / 2
    dots = "".join(f'<circle class="seed" cx="{x(value)}" cy="{middle}" r="1.6"/>' for value in seeds)
    whisker = f'<path class="interval" d="M{x(ends[0])} {middle}H{x(ends[1])}"/>' if len(ends) == 2 else ""
    return (
        f'<svg class="spark" viewBox="0 0 {SPARK_WIDTH} {SPARK_HEIGHT}" role="img" '
        f'aria-label="{escape(str(metric))}; supported {escape(str(condition.supported))}, '
        f'refuted {escape(str(condition.refuted))}">'
        f"{band(condition.refuted, 'no')}{band(condition.supported, 'yes')}{whisker}{dots}"
        f'<path class="value" d="M{x(metric.value)} 4V{SPARK_HEIGHT - 4}"/></svg>'
    )


def _card(entry: Entry, link: Link, scale: str) -> str:
    claim, record = entry.claim, entry.record
    places = [_place(c, record.metrics.get(c.metric) if record else None) for c in (claim, *claim.also)]
    where = f"{record.scale} scale, record of {record.provenance['made'][:10]}" if record else "no record"
    committed = claim.expected.get(scale)
    changed = (
        ""
        if record is None or record.scale != scale or committed == entry.verdict.outcome
        else (f' <strong class="changed">committed: {escape(str(committed))}</strong>')
    )
    return (
        f'<article class="claim verdict-{_slug(entry.verdict.outcome)}" id="claim-{claim.id}" '
        f'data-paper="{escape(claim.paper)}" data-verdict="{entry.verdict.outcome}">'
        f'<header><a class="claim-id" href="{escape(link(claim.figure))}">{claim.id}</a>'
        f'<span class="verdict-outcome">{entry.verdict.outcome}</span>{_firmness(entry)}{changed}</header>'
        f'<p class="says">{escape(claim.says)}</p>'
        f'<p class="source">{escape(AUTHORS[claim.paper])}: {escape(claim.place)}</p>'
        f"{_published(entry)}{''.join(places)}{_command(entry)}"
        f'<p class="where">{escape(where)}; <a href="{escape(link(claim.figure))}">chapter {claim.chapter}</a></p>'
        f'<details class="why"><summary>why these regions{_and_controls(entry)}</summary>{escape(claim.why)}'
        f"{_controls(entry)}{_tested(entry)}</details></article>"
    )


def _place(condition: Condition, metric: Metric | None) -> str:
    seeds = "" if metric is None else f'<span class="seeds">{metric.n_seeds} seeds, {escape(metric.kind)}</span>'
    where = f'<span class="place">{escape(condition.where)}</span>' if condition.where else ""
    number = "not measured" if metric is None else str(metric)
    return (
        f'<div class="number">{where}<code>{escape(condition.metric)}</code><b>{escape(number)}</b>'
        f'{spark(condition, metric)}<span class="regions">supported {escape(str(condition.supported))}; refuted '
        f"{escape(str(condition.refuted))}</span>{seeds}</div>"
    )


def _firmness(entry: Entry) -> str:
    if entry.firm is None:
        return ""
    text = "firm" if entry.firm else "alone"
    return f'<span class="firmness" title="p = {entry.p_value:.2g}">{text}</span>'


def _and_controls(entry: Entry) -> str:
    return ", and controls" if entry.claim.controls or entry.claim.no_control else ""


def _controls(entry: Entry) -> str:
    changes = ["; ".join(f"{k} = {v}" for k, v in control.change.items()) for control in entry.claim.controls]
    failing = f"<p>Must fail at: {escape(' | '.join(changes))}.</p>" if changes else ""
    return failing + (f"<p>No control: {escape(entry.claim.no_control)}</p>" if entry.claim.no_control else "")


def _published(entry: Entry) -> str:
    return f"<p>Published: {escape(entry.claim.published)}</p>" if entry.claim.published else ""


def _tested(entry: Entry) -> str:
    if entry.record is None:
        return ""
    values = ", ".join(f"{name} = {value}" for name, value in entry.record.parameters.items())
    return f"<p>Tested at: {escape(values)}.</p>"


def _command(entry: Entry) -> str:
    show = entry.verdict.outcome == "not run" and entry.claim.command
    return f"<p>To run it: <code>{escape(entry.claim.command)}</code></p>" if show else ""


def _slug(outcome: str) -> str:
    return outcome.replace(" ", "-")


def _counts(ledger: list[Entry]) -> str:
    counts = Counter((entry.claim.paper, entry.verdict.outcome) for entry in ledger)
    head = "".join(f"<th>{outcome}</th>" for outcome in OUTCOMES)

    def row(paper: str, name: str) -> str:
        cells = "".join(f"<td>{counts[paper, outcome] or '–'}</td>" for outcome in OUTCOMES)
        return f"<tr><th>{escape(name)}</th>{cells}</tr>"

    rows = "".join(row(*author) for author in AUTHORS.items())
    return f'<table class="counts"><thead><tr><td></td>{head}</tr></thead><tbody>{rows}</tbody></table>'


def _filters(ledger: list[Entry]) -> str:
    papers = "".join(f'<option value="{escape(paper)}">{escape(name)}</option>' for paper, name in AUTHORS.items())
    outcomes = "".join(f'<option value="{outcome}">{outcome}</option>' for outcome in OUTCOMES)
    return (
        '<form class="filters"><label>Paper <select name="paper"><option value="">all</option>'
        f'{papers}</select></label> <label>Verdict <select name="verdict"><option value="">all</option>{outcomes}'
        f"</select></label> <output>{len(ledger)} claims</output></form>"
    )


_SCRIPT = """<script>
(() => {
  const form = document.querySelector(".ledger .filters");
  const cards = [...document.querySelectorAll(".ledger .claim")];
  const show = () => {
    const wanted = ["paper", "verdict"].map((name) => [name, form.elements[name].value]);
    let shown = 0;
    for (const card of cards) {
      card.hidden = wanted.some(([name, value]) => value && card.dataset[name] !== value);
      shown += !card.hidden;
    }
    form.querySelector("output").textContent = `${shown} of ${cards.length} claims`;
  };
  form.addEventListener("change", show);
  form.addEventListener("submit", (event) => event.preventDefault());
  show();
})();
</script>"""
