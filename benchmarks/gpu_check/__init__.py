"""The first hour on NVIDIA GPUs: named steps, the cheapest first, of what the learner, the engines and the machine must be able to do."""
