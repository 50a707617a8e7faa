"""Task directories of Harbor: what is mapped, what is refused by its name, and what comes back as it was. Nothing here needs Docker."""

import os
import stat
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pipeline.task import ExitCode, File, Resources, RewardFile, Task
from pipeline.taskfile import Gold, fingerprint, gold_path, read_gold, read_tasks, write_gold, write_tasks
from tests.workers.tasksets.harbor_tasks import TEST_SH, TOML, content_of, write_task
from workers.tasksets import harbor, harbor_directories
from workers.tasksets.__main__ import main
from workers.tasksets.harbor_directories import read_tree

IMAGE = 'docker_image = "acme/sums:1"\n'
WITH_IMAGE = TOML.replace("[environment]\n", f"[environment]\n{IMAGE}")


def described(directory: Path, **changes: str | bytes | None) -> Any:
    (fields,) = harbor.read(write_task(directory, **changes), None)
    fields.value("directory")
    return fields.values["directory"]


def refused(directory: Path, capsys: pytest.CaptureFixture[str], *options: str) -> str:
    """What an import says that refuses the directory, and writes nothing."""
    before, out = content_of(directory.parent), directory.parent.parent / "out"
    assert main(["import", "harbor", str(directory), "--out", str(out / "tasks.jsonl"), *options]) == 1
    assert content_of(directory.parent) == before
    assert not out.exists()
    return capsys.readouterr().err


def test_every_part_of_a_directory_has_its_place_in_the_task(tmp_path: Path) -> None:
    toml = WITH_IMAGE.replace("timeout_sec = 120.0", 'timeout_sec = 120.0\nuser = "dev"').replace(
        "timeout_sec = 60\n", 'timeout_sec = 60\nuser = "dev"\n'
    )
    directory = described(
        tmp_path / "sums",
        **{
            "task.toml": toml.replace("cpus = 1", 'cpus = 1\nworkdir = "/app"'),
            "tests/data/raw": b"\xff\0",
            "tests/check.sh": "true\n",
            "solution/notes": "x",
        },
    )
    tests = (tmp_path / "sums/tests/test_sums.py").read_bytes()
    assert directory.task == Task(
        id="harbor:acme/sums",
        repo="acme/sums",
        base_commit="",
        image="acme/sums:1",
        workdir="/app",
        problem="`add` of sums.py subtracts. Mend it.\n",
        user="dev",
        env={"GREETING": "good day"},
        resources=Resources(memory_bytes=512 * 1024**2, cpus=1.0),
        verdict=RewardFile(
            eval_script=TEST_SH,
            env={"LEVEL": "a 'b'"},
            files=(
                File(path="/tests/check.sh", content=b"true\n", mode=0o755),
                File(path="/tests/data/raw", content=b"\xff\0"),
                File(path="/tests/test_sums.py", content=tests),
            ),
        ),
    )
    assert (directory.solve_s, directory.solution_env) == (120.0, {})
    assert directory.unused == (
        "environment.build_timeout_sec", "metadata.difficulty", "metadata.made.by", "task.keywords",
        "verifier.timeout_sec",
    )  # fmt: skip


def test_older_schemas_and_deprecated_keys_mean_the_same(tmp_path: Path) -> None:
    old = '{}\n[environment]\ndocker_image = "i:1"\nmemory = "{}"\nstorage = "10G"\nallow_internet = {}\n'
    for number, (version, memory, internet) in enumerate((
        ('version = "1.0"', "1.5G", "false"),
        ('schema_version = "1.1"', "1536M", "false"),
        ("", "1572864K", "true"),
    )):  # fmt: skip
        directory = described(
            tmp_path / f"sums-{number}", **{"task.toml": old.format(version, memory, internet)}
        )
        assert directory.task.id == f"harbor:sums-{number}"
        assert directory.task.resources.memory_bytes == 1536 * 1024**2
        mode = "public" if internet == "true" else "no-network"
        assert set(directory.network_modes.values()) == {mode}
        assert directory.unused == ("environment.storage",)


@pytest.mark.parametrize(
    ("section", "line", "named"),
    [
        ("", 'schema_version = "2.0"', "schema_version: '2.0' is none of 1.0"),
        ("", '[[steps]]\nname = "one"', "steps: a task has one step"),
        ("", 'artifacts = ["/app/out"]', "artifacts: nothing but the patch"),
        ("task", 'name = "../up"', "task.name: '../up' must be"),
        ("environment", "gpus = 1", "environment.gpus: containers have no GPU"),
        ("environment", 'gpu_types = ["H100"]', "environment.gpu_types: "),
        ("environment", 'tpu = {type = "v6e", topology = "2x4"}', "environment.tpu: "),
        ("environment", 'os = "windows"', "environment.os: only Linux"),
        ("environment", 'mcp_servers = [{name = "x", url = "y"}]', "environment.mcp_servers: "),
        ("environment", 'skills_dir = "/skills"', "environment.skills_dir: "),
        ("environment", 'healthcheck = {command = "true"}', "environment.healthcheck: "),
        ("environment", 'network_mode = "allowlist"', "environment.network_mode: a container reaches every"),
        ("environment", 'network_mode = "bridge"', "environment.network_mode: 'bridge' is not known"),
        ("environment", 'allowed_hosts = ["example.org"]', "environment.allowed_hosts: "),
        ("environment", 'env = {KEY = "${OPENAI_API_KEY:-none}"}', "environment.env.KEY: .* is the host's"),
        ("environment", "env = {KEY = 3}", "environment.env.KEY: must be a name with a text"),
        ("environment", 'env = {"A B" = "x"}', "environment.env.A B: must be"),
        ("environment", 'workdir = "app"', "environment.workdir: must be an absolute path"),
        ("environment", "cpus = -1", "environment.cpus: must be above 0"),
        ("environment", "cpus = nan", "environment.cpus: must be above 0"),
        ("environment", "cpus = true", "environment.cpus: must be of type float"),
        ("environment", 'memory_mb = "2G"', "environment.memory_mb: must be of type float"),
        ("environment", "memory_mb = 1e300", "environment.memory_mb: must be above 0 and at most"),
        ("environment", "memory_mb = 0.5", "environment.memory_mb: must be at least 6"),
        ("environment", 'memory = "1K"', "environment.memory_mb: must be at least 6"),
        ("environment", 'memory = "much"', "environment.memory: must be a size"),
        ("agent", 'network_mode = "allowlist"', "agent.network_mode: "),
        ("agent", 'allowed_hosts = ["example.org"]', "agent.allowed_hosts: "),
        ("agent", 'user = "a b"', ".*agent.user: must be a name or an id"),
        ("agent", 'timeout_sec = "long"', "agent.timeout_sec: must be of type float"),
        ("verifier", 'user = "root"', "verifier.user: must be agent.user"),
        ("verifier", 'env = {KEY = "${KEY}"}', "verifier.env.KEY: .* is the host's"),
        ("verifier", 'collect = [{command = "dump"}]', "verifier.collect: "),
        ("verifier", 'environment = {docker_image = "other:1"}', "verifier.environment.docker_image: "),
        ("verifier", 'environment_mode = "separate"', "artifacts: must be environment.workdir alone"),
        ("verifier", 'environment_mode = "beside"', "verifier.environment_mode: 'beside' is not known"),
        ("solution", 'env = {KEY = "${KEY}"}', "solution.env.KEY: .* is the host's"),
    ],
)
def test_a_key_that_cannot_be_honoured_is_refused_by_its_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], section: str, line: str, named: str
) -> None:
    toml = f"{line}\n" if not section else f"[{section}]\n{line}\n"
    said = refused(write_task(tmp_path / "in/sums", **{"task.toml": toml}), capsys)
    with pytest.raises(ValueError, match=f"in/sums: task.toml: {named}"):
        raise ValueError(said)


def test_all_that_is_wrong_with_a_task_is_said_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_task(tmp_path / "in/one", **{"task.toml": "[environment]\ngpus = 1\nos = 'windows'\n"})
    write_task(tmp_path / "in/two", **{"task.toml": "[environment\n"})
    said = refused(tmp_path / "in", capsys)
    assert "in/one: task.toml: environment.gpus: " in said
    assert "; task.toml: environment.os: only Linux runs here" in said
    assert "in/two: task.toml: not TOML: " in said
    assert "2 refused; nothing was written" in said


@pytest.mark.parametrize(
    ("path", "content", "named"),
    [
        (
            "environment/docker-compose.yaml",
            "services: {}\n",
            "docker-compose.yaml: a task has one container",
        ),
        ("trajectory.json", "{}", "trajectory.json: an episode starts without earlier turns"),
        ("solution/.harborignore", "x\n", "solution/.harborignore: remove"),
        ("tests/test.sh", None, "tests/test.sh: absent"),
        ("tests/test.sh", " \n", "tests/test.sh: is empty"),
        ("tests/test.sh", "#!/bin/bash\r\ntrue\r\n", "tests/test.sh: its lines end in CRLF"),
        ("tests/test.sh", b"#!/bin/bash\n\xff\n", "tests/test.sh: not text in UTF-8"),
        ("solution/solve.sh", None, "solution/solve.sh: absent"),
        ("instruction.md", None, "instruction.md: absent"),
        ("instruction.md", b"\xff", "instruction.md: not text in UTF-8"),
        ("task.toml", b"\xff", "task.toml: not text in UTF-8"),
        ("environment/Dockerfile", None, "environment.docker_image: absent: name one, or write"),
        ("tests/a\nb", "", "'tests/a.*b': is a name with invisible characters"),
        ("tests/big", bytes(9 * 1024**2), "tests: has more than 8 MiB"),
        ("environment/Dockerfile", "FROM x\n", "docker_image: absent: import it with --build, which builds"),
    ],
)
def test_a_file_that_cannot_be_used_is_refused_by_its_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], path: str, content: str | bytes | None, named: str
) -> None:
    said = refused(write_task(tmp_path / "in/sums", **{path: content}), capsys)
    with pytest.raises(ValueError, match=f"in/sums: .*{named}"):
        raise ValueError(said)


@pytest.mark.parametrize("target", ["/etc/passwd", "../../../x", "test.sh"])
def test_a_link_among_the_tests_or_out_of_the_directory_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], target: str
) -> None:
    directory = write_task(tmp_path / "in/sums")
    (directory / "tests/secret").symlink_to(target)
    assert f"tests/secret: is a link to '{target}'" in refused(directory, capsys)
    (directory / "tests/secret").unlink()
    (directory / "environment/inside").symlink_to("app/../Dockerfile")
    (directory / "environment/outside").symlink_to("app/../../../x")
    assert "environment/outside: is a link to 'app/../../../x'" in refused(directory, capsys)


def test_what_is_no_file_or_has_a_foreign_name_or_an_absurd_size_is_refused_unread(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    os.mkfifo(write_task(tmp_path / "a/in/sums") / "tests/pipe")
    assert "tests/pipe: is neither a file nor a directory" in refused(tmp_path / "a/in/sums", capsys)
    foreign = os.fsencode(write_task(tmp_path / "b/in/sums")) + b"/tests/\xff"
    Path(os.fsdecode(foreign)).touch()
    assert "bytes that are not UTF-8" in refused(tmp_path / "b/in/sums", capsys)
    huge = write_task(tmp_path / "c/in/sums") / "environment/huge"
    with huge.open("wb") as file:
        file.truncate(10**12)
    with pytest.raises(
        ValueError, match="environment/huge: the directory has more than 10000 files or 64 MiB"
    ):
        read_tree(tmp_path / "c/in/sums")
    huge.unlink()
    for number in range(20):
        (huge.parent / str(number)).touch()
    monkeypatch.setattr(harbor_directories, "MOST_FILES", 20)
    with pytest.raises(ValueError, match="the directory has more than 20 files"):
        read_tree(tmp_path / "c/in/sums")


def test_a_linked_task_directory_and_a_folder_without_tasks_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "in").mkdir()
    assert main(["import", "harbor", str(tmp_path / "in"), "--out", str(tmp_path / "out")]) == 2
    assert "in: no task.toml in it, or in a directory in it" in capsys.readouterr().err
    (tmp_path / "in/sums").symlink_to(write_task(tmp_path / "elsewhere"))
    assert "in/sums: is a link: import the directory" in refused(tmp_path / "in", capsys)


def test_separate_tests_are_those_of_the_same_image_on_the_changes_of_the_workdir(tmp_path: Path) -> None:
    environment = '[environment]\ndocker_image = "i:1"\nworkdir = "/app"\n'
    artifacts = ('artifacts = ["/app"]\n', 'artifacts = [{source = "/app"}]\n')
    verifiers = (
        'environment_mode = "separate"\n',
        'environment = {docker_image = "i:1", workdir = "/app"}\n',
    )
    for number, (artifact, verifier) in enumerate(zip(artifacts, verifiers, strict=True)):
        changes = {"task.toml": f"{artifact}{environment}[verifier]\n{verifier}"}
        assert described(tmp_path / f"sums-{number}", **changes).task.workdir == "/app"
        with pytest.raises(
            ValueError, match=r"verifier.environment_mode: tests/Dockerfile makes another image"
        ):
            described(tmp_path / f"other-{number}", **changes, **{"tests/Dockerfile": "FROM x\n"})


def test_two_networks_in_one_task_are_refused_only_where_a_task_gets_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    toml = '[environment]\nnetwork_mode = "public"\n[verifier]\nnetwork_mode = "no-network"\n'
    directory = write_task(tmp_path / "in/sums", **{"task.toml": toml})
    assert "verifier.network_mode: must be that of [environment]" in refused(
        directory, capsys, "--network", "task"
    )
    said = refused(directory, capsys)
    assert "1 tasks have a network in Harbor and none here" in said
    assert "verifier.network_mode" not in said


def imported(directory: Path, out: Path) -> None:
    """Writes a task file as an import does that has run the solution."""
    found = described(directory, **{"task.toml": WITH_IMAGE})
    gold = Gold(
        id=found.task.id,
        patch="diff --git a/a b/a\n",
        directory=tuple(found.tree.values()),
        directory_of=fingerprint(found.task),
    )
    write_tasks(out, [found.task])
    write_gold(gold_path(out), [gold])


def test_an_imported_directory_is_exported_byte_for_byte(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = write_task(
        tmp_path / "in/sums", **{"task.toml": WITH_IMAGE, "tests/raw": b"\xff\r\n\0", "other/x.md": ""}
    )
    (directory / "environment/link").symlink_to("app/sums.py")
    (directory / "environment/app/empty").mkdir()
    tasks, out = tmp_path / "tasks.jsonl", tmp_path / "out"
    imported(directory, tasks)
    assert main(["export", "harbor", str(tasks), "--out", str(out)]) == 0
    assert content_of(out / "sums") == content_of(directory)
    assert read_tree(out / "sums") == read_tree(directory)
    assert os.readlink(out / "sums/environment/link") == "app/sums.py"
    assert main(["export", "harbor", str(tasks), "--out", str(out)]) == 2
    assert "out/sums exists already" in capsys.readouterr().err


def test_a_task_that_was_changed_since_is_not_exported_as_it_was(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tasks, out = tmp_path / "tasks.jsonl", tmp_path / "out"
    imported(tmp_path / "in/sums", tasks)
    tasks.write_text(tasks.read_text().replace("Mend it.", "Mend it!"))
    assert main(["export", "harbor", str(tasks), "--out", str(out)]) == 2
    assert "harbor:acme/sums: was changed since it was imported" in capsys.readouterr().err
    assert not out.exists()


def test_a_gold_file_cannot_write_outside_of_the_directory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tasks, out = tmp_path / "tasks.jsonl", tmp_path / "deep/out"
    imported(tmp_path / "in/sums", tasks)
    (gold,) = read_gold(gold_path(tasks)).values()
    link = File(path="environment/x", content=b"/tmp", mode=stat.S_IFLNK | 0o777)
    for path in ("../../escaped", "/escaped", "a/../../../escaped", "environment/x/escaped", "."):
        files = (link, File(path=path, content=b"/tmp", mode=link.mode))
        write_gold(gold_path(tasks), [msgspec.structs.replace(gold, directory=files)])
        assert main(["export", "harbor", str(tasks), "--out", str(out)]) == 2
        assert f"{path!r} is not a path in a task directory" in capsys.readouterr().err
        assert not out.exists()


def exit_code_task(**changes: Any) -> Task:
    fields: dict[str, Any] = {
        "id": "fleet:acme-1",
        "repo": "acme/sums",
        "base_commit": "c" * 40,
        "image": "acme/sums:1",
        "workdir": "/app",
        "problem": "It is \x7fwrong: “ü”.",
        "env": {"A B": 'x"\n\x7f'},
        "user": "dev",
        "verdict": ExitCode(
            eval_script="pytest tests\n",
            test_patch=b"diff --git a/\xff b/\xff\n",
            protected_paths=("tests/it's.py",),
            files=(File(path="/opt/x", content=b"\0", mode=0o755),),
        ),
    }
    return Task(**fields | changes)


def test_a_task_of_another_source_comes_back_equal_from_its_directory(tmp_path: Path) -> None:
    tasks, again = tmp_path / "tasks.jsonl", tmp_path / "again.jsonl"
    ones = [exit_code_task(), exit_code_task(id="fleet:acme-2", hidden_paths=("/eval.sh", "x y"), user="")]
    write_tasks(tasks, ones)
    write_gold(
        gold_path(tasks), [Gold(id=one.id, patch="diff --git a/a b/a\n", test_patch="x") for one in ones]
    )
    assert main(["export", "harbor", str(tasks), "--out", str(tmp_path / "out")]) == 0
    assert main(["import", "harbor", str(tmp_path / "out"), "--out", str(again)]) == 0
    assert read_tasks(again) == ones
    assert read_gold(gold_path(again)) == read_gold(gold_path(tasks))


def test_an_exported_task_with_a_network_keeps_it_only_by_the_option(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tasks, out = tmp_path / "tasks.jsonl", tmp_path / "in"
    write_tasks(tasks, [exit_code_task(resources=Resources(network=True))])
    write_gold(gold_path(tasks), [Gold(id="fleet:acme-1", patch="x")])
    assert main(["export", "harbor", str(tasks), "--out", str(out)]) == 0
    arguments = ["import", "harbor", str(out), "--out", str(tmp_path / "again.jsonl")]
    assert main(arguments) == 1
    assert (
        "task.resources.network: the task has one: import it with --network task" in capsys.readouterr().err
    )
    assert main([*arguments, "--network", "task"]) == 0
    assert read_tasks(tmp_path / "again.jsonl") == read_tasks(tasks)


def test_a_changed_export_is_imported_as_what_its_files_say(tmp_path: Path) -> None:
    tasks = tmp_path / "tasks.jsonl"
    write_tasks(tasks, [exit_code_task(env={"A": 'x"\n\x7f'})])
    write_gold(gold_path(tasks), [Gold(id="fleet:acme-1", patch="diff --git a/a b/a\n")])
    assert main(["export", "harbor", str(tasks), "--out", str(tmp_path / "out")]) == 0
    (tmp_path / "out/acme-1/instruction.md").write_text("Otherwise.\n")
    (fields,) = harbor.read(tmp_path / "out/acme-1", None)
    task = fields.values["directory"].task
    assert (task.id, task.problem, task.user) == ("harbor:acme-1", "Otherwise.\n", "dev")
    assert (task.env, task.workdir, task.image) == ({"A": 'x"\n\x7f'}, "/app", "acme/sums:1")


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"setup_script": "make\n"}, "setup_script: Harbor has no place for it"),
        ({"setup_patch": b"diff"}, "setup_patch: Harbor has no place for it"),
        ({"base_commit": ""}, "base_commit: Harbor has no place for it: name the commit"),
        (
            {"verdict": RewardFile(eval_script="x")},
            "verdict: .* reward_file .* its directory is not in the gold file",
        ),
    ],
)
def test_what_harbor_has_no_place_for_is_refused_by_its_field(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], changes: dict[str, Any], named: str
) -> None:
    tasks, out = tmp_path / "tasks.jsonl", tmp_path / "out"
    write_tasks(tasks, [exit_code_task(id="fleet:fine"), exit_code_task(**changes)])
    write_gold(gold_path(tasks), [Gold(id="fleet:fine", patch="x"), Gold(id="fleet:acme-1", patch="x")])
    assert main(["export", "harbor", str(tasks), "--out", str(out)]) == 2
    with pytest.raises(ValueError, match=f"fleet:acme-1: {named}"):
        raise ValueError(capsys.readouterr().err)
    assert not out.exists()


def test_names_of_directories_lead_nowhere_else(tmp_path: Path) -> None:
    tasks = tmp_path / "tasks.jsonl"
    ids = ["fleet:../../up", "fleet:..", "fleet:a/one", "fleet:b/one", "fleet:x y"]
    write_tasks(tasks, [exit_code_task(id=one) for one in ids])
    write_gold(gold_path(tasks), [Gold(id=one, patch="x") for one in ids])
    assert main(["export", "harbor", str(tasks), "--out", str(tmp_path / "out")]) == 0
    assert sorted(os.listdir(tmp_path / "out")) == ["b__one", "one", "task", "up", "x_y"]
    assert sorted(os.listdir(tmp_path)) == ["out", "tasks.gold.jsonl", "tasks.jsonl"]


def test_the_rows_of_an_export_are_imported_without_docker(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tasks, rows, again = (tmp_path / name for name in ("tasks.jsonl", "rows.jsonl", "again.jsonl"))
    imported(tmp_path / "in/sums", tasks)
    assert main(["export", "instances-jsonl", str(tasks), "--out", str(rows)]) == 0
    assert main(["import", "harbor", str(rows), "--out", str(again)]) == 0
    assert (read_tasks(again), read_gold(gold_path(again))) == (
        read_tasks(tasks),
        read_gold(gold_path(tasks)),
    )
