"""The user as whom commands of an agent, and tests, run in a container: the image's USER, or the one that the task names.

`Task.user` and an image's USER have the form of Docker's option --user: a name or an id, and after a colon optionally a group's name or
id. They are looked up in the container's own /etc/passwd and /etc/group by Docker's rules: an id needs no entry in these files; without one
its group is 0 and its home "/"; and a user gets the further groups that list its name unless the group is given.
https://docs.docker.com/reference/dockerfile/#user
"""

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

ROOT = "0:0"
"""The user of an image without USER."""

READ_FILES = """printf '%s\\0' "$(</etc/passwd)" "$(</etc/group)" 2>/dev/null"""
"""The command that prints what `look_up` reads."""

MAX_ID = 2**31 - 1  # Docker refuses larger ones
_ROOTS = ("", "0", "root", "0:0", "root:root", "root:0", "0:root")


@dataclass(frozen=True, slots=True)
class ContainerUser:
    """A user of a container, by its ids there."""

    id: int
    group: int
    groups: tuple[int, ...]  # further groups
    home: str

    @property
    def ids(self) -> str:
        """The ids of user and group, as in chown."""
        return f"{self.id}:{self.group}"

    def request(self, *, with_home: bool) -> bytes:
        """The body of init.c's request 'u'. Without home the variable HOME stays as it is."""
        numbers = (self.id, self.group, len(self.groups), *self.groups)
        return struct.pack(f"<{len(numbers)}I", *numbers) + (self.home.encode() if with_home else b"")


def normal(user: str) -> str:
    """`user`, or ROOT for everything that means root with its own group."""
    return ROOT if user.strip() in _ROOTS else user.strip()


def look_up(user: str, printed: bytes) -> ContainerUser:
    """The ids of `user`, given the output of READ_FILES. Raises ValueError if there is no such user or group."""
    passwd, groups = (
        [line.split(":") for line in text.decode("utf-8", "replace").splitlines()]
        for text in printed.split(b"\0")[:2]
    )
    name, _, group_name = user.partition(":")
    entry = _entry(passwd, name, num_ids=2)
    if entry is None:
        number, group, home = _id(name, f"user {name!r} is not in the image's /etc/passwd"), 0, "/"
    else:
        number, group = int(entry[2]), int(entry[3])
        home = (entry[5] if len(entry) > 5 else "") or "/"
    if group_name:
        named = _entry(groups, group_name, num_ids=1)
        wrong = f"group {group_name!r} is not in the image's /etc/group"
        return ContainerUser(number, int(named[2]) if named else _id(group_name, wrong), (), home)
    of_user = tuple(_groups_of(entry[0], groups)) if entry else ()
    return ContainerUser(number, group, tuple(one for one in of_user if one != group), home)


def _entry(lines: Iterable[Sequence[str]], name: str, *, num_ids: int) -> Sequence[str] | None:
    """The first entry with this name or id."""
    for line in lines:
        ids = line[2 : 2 + num_ids]
        if len(ids) == num_ids and all(map(_is_id, ids)) and name in (line[0], line[2]):
            return line
    return None


def _groups_of(name: str, groups: Iterable[Sequence[str]]) -> Iterable[int]:
    for line in groups:
        if len(line) > 3 and _is_id(line[2]) and name in line[3].split(","):
            yield int(line[2])


def _id(text: str, wrong: str) -> int:
    if not _is_id(text):
        raise ValueError(wrong)
    return int(text)


def _is_id(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) <= len(str(MAX_ID)) and int(text) <= MAX_ID
