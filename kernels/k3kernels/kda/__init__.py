"""Kimi Delta Attention: `kda` is the entry; `naive` the truth, `chunk_torch` the CPU path, `triton` the GPU path.

`segment` splits a stream over ranks, `recurrent` decodes token by token.
"""

from k3kernels.kda.ops import kda
from k3kernels.kda.recurrent import kda_decode
from k3kernels.kda.segment import first_document_state, fold_segments, kda_segment, local_cu_seqlens

__all__ = ["first_document_state", "fold_segments", "kda", "kda_decode", "kda_segment", "local_cu_seqlens"]
