"""A problem to solve, how an answer to it is judged, and what verification measured of its tests with the known fix.

A task contains what a worker needs and nothing that would reveal the answer: the gold patch stays in the taskset file. The
verdict part (hidden tests, scripts) is opened by the grader only, in a container that the agent never sees.

The calibration says which tests pass with the known fix, and under which contradictions each fails. The grader reads it to decide whether a
pass proves anything: the tests that the known fix passes must have passed, and one of them must fail once what it expects is contradicted.
Like hidden tests it is hidden from the agent: the trainer puts it into requests in packed form, and only the grader unpacks it.
"""

from typing import Annotated, Literal

import msgspec

from pipeline.message import Count, Message, decode_body, encode_body

# The strongest result that a control can have for a pass of a task. "confirmed": every test that needs the fix can be contradicted;
# "partial": some cannot; "none": no test can.
BestControl = Literal["none", "partial", "confirmed"]
BEST_CONTROLS: tuple[BestControl, ...] = ("none", "partial", "confirmed")  # from weakest to strongest

# "value": another value of the same type is expected; "opposite": the opposite condition, or another class; "nothing": a value that
# nothing is equal to.
ContradictionKind = Literal["value", "opposite", "nothing"]


class TextChange(Message, frozen=True, kw_only=True):
    """One edit of a text: at `offset_bytes`, `was` becomes `becomes`."""

    offset_bytes: Count
    was: str
    becomes: str

    @property
    def end_bytes(self) -> int:
        """The offset at which `was` ends."""
        return self.offset_bytes + len(self.was.encode("utf-8", "surrogateescape"))


class Contradiction(Message, frozen=True, kw_only=True):
    """One expectation in a file, made wrong by `changes`. They change the expected value, and other text that repeats it.

    Any code that passes the original must fail the changed test. Tests have the names that the runner gives them in the true run.
    """

    path: str  # relative to the workdir, or absolute
    # The changes in the order of the text; none overlaps another.
    changes: Annotated[tuple[TextChange, ...], msgspec.Meta(min_length=1)]
    # Tests that fail under it with the known fix.
    fails: Annotated[tuple[str, ...], msgspec.Meta(min_length=1)]
    may_fail: tuple[str, ...] = ()  # further tests whose outcome under it is not known
    kind: ContradictionKind = "value"
    # Tests that have another name under it.
    renamed: dict[str, str] = msgspec.field(default_factory=dict[str, str])
    # Whether a control may make it together with another one that may be paired: it was tried alone, and keeps no test from running.
    may_be_paired: bool = False
    # Whether it may end the process, so that other tests do not run: it did, or others did and it was not tried alone.
    may_end: bool = False


class Calibration(Message, frozen=True, kw_only=True):
    """The outcomes of the known fix and the contradictions that its tests fail under."""

    # Names of the tests that passed in every run of the known fix; a pass needs all of them, passed. Names that differ from run
    # to run are left out.
    passing: tuple[str, ...] = ()
    flaky: tuple[str, ...] = ()  # names that passed in some runs only
    needing_fix: tuple[str, ...] = ()  # those of `passing` that do not pass without the fix
    # Those of `needing_fix` that no contradiction can make fail, or whose contradictions prove nothing: they, or what they expect, are
    # under test themselves.
    uncontrolled: tuple[str, ...] = ()
    witnessed: bool = False  # whether the witness reported the runs
    stops_early: bool = False  # whether the eval script ends its run at the first failure
    contradictions: tuple[Contradiction, ...] = ()
    # Files in the repository that hold these tests and that the known fix leaves alone: restored before the tests run.
    test_files: tuple[str, ...] = ()
    # Parts of the test runner that the known fix replaced while it ran, and kinds of failure that made no test fail in those runs.
    replaced: tuple[str, ...] = ()
    control_cpu_s: float = 0.0  # CPU time of the slowest control run with the known fix
    control_wall_s: float = 0.0  # wall time of the slowest one
    # Files in the repository that the known fix changes: they are under test, so they are not restored although the eval script runs or
    # names them.
    fix_paths: tuple[str, ...] = ()
    # Files of the repository that are the tests' own, as the known fix's run read them, and that the fix leaves alone: restored before
    # the tests run, or removed where the repository has none.
    reads: tuple[str, ...] = ()
    # Tests whose code, helpers or data are in files of the known fix, or in the package under test: a patch may change them.
    in_fix: tuple[str, ...] = ()
    # Tests whose cases or references the package under test provides.
    from_package: tuple[str, ...] = ()
    user: str = "0:0"  # who ran the tests: ids of user and group in the image

    @property
    def best_control(self) -> BestControl:
        """The strongest result that a control can have for a pass."""
        if not self.contradictions:
            return "none"
        return "partial" if self.uncontrolled or not self.needing_fix else "confirmed"


def pack(calibration: Calibration) -> bytes:
    """The calibration in the form in which a task carries it."""
    return encode_body(calibration)


def unpack(packed: bytes) -> Calibration | None:
    """The calibration in `packed`; None if `packed` is empty, because the task was never calibrated. Raises MalformedMessage."""
    return decode_body(packed, Calibration) if packed else None


# The tests that a log mentions: all tests, or only those that failed.
EvalType = Literal["pass_and_fail", "fail_only"]


class File(Message, frozen=True, kw_only=True):
    """A file put into the grading container. `path` is absolute, or relative to the task's workdir."""

    path: str
    content: bytes
    mode: int = 0o644


class ExitCode(Message, frozen=True, kw_only=True, tag="exit_code"):
    """The task is resolved if the eval script ends with status 0 and its log does not contradict that.

    Order: model patch, protected paths back to the base commit, hidden tests (`test_patch`), then the script.
    """

    eval_script: str
    # The hidden tests as a git diff, applied after the model's patch and after restoring
    test_patch: bytes = b""
    # Paths in the repository that are restored from the base commit, or removed if it lacks them.
    protected_paths: tuple[str, ...] = ()
    files: tuple[File, ...] = ()


class RewardFile(ExitCode, frozen=True, kw_only=True, tag="reward_file"):
    """The reward is a number in a file that the eval script leaves, as Harbor's tests do; the script's own exit status does not count.

    /logs/verifier/reward.json, an object of numbers, counts before /logs/verifier/reward.txt, a single one. With 1 the task is resolved
    if neither the log nor the witness contradicts that.
    """

    # The path of the script when it runs, from which it may look for other files.
    script_path: str = "/tests/test.sh"
    # Environment variables of the script, besides the task's. The agent does not see them.
    env: dict[str, str] = msgspec.field(default_factory=dict[str, str])
    reward: str = ""  # name of the number that is the reward; "": the only one, or that of the name "reward"
    # Whether a number between 0 and 1 is the reward, too. Otherwise it counts as 0, because no control can confirm it.
    fractions: bool = False


class SwebenchLog(Message, frozen=True, kw_only=True, tag="swebench_log"):
    """The swebench package's own resolution rule decides, from the eval script's log, which one of its parsers reads or one of
    multi-swe-bench's or swesmith's.

    The script applies its own test patch, as the official harness renders it.
    """

    eval_script: str
    # A name in the swebench package's registry, e.g. "parse_log_pytest"; or "multi_swe_bench:ORG/REPO", a class of that package; or
    # "swesmith:OWNER__REPO.COMMIT", a profile of that package.
    log_parser: str
    fail_to_pass: tuple[str, ...]
    pass_to_pass: tuple[str, ...]
    eval_type: EvalType = "pass_and_fail"
    repo: str = ""
    version: str = ""  # of the repository; for multi-swe-bench's parsers the number of the pull request
    protected_paths: tuple[str, ...] = ()


class R2eExpected(Message, frozen=True, kw_only=True, tag="r2e_expected"):
    """The task is resolved if pytest's short summary in the eval script's log gives every test exactly its status in `expected`.

    Tests that are expected to fail must fail: with one test more, one less or another status, the patch is unresolved.
    """

    eval_script: str
    expected: dict[str, str]  # name -> PASSED, FAILED, ERROR, SKIPPED, ...; names as R2E-Gym shortens them
    protected_paths: tuple[str, ...] = ()
    files: tuple[File, ...] = ()


class TestsJson(Message, frozen=True, kw_only=True, tag="tests_json"):
    """The task is resolved if the parser reports each of `tests` as PASSED at least once, from the log.

    The eval script runs the tests; `parser` is a Python program called as `python3 parser.py STDOUT STDERR
    OUT.json` (STDERR is empty: the log is merged) that writes {"tests": [{"name": ..., "status": ...}]}. It runs
    in a container of its own, where no code of the patch has ever run.
    """

    eval_script: str
    parser: str
    tests: tuple[str, ...]
    protected_paths: tuple[str, ...] = ()
    files: tuple[File, ...] = ()


Verdict = ExitCode | RewardFile | SwebenchLog | R2eExpected | TestsJson


class Resources(Message, frozen=True, kw_only=True):
    """The resources that one container may use. Without a network it has none: `--network none`."""

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
    problem: str  # the problem statement that the agent sees
    verdict: Verdict
    # Who runs the setup script, the commands of the agent and the tests: a name or an id in the image, optionally with a group
    # ("dev", "1000:100", "0"); "": the image's own USER.
    user: str = ""
    setup_script: str = ""  # run in the workdir of both containers before anything else, e.g. a checkout
    # A git diff that makes the problem (SWE-smith's bug); part of the base in both containers.
    setup_patch: bytes = b""
    # Absolute or in the workdir: what would give the answer away, taken out of the agent's container.
    hidden_paths: tuple[str, ...] = ()
    resources: Resources = Resources()
    env: dict[str, str] = msgspec.field(default_factory=dict[str, str])
    # Whether the image's builder may have left commits of its own on top of base_commit.
    builder_commits: bool = False
    # Measurements that verification made of the tests with the known fix, packed (`Calibration`); b"": nothing. The trainer adds
    # it to the tasks of its requests; in a task file it is empty.
    calibration: bytes = b""
    # Absolute paths where verification found the answer in the image. They are removed from the agent's container, like
    # `hidden_paths`. The trainer adds them to the tasks of its requests; in a task file there are none.
    leaking_paths: tuple[str, ...] = ()
