"""Imports tasks from where they are published into records that a run can read."""
