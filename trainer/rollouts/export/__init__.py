"""Rollouts of a run in the shapes that other tools read. One rollout is in memory at a time, whatever the store holds."""
