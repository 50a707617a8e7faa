"""The search of an image's files finds the answer in whatever it lies, and nothing in an honest image."""

import bz2
import gzip
import importlib.util
import io
import json
import lzma
import os
import py_compile
import subprocess
import tarfile
import zipfile
from collections.abc import Mapping
from pathlib import Path

import pytest
import zstandard

from pipeline.taskfile import Gold
from tests.workers.claims import make_task
from workers.leaks.search import Bytecode, ImageQuery, KnownRepository, SearchReport, search_archive
from workers.leaks.signature import signature_of
from workers.leaks.unpacking import UnpackingLimits

BEFORE = '''"""Prices."""


def discounted(cents, percent):
    """`cents` less `percent`; half a cent is rounded up."""
    return cents * (100 - percent) // 100


def with_shipping(cents):
    return cents + 490
'''
AFTER = BEFORE.replace(
    "    return cents * (100 - percent) // 100\n",
    "    reduced_price = cents * (100 - percent) + 50\n    return reduced_price // 100\n",
)
FIX = f"""diff --git a/shop/pricing.py b/shop/pricing.py
--- a/shop/pricing.py
+++ b/shop/pricing.py
@@ -3,7 +3,8 @@
{chr(32)}
 def discounted(cents, percent):
     \"\"\"`cents` less `percent`; half a cent is rounded up.\"\"\"
-    return cents * (100 - percent) // 100
+    reduced_price = cents * (100 - percent) + 50
+    return reduced_price // 100
{chr(32)}
{chr(32)}
 def with_shipping(cents):
"""
TESTS = """diff --git a/tests/test_pricing.py b/tests/test_pricing.py
new file mode 100644
--- /dev/null
+++ b/tests/test_pricing.py
@@ -0,0 +1,5 @@
+from shop.pricing import discounted
+
+
+def test_half_a_cent_is_rounded_up():
+    assert discounted(105, 10) == 95
"""
ENVIRONMENT = {
    "GIT_CONFIG_GLOBAL": "/dev/null",
    "GIT_AUTHOR_NAME": "t",
    "GIT_AUTHOR_EMAIL": "t@example.invalid",
    "GIT_COMMITTER_NAME": "t",
    "GIT_COMMITTER_EMAIL": "t@example.invalid",
}
TOP = "/workspace"


class Repository:
    """Two commits: the base, and the fix."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.git("init", "-q", "-b", "main", str(path), cwd=path.parent)
        self.base = self.commit(BEFORE)
        self.fixed = self.commit(AFTER)

    def git(self, *words: str, cwd: Path | None = None) -> str:
        done = subprocess.run(
            ["git", *words],
            cwd=cwd or self.path,
            env=os.environ | ENVIRONMENT,
            check=True,
            capture_output=True,
            text=True,
        )
        return done.stdout.strip()

    def commit(self, text: str) -> str:
        (self.path / "shop").mkdir(exist_ok=True)
        (self.path / "shop/pricing.py").write_text(text)
        (self.path / "shop/pricing_notes.txt").write_text(text * 20)  # so that git makes a delta
        self.git("add", "--all")
        self.git("commit", "-qm", "a commit")
        return self.git("rev-parse", "HEAD")

    def known(self) -> KnownRepository:
        """What an agent may know if the task's repository is in TOP."""
        blobs = [line.split() for line in self.git("ls-tree", "-r", self.base).splitlines()]
        return KnownRepository(
            top=TOP.encode(),
            git_directory=f"{TOP}/.git".encode(),
            files={path.encode(): blob for _, _, blob, path in blobs},
            history=frozenset({self.base}),
        )

    def bundle(self, *words: str) -> bytes:
        self.git("bundle", "create", "-q", "../a.bundle", *words)
        return (self.path.parent / "a.bundle").read_bytes()

    def store(self) -> dict[str, bytes]:
        """The files of the git directory."""
        files = [path for path in (self.path / ".git").rglob("*") if path.is_file()]
        return {str(path.relative_to(self.path / ".git")): path.read_bytes() for path in files}


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Repository:
    return Repository(tmp_path_factory.mktemp("answer") / "repository")


def archive(files: Mapping[str, bytes], form: str = "", times: Mapping[str, int] | None = None) -> bytes:
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode=f"w:{form}") as tar:
        for path, content in files.items():
            entry = tarfile.TarInfo(path.lstrip("/"))
            entry.size, entry.mtime = len(content), (times or {}).get(path, 0)
            tar.addfile(entry, io.BytesIO(content))
    return made.getvalue()


def zipped(files: Mapping[str, bytes]) -> bytes:
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED) as archive:
        for path, content in files.items():
            archive.writestr(path, content)
    return made.getvalue()


def ar(files: Mapping[str, bytes]) -> bytes:
    made = b"!<arch>\n"
    for name, content in files.items():
        made += b"%-16s%-12d%-6d%-6d%-8s%-10d`\n" % (name.encode(), 0, 0, 0, b"100644", len(content))
        made += content + b"\n" * (len(content) % 2)
    return made


def swap_file(text: str) -> bytes:
    return (
        b"b0VIM 9.0\0" + b"\0" * 100 + b"\0".join(line.encode() for line in text.splitlines()[::-1]) + b"\0"
    )


def compiled(tmp_path: Path, text: str, mode: str = "TIMESTAMP") -> bytes:
    source = tmp_path / "pricing.py"
    source.write_text(text)
    return Path(
        py_compile.compile(
            str(source),
            cfile=str(tmp_path / "out.pyc"),
            doraise=True,
            invalidation_mode=py_compile.PycInvalidationMode[mode],
        )
    ).read_bytes()


def searched(
    files: Mapping[str, bytes],
    base: KnownRepository | None = None,
    *,
    times: Mapping[str, int] | None = None,
    limits: UnpackingLimits | None = None,
) -> SearchReport:
    gold = Gold(id="test:task", patch=FIX, test_patch=TESTS)
    query = ImageQuery(
        signature=signature_of(make_task("image"), gold),
        base=base or KnownRepository(),
        limits=limits or UnpackingLimits(),
    )
    return search_archive(io.BytesIO(archive(files, times=times)), query)


FIXED = AFTER.encode()
PLANTED = {
    "/usr/share/doc/pricing.py": FIXED,
    "/var/backups/pricing.py~": FIXED,
    "/workspace/shop/pricing.py.orig": FIXED,
    "/opt/data/pricing.gz": gzip.compress(FIXED),
    "/opt/data/pricing.bz2": bz2.compress(FIXED),
    "/opt/data/pricing.xz": lzma.compress(FIXED),
    "/opt/data/pricing.lzma": lzma.compress(FIXED, lzma.FORMAT_ALONE),
    "/opt/data/pricing.zst": zstandard.compress(FIXED),
    "/opt/a.tar": archive({"x/pricing.py": FIXED}),
    "/opt/a.tgz": archive({"x/pricing.py": FIXED}, "gz"),
    "/opt/a.tar.bz2": archive({"x/pricing.py": FIXED}, "bz2"),
    "/opt/a.tar.xz": archive({"x/pricing.py": FIXED}, "xz"),
    "/opt/a.tar.zst": zstandard.compress(archive({"x/pricing.py": FIXED})),
    "/opt/no-suffix": gzip.compress(archive({"x.zip": zipped({"pricing.py": FIXED})})),
    "/root/.cache/pip/wheels/shop-2.0-py3-none-any.whl": zipped({"shop/pricing.py": FIXED}),
    "/root/.cache/pip/http/0/a/wheel": b"cc=4,headers" + zipped({"shop/pricing.py": FIXED}),
    "/root/.cache/pip/http/0/a/sdist": b"cc=4,headers" + archive({"shop/pricing.py": FIXED}, "gz"),
    "/usr/share/shop-2.0.tar.gz": archive({"shop-2.0/shop/pricing.py": FIXED}, "gz"),
    "/var/cache/apt/archives/shop.deb": ar({"data.tar.xz": archive({"usr/pricing.py": FIXED}, "xz")}),
    "/usr/share/patches/fix.patch": FIX.encode(),
    "/var/tmp/fix.rej": FIX.partition("@@")[1].encode() + FIX.partition("@@")[2].encode(),
    "/usr/share/patches/bug.patch": "\n".join(
        line[:1].translate(str.maketrans("+-", "-+")) + line[1:] for line in FIX.splitlines()
    ).encode(),
    "/usr/share/task.json": json.dumps({"gold_patch": FIX}).encode(),
    "/usr/share/.pricing.py.swp": swap_file(AFTER),
}


@pytest.mark.parametrize("path", PLANTED)
def test_a_copy_of_the_solution_is_found_in_whatever_it_lies(path: str, repository: Repository) -> None:
    report = searched({path: PLANTED[path], f"{TOP}/shop/pricing.py": BEFORE.encode()}, repository.known())
    assert [(one.paths, one.why) for one in report.found] == [((path,), "")]
    assert report.found[0].kind in ("solution in a file", "solution in an archive")
    assert report.found[0].where.startswith(path)


def test_hidden_tests_are_found_in_an_sdist(repository: Repository) -> None:
    tests = "\n".join(line[1:] for line in TESTS.splitlines()[5:]).encode()
    sdist = archive({"shop-2.0/tests/test_pricing.py": tests}, "gz")
    report = searched({"/opt/shop-2.0.tar.gz": sdist}, repository.known())
    assert [str(one.kind) for one in report.found] == ["hidden tests in an archive"]


@pytest.mark.parametrize("form", ["bundle", "newest", "gzipped", "archived", "pack", "renamed", "loose"])
def test_the_fix_is_found_among_git_objects_anywhere(
    form: str, repository: Repository, tmp_path: Path
) -> None:
    bundle = repository.bundle("--all")
    clone = Repository.__new__(Repository)
    clone.path = tmp_path / "clone"
    repository.git("clone", "-q", "--bare", ".", str(clone.path / ".git"))
    clone.git("--git-dir", ".git", "repack", "-adq")
    packs = {name: content for name, content in clone.store().items() if name.endswith(".pack")}
    planted, path = {
        "bundle": ({"/tmp/repo.bundle": bundle}, "/tmp/repo.bundle"),
        "newest": ({"/tmp/b": repository.bundle(f"{repository.base}..main")}, "/tmp/b"),
        "gzipped": ({"/tmp/b.gz": gzip.compress(bundle)}, "/tmp/b.gz"),
        "archived": ({"/tmp/b.zip": zipped({"repo.bundle": bundle})}, "/tmp/b.zip"),
        "pack": ({"/srv/some.data": next(iter(packs.values()))}, "/srv/some.data"),
        "renamed": ({f"/srv/not-git/{n}": c for n, c in clone.store().items()}, "/srv/not-git"),
        "loose": ({f"/srv/old/{n}": c for n, c in repository.store().items()}, "/srv/old"),
    }[form]
    report = searched(planted, repository.known())
    assert {one.paths for one in report.found} == {(path,)}
    kinds = {"solution in git objects", "other repository"}
    # Of its newest commits alone, a bundle has no whole files.
    assert {one.kind for one in report.found} == (kinds if form != "newest" else {"other repository"})
    assert any(", 1 commits after the base" in one.where for one in report.found)


def test_later_commits_are_found_without_a_known_solution(repository: Repository) -> None:
    query = ImageQuery(signature=signature_of(make_task("image"), None), base=repository.known())
    report = search_archive(io.BytesIO(archive({"/tmp/b": repository.bundle("--all")})), query)
    assert [(one.kind, one.where) for one in report.found] == [
        ("other repository", "/tmp/b, 1 commits after the base")
    ]


@pytest.mark.parametrize("mode", ["TIMESTAMP", "CHECKED_HASH"])
def test_bytecode_of_anything_but_the_base_commit_is_found(
    mode: str, tmp_path: Path, repository: Repository
) -> None:
    source = f"{TOP}/shop/pricing.py"
    for text in (AFTER, BEFORE):
        content = compiled(tmp_path, text, mode)
        at = int.from_bytes(content[8:12], "little")
        for name in ("shop/__pycache__/pricing.cpython-311.pyc", "shop/pricing.pyc"):
            bytecode = f"{TOP}/{name}"
            files = {bytecode: content, source: BEFORE.encode()}
            report = searched(files, repository.known(), times={source: at})
            leaks = [(one.kind, one.paths) for one in report.found]
            assert leaks == [("compiled solution", (bytecode,))] * (text == AFTER)


def test_later_commits_are_found_in_a_store_that_is_too_large_to_be_read_whole(
    repository: Repository,
) -> None:
    report = searched(
        {"/tmp/b": repository.bundle("--all")}, repository.known(), limits=UnpackingLimits(file_bytes=1000)
    )
    assert [(one.kind, one.paths) for one in report.found] == [("other repository", ("/tmp/b",))]
    assert report.skipped == ("/tmp/b: more than 0 MiB unpacked",)


def test_bytecode_says_of_which_source_it_is_in_every_version_of_python() -> None:
    at, size = (1700000001).to_bytes(4, "little"), (5).to_bytes(4, "little")
    headers = [
        (62211).to_bytes(2, "little") + b"\r\n" + at,
        (3379).to_bytes(2, "little") + b"\r\n" + at + size,
        (3394).to_bytes(2, "little") + b"\r\n" + bytes(4) + at + size,
    ]
    assert [Bytecode.read(header).is_of(b"x = 1", 1700000001) for header in headers] == [True] * 3
    assert [Bytecode.read(header).is_of(b"x = 1", 1700000002) for header in headers] == [False] * 3
    assert [Bytecode.read(header).is_of(b"x = 10", 1700000001) for header in headers] == [True, False, False]


def test_stale_bytecode_of_installed_code_is_removed_but_the_code_is_not(
    repository: Repository, tmp_path: Path
) -> None:
    package = "/usr/lib/python3/dist-packages/shop"
    content = compiled(tmp_path, AFTER)
    files = {
        f"{package}/__pycache__/pricing.cpython-311.pyc": content,
        f"{package}/pricing.py": BEFORE.encode(),
    }
    assert [one.paths for one in searched(files, repository.known()).found] == [(min(files),)]
    [found] = searched({f"{package}/pricing.pyc": content}, repository.known()).found
    assert (found.kind, found.paths) == ("compiled solution", ())


def test_installed_code_is_named_and_not_removed(repository: Repository) -> None:
    path = "/usr/local/lib/python3.11/site-packages/shop/pricing.py"
    [found] = searched({path: FIXED}, repository.known()).found
    assert (found.kind, found.where, found.paths) == ("solution in a file", path, ())
    assert found.why == "it is installed code, which others may need"


def test_what_lies_in_the_repositorys_own_git_directory_is_named_and_not_removed(
    repository: Repository,
) -> None:
    files = {
        f"{TOP}/.git/hooks/notes": FIX.encode(),
        f"{TOP}/.git/objects/pack/mine.bundle": repository.bundle("--all"),
    }
    report = searched(files, repository.known())
    assert {one.where.split(",")[0] for one in report.found} == set(files)
    assert {one.why for one in report.found} == {"it is in the repository's git directory"}


def test_a_file_whose_name_cannot_be_written_down_is_named_and_not_removed(repository: Repository) -> None:
    [found] = searched({"/srv/\udcff.py": FIXED, "/srv/two\nlines": b""}, repository.known()).found
    assert (found.where, found.paths, found.why) == ("/srv/\\xff.py", (), "its name is no UTF-8")


def test_an_honest_image_raises_nothing(repository: Repository, tmp_path: Path) -> None:
    other = Repository.__new__(Repository)
    other.path = tmp_path / "other"
    other.git("init", "-q", str(other.path), cwd=tmp_path)
    (other.path / "pricing.py").write_text("def price(cents):\n    return cents // 100\n")
    other.git("add", "--all")
    other.git("commit", "-qm", "something else")
    base = {f"{TOP}/.git/{name}": content for name, content in repository.store().items()}
    stdlib = Path(importlib.util.__file__).parent.parent
    library = {f"/usr/lib/python3/{p.name}": p.read_bytes() for p in stdlib.glob("*.py")}
    wheel = zipped({p.name: p.read_bytes() for p in list(stdlib.glob("*.py"))[:40]})
    content = compiled(tmp_path, BEFORE)
    source = f"{TOP}/shop/pricing.py"
    files = {
        **base,
        **library,
        **{f"/srv/other/.git/{name}": content for name, content in other.store().items()},
        source: BEFORE.encode(),
        f"{TOP}/shop/__pycache__/pricing.cpython-311.pyc": content,
        "/usr/lib/python3/dist-packages/other/pricing.py": b"def price(cents):\n    return cents // 100\n",
        "/usr/share/shop-1.0.tar.gz": archive({"shop/pricing.py": BEFORE.encode()}, "gz"),
        "/root/base.bundle": repository.bundle("v1") if _tagged(repository) else b"",
        "/root/.cache/pip/wheels/library.whl": wheel,
        "/root/broken.gz": b"\x1f\x8bno gzip at all",
        "/root/broken.zip": wheel[:1000] + wheel[-200:],
        "/root/broken.pack": b"PACK\0\0\0\2\0\0\xff\xff nothing",
    }
    at = int.from_bytes(content[8:12], "little")
    report = searched(files, repository.known(), times={source: at})
    assert report == SearchReport(found=(), skipped=())


def _tagged(repository: Repository) -> bool:
    repository.git("tag", "-f", "v1", repository.base)
    return True


def test_lines_that_the_base_commit_has_elsewhere_are_not_the_answers(repository: Repository) -> None:
    known = repository.known()
    blob = subprocess.run(
        ["git", "hash-object", "--stdin"], input=FIXED, capture_output=True, check=True
    ).stdout.decode()
    base = KnownRepository(
        top=known.top,
        git_directory=known.git_directory,
        files={**known.files, b"old.py": blob.strip()},
        history=known.history,
    )
    files = {"/opt/copy.py": FIXED, f"{TOP}/old.py": FIXED}
    assert searched(files, base).found == ()
    assert [one.paths for one in searched(files | {f"{TOP}/old.py": FIXED + b"#"}, base).found] == [
        ("/opt/copy.py",),
        (f"{TOP}/old.py",),
    ]


def test_all_names_of_a_file_go(repository: Repository) -> None:
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w") as tar:
        entry = tarfile.TarInfo("opt/copy.py")
        entry.size = len(FIXED)
        tar.addfile(entry, io.BytesIO(FIXED))
        link = tarfile.TarInfo("opt/link.py")
        link.type, link.linkname = tarfile.LNKTYPE, "opt/copy.py"
        tar.addfile(link)
    made.seek(0)
    signature = signature_of(make_task("image"), Gold(id="test:task", patch=FIX))
    [found] = search_archive(made, ImageQuery(signature=signature, base=repository.known())).found
    assert found.paths == ("/opt/copy.py", "/opt/link.py")


def test_what_a_limit_leaves_out_is_named_and_the_rest_is_searched(repository: Repository) -> None:
    limits = UnpackingLimits(
        depth=2, piece_bytes=1 << 20, read_bytes=1 << 20, file_bytes=2 << 20, image_bytes=16 << 20
    )
    zeros = bytes(900 << 10)
    deep = FIXED
    for _ in range(3):
        deep = gzip.compress(deep)
    report = searched(
        {
            "/bomb.gz": gzip.compress(bytes(8 << 20)),
            "/bomb.zip": zipped({str(number): zeros for number in range(4)}),
            "/deep.gz": deep,
            "/large": bytes(2 << 20),
            "/fix.gz": gzip.compress(FIXED),
            "/a.7z": b"7z\xbc\xaf\x27\x1c of which nothing is known",
        },
        repository.known(),
        limits=limits,
    )
    assert [one.paths for one in report.found] == [("/fix.gz",)]
    assert report.skipped == (
        "/a.7z: a 7-Zip archive is not unpacked",
        "/bomb.gz: more than 1 MiB in one piece",
        "/bomb.zip: more than 2 MiB unpacked",
        "/deep.gz: more than 2 archives in each other",
        "/large: longer than 1 MiB",
    )
