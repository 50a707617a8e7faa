"""Evaluation: the share of tasks that our own weights, or any model behind an OpenAI-compatible server, solve."""
