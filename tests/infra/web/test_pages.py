"""What holds of the files of the pages without a browser."""

import re
from pathlib import Path

import pytest

from infra.web.app import STATIC

MODULES = sorted(STATIC.rglob("*.js"))
ONLY_NAME_OF_SVG = "http://www.w3.org/2000/svg"


def imports_of(module: Path) -> list[Path]:
    return [(module.parent / name).resolve() for name in re.findall(r'from "([^"]+)"', module.read_text())]


def test_a_page_starts_with_a_style_and_a_module_that_exist() -> None:
    index = (STATIC / "index.html").read_text()
    files = re.findall(r'(?:href|src)="/static/([^"]+)"', index)
    assert sorted(files) == ["app.js", "style.css"]
    assert [name for name in files if not (STATIC / name).is_file()] == []


def test_every_module_is_reached_from_the_first_and_every_import_exists() -> None:
    reached, left = set[Path](), [(STATIC / "app.js").resolve()]
    while left:
        module = left.pop()
        if module not in reached:
            reached.add(module)
            left += imports_of(module)
    assert reached == {module.resolve() for module in MODULES}


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.name)
def test_no_module_reads_text_as_html_or_as_code(path: Path) -> None:
    ways = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|DOMParser|\beval\(|new Function|srcdoc|\"style\"|\bstyle:"
    assert re.findall(ways, path.read_text()) == []


@pytest.mark.parametrize(
    "path", [*MODULES, STATIC / "index.html", STATIC / "style.css"], ids=lambda path: path.name
)
def test_no_file_names_another_server(path: Path) -> None:
    addresses = re.findall(r"https?://[^\"'\s)]*", path.read_text())
    assert [address for address in addresses if address != ONLY_NAME_OF_SVG] == []


def test_the_first_page_has_no_script_or_style_of_its_own() -> None:
    index = (STATIC / "index.html").read_text()
    assert re.findall(r"<style|\bstyle=|\bon\w+=|<script(?![^>]*\bsrc=)", index) == []
