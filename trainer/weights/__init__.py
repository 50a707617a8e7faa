"""The delivery of weights from the learner to the engines: a new version on disk, then in every engine, while episodes continue."""
