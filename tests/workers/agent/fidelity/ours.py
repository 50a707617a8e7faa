"""Plays replies through our own loop and our client of a server, and returns what it sends, as upstream.py does for the real package."""

import argparse
import copy
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import aiohttp
from msgspec.structs import replace

from pipeline import artefacts
from pipeline.agent.config import load_agent
from pipeline.agent.files import pinned, to_text
from pipeline.agent.option import endpoint_of
from pipeline.errors import EngineError, RequestError
from pipeline.request import Limits
from tests.workers.agent.episode import LocalShell, Silent
from tests.workers.claims import make_task
from workers.agent.commands import Submission
from workers.agent.loop import play
from workers.policy.endpoint import (
    Completion,
    EndpointConversation,
    EndpointServer,
    EndpointSettings,
    read_completion,
)
from workers.unqueued import unqueued_claim

# None of ours may be reached before upstream's.
LIMITS = Limits(turns=1000, wall_s=600.0, command_s=600.0, format_errors=1000)


@dataclass(frozen=True, slots=True)
class GivenServer(EndpointServer):
    """A server that notes the bodies which it would be sent, and gives the next reply."""

    replies: list[Any] = field(default_factory=list[Any])
    bodies: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])

    async def ask(self, body: dict[str, Any]) -> Completion:
        self.bodies.append(copy.deepcopy(body))
        if len(self.bodies) > len(self.replies):
            raise EngineError("there is no further reply")
        said = self.replies[len(self.bodies) - 1]
        message: dict[str, Any] = {"content": said} if isinstance(said, str) else dict(said)
        finish_reason = message.pop("finish_reason", "tool_calls" if message.get("tool_calls") else "stop")
        choices = [{"message": message, "finish_reason": finish_reason}]
        return read_completion(json.dumps({"choices": choices}).encode())


def server_of(config: str, replies: list[Any]) -> GivenServer:
    """As a command has it whose user gives no option."""
    said = dict.fromkeys(("key_env", "key_file", "temperature", "max_tokens"))
    options = argparse.Namespace(api_base="http://server/v1", model="policy", option=[], **said)
    no_session = cast(aiohttp.ClientSession, None)
    return GivenServer(no_session, endpoint_of(options, config), "", EndpointSettings(), replies=replies)


async def play_scene(scene: dict[str, Any], repository: Path) -> dict[str, Any]:
    """The same as upstream.py's for the scene. The shell is that of upstream's local environment; in it runs the file's interpreter."""
    config = to_text(pinned(scene["config"]))
    task = make_task("none", problem=scene["task"])
    request = replace(unqueued_claim(task, command="play", limits=LIMITS).request, agent_config=config)
    try:
        server = server_of(config, scene["replies"])
    except RequestError as error:
        return {"sent": [], "asked": [], "ended": type(error).__name__, "submission": "", "error": str(error)}
    policy = EndpointConversation(server, load_agent(config))
    shell = LocalShell(
        repository, shell="sh", env=dict(scene["config"].get("environment", {}).get("env") or {})
    )
    ended, submission = "", ""
    try:
        outcome = await play(request, policy=policy, sandbox=shell, turns=[], watcher=Silent())
        if isinstance(outcome, Submission):
            ended, submission = "Submitted", outcome.printed.decode()
        else:
            ended = artefacts.exit_status(outcome)
    except EngineError:
        pass  # there is no further reply
    kept = [{key: value for key, value in body.items() if key != "model"} for body in server.bodies]
    sent = [body.pop("messages") for body in kept]
    return {"sent": sent, "asked": kept, "ended": ended, "submission": submission}
