"""Hugging Face `config.json` of Kimi K3 and Kimi Linear <-> our model configuration.

K3 nests the text backbone in `text_config`; Kimi Linear keeps the same keys at the root. Keys that a training
run decides and an inference client does not read (balancing, initialisation, backends) have no place there.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from k3train.config.schema import BalancingConfig, KDAConfig, MLAConfig, ModelConfig, MoEConfig, expand_pattern
from k3train.errors import ConfigError

# (our attribute path, their key): plain copies in both directions.
PLAIN_KEYS = (
    ("vocab_size", "vocab_size"),
    ("hidden_size", "hidden_size"),
    ("dense_hidden", "intermediate_size"),
    ("dense_layers", "first_k_dense_replace"),
    ("norm_eps", "rms_norm_eps"),
    ("init_std", "initializer_range"),
    ("mla.heads", "num_attention_heads"),
    ("mla.q_lora_rank", "q_lora_rank"),
    ("mla.kv_lora_rank", "kv_lora_rank"),
    ("mla.nope_dim", "qk_nope_head_dim"),
    ("mla.shared_dim", "qk_rope_head_dim"),
    ("mla.v_dim", "v_head_dim"),
    ("moe.experts", "num_experts"),
    ("moe.top_k", "num_experts_per_token"),
    ("moe.shared_experts", "num_shared_experts"),
    ("moe.expert_hidden", "moe_intermediate_size"),
    ("moe.renormalize", "moe_renormalize"),
    ("moe.routed_scale", "routed_scaling_factor"),
    ("moe.router_activation", "moe_router_activation_func"),
)
LINEAR_KEYS = (
    ("kda.heads", "num_heads"),
    ("kda.head_dim", "head_dim"),
    ("kda.conv_size", "short_conv_kernel_size"),
)
# What both formats fix, and what a client must find to agree.
FIXED: dict[str, Any] = {
    "moe_layer_freq": 1,
    "num_expert_group": 1,
    "topk_group": 1,
    "mla_use_nope": True,
    "num_nextn_predict_layers": 0,
    "tie_word_embeddings": False,
}
ACTIVATIONS = {"situ": "situ", "swiglu": "silu"}
LATENT_EPS = 1e-6  # epsilon of the two MLA latent norms in every published implementation; there is no key for it
MAX_POSITIONS = 1048576
POSITION_KEYS = {"kimi_linear": "model_max_length", "kimi_k3": "max_position_embeddings"}


@dataclass(frozen=True)
class SpecialTokens:
    """Token ids that a client needs to start, stop and pad."""

    bos: int | None = None
    eos: int | None = None
    pad: int | None = None


def format_of(model: ModelConfig, wanted: str = "auto") -> str:
    """The Hugging Face format to export to: `kimi_k3`, or `kimi_linear` for a model without K3's additions.

    Raises ConfigError when `wanted` (export.format) cannot describe the model, naming the key in the way.
    """
    common, linear = _obstacles(model)
    if common:
        raise ConfigError(f"no Hugging Face format describes this model: {common[0]}")
    if wanted == "auto":
        return "kimi_k3" if linear else "kimi_linear"
    if wanted == "kimi_linear" and linear:
        raise ConfigError(
            f"export.format=kimi_linear cannot describe this model: {linear[0]}; use export.format=kimi_k3"
        )
    if wanted not in ("kimi_k3", "kimi_linear"):
        raise ConfigError(f"export.format={wanted!r} is unknown; choose auto, kimi_k3 or kimi_linear")
    return wanted


def _obstacles(model: ModelConfig) -> tuple[list[str], list[str]]:
    """Reasons against any format, and reasons against Kimi Linear only."""
    common: list[str] = []
    if model.mixer != "kda":
        common.append(f"model.mixer={model.mixer}; only kda layers have published names")
    if model.attention_residuals == "full":
        common.append(
            "model.attention_residuals=full closes a block after every sublayer; block and off can be exported"
        )
    if "F" in expand_pattern(model.pattern, model.hybrid) and model.mla.latent_eps != LATENT_EPS:
        common.append(f"model.mla.latent_eps={model.mla.latent_eps}; clients use {LATENT_EPS} and have no key for it")
    linear = [
        f"{key}={value!r} (Kimi Linear has {fixed!r})"
        for key, value, fixed in (
            ("model.kda.decay_bound", model.kda.decay_bound, None),
            ("model.kda.output_gate", model.kda.output_gate, "low_rank"),
            ("model.mla.output_gate", model.mla.output_gate, False),
            ("model.moe.latent", model.moe.latent, None),
            ("model.attention_residuals", model.attention_residuals, "off"),
            ("model.activation", model.activation, "swiglu"),
            ("model.moe.shared_experts > 0", model.moe.shared_experts > 0, True),
        )
        if value != fixed
    ]
    return common, linear


def to_hf(
    model: ModelConfig,
    format: str = "auto",
    *,
    tokens: SpecialTokens | None = None,
    max_positions: int = MAX_POSITIONS,
) -> dict[str, Any]:
    """`config.json` of the model as a dictionary. Raises ConfigError when no format describes it."""
    format = format_of(model, format)
    tokens = tokens or SpecialTokens()
    ids = {"bos_token_id": tokens.bos, "eos_token_id": tokens.eos, "pad_token_id": tokens.pad}
    text: dict[str, Any] = {
        "architectures": ["KimiLinearForCausalLM"],
        "model_type": "kimi_linear",
        "dtype": "bfloat16",
        **ids,
        "hidden_act": ACTIVATIONS[model.activation],
        "num_hidden_layers": len(expand_pattern(model.pattern, model.hybrid)),
        "num_key_value_heads": model.mla.heads,
        "topk_method": "noaux_tc",
        "use_grouped_topk": True,
        POSITION_KEYS[format]: max_positions,
        "use_cache": True,
        **FIXED,
    }
    text |= {theirs: _get(model, ours) for ours, theirs in PLAIN_KEYS}
    linear: dict[str, Any] = {theirs: _get(model, ours) for ours, theirs in LINEAR_KEYS}
    pattern = expand_pattern(model.pattern, model.hybrid)
    linear["full_attn_layers"] = [i for i, kind in enumerate(pattern, 1) if kind == "F"]
    linear["kda_layers"] = [i for i, kind in enumerate(pattern, 1) if kind == "K"]
    text["linear_attn_config"] = linear
    if format == "kimi_linear":
        return text
    linear["gate_lower_bound"] = model.kda.decay_bound
    linear["use_full_rank_gate"] = model.kda.output_gate == "full"
    text |= {
        "mla_use_output_gate": model.mla.output_gate,
        "routed_expert_hidden_size": model.moe.latent,
        "latent_moe_use_norm": model.moe.latent_norm,
        "attn_res_block_size": model.residual_block if model.attention_residuals == "block" else None,
    }
    if model.activation == "situ":
        text |= {"activation_situ_beta": model.situ_beta, "activation_situ_linear_beta": model.situ_linear_beta}
    return {
        "architectures": ["KimiK3ForConditionalGeneration"],
        "model_type": "kimi_k3",
        "dtype": "bfloat16",
        **ids,
        "ignore_index": -100,
        "tie_word_embeddings": False,
        "text_config": text,
    }


def text_section(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of a config.json that describes the text backbone."""
    return config.get("text_config", config)


def format_from(config: Mapping[str, Any]) -> str:
    """`kimi_k3` or `kimi_linear`, from a config.json. Raises ConfigError for any other model."""
    kind = config.get("model_type")
    if kind not in ("kimi_k3", "kimi_linear"):
        raise ConfigError(f"model_type={kind!r} in config.json; this project reads kimi_k3 and kimi_linear")
    return str(kind)


def special_tokens(config: Mapping[str, Any]) -> SpecialTokens:
    """The token ids of a config.json."""
    text = text_section(config)
    get = lambda key: config.get(key, text.get(key))  # noqa: E731
    return SpecialTokens(get("bos_token_id"), get("eos_token_id"), get("pad_token_id"))


def from_hf(config: Mapping[str, Any], *, name: str = "imported") -> ModelConfig:
    """The model configuration of a config.json.

    Raises ConfigError naming the key: missing, of another model, or layer lists that are no partition of the layers.
    """
    format = format_from(config)
    text = text_section(config)
    if format == "kimi_k3" and "text_config" not in config:
        raise ConfigError("config.json: model_type kimi_k3 needs its text_config section")
    for key, value in FIXED.items():
        if text.get(key, value) != value:
            raise ConfigError(f"config.json: {key}={text[key]!r} is not supported; this architecture has {value!r}")
    linear = _need(text, "linear_attn_config")
    pattern = _pattern(_need(text, "num_hidden_layers"), linear)
    heads = _need(text, "num_attention_heads")
    if text.get("num_key_value_heads", heads) != heads:
        raise ConfigError(
            f"config.json: num_key_value_heads={text['num_key_value_heads']} with num_attention_heads={heads}; "
            "MLA gives every query head its own keys, so they must be equal"
        )
    activation = {theirs: ours for ours, theirs in ACTIVATIONS.items()}.get(_need(text, "hidden_act"))
    if activation is None:
        raise ConfigError(
            f"config.json: hidden_act={text['hidden_act']!r} is not one of {', '.join(ACTIVATIONS.values())}"
        )
    k3 = format == "kimi_k3"
    latent = text.get("routed_expert_hidden_size") if k3 else None
    block = text.get("attn_res_block_size") if k3 else None
    model = ModelConfig(
        name=name,
        pattern=compact_pattern(pattern),
        kda=KDAConfig(
            decay_bound=linear.get("gate_lower_bound") if k3 else None,
            output_gate="full" if k3 and linear.get("use_full_rank_gate", False) else "low_rank",
        ),
        mla=MLAConfig(output_gate=bool(k3 and text.get("mla_use_output_gate", False))),
        moe=MoEConfig(
            latent=latent,
            latent_norm=bool(latent is not None and text.get("latent_moe_use_norm", False)),
            balancing=BalancingConfig(),
        ),
        attention_residuals="off" if block is None else "block",
        residual_block=block or len(pattern),
        activation=activation,
        situ_beta=text.get("activation_situ_beta", ModelConfig.situ_beta),
        situ_linear_beta=text.get("activation_situ_linear_beta", ModelConfig.situ_linear_beta),
    )
    for ours, theirs in PLAIN_KEYS:
        optional = theirs in ("q_lora_rank", "initializer_range")
        value = text.get(theirs, _get(model, ours)) if optional else _need(text, theirs)
        _set(model, ours, None if theirs == "q_lora_rank" and theirs not in text else value)
    for ours, theirs in LINEAR_KEYS:
        _set(model, ours, _need(linear, theirs, "linear_attn_config."))
    return model


def compact_pattern(pattern: str) -> str:
    """Expanded layer letters in the short notation: "KKKFKKKFF" -> "KKKF*2 F"."""
    words: list[str] = []
    at = 0
    while at < len(pattern):
        end = pattern.find("F", at)
        word = pattern[at:] if end < 0 else pattern[at : end + 1]
        times = 1
        while pattern.startswith(word, at + times * len(word)):
            times += 1
        words.append(word if times == 1 else f"{word}*{times}")
        at += times * len(word)
    return " ".join(words)


def with_quantization(config: Mapping[str, Any], quantization: Mapping[str, Any] | None) -> dict[str, Any]:
    """A copy of a config.json with (None: without) a quantization_config, in the text section as K3 has it."""
    result = copy.deepcopy(dict(config))
    text = result.get("text_config", result)
    for section in (result, text):
        section.pop("quantization_config", None)
    if quantization is not None:
        text["quantization_config"] = copy.deepcopy(dict(quantization))
    return result


def _pattern(layers: int, linear: Mapping[str, Any]) -> str:
    full = set(_need(linear, "full_attn_layers", "linear_attn_config."))
    kda = set(_need(linear, "kda_layers", "linear_attn_config."))
    both, every = full & kda, set(range(1, layers + 1))
    if both:
        raise ConfigError(f"config.json: layers {sorted(both)} (1-based) are in kda_layers and in full_attn_layers")
    if full | kda != every:
        missing, extra = sorted(every - full - kda), sorted((full | kda) - every)
        what = f"layers {missing} are in neither list" if missing else f"layers {extra} do not exist"
        raise ConfigError(
            f"config.json: linear_attn_config must place every layer 1..{layers} "
            f"in kda_layers or full_attn_layers; {what}"
        )
    return "".join("F" if i in full else "K" for i in range(1, layers + 1))


def _need(section: Mapping[str, Any], key: str, where: str = "") -> Any:
    if key not in section:
        raise ConfigError(f"config.json: the key {where}{key} is missing")
    return section[key]


def _get(model: Any, path: str) -> Any:
    for name in path.split("."):
        model = getattr(model, name)
    return model


def _set(model: Any, path: str, value: Any) -> None:
    *parents, last = path.split(".")
    for name in parents:
        model = getattr(model, name)
    setattr(model, last, value)
