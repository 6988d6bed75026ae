"""The model, the data and the one function that trains them, for tests that compare parallel layouts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from k3train.config.schema import (
    BalancingConfig,
    Config,
    KDAConfig,
    MLAConfig,
    ModelConfig,
    MoEConfig,
    OptimConfig,
    RunConfig,
    TrainConfig,
)
from k3train.engine.megatron import MegatronEngine
from k3train.model.parameters import ParameterSpec, draw, shard
from k3train.parallel import layout as layouts

SEQUENCE, MICRO, GLOBAL = 32, 2, 8  # tokens a sequence, sequences a micro-batch, sequences a step
SEED = 3
GAINS = {
    "embedding.weight": 10.0, "attention.q_proj.weight": 3.0, "attention.k_proj.weight": 3.0,
    "attention.v_proj.weight": 3.0, "experts.w1": 3.0, "experts.w3": 3.0,
}  # fmt: skip


def tiny_model() -> ModelConfig:
    """Nine layers in blocks of four with an irregular tail, every mechanism on."""
    return ModelConfig(
        name="tiny", vocab_size=64, hidden_size=32, pattern="KKKF*2 F", dense_hidden=48, residual_block=4,
        init_std=0.1, norm_eps=5e-2, kda=KDAConfig(heads=4, head_dim=8),
        mla=MLAConfig(heads=4, q_lora_rank=12, kv_lora_rank=8, nope_dim=8, shared_dim=4, v_dim=8, latent_eps=1e-2),
        moe=MoEConfig(experts=8, top_k=2, shared_experts=2, expert_hidden=32, latent=32, balancing=BalancingConfig()),
    )  # fmt: skip


def tiny_config(overrides: dict[str, Any] | None = None, seed: int = SEED) -> Config:
    """A whole configuration; `overrides` are dotted keys."""
    config = Config(
        run=RunConfig(name="tiny", seed=seed), model=tiny_model(),
        # an epsilon of the size of the gradients keeps Adam from blowing rounding noise up to whole steps
        optim=OptimConfig(lr=3e-4, eps=1e-3, clip_grad=1.0),
        train=TrainConfig(seq_length=SEQUENCE, micro_batch=MICRO, global_batch=GLOBAL, precision="fp32"),
    )  # fmt: skip
    for key, value in (overrides or {}).items():
        *path, last = key.split(".")
        node: Any = config
        for name in path:
            node = getattr(node, name)
        assert hasattr(node, last), key
        setattr(node, last, value)
    return config


def sample(index: int, seed: int, length: int = SEQUENCE, vocabulary: int = 64) -> tuple[torch.Tensor, list[int]]:
    """Global sample `index`: tokens int64 [length + 1] and the starts of its documents (some of one token)."""
    generator = torch.Generator().manual_seed(1000 * seed + index)
    tokens = torch.randint(0, vocabulary, (length + 1,), generator=generator)
    count = int(torch.randint(0, 4, (1,), generator=generator))
    cuts = torch.randint(1, length, (count,), generator=generator).tolist()
    if index % 3 == 0:
        cuts += [length // 2, length // 2 + 1]
    return tokens, sorted({0, *cuts})


def micro_batch(indices: list[int], seed: int, length: int = SEQUENCE) -> dict[str, torch.Tensor]:
    """The samples end to end as one packed stream."""
    tokens, labels, mask, starts = [], [], [], []
    for place, index in enumerate(indices):
        whole, begins = sample(index, seed, length)
        tokens.append(whole[:-1])
        labels.append(whole[1:])
        keep = torch.ones(length)
        keep[[b - 1 for b in begins[1:]]] = 0.0  # the last token of a document has its label in the next one
        mask.append(keep)
        starts += [place * length + b for b in begins]
    return {
        "tokens": torch.cat(tokens), "labels": torch.cat(labels), "loss_mask": torch.cat(mask),
        "cu_seqlens": torch.tensor([*starts, length * len(indices)], dtype=torch.int32),
    }  # fmt: skip


def batches(config: Config, layout: layouts.Layout, step: int, seed: int) -> Iterator[dict[str, torch.Tensor]]:
    """This rank's micro-batches of a step, by global sample index."""
    train, dp, rank = config.train, layout.sizes.data, layout.dp.rank()
    for m in range(train.global_batch // (train.micro_batch * dp)):
        first = step * train.global_batch + (m * dp + rank) * train.micro_batch
        yield micro_batch(list(range(first, first + train.micro_batch)), seed, train.seq_length)


@torch.no_grad()
def perturb(engine: MegatronEngine, seed: int) -> None:
    """Give everything that starts at zero or one a value of its own, so that no gradient vanishes by symmetry.

    A norm divides by the size of what it reads, so a narrow model with small weights blows rounding up from layer to
    layer. What stands in front of a norm is scaled up here (`GAINS`), so that layouts can be told apart from rounding.
    """
    for model in engine.models:
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            spec: ParameterSpec | None = getattr(tensor, "k3", None)
            for ending, gain in GAINS.items():
                if name.endswith(ending):
                    tensor.mul_(gain)
            if spec is None or spec.init not in ("zeros", "ones"):
                continue
            std = 0.02 if name.endswith("router.bias") else 0.2
            whole = draw(f"perturb.{name}", ParameterSpec(spec.shape, std=std), seed, torch.device("cpu"))
            whole += 1.0 if spec.init == "ones" else 0.0
            tensor.copy_(shard(whole, spec, engine.layout))
    engine.optimizer.reload_model_params()


def make_engine(sizes: dict[str, Any], overrides: dict[str, Any] | None = None, seed: int = SEED) -> MegatronEngine:
    """Groups, model, optimizer and perturbation. `sizes` are fields of `Sizes`; sequence parallelism follows tensor."""
    import torch.distributed as dist

    config = tiny_config(overrides, seed)
    for name, value in sizes.items():
        setattr(config.parallel, name, value)
    whole = layouts.sizes_from_config(config.parallel, dist.get_world_size())
    layout = layouts.initialize(whole, timeout_minutes=1)
    engine = MegatronEngine(config, layout, torch.device("cpu"))
    perturb(engine, seed)
    return engine
