"""Grading: decides the reward of a patch, in a new container that the agent never had access to."""
