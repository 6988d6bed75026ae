"""The layout of rows that travel between ranks, kernels (interpreted without a GPU) and plain torch, against loops."""

from __future__ import annotations

import pytest
import torch

from k3kernels import routing
from k3kernels.routing import travel

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BACKENDS = ["torch", "triton"]
CASES = [(1, 4, 1, 2), (37, 6, 2, 3), (130, 32, 4, 4), (600, 8, 3, 1)]
IDS = [f"{t} tokens, {e} experts over {r} ranks, top {k}" for t, e, k, r in CASES]


def routes(tokens: int, experts: int, top_k: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(tokens + experts)
    scores = torch.rand(tokens, experts, generator=generator) + torch.linspace(0, 0.5, experts)  # some are chosen more
    return scores.topk(top_k, dim=-1).indices.to(DEVICE)


@pytest.mark.parametrize(("tokens", "experts", "top_k", "ranks"), CASES, ids=IDS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_slots_hold_the_sorted_copies_of_each_rank_and_say_what_they_hold(
    backend: str, tokens: int, experts: int, top_k: int, ranks: int
) -> None:
    chosen, local, sender = routes(tokens, experts, top_k), experts // ranks, ranks - 1
    order = routing.make_permutation(chosen, experts, backend=backend)
    room = tokens * min(top_k, local)
    fullest = torch.tensor([3], dtype=torch.int32, device=DEVICE)
    slots, keys = travel.make_slots(order, chosen, ranks, sender, room, fullest, backend=backend)
    flat = chosen.reshape(-1).tolist()
    for r in range(ranks):
        mine = sorted((c for c in range(len(flat)) if flat[c] // local == r), key=lambda c: (flat[c], c))
        run = slice(r * room, r * room + len(mine))
        assert slots.source[run].tolist() == mine
        base = sender * (local + 1)
        wanted = [base + flat[c] % local for c in mine] + [base + local] * (room - len(mine))
        assert keys[r * room : (r + 1) * room].tolist() == wanted
        assert int(slots.counts[r]) == len(mine)
    assert slots.source[slots.place.long()].tolist() == list(range(tokens * top_k))
    assert 0 <= int(slots.source.min()) <= int(slots.source.max()) < tokens * top_k
    assert int(fullest) == max(3, int(slots.counts.max()))


@pytest.mark.parametrize("backend", BACKENDS)
def test_too_few_slots_are_told_and_point_nowhere_outside(backend: str) -> None:
    chosen = routes(130, 32, 4)
    order = routing.make_permutation(chosen, 32, backend=backend)
    fullest = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    slots, keys = travel.make_slots(order, chosen, 4, 0, 60, fullest, backend=backend)
    wanted = [int((chosen // 8 == r).sum()) for r in range(4)]
    assert int(fullest) == max(wanted) > 60
    assert slots.counts.tolist() == [min(n, 60) for n in wanted]
    assert 0 <= int(slots.place.min()) <= int(slots.place.max()) < 240
    fits = [slots.source[int(p)] == c for c, p in enumerate(slots.place)]
    assert int(sum(fits)) == int(slots.counts.sum())


@pytest.mark.parametrize(("tokens", "experts", "top_k", "ranks"), CASES, ids=IDS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_arrived_rows_are_sorted_by_expert_then_sender_with_empty_ones_last(
    backend: str, tokens: int, experts: int, top_k: int, ranks: int
) -> None:
    """Of rank 0, which hears from every rank what that one's own tokens chose."""
    local, room = experts // ranks, tokens * min(top_k, experts // ranks) + 3
    arrived = []
    for sender in range(ranks):
        chosen = (routes(tokens, experts, top_k) + 5 * sender) % experts
        order = routing.make_permutation(chosen, experts, backend=backend)
        arrived.append(travel.make_slots(order, chosen, ranks, sender, room, backend=backend)[1][:room])
    keys = torch.cat(arrived)
    order = travel.make_arrival(keys, ranks, local, backend=backend)
    expert = (keys.long() % (local + 1)).tolist()
    wanted = sorted(range(len(expert)), key=lambda row: (expert[row], row))
    assert order.source.tolist() == wanted
    assert order.place[order.source.long()].tolist() == list(range(len(expert)))
    assert order.counts.tolist() == [expert.count(e) for e in range(local)]


@pytest.mark.parametrize("backend", BACKENDS)
def test_nothing_arrives_where_nothing_was_sent(backend: str) -> None:
    order = travel.make_arrival(torch.empty(0, device=DEVICE), 2, 3, backend=backend)
    assert order.counts.tolist() == [0, 0, 0]
    assert order.source.numel() == 0


def test_keys_of_exact_rows_are_those_of_the_slots_without_the_empty_ones() -> None:
    chosen = routes(37, 6, 2)
    order = routing.make_permutation(chosen, 6)
    keys = travel.make_slots(order, chosen, 3, 1, 80)[1]
    assert travel.send_keys(order, chosen, 3, 1).tolist() == [k for k in keys.tolist() if k % 3 != 2]


@pytest.mark.parametrize(
    ("ranks", "room", "message"), [(4, 8, "ranks: 6 experts"), (3, 0, "room: must be above 0")],
    ids=["experts that do not divide", "no room"],
)  # fmt: skip
def test_wrong_arguments_are_refused_by_name(ranks: int, room: int, message: str) -> None:
    chosen = routes(37, 6, 2)
    with pytest.raises(ValueError, match=message):
        travel.make_slots(routing.make_permutation(chosen, 6), chosen, ranks, 0, room)
