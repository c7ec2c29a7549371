"""All claims of the book with the verdicts that its records give them."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from pydantic import TypeAdapter
from scipy import stats

from benign_attention import paths
from benign_attention.claims import Claim, Condition, Region, Verdict, judge, load_claims
from benign_attention.parameters import ParameterError
from benign_attention.records import Metric, Record, read_record

LEVEL = 0.05
_CHECKED = TypeAdapter(Record)


@dataclass(frozen=True)
class Entry:
    """A claim, its chapter's record at the scale asked for, and the verdict that follows.

    p_value: the smallest level at which seeds alone could still have produced this verdict although its region's edge
    is the truth; None where no test applies (brackets, seeds that agree exactly, verdicts that decide nothing).
    firm: whether the verdict also holds after Holm's correction over the whole ledger; None where p_value is None.
    """

    claim: Claim
    record: Record | None
    verdict: Verdict
    p_value: float | None
    firm: bool | None

    @property
    def metric(self) -> Metric | None:
        return self.record.metrics.get(self.claim.metric) if self.record else None


def entries(scale: str, records: Path = paths.RECORDS, claims: list[Claim] | None = None) -> list[Entry]:
    """The ledger at `scale`, in the order of `book/claims.yml`, from the files `records`/`scale`/<chapter>.json."""
    claims = load_claims() if claims is None else claims
    found = {
        chapter: _record(records / scale / f"{chapter}.json", chapter, scale)
        for chapter in {claim.chapter for claim in claims}
    }
    return from_records(claims, found)


def from_records(claims: list[Claim], records: dict[str, Record | None]) -> list[Entry]:
    """The ledger of the records at hand, by chapter; a missing one leaves its claims not run."""
    verdicts = []
    for claim in claims:
        record = records.get(claim.chapter)
        verdicts.append(judge(claim, record.metrics if record else {}, record.scale if record else ""))
    p_values = [
        p_value(verdict, records[verdict.claim.chapter].metrics) if records.get(verdict.claim.chapter) else None
        for verdict in verdicts
    ]
    firm = holm(p_values)
    return [
        Entry(claim, records.get(claim.chapter), *rest)
        for claim, *rest in zip(claims, verdicts, p_values, firm, strict=True)
    ]


def problems(ledger: list[Entry], scale: str) -> list[str]:
    """One line for each verdict that differs from the committed one, and for each claim without a record or verdict."""
    found = []
    for entry in ledger:
        expected = entry.claim.expected.get(scale)
        if entry.record is None and expected != "not run":
            found.append(f"{entry.claim.id}: no record of {entry.claim.chapter} at scale {scale}")
        elif expected is None:
            found.append(f"{entry.claim.id}: no committed verdict at scale {scale}, found {entry.verdict.outcome}")
        elif entry.verdict.outcome != expected:
            found.append(f"{entry.claim.id}: {entry.verdict.outcome}, committed is {expected}")
    return found


def p_value(verdict: Verdict, metrics: dict[str, Metric]) -> float | None:
    """The p-value of a verdict, two-sided as its interval is.

    A verdict that rests on several intervals (a region with two edges, a claim that must hold at several places) is as
    weak as its weakest one (the intersection-union test), so it takes their largest p-value.
    """
    claim = verdict.claim
    if verdict.outcome == "supported":
        tested = [(condition, condition.supported) for condition in (claim, *claim.also)]
    elif verdict.outcome == "supported in part":
        tested = [(claim, claim.supported)]
    elif verdict.outcome == "refuted":
        tested = [(claim, claim.refuted)]
    else:
        return None
    found = [_condition_p_value(condition, region, metrics) for condition, region in tested]
    defined = [p for p in found if p is not None]
    return max(defined) if defined else None


def _condition_p_value(condition: Condition, region: Region, metrics: dict[str, Metric]) -> float | None:
    metric = metrics[condition.metric]
    values = np.array([x for x in metric.per_seed if x is not None], float)
    if "t interval" not in metric.kind or values.size < 2 or np.ptp(values) == 0:
        return None
    standard_error = values.std(ddof=1) / math.sqrt(values.size)
    distances = [values.mean() - region.above, region.below - values.mean()]
    return max(
        2 * float(stats.t.sf(distance / standard_error, values.size - 1))
        for distance in distances
        if math.isfinite(distance)
    )


def holm(p_values: list[float | None], level: float = LEVEL) -> list[bool | None]:
    """Which hypotheses Holm's step-down procedure rejects at a family-wise error of `level`; None stays None."""
    defined = [i for i, p in enumerate(p_values) if p is not None and not math.isnan(p)]
    order = sorted(defined, key=lambda i: p_values[i])
    rejected: list[bool | None] = [False if i in defined else None for i in range(len(p_values))]
    for rank, i in enumerate(order):
        if p_values[i] > level / (len(order) - rank):
            break
        rejected[i] = True
    return rejected


def _record(path: Path, chapter: str, scale: str) -> Record | None:
    if not path.is_file():
        return None
    try:
        record = _CHECKED.validate_python(asdict(read_record(path)))
    except (ValueError, TypeError, KeyError, AttributeError, OSError) as error:
        reason = str(error).splitlines()
        raise ParameterError(
            f"{path} must be a record of {chapter}: {type(error).__name__} {' '.join(reason[:2])}"
        ) from None
    if (record.chapter, record.scale) != (chapter, scale):
        raise ParameterError(
            f"{path} must be a record of {chapter} at scale {scale}, "
            f"got one of {record.chapter} at scale {record.scale}"
        )
    return record
