"""Tasks of Harbor: directories with task.toml (schema 1.0 to 1.4), instruction.md, environment/, tests/test.sh and solution/solve.sh.

tests/ becomes the verdict, whose script leaves its reward in a file, and what solution/solve.sh changes in the workdir becomes the known
fix. What cannot be honoured is refused by its key. Keys that mean nothing here are listed, and an export writes the directory as it was.
"""

import argparse
import asyncio
import contextlib
import re
import sys
import tomllib
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import msgspec
from msgspec.structs import replace

from pipeline.screen import visible_line
from pipeline.task import File, Resources, RewardFile, Task
from pipeline.taskfile import Gold
from workers.tasksets.harbor_directories import GOLD, TASK, Tree, made_of, read_tree
from workers.tasksets.importing import Importer, Row, is_plain_path
from workers.tasksets.rows import Fields, read_rows

SCHEMAS = ("1.0", "1.1", "1.2", "1.3", "1.4")
MOST_TEST_BYTES = 8 * 1024**2  # every request carries the tests
DEFAULT_SOLVE_S = 600.0
LEAST_MIB = 6  # Docker's minimum; it takes 0 for no limit
MOST = 1e9  # largest number of CPUs, MiB or seconds

_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(?:/[A-Za-z0-9][\w.-]*)?", re.ASCII)
_USER = re.compile(r"[\w.-]+(?::[\w.-]+)?", re.ASCII)
_VARIABLE = re.compile(r"[A-Za-z_]\w*", re.ASCII)
_OF_HOST = re.compile(r"\$\{[^}]*\}")
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([GMK])", re.IGNORECASE)
_MIB = {"G": 1024.0, "M": 1.0, "K": 1 / 1024}
_NO_HOSTS = "a container reaches every host or none: remove it, and set network_mode to no-network or public"
_REFUSED = {
    "steps": "a task has one step: make a task of each",
    "environment.gpus": "containers have no GPU: remove it if the task does without",
    "environment.gpu_types": "containers have no GPU: remove it if the task does without",
    "environment.tpu": "containers have no TPU: remove it if the task does without",
    "environment.mcp_servers": "agents get no MCP servers: remove them if the task does without",
    "environment.skills_dir": "agents get no skills: remove it if the task does without",
    "environment.healthcheck": "nothing is started in the container: start services in tests/test.sh",
    "environment.allowed_hosts": _NO_HOSTS,
    "agent.allowed_hosts": _NO_HOSTS,
    "verifier.allowed_hosts": _NO_HOSTS,
    "verifier.collect": "only the patch of the workdir reaches the tests: remove it if they do without",
}
_REFUSED_FILES = {
    "environment/docker-compose.yaml": "a task has one container: give a Dockerfile or docker_image",
    "environment/docker-compose.yml": "a task has one container: give a Dockerfile or docker_image",
    "trajectory.json": "an episode starts without earlier turns: remove it if the task does without",
}
_IGNORES = ".harborignore"


@dataclass(frozen=True, slots=True)
class HarborDirectory:
    """A task directory, the task that it describes, and what the import still has to decide. The task may lack an image."""

    tree: Tree
    task: Task
    # The network modes by their keys, the environment's first
    network_modes: dict[str, str] = field(default_factory=dict[str, str])
    solution_env: dict[str, str] = field(default_factory=dict[str, str])
    solve_s: float = DEFAULT_SOLVE_S
    unused: tuple[str, ...] = ()  # keys of task.toml that mean nothing here


def read(path: Path, split: str | None) -> list[Fields]:
    """The task directory `path`, or those in it, sorted by name; the rows of a file. Raises ValueError naming the path."""
    if not path.is_dir():
        return read_rows(path, split)
    found = (
        [path] if (path / "task.toml").exists() else sorted(one.parent for one in path.glob("*/task.toml"))
    )
    if not found:
        raise ValueError(f"{path}: no task.toml in it, or in a directory in it")
    if split is not None:
        raise ValueError(f"{path}: --split {split}: task directories have no splits; leave it out")
    return [_row(one) for one in found]


def task_of(fields: Fields) -> tuple[Task, Gold]:
    """The task and its solution, as `completed` or `row_of` put them into the row. Raises ValueError."""
    return _converted(fields, "task", Task), _converted(fields, "gold", Gold)


def row_of(task: Task, gold: Gold) -> Row:
    """The row from which `task_of` makes `task`."""
    name = task.id.partition(":")[2]
    row = {"instance_id": name, "repo": task.repo, "problem_statement": task.problem, "patch": gold.patch}
    return row | {"task": msgspec.to_builtins(task), "gold": msgspec.to_builtins(gold)}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of this source."""
    add = parser.add_argument
    add(
        "--build", action="store_true", help="build environment/Dockerfile of tasks that name no docker_image"
    )
    add(
        "--network",
        choices=("none", "task"),
        default="none",
        help="'task': a task whose network_mode is public, Harbor's default, has a network; default: none has one",
    )
    add(
        "--reward",
        default="",
        metavar="NAME",
        help="the number in reward.json that is the reward, if it has several",
    )
    add("--fractions", action="store_true", help="a reward between 0 and 1 counts; otherwise it counts as 0")
    add("--jobs", type=int, default=2, metavar="N", help="tasks whose solutions run at once; default: 2")


def completed(rows: list[Fields], options: argparse.Namespace) -> list[Fields]:
    """The rows of directories with their tasks and solutions, which are found by running solution/solve.sh."""
    directories = [fields.values["directory"] for fields in rows if "directory" in fields.values]
    unused = Counter(key for directory in directories for key in directory.unused)
    if unused:
        named = ", ".join(f"{key} ({count})" for key, count in sorted(unused.items()))
        print(visible_line(f"kept for export, and not used (tasks that have it): {named}"), file=sys.stderr)
    num_public = sum("public" in one.network_modes.values() for one in directories)
    if options.network == "none" and num_public:
        said = f"{num_public} tasks have a network in Harbor and none here; --network task gives them one"
        print(said, file=sys.stderr)
    made = [_decided(fields, options) for fields in rows]
    if not directories or any(fields.broken for fields in made):
        return made
    # It is imported only here, because it needs Docker, which tasks from other sources do not.
    from workers.tasksets.harbor_solutions import solved

    return asyncio.run(solved(made, build=options.build, num_jobs=options.jobs))


def _decided(fields: Fields, options: argparse.Namespace) -> Fields:
    """The row whose task is as the options want it."""
    directory: HarborDirectory | None = fields.values.get("directory")
    if directory is None:
        # A row that is no task is refused where it is used.
        with contextlib.suppress(ValueError):
            if options.network == "none" and task_of(fields)[0].resources.network:
                why = "the task has one: import it with --network task"
                return fields.broken_by(fields.refusal("task.resources.network", why))
        return fields
    task, modes = directory.task, directory.network_modes
    assert isinstance(task.verdict, RewardFile)
    has_network = options.network == "task" and next(iter(modes.values())) == "public"
    if options.network == "task" and len(set(modes.values())) > 1:
        key = next(key for key, mode in modes.items() if mode != modes["environment.network_mode"])
        why = "must be that of [environment], because agent and tests share it: or import it with --network none"
        return fields.broken_by(fields.refusal(f"task.toml: {key}", why))
    has_dockerfile = "environment/Dockerfile" in directory.tree
    if not task.image and not (options.build and has_dockerfile):
        advice = "import it with --build, which builds" if has_dockerfile else "name one, or write"
        why = f"absent: {advice} environment/Dockerfile"
        return fields.broken_by(fields.refusal("task.toml: environment.docker_image", why))
    verdict = replace(task.verdict, reward=options.reward, fractions=options.fractions)
    task = replace(task, verdict=verdict, resources=replace(task.resources, network=has_network))
    return fields.having(task=task)


IMPORTER = Importer(
    help="task directories of Harbor, one or a folder of them",
    task_of=task_of,
    row_of=row_of,
    read=read,
    complete=completed,
    add_options=add_options,
    size=("problem_statement", "patch"),
)


def _converted(fields: Fields, name: str, kind: type[Any]) -> Any:
    try:
        return msgspec.convert(fields.value(name), kind)
    except msgspec.ValidationError as error:
        raise fields.refusal(name, f"not a {kind.__name__}: {error}") from error


def _row(directory: Path) -> Fields:
    where = str(directory)
    try:
        if directory.is_symlink():
            raise ValueError("is a link: import the directory that it leads to")
        tree = read_tree(directory)
        if exported := _exported(tree):
            return Fields(where, row_of(*exported))
        found = _described(tree, directory.resolve().name)
    except (ValueError, OSError) as error:
        return Fields(where, {}, broken=str(error))
    return Fields(where, {**row_of(found.task, Gold(id=found.task.id, patch="")), "directory": found})


def _exported(tree: Tree) -> tuple[Task, Gold] | None:
    """The task and the solution of a directory that an export made and nobody has changed; None for any other one."""
    try:
        task = msgspec.json.decode(tree[TASK].content, type=Task)
        gold = msgspec.json.decode(tree[GOLD].content, type=Gold)
        return (task, gold) if made_of(task, gold) == tree else None
    except (KeyError, ValueError, msgspec.DecodeError):
        return None


def _text(tree: Tree, path: str) -> str:
    if path not in tree:
        raise ValueError(f"{path}: absent")
    try:
        text = tree[path].content.decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not text in UTF-8: {error}") from error
    if not text.strip():
        raise ValueError(f"{path}: is empty")
    if path.endswith(".sh") and text.lstrip().partition("\n")[0].endswith("\r"):
        raise ValueError(
            f"{path}: its lines end in CRLF, and its interpreter would not be found; convert it (dos2unix)"
        )
    return text


def _described(tree: Tree, name: str) -> HarborDirectory:
    """What a directory of this name describes. Raises ValueError with all that cannot be honoured."""
    try:
        keys = Keys(tomllib.loads(_text(tree, "task.toml")))
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"task.toml: not TOML: {error}") from error
    files = [file for path, file in tree.items() if path.startswith("tests/") and path != "tests/test.sh"]
    refused = [f"{path}: {why}" for path, why in _REFUSED_FILES.items() if path in tree]
    refused += [f"{path}: remove the files that it names" for path in tree if path.endswith(f"/{_IGNORES}")]
    if sum(len(file.content) for file in files) > MOST_TEST_BYTES:
        refused.append(f"tests: has more than {MOST_TEST_BYTES >> 20} MiB; put what is large into the image")
    problem, script, _ = (
        _text(tree, path) for path in ("instruction.md", "tests/test.sh", "solution/solve.sh")
    )
    if (schema := keys.get("schema_version", str) or keys.get("version", str, SCHEMAS[-1])) not in SCHEMAS:
        keys.refuse("schema_version", f"{schema!r} is none of {', '.join(SCHEMAS)}")
    for key, why in _REFUSED.items():
        if keys.get(key, object):
            keys.refuse(key, why)
    name, workdir = keys.get("task.name", str, name), keys.get("environment.workdir", str, "")
    if not _NAME.fullmatch(name):
        keys.refuse("task.name", f"{name!r} must be a name or org/name of letters, digits, '.', '_' and '-'")
    if workdir and not is_plain_path(workdir):
        keys.refuse("environment.workdir", f"must be an absolute path, is {workdir!r}")
    if keys.get("environment.os", str, "linux").lower() != "linux":
        keys.refuse("environment.os", "only Linux runs here")
    modes, resources = _network_modes(keys), _resources(keys)
    _check_verifier(keys, workdir, tree)
    task = Task(
        id=f"harbor:{name}",
        repo=name,
        base_commit="",
        image=keys.get("environment.docker_image", str, ""),
        workdir=workdir,
        problem=problem,
        user=_user(keys),
        env=keys.env("environment.env"),
        resources=resources,
        verdict=RewardFile(
            eval_script=script,
            env=keys.env("verifier.env"),
            files=tuple(
                File(path=f"/{one.path}", content=one.content, mode=one.mode & 0o777) for one in files
            ),
        ),
    )
    solve_s, solution_env = keys.positive("agent.timeout_sec") or DEFAULT_SOLVE_S, keys.env("solution.env")
    if refused or keys.refused:
        raise ValueError("; ".join((*refused, *keys.refused)))
    return HarborDirectory(tree, task, modes, solution_env, solve_s, keys.unused())


@dataclass(slots=True)
class Keys:
    """The keys of task.toml, by dotted names. What is wrong with one is collected, so that an import reports all of it."""

    config: dict[str, Any]
    refused: list[str] = field(default_factory=list[str])
    _read: set[str] = field(default_factory=set[str])

    def get(self, key: str, kind: type[Any], default: Any = None) -> Any:
        """The value, `default` if it is absent, or, with a refusal, of another kind."""
        value: Any = self.config
        for part in key.split("."):
            value = _table(value).get(part)
        if value is None:
            return default
        self._read.add(key)
        kinds = (int, float) if kind is float else kind
        if isinstance(value, kinds) and (kind in (bool, object) or not isinstance(value, bool)):
            return value
        self.refuse(key, f"must be of type {kind.__name__}, is {value!r:.80}")
        return default

    def positive(self, key: str) -> float | None:
        """A number above 0, None if it is absent."""
        value = self.get(key, float)
        if value is None or 0 < value <= MOST:
            return None if value is None else float(value)
        self.refuse(key, f"must be above 0 and at most {MOST:g}, is {value:g}")
        return None

    def env(self, key: str) -> dict[str, str]:
        """Variables whose values are not the host's."""
        for name, value in (found := self.get(key, dict, {})).items():
            if not isinstance(value, str) or not _VARIABLE.fullmatch(name) or "\0" in value:
                self.refuse(f"{key}.{name}", f"must be a name with a text, is {value!r:.80}")
            elif _OF_HOST.search(value):
                self.refuse(f"{key}.{name}", f"{value!r:.80} is the host's: write the value itself")
        return found

    def refuse(self, key: str, why: str) -> None:
        self.refused.append(f"task.toml: {key}: {why}")

    def unused(self) -> tuple[str, ...]:
        """The keys that nobody has read."""
        found: list[str] = []
        waiting = [("", self.config)]
        while waiting:
            before, table = waiting.pop()
            for name, value in table.items():
                key = f"{before}{name}"
                if key not in self._read and (inner := _table(value)):
                    waiting.append((f"{key}.", inner))
                elif key not in self._read:
                    found.append(key)
        return tuple(sorted(found))


def _table(value: object) -> dict[str, Any]:
    """The value if it is a table, otherwise an empty one."""
    return cast("dict[str, Any]", value) if isinstance(value, dict) else {}


def _network_modes(keys: Keys) -> dict[str, str]:
    """The network modes by key; those of agent and tests are the environment's if they have none of their own."""
    internet = keys.get("environment.allow_internet", bool, True)
    modes = {"environment.network_mode": "public" if internet else "no-network"}
    for section in ("environment", "agent", "verifier"):
        key = f"{section}.network_mode"
        modes[key] = keys.get(key, str, modes["environment.network_mode"])
        if modes[key] not in ("public", "no-network"):
            keys.refuse(key, _NO_HOSTS if modes[key] == "allowlist" else f"{modes[key]!r} is not known")
    return modes


def _resources(keys: Keys) -> Resources:
    cpus, mib, size = keys.positive("environment.cpus"), keys.positive("environment.memory_mb"), None
    if text := keys.get("environment.memory", str):
        size = _SIZE.fullmatch(text.strip())
        if size is None:
            keys.refuse("environment.memory", f"must be a size such as 2G or 512M, is {text!r}")
    if mib is None and size is not None:
        mib = float(size[1]) * _MIB[size[2].upper()]
    if mib is not None and mib < LEAST_MIB:
        keys.refuse("environment.memory_mb", f"must be at least {LEAST_MIB}, is {mib:g}")
    resources = Resources() if cpus is None else Resources(cpus=cpus)
    return resources if mib is None else replace(resources, memory_bytes=int(mib) * 1024**2)


def _user(keys: Keys) -> str:
    """Who works and tests in the containers. "" means the image's own user."""
    agent, verifier = (str(keys.get(f"{role}.user", object, "")) for role in ("agent", "verifier"))
    if agent != verifier:
        keys.refuse(
            "verifier.user", "must be agent.user: one user works and tests here; write both or neither"
        )
    if agent and not _USER.fullmatch(agent):
        keys.refuse("agent.user", f"must be a name or an id of the image, is {agent!r}")
    return agent


def _check_verifier(keys: Keys, workdir: str, tree: Tree) -> None:
    """Refuses a verifier that needs another image than the task's, or more than the workdir."""
    own = keys.get("verifier.environment", dict, {})
    mode = keys.get("verifier.environment_mode", str, "separate" if own else "shared")
    for name, value in own.items():
        if value != keys.get(f"environment.{name}", object):
            keys.refuse(
                f"verifier.environment.{name}", "must be as in [environment]: the tests run in the same image"
            )
    given: list[Any] = keys.get("artifacts", list, [])
    artifacts = [_table(one).get("source", one) for one in given]
    for path in ("tests/Dockerfile", "tests/docker-compose.yaml"):
        if mode == "separate" and path in tree:
            keys.refuse(
                "verifier.environment_mode",
                f"{path} makes another image: put what the tests need into the task's",
            )
    if mode == "separate" and artifacts != [workdir]:
        keys.refuse("artifacts", "must be environment.workdir alone: only its changes reach separate tests")
    if mode == "shared" and artifacts:
        keys.refuse(
            "artifacts", "nothing but the patch of the workdir is kept: remove them if the task does without"
        )
    if mode not in ("shared", "separate"):
        keys.refuse("verifier.environment_mode", f"{mode!r} is not known")
