"""One GPU whose memory is capped: a model whose optimizer state does not fit trains with ZeRO-3 and CPU offload.

    python benchmarks/zero_offload.py                                   # k3_proxy (3.85 B), 32 GiB of the GPU
    python benchmarks/zero_offload.py --cap-gib 16 model.moe.experts=56

State in mixed precision is 12 bytes a parameter (fp32 weights and two moments) beside 2 of bf16 weights. With
engine.offload=cpu the state and fp32 gradients (20 bytes a parameter in all, as DeepSpeed keeps them) lie in host memory and
torch's fused AdamW updates them there. The cap is torch.cuda.set_per_process_memory_fraction: it makes a large GPU
refuse what a small one could not hold, and lets one host's memory suffice for the demonstration. The same model is then
built without offload under the same cap, which must fail.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "kernels"), str(ROOT / "data"), str(ROOT / "benchmarks")]

GIB = 1 << 30


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cap-gib", type=float, default=32.0)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--json", type=Path)
    args, overrides = parser.parse_known_args()
    os.environ.setdefault("LOCAL_RANK", "0")

    from k3train.platform import install, install_adam, quieten

    install()
    import psutil
    import torch
    import torch.distributed as dist
    from engines import _numel, batches, build

    from k3train.config.compose import compose

    quieten()
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", 0) if cuda else torch.device("cpu")
    if cuda:
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, args.cap_gib * GIB / total))
    dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo", store=dist.HashStore(), rank=0, world_size=1)
    install_adam()
    base = [
        "model=k3_proxy", "engine=deepspeed", "engine.zero_stage=3", "run.name=offload", "train.seq_length=2048",
        "train.micro_batch=2", "train.global_batch=4", "train.precision=bf16", "train.recompute=full",
        "tracking.wandb=disabled", *overrides,
    ]  # fmt: skip
    results: dict[str, Any] = {"cap_gib": args.cap_gib}

    def run(offload: str) -> dict[str, Any]:
        config = compose([*base, f"engine.offload={offload}"])
        begun = time.perf_counter()
        engine = build(config, device)
        seen: dict[str, Any] = {"built_s": time.perf_counter() - begun, "steps": []}
        results["parameters"] = sum(_numel(p) for m in engine.models for p in m.parameters())
        results["state_gib"] = 12 * results["parameters"] / GIB
        for step in range(args.steps):
            begun = time.perf_counter()
            result = engine.step(batches(config, 0, 1, step), 1e-4, engine.micro_batches(config.train.global_batch))
            seen["steps"].append(
                {"loss": result.loss, "grad_norm": result.grad_norm, "seconds": time.perf_counter() - begun}
            )
            seen["gpu_peak_gib"] = torch.cuda.max_memory_allocated() / GIB if cuda else 0.0
            seen["host_gib"] = psutil.Process().memory_info().rss / GIB
            print(f"offload={offload} step {step + 1}: {seen['steps'][-1]}", flush=True)
        return seen

    results["offload=cpu"] = run("cpu")
    print(f"{results['parameters'] / 1e9:.2f} B parameters, state {results['state_gib']:.1f} GiB, cap {args.cap_gib} GiB: "
          f"{results['offload=cpu']}", flush=True)  # fmt: skip
    gc.collect()
    if cuda:
        torch.cuda.empty_cache()
        try:
            results["offload=none"] = run("none")
            print("without offload: it fits after all")
        except torch.cuda.OutOfMemoryError as error:
            results["offload=none"] = str(error).splitlines()[0]
            print(f"without offload: {results['offload=none']}")
    if args.json:
        args.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
