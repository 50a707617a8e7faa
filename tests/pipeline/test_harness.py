"""Files that describe agent programs: what is refused, by which key, and what a program is started with. A copy of a harness is equal to
its manifest, or it is found out.
"""

import io
import json
import re
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pipeline.errors import HarnessMissing, RequestError, class_of
from pipeline.harness import (
    HARNESS_DIR,
    HOME_DIR,
    LONGEST_ARGUMENT_BYTES,
    MANIFEST,
    SHIPPED,
    UNTESTED,
    EpisodeValues,
    UnequalContent,
    check_archive,
    check_can_play,
    filled,
    read_harness,
    shipped,
    untested,
    write_archive,
)
from pipeline.message import decode, encode
from pipeline.request import RolloutRequest
from tests.pipeline import samples

TRIED = ["codex", "mini", "opencode", "pi", "qwen-code"]
FILE = """
name = "tiny"
version = "1.2.3"
licence = "MIT"
dialect = "chat"
command = ["{harness}/run", "--task={problem}"]
version_command = ["{harness}/run", "--version"]
leftovers = [".tiny/*"]

[env]
TINY_PORT = "{port}"

[files]
".tiny/settings.json" = '{"window": {prompt_tokens}, "model": "{model}", "template": "{{task}}"}'

[build]
directory = "program"
"""
TEXT = "uses_tools = false\ncommand_pattern"  # keys of a program that reads commands from text
VALUES = EpisodeValues(
    problem="Mend {it}: {port}.",
    workdir="/workspace",
    model="policy",
    port=4000,
    context_tokens=32768,
    max_new_tokens=4096,
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Holds the directory of the program."""
    (tmp_path / "program").mkdir()
    (tmp_path / "program" / "run").write_text("#!/bin/sh\n")
    return tmp_path


def written(folder: Path, text: str = FILE) -> Path:
    path = folder / "tiny.toml"
    path.write_text(text)
    return path


@pytest.mark.parametrize("name", shipped())
def test_a_shipped_file_names_exact_versions_with_a_hash_for_each_package_and_no_address(name: str) -> None:
    file = read_harness(name)
    assert file.harness.name == name
    assert file.harness.image.startswith(f"swerve/harness-{name}:{file.harness.version}-")
    assert file.lock is not None
    lock = file.lock.read_text()
    assert "://" not in lock
    if file.build.npm:
        packages: dict[str, Any] = {
            path: one
            for path, one in json.loads(lock)["packages"].items()
            if path and not one.get("optional")
        }
        assert {path for path, one in packages.items() if not one["integrity"].startswith("sha512-")} == set()
        assert {
            package: packages[f"node_modules/{package}"]["version"] for package in file.build.npm
        } == file.build.npm
    else:
        lines = lock.splitlines()
        assert [
            line for line in lines if not re.fullmatch(r"[\w.-]+==\S+ --hash=sha256:[0-9a-f]{64}", line)
        ] == []
        assert {line.partition(" ")[0] for line in lines} >= set(file.build.pip)


def test_all_programs_that_were_tried_are_shipped() -> None:
    assert set(shipped()) >= set(TRIED)


@pytest.mark.parametrize("name", untested())
def test_a_file_of_a_program_that_nobody_has_tested_is_complete_and_asks_for_its_lock(name: str) -> None:
    file = read_harness(name, locked=False)
    harness = file.harness
    assert (harness.name, file.path.parent) == (name, UNTESTED)
    assert 0 < harness.footprint.opening_tokens < 20_000
    invocation = filled(harness, VALUES)
    everything = " ".join((*invocation.command, *invocation.env.values(), *invocation.files.values()))
    assert "127.0.0.1:4000" in everything
    assert VALUES.problem in (*invocation.command, *invocation.files.values()) or any(
        word.endswith(f"={VALUES.problem}") for word in invocation.command
    )
    assert file.lock is not None
    if not file.lock.is_file():
        with pytest.raises(ValueError, match=f"not locked; `swerve harness lock {name}` writes"):
            read_harness(name)


def test_the_file_that_the_docs_show_is_one_in_ten_lines(tmp_path: Path) -> None:
    (shown,) = re.findall(r"```toml\n(.*?)```", Path("docs/harnesses.md").read_text(), flags=re.DOTALL)
    (tmp_path / "my-agent").mkdir()
    (tmp_path / "my.toml").write_text(shown)
    assert len(shown.splitlines()) <= 10
    assert read_harness(tmp_path / "my.toml").harness.name == "my-agent"


def test_no_name_is_both_shipped_and_untested() -> None:
    assert set(untested()).isdisjoint(shipped())
    assert {"claude-code", "gemini-cli", "openhands", "aider"} <= set(untested())


def test_a_program_whose_dialect_no_endpoint_speaks_cannot_play() -> None:
    harness = read_harness("gemini-cli", locked=False).harness
    with pytest.raises(
        ValueError, match="gemini-cli speaks the dialect gemini, for which there is no endpoint"
    ):
        check_can_play(harness, 65_536, 4096)


def test_a_program_cannot_play_where_its_opening_leaves_no_room() -> None:
    harness = read_harness("codex").harness
    check_can_play(harness, 16_384, 4096)
    with pytest.raises(ValueError, match="codex begins with 8700 tokens before the task"):
        check_can_play(harness, 12_796, 4096)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('name = "tiny"', 'name = "Tiny!"', "name: it must be a word"),
        ('version = "1.2.3"', 'version = "^1.2"', "version: it must be one exact version"),
        ('dialect = "chat"', 'dialect = "grpc"', "dialect: it must be one of chat, responses, messages"),
        ('licence = "MIT"', "", "licence: the key is missing"),
        ('licence = "MIT"', 'licence = "MIT"\nwindow = 1', "window: a harness has no such key"),
        ("[build]", "[build]\ncargo = 1", "build.cargo: a harness has no such key"),
        ('["{harness}/run", "--task', '["run", "--task', "command: 'run' is not below {harness}/"),
        ("--task={problem}", "--task=x", "command: it gives the program no task"),
        ("--task={problem}", "--task={text} {problem}", "command.1: {text} is not a placeholder"),
        ('"{port}"', '"4000"', "files: nothing tells the program its endpoint"),
        ('"{port}"', '"{port} {problem}"', "env.TINY_PORT: {problem} is allowed in the command only"),
        ("TINY_PORT", "LD_LIBRARY_PATH", "env.LD_LIBRARY_PATH: the task's own programs read this variable"),
        ("TINY_PORT", "PYTHONHOME", "env.PYTHONHOME: the task's own programs"),
        ("TINY_PORT", "NODE_OPTIONS", "env.NODE_OPTIONS: the task's own programs"),
        ("TINY_PORT", "PATH", "env.PATH: the task's own programs"),
        ('".tiny/settings.json"', '"../settings.json"', "files: '../settings.json' is not a relative path"),
        ('[".tiny/*"]', '["/etc"]', "leftovers: '/etc' is not a relative path"),
        ("--version", "{port}", "version_command.1: {port} is not known"),
        ('directory = "program"', 'directory = "absent"', "build.directory: there is no directory"),
        ('directory = "program"', "", "build: give exactly one of npm, pip and directory"),
        ('directory = "program"', 'npm = {a = "latest"}', "build.npm.a: 'latest' is not an exact version"),
        (
            'directory = "program"',
            'npm = {a = "1.0.0"}',
            "build: its packages are not locked; `swerve harness lock",
        ),
        ('directory = "program"', 'pip = ["a>=1"]', "build.pip: 'a>=1' is not an exact version"),
        ("[env]", "[footprint]\ncpu = 1\n[env]", "footprint.cpu: a harness has no such key"),
        ("[env]", "[footprint]\ncpu_s = 1\n[env]", "footprint.source: the key is missing"),
        ("[env]", "content = 'sha256:12'\n[env]", "content: it must be sha256: and 64"),
        (
            "[env]",
            "command_pattern = '(.*)'\n[env]",
            "command_pattern: the program reads commands from calls",
        ),
        ("[env]", f"{TEXT} = '(.'\n[env]", "command_pattern: not a regular expression of Python's"),
        ("[env]", f"{TEXT} = '.*'\n[env]", "command_pattern: it has 0 groups; give it one"),
        ("[env]", "[env", "not TOML"),
    ],
)
def test_a_mistake_is_named_by_its_key(folder: Path, old: str, new: str, said: str) -> None:
    assert old in FILE
    path = written(folder, FILE.replace(old, new, 1))
    with pytest.raises(ValueError, match=re.escape(f"{path}: {said}")):
        read_harness(path)


def test_a_name_that_nothing_has_is_told_those_that_are_there() -> None:
    with pytest.raises(ValueError, match=r"absent: .*give the path of a harness file, or one of .*codex"):
        read_harness("absent")


def test_placeholders_are_filled_once_and_a_template_of_the_program_stays(folder: Path) -> None:
    harness = read_harness(written(folder)).harness
    invocation = filled(harness, VALUES)
    assert invocation.command == (f"{HARNESS_DIR}/run", "--task=Mend {it}: {port}.")
    assert invocation.env == {"HOME": HOME_DIR, "TINY_PORT": "4000"}
    settings = json.loads(invocation.files[f"{HOME_DIR}/.tiny/settings.json"])
    assert settings == {"window": 28672, "model": "policy", "template": "{{task}}"}


def test_a_program_that_reads_its_task_from_a_file_gets_one(folder: Path) -> None:
    text = FILE.replace("--task={problem}", "--file={problem_file}")
    invocation = filled(read_harness(written(folder, text)).harness, VALUES)
    assert invocation.files[invocation.command[1].removeprefix("--file=")] == VALUES.problem


def test_a_problem_that_is_too_long_for_an_argument_is_refused(folder: Path) -> None:
    harness = read_harness(written(folder)).harness
    long = EpisodeValues("ä" * (LONGEST_ARGUMENT_BYTES // 2), "/w", "m", 1, 2, 1)
    with pytest.raises(RequestError, match="tiny takes the problem as an argument"):
        filled(harness, long)


@pytest.mark.parametrize("name", shipped())
def test_a_shipped_program_gets_files_that_its_own_formats_can_read(name: str) -> None:
    invocation = filled(read_harness(name).harness, VALUES)
    for path, text in invocation.files.items():
        if path.endswith(".json"):
            json.loads(text)
    everything = " ".join((*invocation.command, *invocation.env.values(), *invocation.files.values()))
    assert "127.0.0.1:4000" in everything


def test_what_the_image_is_made_of_names_it(folder: Path) -> None:
    path = written(folder)
    image = read_harness(path).harness.image
    assert read_harness(path).harness.image == image
    (folder / "program" / "run").write_text("#!/bin/sh\nexit\n")
    assert read_harness(path).harness.image != image


def test_a_harness_travels_in_a_request(folder: Path) -> None:
    harness = read_harness(written(folder)).harness
    request = samples.request(harness=harness)
    assert decode(encode(request), RolloutRequest).harness == harness
    assert samples.request().harness is None


def test_a_program_that_a_host_lacks_is_tried_no_further() -> None:
    assert class_of(HarnessMissing.boundary, transient=HarnessMissing.transient) == "environment"


def test_shipped_files_lie_with_the_package() -> None:
    assert {path.stem for path in SHIPPED.glob("*.toml")} == set(shipped())


@pytest.fixture
def original(tmp_path: Path) -> Path:
    folder = tmp_path / "original"
    (folder / "bin").mkdir(parents=True)
    (folder / "bin" / "run").write_text("#!/bin/sh\n")
    (folder / "bin" / "run").chmod(0o700)
    (folder / "link").symlink_to("bin/run")
    (folder / "empty").mkdir()
    return folder


def archived(folder: Path) -> tuple[str, bytes]:
    out = io.BytesIO()
    content = write_archive(folder, out, below="/opt")
    return content, out.getvalue()


def test_the_same_content_makes_the_same_archive(original: Path) -> None:
    first = archived(original)
    (original / "bin" / "run").touch()
    assert archived(original) == first


def test_a_true_copy_is_equal(original: Path) -> None:
    content, archive = archived(original)
    check_archive(io.BytesIO(archive), content)


def changed(entry: tarfile.TarInfo, data: bytes) -> tuple[tarfile.TarInfo, bytes] | None:
    return (entry, data[:-1] + b"x") if entry.name.endswith("run") else (entry, data)


def cut(entry: tarfile.TarInfo, data: bytes) -> tuple[tarfile.TarInfo, bytes] | None:
    return (entry, data[:3]) if entry.name.endswith("run") else (entry, data)


def missing(entry: tarfile.TarInfo, data: bytes) -> tuple[tarfile.TarInfo, bytes] | None:
    return None if entry.name.endswith("run") else (entry, data)


def without_manifest(entry: tarfile.TarInfo, data: bytes) -> tuple[tarfile.TarInfo, bytes] | None:
    return None if entry.name.endswith(MANIFEST) else (entry, data)


def other_link(entry: tarfile.TarInfo, data: bytes) -> tuple[tarfile.TarInfo, bytes] | None:
    entry.linkname = "/bin/sh" if entry.issym() else ""
    return entry, data


def other_mode(entry: tarfile.TarInfo, data: bytes) -> tuple[tarfile.TarInfo, bytes] | None:
    entry.mode = 0o644 if entry.isreg() else entry.mode
    return entry, data


def added(entry: tarfile.TarInfo, data: bytes) -> tuple[tarfile.TarInfo, bytes] | None:
    entry.name += "-2" if entry.name.endswith("empty") else ""
    return entry, data


@pytest.mark.parametrize("change", [changed, cut, missing, without_manifest, other_link, other_mode, added])
def test_what_differs_is_found(
    original: Path, change: Callable[[tarfile.TarInfo, bytes], tuple[tarfile.TarInfo, bytes] | None]
) -> None:
    content, archive = archived(original)
    copy = io.BytesIO()
    with tarfile.open(fileobj=io.BytesIO(archive)) as source, tarfile.open(fileobj=copy, mode="w") as target:
        for entry in source:
            file = source.extractfile(entry) if entry.isreg() else None
            if (kept := change(entry, file.read() if file else b"")) is not None:
                kept[0].size = len(kept[1])
                target.addfile(kept[0], io.BytesIO(kept[1]))
    with pytest.raises(UnequalContent):
        check_archive(io.BytesIO(copy.getvalue()), content)
