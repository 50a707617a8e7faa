"""Prints what stops each cheat in each language, as the tables of docs/languages.md have it.

python -m tests.workers.languages [LANGUAGE ...]
"""

import asyncio
import secrets
import sys
from collections.abc import Sequence
from contextlib import closing

import docker
from msgspec.structs import replace

from tests.workers.attacks.stage import stopped_by
from tests.workers.languages.stage import SCENES, Verified, built_scene
from workers.sandbox.docker import DockerSandboxes
from workers.sandbox.first_process import built_init


async def print_table(names: Sequence[str]) -> None:
    """Prints a row for each cheat: its reward where the task was not verified, and what stops it where it was."""
    sandboxes = DockerSandboxes(fleet=secrets.token_hex(6), init=built_init())
    try:
        with closing(docker.from_env(timeout=600)) as client:
            for name in names:
                with built_scene(client, SCENES[name]) as image:
                    scene = SCENES[name]
                    verified = await Verified.of(scene, scene.task(image), sandboxes)
                    plain = Verified(
                        verified.scene,
                        replace(verified.task, calibration=b""),
                        verified.calibration,
                        sandboxes,
                    )
                    for cheat, files in verified.scene.cheats.items():
                        alone, reward = await plain.grade(files), await verified.grade(files)
                        print(f"| {name} | {cheat} | {alone.value:.0f} | {stopped_by(reward)} |", flush=True)
    finally:
        await sandboxes.close()


if __name__ == "__main__":
    asyncio.run(print_table(sys.argv[1:] or list(SCENES)))
