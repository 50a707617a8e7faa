"""Imitation of the demonstration's teacher, which precedes reinforcement learning."""
