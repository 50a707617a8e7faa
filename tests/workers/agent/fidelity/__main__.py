"""`python -m tests.workers.agent.fidelity [FILE...]`: do we send what mini-swe-agent sends, byte for byte?

Plays the same replies through the real mini-swe-agent 1.12.0, 1.17.5 and 2.4.6 and through our loop in exact mode, and prints each
difference. Without FILE, for all agent files that these releases ship. Exit status: 0 there is no difference, 1 there is one.
"""

import argparse
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pipeline.agent.files import merged
from pipeline.errors import RequestError
from tests.workers.agent.fidelity.compare import CALC, AgentFile, differences, refused_by_us_alone, scenes_of
from tests.workers.agent.fidelity.packages import RELEASES, shipped_files


@contextmanager
def repository() -> Iterator[Path]:
    """A directory with a small repository."""
    path = Path(tempfile.mkdtemp(prefix="fidelity-"))
    try:
        (path / "calc.py").write_text(CALC)
        setup = "git init -q . && git add -A && git -c user.name=t -c user.email=t@t commit -qm start"
        subprocess.run(["bash", "-c", setup], cwd=path, check=True)
        yield path
    finally:
        shutil.rmtree(path)


def agents_of(version: str) -> list[AgentFile]:
    """The files that the release ships. One without prompts is for being merged into that of the benchmark."""
    files = shipped_files(version)
    base = next(path for path in files if path.name == "swebench.yaml")
    return [
        AgentFile(version, (str(path),) if "agent" in merged([str(path)]) else (str(base), str(path)))
        for path in files
    ]


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.workers.agent.fidelity",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("files", nargs="*", type=Path, metavar="FILE", help="agent files")
    parser.add_argument("--upstream", choices=RELEASES, default="2.4", help="the version that FILE is for")
    options = parser.parse_args()
    agents = [AgentFile(options.upstream, (str(path),)) for path in options.files]
    agents = agents or [agent for version in RELEASES for agent in agents_of(version)]
    num_different = sum(_shown(agent) for agent in agents)
    print(f"{num_different} differences in {len(agents)} agents" if num_different else "no difference")
    return 1 if num_different else 0


def _shown(agent: AgentFile) -> int:
    """Prints what differs for one agent; returns how many scenes do."""
    name = f"{RELEASES[agent.version]} {' + '.join(Path(one).name for one in agent.specs)}"
    with repository() as path:
        try:
            chosen = scenes_of(agent, path)
        except RequestError as error:
            alone = refused_by_us_alone(agent, path)
            print(
                f"{name}: refused, as by upstream" if not alone else f"{name}: refused ({error}), but {alone}"
            )
            return bool(alone)
        found = list(differences(agent, chosen, path))
    print(f"{name}: {len(chosen)} scenes, {len(found) or 'none'} different", *found, sep="\n    ", flush=True)
    return len(found)


if __name__ == "__main__":
    sys.exit(main())
