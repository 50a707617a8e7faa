"""`--agent` and `--exact`, the same for every command that plays episodes."""

import argparse
import hashlib
from collections.abc import Sequence
from pathlib import Path

from msgspec.structs import replace

from pipeline.agent.config import load_agent
from pipeline.agent.files import merged, parse, pinned, to_text, without_secrets
from pipeline.request import Sampling


def add_agent_options(parser: argparse.ArgumentParser, *, default: Path | None = None) -> None:
    """They fill `options.agent`, a list of specs, and `options.exact`. Without a default, an agent has to be given."""
    parser.add_argument(
        "--agent",
        action=_Agents,
        required=default is None,
        default=None if default is None else [str(default)],
        metavar="FILE",
        help="the agent's YAML, or a value as in agent.step_limit=50; may be repeated, the later one wins"
        + ("" if default is None else "; default: ours"),
    )
    parser.add_argument(
        "--exact", action="store_true", help="do as mini-swe-agent does even where our own way is better"
    )


def read_agent(specs: Sequence[str], *, exact: bool = False) -> str:
    """The agent as requests carry it: files and values merged, without secrets, with facts about this machine.

    Raises ValueError for what cannot be read, RequestError for what cannot be used.
    """
    tree = pinned(without_secrets(merged(specs)))
    if all("=" in spec for spec in specs):
        raise ValueError(f"{' '.join(specs)}: give the agent's YAML file that these values belong to as well")
    if exact:
        tree["swerve"]["exact"] = True
    text = to_text(tree)
    load_agent(text)
    return text


def agent_digest(text: str) -> str:
    """The same for the same files, whatever machine made the request."""
    tree = {name: {**keys, "facts": None} if name == "swerve" else keys for name, keys in parse(text).items()}
    return hashlib.sha256(to_text(tree).encode()).hexdigest()[:16]


def sampling_for(text: str, sampling: Sampling) -> Sampling:
    """`sampling` with what the agent file says about it."""
    said = load_agent(text).sampling
    if said.temperature is not None:
        sampling = replace(sampling, temperature=float(said.temperature))
    if said.top_p is not None:
        sampling = replace(sampling, top_p=float(said.top_p))
    if said.max_tokens is not None:
        sampling = replace(sampling, max_new_tokens=said.max_tokens)
    return sampling


class _Agents(argparse.Action):
    """Collects specs; the first one given replaces the default."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: object,
        option_string: str | None = None,
    ) -> None:
        before: list[str] = getattr(namespace, self.dest) or []
        setattr(namespace, self.dest, [*([] if before is self.default else before), str(values)])
