"""Makes the base images on this machine from Debian packages, without a container registry.

    python -m infra.images.build [task-base] [task-go] [python-base] [redis] [--force | --prepare]

Tasks that name no image run in `swerve/task-base:1`: Python, git, patch and pytest. `swerve/task-go:1` has Go, too.
`swerve/python-base:1` is the base of our own service images, `swerve/redis:1` is Redis. Each has a label with the digest of its
recipe: an image whose digest matches is kept, which takes milliseconds; one made from an older recipe is replaced. `mmdebstrap` uses the
package sources and keys of this machine's apt. `--prepare` makes an image's file system only, for which no Docker engine needs to run, and
keeps it under `.run/images` until the image is made of it. It needs nothing but Python's own library, so that set-up can call it early.
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
PREPARED = Path(__file__).parents[2] / ".run" / "images"
UNWANTED = ("/usr/share/man/*", "/usr/share/doc/*", "/usr/share/locale/*", "/usr/share/info/*")


@dataclass(frozen=True, slots=True)
class BaseImage:
    """One image: the Debian packages to install, which of their files to leave out, and how it starts."""

    tag: str
    packages: tuple[str, ...]
    unwanted: tuple[str, ...] = UNWANTED
    settings: tuple[str, ...] = ("ENV LANG=C.UTF-8 PYTHONUNBUFFERED=1", 'CMD ["bash"]')

    @property
    def digest(self) -> str:
        recipe = "\n".join((SUITE, *self.packages, *self.settings, *self.unwanted))
        return hashlib.sha256(recipe.encode()).hexdigest()[:16]

    @property
    def prepared(self) -> Path:
        """Where its file system is kept until the image is made."""
        return PREPARED / f"{self.digest}.tar"

    @property
    def made(self) -> Path:
        """A file that exists if this checkout has seen the image."""
        return PREPARED / f"{self.digest}.made"


_TASK_PACKAGES = (
    "bash",
    "coreutils",
    "diffutils",
    "git",
    "patch",
    "python3",
    "python3-pytest",
    "python-is-python3",
)
IMAGES = {
    "task-base": BaseImage(tag="swerve/task-base:1", packages=_TASK_PACKAGES),
    "task-go": BaseImage(
        tag="swerve/task-go:1",
        packages=(*_TASK_PACKAGES, "golang-go"),
        # Two of these archives unpack to gigabytes, so that no search for answers can read them.
        unwanted=(*UNWANTED, "/usr/share/go-*/src/archive/tar/testdata/*"),
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
    is_there = recipe_of(image.tag) == image.digest
    if force:
        image.prepared.unlink(missing_ok=True)
    if not is_there or force:
        prepare(image)
        _import(image)
    # The file `made` tells the next set-up, even if no Docker engine answers then, that the image need not be prepared.
    PREPARED.mkdir(parents=True, exist_ok=True)
    image.made.touch()
    image.prepared.unlink(missing_ok=True)
    return not is_there or force


def prepare(image: BaseImage) -> bool:
    """Makes the file system of `image` unless it exists. Returns True if it was made. Raises BuildError."""
    if image.prepared.exists():
        return False
    PREPARED.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=PREPARED) as directory:
        archive = Path(directory) / "image.tar"
        bootstrap = subprocess.run(
            bootstrap_command(image, archive), capture_output=True, text=True, stdin=subprocess.DEVNULL
        )
        if bootstrap.returncode:
            raise BuildError(f"mmdebstrap failed for {image.tag}: {bootstrap.stderr.strip()[-2000:]}")
        archive.replace(image.prepared)
    return True


def _import(image: BaseImage) -> None:
    changes = (*image.settings, f"LABEL {RECIPE_LABEL}={image.digest}")
    flags = [flag for change in changes for flag in ("--change", change)]
    imported = subprocess.run(
        ["docker", "import", *flags, str(image.prepared), image.tag], capture_output=True, text=True
    )
    if imported.returncode:
        raise BuildError(f"docker import failed for {image.tag}: {imported.stderr.strip()}")


def recipe_of(tag: str) -> str | None:
    """The recipe digest of the image that has this tag, or None if there is no such image."""
    template = f'{{{{ index .Config.Labels "{RECIPE_LABEL}" }}}}'
    inspected = subprocess.run(
        ["docker", "image", "inspect", "--format", template, tag], capture_output=True, text=True
    )
    return inspected.stdout.strip() if inspected.returncode == 0 else None


def bootstrap_command(image: BaseImage, archive: Path) -> list[str]:
    """The command that writes the image's file system to `archive`, a tar file."""
    command = ["mmdebstrap", "--quiet", "--variant=essential", f"--include={','.join(image.packages)}"]
    command += ['--aptopt=APT::Install-Recommends "false"']
    # Installing Java makes links to manual pages in a directory that must exist.
    command += ['--essential-hook=mkdir -p "$1/usr/share/man/man1"']
    command += [f"--dpkgopt=path-exclude={pattern}" for pattern in image.unwanted]
    return [*command, SUITE, str(archive), *apt_sources()]


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
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--force", action="store_true", help="make them again even if they are there")
    how.add_argument(
        "--prepare", action="store_true", help="make what needs no Docker engine, unless they are there"
    )
    arguments = parser.parse_args(argv)
    unknown = set(arguments.names) - set(IMAGES)
    if unknown:
        parser.error(f"no image is called {', '.join(sorted(unknown))}; there are {', '.join(IMAGES)}")
    for name in arguments.names or IMAGES:
        image, began_at = IMAGES[name], time.monotonic()
        try:
            if arguments.prepare:
                is_known = image.made.exists() or recipe_of(image.tag) == image.digest
                made = not is_known and prepare(image)
            else:
                made = ensure_image(image, force=arguments.force)
        except (BuildError, FileNotFoundError) as error:
            print(f"{image.tag}: {error}", file=sys.stderr)
            return 1
        done = "prepared" if arguments.prepare else "made"
        print(f"{image.tag} {done if made else 'is there'} ({time.monotonic() - began_at:.1f} s)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
