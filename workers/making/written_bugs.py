"""Bugs that an author writes: a function goes out, and comes back with a bug in it.

Until the author has replied, the bug of a function is the edit that replaces the function by itself, so that it has a place among the
others. A reply must be the same function but for a few lines, and mean something else; signature and docstring stay, and no comment is
added, because an agent would see the bug by them. Of the reply only the lines that differ are used, so that all others keep their form.
"""

import ast
import dataclasses
import difflib
import functools
import io
import re
import tokenize
from collections.abc import Iterable, Iterator, Mapping, Sequence

from workers.grading.controls.spans import read
from workers.making.author import Author, Unusable
from workers.making.bugs import Function, PlantedBug, tidied

MOST_LINES = 15  # lines that a bug may change
MOST_FUNCTION_CHARS = 12_000
_REQUEST = """This is a function of a Python program:

```python
{function}
```

Write it with one subtle bug, such as a mistake that a good programmer makes and a reviewer may miss. Tests that pass now should fail
with it.

- Keep the name, the arguments, the decorators, the docstring and all comments. Add no comment.
- Change {most_lines} lines at most, and leave all others as they are.
- The code must run: no error of syntax, and no name without a value.
- Reply with the whole function in one block of code.
"""
_BLOCK = re.compile(r"^[ \t]*```[^\n]*\n(.*?)^[ \t]*```[ \t]*$", re.MULTILINE | re.DOTALL)
_Definition = ast.FunctionDef | ast.AsyncFunctionDef


def to_write(source: bytes, functions: Iterable[Function]) -> Iterator[PlantedBug]:
    """A bug for each of these functions of a file that an author can be shown, which is to be written yet."""
    file = read(source)
    if file is None:
        return
    for one in functions:
        start = file.line_starts[one.line - 1]
        shown = "".join(_shown(source[start : one.end]))
        if len(shown) <= MOST_FUNCTION_CHARS and _definition(shown):
            yield PlantedBug("model", one, start, one.end, source[start : one.end])


async def written_by(
    author: Author, bugs: Iterable[PlantedBug], sources: Mapping[str, bytes]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The functions that the author writes, "" for bugs of other kinds, and the prompts that it replied to. Raises NoReply, Unusable."""
    texts, prompts = list[str](), list[str]()
    for bug in bugs:
        text = ""
        if bug.kind == "model":
            use = functools.partial(function_of, source=sources[bug.function.path], bug=bug)
            found = await author.write(request_of_bug(bug), use)
            text = found.value
            prompts.append(found.prompt)
        texts.append(text)
    return tuple(texts), tuple(prompts)


def request_of_bug(bug: PlantedBug) -> str:
    """The prompt for a bug that is to be written."""
    return _REQUEST.format(function="".join(_shown(bug.becomes)).rstrip(), most_lines=MOST_LINES)


def function_of(reply: str, source: bytes, bug: PlantedBug) -> str:
    """The function in a reply, which is the bug's with a bug in it; `source` is that of its file. Raises Unusable."""
    try:
        return _usable(reply, source, bug)
    except RecursionError as error:
        raise Unusable("it is nested too deeply") from error


def _usable(reply: str, source: bytes, bug: PlantedBug) -> str:
    """The same. Raises RecursionError, too."""
    blocks = _BLOCK.findall(reply)
    if not blocks:
        raise Unusable("it has no block of code")
    was, text = "".join(_shown(bug.becomes)), max(blocks, key=len).rstrip() + "\n"
    before, after = _definition(was), _definition(text)
    assert before is not None
    if after is None:
        raise Unusable("the block does not parse as one function alone")
    if _outside(before) != _outside(after):
        raise Unusable("the function has another name, signature, decorator or docstring")
    if not _comments(text) <= _comments(was):
        raise Unusable("it has a comment that was not there")
    changed = [code for code in _codes(bug, text) if code[0] != "equal"]
    num_lines = sum(max(end - start, new_end - new) for _, start, end, new, new_end in changed)
    if num_lines > MOST_LINES:
        raise Unusable(f"it changes {num_lines} lines, and {MOST_LINES} are the most")
    if not changed or tidied(source, written(bug, text)) is None:
        raise Unusable("it means the same as before, or does not parse in its file")
    return text


def written(bug: PlantedBug, text: str) -> PlantedBug:
    """The bug as an edit of the lines in which a function that `function_of` has returned differs."""
    codes = _codes(bug, text)
    changed = [number for number, code in enumerate(codes) if code[0] != "equal"]
    old, new = _lines(bug.becomes.decode()), _shown(text.encode())
    line_end = "\r\n" if old[0].endswith("\r\n") else "\n"
    margin = _margin(old[0])
    becomes: list[str] = []
    for tag, start, end, new_start, new_end in codes[changed[0] : changed[-1] + 1]:
        if tag == "equal":
            becomes += old[start:end]
        else:
            lines = (line.rstrip("\r\n") for line in new[new_start:new_end])
            becomes += [(margin + line if line.strip() else "") + line_end for line in lines]
    before, after = old[: codes[changed[0]][1]], old[codes[changed[-1]][2] :]
    start, end = bug.start + len("".join(before).encode()), bug.end - len("".join(after).encode())
    return dataclasses.replace(bug, start=start, end=end, becomes="".join(becomes).encode())


def _codes(bug: PlantedBug, text: str) -> Sequence[tuple[str, int, int, int, int]]:
    """What differs between the lines of the function and those of the text, as difflib says it."""
    was, becomes = ([line.rstrip() for line in _shown(one)] for one in (bug.becomes, text.encode()))
    return difflib.SequenceMatcher(None, was, becomes, autojunk=False).get_opcodes()


def _lines(text: str) -> list[str]:
    """The lines with their ends, which are those that Python knows."""
    return [*io.StringIO(text, newline="")]


def _shown(function: bytes) -> list[str]:
    """The lines of a function without the indentation of the first."""
    try:
        lines = _lines(function.decode())
    except UnicodeDecodeError:
        return []
    lines = lines[next((at for at, line in enumerate(lines) if line.strip()), 0) :]
    return [line.removeprefix(_margin(lines[0])) for line in lines]


def _margin(line: str) -> str:
    return line[: len(line) - len(line.lstrip())]


def _definition(text: str) -> _Definition | None:
    """The only statement of the text, if that is a function."""
    file = read(text.encode())
    match file.tree.body if file else []:
        case [ast.FunctionDef() | ast.AsyncFunctionDef() as found]:
            return found
        case _:
            return None


def _outside(node: _Definition) -> tuple[object, ...]:
    """What callers and readers know of a function."""
    documented = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    docstrings = [
        ast.get_docstring(one, clean=False) for one in ast.walk(node) if isinstance(one, documented)
    ]
    seen = [node.args, *node.decorator_list, *([node.returns] if node.returns else [])]
    return type(node), node.name, docstrings, [ast.dump(one) for one in seen]


def _comments(text: str) -> set[str]:
    """The comments of a text that parses. Raises Unusable if its tokens cannot be told apart."""
    try:
        tokens = [*tokenize.generate_tokens(io.StringIO(text).readline)]
    except (tokenize.TokenError, SyntaxError) as error:
        raise Unusable("its tokens cannot be told apart") from error
    return {token.string for token in tokens if token.type == tokenize.COMMENT}
