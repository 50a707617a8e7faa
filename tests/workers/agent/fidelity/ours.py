"""Plays replies through our own loop, and returns the messages that it sends, as upstream.py does for the real package."""

from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from pipeline import artefacts
from pipeline.agent.files import pinned, to_text
from pipeline.errors import EngineError, RequestError
from pipeline.request import Limits
from pipeline.trajectory import Submitted
from tests.workers.agent.episode import LocalShell, Recorder, Silent
from tests.workers.claims import make_task
from workers.agent.loop import play
from workers.policy.replies import Replay, given_replies
from workers.unqueued.claims import unqueued_claim

# None of ours may be reached before upstream's.
LIMITS = Limits(turns=1000, wall_s=600.0, command_s=600.0, format_errors=1000)


async def play_scene(scene: dict[str, Any], repository: Path) -> dict[str, Any]:
    """The same as upstream.py's for the scene. The shell is that of upstream's local environment; in it runs the file's interpreter."""
    config = to_text(pinned(scene["config"]))
    task = make_task("none", problem=scene["task"])
    request = replace(unqueued_claim(task, command="play", limits=LIMITS).request, agent_config=config)
    recorder = Recorder(Replay(given_replies(msgspec.json.encode(scene["replies"]), where="replies")))
    shell = LocalShell(
        repository, shell="sh", env=dict(scene["config"].get("environment", {}).get("env") or {})
    )
    ended, submission = "", ""
    try:
        outcome = await play(request, policy=recorder, sandbox=shell, turns=[], watcher=Silent())
        ended = artefacts.exit_status(outcome)
        submission = outcome.patch.decode() if isinstance(outcome, Submitted) else ""
    except EngineError:
        pass  # there is no further reply
    except RequestError as error:
        return {"sent": [], "ended": type(error).__name__, "submission": "", "error": str(error)}
    return {"sent": recorder.sent, "ended": ended, "submission": submission}
