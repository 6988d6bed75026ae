"""The typed errors of the project. Each message says what was wrong, the value, and what to type instead."""

from __future__ import annotations


class K3TrainError(Exception):
    """Base of every error that a user can cause and cure; the CLI prints it without a traceback."""


class ConfigError(K3TrainError, ValueError):
    """A key, type or value of the configuration is wrong."""


class LayoutError(ConfigError):
    """Parallel sizes that do not fit the model, the batch or the world."""


class CheckpointError(K3TrainError, RuntimeError):
    """A checkpoint is damaged, incomplete, or of another model."""


class DivergenceError(K3TrainError, ArithmeticError):
    """The loss or the gradients of a run cannot be used, and going back did not help."""


class DataError(K3TrainError, ValueError):
    """A corpus, tokenizer or dataset cannot be used."""


class WeightsError(K3TrainError, ValueError):
    """Imported or exported tensors are missing, unused or misshapen."""


class EnvironmentError_(K3TrainError, RuntimeError):
    """The machine lacks something: a library, a device, a scheduler."""
