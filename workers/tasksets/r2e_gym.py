"""Rows of R2E-Gym datasets (Subset, Lite, V1): reverted commits, judged by the expected outcome of every hidden test.

Their images contain the hidden tests, the script that runs them and, in some, the solution. Tests and script are first moved to VAULT, in
both containers. The agent's container has neither VAULT nor the builders' notes (TELLTALES); the grader's restores the tests and runs them.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pipeline.task import R2eExpected, Task
from pipeline.taskfile import Gold
from workers.tasksets.importing import Importer, Row, named_image
from workers.tasksets.rows import Fields

WORKDIR = "/testbed"
VAULT = "/r2e_vault"
TESTS = "r2e_tests"
RUN_TESTS = "run_tests.sh"
# Files that the images' builders left in the repository or beside it, the commit among them.
TELLTALES = (
    "expected_test_output.json",
    "execution_result.json",
    "parsed_commit.json",
    "syn_issue.json",
    "modified_files.json",
    "modified_entities.json",
)
# The environment is inside the repository, where a patch could add its own git or bash. So the system's programs come first,
# and python is found through PYTHON_DIR.
PYTHON_DIR = "/r2e_bin"
ENV = {
    "PATH": f"{PYTHON_DIR}:/root/.local/bin:/root/.cargo/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin"
    f":/sbin:/bin:{WORKDIR}/.venv/bin"
}

SETUP_SCRIPT = f"""set -e
mkdir -p {VAULT} {PYTHON_DIR}
for name in {TESTS} {RUN_TESTS}; do
  for place in "/$name" "{WORKDIR}/$name"; do
    if [ -L "$place" ]; then rm -f "$place"; fi
    if [ -e "$place" ] && [ ! -e "{VAULT}/$name" ]; then mv "$place" "{VAULT}/$name"; fi
    rm -rf "$place"
  done
done
test -f {VAULT}/{RUN_TESTS}
test -d {VAULT}/{TESTS}
for name in python python3; do
  printf '#!/bin/sh\\nexec {WORKDIR}/.venv/bin/%s "$@"\\n' "$name" >{PYTHON_DIR}/"$name"
  chmod 755 {PYTHON_DIR}/"$name"
done
touch {VAULT}/stamp
"""
# A patch that reaches into the environment is not graded: it could report anything about the tests.
EVAL_SCRIPT = f"""cd {WORKDIR}
changed=$(find .venv \\( -type f -o -type l \\) -newer {VAULT}/stamp -print -quit)
if [ -n "$changed" ]; then
  echo "the patch reaches into the environment: $changed"
  exit 1
fi
rm -rf {TESTS}
cp -a {VAULT}/{TESTS} {TESTS}
find {TESTS} -name __pycache__ -prune -exec rm -rf {{}} +
bash {VAULT}/{RUN_TESTS}
"""

_ISSUE = re.compile(r"\[ISSUE\](.*)\[/ISSUE\]", re.DOTALL)
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_TEST_FOLDERS = {"tests", "Tests", "test", "Test"}
_SIGNS = {"context": " ", "added": "+", "deleted": "-", "note": "\\ "}


def task_of(fields: Fields) -> tuple[Task, Gold]:
    """The task, and its solution if the row contains the commit. Raises ValueError naming file, row and field."""
    image = named_image(fields) or fields.text("docker_image")
    if "swebench" in image:
        raise fields.refusal("docker_image", f"{image!r} is a SWE-bench task: import it as swe-bench")
    commit = fields.text("commit_hash")
    task = Task(
        id=f"r2e-gym:{id_of(fields)}",
        repo=fields.text("repo_name"),
        base_commit="",  # the image has the commit before `commit_hash` checked out
        image=image,
        workdir=WORKDIR,
        problem=_problem(fields),
        verdict=R2eExpected(
            eval_script=EVAL_SCRIPT, expected=_expected(fields), protected_paths=(TESTS, RUN_TESTS)
        ),
        setup_script=SETUP_SCRIPT,
        hidden_paths=(VAULT, *TELLTALES, *(f"/{name}" for name in TELLTALES)),
        env=ENV,
    )
    patches = _patches(fields, commit)
    return task, Gold(id=task.id, patch=patches["patch"], test_patch=patches["test_patch"])


def id_of(fields: Fields) -> str:
    """The rows have no id of their own; repository and commit make one."""
    return fields.optional_text("instance_id") or f"{fields.text('repo_name')}__{fields.text('commit_hash')}"


def row_of(task: Task, gold: Gold) -> Row:
    """The row from which `task_of` makes `task`. It has `patch` instead of the parsed commit."""
    assert isinstance(task.verdict, R2eExpected)
    instance_id = task.id.partition(":")[2]
    return {
        "instance_id": instance_id,
        "repo_name": task.repo,
        "docker_image": task.image,
        "commit_hash": instance_id.rpartition("__")[2],
        "problem_statement": task.problem,
        "expected_output_json": task.verdict.expected,
        "patch": gold.patch,
        "test_patch": gold.test_patch,
    }


IMPORTER = Importer(
    help="rows of R2E-Gym, Subset, Lite or V1",
    task_of=task_of,
    row_of=row_of,
    id_of=id_of,
    repo="repo_name",
    size=("problem_statement", "parsed_commit_content", "expected_output_json"),
)


def _problem(fields: Fields) -> str:
    text = fields.text("problem_statement")
    tagged = _ISSUE.search(text)
    problem = (tagged[1] if tagged else text).strip()
    if not problem:
        raise fields.refusal("problem_statement", "nothing between [ISSUE] and [/ISSUE]")
    return problem


def _expected(fields: Fields) -> dict[str, str]:
    """The expected outcome of each test, by its name as R2E-Gym compares it: without colours, cut before " - "."""
    found = fields.mapping("expected_output_json")
    if not all(isinstance(status, str) for status in found.values()):
        raise fields.refusal("expected_output_json", "must say PASSED, FAILED or ERROR of each test")
    plain = {_COLOUR.sub("", name): status for name, status in found.items()}
    expected = {name.split(" - ")[0]: plain[name] for name in sorted(plain)}
    if "PASSED" not in expected.values():
        raise fields.refusal("expected_output_json", "no test is expected to pass")
    return expected


def _patches(fields: Fields, commit: str) -> dict[str, str]:
    """The commit as two git diffs, the fix and its tests; both empty if the row does not contain it."""
    if fields.optional_text("patch"):
        return {"patch": fields.text("patch"), "test_patch": fields.optional_text("test_patch")}
    name = "parsed_commit_content"
    diffs = fields.mapping(name).get("file_diffs", [])
    patches = {"patch": "", "test_patch": ""}
    try:
        for diff in diffs:
            path = diff["header"]["file"]["path"]
            patches["test_patch" if _is_test(path) else "patch"] += _file_diff(path, diff)
    except (KeyError, TypeError, AttributeError) as error:
        raise fields.refusal(name, f"not the parts of a diff as R2E-Gym writes them: {error!r}") from error
    if diffs and not patches["patch"]:
        raise fields.refusal(name, f"commit {commit} changes nothing but tests")
    return patches


def _is_test(path: str) -> bool:
    """Whether R2E-Gym considers the path a test."""
    *folders, name = path.split("/")
    return name.startswith("test_") or path.endswith("_test.py") or bool(_TEST_FOLDERS & set(folders))


def _file_diff(path: str, diff: Mapping[str, Any]) -> str:
    """One file's part; "" for a binary file, whose content is not in the row."""
    if diff.get("is_binary_file"):
        return ""
    lines = [f"diff --git a/{path} b/{path}"]
    if diff["header"].get("misc_line"):
        lines.append(diff["header"]["misc_line"])
    if index := diff.get("index_line"):
        lines.append(f"index {index['old_commit_hash']}..{index['new_commit_hash']} {index['mode']}".rstrip())
    if diff.get("minus_file") and diff.get("plus_file"):
        lines += [f"--- {diff['minus_file']['path']}", f"+++ {diff['plus_file']['path']}"]
    for hunk in diff.get("hunks", []):
        lines += _hunk(hunk["descriptor"], hunk["line_group"]["all_lines"])
    return "".join(f"{line}\n" for line in lines)


def _hunk(descriptor: Mapping[str, Any], parsed: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """A hunk's lines, at most as many as its header counts: R2E-Gym's parser treats the end of the diff as an empty line."""
    ranges = [descriptor["old_range"], descriptor["new_range"]]
    numbers = [f"{r['start']}" if r["length"] is None else f"{r['start']},{r['length']}" for r in ranges]
    section = f" {descriptor['section']}" if descriptor["section"] else ""
    yield f"@@ -{numbers[0]} +{numbers[1]} @@{section}"
    left = [1 if r["length"] is None else r["length"] for r in ranges]
    for line in parsed:
        kind = line["type"]
        if kind != "note" and not any(left):
            return
        left[0] -= kind in ("context", "deleted")
        left[1] -= kind in ("context", "added")
        yield _SIGNS[kind] + line["content"]
