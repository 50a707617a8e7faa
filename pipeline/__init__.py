"""The contract: what travels between trainer and workers, and how.

Imports nothing of ours and nothing heavy.
"""
