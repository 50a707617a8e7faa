"""Finds what a script runs and names, from the words of its text, without running it.

It may find too much but should miss little: a result counts only if it is a file of the repository. Quotes are dropped, so that the words
of `sh -c '...'` are read like any others, and every value assigned to a variable counts.
"""

import itertools
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from pipeline.runners import LANGUAGES, PYTEST, UNITTEST

MOST_COMBINATIONS = 64  # limit for the values of the variables in a line
MOST_PASSES = 4  # limit of passes that replace variables in the values of variables
LONGEST_CHARS = 64 * 1024  # limit for a script without its here-documents

SHELLS = frozenset({"bash", "dash", "ksh", "sh", "zsh"})
INTERPRETERS = frozenset(program for language in LANGUAGES for program in language.interpreters)
# fmt: off
# Programs that run the command in their arguments.
WRAPPERS = frozenset({
    "builtin", "catchsegv", "command", "env", "eval", "exec", "ionice", "nice", "nohup", "setsid", "stdbuf", "sudo",
    "taskset", "time", "timeout", "unbuffer", "xargs", "xvfb-run",
})
# Modules of Python that run the program in their arguments.
RUNNING_MODULES = frozenset({"coverage", "cProfile", "kernprof", "pdb", "profile", "runpy", "trace"})
KEYWORDS = frozenset({"!", "[[", "do", "done", "elif", "else", "fi", "if", "then", "until", "while"})
# The arguments of these commands decide nothing: they inspect files, print or prepare.
HARMLESS = frozenset({
    ":", "[", "apt", "apt-get", "chmod", "chown", "cmp", "conda", "declare", "diff", "echo", "export", "false", "for", "git",
    "kill", "local", "ls", "mkdir", "mv", "printf", "read", "readonly", "rm", "rmdir", "set", "sleep", "test", "touch",
    "trap", "true", "type", "unset", "wait", "which",
})
# The arguments of these commands matter only if their output goes to a runner.
READERS = frozenset({
    "awk", "base64", "cat", "cut", "egrep", "fgrep", "file", "find", "grep", "head", "hexdump", "jq", "md5sum", "nl", "od",
    "paste", "sed", "sha1sum", "sha256sum", "sort", "stat", "strings", "tac", "tail", "tr", "uniq", "wc", "xxd",
})
# fmt: on
_FEEDS = re.compile(r"\bxargs\b|\$\(|`|<\(|\bread\b|\bmapfile\b|\breadarray\b")
# Matches a line that only inspects what it reads.
_CHECKS = re.compile(
    r"(?:^|[;&|(!]|\bif|\bthen|\bwhile)\s*(?:test\s|\[{1,2}\s|cmp\s|diff\s|echo\s|printf\s|grep\s+-\w*q)"
)

_HEREDOC = re.compile(r"(?<!<)<<-?\s*[\"'\\]?(\w+)[\"']?(?!<)")
_READS_STDIN = re.compile(r"(?:^|[\s;&|(/])(?:ba|da|k|z)?sh\b|\bpython[\d.]*\b|\bsource\b|\bxargs\b")
_WRITES = re.compile(r"(?:>|\btee\b)\s*[\"']?([\w./-]+)")
_COMMENT = re.compile(r"(?:^|(?<=\s))#[^\n]*")
_HERE = re.compile(
    r"\$\((?:\s*dirname[^()]*(?:\([^()]*\)[^()]*)?|\s*pwd[^()]*|\s*git\s+rev-parse[^()]*|\s*readlink[^()]*)\)"
    r"|`(?:dirname|pwd|git rev-parse)[^`]*`|\$\{PWD\}|\$PWD\b|\$\{(?:0|BASH_SOURCE(?:\[0\])?)%/\*\}"
)
_ENTERS_HERE = re.compile(r"\$\(\s*cd\s+([^\s;&|()]+)[^()]*\)")
_ASSIGNMENT = re.compile(r"(?:^|(?<=[\s;&|(]))([A-Za-z_]\w*)\+?=(\([^)]*\)|\"[^\"]*\"|'[^']*'|[^\s;&|()]*)")
_ASSIGNMENTS_BEFORE = re.compile(r"^\s*(?:[A-Za-z_]\w*\+?=(?:\"[^\"]*\"|'[^']*'|\S*)\s+)+")
_LOOP = re.compile(r"\bfor\s+(\w+)\s+in\s+([^;\n]*)")
_VARIABLE = re.compile(
    r"\$\{[#!]?(\w+)(?:\[[^\]]*\])?(?::?[-=+?]([^{}$]*)|[%#/^,:@][^{}$]*)?\}|\$(\w+|[@*#?$!-])"
)
_OPERATOR = re.compile(r"\d*>&\d*-?|&>+|<\(|\$\(|[;&|(){}`\n]")
_OUTPUT = re.compile(r"\d*>+\|?\s*\S*")
_INPUT = re.compile(r"\d*<\s*([^\s<>]+)")
_ASSIGNS = re.compile(r"\w+\+?=.*")
_NUMBER = re.compile(r"[+-]?\d+(?:\.\d+)?[smhd]?")
_PYTHON = re.compile(r"(?:python|pypy)[\d.]*")
_MODULE_OPTION = re.compile(r"-[A-Za-z]*m")
_IMPORTED = re.compile(r"(?:^|[\s;(])(?:import|from)\s+(\w+(?:\.\w+)*)")
_PLUGIN = re.compile(r"(?:^|\s)-p[\s=]*([A-Za-z_][\w.]*)(?=\s|$)")
_FROM = re.compile(r"^[ \t]*from[ \t]+([\w.]+)[ \t]+import[ \t]+([^\n#]*)", re.MULTILINE)
_IMPORT = re.compile(r"^[ \t]*import[ \t]+([^\n#]*)", re.MULTILINE)
_PLUGINS = re.compile(r"^pytest_plugins\s*(?::[^=\n]*)?\+?=\s*([\[({][^\])}]*|[^\n]*)", re.MULTILINE)
_SCRIPT_NAME = re.compile(r".*\.(?:py|sh|bash|js|mjs|rb|pl|php)")


@dataclass(slots=True)
class ScriptWords:
    """The programs and names in scripts, as written, with variables replaced."""

    runs: set[str] = field(default_factory=set[str])  # files, among them those that a shell sources
    names: set[str] = field(default_factory=set[str])  # all other words: files, modules, names in options
    # Modules that are run or loaded: `python -m`, unittest's tests, pytest's plugins.
    modules: set[str] = field(default_factory=set[str])
    imports: set[str] = field(default_factory=set[str])  # modules that Python code in a script imports
    programs: set[str] = field(default_factory=set[str])  # programs that are searched for on the PATH
    # Directories that commands run in, or that are searched for tests.
    entered: set[str] = field(default_factory=set[str])
    on_python_path: set[str] = field(default_factory=set[str])  # directories
    on_path: set[str] = field(default_factory=set[str])  # directories

    def read(self, text: str, variables: Mapping[str, str]) -> None:
        """Adds the contents of a shell script whose environment has `variables`."""
        text = _ENTERS_HERE.sub(r"\1", _HERE.sub(".", _plain(text)[:LONGEST_CHARS]))
        values = _values(text, variables)
        self.imports.update(_IMPORTED.findall(text.replace('"', " ").replace("'", " ")))
        for line in text.split("\n"):
            for expanded in _expanded(line, values):
                self._line(expanded)
        self.on_python_path.update(_folders(values.get("PYTHONPATH", ()), values))
        self.on_path.update(_folders(values.get("PATH", ()), values))
        self.modules.update(
            name for value in values.get(PYTEST.plugins_variable, ()) for name in value.split(",") if name
        )
        for value in values.get(PYTEST.options_variable, ()):
            self.modules.update(_PLUGIN.findall(value))

    def _line(self, line: str) -> None:
        feeds = bool(_FEEDS.search(line)) and not _CHECKS.search(line)
        for part in _OPERATOR.split(line):
            command = _ASSIGNMENTS_BEFORE.sub("", part)
            words = re.sub(r"[\"'\\]", "", _INPUT.sub(" ", _OUTPUT.sub(" ", command))).split()
            if not words or words[0] not in READERS | HARMLESS:
                self.names.update(_INPUT.findall(command))
            self._command(words, feeds=feeds)

    def _command(self, words: list[str], *, feeds: bool) -> None:
        while words and (words[0] in KEYWORDS or _ASSIGNS.fullmatch(words[0])):
            words = words[1:]
        if not words:
            return
        folder, _, name = words[0].rpartition("/")
        # Some repositories have a program with the name of a well-known one, such as bin/test.
        program, rest = name if not folder or folder.startswith("/") else "", words[1:]
        if words[0] in (".", "source"):
            self.runs.update(rest[:1])
        elif program in WRAPPERS:
            self._command(_after_options(rest), feeds=feeds)
        elif program in SHELLS or program in INTERPRETERS:
            self._interpreter(rest, feeds=feeds, is_shell=program in SHELLS)
        elif _PYTHON.fullmatch(program):
            self._python(rest)
        elif program == "coverage" and rest[:1] == ["run"]:
            self._python(rest[1:])
        elif program in ("cd", "pushd"):
            self.entered.update(rest[-1:])
        elif program in HARMLESS and not (program == "git" and {"apply", "am"} & set(rest)):
            pass
        elif program not in READERS or feeds:
            self._other(words)

    def _interpreter(self, words: list[str], *, feeds: bool, is_shell: bool) -> None:
        for position, word in enumerate(words):
            if is_shell and re.fullmatch(r"-\w*c", word):
                self._command(words[position + 1 :], feeds=feeds)
                return
            if not word.startswith(("-", "+")) and word not in ("run", "test"):
                self.runs.add(word)
                self._arguments(words[position + 1 :])
                return

    def _python(self, words: list[str]) -> None:
        while words:
            word, words = words[0], words[1:]
            if word in ("-W", "-X"):
                words = words[1:]
            elif _MODULE_OPTION.fullmatch(word) and words:
                module, words = words[0], words[1:]
                if module not in RUNNING_MODULES:
                    self._module(module, words)
                    return
                words = words[1:] if words[:1] == ["run"] else words
            elif word.startswith("-c"):
                break
            elif not word.startswith("-"):
                self.runs.add(word)
                break
        self._arguments(words)

    def _module(self, module: str, words: list[str]) -> None:
        self.modules.add(module)
        if module in UNITTEST.modules:
            named = [word for word in words if re.fullmatch(r"[A-Za-z_][\w.]*", word)]
            by_class = [word.rpartition(".")[0] for word in named]
            self.modules.update(named, by_class, (word.rpartition(".")[0] for word in by_class))
            if words[:1] == ["discover"]:
                self.entered.update(word for word in words[1:] if not word.startswith("-"))
        self._arguments(words)

    def _other(self, words: list[str]) -> None:
        if "/" in words[0] or _SCRIPT_NAME.fullmatch(words[0]):
            self.runs.add(words[0])
        else:
            self.programs.add(words[0])
        for position, word in enumerate(words):  # the words after an unknown wrapper
            program = word.rpartition("/")[2]
            if position and (program in SHELLS or program in INTERPRETERS or _PYTHON.fullmatch(program)):
                self._command(words[position:], feeds=True)
                break
        self._arguments(words[1:])

    def _arguments(self, words: list[str]) -> None:
        for word in words:
            self.names.update((word, *re.split(r"[=:,@\[\]]+", word)))
            if re.match(r"-[A-Za-z][^-]", word):
                self.names.add(word[2:])
        self.modules.update(_PLUGIN.findall(" ".join(words)))


def _plain(text: str) -> str:
    """`text` without comments, and without the here-documents that no shell or Python reads."""
    lines = text.replace("\\\n", " ").split("\n")
    ends: dict[str, list[int]] = {}
    for number in range(len(lines) - 1, -1, -1):
        ends.setdefault(lines[number].strip(), []).append(number)
    kept: list[str] = []
    number = 0
    while number < len(lines):
        line = lines[number]
        kept.append(_COMMENT.sub("", _HEREDOC.sub(" ", line)))
        number += 1
        for delimiter in _HEREDOC.findall(line):
            later = ends.get(delimiter, [])
            while later and later[-1] < number:
                later.pop()
            if later:
                if _READS_STDIN.search(line) or _is_run_later(line, lines[later[-1] + 1 :]):
                    kept += lines[number : later[-1]]
                number = later[-1] + 1
    return "\n".join(kept)


def _is_run_later(line: str, lines: Iterable[str]) -> bool:
    written = _WRITES.search(line)
    if written is None or written[1].endswith(".py"):
        return False
    name = written[1].rpartition("/")[2]
    return any(name in later for later in lines)


def _values(text: str, variables: Mapping[str, str]) -> dict[str, tuple[str, ...]]:
    """Every value that a variable may have."""
    values: dict[str, dict[str, None]] = {name: {value: None} for name, value in variables.items()}
    for name, value in _ASSIGNMENT.findall(text):
        values.setdefault(name, {})[value.strip("\"'()")] = None
    for name, words in _LOOP.findall(text):
        values.setdefault(name, {}).update(dict.fromkeys(words.split()))
    return {name: tuple(given) for name, given in values.items()}


def _expanded(line: str, values: Mapping[str, tuple[str, ...]]) -> Iterator[str]:
    """`line` with its variables replaced, once for each combination of their values."""
    lines = [line]
    for _ in range(MOST_PASSES):
        if not any("$" in each for each in lines):
            break
        combined = itertools.chain.from_iterable(_replaced(each, values) for each in lines)
        lines = list(dict.fromkeys(itertools.islice(combined, MOST_COMBINATIONS)))
    yield from lines


def _replaced(line: str, values: Mapping[str, tuple[str, ...]]) -> Iterator[str]:
    found = list(_VARIABLE.finditer(line))
    choices: dict[str, tuple[str, ...]] = {}
    for variable in found:
        name = variable[1] or variable[3]
        unknown = "." if line[variable.end() : variable.end() + 1] == "/" else ""
        given = (*values.get(name, ()), *((variable[2],) if variable[2] else ()))
        choices[variable[0]] = given or (unknown,)
    for chosen in itertools.product(*choices.values()):
        value = dict(zip(choices, chosen, strict=True))
        yield _VARIABLE.sub(lambda variable, value=value: value[variable[0]], line)


def _folders(paths: Iterable[str], values: Mapping[str, tuple[str, ...]]) -> set[str]:
    expanded = (each for path in paths for each in _expanded(path, values))
    return {folder.strip("\"'") for path in expanded for folder in path.split(":")} - {""}


def _after_options(words: list[str]) -> list[str]:
    """The command among the arguments of a program that runs it."""
    for position, word in enumerate(words):
        if not (word.startswith("-") or _NUMBER.fullmatch(word) or _ASSIGNS.fullmatch(word)):
            return words[position:]
    return []


def imported_modules(source: str) -> set[str]:
    """The modules that Python code imports, as far as its lines show."""
    modules: set[str] = set()
    for package, names in _FROM.findall(source):
        modules.update((package, *(f"{package}.{name}" for name in re.findall(r"\w+", names))))
    for names in _IMPORT.findall(source):
        modules.update(name.split()[0] for name in names.split(",") if name.split())
    return {name.lstrip(".") for name in modules} - {""}


def loaded_plugins(conftest: str) -> set[str]:
    """The modules that a conftest.py makes pytest load."""
    assigned = _PLUGINS.findall(conftest)
    return {name for value in assigned for name in re.findall(r"[\"']([A-Za-z_][\w.]*)[\"']", value)}
