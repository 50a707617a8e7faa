"""Owns how an episode becomes text: the agent recipe's templates and the policy's chat template.

The lessons of the warm start pass through here, and an agent at run time renders the same recipe, so the
policy meets the very text it was taught on. The chat template only ever appends.
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


class Message(msgspec.Struct, frozen=True):
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

    def opening(self, issue: str) -> list[Message]:
        """The system message and the task."""
        system, instance = self._templates["system_template"], self._templates["instance_template"]
        return [Message("system", system.render()), Message("user", instance.render(task=issue))]

    def observation(self, returncode: int, output: str) -> Message:
        """What the policy is shown after a command."""
        template = self._templates["action_observation_template"]
        return Message("user", template.render(output={"returncode": returncode, "output": output}))

    def format_error(self) -> Message:
        """What the policy is shown after a turn without exactly one bash block."""
        return Message("user", self._templates["format_error_template"].render())


def action(thought: str, command: str) -> Message:
    """An assistant's turn: one thought, one command."""
    return Message("assistant", f"THOUGHT: {thought}\n```bash\n{command}\n```")
