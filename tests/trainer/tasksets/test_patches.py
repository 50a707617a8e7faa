import pytest

from trainer.tasksets.patches import paths_of

HUNK = "@@ -1,2 +1,2 @@\n-x\n+y\n z\n"


@pytest.mark.parametrize(
    ("patch", "paths"),
    [
        (f"diff --git a/x/a.py b/x/a.py\n--- a/x/a.py\n+++ b/x/a.py\n{HUNK}", ("x/a.py",)),
        (f"--- a/a.py\n+++ b/a.py\n{HUNK}--- a/b.py\n+++ b/b.py\n{HUNK}", ("a.py", "b.py")),
        ("--- /dev/null\n+++ b/new\n@@ -0,0 +1 @@\n+x\n", ("new",)),
        ("--- a/old\n+++ /dev/null\n@@ -1 +0,0 @@\n-x\n\\ No newline\n--- a/b\n+++ b/b\n", ("old", "b")),
        ("rename from a b.py\nrename to c.py\n", ("a b.py", "c.py")),
        ('--- "a/\\303\\251.py"\n+++ "b/\\303\\251.py"\n', ("é.py",)),
        ("--- a/a.py\t2025-01-01\n+++ b/a.py\t2025-01-01\n", ("a.py",)),
        ("--- a/a.sql\n+++ b/a.sql\n@@ -1,2 +1,2 @@\n--- a/not-a-file\n+++ b/not-a-file\n x\n", ("a.sql",)),
        ("diff --git a/logo b.bin b/logo b.bin\nGIT binary patch\nliteral 4\nLcmZQz\n", ("logo b.bin",)),
        ("diff --git a/run b/run\nold mode 100644\nnew mode 100755\n", ("run",)),
        ("", ()),
    ],
)  # fmt: skip
def test_every_touched_path_is_found_and_no_other(patch: str, paths: tuple[str, ...]) -> None:
    assert paths_of(patch) == paths
