"""The demonstration: a generated family of small broken repositories, and the tiny policy that learns to fix them.

Everything here is deterministic in its seed. Nothing here imports torch: `trainer.warmstart` trains the policy first, and then the trainer
does.
"""
