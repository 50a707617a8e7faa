"""A problem to solve, and how an answer to it is judged.

What a worker needs and nothing that would give the answer away: the gold patch stays in the taskset file. The
verdict part (hidden tests, scripts) is opened by the grader only, in a container that the agent never sees.
"""

from typing import Literal

import msgspec

from pipeline.message import Message


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
    protected_paths: tuple[
        str, ...
    ] = ()  # repository-relative; restored from the base commit, removed if absent there
    files: tuple[File, ...] = ()


class SwebenchLog(Message, frozen=True, kw_only=True, tag="swebench_log"):
    """Resolved by the swebench package's own parser and resolution rule over the eval script's log.

    The script applies its own test patch, as the official harness renders it.
    """

    eval_script: str
    log_parser: str  # a name in the swebench package's registry, e.g. "parse_log_pytest"
    fail_to_pass: tuple[str, ...]
    pass_to_pass: tuple[str, ...]
    eval_type: Literal["pass_and_fail", "fail_only"] = "pass_and_fail"
    repo: str = ""
    version: str = ""
    protected_paths: tuple[str, ...] = ()


Verdict = ExitCode | SwebenchLog


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
    workdir: str  # absolute; the repository's root in the image
    problem: str  # what the agent is told
    verdict: Verdict
    resources: Resources = Resources()
    env: dict[str, str] = msgspec.field(default_factory=dict[str, str])
