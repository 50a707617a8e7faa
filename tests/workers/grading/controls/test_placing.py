"""Contradictions reach the tests in every way that tests arrive in a grading container."""

import re
from dataclasses import dataclass

import pytest
from msgspec import structs

from pipeline.task import Contradiction, File
from tests.workers.claims import make_claim, make_task
from tests.workers.conftest import RepoImage
from tests.workers.contradictions import changing
from workers.grading.controls.placing import NotAsCalibrated, alike, placed, read_tests, write, written_by
from workers.sandbox.docker import DockerSandboxes
from workers.sandbox.protocol import Sandbox

pytestmark = pytest.mark.docker

BASE = b"from calc import sub\n\n\ndef test_sub():\n    assert sub(3, 1) == 2\n"
HIDDEN = b"from calc import add\n\n\ndef test_add():\n    assert add(3, 1) == 4\n"
RUN = "python3 -m pytest tests\n"
SWE_BENCH = f"""#!/bin/bash
set -uxo pipefail
cd /workspace
git checkout HEAD tests/test_calc.py
git apply -v - <<'EOF_114329324912'
diff --git a/tests/test_calc.py b/tests/test_calc.py
--- a/tests/test_calc.py
+++ b/tests/test_calc.py
@@ -1,5 +1,9 @@
-from calc import sub
+from calc import add, sub
 
 
 def test_sub():
     assert sub(3, 1) == 2
+
+
+def test_add():
+    assert add(3, 1) == 4
diff --git a/tests/test_new.py b/tests/test_new.py
new file mode 100644
--- /dev/null
+++ b/tests/test_new.py
@@ -0,0 +1,2 @@
+def test_new():
+    assert 1 + 1 == 2
EOF_114329324912
: '>>>>> Start Test Output'
{RUN}: '>>>>> End Test Output'
git checkout HEAD tests/test_calc.py
"""
NEW = b"def test_new():\n    assert 1 + 1 == 2\n"
MARK = "THE FILE"
MOVED = """diff --git a/tests/test_hidden.py b/tests/test_moved.py
similarity index 90%
rename from tests/test_hidden.py
rename to tests/test_moved.py
--- a/tests/test_hidden.py
+++ b/tests/test_moved.py
@@ -2,4 +2,4 @@
 
 
 def test_add():
-    assert add(3, 1) == 4
+    assert add(1, 3) == 4
"""
PATCHED = BASE.replace(b"sub\n", b"add, sub\n", 1) + HIDDEN[HIDDEN.index(b"\n\ndef") :]


def contradiction(path: str, text: bytes, was: str, becomes: str) -> Contradiction:
    return changing(path, text.index(was.encode()), was, becomes)


@dataclass(frozen=True, slots=True)
class Way:
    """How a test file comes to the tests; `text` is what they read."""

    script: str
    path: str
    text: bytes
    files: tuple[File, ...] = ()


def way(script: str, path: str = "tests/test_hidden.py", text: bytes = HIDDEN, *files: File) -> Way:
    return Way(script + RUN, path, text, files)


WAYS = {
    "in the repository": way("", "tests/test_calc.py", BASE),
    "put beside the repository": way(
        "", "/opt/test_hidden.py", HIDDEN, File(path="/opt/test_hidden.py", content=HIDDEN)
    ),
    "put into the repository": way(
        "", "tests/test_x.py", HIDDEN, File(path="tests/test_x.py", content=HIDDEN)
    ),
    "the script's patch of a file": Way(SWE_BENCH, "tests/test_calc.py", PATCHED),
    "a new file of the script's patch": Way(SWE_BENCH, "tests/test_new.py", NEW),
    "a patch by patch": Way(
        SWE_BENCH.replace("git apply -v -", "patch --batch --fuzz=5 -p1 -i -"), "tests/test_calc.py", PATCHED
    ),
    "a patch through a pipe, from below": Way(
        SWE_BENCH.replace(
            "git apply -v - <<'EOF_114329324912'", "cd tests\ncat <<'EOF_114329324912' | git apply"
        ).replace(": '>>>>> Start", "cd ..\n: '>>>>> Start"),
        "tests/test_calc.py",
        PATCHED,
    ),
    "a patch of what another wrote": Way(
        f"cat >tests/test_hidden.py <<'A'\n{HIDDEN.decode()}A\ngit apply <<'B'\n{MOVED}B\n{RUN}",
        "tests/test_moved.py",
        HIDDEN.replace(b"add(3, 1)", b"add(1, 3)"),
    ),
    "cat with the file before": way(f"cat >tests/test_hidden.py <<'EOF'\n{HIDDEN.decode()}EOF\n"),
    "cat with the file behind": way(f"cd tests; cat <<\\EOF >test_hidden.py\n{HIDDEN.decode()}EOF\ncd ..\n"),
    "tee": way(f'tee tests/test_hidden.py <<"E F" >/dev/null\n{HIDDEN.decode()}E F\n'),
    "a body that the shell reads": way(f"cat > tests/test_hidden.py <<EOF\n{HIDDEN.decode()}EOF\n"),
    "an indented body": way(
        "if true; then\n\tcat >tests/test_hidden.py <<-EOF\n"
        + "".join(f"\t{line}" for line in HIDDEN.decode().splitlines(keepends=True))
        + "\tEOF\nfi\n"
    ),
    "a file that the script copies": way(
        "rm -rf tests/vault && cp -a /vault tests/vault\n",
        "tests/vault/test_hidden.py",
        HIDDEN,
        File(path="/vault/test_hidden.py", content=HIDDEN),
    ),
    "a file that the script checks out": way(
        "rm -r tests\ngit checkout HEAD -- tests || exit 1\n", "tests/test_calc.py", BASE
    ),
}


async def place(sandbox: Sandbox, script: str, contradictions: list[Contradiction]) -> str:
    """The script as it has to run with these contradictions, which are written where it does not write them itself."""
    placement = await placed(sandbox, script, contradictions)
    await write(sandbox, placement.texts)
    return placement.script


async def ran(sandboxes: DockerSandboxes, image: RepoImage, way: Way, was: str, becomes: str) -> bytes:
    """The test file as the script finds it once `was` became `becomes`."""
    async with sandboxes.open(make_claim(make_task(image.tag)), role="grade") as sandbox:
        await sandbox.put(way.files)
        read = await read_tests(sandbox, way.script, [way.path])
        assert read == {way.path: way.text}
        script = await place(sandbox, way.script, [contradiction(way.path, way.text, was, becomes)])
        shown = script.replace(RUN, f"set +x; echo; echo {MARK}; cat {way.path}; exit\n")
        await sandbox.put([File(path="/eval.sh", content=shown.encode())])
        result = await sandbox.finish("/eval.sh", timeout_s=240, keep_bytes=100_000)
        return result.output.partition(f"\n{MARK}\n".encode())[2]


@pytest.mark.slow_but_for("in the repository", "put beside the repository")
@pytest.mark.parametrize("name", WAYS)
async def test_a_contradiction_reaches_the_tests_however_they_come(
    sandboxes: DockerSandboxes, repo_image: RepoImage, name: str
) -> None:
    way = WAYS[name]
    was = "== 4" if b"== 4" in way.text else "== 2"
    assert await ran(sandboxes, repo_image, way, was, "== 7") == way.text.replace(was.encode(), b"== 7")


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("in the repository", {"was": "== 3"}),
        ("the script's patch of a file", {"was": "== 3"}),
        ("tee", {"offset_bytes": 3}),
        ("a file that the script checks out", {"path": "tests/absent.py"}),
        ("a body that the shell reads", {"becomes": "== $HOME"}),
        ("cat with the file before", {"becomes": "== '''\nEOF\n'''"}),
        ("put into the repository", {"path": "tests/absent.py"}),
    ],
)
async def test_a_contradiction_that_does_not_fit_is_refused_and_changes_nothing(
    sandboxes: DockerSandboxes, repo_image: RepoImage, name: str, wrong: dict[str, str | int]
) -> None:
    way = WAYS[name]
    right = contradiction(way.path, way.text, "== ", "!= ")
    if "path" in wrong:
        misfit = structs.replace(right, **wrong)
    else:
        misfit = structs.replace(right, changes=(structs.replace(right.changes[0], **wrong),))
    async with sandboxes.open(make_claim(make_task(repo_image.tag)), role="grade") as sandbox:
        await sandbox.put(way.files)
        with pytest.raises(NotAsCalibrated):
            await place(sandbox, way.script, [misfit])
        assert await read_tests(sandbox, way.script, [way.path]) == {way.path: way.text}


async def test_two_contradictions_of_the_same_text_are_refused(
    sandboxes: DockerSandboxes, repo_image: RepoImage
) -> None:
    ones = [contradiction("tests/test_calc.py", BASE, was, "!=") for was in ("== 2", "2\n")]
    async with sandboxes.open(make_claim(make_task(repo_image.tag)), role="grade") as sandbox:
        with pytest.raises(NotAsCalibrated, match="two contradictions"):
            await place(sandbox, RUN, ones)


async def test_a_script_stays_as_it_is_under_contradictions_that_change_nothing(
    sandboxes: DockerSandboxes, repo_image: RepoImage
) -> None:
    async with sandboxes.open(make_claim(make_task(repo_image.tag)), role="grade") as sandbox:
        for way in WAYS.values():
            await sandbox.put(way.files)
            same = alike([], [contradiction(way.path, way.text, "== ", "!= ")])
            script = await place(sandbox, way.script, same)
            if "git checkout HEAD -- tests" in way.script:  # the commit goes by its id now
                script = re.sub("checkout [0-9a-f]{40}", "checkout HEAD", script)
            assert script == way.script
            assert await read_tests(sandbox, way.script, [way.path]) == {way.path: way.text}


def test_files_that_a_script_writes_are_known_by_their_paths() -> None:
    script = (
        "cd sub; cat >a.py <<X\nX\n(cd deep; tee b.py <<X\nX\n); cd ..; tee /abs/c.py <<X\nX\n" + SWE_BENCH
    )
    assert written_by(script, "/workspace") == (
        "sub/a.py",
        "sub/deep/b.py",
        "/abs/c.py",
        "tests/test_calc.py",
        "tests/test_new.py",
    )
