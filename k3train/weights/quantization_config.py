"""The `quantization_config` of an MXFP4 checkpoint, as compressed-tensors and the clients of Kimi K3 read it.

`format` stands at the top and in the group, because clients look at one or the other. Activations are null: weights of
4 bits, activations of 16. The ignore list is complete: the released one leaves out the residual-attention queries, the
latent projections and the router, and a client that builds those as Linear would look for packed weights there.
"""

from __future__ import annotations

from typing import Any

FORMAT = "mxfp4-pack-quantized"
IGNORE = (
    r"re:.*self_attn.*",
    r"re:.*shared_experts.*",
    r"re:.*mlp\.(gate|up|gate_up|down)_proj.*",
    r"re:.*lm_head.*",
    r"re:.*vision_tower.*",
    r"re:.*mm_projector.*",
    r"re:.*mlp_res_proj.*",
    r"re:.*self_attention_res_proj.*",
    r"re:.*output_attn_res_proj.*",
    r"re:.*routed_expert_(down|up)_proj.*",
    r"re:.*block_sparse_moe\.gate$",
)


def quantization_config() -> dict[str, Any]:
    """A fresh copy, in the keys and the order of the release."""
    weights: dict[str, Any] = {
        "actorder": None,
        "block_structure": None,
        "dynamic": False,
        "group_size": 32,
        "num_bits": 4,
        "observer": "minmax",
        "observer_kwargs": {},
        "scale_dtype": "torch.uint8",
        "strategy": "group",
        "symmetric": True,
        "type": "float",
        "zp_dtype": None,
    }
    group: dict[str, Any] = {
        "format": FORMAT,
        "input_activations": None,
        "output_activations": None,
        "targets": ["Linear"],
        "weights": weights,
    }
    return {
        "config_groups": {"group_0": group},
        "format": FORMAT,
        "global_compression_ratio": None,
        "ignore": list(IGNORE),
        "kv_cache_scheme": None,
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
    }
