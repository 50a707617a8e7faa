"""Plays replies through the real mini-swe-agent of this interpreter's sys.path, and prints the messages that it sends to its model.

A process of its own, because only one release can be imported. Scenes arrive on standard input as a JSON list: the agent file as one
tree, the dialect, the task and the replies. The answer on standard output has for each the messages of every query, and how the agent
ended. Its DefaultAgent, LocalEnvironment and DockerEnvironment are real, and so are its models, above a stand-in for litellm, which notes
what litellm would send to a server: messages, tools and the further fields of the request.
"""

import copy
import dataclasses
import json
import logging
import subprocess
import sys
import types
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

Json = dict[str, Any]
KEPT = ("role", "content", "reasoning_content", "tool_calls", "tool_call_id")
# What litellm keeps to itself. Fields in `extra_body` stand beside the others in what it sends.
OF_LITELLM = ("drop_params", "num_retries", "api_base", "api_key", "custom_llm_provider", "model")


class RepliesEnd(KeyboardInterrupt):
    """There is no further reply. No class of upstream's retries or swallows a KeyboardInterrupt."""


class Server:
    """What stands where litellm would send requests: it notes the messages, and gives the next reply."""

    def __init__(self, replies: list[Any]) -> None:
        self.replies: Iterator[Any] = iter(replies)
        self.sent: list[list[Json]] = []
        self.asked: list[Json] = []

    def next(self, messages: list[Json], asked: Json) -> Json:
        self.sent.append(
            [{key: message[key] for key in KEPT if message.get(key) is not None} for message in messages]
        )
        sent = {key: value for key, value in asked.items() if key not in OF_LITELLM and value is not None}
        extra = sent.pop("extra_body", {})
        self.asked.append({**sent, **extra})
        reply = next(self.replies, None)
        if reply is None:
            raise RepliesEnd
        return {"content": reply} if isinstance(reply, str) else dict(reply)


class Dumped:
    """An object of litellm's answers: attributes, and model_dump()."""

    def __init__(self, **fields: Any) -> None:
        self.__dict__.update(fields)

    def model_dump(self, **_: Any) -> Json:
        return copy.deepcopy({name: _plain(value) for name, value in self.__dict__.items()})


def _plain(value: Any) -> Any:
    if isinstance(value, Dumped):
        return value.model_dump()
    return [_plain(one) for one in value] if isinstance(value, list) else value


def stand_in_for_litellm() -> Any:
    """Puts modules in the place of litellm, and of the package that repeats failed calls, which is not installed here.

    The stand-in for litellm asks its attribute `server`.
    """

    def completion(*, messages: list[Json], **asked: Any) -> Dumped:
        reply = litellm.server.next(messages, asked)
        calls = [
            Dumped(id=call["id"], type="function", function=Dumped(**call["function"]))
            for call in reply.get("tool_calls") or []
        ]
        # litellm's message has the attribute only if the server sent the field.
        thoughts = {key: value for key, value in reply.items() if key == "reasoning_content"}
        content = reply.get("content")
        message = Dumped(role="assistant", content=content, tool_calls=calls or None, **thoughts)
        finish_reason = reply.get("finish_reason", "tool_calls" if calls else "stop")
        return Dumped(choices=[Dumped(message=message, finish_reason=finish_reason)])

    names = (
        *("UnsupportedParams", "NotFound", "PermissionDenied", "ContextWindowExceeded", "Authentication"),
        "API",
    )
    litellm: Any = types.ModuleType("litellm")
    litellm.completion = completion
    litellm.exceptions = types.SimpleNamespace(
        **{f"{name}Error": type(f"{name}Error", (Exception,), {}) for name in names}
    )
    litellm.cost_calculator = types.SimpleNamespace(completion_cost=lambda *_, **__: 0.0)
    retrying: Any = types.ModuleType("minisweagent.models.utils.retry")
    retrying.retry = lambda **_: [nullcontext()]
    sys.modules |= {"litellm": litellm, "minisweagent.models.utils.retry": retrying}
    return litellm


def model_of(server: Server, config: Json, dialect: str, *, is_2: bool) -> Any:
    litellm: Any = sys.modules.get("litellm") or stand_in_for_litellm()
    litellm.server = server
    from minisweagent.models.litellm_model import LitellmModel, LitellmModelConfig

    said = {"model_name": "policy", **config, "cost_tracking": "ignore_errors"}
    made: Any = LitellmModel
    if is_2:
        from minisweagent.models.litellm_textbased_model import LitellmTextbasedModel

        said = {key: value for key, value in said.items() if key != "model_class"} | {"model_name": "policy"}
        made = LitellmTextbasedModel if dialect == "text" else LitellmModel
        return made(**said)
    if not isinstance(said.get("model_kwargs"), dict):  # of a model that chooses between several
        said["model_kwargs"] = {}
    known: Any = LitellmModelConfig
    return made(**_known(known, said))


def play(scene: Json) -> Json:
    """What comes of one scene."""
    from minisweagent.agents import default

    server, config = Server(scene["replies"]), scene["config"]
    is_2 = not dataclasses.is_dataclass(default.AgentConfig)
    model = model_of(server, config.get("model") or {}, scene["dialect"], is_2=is_2)
    agent_keys = _known(default.AgentConfig, config.get("agent", {}))
    place = environment_of(scene, config.get("environment", {}))
    agent = default.DefaultAgent(model, place, **agent_keys)
    try:
        ended = agent.run(scene["task"])
    except RepliesEnd:
        return {"sent": server.sent, "asked": server.asked, "ended": "", "submission": ""}
    finally:
        remove(place)
    status, submission = (ended["exit_status"], ended["submission"]) if isinstance(ended, dict) else ended
    submission = submission if status == "Submitted" else ""
    return {"sent": server.sent, "asked": server.asked, "ended": status, "submission": submission}


def environment_of(scene: Json, said: Json) -> Any:
    """The real Docker environment for a scene with an image, else the local one."""
    if image := scene.get("image"):
        from minisweagent.environments.docker import DockerEnvironment, DockerEnvironmentConfig

        return DockerEnvironment(**(_known(DockerEnvironmentConfig, said) | {"image": image}))
    from minisweagent.environments.local import LocalEnvironment, LocalEnvironmentConfig

    return LocalEnvironment(**_known(LocalEnvironmentConfig, said))


def remove(place: Any) -> None:
    """Removes a container at once; upstream leaves that to a process in the background."""
    if container := getattr(place, "container_id", None):
        subprocess.run(["docker", "rm", "-f", container], check=True, capture_output=True)
        place.container_id = None


def _known(config_class: Any, said: Json) -> Json:
    """The keys of the file that this class of the package knows: files are also for other classes of it."""
    if dataclasses.is_dataclass(config_class):
        names = {one.name for one in dataclasses.fields(config_class)}
    else:
        names = set(config_class.model_fields)
    return {key: value for key, value in said.items() if key in names}


def main() -> None:
    logging.disable(logging.CRITICAL)  # it goes to standard output
    results = []
    for scene in json.load(sys.stdin):
        try:
            results.append(play(scene))
        except Exception as error:  # a file that upstream cannot use either
            results.append(
                {
                    "sent": [],
                    "asked": [],
                    "ended": type(error).__name__,
                    "submission": "",
                    "error": str(error),
                }
            )
    json.dump(results, sys.stdout)


if __name__ == "__main__":
    main()
