"""The keys in a model's `config.json` about its language model.

They are at the top level or, if the model also sees or hears, in a table.
"""

from collections.abc import Mapping
from typing import Any, cast

LANGUAGE_TABLES = ("text_config", "llm_config", "language_config")
"""The names that model families give to the table of the language model."""

_OF_THE_WHOLE = ("model_type", "architectures", "bos_token_id", "eos_token_id", "pad_token_id")


def language_keys(config: Mapping[str, Any]) -> dict[str, Any]:
    """All keys of `config` and of its language model's table. The table's values win, except for keys that describe the whole model."""
    tables = (
        cast(Mapping[str, Any], config[name])
        for name in LANGUAGE_TABLES
        if isinstance(config.get(name), Mapping)
    )
    given = {name: value for table in tables for name, value in table.items() if value is not None}
    whole = {name: config[name] for name in _OF_THE_WHOLE if config.get(name) is not None}
    return {**config, **given, **whole}
