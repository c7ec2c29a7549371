"""Claims and their computed verdicts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, model_validator

from benign_attention import paths
from benign_attention.records import Metric

Outcome = Literal["supported", "supported in part", "refuted", "inconclusive", "not run"]


class Region(BaseModel):
    """An open interval of the real line."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    above: float = -float("inf")
    below: float = float("inf")

    def __str__(self) -> str:
        words = [
            f"{name} {value:g}"
            for name, value in (("above", self.above), ("below", self.below))
            if abs(value) < float("inf")
        ]
        return " and ".join(words)

    def contains(self, metric: Metric) -> bool:
        return self.above < metric.low and metric.high < self.below

    def is_apart_from(self, other: Region) -> bool:
        """Both hold some number, and no number lies in both."""
        regions_exist = self.above < self.below and other.above < other.below
        return regions_exist and (self.below <= other.above or other.below <= self.above)


class Condition(BaseModel):
    """A metric, and where its whole interval must lie."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    metric: str
    supported: Region
    refuted: Region
    where: str = ""

    @model_validator(mode="after")
    def _could_come_out_either_way(self):
        if not self.supported.is_apart_from(self.refuted):
            raise ValueError(f"{self.metric}: supported and refuted must be two regions that do not overlap")
        return self

    def verdict(self, metrics: dict[str, Metric]) -> Outcome:
        metric = metrics.get(self.metric)
        if metric is None:
            return "not run"
        if metric.low is None or metric.high is None:
            return "inconclusive"
        if self.supported.contains(metric):
            return "supported"
        return "refuted" if self.refuted.contains(metric) else "inconclusive"


class Control(BaseModel):
    """A change of parameters under which the claim should no longer be supported."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    change: dict
    expect: Literal["not supported"] = "not supported"


class Claim(Condition):
    """One statement of a paper (or a question of ours), tied to a metric before it is measured.

    `also` holds the same statement elsewhere: when the main condition is supported and one of
    these is not, the verdict is *supported in part* and names that place.
    """

    id: str
    paper: Literal["magen2025", "sakamoto2025", "this book"]
    place: str
    says: str
    why: str = Field(description="the reason from theory for the regions")
    chapter: str
    figure: str = Field(description="name of the chapter's figure that shows it")
    also: list[Condition] = []
    controls: list[Control] = []
    no_control: str = Field("", description="why no change of the chapter's parameters turns the claim")
    published: str = Field("", description="the source's own number, where it gives one")
    command: str = Field("", description="what runs it, where the reader scale cannot")
    expected: dict[str, str] = Field({}, alias="verdict", description="committed verdict, by scale")


@dataclass(frozen=True)
class Verdict:
    """The outcome of a claim on a set of metrics; `details` says which numbers decided, here and elsewhere."""

    claim: Claim
    outcome: Outcome
    details: tuple[str, ...]


def load_claims(chapter: str | None = None, path: Path = paths.CLAIMS) -> list[Claim]:
    """The claims of the book, or of one chapter, in the order of `book/claims.yml`."""
    entries = yaml.safe_load(path.read_text(encoding="utf-8"))
    claims = [Claim(**entry) for entry in entries]
    return [claim for claim in claims if chapter in (None, claim.chapter)]


def judge(claim: Claim, metrics: dict[str, Metric], scale: str = "") -> Verdict:
    """Supported if the whole interval lies in the supported region, refuted if it lies in the
    refuted one, else inconclusive; supported in part when it holds here and not elsewhere.

    Smoke scale runs every line and measures nothing well: whatever it finds is inconclusive.
    """
    outcome = claim.verdict(metrics)
    details = [f"{claim.metric} = {metrics.get(claim.metric, 'not measured')}"]
    for condition in claim.also:
        there = condition.verdict(metrics)
        number = f"{condition.metric} = {metrics.get(condition.metric, 'not measured')}"
        details.append(f"{condition.where}: {there}, {number}")
        if outcome == "supported" and there != "supported":
            outcome = "supported in part"
    if outcome == "not run" and claim.command:
        details.append(f"to run it: {claim.command}")
    if scale == "smoke" and not (outcome == "not run" and claim.command):
        outcome = "inconclusive"
        details.append("smoke scale is too small to decide anything")
    return Verdict(claim, outcome, tuple(details))
