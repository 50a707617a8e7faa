"""Fields of a published record, checked as they are read. A record that cannot be used is refused by file, row and field."""

import ast
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True, slots=True)
class Fields:
    """One record as it was read; `where` names its file and row in errors.

    A record that could not be read has `broken`, the reason, and no values: reading any field of it raises ValueError with
    that reason.
    """

    where: str
    values: Mapping[str, Any]
    broken: str = ""

    def text(self, name: str) -> str:
        """A string that is not blank. Raises ValueError."""
        value = self.value(name)
        if not isinstance(value, str) or not value.strip():
            raise self.refusal(name, f"must be a non-empty string, is {_shown(value)}")
        return self._encodable(name, value)

    def script(self, name: str) -> str:
        """A shell script. Raises ValueError if its own lines end in CRLF; lines of a patch in it may."""
        script = self.text(name)
        if script.lstrip().partition("\n")[0].endswith("\r"):
            why = "its lines end in CRLF, and bash takes the CR for a part of each command; convert it (dos2unix)"
            raise self.refusal(name, why)
        return script

    def optional_text(self, name: str) -> str:
        """A string, or "" if it is absent or null. Raises ValueError."""
        value = self.value(name)
        if value is None:
            return ""
        if not isinstance(value, str):
            raise self.refusal(name, f"must be a string, is {_shown(value)}")
        return self._encodable(name, value)

    def strings(self, name: str) -> tuple[str, ...]:
        """A list of strings, itself or as JSON or Python text; () if it is absent, null or "". Raises ValueError."""
        value = self._parsed(name)
        if value is None:
            return ()
        if isinstance(value, str) or not isinstance(value, Sequence):
            raise self.refusal(name, f"must be a list of strings, is {_shown(value)}")
        if not all(isinstance(item, str) for item in value):
            raise self.refusal(name, f"must be a list of strings, is {_shown(value)}")
        return tuple(self._encodable(name, item) for item in value)

    def mapping(self, name: str) -> dict[str, Any]:
        """An object, itself or as JSON or Python text; {} if it is absent, null or "". Raises ValueError."""
        value = self._parsed(name)
        if value is None:
            return {}
        if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
            raise self.refusal(name, f"must be an object with names, is {_shown(value)}")
        return dict(value)

    def value(self, name: str) -> Any:
        """The value, None if it is absent. Raises ValueError for a record that could not be read."""
        if self.broken:
            raise ValueError(f"{self.where}: {self.broken}")
        return self.values.get(name)

    def refusal(self, name: str, why: str) -> ValueError:
        """The error to raise about the field `name`."""
        return ValueError(f"{self.where}: {name}: {why}")

    def having(self, **values: Any) -> "Fields":
        """The same record with `values` put into it."""
        return replace(self, values={**self.values, **values})

    def broken_by(self, error: ValueError) -> "Fields":
        """The same record as one that could not be read because of `error`, whose text may begin with `where`."""
        return Fields(self.where, {}, broken=str(error).removeprefix(f"{self.where}: "))

    def _parsed(self, name: str) -> Any:
        """The value, read as JSON or as a Python literal if it is text; None if it is absent or blank."""
        value = self.value(name)
        if not isinstance(value, str):
            return value
        if not value.strip():
            return None
        try:
            return json.loads(value)
        except ValueError as not_json:
            try:
                return ast.literal_eval(value.strip())
            except (ValueError, SyntaxError, MemoryError, RecursionError):
                why = f"neither JSON nor a Python literal: {not_json}, in {_shown(value)}"
                raise self.refusal(name, why) from not_json

    def _encodable(self, name: str, value: str) -> str:
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise self.refusal(name, f"not text in UTF-8: {error}") from error
        return value


def _shown(value: object) -> str:
    return "absent" if value is None else repr(value)[:80]
