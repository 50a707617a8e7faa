"""Makes the base images on this machine from Debian packages, without a container registry.

    python -m infra.images.build [task-base] [python-base] [redis] [--force]

Tasks that name no image run in `swerve/task-base:1`: Python, git, patch and pytest. `swerve/python-base:1` is the base of our
own service images, `swerve/redis:1` is Redis. Each has a label with the digest of its recipe: an image whose digest matches
is kept, which takes milliseconds; one made from an older recipe is replaced. `mmdebstrap` uses the package sources and keys
of this machine's apt.
"""

import argparse
import hashlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pipeline.commandline import program

SUITE = "bookworm"
RECIPE_LABEL = "swerve.recipe"
UNWANTED = ("/usr/share/man/*", "/usr/share/doc/*", "/usr/share/locale/*", "/usr/share/info/*")


@dataclass(frozen=True, slots=True)
class BaseImage:
    """One image: the Debian packages to install, and how it starts."""

    tag: str
    packages: tuple[str, ...]
    settings: tuple[str, ...] = ("ENV LANG=C.UTF-8 PYTHONUNBUFFERED=1", 'CMD ["bash"]')

    @property
    def digest(self) -> str:
        recipe = "\n".join((SUITE, *self.packages, *self.settings, *UNWANTED))
        return hashlib.sha256(recipe.encode()).hexdigest()[:16]


IMAGES = {
    "task-base": BaseImage(
        tag="swerve/task-base:1",
        packages=(
            "bash",
            "coreutils",
            "diffutils",
            "git",
            "patch",
            "python3",
            "python3-pytest",
            "python-is-python3",
        ),
    ),
    "python-base": BaseImage(
        tag="swerve/python-base:1",
        packages=("bash", "ca-certificates", "libgomp1", "libstdc++6", "python3", "python3-venv"),
    ),
    "redis": BaseImage(tag="swerve/redis:1", packages=("redis-server",)),
}


class BuildError(Exception):
    """A base image could not be made; the message says by which command and why."""


def ensure_image(image: BaseImage, *, force: bool = False) -> bool:
    """Makes `image` unless it exists. Returns True if it was made. Raises BuildError."""
    if not force and recipe_of(image.tag) == image.digest:
        return False
    changes = (*image.settings, f"LABEL {RECIPE_LABEL}={image.digest}")
    flags = [flag for change in changes for flag in ("--change", change)]
    # mmdebstrap's errors are read after it has ended. A pipe would fill up before then; a file does not.
    with tempfile.TemporaryFile("w+") as errors:
        bootstrap = subprocess.Popen(
            bootstrap_command(image), stdout=subprocess.PIPE, stderr=errors, stdin=subprocess.DEVNULL
        )
        with bootstrap:
            imported = subprocess.run(
                ["docker", "import", *flags, "-", image.tag],
                stdin=bootstrap.stdout,
                capture_output=True,
                text=True,
            )
        errors.seek(0)
        error = errors.read().strip()
    if bootstrap.returncode:
        raise BuildError(f"mmdebstrap failed for {image.tag}: {error[-2000:]}")
    if imported.returncode:
        raise BuildError(f"docker import failed for {image.tag}: {imported.stderr.strip()}")
    return True


def recipe_of(tag: str) -> str | None:
    """The recipe digest of the image that has this tag, or None if there is no such image."""
    template = f'{{{{ index .Config.Labels "{RECIPE_LABEL}" }}}}'
    inspected = subprocess.run(
        ["docker", "image", "inspect", "--format", template, tag], capture_output=True, text=True
    )
    return inspected.stdout.strip() if inspected.returncode == 0 else None


def bootstrap_command(image: BaseImage) -> list[str]:
    """The command that writes the image's file system to standard output as a tar archive."""
    command = ["mmdebstrap", "--quiet", "--variant=essential", f"--include={','.join(image.packages)}"]
    command += ['--aptopt=APT::Install-Recommends "false"']
    command += [f"--dpkgopt=path-exclude={pattern}" for pattern in UNWANTED]
    return [*command, SUITE, "-", *apt_sources()]


def apt_sources() -> list[str]:
    """This machine's own package sources for SUITE, so that its mirror and keys are used."""
    candidates = [
        Path("/etc/apt/sources.list"),
        *sorted(Path("/etc/apt/sources.list.d").glob("debian*.sources")),
    ]
    return [str(path) for path in candidates if path.is_file() and SUITE in path.read_text()]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog=program("infra.images.build"), description="Make the base images.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(IMAGES)}; default: all")
    parser.add_argument("--force", action="store_true", help="make them again even if they are there")
    arguments = parser.parse_args(argv)
    unknown = set(arguments.names) - set(IMAGES)
    if unknown:
        parser.error(f"no image is called {', '.join(sorted(unknown))}; there are {', '.join(IMAGES)}")
    for name in arguments.names or IMAGES:
        image, began_at = IMAGES[name], time.monotonic()
        try:
            made = ensure_image(image, force=arguments.force)
        except (BuildError, FileNotFoundError) as error:
            print(f"{image.tag}: {error}", file=sys.stderr)
            return 1
        print(f"{image.tag} {'made' if made else 'is there'} ({time.monotonic() - began_at:.1f} s)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
