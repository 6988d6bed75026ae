"""Chunked KDA on the GPU in Triton: five kernels, two forward and three backward.

| file | stage | parallel over |
|---|---|---|
| `index.py` | chunk table of a packed stream | chunks |
| `prep.py` | gate, norms, A, (I + L)^-1, decayed q and k | chunks x value heads |
| `state.py` | state and output | sequences (or segments) x value heads x V slices |
| `reverse.py` | adjoint state | sequences (or segments) x value heads x V slices |
| `vside.py` | products over value channels, dv, dbeta | chunks x value heads |
| `kside.py` | dq, dk, dz and the parameters' partial sums | chunks x value heads x K slices |
| `*_hopper.py` | the same in Gluon for K = V = 128, bf16, sm_90; `hopper.py` their instructions | |
| `plan.py` | which kernels, tile sizes, segments, slices | |
| `stages.py` | launches of the chunk-parallel kernels, and the buffers between them | |
| `passes.py` | the serial passes, whole or in segments | |
| `slices.py` | a long stream's serial passes beside its chunk-parallel kernels | |
| `launch.py` | one launch, repeated without Triton's binding | |
| `api.py` | autograd | |
"""
