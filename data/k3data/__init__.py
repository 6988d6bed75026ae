"""Text to tokens to indexed datasets to batches.

`corpus` finds and reads documents, `tokenizer` encodes them, `prepare` writes Megatron `.bin/.idx` pairs (its `worker`
processes import neither torch nor megatron), `dataset` reads samples back by global index, `loader` makes the flat
micro-batches of a step, `recall` makes synthetic tasks of the same shape.
"""
