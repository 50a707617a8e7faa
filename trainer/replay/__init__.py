"""Kept rollouts of a run through the learner again: bit for bit the same steps, or the same steps under another objective."""
