"""How good a judge is, from the journal of a run: whether its scores tell solved rollouts from others, and agree with each other."""
