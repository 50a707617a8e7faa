"""The objectives: what a step minimises. Pure functions of tensors; no Megatron, no collectives, no state."""
