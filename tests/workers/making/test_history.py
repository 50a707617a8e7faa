"""Which commits may become tasks, how they are divided, and that nothing in a repository stops the walk."""

from pathlib import Path

import pytest

from tests.workers.making.repositories import Repository
from workers.making.ecosystems.python import ECOSYSTEM as PYTHON
from workers.making.fixes import Fix, split_of
from workers.making.history import (
    Commit,
    Fallen,
    GitError,
    History,
    TooLarge,
    iso_date,
    resolved,
    run_git,
)

CODE = "def add(a, b):\n    return a - b\n"
FIXED = "def add(a, b):\n    return a + b\n"
TESTS = "from calc import add\n\n\ndef test_add():\n    assert add(2, 2) == 0\n"
NEW_TESTS = TESTS.replace("== 0", "== 4")


@pytest.fixture
def repository(tmp_path: Path) -> Repository:
    made = Repository.at(tmp_path / "calc")
    made.commit("Begin", {"calc.py": CODE, "tests/test_calc.py": TESTS, "README.md": "Sums\n"})
    return made


def history_of(repository: Repository) -> History:
    return History(repository.path, repository.path.parent / "borrowed.git")


def fix_of(history: History, sha: str) -> Fix:
    commit = next(history.commits(sha, "-1"))
    return Fix(commit.parents[0] if commit.parents else "", commit, (commit,))


def reason(repository: Repository, sha: str, max_files: int = 20) -> str:
    history = history_of(repository)
    with pytest.raises(Fallen) as fallen:
        split_of(history, fix_of(history, sha), PYTHON, max_files=max_files)
    return fallen.value.reason


def test_a_fix_with_its_tests_is_divided_into_known_fix_and_hidden_tests(repository: Repository) -> None:
    sha = repository.commit(
        "Mend", {"calc.py": FIXED, "tests/test_calc.py": NEW_TESTS, "tests/data.txt": "1\n"}
    )
    history = history_of(repository)
    split = split_of(history, fix_of(history, sha), PYTHON, max_files=20)
    assert split.fix.startswith("diff --git a/calc.py b/calc.py\n")
    assert "+    return a + b\n" in split.fix
    assert "test" not in split.fix
    assert split.test_paths == ("tests/data.txt", "tests/test_calc.py")
    assert split.modules == ("tests/test_calc.py",)


@pytest.mark.parametrize(
    ("files", "author", "why"),
    [
        ({"calc.py": FIXED}, "", "changes no tests"),
        ({"tests/test_calc.py": NEW_TESTS, "README.md": "x\n"}, "", "changes no Python code beside tests"),
        ({"calc.py": FIXED, "tests/data.txt": "1\n"}, "", "changes no test module"),
        ({"calc.py": FIXED, "tests/test_calc.py": NEW_TESTS}, "dependabot[bot] <x@y>", "by a bot"),
        (
            {"calc.py": "def add(a,b):\n  return (a - b)\n", "tests/test_calc.py": NEW_TESTS},
            "",
            "moves or formats code only",
        ),
        (
            {"calc.py": None, "sums.py": CODE, "tests/test_calc.py": NEW_TESTS.replace("calc", "sums")},
            "",
            "moves or formats code only",
        ),
        ({"calc.py": FIXED, "tests/test_calc.py": f"# Sums.\n{TESTS}"}, "", "moves or formats tests only"),
        (
            {
                "calc.py": FIXED,
                "tests/test_calc.py": NEW_TESTS,
                **{f"a{number}.py": "" for number in range(4)},
            },
            "",
            "changes too many files",
        ),
        ({"calc.py": b"x = '\xff'\n", "tests/test_calc.py": NEW_TESTS}, "", "difference is not UTF-8"),
        (
            {"calc.py": "x = 1\n" * 500_000, "tests/test_calc.py": NEW_TESTS},
            "",
            "cannot be read",
        ),
        (
            {
                "calc.py": FIXED,
                "tests/test_calc.py": NEW_TESTS,
                "m.bin": "version https://git-lfs.github.com/spec/v1\noid sha256:0\n",
            },
            "",
            "changes a file of Git LFS",
        ),
    ],
)
def test_a_commit_that_is_no_fix_with_tests_falls_for_a_named_reason(
    repository: Repository, files: dict[str, str | bytes | None], author: str, why: str
) -> None:
    sha = repository.commit("Change", files, author or "Ann <ann@example.invalid>")
    assert reason(repository, sha, max_files=5) == why


@pytest.mark.parametrize("folder", ["testdata", "calc/testdata/deep", "test_data", "test-data"])
def test_data_of_tests_belong_to_the_hidden_tests(repository: Repository, folder: str) -> None:
    sha = repository.commit(
        "Mend", {"calc.py": FIXED, "tests/test_calc.py": NEW_TESTS, f"{folder}/sums.golden": "4\n"}
    )
    history = history_of(repository)
    split = split_of(history, fix_of(history, sha), PYTHON, max_files=20)
    assert "golden" not in split.fix
    assert f"{folder}/sums.golden" in split.test_paths


def test_the_first_commit_falls(repository: Repository) -> None:
    assert reason(repository, repository.git("rev-parse", "HEAD")) == "has no parent"


def test_a_merge_is_one_change_against_its_first_parent(repository: Repository) -> None:
    repository.git("checkout", "-q", "-b", "topic")
    repository.commit("One half", {"calc.py": FIXED})
    repository.commit("Other half", {"tests/test_calc.py": NEW_TESTS})
    repository.git("checkout", "-q", "main")
    repository.commit("Meanwhile", {"README.md": "More\n"})
    repository.git("merge", "-q", "--no-ff", "-m", "Merge topic", "topic", number=9)
    history = history_of(repository)
    commits = list(history.commits(resolved(repository.path, "main", "--branch")))
    assert [one.message.strip() for one in commits] == ["Merge topic", "Meanwhile", "Begin"]
    split = split_of(history, fix_of(history, commits[0].sha), PYTHON, max_files=20)
    assert "+    return a + b\n" in split.fix
    assert "+    assert add(2, 2) == 4\n" in split.tests
    assert "More" not in split.fix


def test_odd_names_links_submodules_and_messages_do_not_stop_the_walk(repository: Repository) -> None:
    odd = {"a\nb.py": "x = 1\n", 'q"uote.py': "y = 1\n", "tests/test_\u00e9\n.py": "z = 1\n"}
    named = repository.commit(b"\xff\xfe not UTF-8", {**odd, "logo.bin": b"\0\1"})
    bad = repository.path / "bad"
    bad.symlink_to("/etc/passwd")
    (repository.path / "tests/link.py").symlink_to("nowhere")
    linked = repository.commit("Links", {"calc.py": FIXED, "tests/test_calc.py": NEW_TESTS})
    (repository.path / "calc.py").write_text(CODE)
    (repository.path / "tests/test_calc.py").write_text(TESTS)
    repository.git("add", "--all")
    repository.git("update-index", "--add", "--cacheinfo", f"160000,{linked},module")
    repository.git("commit", "-q", "-m", "Module", number=8)
    module = repository.git("rev-parse", "HEAD")
    history = history_of(repository)
    commits = {one.sha: one for one in history.commits(resolved(repository.path, "HEAD", "--branch"))}
    assert commits[named].message.endswith(" not UTF-8\n")
    assert reason(repository, named) == "changes no test module"
    assert split_of(history, fix_of(history, linked), PYTHON, max_files=20).modules == ("tests/test_calc.py",)
    with pytest.raises(Fallen) as fallen:
        split_of(history, Fix(linked, commits[module], (commits[module],)), PYTHON, max_files=20)
    assert fallen.value.reason == "changes a submodule"


def test_settings_of_the_repository_run_nothing_and_change_no_difference(
    repository: Repository, tmp_path: Path
) -> None:
    sha = repository.commit(
        "Mend",
        {"calc.py": FIXED, "tests/test_calc.py": NEW_TESTS, ".gitattributes": "*.py diff=evil filter=evil\n"},
    )
    for name in (
        "diff.evil.textconv",
        "diff.evil.command",
        "diff.external",
        "filter.evil.smudge",
        "core.fsmonitor",
    ):
        repository.git("config", name, f"touch {tmp_path}/ran; cat")
    repository.git("config", "diff.noprefix", "true")
    history = history_of(repository)
    assert (
        "--- a/calc.py\n+++ b/calc.py\n" in split_of(history, fix_of(history, sha), PYTHON, max_files=20).fix
    )
    history.bundle(sha, tmp_path / "base.bundle")
    assert not (tmp_path / "ran").exists()


def test_a_bundle_has_one_commit_with_the_files_of_the_base(repository: Repository, tmp_path: Path) -> None:
    base = repository.git("rev-parse", "HEAD")
    later = repository.commit("Mend", {"calc.py": FIXED, "tests/test_calc.py": NEW_TESTS})
    history = history_of(repository)
    history.bundle(base, tmp_path / "base.bundle")
    commit = history.base_commit(base)
    there = Repository.at(tmp_path / "clone")
    there.git("fetch", "-q", str(tmp_path / "base.bundle"), f"refs/bases/{commit}")
    assert there.git("rev-list", "--all", "FETCH_HEAD") == commit
    assert there.git("show", "FETCH_HEAD:calc.py") == CODE.strip()
    objects = there.git("cat-file", "--batch-all-objects", "--batch-check")
    assert later not in objects
    assert base not in objects
    assert repository.git("rev-parse", "HEAD") == later
    assert repository.git("for-each-ref").count("\n") == 0


def test_what_is_no_repository_or_no_commit_is_refused_by_its_option(
    repository: Repository, tmp_path: Path
) -> None:
    with pytest.raises(GitError, match=r"REPO: .*not a git repository"):
        History(tmp_path, tmp_path / "borrowed.git")
    with pytest.raises(GitError, match=r"--only: .* has no commit '--evil'"):
        resolved(repository.path, "--evil", "--only")


def test_output_of_git_is_read_to_a_limit(repository: Repository) -> None:
    with pytest.raises(TooLarge):
        run_git(["-C", str(repository.path), "log"], env={"PATH": "/usr/bin:/bin"}, most_bytes=10)


def test_a_date_that_is_none_is_refused() -> None:
    assert iso_date("2024-05-31", "--since") == "2024-05-31T00:00:00"
    assert iso_date("2024-05-31", "--until", is_end=True) == "2024-05-31T23:59:59"
    assert iso_date("2024-05-31T12:00", "--until", is_end=True) == "2024-05-31T12:00:00"
    with pytest.raises(ValueError, match="--since: 'soon' must be a date"):
        iso_date("soon", "--since")


def test_the_commits_of_one_line_have_all_their_fields(repository: Repository) -> None:
    head = repository.git("rev-parse", "HEAD")
    history = history_of(repository)
    assert list(history.commits(head)) == [
        Commit(
            head,
            (),
            "Ann",
            "ann@example.invalid",
            "2024-01-01T12:00:00+00:00",
            "2024-01-01T12:00:00+00:00",
            "Begin\n",
        )
    ]


def test_a_changed_commit_has_other_contents_no_history_and_the_same_hash_in_every_process(
    repository: Repository, tmp_path: Path
) -> None:
    (repository.path / "calc.py").chmod(0o755)
    head = repository.commit(
        "Odd names", {"a b/[c]*.py": "x = 1\n", ".gitattributes": "*.py text eol=crlf\n"}
    )
    files = {"calc.py": b"def add():\r\n    pass", "a b/[c]*.py": b"x = 2\n", "tests/test_calc.py": None}
    history = history_of(repository)
    sha = history.changed(head, files)
    assert sha == History(repository.path, tmp_path / "other.git").changed(head, files)
    changes = {one.path.decode(): one for one in history.changes(head, sha)}
    assert {path: history.blob(one.new) for path, one in changes.items()} == {
        path: text or b"" for path, text in files.items()
    }
    assert changes["calc.py"].new_mode == "100755"
    assert history.git("log", "--format=%P %s", sha).decode().strip() == "base"
    assert history.paths_with(sha, ["Sums", "x = 2"]) == ["README.md", "a b/[c]*.py"]
    assert history.paths_with(sha, []) == history.paths_with(sha, ["-nowhere"]) == []
    assert repository.git("status", "--porcelain") == ""
