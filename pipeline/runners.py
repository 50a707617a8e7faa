"""Descriptions of test runners: one table with a row for each runner, and one with a row for each language.

The grader looks up which files govern a runner and how it reports its end, the judge's rules which tests a command ran and with which
result, and the importers of tasks which command of a script runs the tests. A new runner is one row of RUNNERS, a new language one row of
LANGUAGES. Readers search the tables on every call, so all of them know a new row.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property

# Programs that start another program. Options may follow their names.
_LAUNCHERS = (
    r"(?:uv|poetry|pipenv|pdm|hatch|conda|mamba)\s+run|bundle\s+exec|pnpm\s+exec|npx|uvx|(?:-m\s+)?coverage\s+run"
    r"|(?:python|pypy)[\d.]*|timeout(?:\s+-[ks]\s+\S+|\s+-\S+)*\s+[\d.]+[smhd]?|env(?:\s+\w+=\S*)*|exec|nice|xargs|yarn|pnpm"
)
_OPTIONS = r"(?:\s+-[WXC]\s+\S+|\s+--?[^\s-]\S*)*"
# A shell that is given a text, which is the second group
_SHELL = re.compile(r"\b(?:ba|da|k|z)?sh(?:\s+-\w*o\s+\w+|\s+-[\w-]+)*\s+-\w*c\s+(['\"])(.*?)\1", re.DOTALL)
NOTHING = re.compile(r"(?!)")
_ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_PARTS = re.compile(r"&&|\|\||[;|\n]")
# Commands that name runners without running them.
_INSTALLS = re.compile(
    r"(?:^|[\s/])(?:pip[\d.]*|conda|mamba|apt-get|apt|uv|poetry|pdm|npm|yarn|pnpm)(?:\s+-\S+|\s+pip|\s+tool)*\s+"
    r"(?:(?:install|add)\b|i\s)"
)
_LOOKS = re.compile(
    r"[(\s]*(?:git|echo|printf|which|type|command\s+-[vV]|export|\[|cat|cd|chmod|cp|javac|ln|ls|mkdir|mv|rm|tar|touch)(?:\s|$)"
)
_COMMENT = re.compile(r"(?:^|\s)#.*")


@dataclass(frozen=True, slots=True, kw_only=True)
class Language:
    """A programming language, with its programs and files that govern how tests are run. Names of files may contain `*` as in a shell."""

    name: str
    programs: tuple[str, ...] = ()  # names on a PATH, `*` and `[...]` as in a shell, without its runners
    interpreters: tuple[str, ...] = ()  # programs whose first argument is a script
    endings: tuple[str, ...] = ()  # endings of the names of source files
    # Files with dependencies, settings or targets, much of which a fix may change.
    manifests: tuple[str, ...] = ()
    governed_by: tuple[str, ...] = ()  # names of files that decide what runs in every process
    governed_by_directories: tuple[str, ...] = ()  # the same for directories, in letters of any case
    looked_for: tuple[str, ...] = ()  # modules that every process looks for as it starts
    # Programs that build tests as programs, which a script then starts by names of their own.
    builders: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Closing:
    """The end of a runner's report. `passed` and `failed` match a closing line, or any end of a log, after which tests passed or failed."""

    line: re.Pattern[str]
    passed: re.Pattern[str]
    failed: re.Pattern[str]
    opening: re.Pattern[str] = NOTHING  # the line that begins the report
    silenced_by: re.Pattern[str] = NOTHING  # options in a script with which no closing line appears

    def fault(self, log: str) -> str | None:
        """The reason why the closing lines of `log` report no success; None if the last one reports no failure, and one of them a
        success.
        """
        lines = [found[0].strip("= ") for found in self.line.finditer(log)]
        if not lines:
            return "did not report its end"
        said = " ".join(lines[-1].split())
        if self.failed.search(lines[-1]):
            return f"reported {said}"
        return None if any(self.passed.search(line) for line in lines) else f"passed no test: {said}"


@dataclass(frozen=True, kw_only=True)
class Runner:
    """A program that runs tests, or runs the commands that do. Names of files and arguments of commands may contain `*` as in a shell."""

    name: str
    language: str = ""  # the name of a language; "" for any
    # The ways to start it: programs, modules for `python -m` and files of the repository, each with the arguments that must follow.
    commands: tuple[str, ...] = ()
    modules: tuple[str, ...] = ()
    scripts: tuple[str, ...] = ()
    # Files that govern it: it reads them always, or only where it is used. A path contains a slash, a name does not.
    governed_by: tuple[str, ...] = ()
    governed_by_if_used: tuple[str, ...] = ()
    commands_in: tuple[str, ...] = ()  # files that contain the commands which it runs
    # The runner's own sections of shared files: keys with dots between them, or sections of setup.cfg.
    settings: Mapping[str, tuple[str, ...]] = field(default_factory=dict[str, tuple[str, ...]])
    # The settings that hold its options: keys with dots between them, or a section.
    options: Mapping[str, tuple[str, ...]] = field(default_factory=dict[str, tuple[str, ...]])
    options_variable: str = ""  # environment variable with further options
    reporting_option: str = ""  # with it, the log has the outcome of each test, also after a failure
    # Matches the report of a run of one file, if the runner names tests without that option only then.
    names_of_one_file: re.Pattern[str] = NOTHING
    plugins_variable: str = ""  # environment variable with modules to load
    entry_points: str = ""  # group of entry points that are its plugins
    own_modules: tuple[str, ...] = ()  # modules of the runner itself, and modules that it looks for
    # The means to read its results: a pattern for the name of a test (a comment at each runner explains its groups), and the end of its
    # report.
    test_name: re.Pattern[str] = NOTHING
    closing: Closing | None = None
    # The runner that the grader's witness reports for it; "" if the witness does not see it.
    witnessed_as: str = ""

    @property
    def programs(self) -> tuple[str, ...]:
        """Names of its programs on a PATH."""
        return tuple(dict.fromkeys(command.split()[0] for command in self.commands))

    @cached_property
    def named(self) -> re.Pattern[str]:
        """Matches the text of a shell script wherever it may start the runner. It rather matches too often than too rarely."""
        return re.compile(rf"(?:^|[\s;&|(/!`])(?:{self._starts})(?=$|[\s;&|)`])", re.MULTILINE)

    @cached_property
    def started(self) -> re.Pattern[str]:
        """Matches the beginning of a simple command that starts it."""
        return re.compile(rf"(?:(?:\S*/)?(?:{_LAUNCHERS}){_OPTIONS}\s+)*(?:\S*/)?(?:{self._starts})(?=\s|$)")

    def is_used_by(self, script: str) -> bool:
        """Whether a shell script may use it or one of its programs, for any purpose."""
        return uses(script, self.programs) or self.named.search(_opened(script)) is not None

    @property
    def _starts(self) -> str:
        # npx takes a version after the program.
        version = r"(?:@[\w.^~-]+)?" if self.language == "javascript" else ""
        forms = [
            rf"{_OPTIONS}\s+".join(re.escape(word).replace(r"\*", r"[\w:.-]*") for word in form.split())
            for form in (*self.commands, *self.scripts)
        ]
        forms = [re.sub(r"^\w+", lambda found: found[0] + version, form) for form in forms]
        forms += [rf"-m\s+{re.escape(module)}(?:\.\w+)*" for module in self.modules]
        return "|".join(forms) or NOTHING.pattern


LANGUAGES = (
    Language(
        name="python",
        programs=(
            *("conda", "coverage", "hatch", "mamba", "pip", "pip3", "poetry", "uv", "uvx"),
            *("python", "python2", "python3", "python3.[0-9]", "python3.[0-9][0-9]"),
        ),
        endings=("py", "pyi", "pyx", "pxd"),
        manifests=("pyproject.toml", "setup.cfg"),
        governed_by=(
            *("sitecustomize.py", "usercustomize.py", "*.pth", "*.egg-link", "pyvenv.cfg"),
            ".coveragerc",
        ),
        governed_by_directories=("*.egg-info", "*.dist-info"),  # their entry points make plugins
        # Debian's Python imports apport_python_hook if it exists as it starts; copy and pickle try to import org.python.core, which is
        # Jython's.
        looked_for=("apport_python_hook", "org", "sitecustomize", "usercustomize"),
    ),
    Language(
        name="javascript",
        programs=("bun", "deno", "node", "npx"),
        interpreters=("bun", "deno", "node"),
        endings=("js", "jsx", "ts", "tsx", "cjs", "mjs", "cts", "mts"),
        manifests=("package-lock.json", "package.json", "yarn.lock"),
        governed_by_directories=("__mocks__",),  # modules that jest and vitest import instead of others
    ),
    Language(
        name="c",
        programs=("cmake", "gmake", "ninja"),
        endings=("c", "h", "cc", "cpp", "cxx", "hh", "hpp"),
        manifests=("CMakeLists.txt", "GNUmakefile", "Makefile", "makefile"),
        builders=(
            *("cc", "c++", "gcc", "g++", "clang", "clang++"),
            *("cmake", "make", "gmake", "ninja", "meson"),
        ),
    ),
    Language(name="go", endings=("go",), manifests=("go.mod", "go.sum")),
    Language(name="rust", programs=("rustc",), endings=("rs",), manifests=("Cargo.lock", "Cargo.toml")),
    Language(
        name="java",
        programs=("java",),
        endings=("java", "kt", "scala"),
        manifests=("build.gradle", "build.gradle.kts", "pom.xml"),
    ),
    Language(
        name="ruby",
        programs=("bundle", "ruby"),
        interpreters=("ruby",),
        endings=("rb",),
        manifests=("Gemfile",),
    ),
    Language(name="php", programs=("php",), interpreters=("php",), endings=("php",)),
    Language(name="perl", programs=("perl",), interpreters=("perl",), endings=("pl", "pm")),
    Language(name="c#", endings=("cs",)),
    Language(name="lua", interpreters=("lua",), endings=("lua",)),
    Language(name="r", interpreters=("Rscript",), endings=("R",)),
    *(
        Language(name=name, endings=endings)
        for name, endings in {
            "clojure": ("clj", "cljs"),
            "elixir": ("ex", "exs"),
            "erlang": ("erl",),
            "haskell": ("hs",),
            "julia": ("jl",),
            "ocaml": ("ml", "mli"),
            "sql": ("sql",),
            "swift": ("swift",),
        }.items()
    ),
)

PYTEST = Runner(
    name="pytest",
    language="python",
    commands=("pytest", "py.test"),
    modules=("pytest",),
    governed_by=("conftest.py", "pytest.ini", ".pytest.ini", "pytest.toml", ".pytest.toml"),
    settings={"pyproject.toml": ("tool.pytest",), "setup.cfg": ("*pytest*",)},
    options={
        **dict.fromkeys(("pytest.ini", ".pytest.ini", "pytest.toml", ".pytest.toml", "tox.ini"), ("pytest",)),
        "setup.cfg": ("tool:pytest",),
        "pyproject.toml": ("tool.pytest.ini_options", "tool.pytest"),
    },
    options_variable="PYTEST_ADDOPTS",
    plugins_variable="PYTEST_PLUGINS",
    entry_points="pytest11",
    own_modules=("_pytest", "conftest", "pluggy", "py", "pytest", "xdist"),
    # The groups are the file and the test in it.
    test_name=re.compile(r"(?:\.{1,2}/)*(.+?\.py)::(.+)", re.DOTALL),
    closing=Closing(
        line=re.compile(
            r"^(?:=+ )?\d+ [a-z]+(?: [a-z]+)?(?:, \d+ [a-z]+(?: [a-z]+)?)*"
            r" in [\d.]+ ?s(?:econds)?(?: \([\d:]+\))?(?: =+)?$",
            re.MULTILINE,
        ),
        passed=re.compile(r"\b[1-9]\d* passed\b"),
        failed=re.compile(r"\b[1-9]\d* (?:failed|errors?)\b"),
        opening=re.compile(r"^=+ test session starts =+$", re.MULTILINE),
    ),
    witnessed_as="pytest",
)
UNITTEST = Runner(
    name="unittest",
    language="python",
    modules=("unittest",),
    # The load_tests functions in these files may choose other tests.
    governed_by_if_used=(
        "test/__init__.py",
        "tests/__init__.py",
        "*/test/__init__.py",
        "*/tests/__init__.py",
    ),
    own_modules=("unittest2",),
    # The groups are the method, and its class with or without the method.
    test_name=re.compile(r"([\w.]+) \(([\w.]+)\)"),
    closing=Closing(
        line=re.compile(r"^Ran [1-9]\d* tests? in [\d.]+s\n+(?:OK|FAILED)(?: \(.*\))?$", re.MULTILINE),
        passed=re.compile(r"\bRan [1-9]\d* tests?\b[^\n]*\n+OK\b"),
        failed=re.compile(r"^FAILED \(", re.MULTILINE),
    ),
    witnessed_as="unittest",
)
# They may name another program to run the tests, or other tests to run.
_CARGO_SETTINGS = (
    *(".cargo/config", ".cargo/config.toml", "*/.cargo/config", "*/.cargo/config.toml"),
    *("rust-toolchain", "rust-toolchain.toml"),
)
# They govern JUnit in every run: its settings, classes that it asks at each test, and classes in place of its own.
_JUNIT_FILES = (
    *("junit-platform.properties", "META-INF/services/org.junit.*", "*/META-INF/services/org.junit.*"),
    *("org/junit/*", "*/org/junit/*", "org/opentest4j/*", "*/org/opentest4j/*"),
)
# Goals and tasks that run tests, also after others.
_MAVEN_GOALS = tuple(
    f"{before} {goal}" for before in ("", " *", " * *") for goal in ("test*", "package", "verify", "install", "surefire:test")
)
_GRADLE_TASKS = tuple(
    f"{before} {task}" for before in ("", " *") for task in ("test*", "check", "*:test*", "*:check")
)
MAKE = Runner(
    name="make", commands=("make test*", "make check*"), commands_in=("GNUmakefile", "makefile", "Makefile")
)
RUNNERS: tuple[Runner, ...] = (
    PYTEST,
    UNITTEST,
    Runner(
        name="django", language="python", scripts=("manage.py test", "runtests.py"), witnessed_as="unittest"
    ),
    Runner(
        name="nose",
        language="python",
        commands=("nosetests",),
        modules=("nose",),
        settings={"setup.cfg": ("nosetests",)},
    ),
    Runner(
        name="nose2",
        language="python",
        commands=("nose2",),
        modules=("nose2",),
        governed_by=("nose2.cfg", "unittest.cfg"),
    ),
    Runner(name="setuptools", language="python", scripts=("setup.py test",)),
    Runner(
        name="tox",
        language="python",
        commands=("tox",),
        modules=("tox",),
        governed_by=("tox.ini",),
        governed_by_if_used=("toxfile.py",),
        commands_in=("tox.ini",),
        settings={"pyproject.toml": ("tool.tox",), "setup.cfg": ("tox*",)},
    ),
    Runner(
        name="nox",
        language="python",
        commands=("nox",),
        modules=("nox",),
        governed_by_if_used=("noxfile.py",),
    ),
    Runner(
        name="jest",
        language="javascript",
        commands=("jest",),
        governed_by=("jest.config.*",),
        governed_by_if_used=("babel.config.*", ".babelrc*", ".swcrc"),  # transform the tests
        settings={"package.json": ("jest",)},
        reporting_option="--verbose",
        names_of_one_file=re.compile(r"^Test Suites: [^\n]*\b1 total\r?$", re.MULTILINE),
    ),
    Runner(
        name="vitest",
        language="javascript",
        commands=("vitest",),
        governed_by=("vitest.config.*", "vitest.workspace.*"),
        governed_by_if_used=("vite.config.*",),
        reporting_option="--reporter=verbose",
        names_of_one_file=re.compile(r"^ *Test Files [^\n]*\(1\)\r?$", re.MULTILINE),
    ),
    Runner(
        name="mocha",
        language="javascript",
        commands=("mocha",),
        governed_by=(".mocharc*", ".nycrc*"),
        settings={"package.json": ("mocha", "nyc")},
    ),
    Runner(
        name="ava",
        language="javascript",
        commands=("ava",),
        governed_by=("ava.config.*",),
        settings={"package.json": ("ava",)},
    ),
    Runner(
        name="tap",
        language="javascript",
        commands=("tap",),
        governed_by=(".taprc",),
        settings={"package.json": ("tap",)},
    ),
    Runner(name="tape", language="javascript", commands=("tape",)),
    Runner(name="node", language="javascript", commands=("node --test",)),
    Runner(name="karma", language="javascript", commands=("karma",), governed_by=("karma.conf.*",)),
    *(
        Runner(
            name=name,
            language="javascript",
            commands=(f"{name} test*", f"{name} run test*"),
            governed_by=governed_by,
            commands_in=("package.json",),
            settings={"package.json": ("scripts",)},
        )
        for name, governed_by in {
            "npm": (".npmrc",),
            "yarn": (".yarnrc*",),
            "pnpm": (".pnpmfile.*",),
        }.items()
    ),
    Runner(
        name="grunt",
        language="javascript",
        commands=("grunt test*",),
        governed_by_if_used=("Gruntfile.*",),
    ),
    Runner(name="gulp", language="javascript", commands=("gulp test*",), governed_by_if_used=("gulpfile.*",)),
    Runner(
        name="ctest",
        language="c",
        commands=("ctest",),
        # They may leave tests out, or name other ones.
        governed_by_if_used=("CTestCustom.*", "CTestTestfile.cmake", "DartConfiguration.tcl"),
        reporting_option="-V",
        closing=Closing(
            line=re.compile(r"^\d+% tests passed, \d+ tests? failed out of \d+$", re.MULTILINE),
            passed=re.compile(r"\b0 tests? failed out of [1-9]"),
            failed=re.compile(r"\b[1-9]\d* tests? failed out of"),
            silenced_by=re.compile(r"[\s/]ctest\b[^\n;&|]*\s(?:-Q|--quiet)\b"),
        ),
    ),
    Runner(
        # Scripts start programs of GoogleTest by names of their own, so their reports are known by the first line.
        name="gtest",
        language="c",
        closing=Closing(
            line=re.compile(
                r"^(?:\d+: )?(?:\[  PASSED  \] \d+ tests?\.|\[  FAILED  \] \d+ tests?, listed below:)$",
                re.MULTILINE,
            ),
            passed=re.compile(r"\[  PASSED  \] [1-9]"),
            failed=re.compile(r"\[  FAILED  \] [1-9]\d* tests?,"),
            opening=re.compile(r"^(?:\d+: )?\[={10}\] Running \d+ tests? from", re.MULTILINE),
        ),
    ),
    Runner(name="meson", language="c", commands=("meson test",)),
    Runner(name="ninja", language="c", commands=("ninja test*", "ninja check*")),
    Runner(
        name="cmake",
        language="c",
        commands=("cmake --build * --target test*", "cmake --build * --target check*"),
    ),
    Runner(
        name="go",
        language="go",
        commands=("go test",),
        governed_by=("go.work", "go.env"),
        reporting_option="-v",
    ),
    Runner(
        name="cargo",
        language="rust",
        commands=("cargo test", "cargo t", "cargo +* test", "cargo +* t"),
        governed_by_if_used=_CARGO_SETTINGS,
        reporting_option="--no-fail-fast",
    ),
    Runner(
        name="nextest",
        language="rust",
        commands=("cargo nextest run", "cargo +* nextest run"),
        governed_by_if_used=(*_CARGO_SETTINGS, ".config/nextest.toml", "*/.config/nextest.toml"),
        reporting_option="--no-fail-fast",
    ),
    Runner(
        name="maven",
        language="java",
        commands=tuple(f"mvn{goal}" for goal in _MAVEN_GOALS),
        scripts=tuple(f"mvnw{goal}" for goal in _MAVEN_GOALS),
        governed_by_if_used=("mvnw", ".mvn/*", "*/.mvn/*", *_JUNIT_FILES),
        reporting_option="-Dsurefire.reportFormat=plain",
    ),
    Runner(
        name="gradle",
        language="java",
        commands=tuple(f"gradle{task}" for task in _GRADLE_TASKS),
        scripts=tuple(f"gradlew{task}" for task in _GRADLE_TASKS),
        governed_by_if_used=(
            *("gradlew", "gradle/wrapper/*", "*/gradle/wrapper/*", "gradle.properties", "init.gradle*"),
            *_JUNIT_FILES,
        ),
    ),
    Runner(
        name="junit",
        language="java",
        scripts=("org.junit.platform.console.ConsoleLauncher", "junit-platform-console-standalone*.jar"),
        governed_by_if_used=_JUNIT_FILES,
        closing=Closing(
            line=re.compile(
                r"^Test run finished after \d+ ms\n(?:\[ +\d+ \w+ \w+ +\]\n)*\[ +\d+ tests failed +\]$",
                re.MULTILINE,
            ),
            passed=re.compile(r"^\[ +[1-9]\d* tests successful +\]$", re.MULTILINE),
            failed=re.compile(r"^\[ +[1-9]\d* (?:tests|containers) failed +\]$", re.MULTILINE),
            silenced_by=re.compile(r"--details[= ]none\b"),
        ),
    ),
    Runner(
        name="junit4",
        language="java",
        scripts=("org.junit.runner.JUnitCore",),
        governed_by_if_used=_JUNIT_FILES,
        closing=Closing(
            line=re.compile(r"^(?:OK \(\d+ tests?\)|Tests run: \d+,  Failures: \d+)$", re.MULTILINE),
            passed=re.compile(r"^OK \([1-9]\d* tests?\)", re.MULTILINE),
            failed=re.compile(r"^Tests run:", re.MULTILINE),
        ),
    ),
    Runner(name="dotnet", language="c#", commands=("dotnet test",)),
    Runner(name="rspec", language="ruby", commands=("rspec",), governed_by=(".rspec",)),
    Runner(
        name="rake",
        language="ruby",
        commands=("rake test*",),
        governed_by_if_used=("Rakefile", "rakefile"),
    ),
    Runner(name="phpunit", language="php", commands=("phpunit",), governed_by=("phpunit.xml*",)),
    Runner(name="prove", language="perl", commands=("prove",)),
    Runner(name="bazel", commands=("bazel test",)),
    Runner(
        name="just",
        commands=("just test*", "just check*"),
        governed_by_if_used=("justfile", "Justfile", ".justfile"),
    ),
    MAKE,
)


def uses(script: str, programs: Iterable[str]) -> bool:
    """Whether a shell script may use any of these programs, for any purpose."""
    either = "|".join(map(re.escape, programs))
    pattern = rf"(?:^|[\s;&|(/])(?:{either})(?:$|[\s;&|)])"
    return bool(either) and re.search(pattern, _opened(script), re.MULTILINE) is not None


def _opened(script: str) -> str:
    """The script, in which the texts that it gives to shells are lines, too. What a comment or a printed text says is given to none."""

    def opened(found: re.Match[str]) -> str:
        before = _PARTS.split(script[script.rfind("\n", 0, found.start()) + 1 : found.start()])[-1]
        is_run = not _COMMENT.search(before) and not _LOOKS.match(before)
        return f"{found[0]}\n{found[2]}\n" if is_run else found[0]

    return _SHELL.sub(opened, script)


def run_by(text: str) -> Iterator[Runner]:
    """The runners that the commands of a shell's text run. Commands that install them or only name them do not count."""
    parts = (_COMMENT.sub("", part).strip() for part in _PARTS.split(_opened(text)))
    running = [part for part in parts if not _LOOKS.match(part) and not _INSTALLS.search(part)]
    return (runner for runner in RUNNERS if any(runner.named.search(part) for part in running))


def builds_in(script: str) -> Iterator[str]:
    """The names of the languages whose tests a shell script may build as programs."""
    return (language.name for language in LANGUAGES if uses(script, language.builders))


def started_by(command: str) -> Runner | None:
    """The runner that a simple command of a shell starts, None if it starts none."""
    return next((runner for runner in RUNNERS if runner.started.match(command)), None)


def spoken_in(path: str) -> str:
    """The name of the language of a source file, by the ending of its name; "" if no language has it."""
    ending = path.rpartition(".")[2]
    return next((language.name for language in LANGUAGES if ending in language.endings), "")


def closing_fault(script: str, log: str) -> str | None:
    """The reason why `log` contradicts an exit status of 0 of `script`; None if it does not.

    The closing line of each runner that the script runs must report success. A runner without closing lines is not checked.
    """
    plain, ran = _ANSI.sub("", log).replace("\r\n", "\n"), list(run_by(script))
    options_of = _opened(f"\n{script}")
    for runner in RUNNERS:
        closing = runner.closing
        if closing is None or closing.silenced_by.search(options_of):
            continue
        if (runner in ran or closing.opening.search(plain)) and (fault := closing.fault(plain)):
            return f"{runner.name} {fault}"
    return None
