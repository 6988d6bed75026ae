"""MXFP4 against the golden bytes, against compressed-tensors itself, and against its own rules."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from k3train.errors import LayoutError, WeightsError
from k3train.weights import mxfp4
from k3train.weights.mxfp4 import MXFP4ScaleWarning, Packed, quantise
from k3train.weights.quality import measure

GOLDEN = Path(__file__).parents[1] / "golden" / "mxfp4" / "mxfp4_golden.safetensors"
CASES = ("gauss_f32", "gauss_bf16", "t3_f32", "kimi_w1_mini_bf16", "ties_f32", "edge_f32", "edge_bf16")
REFUSED = {"nan", "inf", "neginf", "3e38_overflows_rounding"}

pytestmark = pytest.mark.filterwarnings("ignore::k3train.weights.mxfp4.MXFP4ScaleWarning")


@pytest.fixture(scope="module")
def golden() -> dict[str, torch.Tensor]:
    with safe_open(GOLDEN, "pt") as file:
        return {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 - safe_open is not a mapping


@pytest.fixture(scope="module")
def edge_names() -> list[str]:
    with safe_open(GOLDEN, "pt") as file:
        return json.loads(file.metadata()["meta"])["edge_names"]


def golden_input(golden: dict[str, torch.Tensor], case: str) -> torch.Tensor:
    bits = golden.get(f"{case}.input_bf16bits")
    return golden[f"{case}.input_f32"] if bits is None else bits.view(torch.bfloat16)


@pytest.mark.parametrize("case", CASES)
def test_every_golden_row_has_the_bytes_of_compressed_tensors(golden, edge_names, case):
    weight = golden_input(golden, case)
    refused = []
    for row, values in enumerate(weight):
        where = edge_names[row] if "edge" in case else f"row {row}"
        packed, scale = golden[f"{case}.packed"][row], golden[f"{case}.scale"][row]
        # The library stores a group that it cannot represent as scale 127 with zero codes: a silently dead group.
        if not (packed & 0x77).any() and (scale == 127).all():
            refused.append(where)
            with pytest.raises(WeightsError, match="experts.7.w1.*row 0"):
                quantise(values.unsqueeze(0), name="experts.7.w1")
            continue
        got = quantise(values.unsqueeze(0))
        assert torch.equal(got.scale[0], scale), where
        assert torch.equal(got.packed[0], packed), where
        assert torch.equal(got.dequantise()[0].view(torch.int16), golden[f"{case}.dequant_bf16bits"][row]), where
    # In bfloat16 the largest float32 amax that still fits rounds up to 1.75 * 2**127.
    expected = {"edge_f32": REFUSED, "edge_bf16": REFUSED | {"largest_ok"}}.get(case, set())
    assert set(refused) == expected


def test_decoding_is_exact_for_every_code_and_every_scale_byte(golden):
    packed, scale = golden["decode_table.packed"], golden["decode_table.scale"]
    got = mxfp4.dequantise(packed[:255], scale[:255])
    want = golden["decode_table.dequant_bf16bits"][:255].view(torch.bfloat16)
    assert torch.equal(got, want)
    with pytest.raises(WeightsError, match="w3.*255.*row 0, group 0"):
        mxfp4.dequantise(packed[255:], scale[255:], name="w3")


def compressed_tensors_bytes(weight: torch.Tensor) -> Packed:
    """Quantise through the library's own public compressor."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationScheme
    from compressed_tensors.quantization.quant_args import QuantizationArgs
    from compressed_tensors.quantization.utils import calculate_qparams

    args = QuantizationArgs(
        num_bits=4, type="float", strategy="group", group_size=32, symmetric=True, scale_dtype=torch.uint8
    )
    low, high = weight.unflatten(-1, (-1, 32)).aminmax(dim=-1)
    scale, _ = calculate_qparams(low, high, args)
    compressor = BaseCompressor.get_value_from_registry("mxfp4-pack-quantized")
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    out = compressor.compress({"weight": weight, "weight_scale": scale}, scheme)
    return Packed(out["weight_packed"], out["weight_scale"])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bfloat16", "float32"])
@pytest.mark.parametrize(
    "spread", [0.0, 6.0, 40.0], ids=["one magnitude", "many magnitudes", "beyond bfloat16 precision"]
)
def test_random_weights_have_the_bytes_of_the_installed_compressed_tensors(dtype, spread):
    g = torch.Generator().manual_seed(int(spread) + 1)
    size = torch.exp2(spread * torch.randn(64, 224, generator=g)).clamp(max=2.0**100)
    weight = (torch.randn(64, 224, generator=g) * size).to(dtype)
    ours, theirs = quantise(weight), compressed_tensors_bytes(weight)
    assert torch.equal(ours.scale, theirs.scale)
    assert torch.equal(ours.packed, theirs.packed)


def brute_force_codes(values: torch.Tensor) -> torch.Tensor:
    """Nearest grid point by search in float64, ties to the even code."""
    grid = torch.tensor(mxfp4.MAGNITUDES, dtype=torch.float64)
    distance = (values.double().abs().unsqueeze(-1) - grid).abs()
    best = distance.min(-1, keepdim=True).values
    even_first = torch.tensor([0, 2, 4, 6, 1, 3, 5, 7])
    pick = even_first[(distance[..., even_first] == best).int().argmax(-1)]
    return pick.to(torch.uint8) | ((values < 0).to(torch.uint8) << 3)


def test_elements_round_to_the_nearest_code_and_ties_to_the_even_one():
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    near = torch.cat([torch.nextafter(ties, torch.tensor(9.0)), torch.nextafter(ties, torch.tensor(0.0)), ties])
    values = torch.cat([near, -near, torch.linspace(-7.9, 7.9, 2001)])
    assert torch.equal(mxfp4.round_codes(values), brute_force_codes(values))


def test_the_mse_rule_is_the_better_of_floor_and_floor_plus_one():
    g = torch.Generator().manual_seed(3)
    weight = torch.randn(256, 256, generator=g)
    groups = weight.unflatten(-1, (-1, 32))
    floor = groups.abs().amax(-1).log2().floor().int() + 125

    def error(byte: torch.Tensor) -> torch.Tensor:
        scale = torch.exp2(byte.double() - 127).unsqueeze(-1)
        value = mxfp4.code_values(brute_force_codes(groups / scale), torch.float64) * scale
        return (value - groups.double()).square().sum(-1)

    best = torch.where(error(floor) < error(floor + 1), floor, floor + 1)
    best = torch.where(error(floor) == error(floor + 1), mxfp4.even_scale(groups.abs().amax(-1)).int(), best)
    got = quantise(weight, scales="mse")
    assert torch.equal(got.scale.int(), best)
    assert (got.scale != quantise(weight).scale).any(), "the case never differs from EVEN"
    assert measure(weight, got).noise < measure(weight, quantise(weight)).noise


@pytest.mark.parametrize("first", ["even", "mse"])
@pytest.mark.parametrize("second", ["even", "mse"])
def test_quantising_what_is_already_four_bit_changes_no_value(first, second):
    weight = torch.randn(96, 320, generator=torch.Generator().manual_seed(4)).bfloat16() * 0.02
    values = quantise(weight, scales=first).dequantise()
    assert torch.equal(quantise(values, scales=second).dequantise(), values)


def test_a_group_whose_largest_code_is_small_keeps_its_values_when_quantised_again():
    # Error feedback can leave a group that only uses the codes up to 3 under its fixed scale.
    g = torch.Generator().manual_seed(5)
    codes = torch.randint(0, 4, (64, 64), generator=g) | (torch.randint(0, 2, (64, 64), generator=g) << 3)
    original = Packed(mxfp4.pack(codes.to(torch.uint8)), torch.full((64, 2), 120, dtype=torch.uint8))
    again = quantise(original.dequantise())
    assert torch.equal(again.dequantise(), original.dequantise())


def test_a_stack_of_experts_is_quantised_like_each_expert_alone():
    stack = torch.randn(5, 48, 64, generator=torch.Generator().manual_seed(6)).bfloat16()
    got = quantise(stack)
    for expert in (0, 4):
        alone = quantise(stack[expert])
        assert torch.equal(got.packed[expert], alone.packed)
        assert torch.equal(got.scale[expert], alone.scale)


def test_chunked_and_whole_passes_give_the_same_bytes(monkeypatch):
    weight = torch.randn(130, 96, generator=torch.Generator().manual_seed(7))
    whole = quantise(weight, scales="mse")
    monkeypatch.setattr(mxfp4, "_CPU_CHUNK", 96 * 7)
    parts = quantise(weight, scales="mse")
    assert torch.equal(whole.packed, parts.packed) and torch.equal(whole.scale, parts.scale)
    assert torch.equal(whole.dequantise(), parts.dequantise())


@pytest.mark.parametrize(
    "poison", [float("nan"), float("inf"), float("-inf"), 3e38], ids=["NaN", "Inf", "-Inf", "overflow"]
)
def test_an_expert_that_cannot_be_stored_is_named_with_its_row(poison):
    stack = torch.zeros(3, 4, 64)
    stack[2, 1, 40] = poison
    with pytest.raises(WeightsError, match=r"layers.9.*experts.*expert 2, row 1"):
        quantise(stack, name="layers.9.experts")


@pytest.mark.parametrize(
    "shape",
    [(4, 33), (4, 31), (4, 48), (32,)],
    ids=["odd width", "odd width below a group", "one and a half groups", "a vector"],
)
def test_a_shape_that_groups_of_32_do_not_divide_is_refused(shape):
    with pytest.raises(WeightsError, match="experts.3.w2.*multiple of 32"):
        quantise(torch.ones(shape), name="experts.3.w2")


def test_integer_and_double_weights_are_refused():
    with pytest.raises(WeightsError, match="float64"):
        quantise(torch.ones(2, 32, dtype=torch.float64))


@pytest.mark.parametrize("magnitude", [1e38, 1e-38, 0.0], ids=["huge", "tiny", "all zero"])
def test_scale_bytes_that_a_consumer_refuses_are_warned_about_by_name(magnitude):
    with pytest.warns(MXFP4ScaleWarning, match="layers.1.w2"):
        quantise(torch.full((1, 32), magnitude), name="layers.1.w2")


def test_ordinary_weights_bring_no_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        quantise(torch.randn(8, 64, generator=torch.Generator().manual_seed(1)))


@pytest.mark.parametrize(
    ("packed", "scale", "why"),
    [
        (torch.zeros(4, 16, dtype=torch.uint8), torch.zeros(4, 1), "uint8"),
        (torch.zeros(4, 16, dtype=torch.uint8), torch.zeros(4, 2, dtype=torch.uint8), r"\[4, 1\]"),
        (torch.zeros(4, 16, dtype=torch.uint8), torch.zeros(1, 4, dtype=torch.uint8), r"\[4, 1\]"),
        (torch.zeros(4, 12, dtype=torch.uint8), torch.zeros(4, 1, dtype=torch.uint8), "weight_packed"),
    ],
    ids=["float32 scales", "scales per 16", "transposed scales", "width not in groups"],
)
def test_packed_tensors_that_do_not_belong_together_are_refused(packed, scale, why):
    with pytest.raises(WeightsError, match=why):
        mxfp4.dequantise(packed, scale)


@pytest.mark.parametrize("ranks", [2, 4, 8, 16, 32, 96])
def test_shards_of_the_bytes_are_the_bytes_of_the_shards(ranks):
    weight = torch.randn(4, 3072, generator=torch.Generator().manual_seed(8)).bfloat16()
    mxfp4.check_tensor_parallel(3072, ranks)
    whole = quantise(weight)
    parts = [quantise(part.contiguous()) for part in weight.chunk(ranks, dim=1)]
    assert torch.equal(torch.cat([p.packed for p in parts], 1), whole.packed)
    assert torch.equal(torch.cat([p.scale for p in parts], 1), whole.scale)


@pytest.mark.parametrize(("width", "ranks"), [(3072, 64), (1856, 8), (3072, 5)])
def test_a_tensor_parallel_size_that_cuts_a_group_is_refused(width, ranks):
    with pytest.raises(LayoutError, match=f"w2.*{width}.*{ranks}.*legal sizes"):
        mxfp4.check_tensor_parallel(width, ranks)


def test_gaussian_weights_read_19_db_and_keep_their_norm():
    weight = torch.randn(2048, 512, generator=torch.Generator().manual_seed(9)).bfloat16()
    quality = measure(weight, quantise(weight))
    assert quality.sqnr_db == pytest.approx(19.03, abs=0.1)
    assert quality.norm_ratio == pytest.approx(0.996, abs=0.002)
    assert quality.suspicious is None
    assert sum(quality.scale_histogram.values()) == quality.groups == 2048 * 16
    assert 0.05 < quality.zeros / quality.elements < 0.15
    assert 0 < quality.clipped / quality.elements < 0.02


@pytest.mark.parametrize("shift", [-2, 2], ids=["four times too small", "four times too large"])
def test_a_scale_fault_that_cosine_cannot_see_is_called_suspicious(shift):
    weight = torch.randn(64, 256, generator=torch.Generator().manual_seed(10))
    good = quantise(weight)
    bad = Packed(good.packed, (good.scale.int() + shift).to(torch.uint8))
    cosine = torch.nn.functional.cosine_similarity(bad.dequantise().float().flatten(), weight.flatten(), dim=0)
    assert cosine > 0.99
    quality = measure(weight, bad)
    assert quality.norm_ratio == pytest.approx(2.0**shift, rel=0.02)
    assert quality.suspicious and "norm ratio" in quality.suspicious
    assert measure(weight, good).suspicious is None


def test_pooled_measurements_equal_the_measurement_of_the_whole():
    stack = torch.randn(3, 32, 64, generator=torch.Generator().manual_seed(11))
    packed = quantise(stack)
    whole = measure(stack, packed)
    parts = measure(stack[0], Packed(packed.packed[0], packed.scale[0]))
    for i in (1, 2):
        parts.add(measure(stack[i], Packed(packed.packed[i], packed.scale[i])))
    assert parts.as_dict() == whole.as_dict()


INTERPRETED = """
import torch
from k3train.weights.mxfp4 import quantise
g = torch.Generator().manual_seed(12)
size = torch.exp2(30 * torch.randn(9, 96, generator=g)).clamp(max=2.0**90)
for dtype in (torch.bfloat16, torch.float32):
    weight = (torch.randn(9, 96, generator=g) * size).to(dtype)
    weight[3] = 0
    for scales in ("even", "mse"):
        want, got = quantise(weight, scales=scales, backend="torch"), quantise(weight, scales=scales, backend="triton")
        assert torch.equal(want.scale, got.scale) and torch.equal(want.packed, got.packed), (dtype, scales)
weight[5, 70] = float("nan")
try:
    quantise(weight, backend="triton")
except ValueError as error:
    assert "row 5" in str(error)
    print("same bytes")
"""


def test_the_interpreted_gpu_kernel_gives_the_bytes_of_the_torch_path():
    env = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", "-c", INTERPRETED]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout.strip() == "same bytes", done.stderr


@pytest.mark.gpu
@pytest.mark.parametrize("scales", ["even", "mse"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bfloat16", "float32"])
@pytest.mark.parametrize("spread", [0.0, 6.0, 40.0], ids=["one magnitude", "many magnitudes", "extreme magnitudes"])
def test_cpu_torch_and_gpu_kernel_give_the_same_bytes(dtype, spread, scales):
    g = torch.Generator().manual_seed(13)
    size = torch.exp2(spread * torch.randn(300, 3584, generator=g)).clamp(max=2.0**100)
    weight = (torch.randn(300, 3584, generator=g) * size).to(dtype)
    want = quantise(weight, scales=scales)
    for backend in ("torch", "triton"):
        got = quantise(weight.cuda(), scales=scales, backend=backend)
        assert torch.equal(got.scale.cpu(), want.scale)
        assert torch.equal(got.packed.cpu(), want.packed)
        assert torch.equal(got.dequantise().cpu(), want.dequantise())
