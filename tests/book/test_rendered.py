"""The book's configuration, extensions and style sheet on a small book.

Several tests are named after reports against the tools that this book must not repeat.
"""

import re

import checks
import pytest
import yaml
from tiny_book import chapter_notebook

from benign_attention import paths
from benign_attention.rendered import missing


def text_of(page):
    return " ".join(checks.soup(page).get_text().split())


def test_every_chapter_has_a_page_with_a_filled_verdict_box_and_a_record(rendered):
    html = rendered.root / "_build/html"
    assert missing(html, rendered.root) == []
    box = checks.soup(html / "book/tiny.html").select_one(".verdict-box tr.verdict-supported")
    assert "T-1" in box.get_text() and "product = 12.2" in box.get_text()
    assert (html / "index.html").is_file()


def test_a_missing_page_or_box_is_found(rendered, tmp_path):
    page = tmp_path / "book/tiny.html"
    page.parent.mkdir()
    page.write_text("<html></html>")
    problems = "\n".join(missing(tmp_path, rendered.root))
    for problem in ("index.html: no such page", "alien.html: no such page", "class verdict-box", "class record"):
        assert problem in problems


def test_theorems_equations_figures_and_citations_are_linked(rendered):
    page = checks.soup(rendered.root / "_build/html/book/tiny.html")
    anchors = {tag["id"] for tag in page.find_all(id=True)}
    inside = {a["href"][1:] for a in page.select("article a.reference.internal") if a["href"].startswith("#")}
    assert {"thm-nothing", "equation-eq-tiny", "fig-line"} <= inside & anchors
    assert page.select_one("article a[href^='index.html#']"), "the citation leads to the bibliography"


def test_changed_library_changes_the_page_and_changed_words_do_not_execute(tiny):
    """MyST-NB#621: the cache ignores changes in imported code."""
    assert tiny.build().returncode == 0
    assert "The product is 12." in text_of(tiny.root / "_build/html/book/tiny.html")
    name = "lib/benign_attention/experiments/tiny.py"
    source = (tiny.root / name).read_text(encoding="utf-8")

    tiny.write(name, source.replace("FACTOR = 3", "FACTOR = 3  # three").replace("A chapter", "One chapter"))
    reworded = tiny.build()
    assert reworded.returncode == 0 and "Executing notebook" not in reworded.stdout + reworded.stderr

    tiny.write(name, source.replace("FACTOR = 3", "FACTOR = 5"))
    changed = tiny.build()
    assert changed.returncode == 0 and "Executing notebook" in changed.stdout + changed.stderr
    assert "The product is 20." in text_of(tiny.root / "_build/html/book/tiny.html")


def test_a_failing_cell_fails_the_build_with_its_traceback(tiny):
    """jupyter-book#781: a failed notebook, a green build."""
    notebook = chapter_notebook()
    notebook.cells[4].source = "1 / 0"
    tiny.write_notebook(notebook)
    for _ in range(2):
        failed = tiny.build()
        log = re.sub(r"\x1b\[[\d;]*m", "", failed.stdout + failed.stderr)
        assert failed.returncode != 0
        assert "ZeroDivisionError: division by zero" in log and "1 / 0" in log


def test_notebooks_outside_the_contents_are_neither_pages_nor_failures(rendered):
    """jupyter-book#1488: a virtual environment inside the tree."""
    names = {page.name for page in (rendered.root / "_build/html").rglob("*.html")}
    assert {"tiny.html", "alien.html"} <= names
    assert not {"broken.html", "unlisted.html"} & names
    assert "broken" not in (rendered.root / "build.log").read_text(encoding="utf-8")


def test_a_strangers_kernel_is_no_obstacle(rendered):
    """jupyter-book#1000: NoSuchKernel."""
    assert "The product is 12." in text_of(rendered.root / "_build/html/book/alien.html")


def test_pages_load_nothing_from_elsewhere(rendered):
    """jupyter-book#1003: the book offline."""
    html = rendered.root / "_build/html"
    pages = [page for page in html.rglob("*.html") if "_static" not in page.parts]
    assert len(pages) >= 4
    assert [asset for page in pages for asset in checks.foreign_assets(page)] == []
    assert checks.foreign_style_imports(html) == []


def test_maths_is_rendered_from_a_file_without_network(rendered, browser):
    """jupyter-book#1003: the book offline."""
    for page in checks.pages(rendered.root / "_build/html"):
        assert checks.wait_for_maths(browser, page) == []
    assert len(browser.find_elements("css selector", "mjx-container svg")) >= 2
    messages = [entry["message"] for entry in browser.get_log("browser")]
    assert [message for message in messages if "net::" in message or "Uncaught" in message] == []


def test_launch_buttons_name_the_chapters_file(rendered):
    """jupyter-book#1906: dead launch buttons; jupyter-book#1588: theme options erase the buttons."""
    for name in ("tiny", "alien"):
        links = checks.launch_links(rendered.root / f"_build/html/book/{name}.html")
        assert links == {"binder": f"book/{name}.ipynb", "colab": f"book/{name}.ipynb"}
        assert (rendered.root / links["binder"]).is_file()


def test_cell_timeout_is_far_from_the_default(rendered):
    """jupyter-book#945: a timeout of 30 s. The real chapters are held against it in test_real_book.py."""
    timeout = yaml.safe_load((paths.ROOT / "_config.yml").read_text(encoding="utf-8"))["execute"]["timeout"]
    times = checks.seconds_in_cache(rendered.root / "_build")
    assert len(times) == 2 and timeout >= 3 * max(times)


def test_an_unchanged_book_is_not_executed_again(rendered):
    again = rendered.build()
    assert again.returncode == 0
    assert "Executing notebook" not in again.stdout + again.stderr


def test_another_scale_is_a_book_beside_the_first(rendered):
    before = (rendered.root / "_build/html/book/tiny.html").read_bytes()
    assert rendered.run("benign-attention", "prepare", "smoke").returncode == 0
    assert rendered.build(source="_build/src-smoke").returncode == 0
    page = rendered.root / "_build/src-smoke/_build/html/book/tiny.html"
    assert "The product is 6." in text_of(page) and "Scale smoke" in text_of(page)
    assert (rendered.root / "_build/html/book/tiny.html").read_bytes() == before


# Looks


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_figures_keep_their_white_paper_in_both_themes(rendered, browser, theme):
    checks.wait_for_maths(browser, rendered.root / "_build/html/book/tiny.html")
    browser.execute_script(f"document.documentElement.dataset.theme = '{theme}'")
    style = browser.execute_script(
        "const s = getComputedStyle(document.querySelector('figure img')); return [s.backgroundColor, s.filter]"
    )
    assert style == ["rgb(255, 255, 255)", "none"]


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_verdicts_contrast_with_the_page_in_both_themes(rendered, browser, theme):
    """WCAG AA: a ratio of 4.5 for text."""
    checks.wait_for_maths(browser, rendered.root / "_build/html/book/tiny.html")
    browser.execute_script(f"document.documentElement.dataset.theme = '{theme}'")
    outcomes = ("supported", "supported-in-part", "refuted", "inconclusive", "not-run")
    for outcome in outcomes:
        browser.execute_script(f"document.querySelector('.verdict-box tbody tr').className = 'verdict-{outcome}'")
        for selector in (".verdict-outcome", ".verdict-detail", "td"):
            text, paper = browser.execute_script(INK_AND_PAPER, f".verdict-box tbody {selector}")
            assert contrast(text, paper) >= 4.5, (theme, outcome, selector, text, paper)
    text, paper = browser.execute_script(INK_AND_PAPER, ".record p")
    assert contrast(text, paper) >= 4.5, (theme, "record", text, paper)


INK_AND_PAPER = """
const element = document.querySelector(arguments[0]);
let paper = element;
const colour = () => getComputedStyle(paper).backgroundColor;
while (paper.parentElement && colour() === 'rgba(0, 0, 0, 0)') paper = paper.parentElement;
return [getComputedStyle(element).color, colour()];
"""


def contrast(*colours: str) -> float:
    darker, lighter = sorted(luminance([int(x) / 255 for x in re.findall(r"\d+", colour)[:3]]) for colour in colours)
    return (lighter + 0.05) / (darker + 0.05)


def luminance(rgb: list[float]) -> float:
    linear = [x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4 for x in rgb]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_pages_fit_a_phone(rendered, browser):
    for page in checks.pages(rendered.root / "_build/html"):
        assert checks.overflow_on_a_phone(browser, page) <= 0, page.name
