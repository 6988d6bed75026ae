"""Context parallelism: contiguous slices of the stream, a state scan for KDA, gathered latents for MLA."""

from __future__ import annotations
