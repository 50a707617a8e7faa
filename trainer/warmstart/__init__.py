"""Imitation of the demonstration's teacher, before there is anything to reinforce."""
