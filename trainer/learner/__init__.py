"""The learner: a Megatron model that trains on batches, computes log-probs, and is exported as a Hugging Face directory or
saved as a checkpoint."""
