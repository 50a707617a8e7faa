"""Reward files, which the tests of a Harbor task leave: /logs/verifier/reward.json, otherwise /logs/verifier/reward.txt.

The container's last script is a short one that runs the task's own and then reports both files over the side channel. Code under test can
write these files, and could write to the channel; so what the witness and a control say counts as for an exit status.
"""

import base64
import binascii
import json
import math
import shlex
from typing import Any, cast

from pipeline.errors import GraderError
from pipeline.task import File, RewardFile
from workers.grading import steps
from workers.grading.steps import failed_step
from workers.sandbox.protocol import Sandbox

DIRECTORY = "/logs/verifier"
MOST_BYTES = 64 * 1024  # size of a reward file
SHOWN_CHARS = 100
_REWARD = "reward"  # the name of the number in reward.txt

# The first file that exists counts, even if it holds no reward. A line is "reward-file NAME CONTENT" in base64, "-" if it is no plain file.
_REPORT = f"""
for channel in /dev/swerve-notes /proc/1/fd/9; do [ -w "$channel" ] && break; done
for name in reward.json reward.txt; do
  file={DIRECTORY}/$name said=-
  [ -e "$file" ] || [ -L "$file" ] || continue
  [ -f "$file" ] && [ ! -L "$file" ] && said=$(head -c {MOST_BYTES + 1} "$file" | base64 -w 0)
  printf '\\nreward-file %s %s\\n' "$name" "$said" >"$channel"
  exit 0
done
printf '\\nreward-file none -\\n' >"$channel"
exit 0
"""


async def prepared(sandbox: Sandbox, verdict: RewardFile, script: bytes) -> bytes:
    """Puts the task's script in its place, makes an empty directory for the reward files, and returns the script that runs the task's and
    reports the files.
    """
    command = f"rm -rf {DIRECTORY} && mkdir -p {DIRECTORY} && chmod 777 {DIRECTORY}"
    result = await sandbox.run(command, timeout_s=steps.STEP_S, plain=True)
    if result.exit_code != 0:
        raise failed_step(f"making {DIRECTORY}", result)
    await sandbox.put([File(path=verdict.script_path, content=script, mode=0o755)])
    exports = "".join(f"export {name}={shlex.quote(value)}\n" for name, value in verdict.env.items())
    return f"#!/bin/bash\n{exports}{shlex.quote(verdict.script_path)}\n{_REPORT}".encode(
        "utf-8", "surrogateescape"
    )


def reported(notes: bytes) -> bytes | None:
    """The name of the reward file and its content, with a newline between them, as the side channel's last report has them; None if there
    is no file.
    """
    lines = [line.split(b" ") for line in notes.split(b"\n") if line.startswith(b"reward-file ")]
    match lines[-1:]:
        case [[_, (b"reward.json" | b"reward.txt") as name, b"-"]]:
            return name
        case [[_, (b"reward.json" | b"reward.txt") as name, encoded]]:
            try:
                return name + b"\n" + base64.b64decode(encoded, validate=True)
            except binascii.Error:
                return name
        case _:
            return None


def read(found: bytes | None, wanted: str) -> tuple[float, str]:
    """The reward in a file as `reported` returns it, and a description of its origin. `wanted` is as in `RewardFile.reward`.

    Raises GraderError if there is none.
    """
    if found is None:
        raise GraderError(f"the tests left neither {DIRECTORY}/reward.json nor {DIRECTORY}/reward.txt")
    name, newline, content = found.partition(b"\n")
    file = name.decode()
    if not newline:
        raise GraderError(f"{file}: is not a plain file that can be read")
    if len(content) > MOST_BYTES:
        raise GraderError(f"{file}: is larger than {MOST_BYTES >> 10} KiB")
    text = content.decode("utf-8", "replace")
    numbers = _numbers(file, text)
    chosen = wanted or (next(iter(numbers)) if len(numbers) == 1 else _REWARD)
    if chosen not in numbers:
        has = ", ".join(numbers)[:SHOWN_CHARS] or "nothing"
        raise GraderError(f"{file}: {chosen}: absent, it has {has}: import the task with --reward NAME")
    value = numbers[chosen]
    if not 0 <= value <= 1:
        raise GraderError(f"{file}: {chosen}: {str(value)[:SHOWN_CHARS]} is not between 0 and 1")
    return float(value), f"{chosen} {value:g} in {file}"


def _numbers(file: str, text: str) -> dict[str, float]:
    """The numbers in a reward file by name. Raises GraderError."""
    try:
        said: Any = json.loads(text) if file == "reward.json" else {_REWARD: float(text)}
    except (ValueError, RecursionError) as error:
        raise GraderError(
            f"{file}: {text[:SHOWN_CHARS]!r} cannot be read: {error}"[: 3 * SHOWN_CHARS]
        ) from error
    if not isinstance(said, dict):
        raise GraderError(f"{file}: must be an object of numbers, is {text[:SHOWN_CHARS]!r}")
    numbers = cast("dict[str, Any]", said)
    for name, value in numbers.items():
        if not isinstance(value, int | float) or not abs(value) < math.inf:
            raise GraderError(
                f"{file}: {name[:SHOWN_CHARS]}: {str(value)[:SHOWN_CHARS]} is not a finite number"
            )
    return numbers
