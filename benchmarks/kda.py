"""Times KDA side by side with flash-linear-attention on one GPU, in one process, on the same inputs.

    python benchmarks/kda.py                        # ours alone; fla and GDN rows say "not run"
    pip install fla-core==0.6.0 && python benchmarks/kda.py --json kda.json

Providers: `ours` (bound -5), `ours softplus` (unbounded gate), `ours 4 slices` and the like (a long stream's serial passes
beside its chunk-parallel kernels; only when named: slices.py), `ours bound` (Triton binds the arguments of every launch;
only when named, alone),
`fla` (chunk_kda with safe_gate and lower_bound -5,
its tensor-core path), `gdn` (fla's gated delta rule: scalar decay, less work). Protocol: all providers are warmed up
and autotuned, then timed in rounds whose order alternates, with CUDA events and a flushed L2
(triton.testing.do_bench); the number is the median of the rounds' medians. `fwd` is the training forward, `f+b` adds
the gradient of every input and parameter. Peak memory is the extra memory of one f+b. GB/s and TFLOP/s count what any
implementation must move and multiply (inputs and outputs once: 3590 B; 525 kFLOP in 64-token chunks, per token and
head of 128 channels), beside the ceilings of a copy and a matrix product measured first.

fla tunes about 230 configurations: they are compiled in parallel and timed in short windows at the first shape, and
the best ones are reused at the other shapes (fla keys them by the number of heads). Its GDN backward refuses Hopper
with Triton < 3.7.1 because of a miscompilation; it is timed with that guard lifted, its gradients may be wrong.

--split adds, for our rows, the time on the device alone (device_time.py), what the host needs to queue a step, and the
time of every kernel.  --errors prints at the end how far ours and fla (both bounded) are from fp64 (kda_errors.py).
"""

import argparse
import json
import os
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1] / "kernels"))
from device_time import device_ms, host_ms, kernel_ms, median
from kda_errors import PARTS, errors, print_errors

from k3kernels.kda import kda
from k3kernels.kda.triton import launch, plan

DOCUMENTS = [1300, 547, 2048, 963, 271, 3063, 1, 15, 64, 130, 4096, 3886]
SHAPES = {
    "1, 8192, 96": (1, 8192, 96, None),
    "1, 65536, 32": (1, 65536, 32, None),
    "varlen 16384, 32": (1, sum(DOCUMENTS), 32, DOCUMENTS),
    "4, 4096, 16": (4, 4096, 16, None),
    "1, 8192, 32": (1, 8192, 32, None),
    "1, 32768, 32": (1, 32768, 32, None),
}
BYTES, FLOP = 3590, 525e3


def tune_in_parallel() -> None:
    """Compile a Triton autotuner's candidates in threads and time them in short windows; reuse its first answer."""
    import triton.runtime.autotuner as autotuner

    pool = ThreadPoolExecutor(min(32, os.cpu_count() or 4))
    run, init = autotuner.Autotuner.run, autotuner.Autotuner.__init__

    def short_windows(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        self.__dict__["do_bench"] = lambda f, quantiles=None, **_: triton.testing.do_bench(
            f, 4, 16, quantiles=quantiles
        )

    def tuned_run(self: Any, *args: Any, **kwargs: Any) -> Any:
        if len(self.configs) > 1:
            if self.cache:
                best = next(iter(self.cache.values()))
                self.configs = [best]
            else:
                self.nargs = dict(zip(self.arg_names, args))
                try:
                    with triton.AsyncCompileMode(pool, ignore_errors=True):
                        for config in self.prune_configs(kwargs):
                            options = {k: v for k, v in kwargs.items() if k != "warmup"}
                            self.fn.warmup(*args, **{**options, **config.all_kwargs()})
                except Exception as error:
                    print(f"  parallel tuning of {self.base_fn.__name__} gave up: {error!r:.100}")
        return run(self, *args, **kwargs)

    autotuner.Autotuner.__init__ = short_windows
    autotuner.Autotuner.run = tuned_run


def providers() -> dict[str, Callable[[dict[str, Tensor], Tensor | None], tuple[Tensor, list[Tensor]]]]:
    """Name -> function of (inputs, cu_seqlens) that returns the output and the tensors to differentiate by."""

    def ours(bound: float | None) -> Callable[..., tuple[Tensor, list[Tensor]]]:
        def call(x: dict[str, Tensor], cu: Tensor | None) -> tuple[Tensor, list[Tensor]]:
            leaves = [x[n] for n in PARTS]
            return kda(*leaves, bound=bound, cu_seqlens=cu, backend="triton")[0], leaves

        return call

    def sliced(slices: int) -> Callable[..., tuple[Tensor, list[Tensor]]]:
        plain = ours(-5.0)

        def call(x: dict[str, Tensor], cu: Tensor | None) -> tuple[Tensor, list[Tensor]]:
            at_most, plan.slice_stream = plan.slice_stream, lambda *_: slices
            try:
                return plain(x, cu)  # the backward pass goes by the forward's
            finally:
                plan.slice_stream = at_most

        return call

    def bound(x: dict[str, Tensor], cu: Tensor | None) -> tuple[Tensor, list[Tensor]]:
        launch.DIRECT = False  # stays off: the backward pass launches later, so time this in a process of its own
        return ours(-5.0)(x, cu)

    found = {"ours": ours(-5.0), "ours softplus": ours(None)}
    found["ours bound"] = bound  # every argument of every launch bound by Triton
    found |= {f"ours {n} slices": sliced(n) for n in (1, 2, 3, 4, 6, 8)}
    try:
        from fla.ops.kda import chunk_kda
    except ImportError:
        return found

    def fla(x: dict[str, Tensor], cu: Tensor | None) -> tuple[Tensor, list[Tensor]]:
        leaves = [x[n] for n in PARTS]
        q, k, v, z, beta, A_log, dt_bias = leaves
        o, _ = chunk_kda(
            q, k, v, z, beta, A_log=A_log, dt_bias=dt_bias.flatten(), cu_seqlens=cu, safe_gate=True, lower_bound=-5.0,
            use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True,
        )  # fmt: skip
        return o, leaves

    found["fla"] = fla
    try:
        import fla.ops.common.chunk_o as chunk_o
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule
    except ImportError:
        return found
    if hasattr(chunk_o, "TRITON_ABOVE_3_7_1"):
        chunk_o.TRITON_ABOVE_3_7_1 = True

    def gdn(x: dict[str, Tensor], cu: Tensor | None) -> tuple[Tensor, list[Tensor]]:
        leaves = [x["q"], x["k"], x["v"], x["g"], x["b"]]
        return chunk_gated_delta_rule(*leaves, use_qk_l2norm_in_kernel=True, cu_seqlens=cu)[0], leaves

    found["gdn"] = gdn
    return found


def make_inputs(B: int, T: int, H: int) -> dict[str, Tensor]:
    generator = torch.Generator("cuda").manual_seed(0)

    def normal(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.randn(*shape, device="cuda", generator=generator, dtype=torch.float32).to(dtype)

    x = {name: normal(B, T, H, 128) for name in ("q", "k", "v", "z")}
    x |= {
        "beta": normal(B, T, H),
        "A_log": normal(H, dtype=torch.float32),
        "dt_bias": normal(H, 128, dtype=torch.float32),
    }
    x |= {"g": torch.nn.functional.logsigmoid(normal(B, T, H, dtype=torch.float32)), "b": normal(B, T, H).sigmoid()}
    x = {name: t.requires_grad_() for name, t in x.items()}
    x["do"] = normal(B, T, H, 128)
    return x


def ceilings() -> tuple[float, float]:
    """Measured copy bandwidth in GB/s (read + written) and bf16 matrix product in TFLOP/s."""
    x = torch.randn(2**30, device="cuda", dtype=torch.bfloat16)
    y = torch.empty_like(x)
    copy = triton.testing.do_bench(lambda: y.copy_(x), return_mode="median")
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    product = triton.testing.do_bench(lambda: a @ b, return_mode="median")
    return 2 * x.numel() * 2 / copy / 1e6, 2 * 8192**3 / product / 1e9


def measure(
    shape: str, calls: dict[str, Callable[..., Any]], rounds: int, rep: int, split: bool
) -> dict[str, dict[str, Any]]:
    B, T, H, documents = SHAPES[shape]
    x = make_inputs(B, T, H)
    cu = None
    if documents:
        cu = torch.tensor([0, *documents], device="cuda").cumsum(0).to(torch.int32)
    steps: dict[tuple[str, str], Callable[[], Any]] = {}
    rows: dict[str, dict[str, Any]] = {}
    for name, call in calls.items():

        def step(call: Callable[..., Any] = call) -> Any:
            o, leaves = call(x, cu)
            return torch.autograd.grad(o, leaves, x["do"])

        try:
            step()
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            step()
            torch.cuda.synchronize()
        except Exception as error:
            print(f"  {name} at {shape}: {error!r:.160}")
            continue
        rows[name] = {"peak_gib": (torch.cuda.max_memory_allocated() - before) / 2**30}
        steps[name, "fwd"] = lambda call=call: call(x, cu)
        steps[name, "f+b"] = step
    times: dict[tuple[str, str], list[float]] = {key: [] for key in steps}
    for r in range(rounds):
        for key in list(steps)[:: 1 if r % 2 == 0 else -1]:
            times[key].append(triton.testing.do_bench(steps[key], 5, rep, return_mode="median"))
    for (name, mode), values in times.items():
        rows[name][mode] = median(values)
        if split and name.startswith("ours"):
            rows[name][f"{mode} device"] = device_ms(steps[name, mode])
            rows[name][f"{mode} host"] = host_ms(steps[name, mode])
            if mode == "f+b":
                rows[name]["kernels"] = kernel_ms(steps[name, mode])
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", default="0,1,2,3,4", help="indices, e.g. 0,2")
    parser.add_argument("--providers", default="", help="comma-separated names; default all that are installed")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rep", type=int, default=60, help="milliseconds of repeats in a round")
    parser.add_argument("--split", action="store_true", help="also device time, host time and time per kernel of ours")
    parser.add_argument("--errors", action="store_true", help="at the end the errors of ours and fla to fp64")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("benchmarks/kda.py: needs a CUDA device")
    tune_in_parallel()
    calls = providers()
    named = options.providers.split(",") if options.providers else ["ours", "ours softplus", "fla", "gdn"]
    calls = {name: call for name, call in calls.items() if name in named}
    bandwidth, rate = ceilings()
    print(
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}; "
        f"copy {bandwidth:.0f} GB/s, matrix product {rate:.0f} TFLOP/s"
    )
    results = {}
    print(
        f"{'B, T, H':18} {'provider':14} {'fwd ms':>8} {'bwd ms':>8} {'f+b ms':>8} {'floor':>6} {'peak GiB':>8} "
        f"{'GB/s':>6} {'TFLOP/s':>7} {'fla/this':>8}"
    )
    for index in options.shapes.split(","):
        shape = list(SHAPES)[int(index)]
        B, T, H, _ = SHAPES[shape]
        rows = results[shape] = measure(shape, calls, options.rounds, options.rep, options.split)
        for name in calls if options.providers else ("ours", "ours softplus", "fla", "gdn"):
            row = rows.get(name)
            if row is None:
                print(f"{shape:18} {name:14} not run")
                continue
            n, total = B * T * H, row["f+b"]
            ratio = f"{rows['fla']['f+b'] / total:8.2f}" if "fla" in rows else f"{'-':>8}"
            print(
                f"{shape:18} {name:14} {row['fwd']:8.3f} {total - row['fwd']:8.3f} {total:8.3f} "
                f"{n * BYTES / bandwidth / 1e6:6.2f} {row['peak_gib']:8.2f} {n * BYTES / total / 1e6:6.0f} "
                f"{n * FLOP / total / 1e9:7.1f} {ratio}",
                flush=True,
            )
            if "kernels" in row:
                parts = ", ".join(f"{kernel.removesuffix('_kernel')} {ms:.3f}" for kernel, ms in row["kernels"].items())
                print(
                    f"{'':18} device fwd {row['fwd device']:.3f} f+b {row['f+b device']:.3f}; "
                    f"host fwd {row['fwd host']:.3f} f+b {row['f+b host']:.3f}; {parts}",
                    flush=True,
                )
        torch.cuda.empty_cache()
    if options.errors:  # last, for fla keeps the configurations of the shape that it meets first
        print_errors(errors({name: call for name, call in calls.items() if name in ("ours", "fla")}, "cuda"))
    if options.json:
        options.json.write_text(json.dumps({"copy_gbs": bandwidth, "tflops": rate, "rows": results}, indent=1))


if __name__ == "__main__":
    main()
