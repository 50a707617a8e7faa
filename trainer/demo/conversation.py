"""How an episode becomes text: the agent recipe's templates and the policy's chat template.

The warm start renders its lessons through these, and the agent renders the same recipe at run time, so the policy meets the
text that it was taught on. The chat template only ever appends.
"""

from pathlib import Path
from typing import Literal

import jinja2
import msgspec

RECIPE = Path(__file__).parents[1] / "recipes" / "demo_agent.yaml"
END, PAD = "<|end|>", "<|pad|>"
ROLE_TOKENS = ("<|system|>", "<|user|>", "<|assistant|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


class EpisodeMessage(msgspec.Struct, frozen=True):
    """One message of an episode."""

    role: Literal["system", "user", "assistant"]
    content: str

    def rendered(self) -> str:
        """The message as `CHAT_TEMPLATE` writes it."""
        return f"<|{self.role}|>{self.content}{END}"


class Templates:
    """The agent recipe's templates, compiled strictly: an unknown name is an error."""

    def __init__(self, recipe: Path = RECIPE) -> None:
        environment = jinja2.Environment(undefined=jinja2.StrictUndefined)
        agent: dict[str, object] = msgspec.yaml.decode(recipe.read_bytes(), type=dict)["agent"]
        self._templates = {
            key: environment.from_string(str(text))
            for key, text in agent.items()
            if key.endswith("_template")
        }

    def opening(self, issue: str) -> list[EpisodeMessage]:
        """The system message and the task."""
        system, instance = self._templates["system_template"], self._templates["instance_template"]
        return [
            EpisodeMessage("system", system.render()),
            EpisodeMessage("user", instance.render(task=issue)),
        ]

    def observation(self, returncode: int, output: str) -> EpisodeMessage:
        """What the policy is shown after a command."""
        template = self._templates["action_observation_template"]
        return EpisodeMessage("user", template.render(output={"returncode": returncode, "output": output}))

    def format_error(self) -> EpisodeMessage:
        """What the policy is shown after a turn without exactly one bash block."""
        return EpisodeMessage("user", self._templates["format_error_template"].render())


def action(thought: str, command: str) -> EpisodeMessage:
    """An assistant's turn: one thought, one command."""
    return EpisodeMessage("assistant", f"THOUGHT: {thought}\n```bash\n{command}\n```")
