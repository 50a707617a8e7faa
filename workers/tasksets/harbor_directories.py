"""Task directories of Harbor as trees of files: read without following a link, and written for a task.

A task that was imported from such a directory is written as it was. For another one, whose verdict is an exit status, a directory is made:
tests/test.sh judges the repository as the grader does, without its defences, and leaves the reward. tests/task.json and solution/gold.json
hold all that the task says here, and an import uses them as long as the rest of the directory is what an export makes of them.
"""

import json
import os
import posixpath
import re
import shlex
import stat
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import msgspec

from pipeline.screen import visible_line
from pipeline.task import ExitCode, File, RewardFile, Task
from pipeline.taskfile import Gold, fingerprint
from workers.tasksets.importing import GIT_ENV
from workers.tasksets.patches import ended

MOST_FILES = 10_000
MOST_BYTES = 64 * 1024**2
TASK, GOLD = "tests/task.json", "solution/gold.json"
_PATH = re.compile(r"[^/\0]+(?:/[^/\0]+)*")

Tree = Mapping[str, File]
"""Files, links and empty directories by their paths, in order. A mode has the type of file, and says whether it is executable."""


def read_tree(directory: Path) -> Tree:
    """The content of a task directory. Raises ValueError naming a path that cannot be used."""
    found: dict[str, File] = {}
    waiting, num_bytes = [""], 0
    while waiting:
        folder = waiting.pop()
        entries = list(os.scandir(directory / folder))
        if not entries and folder:
            found[folder] = File(path=folder, content=b"", mode=stat.S_IFDIR | 0o755)
        for entry in entries:
            path = posixpath.join(folder, entry.name)
            if not path.isprintable():
                raise ValueError(f"{path!r}: is a name with invisible characters or bytes that are not UTF-8")
            status = entry.stat(follow_symlinks=False)
            num_bytes += status.st_size
            if len(found) >= MOST_FILES or num_bytes > MOST_BYTES:
                most = f"{MOST_FILES} files or {MOST_BYTES >> 20} MiB"
                raise ValueError(
                    f"{path}: the directory has more than {most}; what is large belongs into the image"
                )
            if entry.is_dir(follow_symlinks=False):
                waiting.append(path)
            else:
                found[path] = _file(path, directory / path, status.st_mode)
    return dict(sorted(found.items()))


def _file(path: str, place: Path, mode: int) -> File:
    if stat.S_ISREG(mode):
        kept = stat.S_IFREG | (0o755 if mode & stat.S_IXUSR else 0o644)
        return File(path=path, content=place.read_bytes(), mode=kept)
    if not stat.S_ISLNK(mode):
        raise ValueError(f"{path}: is neither a file nor a directory")
    target = os.readlink(place)
    inside = posixpath.normpath(posixpath.join(posixpath.dirname(path), target))
    if target.startswith("/") or inside.startswith("..") or not path.startswith("environment/"):
        raise ValueError(f"{path}: is a link to {target!r}: put the file itself in its place")
    return File(path=path, content=os.fsencode(target), mode=stat.S_IFLNK | 0o777)


def write_tree(tree: Iterable[File], directory: Path) -> None:
    """Writes the files into `directory`, which must not exist. Links come last, so that nothing is written through one."""
    directory.mkdir(parents=True)
    for file in sorted(tree, key=lambda file: stat.S_ISLNK(file.mode)):
        place = directory / file.path
        if stat.S_ISDIR(file.mode):
            place.mkdir(parents=True, exist_ok=True)
            continue
        place.parent.mkdir(parents=True, exist_ok=True)
        if stat.S_ISLNK(file.mode):
            place.symlink_to(os.fsdecode(file.content))
        else:
            place.write_bytes(file.content)
            place.chmod(stat.S_IMODE(file.mode))


def write_directories(tasks: Sequence[tuple[Task, Gold]], out: Path) -> None:
    """Writes the directory of each task into `out`. Raises ValueError, and writes nothing, if that is impossible for one."""
    trees: dict[str, Sequence[File]] = {}
    for task, gold in tasks:
        name = task.id.partition(":")[2].rpartition("/")[2]
        if name in trees:
            name = task.id.partition(":")[2].replace("/", "__")
        name = re.sub(r"[^\w.-]", "_", name).lstrip(".") or "task"
        if name in trees or (out / name).exists():
            raise ValueError(
                f"--out: {out / name} exists already, for {visible_line(task.id)}: name a new directory"
            )
        trees[name] = gold.directory if _is_unchanged(task, gold) else [*made_of(task, gold).values()]
        if (path := _astray(trees[name])) is not None:
            raise ValueError(f"{task.id}: directory: {path!r} is not a path in a task directory")
    for name, tree in trees.items():
        write_tree(tree, out / name)


def _astray(tree: Sequence[File]) -> str | None:
    """A path that could lead out of the directory; None if there is none."""
    links = {file.path for file in tree if stat.S_ISLNK(file.mode)}
    for path in (file.path for file in tree):
        folders = {path[: found.start()] for found in re.finditer("/", path)}
        if not _PATH.fullmatch(path) or {".", ".."} & {*path.split("/")} or folders & links:
            return path
    return None


def _is_unchanged(task: Task, gold: Gold) -> bool:
    """Whether the task is still that of the directory that it was imported from. Raises ValueError if it is not, but had one."""
    if gold.directory and gold.directory_of != fingerprint(task):
        raise ValueError(
            f"{task.id}: was changed since it was imported from a directory, which the export would write as it"
            " was: change the directory, and import it again"
        )
    return bool(gold.directory)


def made_of(task: Task, gold: Gold) -> Tree:
    """A task directory for a task whose verdict is an exit status. Raises ValueError naming a field that Harbor has no place for."""
    verdict = task.verdict
    if isinstance(verdict, RewardFile) or not isinstance(verdict, ExitCode):
        kind = verdict.__struct_config__.tag
        why = (
            "its directory is not in the gold file"
            if kind == "reward_file"
            else "only the grader can tell it"
        )
        raise ValueError(
            f"{task.id}: verdict: Harbor cannot reach a {kind} verdict, because {why}: leave it out"
        )
    restores = bool(verdict.protected_paths or verdict.test_patch)
    for field, is_there, advice in (
        ("setup_script", bool(task.setup_script.strip()), "build an image that has been set up"),
        ("setup_patch", bool(task.setup_patch.strip()), "build an image that has it"),
        ("base_commit", restores and not task.base_commit, "name the commit to restore the test files from"),
    ):
        if is_there:
            raise ValueError(f"{task.id}: {field}: Harbor has no place for it: {advice}")
    solve = f"#!/bin/bash\n{_enter(task)}git apply --whitespace=nowarn /solution/fix.diff\n"
    texts = {
        "task.toml": _toml(task),
        "instruction.md": task.problem,
        "environment/Dockerfile": _dockerfile(task),
        "tests/test.sh": _test_script(task, verdict),
        "tests/eval_script.sh": verdict.eval_script,
        "tests/tests.diff": verdict.test_patch,
        TASK: msgspec.json.encode(task),
        "solution/solve.sh": solve,
        "solution/fix.diff": ended(gold.patch),
        GOLD: msgspec.json.encode(gold),
    }
    texts |= {f"tests/files/{number}": file.content for number, file in enumerate(verdict.files)}
    return {
        path: File(
            path=path,
            content=text if isinstance(text, bytes) else text.encode("utf-8", "surrogateescape"),
            mode=stat.S_IFREG | (0o755 if path.endswith(".sh") else 0o644),
        )
        for path, text in sorted(texts.items())
    }


def _enter(task: Task) -> str:
    return f"{GIT_ENV}\n" + (f"cd {shlex.quote(task.workdir)} || exit 1\n" if task.workdir else "")


def _test_script(task: Task, verdict: ExitCode) -> str:
    """The hidden tests take the place of the repository's, then the eval script decides. What fails before that is reward 0."""
    base, paths = shlex.quote(task.base_commit), shlex.join(verdict.protected_paths)
    restore = f"""for path in {paths}; do
  rm -rf -- "$path"
  [ -z "$(git ls-tree {base} -- "$path")" ] || git checkout -q {base} -- "$path"
done
"""
    steps = [
        f"install -D -m {file.mode:o} /tests/files/{number} {shlex.quote(file.path)} || exit 1\n"
        for number, file in enumerate(verdict.files)
    ]
    if verdict.test_patch.strip():
        steps.insert(0, "git apply --whitespace=nowarn /tests/tests.diff || exit 1\n")
    return f"""#!/bin/bash
# Judges the repository by the exit status of eval_script.sh, with the hidden tests in their places.
mkdir -p /logs/verifier && echo 0 >/logs/verifier/reward.txt
{_enter(task)}{restore if paths else ""}{"".join(steps)}bash /tests/eval_script.sh && echo 1 >/logs/verifier/reward.txt
"""


def _dockerfile(task: Task) -> str:
    """The task's image without its hidden paths. Root removes them only if the task names the user to go on with."""
    hidden = [posixpath.join(task.workdir or ".", path) for path in task.hidden_paths]
    remove = f"RUN rm -rf -- {shlex.join(hidden)}\n" if hidden else ""
    as_root = f"USER root\n{remove}USER {task.user}\n" if remove and task.user else remove
    return f"FROM {task.image}\n{as_root}"


def _toml(task: Task) -> str:
    """Where something has to be removed from the image, Harbor must build one, so task.toml names none."""
    environment = {
        "docker_image": None if task.hidden_paths else task.image,
        "workdir": task.workdir or None,
        "cpus": task.resources.cpus,
        "memory_mb": -(-task.resources.memory_bytes // 1024**2),
        "network_mode": "public" if task.resources.network else "no-network",
    }
    user = {"user": task.user or None}
    sections = {"agent": user, "verifier": user, "environment": environment, "environment.env": task.env}
    lines = ['schema_version = "1.4"']
    for section, values in sections.items():
        said = {name: value for name, value in values.items() if value is not None}
        lines += (
            ["", f"[{section}]", *(f"{_key(name)} = {_value(value)}" for name, value in said.items())]
            if said
            else []
        )
    return "\n".join(lines) + "\n"


def _key(name: str) -> str:
    return name if re.fullmatch(r"[\w-]+", name, re.ASCII) else _value(name)


def _value(value: object) -> str:
    """A TOML value. A JSON string is one in TOML, but for DEL."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
