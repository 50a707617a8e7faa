"""Reads a patch, and the settings files that it changes. The grader calls these functions in a process of their own
(`workers/isolation`), because a patch may be made so that reading it takes very long.
"""

import base64
import binascii
import posixpath

import msgspec

from pipeline.errors import GraderError
from workers.grading.governing import GoverningFiles, hides_names, same_runner_settings
from workers.grading.survey import Surveyed


class PatchHeaders(msgspec.Struct, frozen=True):
    """What the headers of a patch say of its files. Either may be true too often, never too rarely."""

    touches_runner: bool  # it touches files that govern the test runner
    hides_names: bool  # it writes plain letters as numbers


def headers(patch: bytes, script: str, paths: tuple[str, ...]) -> PatchHeaders:
    """The headers of `patch`, for the eval script `script`, which runs or names the files `paths`."""
    governing = GoverningFiles(script, Surveyed(paths=paths))
    return PatchHeaders(governing.touched_by(patch), hides_names(patch))


def tampered_settings(listing: bytes, script: str) -> list[bytes]:
    """Paths in the output of `scripts.changed_settings` whose old and new contents tell the runner of `script` different things."""
    tampered: list[bytes] = []
    for line in listing.splitlines():
        try:
            path, old, new = (None if word == b"-" else base64.b64decode(word) for word in line.split(b" "))
        except (ValueError, binascii.Error) as error:
            raise GraderError(f"unreadable list of settings files: {line[:200]!r}") from error
        assert path is not None
        name = posixpath.basename(path.decode("utf-8", "replace"))
        if not same_runner_settings(name, old, new, script):
            tampered.append(path)
    return tampered
