"""What the ranks run: train the tiny model under a layout and report everything that a layout must not change."""

from __future__ import annotations

from typing import Any

from k3train.engine import gradients
from k3train.engine.megatron import MegatronEngine
from k3train.parallel.transport import StageLink
from tests.parallel.assemble import Piece, RankSeen
from tests.parallel.observe import Selections, pieces_of
from tests.parallel.tiny import SEED, batches, make_engine


def observed_steps(engine: MegatronEngine, steps: range, seed: int) -> list[RankSeen]:
    """Run `steps` and look at each as this rank sees it."""
    record = Selections(engine)
    captured: list[list[Piece]] = []
    real_step = engine.optimizer.step

    def step_and_look() -> Any:
        tokens = engine.sums[1].clamp(min=1.0)  # gradients are of the sum over them until the optimizer's step
        captured.append(pieces_of(engine, lambda p: (p.main_grad / tokens).to(p.main_grad.dtype)))
        return real_step()

    engine.optimizer.step = step_and_look
    seen = []
    for step in steps:
        source = batches(engine.config, engine.layout, step, seed)
        result = engine.step(source, engine.config.optim.lr, engine.micro_batches(engine.config.train.global_batch))
        assert not result.skipped
        chosen, gap = record.take()
        selections = {n: [(start, experts.numpy()) for start, experts in parts] for n, parts in chosen.items()}
        biases = {r.layer: r.bias.clone().numpy() for r in gradients.routers(engine.models)}
        load = None if result.load is None else result.load.numpy()
        numbers = (result.loss, result.tokens, result.grad_norm, load)
        updated = pieces_of(engine, lambda p: p)
        seen.append(RankSeen(*numbers, captured[-1], selections, gap, biases, result.extra, updated))
    engine.optimizer.step = real_step
    engine.ctx.probe = None
    return seen


def train(
    sizes: dict[str, Any], overrides: dict[str, Any] | None = None, steps: int = 3, seed: int = SEED,
    sabotage: str | None = None,
) -> list[RankSeen]:  # fmt: skip
    """Build and train. `sabotage` breaks one thing on purpose, to see that a test notices:

    "sum:NAME" leaves out the sum over tensor ranks of parameters whose names end so; "join" drops the gradients of
    sources that a rank kept for its next pipeline chunk.
    """
    engine = make_engine(sizes, overrides, seed)
    if sabotage == "join":
        for model in engine.models:
            if model.link is not None:
                _forget_leaves(model.link)
    elif sabotage is not None:
        ending = sabotage.removeprefix("sum:")
        params = [p for m in engine.models for n, p in m.named_parameters() if n.endswith(ending)]
        assert params and all(p.sum_over_tensor for p in params), f"{ending} is not summed in the first place"
        for p in params:
            p.sum_over_tensor = False
    return observed_steps(engine, range(steps), seed)


def _forget_leaves(link: StageLink) -> None:
    real = link.send

    def send(sources: list[Any]) -> Any:
        packed = real(sources)
        if link.kept:
            link.kept[-1] = [t.detach().requires_grad_() for t in link.kept[-1]]
        return packed

    link.send = send  # type: ignore[method-assign]
