"""Choosing a backend, refusing one, and what transformer-engine is asked for: on any machine, against a stand-in."""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from k3train.config.precision import PARTS, Precision, part_of, precision_of
from k3train.errors import ConfigError, EnvironmentError_
from k3train.model.backend import make_backend
from k3train.model.backend.local import Backend
from k3train.model.backend.te import TEBackend, TEProduct
from k3train.model.backend.te_library import _at_start, load
from k3train.model.backend.torch_gpu import TorchBackend
from k3train.model.build import build_chunks, chunks_of_rank, make_context
from k3train.model.context import PackedStream
from tests.model.golden_model import tiny_a

CUDA, CPU = torch.device("cuda"), torch.device("cpu")
H200, B200, A100 = ("NVIDIA H200", (9, 0)), ("NVIDIA B200", (10, 0)), ("NVIDIA A100", (8, 0))


class StandIn:
    """The calls of transformer-engine in plain torch; remembers which products were asked for in FP8."""

    version = "2.20.2"

    def __init__(self) -> None:
        self.low: list[tuple[int, ...]] = []
        self.grouped: list[tuple[int, ...]] = []
        self.together: list[int] = []
        self.attended: list[bool] = []
        self.cached = self.refreshed = 0

    def recipe(self, name: str) -> object:
        return name

    def linears(self, x: torch.Tensor, products: Sequence[TEProduct]) -> list[torch.Tensor]:
        self.together.append(len(products))
        for product in products:
            if product.recipe is not None:
                self.low.append(tuple(product.weight.shape))
            self.cached += product.caches
        return [F.linear(x, product.weight) for product in products]

    def refresh(self, products: Sequence[TEProduct]) -> None:
        self.refreshed += len(products)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        x32 = x.float()
        return (weight.float() * (x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + eps))).to(x.dtype)

    def attention(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_q: torch.Tensor, cu_k: torch.Tensor, max_q: int,
        max_k: int, scale: float, *, at_end: bool,
    ) -> torch.Tensor:  # fmt: skip
        self.attended.append(at_end)
        parts = []
        for a, b, c, d in zip(cu_q[:-1].tolist(), cu_q[1:].tolist(), cu_k[:-1].tolist(), cu_k[1:].tolist()):
            if b > a:
                assert at_end or b - a == d - c
                parts.append(Backend().suffix_attention(q[a:b], k[c:d], v[c:d], scale))
        return torch.cat(parts)

    def grouped_product(
        self, x: torch.Tensor, weight: torch.Tensor, counts: torch.Tensor, recipe: object
    ) -> torch.Tensor:
        self.grouped.append(tuple(weight.shape))
        return Backend().grouped_linear(x, weight, counts)


def choose(name: str, *, chip: tuple[str, tuple[int, int]] = H200, missing: str = "", **options: Any) -> Backend:
    def library() -> StandIn:
        if missing:
            raise EnvironmentError_(missing)
        return StandIn()

    return make_backend(name, options.pop("device", CUDA), load=library, chip=lambda _: chip, **options)


@pytest.mark.parametrize(
    ("name", "options", "kind"),
    [
        ("auto", {"device": CPU}, Backend),
        ("local", {}, Backend),
        ("torch", {}, TorchBackend),
        ("te", {}, TEBackend),
        ("auto", {}, TEBackend),
        ("auto", {"missing": "transformer-engine is not installed"}, TorchBackend),
        ("auto", {"dtype": torch.float32}, TorchBackend),
        ("auto", {"head_dims": (132, 128)}, TorchBackend),
        ("auto", {"precision": Precision("fp8_block")}, TEBackend),
        ("te", {"precision": Precision("mxfp8"), "chip": B200}, TEBackend),
    ],
    ids=str,
)
def test_the_best_backend_that_runs_is_chosen(name: str, options: dict[str, Any], kind: type[Backend]) -> None:
    assert type(choose(name, **options)) is kind


def test_falling_back_to_torch_says_that_it_is_slower_and_why() -> None:
    notice = choose("auto", missing="transformer-engine is not installed").notice
    assert "slower" in notice and "transformer-engine is not installed" in notice


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("te", {"device": CPU}, ["needs a GPU", "model.backend=auto"]),
        ("auto", {"device": CPU, "precision": Precision("fp8_block")}, ["fp8_block", "train.precision=auto"]),
        ("te", {"missing": "it is not installed"}, ["not installed", "model.backend=torch"]),
        ("te", {"precision": Precision("mxfp8")}, ["Blackwell", "H200", "9.0", "train.precision=fp8_block"]),
        ("te", {"precision": Precision("fp8_block"), "chip": A100}, ["Hopper", "A100", "train.precision=bf16"]),
        ("torch", {"precision": Precision("fp8_current")}, ["model.backend=te", "train.precision=bf16"]),
        ("te", {"dtype": torch.float32}, ["fp32", "model.backend=torch"]),
        ("te", {"head_dims": (192, 132)}, ["132", "192 and 128", "model.backend=local"]),
        ("te", {"head_dims": (320, 128)}, ["320", "model.mla.nope_dim", "model.backend=local"]),
        ("torch", {"head_dims": (320, 128)}, ["320", "256", "model.backend=local"]),
    ],
    ids=str,
)
def test_what_this_machine_cannot_run_is_refused_with_what_to_type(
    name: str, options: dict[str, Any], words: list[str]
) -> None:
    with pytest.raises(EnvironmentError_) as error:
        choose(name, **options)
    for word in words:
        assert word in str(error.value)


def broken(error: BaseException) -> Any:
    def make() -> Any:
        raise error

    return make


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"find": lambda _: None}, ["not installed", "pip install"]),
        ({"cores": lambda: ["12"], "cuda": "13.0"}, ["CUDA 12", "CUDA 13.0", "core_cu13"]),
        ({"make": broken(ImportError("x.so: undefined symbol: _ZN3c106detail14torchCheckFail"))}, ["another torch"]),
        ({"make": broken(OSError("libcublas.so.12: cannot open shared object file"))}, ["libcublas.so.12"]),
        ({"make": broken(AssertionError("package version mismatch. Found 2.1 and 2.20"))}, ["version mismatch"]),
    ],
    ids=["missing", "another CUDA", "another torch", "a library missing", "its own check"],
)
def test_a_library_that_cannot_load_is_named_with_its_reason(options: dict[str, Any], words: list[str]) -> None:
    settings = {"find": lambda _: object(), "cores": lambda: ["13"], "make": StandIn, "cuda": "13.0", **options}
    with pytest.raises(EnvironmentError_) as error:
        load(**settings)
    for word in words:
        assert word in str(error.value)


def test_a_library_that_fits_is_loaded() -> None:
    assert isinstance(load(find=lambda _: object(), cores=lambda: ["13"], make=StandIn, cuda="13.0"), StandIn)


def models(layout: Any, precision: Precision | None = None) -> Any:
    """tiny_a on the local backend and on the stand-in, both from the same seed."""
    built = []
    for backend in (Backend(), TEBackend(StandIn(), precision or Precision())):
        ctx = make_context(dataclasses.replace(tiny_a(), backend="local"), layout, torch.float32, CPU)
        ctx.backend = backend
        built += build_chunks(ctx, chunks_of_rank(ctx.model, layout.sizes, 0, None), seed=0)
    return built


def tensors(model: Any) -> dict[str, torch.Tensor]:
    return dict([*model.named_parameters(), *model.named_buffers()])


TOKENS = torch.randint(0, 128, (64,), generator=torch.Generator().manual_seed(0))


def loss(model: Any) -> torch.Tensor:
    cu = torch.tensor([0, 5, 6, 64], dtype=torch.int32)
    return model(TOKENS, TOKENS.roll(-1), PackedStream(cu, 64, 0)).mean()


def test_names_shapes_and_initial_values_are_those_of_the_local_backend(one_rank: Any) -> None:
    local, te = models(one_rank)
    ours, theirs = (tensors(m) for m in (local, te))
    assert list(ours) == list(theirs)
    for name, tensor in ours.items():
        assert torch.equal(tensor, theirs[name]), name
        assert tensor.k3 == theirs[name].k3, name
        for attribute in ("tensor_model_parallel", "partition_dim", "allreduce"):
            assert getattr(tensor, attribute) == getattr(theirs[name], attribute), (name, attribute)
    assert torch.allclose(loss(local), loss(te), atol=1e-5)


def test_weights_of_either_backend_load_into_the_other(one_rank: Any) -> None:
    from k3train.engine.sharded_state import model_state

    local, te = models(one_rank)
    there, here = (model_state([m], one_rank) for m in (te, local))
    assert list(there) == list(here)
    for name, shard in here.items():
        for attribute in ("dtype", "local_shape", "global_shape", "global_offset", "axis_fragmentations", "replica_id"):
            assert getattr(shard, attribute) == getattr(there[name], attribute), (name, attribute)
    with torch.no_grad():
        for tensor in te.parameters():
            tensor.add_(0.01)
        for name, tensor in tensors(local).items():
            tensor.copy_(tensors(te)[name])
    assert torch.allclose(loss(local), loss(te), atol=1e-5)
    assert {n for n, _ in te.named_modules()} == {n for n, _ in local.named_modules()}


def test_a_recipe_reaches_its_parts_and_no_other(one_rank: Any) -> None:
    parts = ("kda_gates", "router", "attention_residuals", "norms", "head", "output_gates")
    _, te = models(one_rank, Precision("fp8_block", parts))
    for name, module in te.named_modules():
        if isinstance(module, TEProduct):
            even = all(size % 16 == 0 for size in module.weight.shape)
            assert (module.recipe is not None) == (part_of(name) not in (*parts, None) and even), name
    loss(te).backward()
    assert te.ctx.backend.library.low and te.ctx.backend.library.grouped
    assert (128, 64) not in te.ctx.backend.library.low, "the head stays in bf16"
    assert "mla_latents (24, 64)" in te.ctx.backend.notice, "24 is no multiple of 16, and the run says so"


def test_experts_listed_among_the_bf16_parts_stay_there(one_rank: Any) -> None:
    _, te = models(one_rank, Precision("fp8_block"))
    loss(te).backward()
    assert te.ctx.backend.library.low and not te.ctx.backend.library.grouped


def test_products_of_one_tensor_are_asked_for_together(one_rank: Any) -> None:
    """KDA: q, k, v, g and the gates' b and f_a; full attention: q_a, kv_a and g; an MLP: gate and up, and with experts the
    projection into their width."""
    _, te = models(one_rank)
    loss(te)
    library, found = te.ctx.backend.library, Counter(te.ctx.backend.library.together)
    kinds = Counter(layer.kind for layer in te.layers.values())
    sparse = sum(hasattr(layer, "moe") for layer in te.layers.values())
    assert found[6] == kinds["K"] and found[3] == kinds["F"] + sparse and found[2] == len(te.layers) - sparse
    assert sum(library.together) == sum(isinstance(m, TEProduct) for n, m in te.named_modules() if n != "lm_head")


def test_quantised_weights_are_kept_when_asked(one_rank: Any) -> None:
    _, plain = models(one_rank, Precision("fp8_block"))
    _, asked = models(one_rank, Precision("fp8_block", cache_weights=True))
    losses = [loss(model) for model in (plain, asked)]
    assert torch.allclose(*losses, atol=1e-6)
    without, library = plain.ctx.backend.library, asked.ctx.backend.library
    low = [m for m in asked.modules() if isinstance(m, TEProduct) and m.recipe is not None]
    assert not without.cached and len(library.low) == len(without.low) == library.cached == len(low)
    asked.ctx.backend.weights_changed()
    assert library.refreshed == len(low)
    losses[1].backward()
    assert "once a step" in asked.ctx.backend.notice


def test_every_product_of_the_model_belongs_to_a_part(one_rank: Any) -> None:
    _, te = models(one_rank)
    products = {n for n, m in te.named_modules() if isinstance(m, TEProduct)} - {"lm_head"}
    found = {part_of(n) for n in products} | {"experts"}
    assert None not in found
    assert found == set(PARTS)


@pytest.mark.parametrize(
    ("parts", "word"),
    [(["kda_gate"], "kda_gates"), (["head"], "router"), (["xyz", "router"], "parts are")],
)
def test_parts_that_do_not_exist_or_cannot_leave_bf16_are_refused(parts: list[str], word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        precision_of("fp8_block", parts)


def test_keys_that_lie_inside_a_larger_tensor_get_a_storage_of_their_own() -> None:
    """transformer-engine takes no keys and values that are contiguous and do not begin their storage."""
    whole = torch.arange(24.0).view(6, 4).requires_grad_()
    for part in (whole[2:5], whole[:, 1:3]):
        got = _at_start(part)
        assert got.equal(part) and got.is_contiguous() and got.storage_offset() == 0
    first = whole[:3]
    assert _at_start(first) is first
    _at_start(whole[2:5]).sum().backward()
    assert whole.grad is not None and whole.grad.sum(1).tolist() == [0, 0, 4, 4, 4, 0]


@pytest.mark.parametrize(
    ("lengths", "calls"),
    [
        ([(5, 9), (1, 1), (4, 4), (3, 3)], [True, False]),
        ([(5, 9)], [True]),
        ([(5, 5), (1, 1), (7, 7)], [False]),
    ],
    ids=["the first began before", "one that began before", "none began before"],
)
def test_only_a_document_that_began_before_its_queries_is_aligned_with_its_last_keys(
    lengths: list[tuple[int, int]], calls: list[bool]
) -> None:
    queries, keys = (sum(sizes) for sizes in zip(*lengths))
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(n, 2, 4, generator=generator) for n in (queries, keys, keys)]
    # two empty documents fill up
    cu_q, cu_k = (
        torch.tensor([0, *itertools.accumulate(sizes), sum(sizes), sum(sizes)], dtype=torch.int32)
        for sizes in zip(*lengths)
    )
    backend, found = TEBackend(StandIn(), Precision()), []
    for one in (Backend(), backend):
        leaves = [x.clone().requires_grad_() for x in inputs]
        out = one.suffixes_attention(*leaves, cu_q, cu_k, lengths, 0.5)
        out.square().sum().backward()
        found.append([out.detach(), *(x.grad for x in leaves)])
    for ours, theirs in zip(*found):
        torch.testing.assert_close(ours, theirs)
    assert backend.library.attended == calls


def test_documents_that_only_the_device_knows_attend_as_those_that_the_host_knows() -> None:
    """One that began before the block, one of one token, whole ones; empty ones at both ends; and keys that begin later."""
    lengths = [(5, 9), (1, 1), (4, 4), (3, 3)]
    q, k, v = (torch.randn(n, 2, 4, generator=torch.Generator().manual_seed(i)) for i, n in enumerate((13, 17, 17)))
    cu_q = torch.tensor([0, 0, 0, 5, 6, 6, 10, 13, 13], dtype=torch.int32)
    cu_k = torch.tensor([0, 0, 0, 9, 10, 10, 14, 17, 17], dtype=torch.int32)
    want = Backend().suffixes_attention(q, k, v, cu_q, cu_k, lengths, 0.5)
    before = torch.full((6, 2, 4), 1e4)
    got = Backend().suffixes_attention(q, torch.cat([before, k]), torch.cat([before, v]), cu_q, cu_k + 6, 1 << 20, 0.5)
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize(
    ("bounds", "length", "expected"),
    [
        (None, 64, 64),
        (None, 0, 128),
        ([0, 128], 64, 64),
        ([0, 20, 53, 128], 0, 128),
        ([0, 20, 53, 64, 96, 128], 64, 64),
        ([0, 20, 40, 60, 80, 100, 120, 128], 64, 32),
        ([0, 32, 64, 64, 96, 128], 64, 32),
        (list(range(129)), 64, 1),
    ],
)
def test_the_longest_document_is_bounded_by_a_power_of_two(
    bounds: list[int] | None, length: int, expected: int
) -> None:
    cu = torch.tensor(bounds or [0, 128], dtype=torch.int32)
    assert PackedStream(cu, 128, length, bounds=bounds).longest() == expected


def test_the_longest_piece_is_bounded_apart_for_queries_and_keys() -> None:
    assert Backend.longest([(3, 700), (16, 16), (9, 40)], 28, 756) == (16, 1024)
    assert Backend.longest(1000, 28, 756) == (28, 756)
    assert Backend.longest(64, 28, 756) == (28, 64)
