"""The demo in one process: the demo's policy, tasks and prompts, samples and learner of a real run, a sandbox that is simulated.

A run that takes ten minutes with containers and an engine takes half a minute of CPU here, so that an experiment can afford hundreds.
"""
