"""The families of models that the learner trains, a file for each."""
