"""The rules of AGENTS.md that can be measured."""

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("pipeline", "workers", "trainer", "infra")
FOLDERS = (*PACKAGES, "benchmarks", "docs", "examples", "tests")
MAX_FUNCTION_LINES = 55
MAX_TOP_MODULES = 12
BANNED = {"common", "core", "helpers", "misc", "shared", "util", "utils"}
TEXT = (".py", ".sh", ".c", ".lua", ".md", ".toml", ".yaml", ".sbatch")
FILES = [
    *(Path(path.name) for pattern in ("*.py", "*.md") for path in sorted(ROOT.glob(pattern))),
    *sorted(
        path.relative_to(ROOT)
        for folder in FOLDERS
        for path in (ROOT / folder).rglob("*")
        if path.suffix in TEXT
    ),
]
PYTHON = [path for path in FILES if path.suffix == ".py"]


def parsed(path: Path) -> ast.Module:
    return ast.parse((ROOT / path).read_text())


def functions(path: Path) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    return (
        node for node in ast.walk(parsed(path)) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    )


def test_no_function_is_longer_than_a_screen() -> None:
    assert {
        f"{path}:{function.lineno} {function.name}": lines
        for path in PYTHON
        for function in functions(path)
        if function.end_lineno and (lines := function.end_lineno - function.lineno + 1) > MAX_FUNCTION_LINES
    } == {}


@pytest.mark.parametrize("package", ["trainer", "workers"])
def test_the_top_of_a_package_holds_a_dozen_modules_at_most(package: str) -> None:
    modules = [path.name for path in (ROOT / package).glob("*.py") if path.name != "__init__.py"]
    assert len(modules) <= MAX_TOP_MODULES, sorted(modules)


def test_no_two_classes_have_one_name() -> None:
    places: dict[str, list[str]] = defaultdict(list)
    for path in PYTHON:
        if path.parts[0] in PACKAGES:
            for node in ast.walk(parsed(path)):
                if isinstance(node, ast.ClassDef):
                    places[node.name].append(str(path))
    assert {name: where for name, where in places.items() if len(where) > 1} == {}


def test_no_module_is_called_after_nothing() -> None:
    assert [str(path) for path in PYTHON if {path.stem, *path.parts} & BANNED] == []


def test_a_comment_is_no_reason_to_break_a_statement_at_its_brackets() -> None:
    # A formatter puts a comment that does not fit behind its value into brackets, or behind them. It goes on the line above instead.
    scar = re.compile(
        r"= \(\n +[^\n]*[^\n,]  # [^\n]*\n *\)$|^ *[\])}][^\n]*  # (?!fmt:|pyright:)[^\n]*",
        flags=re.MULTILINE,
    )
    found = {str(path): scar.findall((ROOT / path).read_text()) for path in PYTHON}
    assert {name: scars for name, scars in found.items() if scars} == {}


# Phrases that leave open who does what, or how many there are.
HABITS = re.compile(r'\b(?:is|are|was|were) told\b|\bso many\b|"""Of ')


def test_pages_docstrings_and_comments_say_who_does_what_and_how_many_there_are() -> None:
    read = [
        path
        for path in FILES
        if path.suffix in (".md", ".py")
        and (path.parts[0] in (*PACKAGES, "docs") or path.name in ("README.md", "ARCHITECTURE.md"))
    ]
    assert len(read) > len(PACKAGES)
    # A phrase may continue in the next line of a comment.
    texts = {path: " ".join(re.sub(r"\n\s*#", "\n", (ROOT / path).read_text()).split()) for path in read}
    assert {str(path): found for path, text in texts.items() if (found := HABITS.findall(text))} == {}


def test_every_task_has_a_name_by_which_a_dump_of_tasks_shows_it() -> None:
    unnamed = [
        f"{path}:{call.lineno}"
        for path in PYTHON
        if path.parts[0] in ("infra", "pipeline", "workers")
        for call in ast.walk(parsed(path))
        if isinstance(call, ast.Call)
        and isinstance(call.func, ast.Attribute)
        and call.func.attr == "create_task"
        and not any(keyword.arg == "name" for keyword in call.keywords)
    ]
    assert unnamed == []
