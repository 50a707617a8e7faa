"""Grading: decides what a patch is worth, in a new container that the agent never saw."""
