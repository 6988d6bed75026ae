"""One MoE layer at K3's width on one GPU: TFLOP/s of the expert products and where the layer's time goes.

    python benchmarks/moe_layer.py [--backend torch] [--tokens 8192] [--json out.json]

A rank of 16-way expert parallelism holds 56 of K3's 896 experts and receives, of 16 ranks' tokens times 16 places each,
as many rows as it has tokens times places: 8192 x 16 rows, 2340 an expert. One GPU therefore runs the layer with 56
experts and top 16 (same rows, same products, same sort; no exchange), and the router over all 896 experts by itself.
Forward and backward in bf16, from a trace; the median of several is not needed, because kernels are long. Twice: with
weight gradients added to megatron's fp32 buffer by this project's kernel, as in training, and in bf16 by torch's.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "kernels"), str(ROOT / "data")]

ALL, LOCAL = 896, 56


def build(backend: str, experts: int, model: str = "k3") -> tuple[Any, Any, Any]:
    """The layer of a model with so many experts, its context and configuration, on the device that is there."""
    import torch

    from k3train import launch, platform
    from k3train.config.compose import compose
    from k3train.model.build import make_context
    from k3train.model.latent_moe import LatentMoE
    from k3train.model.parameters import initialize_parameters
    from k3train.parallel import layout as layouts

    config = compose(
        [f"model={model}", f"model.moe.experts={experts}", f"model.backend={backend}", "train.micro_batch=1"]
    )
    place = launch.init_distributed(config)
    platform.install_adam()
    layout = layouts.initialize(layouts.sizes_from_config(config.parallel, place.world))
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    ctx = make_context(config.model, layout, torch.bfloat16, device)
    with device:
        layer = LatentMoE(ctx, 1)
    initialize_parameters(layer, layout, seed=1)
    return layer.train(), ctx, config


def trace(layer: Any, run: Any) -> Any:
    """The split of one call, after two that warm it up."""
    from k3train.train import profiling

    run()
    run()
    path = Path(tempfile.mkdtemp()) / "trace.json"
    engine = SimpleNamespace(models=[layer], optimizer=SimpleNamespace(step=lambda: None))
    with profiling.annotated(engine), profiling.part(profiling.parts_of(layer)[layer]), profiling.traced(path):
        run()
    return profiling.read_trace(path)


def buffer_gradients(layer: Any) -> None:
    """Give the experts' weights megatron's fp32 gradient buffers."""
    import torch

    for weight in layer.experts.parameters():
        weight.grad, weight.grad_added_to_main_grad = None, False
        weight.main_grad = torch.zeros_like(weight, dtype=torch.float32)


def measure(backend: str, tokens: int) -> dict[str, Any]:
    import torch

    from k3train.model.context import PackedStream

    layer, ctx, config = build(backend, LOCAL)
    model = config.model
    cu = torch.tensor([0, tokens], dtype=torch.int32, device="cuda")
    stream = PackedStream(cu, tokens, sequence_length=tokens)
    x = torch.randn(tokens, model.hidden_size, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    grad = torch.randn_like(x)

    def run() -> None:
        layer(x, stream).backward(grad)

    width = model.moe.latent or model.hidden_size
    flop = 3 * 2 * 3 * tokens * model.moe.top_k * width * model.moe.expert_hidden
    found: dict[str, Any] = {
        "backend": ctx.backend.name, "tokens": tokens, "rows_per_expert": tokens * model.moe.top_k / LOCAL,
    }  # fmt: skip
    for kind in ("torch", "buffer"):
        if kind == "buffer":
            buffer_gradients(layer)
        torch.cuda.reset_peak_memory_stats()
        split = trace(layer, run)
        products = split.matmul["experts"]
        if kind == "buffer":  # the weight gradient's kernel is a product too
            products += sum(ms for (_, name), ms in split.kernels.items() if "gradient_kernel" in name)
        found[kind] = {
            "parts_ms": split.parts, "matmul_ms": split.matmul, "expert_products_ms": products,
            "expert_tflops": flop / products / 1e9, "layer_ms": split.busy, "idle": split.idle,
            "peak_gb": torch.cuda.max_memory_allocated() / 1e9, "table": split.table(), "top": split.top(14),
        }  # fmt: skip
        print(said(found, kind), flush=True)
    found["router_ms"] = router_of_all(model, x, tokens)
    return found


def said(found: dict[str, Any], kind: str) -> str:
    one, how = found[kind], {"torch": "bf16 by torch", "buffer": "added to the fp32 buffer"}[kind]
    return (
        f"{found['tokens']} tokens, {found['rows_per_expert']:.0f} rows an expert, backend {found['backend']}, weight "
        f"gradients {how}: expert products {one['expert_tflops']:.0f} TFLOP/s ({one['expert_products_ms']:.1f} ms), layer "
        f"{one['layer_ms']:.1f} ms forward and backward, peak {one['peak_gb']:.1f} GB\n{one['table']}\n{one['top']}"
    )


def router_of_all(model: Any, x: Any, tokens: int) -> dict[str, float]:
    """Milliseconds of routing to all 896 experts: product, selection, histogram, forward and backward."""
    import torch
    import triton

    from k3kernels import routing

    weight = (torch.randn(ALL, model.hidden_size, device="cuda") * 0.02).bfloat16().requires_grad_()
    bias = torch.zeros(ALL, device="cuda")
    counts = torch.zeros(ALL, model.moe.balancing.bins, dtype=torch.int64, device="cuda")
    grad = torch.randn(tokens, model.moe.top_k, device="cuda")
    logits = routing.product_fp32(x, weight).detach().requires_grad_()
    _, experts, cut, cut_expert = routing.route(logits, bias, model.moe.top_k)

    def both() -> None:
        routing.route(routing.product_fp32(x, weight), bias, model.moe.top_k)[0].backward(grad)

    calls = {
        "product, selection, forward and backward": both,
        "selection": lambda: routing.route(logits.detach(), bias, model.moe.top_k),
        "histogram of required biases": lambda: routing.required_bias_counts(
            logits.detach(), bias, cut, cut_expert, counts
        ),
        "order by expert": lambda: routing.make_permutation(experts, ALL),
    }
    return {name: triton.testing.do_bench(call, return_mode="median") for name, call in calls.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="torch")
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    from k3train import platform

    platform.install()
    found = measure(options.backend, options.tokens)
    for name, value in found["router_ms"].items():
        print(f"router over {ALL} experts, {name}: {value:.3f} ms")
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
