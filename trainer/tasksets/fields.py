"""Fields of a published record, checked as they are taken; a record that will not do is refused by file and
field.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Fields:
    """One record as it was read; `where` names it in errors."""

    where: str
    values: Mapping[str, Any]

    def text(self, name: str) -> str:
        """A string that is not blank. Raises ValueError."""
        value = self.values.get(name)
        if not isinstance(value, str) or not value.strip():
            raise ValueError(f"{self.where}: {name}: must be a non-empty string, is {_shown(value)}")
        return value

    def optional_text(self, name: str) -> str:
        """A string, or "" if it is absent or null. Raises ValueError."""
        value = self.values.get(name) or ""
        if not isinstance(value, str):
            raise ValueError(f"{self.where}: {name}: must be a string, is {_shown(value)}")
        return value

    def strings(self, name: str) -> tuple[str, ...]:
        """A list of strings, itself or as JSON text; () if it is absent or null. Raises ValueError."""
        value = self.values.get(name) or []
        if isinstance(value, str):
            try:
                value = json.loads(value)
            except json.JSONDecodeError as error:
                raise ValueError(f"{self.where}: {name}: not JSON: {error}") from error
        if not isinstance(value, Sequence) or not all(isinstance(item, str) for item in value):
            raise ValueError(f"{self.where}: {name}: must be a list of strings, is {_shown(value)}")
        return tuple(value)


def _shown(value: object) -> str:
    return "absent" if value is None else repr(value)[:80]
