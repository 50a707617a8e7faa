"""The learner: a Megatron model that takes batches, gives log-probs, and leaves as a Hugging Face
directory or a checkpoint."""
