"""Sizes in bytes as people write and read them."""

import re

_UNITS = {"": 1, "B": 1}
for _power, _letter in enumerate("KMGT", 1):
    _UNITS[_letter] = _UNITS[f"{_letter}B"] = 1000**_power
    _UNITS[f"{_letter}IB"] = 1024**_power


def parse_bytes(text: str) -> int:
    """`300GB`, `1.5TiB` or a plain number of bytes. Raises ValueError."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Z]*)", text.strip().upper())
    if match is None or match[2] not in _UNITS:
        raise ValueError(f"{text!r}: give a size such as 300GB, 1.5TiB or a number of bytes")
    return int(float(match[1]) * _UNITS[match[2]])


def show_bytes(num_bytes: float) -> str:
    """Three digits and a decimal unit, as in Docker's own listings."""
    for unit in ("B", "kB", "MB", "GB"):
        if num_bytes < 999.5:
            return f"{num_bytes:.3g} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.3g} TB"
