"""K3, one mechanism a file. Shapes: T tokens of a packed stream, d hidden width, H heads, K, V head sizes, E experts.

Activations are [T, d]: a micro-batch is one stream of documents, so the batch dimension of megatron's [s, b, h] is 1.
"""
