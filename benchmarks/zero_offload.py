"""One GPU, and a model whose optimizer state does not fit it: ZeRO-3 with CPU offload trains it.

    python benchmarks/zero_offload.py                                   # k3_proxy (3.85 B), 32 GiB of the GPU
    python benchmarks/zero_offload.py --cap-gib 16 model.moe.experts=56
    python benchmarks/zero_offload.py --cap-gib 0 --offload-only --steps 2 model.moe.experts=488   # 12.7 B: a whole H200

State in mixed precision is 12 bytes a parameter (fp32 weights and two moments) beside 2 of bf16 weights. With
engine.offload=cpu the state and fp32 gradients (16 bytes a parameter in all) lie in host memory and torch's fused AdamW
updates them there. The cap is torch.cuda.set_per_process_memory_fraction: it makes a large GPU refuse what a small one
could not hold, and lets one host's memory suffice for the demonstration; 0 is no cap. Without --offload-only the same
model is then built without offload under the same cap, which must fail.

With no cap, 12 bytes a parameter exceed the 139.8 GiB that an H200 offers from 12.51 B parameters on; the host then needs
16 bytes of each, 190 GiB, beside some 8 of copies on their way. Each part prints its time as it ends.
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
    parser.add_argument("--offload-only", action="store_true", help="do not try without offload afterwards")
    parser.add_argument("--json", type=Path)
    args, overrides = parser.parse_known_args()
    begun_all = time.perf_counter()
    os.environ.setdefault("LOCAL_RANK", "0")
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")  # torch asks for huge pages: 200 GB are touched sooner

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
        if args.cap_gib:
            torch.cuda.set_per_process_memory_fraction(min(1.0, args.cap_gib * GIB / total))
    dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo", store=dist.HashStore(), rank=0, world_size=1)
    install_adam()
    base = [
        "model=k3_proxy", "engine=deepspeed", "engine.zero_stage=3", "run.name=offload", "train.seq_length=2048",
        "train.micro_batch=2", "train.global_batch=4", "train.precision=bf16", "train.recompute=full",
        "tracking.wandb=disabled", *overrides,
    ]  # fmt: skip
    cap = args.cap_gib or (torch.cuda.get_device_properties(0).total_memory / GIB if cuda else 0.0)
    results: dict[str, Any] = {"cap_gib": cap}

    def keep() -> None:
        if args.json:
            args.json.write_text(json.dumps(results, indent=1))

    def host_gib() -> float:
        return psutil.Process().memory_info().rss / GIB

    print(f"{time.perf_counter() - begun_all:.1f} s: imported and connected", flush=True)

    def run(offload: str) -> dict[str, Any]:
        config = compose([*base, f"engine.offload={offload}"])
        begun = time.perf_counter()
        engine = build(config, device)
        seen: dict[str, Any] = {"built_s": time.perf_counter() - begun, "steps": []}
        results["parameters"] = sum(_numel(p) for m in engine.models for p in m.parameters())
        results["state_gib"] = 12 * results["parameters"] / GIB
        print(
            f"{time.perf_counter() - begun_all:.1f} s: offload={offload} built in {seen['built_s']:.1f} s, "
            f"{results['parameters'] / 1e9:.2f} B parameters, state {results['state_gib']:.1f} GiB, GPU {cap:.1f} GiB, host "
            f"{host_gib():.1f} GiB", flush=True,
        )  # fmt: skip
        for step in range(args.steps):
            begun = time.perf_counter()
            result = engine.step(batches(config, 0, 1, step), 1e-4, engine.micro_batches(config.train.global_batch))
            seen["steps"].append(
                {"loss": result.loss, "grad_norm": result.grad_norm, "seconds": time.perf_counter() - begun}
            )
            seen["gpu_peak_gib"] = torch.cuda.max_memory_allocated() / GIB if cuda else 0.0
            seen["host_gib"] = host_gib()
            results[f"offload={offload}"] = seen
            keep()
            print(
                f"{time.perf_counter() - begun_all:.1f} s: step {step + 1} {seen['steps'][-1]}, GPU peak "
                f"{seen['gpu_peak_gib']:.1f} GiB, host {seen['host_gib']:.1f} GiB", flush=True,
            )  # fmt: skip
        return seen

    run("cpu")
    if args.offload_only:
        sys.stdout.flush()
        os._exit(0)  # giving 200 GB back page by page takes long
    gc.collect()
    if cuda:
        torch.cuda.empty_cache()
        try:
            run("none")
            print("without offload: it fits after all")
        except torch.cuda.OutOfMemoryError as error:
            results["offload=none"] = str(error).splitlines()[0]
            print(f"without offload: {results['offload=none']}")
    keep()


if __name__ == "__main__":
    main()
