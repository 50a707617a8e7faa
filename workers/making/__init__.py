"""Tasks made of a repository: of its history by `from_git.py`, of its code by `plant.py`."""
