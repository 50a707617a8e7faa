"""Repositories in Go: one module at the root, whose tests `go test` runs.

Nothing is downloaded: a module that requires others must have them in its directory `vendor`. The toolchain is that of the base image,
whatever version go.mod names.
"""

import hashlib
import re
import shlex
from collections.abc import Iterable, Iterator
from pathlib import Path, PurePosixPath

import tree_sitter_go
from tree_sitter import Language, Node, Parser

from workers.grading.languages.go import LANGUAGE
from workers.grading.languages.language import nodes, text_of
from workers.making.ecosystems.ecosystem import BaseEnvironment, Declaration, Declared
from workers.making.history import Fallen, GitError, History

_GRAMMAR = Language(tree_sitter_go.language())
_NAMES = ("identifier", "field_identifier", "type_identifier", "package_identifier")
_REQUIRE = re.compile(r"^[ \t]*require[ \t]*(?:\((?P<block>[^)]*)\)|(?P<one>[^\s(].*))", re.MULTILINE)
_REPLACED = re.compile(
    r"^[ \t]*(?:replace[ \t(]+)?(?P<module>[^\s()]+)(?:[ \t]+v\S+)?[ \t]+=>[ \t]+\.{1,2}(?:/|\s)",
    re.MULTILINE,
)
_COMMENT = re.compile(r"//.*")
_TOOLCHAIN = re.compile(r"^[ \t]*toolchain\b", re.MULTILINE)
_GO = re.compile(r"^[ \t]*go[ \t]+(\d+(?:\.\d+)*)", re.MULTILINE)
_IGNORED = re.compile(r"(?:^|/)(?:[._]|testdata/)")  # what go leaves out of a module
_DIRECTIVE = re.compile(r"//(?:go:|export |line )|//[ \t]*\+build\b")
_OUTPUT = re.compile(r"/[/*]\s*(?:unordered )?output:", re.IGNORECASE)
_ENDS_ITSELF = re.compile(r"[\w)\]}\"'`]\Z")  # of a line after which go reads a semicolon
_CACHE = "/opt/go-build"
_PERIOD = f"""FROM {{base}}
ENV GOPROXY=off GOTOOLCHAIN=local GOCACHE={_CACHE}
"""
# What is compiled here need not be compiled in each run. A package that does not compile is left to the run of its tests.
_INSTALL = (
    f"RUN mkdir -p {_CACHE} && {{ go test -vet=off -run '^$' ./... || true; }} && chmod -R a+rwX {_CACHE}\n"
)


class GoEcosystem:
    """The ecosystem of Go."""

    language = "Go"
    ending = ".go"
    module_names = "*_test.go"
    base_image = "swerve/task-go:1"
    base_needs = "git and go"
    probe = """git --version >&2 && printf '{"version": "%s"}\\n' "$(go env GOVERSION)" """

    def is_module(self, path: str) -> bool:
        return LANGUAGE.may_hold_tests(path) and not _IGNORED.search(path)

    def meaning(self, source: bytes) -> str | bytes | None:
        root = _parsed(source)
        if root is None:
            return None
        return "\0".join(_telling(nodes(root), has_c=b'import "C"' in source))

    def names(self, source: bytes) -> frozenset[str]:
        root = _parsed(source)
        return frozenset(text_of(node) for node in nodes(root, *_NAMES)) if root else frozenset()

    def declarations(self, source: bytes) -> Iterator[Declaration]:
        root = _parsed(source)
        return _declarations(root) if root else iter(())

    def namespace(self, path: str) -> str:
        return str(PurePosixPath(path).parent)  # a package is a folder

    def may_leave_out(self, test: str) -> bool:
        return bool(LANGUAGE.forms(test))

    def eval_script(
        self, modules: Iterable[str], left_out: Iterable[str] = (), run: Iterable[str] = ()
    ) -> str:
        packages = sorted({f"./{PurePosixPath(path).parent}".removesuffix("/.") for path in modules})
        words = ["go", "test", "-vet=off", "-count=1"]
        if out := _functions(left_out):
            # Old versions of go can choose tests, but not leave some out.
            kept = sorted(_functions(run) - out)
            if not kept:
                raise Fallen("all its test functions have a test that fails with the fix or flakes")
            words.append(f"-run=^({'|'.join(kept)})$")
        return f"#!/bin/bash\ncd /workspace || exit 1\n{shlex.join([*words, *packages])}\n"

    def declared(self, history: History, commit: str, extra: Iterable[str]) -> Declared:
        files = history.files(commit)
        if "go.mod" not in files:
            raise Fallen("has no go.mod")
        try:
            text = history.blob(files["go.mod"]).decode("utf-8", "replace")
        except GitError as error:
            raise Fallen("its go.mod cannot be read", str(error)) from error
        required = _required(text)
        if required and "vendor/modules.txt" not in files:
            raise Fallen("needs other modules", f"{', '.join(required[:3])}, and has no directory vendor")
        wants = next((found[1] for found in _GO.finditer(_COMMENT.sub("", text))), "")
        # For a go.mod of before 1.14, or without a version, go uses the directory only with this flag.
        is_told = "vendor/modules.txt" in files and _parts(wants) < (1, 14)
        return Declared(
            tuple(required),
            build=("-mod=vendor",) if is_told else (),
            wants=wants,
            reads="1.21" if len(_parts(wants)) > 2 or _TOOLCHAIN.search(text) else "",
            fingerprint=hashlib.sha256(text.encode()).hexdigest(),
        )

    def fetch(self, needs: Declared, base: BaseEnvironment, until: str, context: Path) -> tuple[str, str]:
        found = _parts(str(base.found["version"]))
        # From 1.21 on, go refuses a module that wants a newer one. Older versions try, if they can read go.mod.
        if _parts(needs.reads) > found or (found >= (1, 21) and _parts(needs.wants) > found):
            raise Fallen(
                "needs a newer go than the base image has",
                f"{needs.wants}, which has {base.found['version']}",
            )
        return _PERIOD.format(base=base.image), ""

    def install(self, needs: Declared) -> str:
        return "".join(f"ENV GOFLAGS={flag}\n" for flag in needs.build) + _INSTALL


ECOSYSTEM = GoEcosystem()


def _parsed(source: bytes) -> Node | None:
    """The root of the syntax tree; None if the source does not parse."""
    root = Parser(_GRAMMAR).parse(source).root_node
    return None if root.has_error else root


def _declarations(root: Node) -> Iterator[Declaration]:
    """The functions, methods, types, fields, constants and variables that a file declares at its top."""
    for node in root.children:
        if node.type in ("function_declaration", "method_declaration"):
            receiver = node.child_by_field_name("receiver")
            owner = next((text_of(one) for one in nodes(receiver, "type_identifier")), "") if receiver else ""
            yield Declaration(text_of(node.child_by_field_name("name")), f"`{_head(node)}`", owner)
        elif node.type in ("const_declaration", "var_declaration"):
            for group in (node, *node.children):  # variables in brackets are in a list of their own
                for spec in group.children:
                    if spec.type in ("const_spec", "var_spec"):
                        yield from _values(spec)
        elif node.type == "type_declaration":
            for spec in node.children:
                if spec.type in ("type_spec", "type_alias"):
                    yield from _type(spec)


def _values(spec: Node) -> Iterator[Declaration]:
    """The constants or variables of one line, each with its type, or with how it is called if it is a function that is written there."""
    kind = spec.child_by_field_name("type")
    value = spec.child_by_field_name("value")
    functions = [one for one in value.named_children if one.type == "func_literal"] if value else []
    shown = f" {_shown(kind)}" if kind else f" {_head(functions[0])}" if len(functions) == 1 else ""
    for one in spec.children_by_field_name("name"):
        if one.type == "identifier":
            yield Declaration(text_of(one), f"`{text_of(one)}{shown}`")


def _type(spec: Node) -> Iterator[Declaration]:
    """A type, with what it is unless that is a structure; the fields of a structure; the methods of an interface."""
    owner, parameters = text_of(spec.child_by_field_name("name")), spec.child_by_field_name("type_parameters")
    kind = spec.child_by_field_name("type")
    head = f"{owner}{_shown(parameters) if parameters else ''}"
    if kind is None or kind.type == "struct_type":
        yield Declaration(owner, f"type `{head}`")
    else:
        yield Declaration(owner, f"`type {head} {'= ' if spec.type == 'type_alias' else ''}{_shown(kind)}`")
    if kind is None:
        return
    for field in nodes(kind, "field_declaration"):
        shown, names = _shown(field.child_by_field_name("type")), field.children_by_field_name("name")
        for name in map(text_of, names):
            yield Declaration(name, f"field `{name}` (`{shown}`)", owner, is_keyword=name[:1].isupper())
        if not names and (embedded := re.match(r"(?:\w+\.)?(\w+)", shown.lstrip("* "))):
            name, star = embedded[1], "*" if any(one.type == "*" for one in field.children) else ""
            text = f"embedded field `{star}{shown}`"
            yield Declaration(name, text, owner, is_keyword=name[:1].isupper())
    for method in nodes(kind, "method_elem") if kind.type == "interface_type" else ():
        yield Declaration(text_of(method.child_by_field_name("name")), f"`{_shown(method)}`", owner)


def _head(function: Node) -> str:
    """A function without its body."""
    body = function.child_by_field_name("body")
    return _shown(function, body.start_byte if body else function.end_byte)


def _shown(node: Node | None, end: int = 0) -> str:
    """The text of the node in one line, up to byte `end` of the source unless that is 0, without comments."""
    if node is None:
        return ""
    kept, at, end = b"", 0, (end or node.end_byte) - node.start_byte
    for comment in nodes(node, "comment"):
        if (start := comment.start_byte - node.start_byte) < end:
            kept, at = kept + (node.text or b"")[at:start], comment.end_byte - node.start_byte
    lines = (kept + (node.text or b"")[at:end]).decode("utf-8", "replace").split("\n")
    words = [found for line in lines if (found := " ".join(line.split()))]
    return "".join(
        f"{line}{'; ' if _ENDS_ITSELF.search(line) and after[:1] not in ('', ')', '}') else ' ' if after else ''}"
        for line, after in zip(words, [*words[1:], ""], strict=True)
    )


def _telling(found: Iterable[Node], *, has_c: bool) -> Iterator[str]:
    """The texts of the leaves, of comments those alone that go reads: directives, C, and the output that an example must have."""
    is_output = False
    for node in found:
        if node.type == "comment":
            text = text_of(node)
            is_output = is_output or _OUTPUT.match(text) is not None
            if is_output or has_c or _DIRECTIVE.match(text):
                yield text
        elif not node.child_count:
            is_output = False
            yield text_of(node)


def _required(text: str) -> list[str]:
    """The modules that a go.mod requires, without those that a directory of the repository replaces."""
    text = _COMMENT.sub("", text)
    here = {found["module"] for found in _REPLACED.finditer(text)}
    lines = (found["block"] or found["one"] or "" for found in _REQUIRE.finditer(text))
    names = (words[0] for line in "\n".join(lines).split("\n") if (words := line.split()))
    return [name for name in names if name not in here]


def _parts(version: str) -> tuple[int, ...]:
    """A version's numbers; none of an empty one."""
    return tuple(int(part) for part in re.findall(r"\d{1,6}", version))


def _functions(tests: Iterable[str]) -> set[str]:
    """The functions of tests by the names that the runner gives to them."""
    return {form.key for test in tests for form in LANGUAGE.forms(test)[-1:]}
