"""The real book, built as a reader builds it: `make book` at reader and at smoke scale."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

import checks
import nbformat
import pytest
import yaml

from benign_attention import paths
from benign_attention.built_pages import load_findings
from benign_attention.chapters import record_in
from benign_attention.claims import judge, load_claims
from benign_attention.experiments import CHAPTERS
from benign_attention.records import Metric
from benign_attention.rendered import documents, missing

pytestmark = pytest.mark.slow

BUILDS = {"reader": paths.ROOT / "_build", "smoke": paths.ROOT / "_build/src-smoke/_build"}


def make(*arguments: str) -> str:
    environment = {k: v for k, v in os.environ.items() if k not in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS")}
    done = subprocess.run(["make", *arguments], cwd=paths.ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    return done.stdout + done.stderr


@pytest.fixture(scope="session")
def reader() -> Path:
    make("book")
    return BUILDS["reader"]


@pytest.fixture(scope="session")
def smoke() -> Path:
    make("book", "SCALE=smoke", "BOOK_ARGS=--all -W --keep-going")
    return BUILDS["smoke"]


@pytest.fixture(params=["reader", "smoke"])
def build(request) -> Path:
    return request.getfixturevalue(request.param)


def executed(build: Path, chapter: str) -> nbformat.NotebookNode:
    return nbformat.read(build / f"jupyter_execute/book/{chapter}.ipynb", as_version=4)


def metrics_of(build: Path, chapter: str) -> dict[str, Metric]:
    record = record_in(executed(build, chapter))
    return {name: Metric(**metric) for name, metric in record["metrics"].items()}


def test_every_page_verdict_box_and_record_is_there(build):
    assert missing(build / "html") == []
    assert len(checks.pages(build / "html")) == len(documents())


def test_pages_load_nothing_from_elsewhere(build):
    pages = [page for page in (build / "html").rglob("*.html") if "_static" not in page.parts]
    assert [asset for page in pages for asset in checks.foreign_assets(page)] == []
    assert checks.foreign_style_imports(build / "html") == []


def test_maths_is_rendered_from_a_file_without_network(build, browser):
    for page in checks.pages(build / "html"):
        assert checks.wait_for_maths(browser, page) == [], page.name


def test_pages_fit_a_phone(build, browser):
    for page in checks.pages(build / "html"):
        assert checks.overflow_on_a_phone(browser, page) <= 0, page.name


def test_launch_buttons_name_files_in_git(build):
    listed = subprocess.run(["git", "ls-files"], cwd=paths.ROOT, capture_output=True, text=True, check=True)
    for chapter in CHAPTERS:
        links = checks.launch_links(build / f"html/book/{chapter}.html")
        assert links == {"binder": f"book/{chapter}.ipynb", "colab": f"book/{chapter}.ipynb"}
        assert links["binder"] in listed.stdout.split("\n")


def test_no_output_shows_an_error_or_a_path_of_this_machine(build):
    for chapter in CHAPTERS:
        text = nbformat.writes(executed(build, chapter))
        assert '"output_type": "error"' not in text
        assert str(paths.ROOT) not in text and str(Path.home()) + "/" not in text


def test_timeout_is_three_times_the_slowest_chapter(build):
    """jupyter-book#945; a whole chapter takes at least as long as its slowest cell."""
    timeout = yaml.safe_load((paths.ROOT / "_config.yml").read_text(encoding="utf-8"))["execute"]["timeout"]
    times = checks.seconds_in_cache(build)
    assert len(times) >= len(CHAPTERS)
    assert timeout >= 3 * max(times)


def test_records_name_their_scale(reader, smoke):
    for chapter in CHAPTERS:
        assert record_in(executed(reader, chapter))["scale"] == "reader"
        assert record_in(executed(smoke, chapter))["scale"] == "smoke"


def test_every_metric_that_a_claim_names_is_measured(reader):
    for chapter in CHAPTERS:
        metrics = metrics_of(reader, chapter)
        for claim in load_claims(chapter):
            named = {claim.metric, *(there.metric for there in claim.also)}
            assert named <= set(metrics) or claim.expected["reader"] == "not run", claim.id


def test_committed_verdicts_are_those_of_the_book(reader):
    for chapter in CHAPTERS:
        metrics = metrics_of(reader, chapter)
        found = {claim.id: judge(claim, metrics).outcome for claim in load_claims(chapter)}
        assert found == {claim.id: claim.expected["reader"] for claim in load_claims(chapter)}


def test_the_ledger_judges_the_records_of_its_own_build(reader, smoke):
    claims = {claim.id: claim for claim in load_claims()}
    for build in (reader, smoke):
        cards = checks.soup(build / "html/book/ledger.html").select(".claim")
        assert [card["id"].removeprefix("claim-") for card in cards] == list(claims)
        for card in cards:
            expected = claims[card["id"].removeprefix("claim-")].expected["reader"]
            decides_nothing = build == smoke and expected != "not run"
            assert card["data-verdict"] == ("inconclusive" if decides_nothing else expected), card["id"]


def test_links_of_ledger_and_findings_lead_to_figures(reader):
    for name in ("ledger", "findings"):
        links = {link["href"] for link in checks.soup(reader / f"html/book/{name}.html").select(".claim a, .finding a")}
        assert links
        for address, anchor in (link.split("#") for link in links):
            assert checks.soup(reader / "html/book" / address).find(id=anchor), (address, anchor)


def test_findings_show_a_figure_and_numbers(reader):
    page = reader / "html/book/findings.html"
    articles = checks.soup(page).select("article.finding")
    assert len(articles) == len(load_findings())
    for article in articles:
        assert (page.parent / article.img["src"]).is_file() and article.img["alt"] and article.b


def test_the_ledger_is_filtered_without_a_server(reader, browser):
    browser.get((reader / "html/book/ledger.html").as_uri())
    shown = (
        "return [...document.querySelectorAll('.claim')].filter((c) => c.offsetParent).map((c) => c.dataset.verdict)"
    )
    everything = browser.execute_script(shown)
    assert len(everything) == len(load_claims())
    browser.find_element("css selector", ".filters select[name=verdict]").send_keys("refuted")
    assert browser.execute_script(shown) == [verdict for verdict in everything if verdict == "refuted"]


def test_a_second_build_executes_nothing_and_is_quick(reader):
    """The limit of 30 s is ten times what a build without changes takes."""
    started = time.monotonic()
    log = make("book")
    assert "Executing notebook" not in log
    assert time.monotonic() - started < 30


def test_every_chapter_runs_as_the_gpu_workflow_runs_it():
    make("ci-gpu", "DEVICE=cpu", "SCALE=smoke")
    results = paths.ROOT / "runs/smoke-cpu"
    for chapter in CHAPTERS:
        assert (results / f"{chapter}.ipynb").is_file() and (results / f"{chapter}.json").is_file()


def test_every_figure_has_a_caption_and_a_text_for_those_who_cannot_see_it(build):
    for chapter in CHAPTERS:
        page = checks.soup(build / f"html/book/{chapter}.html")
        figures = [image.find_parent("figure") for image in page.select("article img")]
        assert figures, chapter
        for image, figure in zip(page.select("article img"), figures, strict=True):
            assert figure and figure.select_one("figcaption .caption-text"), image["src"]
            assert len(image.get("alt", "")) > 20 and ".png" not in image["alt"], image["src"]
