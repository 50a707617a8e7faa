"""Fault injection: kills processes of a running system at random instants and checks that nothing is lost."""
