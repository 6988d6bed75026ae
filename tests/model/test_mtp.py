"""Multi-token prediction against a plain statement of it, and where it must not be."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from k3train.config.compose import compose
from k3train.errors import ConfigError, LayoutError
from k3train.model.build import build_chunks, chunks_of_rank, make_context
from k3train.model.context import PackedStream
from k3train.model.k3 import K3Model
from k3train.model.mtp import further
from tests.parallel.tiny import SEED, batches, make_engine, micro_batch, tiny_model


def build(layout: Any, **switches: Any) -> K3Model:
    model = dataclasses.replace(tiny_model(), mtp_layers=1, **switches)
    ctx = make_context(model, layout, torch.float32, torch.device("cpu"))
    return build_chunks(ctx, chunks_of_rank(model, layout.sizes, 0, None), seed=1)[0].train()


def norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return weight * x * (x.square().mean(-1, keepdim=True) + eps).rsqrt()


def plain(
    w: dict[str, torch.Tensor], h: torch.Tensor, tokens: torch.Tensor, ends: list[int], model: Any
) -> torch.Tensor:
    """Mean-free statement, token by token where that is clearest: the summed cross entropy of the tokens after next."""
    mla, moe, eps = model.mla, model.moe, model.norm_eps
    total, begin = h.new_zeros(()), 0
    for end in ends:
        n = end - begin
        e = w["embedding.weight"][tokens[begin + 1 : end]]
        e = torch.cat([e, e.new_zeros(1, e.shape[1])])
        hidden, ahead = (
            norm(h[begin:end], w["mtp.hidden_norm.weight"], eps),
            norm(e, w["mtp.embedding_norm.weight"], eps),
        )
        x = torch.cat([hidden, ahead], -1) @ w["mtp.projection.weight"].T
        # Gated MLA
        y, a = (
            norm(x, w["mtp.input_norm.weight"], eps),
            {k[14:]: v for k, v in w.items() if k.startswith("mtp.attention.")},
        )
        q = norm(y @ a["q_a_proj.weight"].T, a["q_a_norm.weight"], mla.latent_eps) @ a["q_b_proj.weight"].T
        c, shared = (y @ a["kv_a_proj.weight"].T).split([mla.kv_lora_rank, mla.shared_dim], -1)
        kv = (norm(c, a["kv_a_norm.weight"], mla.latent_eps) @ a["kv_b_proj.weight"].T).view(n, mla.heads, -1)
        q, out = q.view(n, mla.heads, -1), []
        for t in range(n):
            k = torch.cat([kv[: t + 1, :, : mla.nope_dim], shared[: t + 1, None].expand(-1, mla.heads, -1)], -1)
            scores = torch.einsum("hd,shd->hs", q[t], k) * (mla.nope_dim + mla.shared_dim) ** -0.5
            out.append(torch.einsum("hs,shv->hv", scores.softmax(-1), kv[: t + 1, :, mla.nope_dim :]).reshape(-1))
        x = x + (torch.stack(out) * torch.sigmoid(y @ a["g_proj.weight"].T)) @ a["o_proj.weight"].T
        # LatentMoE
        y, m = (
            norm(x, w["mtp.post_attention_norm.weight"], eps),
            {k[8:]: v for k, v in w.items() if k.startswith("mtp.moe.")},
        )

        def unit(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
            limit = model.situ_linear_beta
            return (
                model.situ_beta
                * torch.tanh(gate / model.situ_beta)
                * torch.sigmoid(gate)
                * limit
                * torch.tanh(up / limit)
            )

        scores, z, mixed = torch.sigmoid(y @ m["router.weight"].T), y @ m["latent_down.weight"].T, []
        for t in range(n):
            chosen = scores[t].topk(moe.top_k).indices
            share = scores[t][chosen] / scores[t][chosen].sum()
            parts = [
                p * (unit(m["experts.w1"][i] @ z[t], m["experts.w3"][i] @ z[t]) @ m["experts.w2"][i].T)
                for p, i in zip(share, chosen)
            ]
            mixed.append(torch.stack(parts).sum(0))
        routed = norm(torch.stack(mixed), m["latent_norm.weight"], eps) @ m["latent_up.weight"].T
        s = {k: m[f"shared_experts.{k}_proj.weight"] for k in ("gate", "up", "down")}
        x = x + routed + unit(y @ s["gate"].T, y @ s["up"].T) @ s["down"].T
        logits = norm(x, w["mtp.final_norm.weight"], eps) @ w["lm_head.weight"].T
        if n > 2:  # the last two have no token after next
            total = total + F.cross_entropy(logits[: n - 2], tokens[begin + 2 : end], reduction="sum")
        begin = end
    return total


def test_loss_and_gradients_are_those_of_a_plain_statement(one_rank: Any) -> None:
    model = build(one_rank)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1 * torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel())))
    tokens, ends = torch.randint(0, 64, (24,), generator=torch.Generator().manual_seed(5)), [9, 10, 24]
    cu = torch.tensor([0, *ends], dtype=torch.int32)
    mask = torch.ones(24)
    mask[[e - 1 for e in ends]] = 0.0
    stream = PackedStream(cu, 24)
    stream.further = further(tokens.roll(-1), mask, stream, 0, 24)
    seen: list[torch.Tensor] = []
    model.mtp.register_forward_pre_hook(lambda _m, args: seen.append(args[0]))
    model(tokens, tokens.roll(-1), stream)
    assert stream.further.loss is not None and int(stream.further.mask.sum()) == 7 + 12
    stream.further.loss.backward()
    names = [n for n, _ in model.named_parameters() if n.startswith("mtp.")]
    got = {n: p.grad for n, p in model.named_parameters() if n in names}
    hidden = seen[0].detach().double().requires_grad_()
    w = {n: p.detach().double().requires_grad_() for n, p in model.named_parameters()}
    want = plain(w, hidden, tokens, ends, model.ctx.model)
    want.backward()
    assert float(stream.further.loss) == pytest.approx(float(want), rel=1e-5)
    for name in names:
        torch.testing.assert_close(got[name].double(), w[name].grad, rtol=1e-3, atol=1e-4 * float(w[name].grad.norm()))  # type: ignore[union-attr]
    assert model.layers["0"].attention.q_proj.weight.grad.any()  # the hidden state's gradient goes on


def test_the_loss_falls_and_evaluation_is_that_of_the_main_loss(one_rank: Any) -> None:
    settings = {"model.mtp_layers": 1, "model.mtp_loss_weight": 0.3, "train.global_batch": 4}
    engine = make_engine({}, settings)
    losses = [
        engine.step(batches(engine.config, one_rank, 0, SEED), 3e-3, 2).extra["train/mtp_loss"] for _ in range(12)
    ]
    assert losses[-1] < losses[0] - 0.3
    fresh, plain_engine = make_engine({}, settings), make_engine({}, {"train.global_batch": 4})
    held = [e.evaluate(batches(e.config, one_rank, 1, SEED), 2) for e in (fresh, plain_engine)]
    assert held[0] == held[1]


def test_targets_stay_inside_their_document(one_rank: Any) -> None:
    batch = micro_batch([0, 3], seed=2)
    stream = PackedStream(batch["cu_seqlens"], 64, 32)
    ahead = further(batch["labels"], batch["loss_mask"], stream, 0, 64)
    ids, tokens = stream.document_ids(), batch["tokens"]
    for t in range(64):
        inside = t + 1 < 64 and ids[t + 1] == ids[t]
        assert bool(ahead.within[t]) == inside
        if t + 2 < 64 and ids[t + 2] == ids[t]:
            assert ahead.mask[t] == 1 and ahead.labels[t] == tokens[t + 2]
        elif not inside:
            assert ahead.mask[t] == 0


@pytest.mark.parametrize(
    ("overrides", "error"),
    [
        (["parallel.pipeline=2", "model.attention_residuals=off"], LayoutError),
        (["engine=deepspeed"], ConfigError),
        (["parallel.tensor=2", "parallel.sequence=false"], LayoutError),
    ],
    ids=["a pipeline without attention residuals", "DeepSpeed", "tensor without sequence parallelism"],
)
def test_what_cannot_be_is_refused_by_name(overrides: list[str], error: type[Exception]) -> None:
    with pytest.raises(error, match="mtp_layers|sequence=true"):
        compose(["model.mtp_layers=1", *overrides])
