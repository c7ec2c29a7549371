"""The assumption meter: which hypotheses of the two papers hold at a point, and by what factor.

The hypotheses compare a number with a constant that is "sufficiently large" and not given. So the meter reports the
number itself: the largest constant with which the hypothesis still holds. That a factor of at least 1 counts as
"holds" is this book's reading. The sources are the replies of Magen et al. 2025 to their reviewers and a published
summary of Sakamoto and Sato 2025; what these do not quantify has no factor here.
"""

from __future__ import annotations

from dataclasses import dataclass
from html import escape

from benign_attention.data import SingleHeadParams, TokenSelectionParams


@dataclass(frozen=True)
class Hypothesis:
    """One hypothesis at one point.

    statement : as the source has it; quantity : the number that is reported, in symbols; factor : that number, the
    largest constant with which the hypothesis holds (None: the source gives nothing to compute); note : more at this
    point; source : where it is stated.
    """

    statement: str
    quantity: str
    factor: float | None
    source: str
    note: str = ""

    @property
    def holds(self) -> bool | None:
        """Whether the factor reaches 1 (this book's reading); None where there is no factor."""
        return None if self.factor is None else self.factor >= 1


def signal_strength(n_train: int, dim: int, signal_norm: float) -> float:
    """n SNR^2 = c^2, the one number that both papers compare with a constant (1 : SNR = 1 / sqrt(n))."""
    return n_train * signal_norm**2 / dim


def no_flip_probability(n_train: int, label_noise: float) -> float:
    """Probability that none of `n_train` labels is flipped (eq-no-flip)."""
    return (1.0 - label_noise) ** n_train


def single_head(params: SingleHeadParams) -> list[Hypothesis]:
    """The hypotheses of Magen et al. 2025, Theorem 3.3 (two steps of gradient descent; thm-two-step)."""
    n, d, eta = params.n_train, params.dim, params.label_noise
    replies = "authors' replies"
    return [
        Hypothesis("d = Ω(n²)", "d / n²", d / n**2, f"{replies}: dimension requirement"),
        Hypothesis(
            "SNR above a threshold Θ(1/√n)",
            "c = SNR √n",
            params.natural_c,
            f"{replies}: SNR threshold, c_ρ",
        ),
        Hypothesis(
            "η ≤ 1/C",
            "1 / η",
            1 / eta if eta else float("inf"),
            f"{replies}: Assumption 3.1, item 4",
        ),
        Hypothesis(
            "η ≫ 1/n (at least one noisy sample)",
            "η n",
            eta * n,
            f"{replies}: a noisy sample exists",
            f"P(no flip) = {no_flip_probability(n, eta):.2g}",
        ),
        Hypothesis(
            "T = Θ(1)",
            "T",
            None,
            f"{replies}: tokens",
            f"T = {params.n_tokens}",
        ),
    ]


def token_selection(params: TokenSelectionParams) -> list[Hypothesis]:
    """The hypotheses of Sakamoto and Sato 2025 (thm-ts): two regimes that exclude each other, and what both assume."""
    n, d, x = params.n_train, params.dim, signal_strength(params.n_train, params.dim, params.signal_norm)
    summary = "published summary"
    return [
        Hypothesis("SNR² = ω(1/n): not overfitting", "n SNR²", x, f"{summary}: theorem, first regime"),
        Hypothesis("SNR² = o(1/n): benign overfitting", "1 / (n SNR²)", 1 / x, f"{summary}: theorem, second regime"),
        Hypothesis(
            "over-parameterization",
            "not quantified",
            None,
            f"{summary}: limitations",
            f"d / (n T) = {d / (n * params.n_tokens):.3g}",
        ),
        Hypothesis("small learning rate", "not quantified", None, f"{summary}: limitations"),
        Hypothesis(
            "specific initialization scales",
            "not quantified",
            None,
            f"{summary}: limitations",
        ),
        Hypothesis("T = Θ(1)", "T", None, f"{summary}: limitations", f"T = {params.n_tokens}"),
    ]


def verdict(hypothesis: Hypothesis) -> str:
    """The factor in words, and the note: `holds, factor 2.1`, `fails, factor 0.3`, `no factor; T = 2`."""
    if hypothesis.factor is None:
        words = "no factor"
    else:
        words = f"{'holds' if hypothesis.holds else 'fails'}, factor {hypothesis.factor:.3g}"
    return f"{words}; {hypothesis.note}" if hypothesis.note else words


def as_html(points: dict[str, list[Hypothesis]], caption: str) -> str:
    """The meter as an HTML table: one row a hypothesis, one column for each named point (all of one paper)."""
    heads = "".join(f"<th>{escape(head)}</th>" for head in ("Hypothesis", "Number", *points, "Source"))
    rows = ""
    for same in zip(*points.values(), strict=True):
        cells = (same[0].statement, same[0].quantity, *map(verdict, same), same[0].source)
        rows += "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in cells) + "</tr>"
    return (
        f'<table class="assumption-meter"><caption>{escape(caption)}</caption>'
        f"<thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table>"
    )
