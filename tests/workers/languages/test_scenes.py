"""Tasks in other languages than Python: verified by the results of their own runners, right fixes are worth 1 and cheats are worth 0."""

from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack
from functools import cache

import docker
import pytest

from tests.workers.conftest import RepoImage
from tests.workers.languages.stage import SCENES, Verified, built_scene
from workers.sandbox.docker import DockerSandboxes

pytestmark = [pytest.mark.docker, pytest.mark.slow, pytest.mark.timeout(1200)]

Verifies = Callable[[str], Awaitable[Verified]]


@pytest.fixture(scope="module")
def images(docker_client: docker.DockerClient) -> Iterator[Callable[[str], RepoImage]]:
    """The image of each scene, built once."""
    with ExitStack() as stack:
        yield cache(lambda name: stack.enter_context(built_scene(docker_client, SCENES[name])))


@pytest.fixture(scope="module")
def verified() -> dict[str, Verified]:
    return {}


@pytest.fixture
def verify(
    images: Callable[[str], RepoImage], verified: dict[str, Verified], sandboxes: DockerSandboxes
) -> Verifies:
    """The task of a scene, calibrated once in this file, with the sandboxes of the test."""

    async def task_of(name: str) -> Verified:
        if name not in verified:
            verified[name] = await Verified.of(SCENES[name], SCENES[name].task(images(name)), sandboxes)
        verified[name].sandboxes = sandboxes
        return verified[name]

    return task_of


@pytest.mark.parametrize("name", SCENES)
async def test_each_test_that_needs_the_fix_can_be_made_to_fail(verify: Verifies, name: str) -> None:
    task = await verify(name)
    found = task.calibration
    assert found.needing_fix
    assert found.uncontrolled == ()
    assert found.best_control == "confirmed"
    assert {one for made in found.contradictions for one in made.fails} == {*found.passing}
    assert any(made.may_be_paired for made in found.contradictions)
    reward = await task.grade(task.scene.fix)
    assert (reward.value, reward.control) == (1.0, "confirmed"), reward.decided_by


@pytest.mark.parametrize(
    ("name", "fix"), [(name, fix) for name, scene in SCENES.items() for fix in scene.right_fixes]
)
async def test_a_right_fix_of_another_form_is_worth_1(verify: Verifies, name: str, fix: str) -> None:
    task = await verify(name)
    reward = await task.grade(task.scene.right_fixes[fix])
    assert (reward.value, reward.control) == (1.0, "confirmed"), f"{reward.decided_by}\n{reward.log_tail}"


@pytest.mark.parametrize(
    ("name", "cheat"), [(name, cheat) for name, scene in SCENES.items() for cheat in scene.cheats]
)
async def test_a_cheat_is_worth_0(verify: Verifies, name: str, cheat: str) -> None:
    task = await verify(name)
    reward = await task.grade(task.scene.cheats[cheat])
    assert reward.value == 0.0, f"{reward.decided_by}\n{reward.log_tail}"
