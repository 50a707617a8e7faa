"""Accounts for the time of a run, from its records, and the change that would help most."""
