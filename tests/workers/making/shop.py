"""A small repository in whose code bugs can be planted, and runs of its tests as a container would make them, without a container."""

import os
import shutil
import subprocess
import sys
from collections.abc import Collection, Mapping
from pathlib import Path

import msgspec

from tests.workers.making.repositories import Repository
from workers.making.reaching import PLUGIN, TestsRun, read_report

FILES: dict[str, str | bytes | None] = {
    "shop.py": '''"""Prices in cents."""

from vendor.rates import rate


def discounted(cents, percent):
    """The price after a discount, rounded down; a negative discount is a ValueError."""
    if percent < 0:
        raise ValueError("a discount is not negative")
    return cents * (100 - percent) // 100


def shipped(cents, express=False):
    total = cents
    if cents < 5000:
        total += 490
    if express:
        total += rate()
    return total


def rounded(cents):
    rest = cents % 5
    cents -= rest
    return cents


def unused(cents):
    return cents + 1
''',
    "tests/test_discounts.py": """import pytest
from shop import discounted


def test_a_discount_is_taken():
    assert discounted(1000, 10) == 900


def test_a_negative_discount():
    with pytest.raises(ValueError):
        discounted(1000, -1)


class TestLarge:
    def test_half(self):
        price = 20000
        assert discounted(price, 50) == 10000
""",
    "tests/test_rounding.py": """from shop import rounded
from prices import odd


def test_five_cents():
    assert rounded(odd(1)) == 15
""",
    "tests/prices.py": "def odd(more):\n    return 15 + more\n",
    "vendor/rates.py": "def rate():\n    return 500 + 500\n",
    "tests/test_shipping.py": """import pytest
from shop import shipped


@pytest.mark.parametrize(("cents", "total"), [(1000, 1490), (6000, 6000)])
def test_parcels(cents, total):
    assert shipped(cents) == total


def test_express():
    assert shipped(6000, express=True) == 7000
""",
    "LICENSE": "MIT\n",
    "pytest.ini": "[pytest]\npythonpath = .\n",
}


def shop_at(path: Path, others: Mapping[str, str] | None = None) -> Repository:
    """The repository in one commit, with other contents of some files."""
    made = Repository.at(path)
    made.commit("Begin", {**FILES, **(others or {})})
    return made


def report_of(folder: Path, tests: Collection[str] = ()) -> bytes:
    """The report of a run of these tests, or of all, in a work tree."""
    beside = folder.with_name(f"{folder.name}-plugin")
    beside.mkdir(exist_ok=True)
    shutil.copy(PLUGIN, beside)
    (beside / "tests.json").write_bytes(msgspec.json.encode([*tests]))
    report = beside / "report.jsonl"
    report.unlink(missing_ok=True)
    env = os.environ | {
        "PYTHONPATH": str(beside),
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        "REACH_REPORT": str(report),
        "REACH_TESTS": str(beside / "tests.json") if tests else "",
    }
    words = [sys.executable, "-m", "pytest", "-p", PLUGIN.stem, "-p", "no:cacheprovider", "-q", "--tb=no"]
    subprocess.run(words, cwd=folder, env=env, stdout=subprocess.DEVNULL, check=False)
    return report.read_bytes()


def run_of(folder: Path, tests: Collection[str] = ()) -> TestsRun:
    return read_report(report_of(folder, tests))
