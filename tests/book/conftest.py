"""One small rendered book for the whole session, and a browser that cannot reach the network."""

from __future__ import annotations

import shutil
from copy import deepcopy

import pytest
import yaml
from tiny_book import TOC, TinyBook, chapter_notebook


@pytest.fixture(scope="session")
def rendered(tmp_path_factory) -> TinyBook:
    """A built book: the tiny chapter, a chapter with a stranger's kernel, and broken notebooks lying about."""
    book = TinyBook.create(tmp_path_factory.mktemp("book") / "project")
    alien = chapter_notebook()
    alien.cells = [cell for cell in alien.cells if "label" not in cell.source and "figure" not in cell.source]
    alien.cells[0].source = "# A chapter from elsewhere"
    alien.metadata.kernelspec = {"name": "conda-env-elsewhere-py", "display_name": "Elsewhere", "language": "python"}
    book.write_notebook(alien, "book/alien.ipynb")
    toc = deepcopy(TOC)
    toc["parts"][0]["chapters"].append({"file": "book/alien"})
    book.write("_toc.yml", yaml.safe_dump(toc))

    broken = chapter_notebook()
    broken.cells[4].source = "1 / 0"
    for name in (".venv/share/broken.ipynb", "runs/broken.ipynb", "tests/broken.ipynb", "book/unlisted.ipynb"):
        book.write_notebook(broken, name)
    book.write(".venv/lib/python3.11/site-packages/package/broken.md", "# Broken\n\n{eq}`nowhere`\n")

    built = book.build("--all", "-W", "--keep-going")
    assert built.returncode == 0, built.stdout[-3000:] + built.stderr[-3000:]
    book.write("build.log", built.stdout + built.stderr)
    return book


@pytest.fixture(scope="session")
def browser():
    """Headless Chromium in which every name fails to resolve."""
    from selenium import webdriver

    binary = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    driver = shutil.which("chromedriver")
    if not binary or not driver:
        pytest.skip("needs chromium and chromedriver (Debian: chromium, chromium-driver)")
    options = webdriver.ChromeOptions()
    options.binary_location = binary
    for argument in (
        "--headless=new",
        "--no-sandbox",
        "--disable-dev-shm-usage",
        "--disable-gpu",
        "--host-resolver-rules=MAP * ~NOTFOUND",
    ):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    chromium = webdriver.Chrome(options=options, service=webdriver.ChromeService(executable_path=driver))
    chromium.set_page_load_timeout(120)
    yield chromium
    chromium.quit()
