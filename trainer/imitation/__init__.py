"""Supervised fine-tuning: rows of files are trained as they are, without rollouts."""
