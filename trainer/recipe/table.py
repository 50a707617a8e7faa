"""The base of the recipe's tables."""

import msgspec


class Table(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A table of the recipe. msgspec does not inherit `kw_only`, type checkers do not see an inherited `frozen`: say both."""
