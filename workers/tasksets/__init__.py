"""Imports published tasks into records that a run can read."""
