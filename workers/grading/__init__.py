"""Verdicts: what a patch is worth, found out in a fresh container that the agent never saw."""
