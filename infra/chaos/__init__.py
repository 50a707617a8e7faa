"""Kills processes of a running system at random instants, and looks whether anything was lost: ``python -m infra.chaos``."""
