"""The ops of the Kimi K3 architecture: a readable reference, a plain-torch path and Triton kernels for each.

Needs torch, and triton for the GPU paths; nothing else of this project.

| package | op |
|---|---|
| `k3kernels.kda` | Kimi Delta Attention with everything that the layer fuses around the recurrence |
| `k3kernels.conv` | depthwise causal short convolution with SiLU |
| `k3kernels.norm` | RMS norm of the attention output times a sigmoid gate; RMS norm of layers and latents |
| `k3kernels.attention_residuals` | the softmax mix over depth with the norm behind it, a block of mixes at a time |
| `k3kernels.situ` | SiTU-GLU, the gated unit of experts and MLPs |
| `k3kernels.linear_cross_entropy` | head and loss in chunks of tokens, vocabulary cut over ranks |
| `k3kernels.mxfp4` | rows sorted by expert times experts packed in MXFP4 |
| `k3kernels.linear_attention`, `delta_rule`, `gated_delta` | the rungs below KDA, for the ladder of mixers |

Shape legend, used in every docstring and as suffixes of names:

| letter | meaning |
|---|---|
| B | sequences of a batch (1 when `cu_seqlens` describes a packed stream) |
| T | tokens of a sequence, or of the whole packed stream |
| N | independent sequences: B, or the documents of a packed stream |
| H | query/key heads |
| HV | value heads, a multiple of H; value head j reads key head j // (HV / H) |
| K, V | channels of a key head, of a value head |
| C | rows of a chunk (or channels, in the convolution) |
| W | taps of the short convolution |

A state S is [N, HV, K, V] and is read as o = S^T q. Log decays are natural logarithms, never positive.
"""
