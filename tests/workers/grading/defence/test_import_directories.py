"""Right fixes that move the code and say where it is are paid; what else such directories could bring is not."""

import asyncio
from collections.abc import Iterable
from functools import partial

import pytest

from pipeline.task import ExitCode, File
from tests.workers.attacks.cheats import SAY_ALL
from tests.workers.attacks.governing import (
    BENT_CHECKER,
    CHECKED_TESTS,
    CHECKER,
    INSTALLED,
    PASSING_PLUGIN,
    written,
)
from tests.workers.attacks.patches import edited, gone, link, new
from tests.workers.attacks.scenes import ASSERTS
from tests.workers.claims import make_claim, make_task
from tests.workers.conftest import FILES, RepoImage
from workers.grading.defence.governing import added, searchable
from workers.grading.grade import Grader

WORKDIR = "/workspace"


@pytest.mark.parametrize(
    ("path", "content"),
    [
        ("setup.cfg", "[metadata]\nname = a\n\n[tool:pytest]\npythonpath = lib\n    src\naddopts = -k x\n"),
        ("tox.ini", "[pytest]\npythonpath=src lib\n"),
        (".pytest.ini", "[pytest]\npythonpath = 'src' ./lib/\n"),
        ("pyproject.toml", '[tool.pytest.ini_options]\npythonpath = ["src", "lib"]\n'),
        ("pyproject.toml", '[tool.pytest]\npythonpath = ["src", "lib"]\n'),
        ("pyproject.toml", 'tool.pytest.ini_options.pythonpath = "src lib"\n'),
        ("pytest.toml", '[pytest]\npythonpath = ["src", "lib"]\n'),
        ("sub/pytest.ini", "[pytest]\npythonpath = ../src ../lib\n"),
    ],
)
def test_import_directories_are_read_from_every_file_of_settings(path: str, content: str) -> None:
    assert added(path, None, content.encode(), WORKDIR) == {"src", "lib"}


@pytest.mark.parametrize(
    "code",
    [
        "sys.path.insert(0, os.path.join(os.path.dirname(__file__), '..', 'src'))",
        "sys.path.insert(0, os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), 'src'))",
        "sys.path.append(os.path.abspath(os.path.join(os.path.dirname(__file__), os.pardir, 'src')))",
        "sys.path.insert(0, os.path.realpath(f'{os.path.dirname(__file__)}/../src'))",
        "sys.path.insert(0, dirname(dirname(__file__)) + '/src')",
        "sys.path.insert(0, 'src')",
        "sys.path.insert(0, os.path.join(os.getcwd(), 'src'))",
        "sys.path.insert(0, str(Path(__file__).parent.parent / 'src'))",
        "sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1].joinpath('src')))",
        "sys.path.append((Path.cwd() / 'src').as_posix())",
        "sys.path[:0] = [str(Path(__file__).parent.with_name('src'))]",
        "sys.path = ['/workspace/src', *sys.path]",
        "sys.path = ['src'] + sys.path",
        "sys.path += ['src']",
        "sys.path.extend(['src', another()])",
        "site.addsitedir('src')",
        "ROOT: Path = Path(__file__).parent.parent\nSRC = ROOT / 'src'\nif str(SRC) not in sys.path:\n    sys.path.insert(0, str(SRC))",
        "def pytest_configure(config):\n    here = os.path.dirname(__file__)\n    sys.path.insert(0, here + '/../src')",
    ],
)
def test_import_directories_are_read_from_what_a_conftest_says(code: str) -> None:
    text = f"import os, pathlib, site, sys\nfrom os.path import dirname\nfrom pathlib import Path\n{code}\n"
    assert added("./tests/conftest.py", b"", text.encode(), WORKDIR) == {"src"}


@pytest.mark.parametrize(
    "content",
    [
        "sys.path.insert(0, found())",
        "sys.path.insert(0, os.environ['SRC'])",
        "sys.path.insert(0, 'src' if here else 'lib')",
        "sys.path.insert(0, '/usr/lib/src')",
        "sys.path.insert(0, '../src')",
        "sys.path.insert(0, '.')",
        "sys.path.insert(0, '.git/hooks')",
        "sys.path.insert(0, 'a:b')",
        "sys.path.insert(0, 'src\\nimport os')",
        "sys.path.insert(0, 'evil.egg')",
        "sys.path.insert(0, 'EVIL.EGG/inside')",
        "sys.path.insert(0, Path(__file__).parents[9])",
        "sys.path.remove('src')",
        "name = 'src'\nname = found()\nsys.path.insert(0, name)",
        "sys.path.insert(0, " + "(" * 5000,
        "a = 'src' " + "+ 'src' " * 5000 + "\nsys.path.insert(0, a)",
        "\0",
        "\udcff",
    ],
)
def test_what_is_not_known_or_elsewhere_is_no_import_directory(content: str) -> None:
    encoded = content.encode("utf-8", "surrogateescape")
    assert added("conftest.py", None, encoded, WORKDIR) == set()


def test_only_directories_that_are_new_count() -> None:
    old, new_text = "[pytest]\npythonpath = src\n", "[pytest]\npythonpath = src lib\n"
    assert added("pytest.ini", old.encode(), new_text.encode(), WORKDIR) == {"lib"}
    assert added("pytest.ini", old.encode(), None, WORKDIR) == set()
    for name in ("pytest.ini", "pyproject.toml", "setup.cfg"):
        assert added(name, None, b"pythonpath [ = src", WORKDIR) == set()


@pytest.mark.parametrize(
    ("entries", "is_searched"),
    [
        (("dsrc/calc", "dsrc/README.md", "dsrc/__init__.py"), True),
        (("dsrc/calc.py", "fsrc/calc.py", "ftests/test_calc.py"), True),
        (("dsrc/calc", "fsrc/calc/__init__.py", "ftests/calc/test_sum.py"), True),
        (("dsrc/calc", "fother/calc.py", "pother/__init__.py"), True),
        (("dsrc/calc", "p__init__.py", "fsetup.py"), True),
        (("dsrc/calc", "p__init__.py", "fcalc.py"), False),
        (("dsrc/calc", "fother/calc.py"), False),
        (("dsrc/checks.py", "flib/checks/sub/same.py"), False),
        (("dsrc/tests", "ftests/unit/test_calc.py"), False),
        (("dsrc/test_calc.py", "ftests/test_calc.py"), False),
        (("dsrc/parameterized.cpython-311-x86_64-linux-gnu.so", "iparameterized.py"), False),
        (("dsrc/parameterized", "iparameterized-1.0.dist-info", "iparameterized"), False),
        (("dsrc/pytest.py",), False),
        (("dsrc/sitecustomize",), False),
        (("dsrc/json",), False),
        (("dsrc/statistics.abi3.so",), False),
    ],
)
def test_a_directory_is_searched_if_each_of_its_modules_has_a_name_of_its_own(
    entries: tuple[str, ...], is_searched: bool
) -> None:
    assert searchable("\0".join(entries).encode()) == ["src"] * is_searched


BY_OS = "import os\nimport sys\n\nsys.path.insert(0, os.path.join(os.path.dirname(__file__), 'src'))"
BY_PATHLIB = (
    "import sys\nfrom pathlib import Path\n\nsys.path.append(str(Path(__file__).parent.parent / 'src'))"
)
CALC = FILES["repo/calc.py"]
FIXED = CALC.replace("a - b", "a + b", 1)
SETTINGS = {
    "setup.cfg": edited("setup.cfg", "addopts =", "pythonpath = {}\naddopts ="),
    "pytest.ini": new("pytest.ini", "[pytest]\npythonpath = {}"),
    "tox.ini": new("tox.ini", "[pytest]\npythonpath = {}"),
    "pyproject.toml": new("pyproject.toml", '[tool.pytest.ini_options]\npythonpath = ["{}"]'),
}


def conftest(code: str) -> bytes:
    lines = code.splitlines()
    head = f"diff --git a/conftest.py b/conftest.py\n--- a/conftest.py\n+++ b/conftest.py\n@@ -0,0 +1,{len(lines)} @@\n"
    return (head + "".join(f"+{line}\n" for line in lines)).encode()


def says(directory: str, name: str = "pytest.ini") -> bytes:
    return SETTINGS[name].replace(b"{}", directory.encode())


MOVED = gone("calc.py") + new("src/calc.py", FIXED)
MOVES = {
    **{name: MOVED + says("src", name) for name in SETTINGS},
    "conftest.py": MOVED + conftest(BY_OS),
    "tests/conftest.py": MOVED + new("tests/conftest.py", BY_PATHLIB),
    "a package": gone("calc.py")
    + new("lib/python/calc/__init__.py", "from .sums import add, sub")
    + new("lib/python/calc/sums.py", FIXED)
    + says("lib/python"),
}


async def values(
    grader: Grader, image: RepoImage, patches: Iterable[bytes], *, script: str = "", **more: str
) -> list[float]:
    """What the patches are worth. `more`: text of further hidden tests by path, and `setup`."""
    setup = more.pop("setup", "")
    tests = {"tests/test_calc.py": ASSERTS, **more}
    verdict = ExitCode(
        eval_script=f"set -e\n{script or 'python3 -m pytest tests/test_calc.py'}\n",
        protected_paths=tuple(tests),
        files=tuple(File(path=path, content=text.encode()) for path, text in tests.items()),
    )
    task = make_task(image.tag, base_commit=image.commit, verdict=verdict, setup_script=setup)
    places = asyncio.Semaphore(3)

    async def value(patch: bytes) -> float:
        async with places:
            return (await grader.grade(make_claim(task), patch)).value

    return await asyncio.gather(*map(value, patches))


@pytest.mark.slow
@pytest.mark.docker
async def test_a_fix_may_move_the_code_and_have_tests_find_it_there(
    grader: Grader, repo_image: RepoImage
) -> None:
    found = await values(grader, repo_image, MOVES.values())
    assert dict(zip(MOVES, found, strict=True)) == dict.fromkeys(MOVES, 1.0)
    script = "cd tests\nPYTHONPATH=.. pytest test_calc.py"
    assert await values(grader, repo_image, [MOVES["setup.cfg"]], script=script) == [1.0]


@pytest.mark.docker
async def test_a_wrong_fix_that_moves_the_code_learns_that_it_was_found(
    grader: Grader, repo_image: RepoImage
) -> None:
    files = (File(path="tests/test_calc.py", content=ASSERTS.encode()),)
    verdict = ExitCode(eval_script="python3 -m pytest tests/test_calc.py\n", files=files)
    task = make_task(repo_image.tag, base_commit=repo_image.commit, verdict=verdict)
    patch = gone("calc.py") + new("src/calc.py", CALC) + conftest(f"{BY_OS}\n{PASSING_PLUGIN}")
    reward = await grader.grade(make_claim(task), patch)
    said = "put back, because they govern the tests: conftest.py, but for the import directories src"
    assert (reward.value, reward.decided_by) == (0.0, f"exit status 1; {said}")


PLUGIN = new("{}/entry_points.txt", "[pytest11]\nevil = evil_plugin") + new(
    "{}/PKG-INFO", "Metadata-Version: 2.1\nName: evil\nVersion: 1"
)


def plugin(folder: str) -> bytes:
    """What makes a module evil_plugin a plugin of pytest."""
    return PLUGIN.replace(b"{}", folder.encode())


EVIL = "shim/evil_plugin.py"
ATTACKS = {
    "pytest": new("shim/pytest.py", SAY_ALL),
    "a standard module": new("shim/argparse.py", SAY_ALL),
    "a package of the runner": new("shim/_pytest/__init__.py", SAY_ALL),
    "sitecustomize": new("shim/sitecustomize.py", SAY_ALL) + new("shim/usercustomize.py", SAY_ALL),
    "a package sitecustomize": new("shim/sitecustomize/__init__.py", SAY_ALL),
    "a package usercustomize": new("shim/usercustomize/__init__.py", SAY_ALL),
    "a link usercustomize": link("shim/usercustomize.py", "../src.py") + new("src.py", SAY_ALL),
    "what Debian's sitecustomize imports": new("shim/apport_python_hook.py", SAY_ALL),
    "Jython's module": new("shim/org/python/core.py", SAY_ALL),
    "a .pth file": new("shim/evil.pth", "import os; os._exit(0)"),
    "conftest.py": new("shim/conftest.py", PASSING_PLUGIN) + new("shim/calc.py", CALC),
    "a plugin": plugin("shim/evil.dist-info") + new(EVIL, SAY_ALL),
    "a plugin in large letters": plugin("shim/evil.EGG-INFO") + new(EVIL, SAY_ALL),
    "a plugin behind a link": plugin("shim/meta") + link("shim/evil.dist-info", "meta") + new(EVIL, SAY_ALL),
}


@pytest.mark.slow
@pytest.mark.docker
async def test_no_module_of_an_import_directory_stands_in_for_the_runner(
    grader: Grader, repo_image: RepoImage
) -> None:
    attacks = {name: patch + says("shim") for name, patch in ATTACKS.items()}
    attacks["an egg"] = (
        says("evil.egg") + plugin("evil.egg/EGG-INFO") + new("evil.egg/evil_plugin.py", SAY_ALL)
    )
    attacks["what is no import directory"] = MOVED.replace(b"a + b", b"a - b") + conftest(
        f"{BY_OS}\n{PASSING_PLUGIN}"
    )
    attacks["other settings"] = new("pytest.ini", "[pytest]\npythonpath = shim\naddopts = -k sub")
    attacks["Jython's module at the root"] = new("org/python/core.py", SAY_ALL)
    attacks["Jython's module behind a link at the root"] = new("jython/python.py", SAY_ALL) + link(
        "org", "jython"
    )
    attacks["a plugin in large letters at the root"] = plugin("evil.DIST-INFO") + new(
        "evil_plugin.py", SAY_ALL
    )
    attacks["a plugin behind a link at the root"] = (
        plugin("meta") + link("evil.egg-info", "meta") + new("evil_plugin.py", SAY_ALL)
    )
    found = await values(grader, repo_image, attacks.values())
    assert dict(zip(attacks, found, strict=True)) == dict.fromkeys(attacks, 0.0)


CHECKS = CHECKED_TESTS["tests/test_calc.py"]
BENT = partial(new, text=BENT_CHECKER)


@pytest.mark.slow
@pytest.mark.docker
async def test_no_module_of_an_import_directory_stands_in_for_what_tests_check_with(
    grader: Grader, repo_image: RepoImage
) -> None:
    fix = edited("calc.py", "a - b", "a + b")
    installed = {"tests/test_calc.py": CHECKS, "setup": f"echo {CHECKER!r} >{INSTALLED}/parameterized.py\n"}
    attacks = [
        BENT("shim/parameterized.py"),
        BENT("shim/parameterized/__init__.py"),
        BENT("other/other.py") + link("shim/parameterized.py", "../other/other.py"),
        BENT("other/parameterized.py") + link("shim", "other"),
    ]
    patches = [fix, *(patch + says("shim") for patch in attacks)]
    assert await values(grader, repo_image, patches, **installed) == [1.0, 0.0, 0.0, 0.0, 0.0]

    beside = {
        "tests/test_calc.py": CHECKS.replace("parameterized", "checking"),
        "setup": f"{written('lib/checking.py', CHECKER + chr(10), '644')}echo /workspace/lib >{INSTALLED}/lib.pth\n",
    }
    patches = [
        fix,
        BENT("shim/checking.py") + says("shim"),
        BENT("shim/checking/__init__.py") + conftest(BY_OS.replace("src", "shim")),
    ]
    assert await values(grader, repo_image, patches, **beside) == [1.0, 0.0, 0.0]

    hidden = {
        "tests/test_calc.py": CHECKS.replace("parameterized", "tests.checking"),
        "tests/checking.py": CHECKER,
    }
    bent = new("shim/tests/__init__.py", "# tests") + BENT("shim/tests/checking.py") + says("shim")
    assert await values(grader, repo_image, [fix, bent], **hidden) == [1.0, 0.0]
