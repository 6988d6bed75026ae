"""Evaluation of a model in one process: held-out loss, recall suites, comparison of two models."""
