"""The interface of an ecosystem: what is particular to the language of a repository from which tasks are made.

An ecosystem is one module of this folder and a line in `ECOSYSTEMS`. It says which files are code and which hold tests, when two sources
mean the same, how a declared dependency gets into an image, and how tests are run.
"""

import importlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, cast

from workers.making.history import History


@dataclass(frozen=True, slots=True)
class Declared:
    """What the metadata of a commit declares. `left_out` has what is no plain requirement of a package index."""

    requirements: tuple[str, ...] = ()
    # What the build backend of Python needs, empty if the repository cannot be installed; flags that go must have
    build: tuple[str, ...] = ()
    wants: str = ""  # the version of the language that the metadata ask for
    reads: str = ""  # the oldest version of its tools that can read them; "" for any
    left_out: tuple[str, ...] = ()
    fingerprint: str = ""


@dataclass(frozen=True, slots=True)
class Declaration:
    """A function, class, attribute or variable that a source declares, as it is shown to whoever has to write it."""

    name: str
    text: str  # Markdown, in one line
    owner: str = ""  # the class or type that it is a member of
    # Whether it can be named where its owner is made, before a colon or an equals sign
    is_keyword: bool = False
    imported_from: str = ""  # the module, as it is written, for a name that the source hands on


@dataclass(frozen=True, slots=True)
class BaseEnvironment:
    """The image that all images are built from, and what the ecosystem's `probe` printed in it."""

    image: str
    id: str
    found: Mapping[str, Any]


class Ecosystem(Protocol):
    """A language, its test runner and its packages."""

    @property
    def language(self) -> str:
        """The name of the language in sentences."""
        ...

    @property
    def ending(self) -> str:
        """The ending of the names of files with code, with its dot."""
        ...

    @property
    def module_names(self) -> str:
        """The names of files that the runner takes tests from, for people."""
        ...

    @property
    def base_image(self) -> str:
        """The image that is the base unless another is given."""
        ...

    @property
    def base_needs(self) -> str:
        """What a base image must have, for people."""
        ...

    @property
    def probe(self) -> str:
        """The shell command that prints what is to be known of a base image, as JSON in its last line."""
        ...

    def is_module(self, path: str) -> bool:
        """Whether the runner takes tests from a file at this path."""
        ...

    def meaning(self, source: bytes) -> str | bytes | None:
        """What tests may notice of a file: the same for two sources that differ in form or comments only; None if it cannot be parsed."""
        ...

    def names(self, source: bytes) -> frozenset[str]:
        """The names in a source; none if it cannot be parsed."""
        ...

    def declarations(self, source: bytes) -> Iterator[Declaration]:
        """What a source declares for other files, without the values of defaults; nothing if it cannot be parsed."""
        ...

    def namespace(self, path: str) -> str:
        """The path of what tests name to get at what a file declares."""
        ...

    def may_leave_out(self, test: str) -> bool:
        """Whether a runner's name is that of one test, which the eval script can leave out."""
        ...

    def eval_script(
        self, modules: Iterable[str], left_out: Iterable[str] = (), run: Iterable[str] = ()
    ) -> str:
        """The script that runs these test modules without the tests `left_out`. `run` are all others of them by their names."""
        ...

    def declared(self, history: History, commit: str, extra: Iterable[str]) -> Declared:
        """The requirements in the metadata of `commit`, and `extra` ones. Raises Fallen."""
        ...

    def fetch(self, needs: Declared, base: BaseEnvironment, until: str, context: Path) -> tuple[str, str]:
        """Puts dependencies into `context`. `until`: in versions before this date, "" for any.

        Returns the Dockerfile of the image with the dependencies, and how versions were limited. Raises Fallen, PackageError.
        """
        ...

    def install(self, needs: Declared) -> str:
        """The lines of a Dockerfile that install the repository in the working directory."""
        ...


ECOSYSTEMS = ("python", "go")


def ecosystem(name: str) -> Ecosystem:
    """The ecosystem of a name in ECOSYSTEMS."""
    return cast(Ecosystem, importlib.import_module(f"workers.making.ecosystems.{name}").ECOSYSTEM)
