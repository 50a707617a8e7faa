"""Here-documents are read and written as bash reads them."""

import subprocess
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workers.grading.controls.arrivals import Arrivals, Body, InContainer, Patched, commands

BODIES = st.lists(
    st.sampled_from(
        [
            "x = 1",
            "",
            "  EOF",
            "EOF ",
            "\tif x:",
            "\t\tEOF",
            "'",
            '"',
            "# <<EOF",
            "é",
            "\\",
            "a$b",
            "`",
            "((",
            "$(",
        ]
    )
).map(lambda lines: "".join(f"{line}\n" for line in lines))
AROUND = st.lists(
    st.sampled_from(
        [
            "echo 'it <<EOF'",
            'x="<<EOF $(echo ")" \'<<E\') `echo`"',
            "echo $((1 << 2)) ${x:-<<EOF}",
            "((x = 1 << 3))",
            "cat <<<EOF >/dev/null",
            "# don't <<EOF",
            "echo a#<<'b c'\nzz\nb c",
            "echo $'it\\'s' \\<\\<EOF 2>&1 >&2",
            "cat <<A <<-'B' >/dev/null\nA\n\t\tB",
            "if true; then echo x; fi; { echo y; } | cat; (cd /; echo z)",
            "case x in a) echo;; (x) echo;; esac",
            "f() { echo f; }; f",
            "echo \\\n  <<EOF\nEOF",
        ]
    ),
    max_size=4,
).map(lambda lines: "".join(f"{line}\n" for line in lines))
STARTS = st.sampled_from(
    [
        "cat >out.py <<'EOF'",
        'cat <<"EOF" > out.py',
        "tee out.py <<\\EOF",
        "cat <<EOF >out.py",
        "cat >./out.py <<-'EOF'",
        "cat <<'EOF' | tee out.py",
    ]
)


def run(where: Path, script: bytes) -> bytes:
    (where / "out.py").unlink(missing_ok=True)
    (where / "script.sh").write_bytes(script)
    subprocess.run(["bash", "script.sh"], cwd=where, capture_output=True, check=False)
    return (where / "out.py").read_bytes()


@pytest.mark.slow
@settings(max_examples=250, deadline=None)
@given(before=AROUND, start=STARTS, body=BODIES, after=AROUND, new=BODIES)
def test_a_body_is_what_bash_reads_and_can_be_replaced(
    tmp_path_factory: pytest.TempPathFactory, before: str, start: str, body: str, after: str, new: str
) -> None:
    where = tmp_path_factory.mktemp("work")
    script = f"{before}{start}\n{body}EOF\n{after}".encode()
    if "\nEOF\n" in body:
        return
    source = Arrivals(script, str(where)).source("out.py")
    if source is None:  # the shell puts something in the place of what is written there
        assert "'" not in start
        assert any(letter in body for letter in "$`\\")
        return
    assert isinstance(source, Body)
    heredoc = source.heredoc
    assert run(where, script) == heredoc.text(script)
    changed = heredoc.body(script, new.encode())
    if changed is None:
        assert any(letter in new for letter in "$`\\\t") or "EOF\n" in new
        return
    script = script[: heredoc.start] + changed + script[heredoc.end :]
    assert run(where, script) == new.encode()


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("A=1 B='x y' sudo cat a\\ b 'c'\"d\"", ["cat", "a b", "cd"]),
        ('cat $x "a$x" `y` *.py ~/z', ["cat", None, None, None, None, None]),
        ("if cat a; then", ["cat", "a"]),
        ("! cat {a} [b]", ["cat", "{a}", "[b]"]),
    ],
)
def test_words_are_known_only_as_they_are_written(script: str, words: list[str | None]) -> None:
    assert commands(script.encode())[0].texts() == words


@pytest.mark.parametrize(
    "script",
    [
        "cat >>out.py <<'EOF'\nx\nEOF\n",
        "tee -a out.py <<'EOF'\nx\nEOF\n",
        "cat >out.py <<'EOF'\nx\nEOF\necho y >>out.py\n",
        "cat >out.py <<EOF\n$HOME\nEOF\n",
        "sed s/a/b/ >out.py <<'EOF'\nx\nEOF\n",
    ],
)
def test_a_text_that_is_not_in_the_script_is_not_known(script: str) -> None:
    assert Arrivals(script.encode(), "/w").source("out.py") is None


DIFF = "diff --git a/a.py b/a.py\n--- a/a.py\n+++ b/a.py\n@@ -1 +1 @@\n-x\n+y\n"


@pytest.mark.parametrize(
    "command",
    [
        "git apply /tmp/a.diff",
        "git -C /w apply --whitespace=nowarn /tmp/a.diff || exit 1",
        "git apply -v /tmp/a.diff || git apply -v --3way /tmp/a.diff",
        "git apply - </tmp/a.diff",
        "patch -p1 </tmp/a.diff",
    ],
)
def test_a_diff_that_the_script_writes_to_a_file_is_applied_once(command: str) -> None:
    script = f"cat >/tmp/a.diff <<'E'\n{DIFF}E\n{command}\n"
    source = Arrivals(script.encode(), "/w").source("a.py")
    assert isinstance(source, Patched)
    assert source.heredoc.text(script.encode()) == DIFF.encode()
    assert source.old == InContainer("a.py")


@pytest.mark.parametrize(
    "command",
    ["git apply /tmp/b.diff", "git apply --exclude=a.py /tmp/a.diff", "git apply --reverse /tmp/a.diff"],
)
def test_a_diff_that_is_not_known_or_not_applied_whole_changes_nothing(command: str) -> None:
    script = f"cat >/tmp/a.diff <<'E'\n{DIFF}E\n{command}\n"
    assert Arrivals(script.encode(), "/w").source("a.py") == InContainer("a.py")


def test_what_follows_the_start_of_the_tests_does_not_count() -> None:
    script = b"cat >a.py <<'E'\nx\nE\n: '>>>>> Start Test Output'\ngit checkout HEAD a.py\n"
    assert isinstance(Arrivals(script, "/w").source("a.py"), Body)
    assert isinstance(
        Arrivals(script.replace(b": '>>>>> Start Test Output'", b"pytest a.py"), "/w").source("a.py"), Body
    )
