"""Parallel layouts: sizes to process groups, pipeline transports, context parallelism. Nothing here knows a token."""
