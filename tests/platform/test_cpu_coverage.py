"""Reads the pinned megatron-core and lists every use of a GPU that the CPU adapter answers.

An upgrade that asks for the GPU in a new way fails here, with the file and the name, before it fails in a schedule.
"""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
from collections import defaultdict
from pathlib import Path

import pytest

from k3train.platform import cpu

# Parts of megatron-core that k3train never loads, or only beside a GPU (transformer-engine, CUDA graphs, offload).
ELSEWHERE = (
    "distributed/fsdp", "distributed/torch_fully_sharded_data_parallel", "inference", "export", "resharding",
    "post_training", "extensions", "ssm", "quantization", "models/multimodal", "models/mimo", "models/audio",
    "models/hybrid", "models/retro", "models/vision", "models/T5", "models/bert", "models/mamba",
    "transformer/experimental_attention_variant", "transformer/custom_layers", "transformer/cuda_graph",
    "transformer/fsdp_dtensor_checkpoint", "transformer/moe/fused_a2a", "transformer/moe/paged_stash",
    "tensor_parallel/inference_layers", "pipeline_parallel/fine_grained_activation_offload",
    "pipeline_parallel/bridge_communicator", "pipeline_parallel/hybrid_cp_schedule",
    "optimizer/cpu_offloading", "optimizer/optimizer_cuda_graph",
    "full_cuda_graph", "nccl_allocator", "energy_monitor", "fault_injector", "msc_utils", "fp8_utils", "fp4_utils",
    "fusions/fused_indices_converter", "fusions/fused_mhc_kernels",
)  # fmt: skip

# Uses of torch.cuda that need no cover, and why.
NEEDS_NO_COVER = {
    "is_available": "answers False, which is true",
    "FloatTensor": "a type, listed beside its CPU twin",
    "HalfTensor": "a type, listed beside its CPU twin",
    "BFloat16Tensor": "a type, listed beside its CPU twin",
    "device": "a type; entered only under torch older than this one",
    "amp.custom_fwd": "only under torch older than this one",
    "amp.custom_bwd": "only under torch older than this one",
    "CUDAGraph": "only with use_cudagraphable_rng",
    "get_device_capability": "only in the hybrid-ep dispatcher",
    "OutOfMemoryError": "an exception type, which exists here too",
    "temperature": "only to report a straggling GPU",
    "power_draw": "only to report a straggling GPU",
    "utilization": "only to report a straggling GPU",
    "clock_rate": "only to report a straggling GPU",
}


def core() -> Path:
    spec = importlib.util.find_spec("megatron")
    assert spec is not None and spec.submodule_search_locations is not None
    return Path(next(iter(spec.submodule_search_locations))) / "core"


def dotted(node: ast.AST) -> str:
    """`torch.cuda.random.get_rng_state` of an attribute chain, '' of anything else."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return ""


def is_cuda(node: ast.AST) -> bool:
    """True for "cuda", torch.device("cuda") and torch.cuda.current_device()."""
    if isinstance(node, ast.Constant):
        return isinstance(node.value, str) and node.value.startswith("cuda")
    if isinstance(node, ast.Call) and dotted(node.func) == "torch.device":
        return bool(node.args) and is_cuda(node.args[0])
    return isinstance(node, ast.Call) and dotted(node.func) == "torch.cuda.current_device"


def sources() -> list[tuple[str, ast.Module]]:
    root = core()
    files = [(str(path.relative_to(root)), path) for path in sorted(root.rglob("*.py"))]
    return [(name, ast.parse(path.read_text())) for name, path in files if not name.startswith(ELSEWHERE)]


@pytest.fixture(scope="module")
def trees() -> list[tuple[str, ast.Module]]:
    found = sources()
    assert len(found) > 150, "the pinned megatron-core was not found whole"
    return found


def test_the_megatron_core_read_here_is_the_pinned_one() -> None:
    assert importlib.metadata.version("megatron-core") == "0.19.2"


def test_every_torch_cuda_name_that_megatron_uses_is_covered(trees: list[tuple[str, ast.Module]]) -> None:
    used: dict[str, set[str]] = defaultdict(set)
    for name, tree in trees:
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and (path := dotted(node)).startswith("torch.cuda."):
                used[path.removeprefix("torch.cuda.")].add(f"{name}:{node.lineno}")
            if isinstance(node, ast.ImportFrom) and node.module == "torch.cuda":
                for alias in node.names:
                    used[alias.name].add(f"{name}:{node.lineno}")
    covered = fresh_cover()
    # An attribute chain is walked with all its prefixes; a prefix of a covered name is no use of its own.
    prefixes = {path.rpartition(".")[0] for path in used} | {"Stream.priority_range"}
    missing = {
        path: sorted(where)
        for path, where in used.items()
        if path not in covered and path not in NEEDS_NO_COVER and path not in prefixes
    }
    assert not missing, f"not answered on a machine without a GPU: {missing}"
    stale = set(NEEDS_NO_COVER) - set(used)
    assert not stale, f"megatron-core no longer uses {sorted(stale)}; take them off the list"
    assert {"current_device", "current_stream", "synchronize", "_lazy_call", "get_rng_state", "Event"} <= set(used)


def fresh_cover() -> set[str]:
    """The names the adapter replaces; read from its source's table when this machine has a GPU and installs nothing."""
    if cpu.install():
        return set(cpu.COVERED)
    pytest.skip("this machine has a GPU; the adapter replaces nothing here")


def test_every_call_with_device_cuda_goes_through_a_covered_factory(trees: list[tuple[str, ast.Module]]) -> None:
    """`x.to(device=current_device())` needs no cover: the answer is the CPU."""
    literal: dict[str, set[str]] = defaultdict(set)
    for name, tree in trees:
        for node in ast.walk(tree):
            if not isinstance(node, ast.Call):
                continue
            for keyword in node.keywords:
                if keyword.arg == "device" and isinstance(keyword.value, ast.Constant) and is_cuda(keyword.value):
                    literal[dotted(node.func)].add(f"{name}:{node.lineno}")
    allowed = {f"torch.{name}" for name in cpu.FACTORIES} | {"torch.cuda.Stream"}
    missing = {function: sorted(where) for function, where in literal.items() if function not in allowed}
    assert not missing, f'calls with device="cuda" that the adapter does not send to the CPU: {missing}'
    assert {"torch.zeros", "torch.tensor", "torch.ones"} <= set(literal)


def test_every_call_that_pins_memory_goes_through_a_covered_factory(trees: list[tuple[str, ast.Module]]) -> None:
    pinning: dict[str, set[str]] = defaultdict(set)
    for name, tree in trees:
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and any(keyword.arg == "pin_memory" for keyword in node.keywords):
                pinning[dotted(node.func)].add(f"{name}:{node.lineno}")
    # dist_checkpointing/strategies/torch.py copies `pin_memory` from a tensor, which is never pinned here.
    unguarded = {f: sorted(w) for f, w in pinning.items() if f.removeprefix("torch.") not in cpu.FACTORIES}
    assert set(unguarded) <= {"TensorProperties"}, unguarded
