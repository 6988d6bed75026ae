"""Evaluation of a model in one process: held-out loss and recall suites, with intervals."""
