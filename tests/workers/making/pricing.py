"""A small repository with a history of every kind, which becomes a package at its end."""

from tests.workers.making.repositories import Repository

PRICING = "def discounted(cents, percent):\n    return cents * (100 - percent) // 100\n"
ROUNDS = PRICING.replace("cents * (100 - percent)", "(cents * (100 - percent) + 50)")
SHIPS = "\n\ndef shipped(cents):\n    return cents + 490\n"
SHIPS_FREE = "\n\ndef shipped(cents):\n    return cents if cents >= 5000 else cents + 490\n"
TEST = "from pricing import discounted\n\n\ndef test_discounted():\n    assert discounted(1000, 10) == 900\n"
TEST_HALF = "\n\ndef test_half_cents():\n    assert discounted(999, 50) == 500\n"
TEST_SHIPPED = "from pricing import shipped\n\n\ndef test_shipped():\n    assert shipped(1000) == 1490\n"
TEST_FREE = "\n\ndef test_free():\n    assert shipped(6000) == 6000\n"
TEST_NETWORK = (
    "\n\ndef test_network():\n    import socket\n    socket.create_connection(('192.0.2.1', 80), 1)\n"
)
TEST_FLAKY = "import os\nfrom rates import rate\n\n\ndef test_rate():\n    assert rate() == 7 and os.urandom(1)[0] > 250\n"
PYPROJECT = (
    '[project]\nname = "pricing"\nversion = "1"\ndependencies = ["iniconfig"]\n'
    '[build-system]\nrequires = ["setuptools"]\nbuild-backend = "setuptools.build_meta"\n'
    '[tool.setuptools]\npy-modules = ["pricing", "rates"]\n'
)


def with_history(made: Repository) -> dict[str, str]:
    """Commits of every kind, by name."""
    shas: dict[str, str] = {}
    rates = {
        "rates.py": "def rate():\n    return 6\n",
        "tests/test_rates.py": "def test_nothing():\n    assert 1\n",
    }
    files: dict[str, str | bytes | None] = {
        "pricing.py": PRICING,
        "tests/test_pricing.py": TEST,
        "LICENSE.txt": "MIT\n",
    }
    made.commit("Begin", {**files, **rates})
    shas["docs"] = made.commit("docs: say what it is", {"README.md": "Prices\n"})
    shas["fix"] = made.commit(
        "Half cents are lost in discounts (#3)\n\nHalf of 999 cents is 499.5 cents, and half a cent is rounded up.\n",
        {"pricing.py": ROUNDS, "tests/test_pricing.py": TEST + TEST_HALF + TEST_NETWORK},
    )
    shas["refactoring"] = made.commit(
        "refactor: a name for one hundred per cent, which was written twice",
        {
            "pricing.py": f"WHOLE = 100\n\n\n{ROUNDS.replace('100', 'WHOLE')}",
            "tests/test_pricing.py": TEST + TEST_HALF,
        },
    )
    shas["format"] = made.commit(
        "style: one line fewer in the code and in its tests, and nothing else",
        {
            "pricing.py": f"WHOLE = 100\n\n{ROUNDS.replace('100', 'WHOLE')}",
            "tests/test_pricing.py": TEST + TEST_HALF.lstrip("\n"),
        },
    )
    shas["bot"] = made.commit(
        "Bump the rate of something to the newest one",
        {
            "rates.py": "def rate():\n    return 5\n",
            "tests/test_rates.py": "def test_nothing():\n    assert 2\n",
        },
        "renovate[bot] <renovate@example.invalid>",
    )
    return shas | with_odd_ends(made)


def with_odd_ends(made: Repository) -> dict[str, str]:
    """Further commits: tests that say nothing, a message that says all, a flaky test, a merge, and a package."""
    shas: dict[str, str] = {}
    shas["useless test"] = made.commit(
        "Rates are those of this year now, and so are the tests of them",
        {
            "rates.py": "def rate():\n    return 6\n",
            "tests/test_rates.py": "def test_nothing():\n    assert 3\n",
        },
    )
    shas["given away"] = made.commit(
        "Use `_half_up(cents)` in discounts instead of adding fifty in two places of it",
        {
            "pricing.py": "def _half_up(cents):\n    return (cents + 50) // 100\n\n\n"
            "def discounted(cents, percent):\n    return _half_up(cents * (100 - percent))\n",
            "tests/test_pricing.py": TEST + TEST_HALF.replace("999", "997").replace("500", "499"),
        },
    )
    shas["flaky"] = made.commit(
        "The rate is seven, as the law has it since the first of January",
        {"rates.py": "def rate():\n    return 7\n", "tests/test_rates.py": TEST_FLAKY},
    )
    made.git("checkout", "-q", "-b", "topic")
    made.commit("Ship", {"pricing.py": ROUNDS + SHIPS})
    made.commit("Test it", {"tests/test_pricing.py": TEST, "tests/test_shipped.py": TEST_SHIPPED})
    made.git("checkout", "-q", "main")
    made.git(
        *("merge", "-q", "--no-ff", "topic", "-m"),
        "Merge branch 'topic'\n\nThere is no `shipped`, which adds 490 cents to an order's price.",
        number=20,
    )
    shas["merge"] = made.git("rev-parse", "HEAD")
    shas["package"] = made.commit("Package it", {"pyproject.toml": PYPROJECT})
    shas["packaged fix"] = made.commit(
        "Shipping should be free from 5000 cents on, but an order of 6000 cents pays it",
        {"pricing.py": ROUNDS + SHIPS_FREE, "tests/test_shipped.py": TEST_SHIPPED + TEST_FREE},
    )
    return shas
