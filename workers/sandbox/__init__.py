"""Containers: where the agent's commands and the graders' scripts run."""
