"""No message, however wrong, breaks whoever reads it; and none is ever unpickled."""

import ast
from pathlib import Path

import pytest
from arq.connections import ArqRedis

from tests.pipeline.fuzz import fuzz

ROOT = Path(__file__).parents[2]
UNPICKLERS = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "shelve"}
PACKAGES = ("pipeline", "workers", "trainer", "infra")


# Quick: no message that arrives, whatever it holds, breaks a process.
async def test_a_thousand_bad_messages_on_every_wire_break_nothing(pool: ArqRedis) -> None:
    for name, tally in (await fuzz(pool, 1000)).items():
        assert tally.refused > 500, name


@pytest.mark.slow
def test_nothing_is_ever_pickled() -> None:
    files = [path for package in PACKAGES for path in (ROOT / package).rglob("*.py")]
    assert len(files) > 50
    assert [path for path in files if imported(path) & UNPICKLERS] == []
    # The witness's own code is compiled beforehand, which writes code objects and reads none.
    used = {path: uses(path, "marshal") for path in files}
    assert {path.name: names for path, names in used.items() if names} == {"witness.py": {"dumps"}}


def uses(path: Path, module: str) -> set[str]:
    """What a file takes of `module`, which it imports as a whole."""
    nodes = list(ast.walk(ast.parse(path.read_text())))
    partly = {
        alias.name
        for node in nodes
        if isinstance(node, ast.ImportFrom) and node.module == module
        for alias in node.names
    }
    owned = [node for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)]
    return partly | {
        node.attr for node in owned if isinstance(node.value, ast.Name) and node.value.id == module
    }


def imported(path: Path) -> set[str]:
    """Top-level names of the modules that a file imports, wherever in it."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add((node.module or "").partition(".")[0])
    return names
