"""Shell lines are taken apart as a shell would, without running them."""

import pytest

from pipeline.command_effects import MAX_CHARS, SimpleCommand, simple_commands


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("ls", ["ls"]),
        ("cd src && pytest -q; echo done | cat", ["cd src", "pytest -q", "echo done", "cat"]),
        ("sed -i '3s|.*|  a & b; c|' x.py", ["sed -i 3s|.*|  a & b; c| x.py"]),
        ('python3 -c "import a; print(a.b(\\"c\\"))"', ['python3 -c import a; print(a.b("c"))']),
        ("grep 'a'\"b\"\\ c f", ["grep ab c f"]),
        ("X=1 timeout 60 env Y=2 pytest", ["pytest"]),
        ("(cd lib; make test) &", ["cd lib", "make test"]),
        ("pytest # && rm -r x", ["pytest"]),
        ("pytest \\\n  -q", ["pytest -q"]),
        ("make 2>&1 >/dev/null | tail", ["make", "tail"]),
        ("cat <<'EOF' | python3\npytest | x\nEOF\nls", ["cat", "python3", "ls"]),
        ("cat <<< 'pytest'", ["cat"]),
        ("cat <<A\nnever ends", ["cat"]),
        ("echo 'never ends; ls", ["echo never ends", "ls"]),
        ("; && |\n", []),
        ("", []),
    ],
)
def test_a_line_is_its_simple_commands(text: str, lines: list[str]) -> None:
    assert [command.line for command in simple_commands(text)] == lines


def test_files_that_output_goes_to_are_no_arguments() -> None:
    assert simple_commands("echo a > b.txt 2>> log && cat c >> 'd e'") == (
        SimpleCommand(("echo", "a"), writes=("b.txt",), appends=("log",)),
        SimpleCommand(("cat", "c"), appends=("d e",)),
    )


@pytest.mark.parametrize(
    "piece", ["'", '"\\"', "a'", "<<A\n", "'\"", "\\\n", "<<A <<B\n", "(", "$(", "\0", "2>"]
)
def test_any_text_is_read_and_no_more_of_it_than_a_limit(piece: str) -> None:
    text = piece * (2 * MAX_CHARS // len(piece))
    assert simple_commands(text) == simple_commands(text[:MAX_CHARS])
