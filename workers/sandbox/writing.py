"""Commands that write files. A process for each file would cost more than its content, so bash writes the files itself if it can."""

import base64
import posixpath
import shlex
from collections.abc import Sequence

from pipeline.task import File

LONGEST_COMMAND_BYTES = 120 * 1024  # length of a plain command, which leaves room for the words that start it


def writing(files: Sequence[File], workdir: str) -> str:
    """The command that writes `files`, at least one, and creates their directories."""
    paths = [posixpath.join(workdir, file.path) for file in files]
    steps = [f"mkdir -p {shlex.join(dict.fromkeys(posixpath.dirname(path) for path in paths))}"]
    steps += [
        f"{printing(file.content)} >{shlex.quote(path)}" for file, path in zip(files, paths, strict=True)
    ]
    for mode in {file.mode for file in files}:
        of_mode = [path for file, path in zip(files, paths, strict=True) if file.mode == mode]
        steps.append(f"chmod {mode:o} {shlex.join(of_mode)}")
    return " && ".join(steps)


def printing(content: bytes) -> str:
    """The command that prints `content`. Outside ASCII, bash's reading of its command depends on the container's locale."""
    encoded = f"base64 -d <<<'{base64.b64encode(content).decode()}'"
    *lines, last = content.decode("ascii", "replace").split("\0")
    if not content.isascii() or (lines and last):
        return encoded
    plain = f"printf '%s\\0' {shlex.join(lines)}" if lines else f"printf %s {shlex.quote(last)}"
    return plain if len(plain) <= len(encoded) else encoded


def fits(command: str) -> bool:
    """Whether `command` is short enough to be a plain one."""
    return len(command.encode(errors="replace")) <= LONGEST_COMMAND_BYTES
