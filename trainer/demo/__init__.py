"""Owns the demonstration: a generated family of small broken repositories and the tiny policy that learns
to mend them.

Everything here is deterministic in its seed. Nothing here imports torch; the policy is trained by
`trainer.warmstart` and afterwards by the trainer itself.
"""
