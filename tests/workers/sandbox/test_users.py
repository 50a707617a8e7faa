"""Commands of agents and tests run as the image's user, and nothing gives them root."""

import docker
import pytest

from pipeline.errors import SandboxError, TaskBroken
from pipeline.task import Calibration, ExitCode, File, Task, pack
from pipeline.trajectory import Reward
from tests.workers.attacks.patches import HONEST, link, new
from tests.workers.claims import make_claim, make_task
from tests.workers.conftest import RepoImage
from tests.workers.leaks.giveaways import built
from workers.grading.grade import Grader
from workers.sandbox.docker import DockerSandbox, DockerSandboxes
from workers.sandbox.users import look_up, normal

pytestmark = pytest.mark.docker

ENOUGH_S = 240.0
PASSWD = "root:x:0:0:root:/root:/bin/bash\n# dev:\ndev:x:1000:1000::/home/dev:/bin/bash\nbad:x:one:2::/:\n1234:x:5:6::/five:\nbare:x:7:8:::"
GROUP = "root:x:0:\nstaff:x:50:dev,other\ndev:x:1000:dev\nwheel:x:10:other\ngames:x:60:dev\nbroken\n"
FILES = f"{PASSWD}\0{GROUP}\0".encode()
FOUND = {
    "dev": (1000, 1000, (50, 60), "/home/dev"),
    "1000": (1000, 1000, (50, 60), "/home/dev"),
    "dev:staff": (1000, 50, (), "/home/dev"),
    "dev:77": (1000, 77, (), "/home/dev"),
    "4321": (4321, 0, (), "/"),
    "4321:wheel": (4321, 10, (), "/"),
    "bare": (7, 8, (), "/"),
    "1234": (5, 6, (), "/five"),  # a name goes before an id
}


@pytest.mark.parametrize("name", FOUND)
def test_a_user_is_looked_up_as_docker_does(name: str) -> None:
    user = look_up(name, FILES)
    assert (user.id, user.group, user.groups, user.home) == FOUND[name]


@pytest.mark.parametrize(
    ("name", "missing"),
    [
        ("nobody", "user 'nobody'"),
        ("dev:none", "group 'none'"),
        ("-1", "user '-1'"),
        ("4294967295", "user '42"),
    ],
)
def test_who_is_not_in_the_image_is_named(name: str, missing: str) -> None:
    with pytest.raises(ValueError, match=rf"^{missing}.* is not in the image's /etc/(passwd|group)$"):
        look_up(name, FILES)


@pytest.mark.parametrize("name", ["", "0", "root", "0:0", "root:root", " root "])
def test_root_has_many_names(name: str) -> None:
    assert normal(name) == "0:0"


DEV = "RUN echo dev:x:1000:1000::/home/dev:/bin/bash >>/etc/passwd && echo dev:x:1000: >>/etc/group && "
DEV += "echo more:x:50:dev >>/etc/group && mkdir -p /home/dev && chown dev:dev /home/dev"
OWNED = f"{DEV} && chown -R dev:dev /workspace\nUSER dev"
WHO = "echo $(id -u) $(id -g) $(id -G) $HOME; grep -E '^(Uid|Gid|Cap...)' /proc/self/status; touch /workspace/calc.py ~/made; exit 3"
NO_CAPABILITIES = "".join(f"Cap{kind}:\t{0:016}\n" for kind in ("Inh", "Prm", "Eff"))
UNPRIVILEGED = "".join(f"{kind}:\t1000\t1000\t1000\t1000\n" for kind in ("Uid", "Gid")) + NO_CAPABILITIES


async def said(sandbox: DockerSandbox, command: str, *, as_root: bool = False) -> str:
    result = await sandbox.run(command, timeout_s=ENOUGH_S, as_root=as_root)
    return result.output.decode()


async def test_commands_and_the_last_script_are_the_users_and_ours_are_roots(
    sandboxes: DockerSandboxes, docker_client: docker.DockerClient, repo_image: RepoImage
) -> None:
    with built(docker_client, repo_image.tag, {}, OWNED) as image:
        async with sandboxes.open(make_claim(make_task(image)), role="agent") as sandbox:
            seen = await said(sandbox, WHO)
            long = await said(sandbox, f"id -u; : {'x' * 200_000}")
            streams = await said(sandbox, "echo out >/dev/stdout; echo error >/proc/self/fd/2")
            root = [await said(sandbox, "id -u", as_root=True)]
            root.append((await sandbox.run("id -u", timeout_s=ENOUGH_S, plain=True)).output.decode())
            await sandbox.put([File(path="/last.sh", content=WHO.encode())])
            last = await sandbox.finish("/last.sh", timeout_s=ENOUGH_S, keep_bytes=4096)
    assert seen.startswith(f"1000 1000 1000 50 /home/dev\n{UNPRIVILEGED}")
    assert "denied" not in seen
    assert last.output.decode() == seen
    assert last.exit_code == 3
    assert long == "1000\n"
    assert streams == "out\nerror\n"
    assert root == ["0\n", "0\n"]


# Each prints what it got, or the error.
DOORS = {
    "another id": "import os; os.setresuid(0, 0, 0)",
    "another group": "import os; os.setgroups([0])",
    "a program of root's": "import subprocess as s; print(s.run(['/tmp/id', '-u'], capture_output=True).stdout)",
    "the memory of process 1": "open('/proc/1/mem', 'rb')",
    "the streams of process 1": "open('/proc/1/fd/1', 'wb')",
    "a signal to process 1": "import os; os.kill(1, 10)",
    "our git": "open('/swerve-git/.gitconfig', 'w')",
    "a root file by a new owner": "import os; os.chown('/etc/passwd', 1000, 1000)",
}


async def test_nothing_gives_root_back(
    sandboxes: DockerSandboxes, docker_client: docker.DockerClient, repo_image: RepoImage
) -> None:
    said_by: dict[str, str] = {}
    with built(
        docker_client, repo_image.tag, {}, f"{DEV} && cp /usr/bin/id /tmp/id && chmod 4755 /tmp/id\nUSER 1000"
    ) as image:
        async with sandboxes.open(make_claim(make_task(image)), role="agent") as sandbox:
            for name, code in DOORS.items():
                await sandbox.put([File(path="/door.py", content=code.encode())])
                said_by[name] = (await said(sandbox, "python3 /door.py 2>&1")).splitlines()[-1]
    assert said_by.pop("a program of root's") == "b'1000\\n'"
    assert [name for name, line in said_by.items() if not line.startswith("PermissionError")] == []


async def test_a_task_may_name_its_user_and_root_is_one(
    sandboxes: DockerSandboxes, docker_client: docker.DockerClient, repo_image: RepoImage
) -> None:
    seen: list[str] = []
    with built(docker_client, repo_image.tag, {}, f"{OWNED}\nENV HOME=/srv") as image:
        for user in ("", "0", "4321:50", "dev:more"):
            async with sandboxes.open(make_claim(make_task(image, user=user)), role="grade") as sandbox:
                seen.append(await said(sandbox, "echo $(id -u):$(id -g) $(id -G) $HOME"))
    assert seen == [
        "1000:1000 1000 50 /srv\n",
        "0:0 0 /srv\n",
        "4321:50 50 /srv\n",
        "1000:50 50 /srv\n",
    ]


async def test_a_user_that_the_image_lacks_is_refused_by_name(
    sandboxes: DockerSandboxes, repo_image: RepoImage
) -> None:
    for role in ("agent", "grade"):
        with pytest.raises(
            TaskBroken, match=r"^user: user 'ghost' is not in the image's /etc/passwd: add it to "
        ):
            async with sandboxes.open(make_claim(make_task(repo_image.tag, user="ghost")), role=role):
                pass


@pytest.mark.parametrize("init", [b""], ids=["bash"])
async def test_the_images_bash_as_first_process_refuses_a_user_by_name(
    sandboxes: DockerSandboxes, repo_image: RepoImage
) -> None:
    with pytest.raises(SandboxError, match=r"^user: commands .* user 1000.*`make setup` has not compiled it"):
        async with sandboxes.open(make_claim(make_task(repo_image.tag, user="1000")), role="grade"):
            pass


async def test_an_image_in_which_our_first_process_cannot_run_refuses_a_user_by_name(
    sandboxes: DockerSandboxes, docker_client: docker.DockerClient, repo_image: RepoImage
) -> None:
    with built(docker_client, repo_image.tag, {}, f"{DEV} && rm /usr/bin/head\nUSER dev") as image:
        with pytest.raises(
            TaskBroken, match=r"^user: .*the image has no head or no chmod.*set the task's user to root"
        ):
            async with sandboxes.open(make_claim(make_task(image)), role="grade"):
                pass
        async with sandboxes.open(make_claim(make_task(image, user="root")), role="grade") as sandbox:
            assert await said(sandbox, "id -u") == "0\n"


PATCH = HONEST + new("deep/er/new.py", "new = 1\n") + link("away", "/etc")
# As the user: changes what the patch and the grader wrote, writes beside it, and uses git.
WRITES = """set -e
grep -q 'a + b' calc.py
for file in calc.py deep/er/new.py tests/test_calc.py tests/hidden.py hidden/new.py; do echo '# more' >>$file; touch ${file%/*}.beside; done
for folder in . deep deep/er tests hidden ~/.local/share; do mkdir -p $folder; touch $folder/beside; done
git add -A
git commit -qm made
git checkout -q HEAD~ -- tests
[ "$(stat -c %u /etc/passwd /etc | sort -u)" = 0 ]
[ -z "$(find calc.py deep tests/hidden.py hidden -user 0)" ]
"""
HIDDEN = (
    File(path="tests/hidden.py", content=b"x = 1\n"),
    File(path="hidden/new.py", content=b"y = 1\n" * 20_000),  # goes as an archive
)
OWNERS = {
    "all of it": OWNED,
    "its files and not its root": f"{OWNED}\nUSER root\nRUN chown root:root /workspace && chmod 1777 /workspace\nUSER dev",
    "that everybody may write": "RUN chmod -R 777 /workspace && mkdir -p /four && chmod 1777 /four\nENV HOME=/four\nUSER 4321:0",
    "of a group that may write": "RUN chmod -R g=u /workspace && mkdir -m 770 /four\nENV HOME=/four\nUSER 4321",
    "by number and nowhere listed": "RUN chown -R 4321:4321 /workspace && mkdir /four && chown 4321 /four\n"
    "ENV HOME=/four\nUSER 4321:4321",
}


def writing(image: str, **changes: object) -> Task:
    verdict = ExitCode(eval_script=WRITES, protected_paths=("tests/test_calc.py",), files=HIDDEN)
    return make_task(image, verdict=verdict, **changes)


@pytest.mark.parametrize("name", OWNERS)
async def test_tests_may_write_where_the_patch_and_the_grader_wrote(
    name: str, sandboxes: DockerSandboxes, docker_client: docker.DockerClient, repo_image: RepoImage
) -> None:
    with built(docker_client, repo_image.tag, {}, OWNERS[name]) as image:
        reward = await Grader(sandboxes).grade(make_claim(writing(image)), PATCH)
    assert reward.resolved, reward.log_tail
    assert reward.applied_by == "git apply"


async def test_a_setup_is_the_users_and_so_is_what_it_leaves(
    sandboxes: DockerSandboxes, docker_client: docker.DockerClient, repo_image: RepoImage
) -> None:
    setup = "set -e; id -u >who.txt; echo mine >~/mine; git config --global user.name Dev"
    patch = b"--- /dev/null\n+++ b/deep/patched.txt\n@@ -0,0 +1 @@\n+patched\n"
    use = """set -e; [ $(cat who.txt ~/mine | tr '\\n' -) = 1000-mine- ]; echo x >>deep/patched.txt; touch deep/beside
git config --global user.email dev@example.invalid; git commit -qam done; git log -2 --format=%an; git fsck --strict
[ -z "$(find . ~ -user 0)" ] && echo fine"""
    with built(docker_client, repo_image.tag, {}, OWNED) as image:
        task = make_task(image, setup_script=setup, setup_patch=patch, hidden_paths=("long.txt",))
        for role in ("agent", "grade"):
            async with sandboxes.open(make_claim(task), role=role) as sandbox:
                assert (await said(sandbox, use)).splitlines()[-1] == "fine"


async def test_a_tree_of_roots_stays_roots_and_its_user_may_read_it_with_git(
    sandboxes: DockerSandboxes, docker_client: docker.DockerClient, repo_image: RepoImage
) -> None:
    script = "set -e\ngit status --short | grep calc.py\n[ $(stat -c %u calc.py) = 0 ]\nif touch calc.py || touch beside; then exit 1; fi\n"
    with built(docker_client, repo_image.tag, {}, f"{DEV}\nUSER dev") as image:
        task = make_task(image, verdict=ExitCode(eval_script=script))
        reward = await Grader(sandboxes).grade(make_claim(task), PATCH)
        async with sandboxes.open(make_claim(task), role="agent") as sandbox:
            assert await said(sandbox, "git status --short") == ""
    assert reward.resolved, reward.log_tail


async def graded_as(sandboxes: DockerSandboxes, task: Task, made_as: str) -> Reward:
    calibration = pack(Calibration(passing=("a",), user=made_as))
    return await Grader(sandboxes).grade(
        make_claim(make_task(task.image, verdict=task.verdict, calibration=calibration)), PATCH
    )


async def test_a_calibration_that_was_made_as_another_user_does_not_hold(
    sandboxes: DockerSandboxes, docker_client: docker.DockerClient, repo_image: RepoImage
) -> None:
    with built(docker_client, repo_image.tag, {}, OWNED) as image:
        with pytest.raises(
            TaskBroken,
            match=r"^calibration: made .* as user 0:0, .* as 1000:1000: run workers.verify on the task again$",
        ):
            await graded_as(sandboxes, writing(image), "0:0")
        reward = await graded_as(sandboxes, writing(image), "1000:1000")
    assert "a did not pass, as with the known fix" in reward.decided_by
    with pytest.raises(TaskBroken, match=r"^calibration: made .* as user 1000:1000, .* as 0:0: "):
        await graded_as(sandboxes, writing(repo_image.tag), "1000:1000")
