"""The records and displays of a run: the journal, the console, TensorBoard, the summary and the reward curve."""
