"""Base images without a registry."""

from pathlib import Path

import docker
import pytest

from infra.images.build import IMAGES, bootstrap_command, ensure_image, main


def test_the_task_image_has_what_an_episode_needs(
    docker_client: docker.DockerClient, task_image: str
) -> None:
    command = [
        "bash",
        "-c",
        "python --version && python -m pytest --version && git --version && patch --version",
    ]
    output = docker_client.containers.run(task_image, command, network_mode="none", remove=True).decode()
    assert "Python 3.11" in output
    assert "pytest 7" in output
    assert "git version" in output


def test_an_image_that_is_there_is_not_made_again(task_image: str) -> None:
    assert ensure_image(IMAGES["task-base"]) is False


def test_another_list_of_packages_is_another_recipe() -> None:
    assert len({image.digest for image in IMAGES.values()}) == len(IMAGES)


def test_packages_are_taken_from_where_this_machine_takes_them() -> None:
    command = bootstrap_command(IMAGES["redis"], Path("redis.tar"))
    assert "--include=redis-server" in command
    assert not any("://" in word for word in command)


def test_an_unknown_image_is_misuse(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["task-bass"])
    assert "no image is called task-bass" in capsys.readouterr().err
