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
        name = text_of(node.child_by_field_name("name"))
        if node.type in ("function_declaration", "method_declaration"):
            body = node.child_by_field_name("body")
            end = body.start_byte if body else node.end_byte
            head = " ".join((root.text or b"")[node.start_byte : end].decode("utf-8", "replace").split())
            receiver = node.child_by_field_name("receiver")
            owner = next((text_of(one) for one in nodes(receiver, "type_identifier")), "") if receiver else ""
            yield Declaration(name, f"`{head}`", owner)
        elif node.type in ("const_declaration", "var_declaration"):
            for spec in nodes(node, "const_spec", "var_spec"):
                for one in nodes(spec, "identifier"):
                    if one.parent == spec:
                        yield Declaration(text_of(one), f"`{text_of(one)}`")
        elif node.type == "type_declaration":
            for spec in nodes(node, "type_spec", "type_alias"):
                owner = text_of(spec.child_by_field_name("name"))
                yield Declaration(owner, f"type `{owner}`")
                for field in nodes(spec, "field_declaration"):
                    for one in field.children_by_field_name("name"):
                        kind = text_of(field.child_by_field_name("type"))
                        text = f"field `{text_of(one)}` (`{kind}`)"
                        yield Declaration(text_of(one), text, owner, is_keyword=text_of(one)[:1].isupper())


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
