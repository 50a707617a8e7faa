"""README.md fits on two screens; links lead somewhere; files that are named exist; the table of changes names two files at most."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.commands import ROOT, blocks

PAGES = sorted(
    [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]
    + [
        page
        for package in ("benchmarks", "infra", "pipeline", "trainer", "workers")
        for page in (ROOT / package).rglob("*.md")
    ]
)
NAMED = re.compile(
    r"`((?:\.\./)?(?:benchmarks|docs|examples|infra|pipeline|tests(?=/[a-z])|trainer|workers)/[\w./*-]*)`"
)
LINK = re.compile(r"\]\(([^)\s]+)\)")


def relative(page: Path) -> str:
    return str(page.relative_to(ROOT))


def prose(page: Path) -> str:
    """The page without what stands in its fenced blocks."""
    text = page.read_text()
    fenced = {number for first, block in blocks(text) for number in range(first, first + len(block))}
    return "\n".join(line for number, line in enumerate(text.splitlines(), start=1) if number not in fenced)


def test_the_readme_is_short() -> None:
    lines = (ROOT / "README.md").read_text().splitlines()
    assert len(lines) <= 130
    assert [line for line in lines if len(line) > 120] == []


def test_the_readme_and_the_list_of_pages_link_every_page() -> None:
    pages = {page.name for page in (ROOT / "docs").glob("*.md")} - {"README.md"}
    linked = set(LINK.findall((ROOT / "README.md").read_text()))
    assert pages <= {Path(link).name for link in linked if link.startswith("docs/")}
    assert pages <= set(LINK.findall((ROOT / "docs/README.md").read_text()))


def test_the_readme_names_what_a_worker_needs() -> None:
    train = (ROOT / "README.md").read_text().partition("## Train")[2].partition("\n## ")[0]
    help_text = subprocess.run(
        [sys.executable, "-m", "workers.run", "--help"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    for variable in ("SWERVE_REDIS_URL", "SWERVE_ROUTER_URL", "SWERVE_SLOTS", "DOCKER_HOST"):
        assert variable in train
        assert variable in help_text
    table = (ROOT / "workers/README.md").read_text()
    named = set(re.findall(r"SWERVE_[A-Z_]+[A-Z]", table.partition("| `SWERVE_REDIS_URL`")[2]))
    assert {name for name in named if "JUDGE" not in name} <= set(
        re.findall(r"SWERVE_[A-Z_]+[A-Z]", help_text)
    )


@pytest.mark.parametrize("page", PAGES, ids=relative)
def test_links_lead_somewhere(page: Path) -> None:
    for link in LINK.findall(prose(page)):
        if not link.startswith("https://"):
            path, _, heading = link.partition("#")
            target = (page.parent / path).resolve() if path else page
            assert target.exists(), link
            assert not heading or heading in anchors(target), link


def anchors(page: Path) -> set[str]:
    """What GitHub makes of the headings of a page."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), flags=re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=relative)
def test_files_that_are_named_exist(page: Path) -> None:
    missing = [name for name in NAMED.findall(prose(page)) if not is_there(name, page.parent)]
    assert missing == []


def is_there(name: str, folder: Path) -> bool:
    if "*" in name:
        return any(ROOT.glob(name))
    return (ROOT / name).exists() or (folder / name).exists()


def test_every_page_of_the_docs_is_in_their_index() -> None:
    index = (ROOT / "docs" / "README.md").read_text()
    pages = {page.name for page in (ROOT / "docs").glob("*.md")} - {"README.md"}
    assert pages == set(re.findall(r"^\| \[([a-z_]+\.md)\]", index, flags=re.MULTILINE))


def test_each_foreseeable_change_has_its_place_in_two_files_at_most() -> None:
    _, _, section = (ROOT / "ARCHITECTURE.md").read_text().partition("\n## Where would I change…?\n")
    rows = [line.split(" | ") for line in section.partition("\n## ")[0].splitlines() if line.startswith("| ")]
    places = {change: re.findall(r"`([^`]+)`", place) for change, place, _ in rows[1:]}
    assert len(places) >= 12
    for change, files in places.items():
        assert 1 <= len(files) <= 2, change
        assert [name for name in files if not (ROOT / name).is_file()] == [], change


@pytest.mark.parametrize("package", ["benchmarks", "infra", "pipeline", "trainer", "workers"])
def test_the_map_of_a_package_names_each_module_and_nothing_else(package: str) -> None:
    folder = ROOT / package
    lines = (folder / "README.md").read_text().splitlines()
    cells = [line.split(" | ")[0] for line in lines if line.startswith("| `")]
    named = {name for cell in cells for name in re.findall(r"`([\w./-]+\.(?:py|sh)|[\w./-]+/)`", cell)}
    modules = {path.name for path in folder.glob("*.py")} - {"__init__.py", "__main__.py"}
    assert modules <= named
    assert [name for name in named if not any(folder.rglob(name.rstrip("/")))] == []
