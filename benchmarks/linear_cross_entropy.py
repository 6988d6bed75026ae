"""Times the head with its loss on one GPU: chunks of tokens against whole logits, in one process, on the same inputs.

    python benchmarks/linear_cross_entropy.py                        # the shapes of k3_proxy and of K3 under TP8
    python benchmarks/linear_cross_entropy.py --shape "262144, 7168, 20480" --providers chunks

A shape is tokens, width, vocabulary (slice). Providers: `chunks` (gradients found with the losses), `chunks twice` (any
loss: logits computed again in the backward pass), `whole` (torch's linear and cross_entropy on fp32 logits). Each time
is the median of forward with backward by `triton.testing.do_bench`. TFLOP/s counts the three products 6 T d V, without
what is computed again; `of product` is its share of the rate of an 8192^3 bf16 product, measured first. Memory is the
most that forward with backward adds to inputs and weights. `error` is the largest relative difference of the gradients
to those of `whole` in fp64 at a small shape.
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
from k3kernels.linear_cross_entropy import automatic_chunk, linear_cross_entropy

SHAPES = [(8192, 1792, 32768), (65536, 1792, 32768), (16384, 7168, 20480)]
Provider = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def whole(hidden: Tensor, weight: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
    logits = torch.nn.functional.linear(hidden, weight)
    logits = logits if logits.dtype == torch.float64 else logits.float()
    return (torch.nn.functional.cross_entropy(logits, labels, reduction="none") * mask).sum()


def chunks(hidden: Tensor, weight: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
    return (linear_cross_entropy(hidden, weight, labels, token_weights=mask) * mask).sum()


def chunks_twice(hidden: Tensor, weight: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
    return (linear_cross_entropy(hidden, weight, labels) * mask).sum()


PROVIDERS: dict[str, Provider] = {"chunks": chunks, "chunks twice": chunks_twice, "whole": whole}


def inputs(T: int, d: int, V: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator("cuda").manual_seed(0)
    hidden = torch.randn(T, d, device="cuda", generator=generator, dtype=torch.bfloat16).requires_grad_()
    weight = (0.02 * torch.randn(V, d, device="cuda", generator=generator)).bfloat16().requires_grad_()
    labels = torch.randint(V, (T,), device="cuda", generator=generator)
    mask = (torch.rand(T, device="cuda", generator=generator) > 0.05).float()
    return hidden, weight, labels, mask


def error(provider: Provider) -> float:
    hidden, weight, labels, mask = inputs(3000, 512, 8192)
    exact = [t.detach().double().requires_grad_() for t in (hidden, weight)]
    expected = torch.autograd.grad(whole(exact[0], exact[1], labels, mask), exact)
    found = torch.autograd.grad(provider(hidden, weight, labels, mask), [hidden, weight])
    return max(float((a.double() - e).norm() / e.norm()) for a, e in zip(found, expected))


def product_rate() -> float:
    """TFLOP/s of an 8192^3 bf16 product."""
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return 2 * 8192**3 / triton.testing.do_bench(lambda: a @ b, return_mode="median") / 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", action="append", help="tokens, width, vocabulary; may be given several times")
    parser.add_argument("--providers", default=",".join(PROVIDERS))
    parser.add_argument("--json", type=Path, help="write all numbers here")
    options = parser.parse_args()
    shapes = [tuple(int(x) for x in s.split(",")) for s in options.shape] if options.shape else SHAPES
    peak = product_rate()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}; 8192^3 bf16 product {peak:.0f} TFLOP/s")
    print("| T, d, V | provider | chunk | f+b ms | TFLOP/s | of product | peak MiB | error |")
    print("|---|---|---|---|---|---|---|---|")
    found = []
    for shape in shapes:
        T, d, V = shape
        given = inputs(T, d, V)
        for name in options.providers.split(","):
            provider = PROVIDERS[name]

            def step(provider: Provider = provider, given: tuple[Tensor, ...] = given) -> tuple[Tensor, ...]:
                return torch.autograd.grad(provider(*given), given[:2])  # type: ignore[arg-type]

            try:
                torch.cuda.reset_peak_memory_stats()
                before = torch.cuda.memory_allocated()
                step()
                memory = (torch.cuda.max_memory_allocated() - before) / 2**20
                ms = triton.testing.do_bench(step, 10, 100, return_mode="median")
            except torch.OutOfMemoryError:
                print(f"| {', '.join(map(str, shape))} | {name} | | out of memory | | | | |", flush=True)
                continue
            rate = 6 * T * d * V / ms / 1e9
            chunk = T if name == "whole" else min(T, automatic_chunk(V, 2))
            print(
                f"| {', '.join(map(str, shape))} | {name} | {chunk} | {ms:.2f} | {rate:.0f} | {rate / peak:.0%} "
                f"| {memory:.0f} | {error(provider):.1e} |",
                flush=True,
            )
            found.append({"shape": shape, "provider": name, "chunk": chunk, "ms": ms, "memory": memory, "peak": peak})
        del given
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
