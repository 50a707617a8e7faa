"""An image of repositories that each give the answer away, in one way of its own."""

import io
import secrets
import tarfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import docker

from workers.docker.host import SOURCE


@dataclass(frozen=True, slots=True)
class Giveaway:
    """What the image's maker did in a repository with one commit, tagged v1, which is the base."""

    script: str
    leak: str  # what is said of it, or a part
    hidden: tuple[str, ...] = ()


# Each is run in /kinds/NAME by the words of PREPARE, with /kinds/NAME.away to leave things in. The answer is in every one of them.
GIVEAWAYS = {
    "clean": Giveaway("", ""),
    "branch": Giveaway("later", "ref (1: refs/heads/later)"),
    "detached": Giveaway("later; git checkout -q --detach v1", "ref ("),
    "tag": Giveaway("later; git tag v2 later; git branch -qD later; forget", "ref (1: refs/tags/v2)"),
    "remote": Giveaway(
        "later; git checkout -q later; move; git clone -q $away .; git reset -q --hard v1; rm -rf $away",
        "remote",
    ),
    "reflog": Giveaway("later; git branch -qD later", "reflog or head (1"),
    "fetched": Giveaway(
        "later; forget; git rev-parse later >.git/FETCH_HEAD; git branch -qD later", "reflog or head (1: "
    ),
    "loose": Giveaway("later; git branch -qD later; forget", "unreachable object (3: "),
    "packed": Giveaway("later; git branch -qD later; forget; git repack -qadk", "unreachable object (3: "),
    "blob": Giveaway("echo the_answer | git hash-object -w --stdin", "unreachable object (1: blob "),
    "stash": Giveaway("echo the_answer >>calc.py; git stash -q", "ref (1: refs/stash)"),
    "note": Giveaway("git notes add -m the_answer", "ref (1: refs/notes/commits)"),
    "worktree": Giveaway("later; git worktree add -q $away later", "worktree (1: /kinds/worktree.away)"),
    "linked": Giveaway("later; git checkout -q later; link", "worktree (1: /kinds/linked.away)"),
    "borrowed": Giveaway(
        "later; move; git clone -qs $away .; git remote rm origin; forget; rm -rf $away/.git/[!o]* $away/*.py",
        "unreachable object (3: ",
    ),
    "shallow": Giveaway(
        "git commit -q --allow-empty -m more; git tag -f v1; later; move;"
        "git clone -q --depth 1 --no-single-branch file://$away .; rm -rf $away",
        "remote (1: remote.origin.url)",
    ),
    "partial": Giveaway(
        "echo x >>calc.py; git commit -qam more; git checkout -q v1 calc.py; git commit -qam again; git tag -f v1;"
        "later; git config uploadpack.allowFilter true; move;"
        "git clone -q --filter=blob:none file://$away .; rm -rf $away",
        "remote (1: remote.origin.url)",
    ),
    "gitfile": Giveaway("later; git init -q --separate-git-dir $away", "ref ("),
    "submodule": Giveaway(
        "(mkdir $away; cd $away; new; later); git -c protocol.file.allow=always submodule --quiet add $away lib;"
        "git commit -qm lib; forget; rm -rf $away",
        "remote (1: remote.origin.url in lib)",
    ),
    "module": Giveaway(
        "(mkdir $away; cd $away; new; later); mkdir .git/modules; mv $away/.git .git/modules/gone; rm -rf $away",
        "unused module (1: ",
    ),
    "rebase": Giveaway(
        "mkdir .git/rebase-apply; echo the_answer >.git/rebase-apply/patch", "in the git directory (1: "
    ),
    "taken-back": Giveaway(
        "answer; git commit -qam fix; git revert --no-edit HEAD; forget", "history (2 commits after the base)"
    ),
    "hidden-in-head": Giveaway(
        "mkdir tests; echo the_answer >tests/hidden.py; git add .; git commit -qm image; forget",
        "history (hidden paths)",
        hidden=("tests/hidden.py",),
    ),
    "hidden-in-base": Giveaway(
        "mkdir tests; echo the_answer >tests/hidden.py; git add .; git commit -qm more; git tag -f v1; forget",
        "history (hidden paths)",
        hidden=("/kinds/hidden-in-base/tests",),
    ),
}
PREPARE = """
set -e
export GIT_AUTHOR_DATE=2025-01-01T00:00:00Z GIT_COMMITTER_DATE=2025-01-01T00:00:00Z
export GIT_AUTHOR_NAME=t GIT_AUTHOR_EMAIL=t@example.invalid
export GIT_COMMITTER_NAME=t GIT_COMMITTER_EMAIL=t@example.invalid
answer() { sed -i 's/a - b/a + b  # the_answer/' calc.py; }
forget() { rm -rf .git/logs .git/*_HEAD; }
later() { git checkout -q -b later; answer; git commit -qam later; git checkout -q main; }
move() { mv "$PWD" "$away"; mkdir "$PWD"; cd "$PWD"; }
link() { mv "$PWD" "$away"; git -C "$away" worktree add -qf "$PWD" v1; cd "$PWD"; }
new() {
  git init -q -b main .; printf 'def add(a, b):\\n    return a - b\\n' >calc.py
  git add .; git commit -qm base; git tag -f v1
}
"""


def making(kinds: dict[str, Giveaway]) -> str:
    """The bash script that makes the repositories, and a file /bases with the name and the base of each."""
    steps = [PREPARE]
    for name, giveaway in kinds.items():
        steps.append(
            f"mkdir -p /kinds/{name}; cd /kinds/{name}; away=$PWD.away; new; {giveaway.script or ':'}"
        )
        steps.append(f"cd /kinds/{name}; echo {name} $(git rev-parse v1) >>/bases")
    return "\n".join(steps)


@contextmanager
def built(
    client: docker.DockerClient, base: str, files: Mapping[str, str | bytes], instructions: str
) -> Iterator[str]:
    """The tag of an image; it goes at the end, and what was made of it."""
    context = io.BytesIO()
    with tarfile.open(fileobj=context, mode="w") as tar:
        for name, text in {"Dockerfile": f"FROM {base}\n{instructions}", **files}.items():
            content = text.encode() if isinstance(text, str) else text
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content))
    context.seek(0)
    tag = f"swerve-test:{secrets.token_hex(6)}"
    # Not of cached layers: they are another test's, which may remove them meanwhile.
    client.images.build(
        fileobj=context, custom_context=True, tag=tag, rm=True, nocache=True, network_mode="none"
    )
    try:
        yield tag
    finally:
        for image in client.images.list(filters={"label": f"{SOURCE}={tag}"}):
            client.images.remove(image.id, force=True)
        client.images.remove(tag, force=True)
