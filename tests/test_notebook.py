"""What a chapter displays: a verdict box that is filled in place, and a record beside its table."""

import pytest
from IPython.core.displaypub import CapturingDisplayPublisher
from IPython.core.interactiveshell import InteractiveShell
from pydantic import Field
from tiny_book import CLAIM

from benign_attention import notebook, records
from benign_attention.claims import Claim
from benign_attention.notebook import VerdictBox, say, tex
from benign_attention.parameters import ChapterParams
from benign_attention.records import MIME, seed_metric


class Params(ChapterParams):
    n_train: int = Field(4, description="training samples")


@pytest.fixture
def shown(monkeypatch):
    """What would be displayed, in order."""
    shell = InteractiveShell.instance()
    publisher = CapturingDisplayPublisher(shell=shell)
    monkeypatch.setattr(shell, "display_pub", publisher)
    monkeypatch.setattr(notebook, "load_claims", lambda chapter: [Claim(**{**CLAIM, "says": "x < 1 & y > 2"})])
    monkeypatch.setattr(records, "scale_of", lambda chapter, params: "custom")
    yield publisher.outputs
    InteractiveShell.clear_instance()


def test_the_box_says_not_run_at_first_and_the_verdict_at_the_end(shown):
    box = VerdictBox("tiny")
    box.conclude(Params(), {"product": seed_metric([1.0, 1.1, 1.2])})
    first, updated, _ = shown
    assert "not run" in first["data"]["text/html"] and not first["update"]
    assert 'class="verdict-supported"' in updated["data"]["text/html"] and updated["update"]
    assert first["transient"] == updated["transient"]
    assert "x &lt; 1 &amp; y &gt; 2" in updated["data"]["text/html"]


def test_the_record_travels_as_an_output(shown):
    record = VerdictBox("tiny").conclude(Params(), {"product": seed_metric([1.0, 1.1])})
    data = shown[-1]["data"]
    assert data[MIME] == record.as_json()
    assert '<div class="record">' in data["text/html"] and "product" in data["text/html"]


def test_computed_sentences_are_prose(shown):
    say("The error is **0.1**.")
    assert shown[0]["data"]["text/markdown"] == "The error is **0.1**."


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (1e8, "10^{8}"),
        (2e7, r"2\cdot10^{7}"),
        (0.2, "0.2"),
        (2000, "2000"),
        (1e60, "10^{60}"),
        (0, "0"),
        (-3e-5, r"-3\cdot10^{-5}"),
    ],
)
def test_numbers_in_formulas_have_no_e(number, text):
    assert tex(number) == text
