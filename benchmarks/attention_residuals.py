"""Times attention residuals on one GPU: the kernels against the eager form, in one process, on the same inputs.

    python benchmarks/attention_residuals.py                       # the shapes of k3_proxy and of K3
    python benchmarks/attention_residuals.py --shape "8192, 1792, 4, 8" --json mix.json

A shape is tokens, width, finished sources, mixes of a block. Two providers: `kernels` (one kernel a mix with its norm,
gradients of the sources once a block) and `eager` (the mix and the norm in torch operations, its backward by hand, and
autograd adding up the sources' gradients). A block here is: every mix reads the sources and the running sum, and its
output is added to the running sum; the plain residual with the same norms is timed too, so that the difference is what
attention residuals cost a step.

Each number is the median of `triton.testing.do_bench` (CUDA events, flushed L2). GB/s counts what has to move: sources
and running sum read once a mix and its output written, forward; gradients in and out, and the sources' once a block,
backward. `of copy` is its share of the bandwidth of a copy, measured first. Memory is what forward keeps for backward.
"""

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import triton
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1] / "kernels"))
sys.path.insert(0, str(Path(__file__).parents[1]))
from k3kernels.attention_residuals import DepthBlock
from k3kernels.attention_residuals.ops import first_phase_pays
from k3kernels.norm import layer_rms_norm

SHAPES = [(8192, 1792, 1, 8), (8192, 1792, 2, 8), (8192, 1792, 4, 8), (4096, 7168, 4, 24), (4096, 7168, 8, 24)]
EPS = 1e-5


class EagerMix(torch.autograd.Function):
    """The mix in torch operations, keeping its sources and the weights, as a careful user would write it."""

    @staticmethod
    def forward(ctx, query, norm_weight, *sources):  # type: ignore[no-untyped-def]
        key = norm_weight.float() * query.float()
        scores = torch.stack([(v.float() @ key) * torch.rsqrt(v.float().square().mean(-1) + EPS) for v in sources])
        weights = torch.softmax(scores, 0)
        out = weights[0, :, None] * sources[0].float()
        for w, v in zip(weights[1:], sources[1:]):
            out = torch.addcmul(out, w[:, None], v.float())
        ctx.save_for_backward(query, norm_weight, weights, *sources)
        return out.to(sources[0].dtype)

    @staticmethod
    def backward(ctx, grad_out):  # type: ignore[no-untyped-def]
        query, norm_weight, weights, *sources = ctx.saved_tensors
        key = norm_weight.float() * query.float()
        g = grad_out.float()
        inner = torch.stack([(g * v.float()).sum(-1) for v in sources])
        slopes = weights * (inner - (weights * inner).sum(0))
        grad_key = torch.zeros_like(key)
        grads = []
        for j, v in enumerate(sources):
            x = v.float()
            r = torch.rsqrt(x.square().mean(-1) + EPS)
            slope = slopes[j] * r
            grad_key += slope @ x
            grad = torch.outer(slope, key) - (slope * (x @ key) * r * r / key.numel())[:, None] * x
            grads.append(torch.addcmul(grad, weights[j, :, None], g).to(v.dtype))
        return (grad_key * norm_weight).to(query.dtype), (grad_key * query).to(query.dtype), *grads


def eager_norm(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPS)).to(x.dtype)


class Case:
    """One block at one shape; the leaves are the sources, the first running sum and the vectors of every mix."""

    def __init__(self, T: int, d: int, n: int, m: int) -> None:
        self.T, self.d, self.n, self.m = T, d, n, m
        generator = torch.Generator("cuda").manual_seed(0)

        def normal(*shape: int, scale: float = 1.0) -> Tensor:
            x = scale * torch.randn(*shape, device="cuda", generator=generator)
            return x.bfloat16().requires_grad_()

        self.sources = [normal(T, d) for _ in range(n)]
        self.partial = normal(T, d)
        self.queries = [normal(d, scale=d**-0.5) for _ in range(m)]
        self.norms = [normal(d) for _ in range(m)]
        self.outs = [normal(d) for _ in range(m)]
        self.grad = torch.randn(T, d, device="cuda", generator=generator).bfloat16()

    @property
    def leaves(self) -> list[Tensor]:
        return [*self.sources, self.partial, *self.queries, *self.norms, *self.outs]

    def kernels(self) -> Tensor:
        block = DepthBlock(self.sources, eps=EPS, backend="triton")
        if first_phase_pays(self.n, self.m):
            block.prepare(self.queries, self.norms)
        p: Tensor | None = self.partial
        for i in range(self.m):
            x, p = block.mix(p, self.queries[i], self.norms[i], output_weight=self.outs[i], output_eps=EPS)
            assert p is not None
            p = p + x
        assert p is not None
        return p

    def eager(self) -> Tensor:
        p = self.partial
        for i in range(self.m):
            x = EagerMix.apply(self.queries[i], self.norms[i], *self.sources, p)
            p = p + eager_norm(x, self.outs[i])
        return p

    def plain(self) -> Tensor:
        """A plain residual stream with the same norms, as one kernel each."""
        p = self.partial
        for i in range(self.m):
            p = p + layer_rms_norm(p, self.outs[i], eps=EPS)
        return p

    def units(self) -> tuple[int, int]:
        """Tensors [T, d] that forward and backward must move: see the module's text. The additions count as well."""
        forward = self.m * (self.n + 2) + 3 * self.m
        if first_phase_pays(self.n, self.m):
            forward = self.n + 6 * self.m + 3 * self.m
        return forward, self.m * (self.n + 5) + self.m + 2 * self.n


def measure(forward: Callable[[], Tensor], case: Case) -> dict[str, float]:
    """Medians in ms of forward and of forward with backward, MiB kept in between."""
    leaves = case.leaves
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    out = forward()
    kept = (torch.cuda.memory_allocated() - before) / 2**20
    used = [t for t, g in zip(leaves, torch.autograd.grad(out, leaves, case.grad, allow_unused=True)) if g is not None]
    del out
    fwd = triton.testing.do_bench(forward, 5, 40, return_mode="median")
    both = triton.testing.do_bench(lambda: torch.autograd.grad(forward(), used, case.grad), 5, 60, return_mode="median")
    return {"fwd": fwd, "bwd": both - fwd, "kept": kept}


def copy_bandwidth() -> float:
    """GB/s read and written by a large copy."""
    x = torch.randn(2**29, device="cuda", dtype=torch.bfloat16)
    y = torch.empty_like(x)
    return 4 * x.numel() / triton.testing.do_bench(lambda: y.copy_(x), return_mode="median") / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", action="append", help="tokens, width, sources, mixes; may be given several times")
    parser.add_argument("--json", type=Path, help="write all numbers here")
    parser.add_argument("--providers", default="kernels,eager,plain")
    options = parser.parse_args()
    shapes = [tuple(int(x) for x in s.split(",")) for s in options.shape] if options.shape else SHAPES
    copy = copy_bandwidth()
    print(
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}, Triton {triton.__version__}; copy {copy:.0f} GB/s"
    )
    print(
        "| T, d, sources, mixes | provider | fwd ms | bwd ms | f+b ms | GB/s fwd | GB/s bwd | of copy, f+b | MiB kept |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    found = []
    for shape in shapes:
        case = Case(*shape)
        unit = case.T * case.d * 2 / 1e6
        for name in options.providers.split(","):
            result = measure(getattr(case, name), case)
            forward, backward = case.units() if name != "plain" else (6 * case.m, 6 * case.m)
            f, b = result["fwd"], result["bwd"]
            rate = (forward + backward) * unit / (f + b)
            print(
                f"| {', '.join(map(str, shape))} | {name} | {f:.3f} | {b:.3f} | {f + b:.3f} | {forward * unit / f:.0f} "
                f"| {backward * unit / b:.0f} | {rate / copy:.0%} | {result['kept']:.0f} |",
                flush=True,
            )
            found.append({"shape": shape, "provider": name, "copy": copy, **result})
        del case
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
