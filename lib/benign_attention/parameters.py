"""Self-checking parameters: strict types, bounds, one clear line for every mistake."""

from __future__ import annotations

import hashlib
import json
from typing import Annotated, Any, ClassVar, Literal, get_args, get_origin

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

SamplesCount = Annotated[int, Field(ge=2, le=10**9)]
Dimension = Annotated[int, Field(ge=3, le=10**15)]
TokensCount = Annotated[int, Field(ge=2)]
StepsCount = Annotated[int, Field(ge=1)]
Positive = Annotated[float, Field(ge=1e-15, le=1e15)]
SignalStrength = Annotated[float, Field(ge=1e-3, le=1e3)]  # n SNR^2
Ratio = Annotated[float, Field(ge=0, le=1000)]
FlipProbability = Annotated[float, Field(ge=0, lt=0.5)]

_TYPE_NAMES = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}


class ParameterError(ValueError):
    """A parameter has a value that is not allowed; the message is one line and names it."""


class Parameters(BaseModel):
    """Base of all parameter sets: frozen, strict about types, closed to unknown names.

    Raises
    ------
    ParameterError
        One line that names the parameter and says what is allowed.
    """

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", allow_inf_nan=False)

    def __init__(self, **values: Any):
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise ParameterError(self._explain(error.errors()[0])) from None

    @classmethod
    def _explain(cls, problem: dict) -> str:
        name, *index = problem["loc"]
        if problem["type"] == "extra_forbidden":
            return f"{name} is not a parameter; the parameters are {', '.join(cls.model_fields)}"
        field = cls.model_fields[name]
        where = f"{name}[{index[0]}]" if index and isinstance(index[0], int) else name
        got = problem["input"]
        return f"{where} must be {allowed(field, item=bool(index))}, got {got!r}{_hint(field, got, bool(index))}"

    def replace(self, **changes: Any):
        """A copy with some values changed, checked again."""
        return type(self)(**{**self.model_dump(), **changes})


def allowed(field, item: bool = False) -> str:
    """What a field admits, in words: `in [0, 0.5)`, `a whole number of at least 3`."""
    annotation, constraints = field.annotation, field.metadata
    if get_origin(annotation) is list:
        inner = get_args(annotation)[0]
        annotation, constraints = (
            (get_args(inner)[0], get_args(inner)[1].metadata) if get_origin(inner) is Annotated else (inner, [])
        )
        if not item:
            least = max((c.min_length for c in field.metadata if hasattr(c, "min_length")), default=1)
            kind = "non-empty list" if least == 1 else f"list of at least {least}"
            return f"a {kind} {'of ' if least == 1 else ''}{_TYPE_NAMES[annotation].removeprefix('a ')}s"
    if get_origin(annotation) is Literal:
        return "one of " + ", ".join(map(str, get_args(annotation)))
    bounds = {k: getattr(c, k) for c in constraints for k in ("ge", "gt", "le", "lt") if hasattr(c, k)}
    kind = _TYPE_NAMES[annotation]
    low, high = bounds.get("ge", bounds.get("gt")), bounds.get("le", bounds.get("lt"))
    if low is None and high is None:
        return kind
    if high is None:
        return f"{kind} of at least {low:g}" if "ge" in bounds else f"{kind} greater than {low:g}"
    return f"{kind} in {'[' if 'ge' in bounds else '('}{low:g}, {high:g}{']' if 'le' in bounds else ')'}"


def _hint(field, value, item: bool) -> str:
    if isinstance(value, str) and get_origin(field.annotation) is list and not item:
        return " (this is text, not a list: with papermill use -y, or benign-attention run)"
    if isinstance(value, str) and field.annotation in (int, float) and _reads_as_number(value):
        return " (this is text: YAML reads 1e-3 as text, write 1.0e-3)"
    return ""


def _reads_as_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


class ChapterParams(Parameters):
    """What every chapter takes besides its own parameters."""

    n_seeds: int = Field(5, ge=1, description="independent runs behind every interval")
    seed: int = Field(0, ge=0, description="root of all randomness")
    device: Literal["auto", "cpu", "cuda", "mps"] = Field("cpu", description="where arrays live")
    record_path: str = Field("", description="also write the record to this file")
    sections: Literal["all", "point"] = Field("all", description="point: only what the point's metrics need")

    HOUSEKEEPING: ClassVar[tuple[str, ...]] = ("seed", "n_seeds", "device", "record_path", "sections")

    @property
    def explores(self) -> bool:
        return self.sections == "all"

    def generator(self, run: int, **point: Any) -> np.random.Generator:
        """The random generator of run `run` at this point.

        The stream depends on `seed`, on every scalar parameter that is not housekeeping, on `point`
        (values that replace or extend them inside a grid) and on `run`. Lists are grids and do not
        enter: growing a grid or `n_seeds` leaves every earlier number as it was.
        """
        scalars = {k: v for k, v in self.model_dump().items() if k not in self.HOUSEKEEPING and not isinstance(v, list)}
        text = json.dumps({**scalars, **point}, sort_keys=True, default=float)
        digest = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")
        return np.random.default_rng(np.random.SeedSequence(self.seed, spawn_key=(digest, run)))
