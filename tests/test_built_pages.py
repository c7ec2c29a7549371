"""Ledger, findings and status pages, made from executed notebooks."""

import base64
import json
import re

import pytest

from benign_attention import built_pages, ledger, ledger_page, paths
from benign_attention.claims import Claim, load_claims
from benign_attention.experiments import CHAPTERS
from benign_attention.records import MIME, read_record, seed_metric

PNG = b"\x89PNG picture"


def committed(chapter: str) -> dict:
    return json.loads((paths.RECORDS / "reader" / f"{chapter}.json").read_text(encoding="utf-8"))


def figures_of(chapter: str) -> dict[str, str]:
    """Name and caption of each figure of a chapter's notebook."""
    cells = json.loads((paths.BOOK / f"{chapter}.ipynb").read_text(encoding="utf-8"))["cells"]
    figures = [cell["metadata"].get("mystnb", {}).get("figure") for cell in cells]
    return {figure["name"]: figure["caption"] for figure in figures if figure}


@pytest.fixture
def build(tmp_path):
    """A build in which every chapter shows its committed record, and each of its figures the same picture."""
    (tmp_path / "executed/book").mkdir(parents=True)
    for chapter in CHAPTERS:
        picture = {"data": {"image/png": base64.b64encode(PNG).decode()}}
        cells = [
            {"metadata": {"mystnb": {"figure": {"name": name}, "image": {"alt": f"<{name}>"}}}, "outputs": [picture]}
            for name in figures_of(chapter)
        ]
        cells.append({"metadata": {}, "outputs": [{"data": {MIME: committed(chapter)}}]})
        (tmp_path / f"executed/book/{chapter}.ipynb").write_text(json.dumps({"cells": cells}), encoding="utf-8")
    return built_pages.Build(tmp_path / "executed", tmp_path / "images", lambda label: f"somewhere#{label}")


def test_the_ledger_has_a_card_for_every_claim_with_its_committed_verdict(build):
    html = built_pages.ledger(build)
    for claim in load_claims():
        card = html.split(f'id="claim-{claim.id}"')[1].split("</article>")[0]
        assert f'data-verdict="{claim.expected["reader"]}"' in card
        assert f'href="somewhere#{claim.figure}"' in card
        assert ("Must fail at: " in card) == bool(claim.controls)
        assert ("No control: " in card) == bool(claim.no_control)
    assert "committed:" not in html


def test_every_claim_names_a_figure_of_its_chapter():
    for claim in load_claims():
        assert claim.figure in figures_of(claim.chapter), claim.id


def test_a_verdict_that_differs_from_the_committed_one_says_so_on_its_card(build):
    record = committed("two_step_gd")
    record["metrics"]["train_accuracy_step2"].update(value=0.5, low=0.4, high=0.6)
    file = build.executed / "book/two_step_gd.ipynb"
    file.write_text(json.dumps({"cells": [{"metadata": {}, "outputs": [{"data": {MIME: record}}]}]}))
    card = built_pages.ledger(build).split('id="claim-SH-1a"')[1].split("</article>")[0]
    assert 'data-verdict="refuted"' in card and "committed: supported" in card


def test_findings_take_every_number_from_a_record(build):
    html = built_pages.findings(build)
    assert "not measured" not in html and not built_pages.NUMBER.search(html)
    shown = read_record(paths.RECORDS / "reader/two_step_gd.json").metrics["test_accuracy_step2_c5"]
    assert f"<b>{shown}</b>" in html
    assert (build.images / "finding-clock.png").read_bytes() == PNG
    assert 'alt="&lt;fig-delay-clock&gt;"' in html


def test_findings_of_another_scale_say_so(build):
    assert "The sentences are about the reader scale" not in built_pages.findings(build)
    record = {**committed("data_model"), "scale": "smoke"}
    cells = [{"metadata": {}, "outputs": [{"data": {MIME: record}}]}]
    (build.executed / "book/data_model.ipynb").write_text(json.dumps({"cells": cells}), encoding="utf-8")
    assert "made at smoke scale. The sentences are about the reader scale" in built_pages.findings(build)


def test_findings_name_figures_claims_and_kinds_that_exist():
    found, claims = built_pages.load_findings(), {claim.id for claim in load_claims()}
    assert len({one["id"] for one in found}) == len(found)
    for one in found:
        assert one["figure"] in figures_of(one["chapter"]), one["id"]
        assert set(one["claims"]) <= claims and one["kind"] in built_pages.KINDS, one["id"]
        assert len(re.findall(r"[.?](?= [A-Z*]|$)", one["text"])) == 2, f"{one['id']}: not two sentences"


def test_a_number_that_was_not_measured_is_not_invented():
    assert "not measured" in built_pages.sentence("It is {two_step_gd:nothing}.", {"two_step_gd": None})


def test_text_is_escaped_and_words_can_be_emphasised():
    assert built_pages.sentence("a < b, *never*", {}) == "a &lt; b, <em>never</em>"


def test_the_status_page_has_a_row_for_every_chapter_also_without_a_record(build):
    (build.executed / "book/data_model.ipynb").unlink()
    html = built_pages.status(build)
    assert html.count("<tr>") == len(CHAPTERS) + 1
    assert html.count("no record") == 1 and html.count("<td>reader</td>") == len(CHAPTERS) - 1


def test_a_drawing_shows_interval_and_seeds_inside_its_frame():
    claim = Claim(
        id="X", paper="this book", place="", says="", why="", chapter="two_step_gd", figure="fig-maps", metric="m",
        supported={"above": 0.0}, refuted={"below": -1.0},
    )  # fmt: skip
    drawing = ledger_page.spark(claim, seed_metric([1.0, 2.0, 3.0]))
    places = [float(x) for x in re.findall(r'cx="([-\d.]+)"', drawing)]
    assert len(places) == 3 and places == sorted(places)
    assert all(0 <= x <= ledger_page.SPARK_WIDTH for x in places)
    assert ledger_page.spark(claim, None) == "" and ledger_page.spark(claim, seed_metric([])) == ""


def test_a_card_names_the_command_of_what_was_not_run():
    claim = Claim(
        id="X", paper="this book", place="", says="", why="", chapter="two_step_gd", figure="fig-maps", metric="m",
        supported={"above": 0.0}, refuted={"below": -1.0}, command="benign-attention run <it>",
        verdict={"reader": "not run"},
    )  # fmt: skip
    html = ledger_page.page(ledger.from_records([claim], {}), lambda label: label)
    assert "<code>benign-attention run &lt;it&gt;</code>" in html and "no record" in html
