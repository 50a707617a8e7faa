"""A problem to solve, and how an answer to it is judged.

What a worker needs and nothing that would give the answer away: the gold patch stays in the taskset file. The
verdict part (hidden tests, scripts) is opened by the grader only, in a container that the agent never sees.
"""

from typing import Literal

import msgspec

from pipeline.message import Message

# What a log mentions: all tests, or only those that failed.
EvalType = Literal["pass_and_fail", "fail_only"]


class File(Message, frozen=True, kw_only=True):
    """A file put into the grading container. `path` is absolute, or relative to the task's workdir."""

    path: str
    content: bytes
    mode: int = 0o644


class ExitCode(Message, frozen=True, kw_only=True, tag="exit_code"):
    """Resolved if the eval script ends with status 0 and its log does not contradict that.

    Order: model patch, protected paths back to the base commit, hidden tests (`test_patch`), then the script.
    """

    eval_script: str
    test_patch: bytes = b""  # hidden tests as a git diff; applied after the model's patch and after restoring
    # Repository-relative; restored from the base commit, removed if absent there.
    protected_paths: tuple[str, ...] = ()
    files: tuple[File, ...] = ()


class SwebenchLog(Message, frozen=True, kw_only=True, tag="swebench_log"):
    """Resolved by the swebench package's own parser and resolution rule over the eval script's log.

    The script applies its own test patch, as the official harness renders it.
    """

    eval_script: str
    log_parser: str  # a name in the swebench package's registry, e.g. "parse_log_pytest"
    fail_to_pass: tuple[str, ...]
    pass_to_pass: tuple[str, ...]
    eval_type: EvalType = "pass_and_fail"
    repo: str = ""
    version: str = ""
    protected_paths: tuple[str, ...] = ()


class R2eExpected(Message, frozen=True, kw_only=True, tag="r2e_expected"):
    """Resolved if pytest's short summary in the eval script's log says of every test exactly what `expected` says.

    Failures that are expected must fail: one test more, less or otherwise, and the patch is unresolved.
    """

    eval_script: str
    expected: dict[str, str]  # name -> PASSED, FAILED, ERROR, SKIPPED, ...; names as R2E-Gym shortens them
    protected_paths: tuple[str, ...] = ()
    files: tuple[File, ...] = ()


class TestsJson(Message, frozen=True, kw_only=True, tag="tests_json"):
    """Resolved if the parser, given the log, reports every one of `tests` as PASSED, at least once.

    The eval script runs the tests; `parser` is a Python program called as `python3 parser.py STDOUT STDERR
    OUT.json` (STDERR is empty: the log is merged) that writes {"tests": [{"name": ..., "status": ...}]}. It runs
    in a container of its own, where no code of the patch has ever run.
    """

    eval_script: str
    parser: str
    tests: tuple[str, ...]
    protected_paths: tuple[str, ...] = ()
    files: tuple[File, ...] = ()


Verdict = ExitCode | SwebenchLog | R2eExpected | TestsJson


class Resources(Message, frozen=True, kw_only=True):
    """What one container may use. Absent network means none: `--network none`."""

    memory_bytes: int = 4 * 1024**3
    cpus: float = 2.0
    pids: int = 512
    network: bool = False


class Task(Message, frozen=True, kw_only=True):
    """Task(id="demo:calc-7", image="swerve/task-base:1", workdir="/workspace", problem="add() ...", ...)"""

    id: str  # "{source}:{instance_id}", unique within a taskset
    repo: str
    base_commit: str  # "" means: whatever HEAD is in the image
    image: str
    workdir: str  # absolute; the repository's root in the image; "": the image's own WORKDIR
    problem: str  # what the agent is told
    verdict: Verdict
    setup_script: str = ""  # run in the workdir of both containers before anything else, e.g. a checkout
    # A git diff that makes the problem (SWE-smith's bug); part of the base in both containers.
    setup_patch: bytes = b""
    # Absolute or in the workdir: what would give the answer away, taken out of the agent's container.
    hidden_paths: tuple[str, ...] = ()
    resources: Resources = Resources()
    env: dict[str, str] = msgspec.field(default_factory=dict[str, str])
    # Whether the image's builder may have left commits of its own on top of base_commit.
    builder_commits: bool = False
    # What verification measured of the tests with the known fix, packed (see calibration.py); b"": nothing. The trainer adds
    # it to the tasks of its requests; in a task file it is empty.
    calibration: bytes = b""
