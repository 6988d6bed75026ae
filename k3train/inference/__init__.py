"""Generation: the cache, prefill in chunks, decode token by token."""
