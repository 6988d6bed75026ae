"""Engines: who owns gradients and optimizer state. Both answer the same verbs, so the loop never asks which one runs."""
