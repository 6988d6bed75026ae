"""Engines: who owns gradients and optimizer state. Both answer the same verbs; the loop never asks which one runs."""
