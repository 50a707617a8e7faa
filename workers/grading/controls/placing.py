"""Puts contradicted test files where the eval script will run them."""

import base64
import shlex
from collections import defaultdict
from collections.abc import Sequence

from pipeline.calibration import Contradiction
from pipeline.errors import GraderError
from pipeline.task import File
from workers.sandbox.protocol import Sandbox

READ_S = 60.0
READ_KEEP_BYTES = 16 * 1024 * 1024


class NotAsCalibrated(GraderError):
    """A test file does not have the text that verification saw."""


async def place(sandbox: Sandbox, script: str, contradictions: Sequence[Contradiction]) -> str:
    """Writes the contradicted files and returns the eval script to run. Raises NotAsCalibrated."""
    by_path: dict[str, list[Contradiction]] = defaultdict(list)
    for contradiction in contradictions:
        by_path[contradiction.path].append(contradiction)
    files: list[File] = []
    for path, wanted in by_path.items():
        result = await sandbox.run(
            f"base64 -w 0 {shlex.quote(path)}", timeout_s=READ_S, keep_bytes=READ_KEEP_BYTES, plain=True
        )
        files.append(File(path=path, content=contradicted(base64.b64decode(result.output), wanted)))
    await sandbox.put(files)
    return script


def contradicted(text: bytes, contradictions: Sequence[Contradiction]) -> bytes:
    """`text` with these contradictions, which do not overlap. Raises NotAsCalibrated."""
    for one in sorted(contradictions, key=lambda each: each.offset_bytes, reverse=True):
        end = one.offset_bytes + len(one.was.encode())
        if text[one.offset_bytes : end] != one.was.encode():
            raise NotAsCalibrated(
                f"{one.path} is not as it was verified: run workers.verify on the task again"
            )
        text = text[: one.offset_bytes] + one.becomes.encode() + text[end:]
    return text
