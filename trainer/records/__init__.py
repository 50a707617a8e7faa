"""What a run writes down and shows: the journal, the console, TensorBoard, the summary and the reward curve."""
