"""Tasks made of a repository's own history: `python -m workers.tasksets from-git`."""
