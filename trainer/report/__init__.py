"""The result of a run, its end, and whether every request is accounted for."""
