"""Containers, in which the agent's commands and the graders' scripts run."""
