"""Rollouts on disk, in the directory of their run, which remain after Redis has deleted them.

A store is a directory of segment files, each a row of records, oldest first. Only the trainer writes
(`trainer.records.rollout_writer`); everybody may read at the same time. `docs/rollouts.md` describes the format.
"""
