"""Evaluation: how well weights of ours, or any model behind an OpenAI-compatible server, solve tasks."""
