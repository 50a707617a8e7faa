"""Known fixes of real packages in other languages than Python: `python -m benchmarks.known_fixes --mirror DIR [NAME ...]`.

Each package in the table below is one upstream commit that changes code and tests. It becomes a task in the format of docs/tasks.md: the
repository before the commit, its changed tests as hidden tests, its other changes as the known fix. `workers.verify` calibrates the task,
then the production grader grades the known fix N times and the empty patch once. The table says what a control can say of the task, how
many of the passing tests have a contradiction that makes them fail, and how often the fix is worth 1. DIR holds bare clones as
OWNER+NAME/repo; only reading commands of git run there. OUT keeps tasks, verifications and results, so that the next call verifies only
what has changed, and `--table` prints what OUT holds. Images and OUT stay. It needs Docker, `mmdebstrap`, and npm for zod.

other_fixes/ has other fixes of the same bugs, each of which says how it differs: NAME.patch and NAME.2.patch mend the bug in another way
and should be worth 1, NAME.wrong.patch mends it in part and should be worth 0. `--others` grades only these, on what OUT has verified.
"""

import argparse
import asyncio
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from infra.images.build import BaseImage
    from pipeline.task import Task
    from pipeline.trajectory import Reward
    from workers.sandbox.protocol import Sandboxes
    from workers.unqueued import Broken

OUT = Path("runs/known_fixes")
OTHER_FIXES = Path(__file__).parent / "other_fixes"
NUM_OTHER = 3  # number of gradings of a right fix that is not the known one; a wrong one is graded once
CPU_S, WALL_S = 300.0, 1200.0  # of one run of the tests
# Libraries that tests of the packages use, beside the compilers and runners of our own tests.
LIBRARIES = (
    "libcommons-io-java",
    "libcommons-lang3-java",
    "libgoogle-gson-java",
    "libh2-java",
    "libmockito-java",
    "librust-arbitrary-dev",
    "librust-bincode-dev",
    "librust-serde-dev",
    "node-tape",
)
DOCKERFILE = """FROM {base}
COPY {commit}.bundle /base.bundle
RUN git init -q /workspace && cd /workspace && git fetch -q /base.bundle refs/bases/{commit} && git reset -q --hard {commit} \\
 && rm -rf /base.bundle .git/FETCH_HEAD .git/ORIG_HEAD .git/logs
WORKDIR /workspace
"""


@dataclass(frozen=True, slots=True)
class Package:
    """One package: the commit that fixes it, the files of tests in this commit, and the script that runs the tests in /workspace.

    `image` has commands of a Dockerfile that run after the checkout; what they compile need not be compiled in each run. `npm` has packages
    that lie in /node_modules, with their exact versions. `without` has large files that a clone may lack; the script runs no test that
    reads them.
    """

    name: str
    language: str
    repository: str
    fix: str
    tests: tuple[str, ...]
    script: str
    image: str = ""
    npm: tuple[str, ...] = ()
    without: tuple[str, ...] = ()


GO = "ENV GOPROXY=off GOFLAGS=-mod=mod GOCACHE=/opt/go-build\nRUN go test -count=1 -run '^$' ./...\n"
CARGO = r"""ENV CARGO_HOME=/opt/cargo CARGO_NET_OFFLINE=true CARGO_TARGET_DIR=/opt/target
RUN mkdir -p /opt/cargo && printf '%s\n' '[source.crates-io]' 'replace-with = "debian"' \
 '[source.debian]' 'directory = "/usr/share/cargo/registry"' >/opt/cargo/config.toml && cargo test --no-run
"""
JARS = (
    *("junit-platform-console", "junit-platform-launcher", "junit-platform-engine", "junit-platform-commons"),
    *("junit-platform-reporting", "junit-jupiter-api", "junit-jupiter-engine", "junit-jupiter-params"),
    *(
        "opentest4j",
        "opentest4j-reporting-events",
        "opentest4j-reporting-schema",
        "apiguardian-api",
        "picocli",
    ),
    *("univocity-parsers", "hamcrest", "mockito-core", "byte-buddy", "byte-buddy-agent", "objenesis"),
    *("commons-io", "commons-lang3", "h2", "gson", "jsr305"),
)
JUNIT = f"""jars={":".join(f"/usr/share/java/{jar}.jar" for jar in JARS)}
export JAVA_TOOL_OPTIONS="-XX:+UseSerialGC -XX:TieredStopAtLevel=1"
"""
VITEST = """RUN ln -s /workspace/packages/zod /node_modules/zod && printf '%s' \\
 'const resolve = { conditions: ["@zod/source", "default"], externalConditions: ["@zod/source", "default"] };' \\
 'export default { resolve, ssr: { resolve } };' >/opt/vitest.config.mjs
"""

PACKAGES = (
    Package(
        name="uuid",
        language="Go",
        repository="google/uuid",
        fix="a2b2b32373ff0b1a312b7fdf6d38a977099698a6",
        tests=("uuid_test.go",),
        script="go test ./...\n",
        image=GO,
    ),
    Package(
        name="mux",
        language="Go",
        repository="gorilla/mux",
        fix="976b536446a77de8de2d5559c78f612970fb5e37",
        tests=("mux_test.go",),
        script="go test ./...\n",
        image=GO,
    ),
    Package(
        name="pflag",
        language="Go",
        repository="spf13/pflag",
        fix="d5e0c0615acee7028e1e2740a11102313be88de1",
        tests=("ip_test.go",),
        script="go test -vet=off ./...\n",  # vet refuses an old test of this package
        image=GO.replace("go test", "go test -vet=off"),
    ),
    Package(
        name="smallvec",
        language="Rust",
        repository="servo/rust-smallvec",
        fix="944f60397a35043ef5704e9bf76b26cdcb5fc55d",
        tests=("src/tests.rs",),
        script="cargo test --lib\n",
        image=CARGO,
    ),
    Package(
        name="semver",
        language="Rust",
        repository="dtolnay/semver",
        fix="d92a4d8ff7d1a90caf9fcac9bf120c360455d8d9",
        tests=("tests/test_version.rs",),
        script="cargo test --tests\n",
        image=CARGO,
    ),
    Package(
        name="minimist",
        language="JavaScript",
        repository="minimistjs/minimist",
        fix="9c7dc85ab9e835ec5ae1c2590d1fb792d54fb626",
        tests=("test/kv_short.js",),
        script="tape 'test/*.js'\n",
        image="ENV NODE_PATH=/usr/share/nodejs\n",
    ),
    Package(
        name="zod",
        language="TypeScript",
        repository="colinhacks/zod",
        fix="4309c61304daf40aab2124b5f513abe2b4df8637",
        tests=("packages/zod/src/v4/classic/tests/string.test.ts",),
        script=(
            "cd packages/zod\n"
            "/node_modules/.bin/vitest run --config /opt/vitest.config.mjs --root . --reporter=verbose "
            # One test takes longer than vitest's 5 s where the machine is busy.
            "--testTimeout=60000 src/v4/classic/tests/string.test.ts\n"
        ),
        image=VITEST,
        npm=("vitest@3.2.4", "vite@6.4.1"),
    ),
    Package(
        name="commons-csv",
        language="Java",
        repository="apache/commons-csv",
        fix="c15a06eee95e227fbe5c61849dd12b7bf126016a",
        tests=("src/test/java/org/apache/commons/csv/issues/JiraCsv288Test.java",),
        script=f"""{JUNIT}tests=org/apache/commons/csv
javac -proc:none -nowarn -sourcepath src/main/java:src/test/java -cp $jars -d /tmp/out \\
  src/test/java/$tests/{{CSVParserTest,LexerTest,TokenMatchersTest,issues/JiraCsv288Test}}.java
cp -r src/test/resources/. /tmp/out
java -cp /tmp/out:$jars org.junit.platform.console.ConsoleLauncher --scan-classpath /tmp/out
""",
        without=(
            "src/test/resources/org/apache/commons/csv/CSV-198/optd_por_public.csv",
            "src/test/resources/org/apache/commons/csv/perf/worldcitiespop.txt.gz",
        ),
    ),
    Package(
        name="jsoup",
        language="Java",
        repository="jhy/jsoup",
        fix="4ea768d96b3d232e63edef9594766d44597b3882",
        tests=(
            "src/test/java/org/jsoup/internal/StringUtilTest.java",
            "src/test/java/org/jsoup/safety/CleanerTest.java",
        ),
        script=f"""{JUNIT}javac -proc:none -nowarn -sourcepath src/main/java:src/test/java -cp $jars -d /tmp/out \\
  src/test/java/org/jsoup/{{internal/StringUtil,safety/Cleaner}}Test.java
(cd src/main/java && find . -name '*.properties' -exec cp --parents {{}} /tmp/out ';')
java -cp /tmp/out:$jars org.junit.platform.console.ConsoleLauncher --scan-classpath /tmp/out
""",
    ),
    Package(
        name="cjson",
        language="C",
        repository="DaveGamble/cJSON",
        fix="a78d975537a8df40d58a96f8ce326d7fb625e1e5",
        tests=("tests/misc_tests.c",),
        script=(
            "cmake -S . -B /opt/build >/dev/null && cmake --build /opt/build --target misc_tests && cd /opt/build/tests && ./misc_tests\n"
        ),
        image="RUN cmake -S . -B /opt/build && cmake --build /opt/build\n",
    ),
    Package(
        name="cxxopts",
        language="C++",
        repository="jarro2783/cxxopts",
        fix="e84ab5f67ca34dfb6d5b1f6801e1d6f338b8ebe5",
        tests=("test/options.cpp",),
        script="cmake -S . -B /opt/build >/dev/null && cmake --build /opt/build --target options_test && /opt/build/test/options_test -s\n",
        image="RUN cmake -S . -B /opt/build && cmake --build /opt/build --target options_test\n",
    ),
    Package(
        name="yaml-cpp",
        language="C++",
        repository="jbeder/yaml-cpp",
        fix="80ea0028c7ba35e6a267e1778eab78a3ee82e8b9",
        tests=("test/binary_test.cpp",),
        script=(
            "g++ -std=c++17 -Iinclude -Isrc src/{binary,fptostring,ostream_wrapper}.cpp test/{binary,fptostring,ostream_wrapper}_test.cpp "
            "-lgtest -lgtest_main -o /tmp/yaml_tests\n/tmp/yaml_tests\n"
        ),
    ),
)


class OtherFix(msgspec.Struct, frozen=True, kw_only=True):
    """The results for a fix that is not the known one."""

    file: str
    rewards: list[float]
    controls: dict[str, int]  # what the controls of these gradings said
    whys: list[str]  # the reasons of rewards other than 1, and of gradings that failed

    @property
    def is_wrong(self) -> bool:
        return self.file.endswith(".wrong.patch")

    @property
    def held(self) -> bool:
        """Whether it was worth 1 in each grading, or 0 if it is wrong."""
        return self.rewards == [0] if self.is_wrong else bool(self.rewards) and not self.whys


class MeasuredFix(msgspec.Struct, frozen=True, kw_only=True):
    """The results for one package."""

    name: str
    fix: str
    ok: bool  # whether verification found the task ok
    reason: str  # why it did not
    control: str  # the strongest result that a control can have
    num_tests: int  # number of tests that the fix passes in every run
    num_controlled: int  # number of these tests that fail under at least one contradiction
    num_needing_fix: int
    num_uncontrolled: int  # number of tests that need the fix and fail under no contradiction
    rewards: list[float]  # of the known fix
    controls: dict[str, int]  # what the controls of these gradings said
    whys: list[str]  # the reasons of rewards other than 1, and of gradings that failed
    empty: float | None  # reward of the empty patch; None: it could not be graded
    others: list[OtherFix] = msgspec.field(default_factory=list[OtherFix])

    @property
    def held(self) -> bool:
        """Whether the fix was worth 1 in each grading, the empty patch 0, and each other fix what it should be."""
        known = self.ok and not self.whys and self.empty == 0 and bool(self.rewards)
        return known and all(one.held for one in self.others)


def main(argv: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(argv)
    packages = [one for one in PACKAGES if not options.packages or one.name in options.packages]
    missing = False
    for package in packages if not options.table else ():
        try:
            measured = _with_others(package, options.out) if options.others else _measure(package, options)
        except ValueError as error:
            missing = True
            print(f"{package.name}: {error}", file=sys.stderr, flush=True)
            continue
        (options.out / package.name / "result.json").write_bytes(
            msgspec.json.format(msgspec.json.encode(measured))
        )
        print(f"{table([measured])}\n", flush=True)
    found = [_read(file) for one in packages if (file := options.out / one.name / "result.json").exists()]
    print(table(found))
    return 0 if found and not missing and all(one.held for one in found) else 1


def _read(file: Path) -> MeasuredFix:
    return msgspec.json.decode(file.read_bytes(), type=MeasuredFix)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.known_fixes",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    names = [one.name for one in PACKAGES]
    add(
        "packages", nargs="*", metavar="NAME", type=_package_name, help=f"of {', '.join(names)}; default: all"
    )
    add(
        "--mirror",
        type=Path,
        default=Path("mirror"),
        metavar="DIR",
        help="folder of clones; default: %(default)s",
    )
    add(
        "--repeats", type=int, default=20, metavar="N", help="gradings of the known fix; default: %(default)s"
    )
    add("--out", type=Path, default=OUT, metavar="DIR", help="default: %(default)s")
    add("--others", action="store_true", help="grade only the other fixes, on what OUT has verified")
    add("--table", action="store_true", help="only print the results in OUT")
    return parser


def _package_name(text: str) -> str:
    if text not in {one.name for one in PACKAGES}:
        raise argparse.ArgumentTypeError(f"no package is called {text}")
    return text


def _measure(package: Package, options: argparse.Namespace) -> MeasuredFix:
    """Builds, verifies and grades one package. Raises ValueError if it cannot be built."""
    from pipeline.taskfile import gold_path, read_gold, read_verified, verified_path
    from workers.unqueued import verified_tasks
    from workers.verify.__main__ import main as verify

    folder: Path = options.out / package.name
    tasks = _imported(package, folder, options.mirror)
    limits = ("--cpu-s", str(CPU_S), "--wall-s", str(WALL_S))
    status = verify([str(tasks), "--new", "--jobs", "1", "--logs", str(folder / "logs"), *limits])
    if status > 1:  # it was stopped, or could not write
        raise SystemExit(status)
    found = next(iter(read_verified(verified_path(tasks)).values()))
    (task,) = verified_tasks(tasks)
    fix = read_gold(gold_path(tasks))[task.id].patch.encode("utf-8", "surrogateescape")
    patches = {"known": (fix, options.repeats), "empty": (b"", 1)}
    known, empty, *others = asyncio.run(_graded(task, patches | _other_patches(package)))
    return MeasuredFix(
        name=package.name,
        fix=package.fix,
        ok=found.ok,
        reason=found.reason,
        control=found.control,
        num_tests=found.num_tests,
        num_controlled=found.num_controlled,
        num_needing_fix=found.num_needing_fix,
        num_uncontrolled=found.num_uncontrolled,
        rewards=known.rewards,
        controls=known.controls,
        whys=known.whys,
        empty=next(iter(empty.rewards), None),
        others=others,
    )


def _with_others(package: Package, out: Path) -> MeasuredFix:
    """The package's results in `out`, whose other fixes are graded again. Raises ValueError if there are no results."""
    from workers.unqueued import verified_tasks

    file = out / package.name / "result.json"
    if not file.exists():
        raise ValueError(f"there is no {file}; call this command without --others")
    (task,) = verified_tasks(file.with_name("tasks.jsonl"))
    others = asyncio.run(_graded(task, _other_patches(package)))
    return msgspec.structs.replace(_read(file), others=others)


def _other_patches(package: Package) -> dict[str, tuple[bytes, int]]:
    """The other fixes by their file's name, each with the number of its gradings."""
    return {
        file.name: (file.read_bytes(), 1 if file.name.endswith(".wrong.patch") else NUM_OTHER)
        for file in sorted(OTHER_FIXES.glob(f"{package.name}.*patch"))
    }


def _imported(package: Package, folder: Path, mirror: Path) -> Path:
    """The task file of the package, whose image is built. Raises ValueError if its clone is missing or something cannot be built."""
    from infra.images.build import ensure_image
    from workers.images.__main__ import main as images
    from workers.tasksets.__main__ import main as tasksets

    base = _base_image()
    tasks = folder / "tasks.jsonl"
    write_task(package, folder, mirror, base.tag)
    ensure_image(base)
    if images(["build", str(folder), "--network", "none", "--logs", str(folder / "build-logs")]):
        raise ValueError(f"its image cannot be built; the log is in {folder / 'build-logs'}")
    if tasksets(["import", "fleet", str(folder), "--out", str(tasks)]):
        raise ValueError("its task is refused")
    return tasks


def _base_image() -> "BaseImage":
    """The image in which our own tests compile and run other languages, with more libraries."""
    from infra.images.build import BaseImage
    from tests.workers.languages.stage import IMAGE

    return BaseImage(tag="swerve/known-fixes:1", packages=(*IMAGE.packages, *LIBRARIES))


def write_task(package: Package, folder: Path, mirror: Path, base_image: str) -> None:
    """Writes the task's directory: task.json, Dockerfile, and what this copies."""
    from workers.making.history import History
    from workers.tasksets.patches import divided

    context = folder / f"task_{package.name}"
    context.mkdir(parents=True, exist_ok=True)
    history = History(mirror / package.repository.replace("/", "+") / "repo", folder / "borrowed.git")
    before = f"{package.fix}^"
    diff, base = history.diff(before, package.fix), history.changed(before, dict.fromkeys(package.without))
    tests, fix = divided(diff, lambda path: path in package.tests)
    bundle = context / f"{base}.bundle"
    # Git does not write the same bytes each time, and with other bytes the image would be built again.
    if not bundle.exists():
        history.bundle(base, bundle)
    copied = _install(package.npm, context) if package.npm else ""
    dockerfile = DOCKERFILE.format(base=base_image, commit=base) + copied + package.image
    (context / "Dockerfile").write_text(dockerfile)
    fields = {
        "instance_id": package.name,
        "repo": package.repository,
        "base_commit": base,
        "problem_statement": next(history.commits(package.fix, "-1")).message,
        "image_name": f"swerve-known-fixes/{package.name}:1",
        "eval_script": f"set -e\ncd /workspace\n{package.script}",
        "gold_patch": diff,
        "fix_patch": fix,
        "test_patch": tests,
        "test_files": package.tests,
    }
    (context / "task.json").write_text(json.dumps(fields, indent=1))


def _install(packages: Sequence[str], context: Path) -> str:
    """Installs packages of npm without running their scripts. Returns the line of a Dockerfile that copies them. Raises ValueError."""
    if not (context / "node_modules").exists():
        quiet = ("--ignore-scripts", "--no-audit", "--no-fund", "--no-save", "--loglevel=error")
        if subprocess.run(
            ["npm", "install", "--prefix", str(context), *quiet, *packages], check=False
        ).returncode:
            raise ValueError(f"npm cannot install {' '.join(packages)}")
    return "COPY node_modules /node_modules\n"


async def _graded(task: "Task", patches: Mapping[str, tuple[bytes, int]]) -> list[OtherFix]:
    """Grades each patch as often as it says, one grading after the other."""
    from workers.sandbox.backend import command_sandboxes
    from workers.unqueued import session

    sandboxes = command_sandboxes(fleet=f"known-fixes-{os.getpid()}")
    async with session(sandboxes) as outage:
        if outage:
            raise SystemExit(outage)
        return [await _repeated(sandboxes, task, name, *patch) for name, patch in patches.items()]


async def _repeated(
    sandboxes: "Sandboxes", task: "Task", name: str, patch: bytes, num_repeats: int
) -> OtherFix:
    """What `num_repeats` gradings of the patch gave."""
    from workers.unqueued import Broken

    rewards, whys = list["Reward"](), list[str]()
    for number in range(num_repeats):
        made = await _reward(sandboxes, task, patch)
        if isinstance(made, Broken):
            whys.append(f"infrastructure: {made.why}")
            continue
        rewards.append(made)
        if made.value != 1:
            whys.append(made.decided_by)
        line = f"{task.id}: {name}: {number + 1} of {num_repeats}: {made.value:g} {made.control}"
        print(line, file=sys.stderr, flush=True)
    controls = dict(Counter(one.control for one in rewards))
    return OtherFix(file=name, rewards=[one.value for one in rewards], controls=controls, whys=whys)


async def _reward(sandboxes: "Sandboxes", task: "Task", patch: bytes) -> "Reward | Broken":
    """The production grader's reward of the patch."""
    from pipeline.request import Limits
    from workers.grading.grade import Grader
    from workers.unqueued import tried, unqueued_claim

    claim = unqueued_claim(task, command="known-fixes", limits=Limits(grade_cpu_s=CPU_S, grade_wall_s=WALL_S))
    return await tried(
        lambda: Grader(sandboxes).grade(claim, patch), task, image_fix="call this command again"
    )


def table(found: Sequence[MeasuredFix]) -> str:
    """The results as a table of Markdown, and below it why a fix was not worth 1, or a wrong one not 0."""
    lines = [
        "| package | language | fix | a control says at best | tests that need the fix, without a control | passing tests controlled "
        "| known fix worth 1 | its controls | empty patch | other fix worth 1 | its controls | wrong fix worth 0 |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    packages = {one.name: one for one in PACKAGES}
    for one in found:
        package = packages[one.name]
        share = f"{one.num_controlled / one.num_tests:.1%}" if one.num_tests else "-"
        cells = (
            package.repository,
            package.language,
            one.fix[:8],
            one.control,
            f"{one.num_uncontrolled} of {one.num_needing_fix}",
            f"{one.num_controlled} of {one.num_tests} ({share})",
            _worth(1, one.rewards),
            _counts(one.controls),
            "broken" if one.empty is None else f"{one.empty:g}",
            *_cells_of_others(one.others),
        )
        lines.append(f"| {' | '.join(cells)} |")
    for one in found:
        whys = [*([one.reason] if one.reason else []), *one.whys]
        for other in one.others:
            whys += [f"{other.file}: {why}" for why in (() if other.held else other.whys or ["worth 1"])]
        lines += [f"{one.name}: {why}" for why in dict.fromkeys(whys)]
    return "\n".join(lines)


def _cells_of_others(others: Sequence[OtherFix]) -> tuple[str, str, str]:
    """How many gradings of right fixes gave 1, what their controls said, and how many gradings of wrong ones gave 0; `-` without one."""
    right, wrong = ([one for one in others if one.is_wrong == is_wrong] for is_wrong in (False, True))
    controls = sum((Counter(one.controls) for one in right), Counter[str]())
    return (
        _worth(1, [value for one in right for value in one.rewards]) if right else "-",
        _counts(controls) or "-",
        _worth(0, [value for one in wrong for value in one.rewards]) if wrong else "-",
    )


def _worth(value: float, rewards: Sequence[float]) -> str:
    return f"{rewards.count(value)} of {len(rewards)}"


def _counts(controls: Mapping[str, int]) -> str:
    return ", ".join(f"{number} {name or '-'}" for name, number in sorted(controls.items()))


if __name__ == "__main__":
    sys.exit(main())
