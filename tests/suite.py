"""Runs the tests in phases, says where it is, and explains failures by a second run: `python -m tests.suite quick|all [PATH ...]`.
`python -m tests.suite changed` runs the quick tests of what differs from the branch `main`, `python -m tests.suite count` prints how many
tests of each package are quick.

1. Tests run two at a time, scheduled by tests/scheduling.py; much of a test is waiting for containers and processes.
2. Tests marked `alone` follow one at a time: they use up what the machine has, or time it.
3. What failed runs once more by itself. The second run explains a failure; it excuses at most NUM_EXCUSED, and none in NEVER_EXCUSED.

`quick` leaves out what is marked `slow`. The last lines name each failure with its assertion. The exit status is 0 if the run is green,
1 if it is red, 2 for a wrong command.
"""

import argparse
import ast
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

from infra import processes

ROOT = Path(__file__).parents[1]
RECORD = "SUITE_RECORD"  # names the file that `pytest_runtest_logreport` appends to
QUICK = "not slow"
NUM_WORKERS = 2
NUM_SLOWEST = 5
MAX_RERUN = 10  # more failures than this have one cause, which a second run does not explain
MAX_FAILED = 30  # a phase stops there
NUM_EXCUSED = 2
QUICK_TESTS = pytest.StashKey[Counter[str]]()  # how many of each package were collected
AGAIN = "what failed, once more and alone"
HANG_S = 1500.0
"""Without the begin or end of any test for so long, a phase hangs where no limit of a test reaches: it is above all of them. `timeout` in
pyproject.toml ends what can be interrupted.
"""
ENDING_S = 60.0  # for pytest to end its fixtures after Ctrl-C
NEVER_EXCUSED = (
    "tests/infra/serving/",
    "tests/infra/test_chaos",
    "tests/infra/test_engine.py",
    "tests/journeys/test_a_judge_dies.py",
    "tests/journeys/test_a_worker_dies.py",
    "tests/pipeline/",
    "tests/trainer/batching/",
    "tests/trainer/learner/",
    "tests/trainer/loop/",
    "tests/trainer/rollouts/",
    "tests/trainer/test_feed.py",
    "tests/trainer/test_resume.py",
    "tests/trainer/test_run.py",
    "tests/trainer/weights/",
    "tests/workers/attacks/",
    "tests/workers/claiming/",
    "tests/workers/episodes/",
    "tests/workers/foreign/",
    "tests/workers/grade/",
    "tests/workers/grading/",
    "tests/workers/isolation/",
    "tests/workers/policy/",
    "tests/workers/sandbox/",
    "tests/workers/test_rollout.py",
    "tests/workers/verify/",
)
"""Attacks, grading, queue, intake, tokens, weights and chaos: a failure there may be a race of the product."""


# -- What pytest itself does: `-p tests.suite` ----------------------------------------------------------------------------------------


def pytest_collection_finish(session: pytest.Session) -> None:
    _append({"collected": [item.nodeid for item in session.items]})


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_node_collection_finished(ids: Sequence[str]) -> None:
    _append({"collected": list(ids)})


def pytest_collectreport(report: pytest.CollectReport) -> None:
    if report.failed:
        text = str(report.longrepr)
        lines = "\n".join(text.strip().splitlines()[-4:])
        _append({"test": report.nodeid, "outcome": "failed", "duration_s": 0.0, "text": text, "assertion": lines})


def pytest_runtest_logstart(nodeid: str) -> None:
    _append({"test": nodeid, "began_at": time.time()})


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    _append(
        {
            "test": report.nodeid,
            "when": report.when,
            "outcome": report.outcome,
            "duration_s": report.duration,
            "text": "" if report.passed else str(report.longrepr),
            "assertion": "" if report.passed else _assertion(report),
        }
    )


def pytest_runtest_logfinish(nodeid: str) -> None:
    _append({"test": nodeid, "ended_at": time.time()})


def _assertion(report: pytest.TestReport) -> str:
    """Where a test failed and what it says, in at most four lines."""
    if report.skipped:
        return f"it did not run, and a skipped test is a hole: {report.longrepr}"
    crash = getattr(report.longrepr, "reprcrash", None)
    if crash is None:  # a worker that died, or a fixture that is missing
        return "\n".join(str(report.longrepr).strip().splitlines()[-4:])
    place = f"{os.path.relpath(crash.path, ROOT)}:{crash.lineno}: "
    return place + "\n".join(crash.message.splitlines()[:4])


def _append(row: dict[str, object]) -> None:
    """Processes of xdist pass everything on to the one that has started them, and only that one writes."""
    if RECORD in os.environ and "PYTEST_XDIST_WORKER" not in os.environ:
        with open(os.environ[RECORD], "a") as record:
            record.write(json.dumps(row) + "\n")


# -- One run of pytest ----------------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Results:
    """What a run of pytest did."""

    status: int = 0
    wall_s: float = 0.0
    took_s: dict[str, float] = field(default_factory=dict)  # by test, with set-up and tear-down
    failed: dict[str, tuple[str, str]] = field(default_factory=dict)  # by test: assertion and whole text
    collected: set[str] = field(default_factory=set)
    running: set[str] = field(default_factory=set)
    ended: set[str] = field(default_factory=set)

    @property
    def not_run(self) -> set[str]:
        """Tests that were collected and have no outcome."""
        return self.collected - self.ended - self.failed.keys()

    def read(self, record: Path) -> None:
        for line in record.read_text().splitlines():
            row = json.loads(line)
            test = row.get("test", "")
            if "collected" in row:
                self.collected.update(row["collected"])
            elif "began_at" in row:
                self.running.add(test)
            elif "ended_at" in row:
                self.running.discard(test)
                self.ended.add(test)
            else:
                self.took_s[test] = self.took_s.get(test, 0.0) + row["duration_s"]
                if row["outcome"] != "passed":
                    self.failed.setdefault(test, (row["assertion"], row["text"]))


def run_pytest(words: Sequence[str], record: Path, root: Path = ROOT) -> Results:
    """Run pytest with these words in `root`; `record` is written anew. A run in which no test ends for HANG_S is ended, and its running
    tests have failed.
    """
    record.parent.mkdir(parents=True, exist_ok=True)
    record.write_text("")
    began = time.monotonic()
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.suite", f"--maxfail={MAX_FAILED}", *words]
    # A test of this module runs in a process of xdist itself.
    others = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    child = subprocess.Popen(
        command,
        cwd=root,
        # torch reads files of its own in the encoding of the locale, and they are UTF-8.
        env={**others, "PYTHONUTF8": "1", RECORD: str(record)},
        preexec_fn=processes.dying_with_parent(signal.SIGKILL),
    )
    hung = not _ended(child, record)
    results = Results(status=child.returncode, wall_s=time.monotonic() - began)
    results.read(record)
    text = f"no test ended for {HANG_S:.0f} s while this one ran" if hung else "pytest ended while it ran"
    for test in results.running:
        results.failed.setdefault(test, (text, text))
    return results


def _ended(child: subprocess.Popen[bytes], record: Path) -> bool:
    """Wait for the end of `child`; False if it hung and was killed."""
    num_bytes, grew_at = 0, time.monotonic()
    while time.monotonic() - grew_at <= HANG_S:
        try:
            child.wait(timeout=1)
            return True
        except subprocess.TimeoutExpired:
            if (found := record.stat().st_size) != num_bytes:
                num_bytes, grew_at = found, time.monotonic()
        except BaseException as error:
            if not isinstance(error, KeyboardInterrupt):  # which pytest has heard as well
                child.send_signal(signal.SIGINT)
            with suppress(subprocess.TimeoutExpired):
                child.wait(timeout=ENDING_S)
            raise
    _kill(child)
    return False


def _kill(child: subprocess.Popen[bytes]) -> None:
    """End a run of pytest and all that it started. Its processes first print where they are."""
    pytest_itself = psutil.Process(child.pid)
    started = pytest_itself.children(recursive=True)
    tests = [pytest_itself, *pytest_itself.children()]
    for process in tests:
        with suppress(psutil.NoSuchProcess):
            process.send_signal(signal.SIGABRT)  # for which pytest has Python print the stacks
    psutil.wait_procs(tests[1:], timeout=10)
    for process in started:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    child.wait()


# -- The phases -----------------------------------------------------------------------------------------------------------------------


def describe(name: str, results: Results) -> str:
    """The line of a phase: its time and its slowest tests."""
    slowest = sorted(results.took_s.items(), key=lambda row: -row[1])[:NUM_SLOWEST]
    names = "; ".join(f"{took_s:.1f} s {test}" for test, took_s in slowest)
    return (
        f"{name}: {len(results.took_s)} tests, {len(results.failed)} failed, {results.wall_s:.0f} s"
        f"{f'; slowest {names}' if names else ''}"
    )


def verdict(failed: dict[str, tuple[str, str]], again: Results | None) -> tuple[bool, list[str]]:
    """Whether a run is green, and the last lines of its log: each failure with its assertion."""
    passed_alone = [test for test in failed if again and test in again.ended and test not in again.failed]
    excused = [test for test in passed_alone if not test.startswith(NEVER_EXCUSED)]
    if len(excused) > NUM_EXCUSED:
        excused = []
    lines: list[str] = []
    for test in excused:
        lines += [f"passed only alone: {test}", failed[test][1]]
    for test, (assertion, _) in failed.items():
        if test in excused:
            kind = "passed only alone"
        elif test in passed_alone:
            kind = "failed, passes alone"
        else:
            kind = "failed, fails alone too" if again else "failed, was not run again"
        lines += [f"{kind}: {test}", *(f"    {line}" for line in assertion.splitlines())]
    if excused:
        lines.append("write what passed only alone into tests/flaky.md with its cause, and mend it")
    return len(excused) == len(failed), lines


def run(suite: str, paths: Sequence[str], records: Path = ROOT / ".run/suite") -> bool:
    """Run a suite on these paths, or on all. True if it is green. `records` gets what each test took."""
    marked = "" if suite == "all" else f"{QUICK} and "
    phases = {
        "tests two at a time": (
            f"{marked}not alone",
            # tests/scheduling.py. A process that dies ends the run: xdist would give the test that killed it to the next.
            [f"--numprocesses={NUM_WORKERS}", "--dist=loadscope", "--max-worker-restart=0"],
        ),
        "tests that run alone": (f"{marked}alone", []),
    }
    failed: dict[str, tuple[str, str]] = {}
    lines: list[str] = []
    broken, num_ran = False, 0
    began = time.monotonic()
    for name, (expression, words) in phases.items():
        print(f"\n== {name}", flush=True)
        results = run_pytest(["-m", expression, *words, *paths], records / f"{name.replace(' ', '-')}.jsonl")
        lines.append(describe(name, results))
        print(lines[-1], flush=True)
        failed |= results.failed
        num_ran += len(results.ended)
        if results.not_run:
            lines.append(f"{len(results.not_run)} tests did not run, for example {min(results.not_run)}")
        # Anything but "tests failed" and "no tests here" is about pytest itself, for example a module that cannot be imported.
        status_says_nothing = results.status not in (0, 1, 5) or (results.status == 1 and not results.failed)
        broken = broken or status_says_nothing or bool(results.not_run)
        if broken or len(failed) >= MAX_FAILED:
            break
    again = None
    if failed and len(failed) <= MAX_RERUN and not broken:
        print(f"\n== {AGAIN}", flush=True)
        again = run_pytest(list(failed), records / "again.jsonl")
        lines.append(describe(AGAIN, again))
    green, last = verdict(failed, again)
    green = green and not broken and num_ran > 0
    print("", *lines, *last, sep="\n")
    word = "green" if green else "red"
    print(f"the {suite} suite is {word} after {(time.monotonic() - began) / 60:.1f} min", flush=True)
    return green


# -- The tests of a change -------------------------------------------------------------------------------------------------------------

# Tests that read all files, so that no import leads from a changed file to them.
ALWAYS = ("tests/test_layers.py", "tests/test_rules.py", "tests/pipeline/test_settings.py", "tests/workers/test_scripts.py")
PAGES = "tests/docs"


def changed_paths(root: Path = ROOT) -> list[str]:
    """The files that differ from where this branch left `main`, committed or not. Raises CalledProcessError without a branch `main`."""

    def git(*words: str) -> list[str]:
        command = ["git", "-C", str(root), *words]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()

    (start,) = git("merge-base", "main", "HEAD")
    return sorted({*git("diff", "--name-only", start), *git("ls-files", "--others", "--exclude-standard")})


def chosen_for(paths: Sequence[str], root: Path = ROOT) -> list[str]:
    """The test files and folders for changed files: those that import a changed module, if its own package has any only those of it and
    of the packages around it; the tests of its package if none imports it; the tests of all pages for a page.
    """
    imports = {
        str(test.relative_to(root)): _imported(test) for test in sorted(root.glob("tests/**/test_*.py"))
    }
    chosen = dict.fromkeys(one for one in ALWAYS if (root / one).exists())
    for path in paths:
        if path.endswith(".md"):
            chosen[PAGES] = None
        if not path.endswith(".py"):
            continue
        if path in imports:
            chosen[path] = None
            continue
        module = path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        found = [test for test, names in imports.items() if module in names]
        folder = f"tests/{path.rpartition('/')[0].removeprefix('tests/')}/"
        if path.endswith("conftest.py"):
            found = [test for test in imports if test.startswith(f"{path.rpartition('/')[0]}/")]
        own = [test for test in found if test.startswith(folder)]
        around = [test for test in found if folder.startswith(f"{test.rpartition('/')[0]}/")]
        chosen |= dict.fromkeys([*(own or found), *around] or ([folder] if (root / folder).is_dir() else []))
    return list(chosen)


def _imported(test: Path) -> set[str]:
    """The modules that a test file names in its imports, and `package.name` for each name that it imports from a package."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(test.read_bytes())):
        match node:
            case ast.Import(names=names):
                found.update(one.name for one in names)
            case ast.ImportFrom(module=str(module), names=names):
                found.add(module)
                found.update(f"{module}.{one.name}" for one in names)
            case _:
                pass
    return found


# -- The number of quick tests ---------------------------------------------------------------------------------------------------------


def package_of(test: str) -> str:
    """The folder of a test, two below `tests` at most: tests/workers/attacks."""
    folders = test.partition("::")[0].split("/")[:-1]
    return "/".join(folders[:3])


def quick_tests() -> Counter[str]:
    """How many quick tests each package has. Raises CalledProcessError if the tests cannot be collected."""
    words = ["-m", "pytest", "--collect-only", "-q", "-m", QUICK]
    done = subprocess.run([sys.executable, *words], cwd=ROOT, capture_output=True, text=True, check=True)
    return Counter(package_of(line) for line in done.stdout.splitlines() if "::" in line)


def table(counts: Mapping[str, int]) -> str:
    """As it stands in tests/README.md."""
    rows = [f"| `{package}` | {number} |" for package, number in sorted(counts.items())]
    return "\n".join(["| package | quick tests |", "|---|--:|", *rows, f"| all | {sum(counts.values())} |"])


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.suite", description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("quick", "all", "changed", "count"))
    parser.add_argument("paths", nargs="*", help="files, folders or tests; everything if there is none")
    arguments = parser.parse_args(words)
    sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]  # a failure may say anything
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where a shell has started us in the background
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    if arguments.what == "count":
        print(table(quick_tests()))
        return 0
    paths = arguments.paths
    if arguments.what == "changed":
        paths = chosen_for(paths or changed_paths())
        print(f"{len(paths)} files and folders with tests:", *paths, sep="\n  ")
    return 0 if run(arguments.what, paths) else 1


if __name__ == "__main__":
    sys.exit(main())
