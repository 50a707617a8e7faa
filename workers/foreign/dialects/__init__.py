"""The three protocols with which agent programs access a model."""
