"""e4m3, e2m1 and UE8M0 against tables and rational arithmetic that share no code with formats.py.

Why the grid is enough: the 8-bit and 4-bit formats are tried over every code; rounding over every
bf16 value, every midpoint of the target grid and the fp32 neighbours of these midpoints, which are
all the places where a rounding rule can differ; scales over every fp32 exponent with the mantissas
next to the two thresholds (448 = 1.75 * 2^8 and 6 = 1.5 * 2^2). Block functions are then tried with
NaN, Inf, zero and subnormal blocks beside ordinary ones, short last blocks and no rows at all.
"""

from fractions import Fraction

import pytest
import torch

from megamoe import formats

SEED = 20240607
NAN, INF = float("nan"), float("inf")


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(SEED))


def e4m3_value(code: int) -> float:
    exponent, mantissa = code >> 3 & 15, code & 7
    if exponent == 15 and mantissa == 7:
        return NAN
    magnitude = mantissa * 2.0**-9 if exponent == 0 else (8 + mantissa) * 2.0 ** (exponent - 10)
    return -magnitude if code & 128 else magnitude


E4M3_GRID = [e4m3_value(code) for code in range(127)]
E2M1_GRID = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def nearest_even(x: torch.Tensor, grid: list[float]) -> torch.Tensor:
    """Index in the grid nearest to |x|, a tie to the even index, beyond the end the last one."""
    table = torch.tensor(grid, dtype=torch.float64)
    magnitude = x.double().abs().clamp(max=grid[-1])
    above = torch.searchsorted(table, magnitude).clamp(max=len(grid) - 1)
    below = (above - 1).clamp(min=0)
    up, down = table[above] - magnitude, magnitude - table[below]
    return torch.where((up < down) | ((up == down) & (above % 2 == 0)), above, below)


def every_bf16() -> torch.Tensor:
    codes = torch.arange(65536, dtype=torch.int32).to(torch.int16)
    return codes.view(torch.bfloat16).float()


def hard_values(grid: list[float]) -> torch.Tensor:
    """Finite values of both signs: bf16, the grid, its midpoints, their fp32 neighbours."""
    table = torch.tensor(grid, dtype=torch.float32)
    midpoints = (table[1:] + table[:-1]) / 2
    bf16 = every_bf16()
    near = torch.cat((table, midpoints))
    up, down = near.nextafter(torch.tensor(INF)), near.nextafter(torch.tensor(-INF))
    positive = torch.cat((near, up, down))
    return torch.cat((bf16[bf16.isfinite()], positive, -positive))


# --- e4m3 --------------------------------------------------------------------------------------


def test_decode_e4m3_every_code():
    expected = torch.tensor([e4m3_value(code) for code in range(256)])
    codes = torch.arange(256, dtype=torch.uint8)
    decoded = formats.decode_e4m3(codes)
    assert torch.equal(decoded.nan_to_num(999), expected.nan_to_num(999))
    assert torch.equal(decoded.signbit()[:127], torch.zeros(127, dtype=torch.bool))
    assert decoded[128].signbit() and decoded[128] == 0
    assert torch.equal(
        formats.decode_e4m3(codes.view(torch.float8_e4m3fn)).isnan(), decoded.isnan()
    )


@pytest.mark.parametrize("size", [1, 3, 7, 65536])
def test_encode_e4m3_rounds_to_nearest_even(size):
    # Short pieces too: torch converts long and short runs by different code.
    x = hard_values(E4M3_GRID)
    x = x if size > 7 else x[-3 * 7 * 100 :]
    codes = torch.cat([formats.encode_e4m3(piece).view(torch.uint8) for piece in x.split(size)])
    assert torch.equal((codes & 127).long(), nearest_even(x, E4M3_GRID))
    assert torch.equal(codes >= 128, x.signbit())


def test_encode_e4m3_keeps_every_value():
    codes = torch.arange(256, dtype=torch.uint8)
    values = formats.decode_e4m3(codes)
    back = formats.encode_e4m3(values).view(torch.uint8)
    keeps = ~values.isnan()
    assert torch.equal(back[keeps], codes[keeps])
    assert formats.decode_e4m3(back[~keeps]).isnan().all()


@pytest.mark.parametrize("size", [3, 64])
def test_encode_e4m3_out_of_range(size):
    x = torch.tensor([449.0, 464.0, 465.0, 3e38, -3e38] * size)
    expected = torch.tensor([448.0, 448.0, 448.0, 448.0, -448.0] * size)
    assert torch.equal(formats.encode_e4m3(x).float(), expected)
    assert formats.encode_e4m3(torch.tensor([NAN, INF, -INF] * size)).float().isnan().all()


def test_encode_e4m3_refuses_other_types():
    with pytest.raises(TypeError, match="got torch.float64"):
        formats.encode_e4m3(torch.zeros(3, dtype=torch.float64))


# --- scales ------------------------------------------------------------------------------------


@pytest.mark.parametrize("largest", [448.0, 6.0])
def test_exponent_is_the_smallest(largest):
    mantissas = [0, 1, 0x3FFFFF, 0x400000, 0x400001, 0x5FFFFF, 0x600000, 0x600001, 0x7FFFFF]
    bits = torch.tensor([e << 23 | m for e in range(255) for m in mantissas], dtype=torch.int32)
    amax = bits.view(torch.float32)
    exponents = formats.power_of_two_exponent(amax, largest=largest)
    assert exponents.dtype == torch.int32
    for value, e in zip(amax.tolist(), exponents.tolist(), strict=True):
        limit = Fraction(largest)
        assert -126 <= e <= 127
        assert Fraction(value) <= limit * Fraction(2) ** e
        assert e == -126 or Fraction(value) > limit * Fraction(2) ** (e - 1)


@pytest.mark.parametrize("largest", [448.0, 6.0])
def test_exponent_at_exact_powers_and_next_float(largest):
    for n in range(-126, 120):
        exact = torch.tensor([largest]) * 2.0**n
        above = exact.nextafter(torch.tensor(INF))
        assert formats.power_of_two_exponent(exact, largest=largest).item() == n
        assert formats.power_of_two_exponent(above, largest=largest).item() == n + 1


def test_power_of_two_is_exact():
    e = torch.arange(-126, 128, dtype=torch.int32)
    expected = torch.tensor([2.0**n for n in e.tolist()], dtype=torch.float64)
    assert torch.equal(formats.power_of_two(e).double(), expected)


def test_ue8m0_every_code():
    codes = torch.arange(256, dtype=torch.uint8)
    decoded = formats.decode_ue8m0(codes)
    assert decoded.dtype == torch.float32
    expected = torch.tensor([2.0 ** (code - 127) for code in range(255)], dtype=torch.float64)
    assert torch.equal(decoded[:255].double(), expected)
    assert decoded[0] > 0 and decoded[134] == 128.0
    assert decoded[255].isnan()
    assert torch.equal(formats.encode_ue8m0(decoded), codes)


@pytest.mark.parametrize("scale", [3.0, 0.0, -1.0, INF, 2.0**-128, 1.0000001])
def test_encode_ue8m0_rounds_nothing(scale):
    with pytest.raises(ValueError, match="not a power of two"):
        formats.encode_ue8m0(torch.tensor([1.0, scale]))


def test_pack_ue8m0_is_little_endian():
    codes = torch.tensor([[1, 2, 3, 4, 255, 254, 0, 128]], dtype=torch.uint8)
    packed = formats.pack_ue8m0_int32(codes)
    expected = [int.from_bytes(bytes(c), "little", signed=True) for c in codes.view(2, 4).tolist()]
    assert packed.dtype == torch.int32 and packed.tolist() == [expected]
    assert torch.equal(formats.unpack_ue8m0_int32(packed), codes)


@pytest.mark.parametrize("count", range(1, 10))
def test_pack_ue8m0_any_count(count):
    codes = (torch.arange(3 * count) * 37 % 256).to(torch.uint8).view(3, count)
    packed = formats.pack_ue8m0_int32(codes)
    assert packed.shape == (3, -(-count // 4))
    assert torch.equal(formats.unpack_ue8m0_int32(packed, count=count), codes)
    assert (formats.unpack_ue8m0_int32(packed)[:, count:] == 0).all()


# --- e4m3 blocks -------------------------------------------------------------------------------

BLOCKS = [32, 128, None]


def half_step(q: torch.Tensor) -> torch.Tensor:
    """Half the distance between e4m3 values around q (fp32)."""
    exponent = torch.frexp(q.abs())[1].clamp(min=-5) - 1
    return torch.ldexp(torch.ones_like(q), exponent - 4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("columns", [8, 32, 128, 288, 1000])
@pytest.mark.parametrize("block", BLOCKS)
def test_e4m3_blocks_error_and_shapes(block, columns, dtype):
    x = (randn(5, columns) * torch.tensor([1e-3, 1.0, 50.0, 1e-5, 300.0])[:, None]).to(dtype)
    values, scales = formats.quantise_e4m3_blocks(x, block=block)
    assert values.dtype == torch.float8_e4m3fn and values.shape == x.shape
    assert scales.shape == ((5,) if block is None else (5, -(-columns // block)))
    assert scales.dtype == (torch.uint8 if block == 32 else torch.float32)
    restored = formats.dequantise_e4m3_blocks(values, scales, block=block)
    s = formats.decode_ue8m0(scales) if block == 32 else scales
    s = s[:, None] if block is None else s.repeat_interleave(block, 1)[:, :columns]
    error = (restored - x.float()).abs()
    assert (error <= half_step(values.float()) * s * 1.0001).all()
    # The whole range is used: a scale half as large would not do.
    largest = values.float().abs().amax(1)
    assert (largest == 448).all() if block == 128 else (largest >= 224).all()


@pytest.mark.parametrize("block", BLOCKS)
def test_zero_blocks_stay_zero(block):
    x = randn(3, 256)
    x[1] = 0
    x[2, :128] = 0
    values, scales = formats.quantise_e4m3_blocks(x, block=block)
    assert (values[1].float() == 0).all() and (values[2, :128].float() == 0).all()
    s = formats.decode_ue8m0(scales) if block == 32 else scales
    assert s.isfinite().all() and (s >= 2.0**-126).all()
    if block == 32:
        assert (scales[1] == 1).all()
    untouched = formats.quantise_e4m3_blocks(x[:1], block=block)
    assert torch.equal(values[:1].view(torch.uint8), untouched.values.view(torch.uint8))


@pytest.mark.parametrize("poison", [NAN, INF, -INF])
@pytest.mark.parametrize("block", BLOCKS)
def test_nan_and_inf_stay_where_they_are(block, poison):
    clean = randn(4, 256)
    x = clean.clone()
    x[2, 70] = poison
    clean[2, 70] = 0
    values, scales = formats.quantise_e4m3_blocks(x, block=block)
    expected = formats.quantise_e4m3_blocks(clean, block=block)
    assert values.float()[2, 70].isnan()
    assert values.float().isnan().sum() == 1
    keeps = torch.ones_like(x, dtype=torch.bool)
    keeps[2, 70] = False
    assert torch.equal(values.view(torch.uint8)[keeps], expected.values.view(torch.uint8)[keeps])
    assert torch.equal(scales, expected.scales)
    row = formats.quantise_e4m3_blocks(torch.full((1, 256), poison), block=block)
    assert row.values.float().isnan().all()


@pytest.mark.parametrize("block", [32, None])
def test_exact_powers_and_next_float_in_a_block(block):
    for n in (-100, -8, 0, 1, 7, 100):
        exact = torch.full((1, 32), 448.0) * 2.0**n
        values, scales = formats.quantise_e4m3_blocks(exact, block=block)
        assert (values.float() == 448).all()
        s = formats.decode_ue8m0(scales) if block == 32 else scales
        assert (s == 2.0**n).all()
        above = exact.nextafter(torch.tensor(INF))
        values, scales = formats.quantise_e4m3_blocks(above, block=block)
        s = formats.decode_ue8m0(scales) if block == 32 else scales
        assert (s == 2.0 ** (n + 1)).all() and (values.float() == 224).all()


@pytest.mark.parametrize("block", BLOCKS)
def test_subnormal_and_negative_zero(block):
    x = torch.tensor([[2.0**-149, -(2.0**-149), -0.0, 0.0] * 32])
    values, scales = formats.quantise_e4m3_blocks(x, block=block)
    # 2^-149 / 2^-126 is far below half of e4m3's smallest value.
    assert (values.float() == 0).all()
    assert torch.equal(values.float().signbit(), x.signbit())
    x = torch.tensor([[2.0**-130, -(2.0**-127)] * 64])
    restored = formats.dequantise_e4m3_blocks(
        *formats.quantise_e4m3_blocks(x, block=block), block=block
    )
    assert torch.equal(restored, x)


def test_power_of_two_scales_can_be_asked_for():
    x = randn(3, 256)
    values, scales = formats.quantise_e4m3_blocks(x, block=128, power_of_two_scales=True)
    assert torch.equal(torch.frexp(scales)[0], torch.full_like(scales, 0.5))
    values, scales = formats.quantise_e4m3_blocks(x, block=None, power_of_two_scales=False)
    assert torch.equal(scales, x.abs().amax(1) / 448)
    with pytest.raises(ValueError, match="powers of two"):
        formats.quantise_e4m3_blocks(x, block=32, power_of_two_scales=False)
    with pytest.raises(ValueError, match="32, 128 or None"):
        formats.quantise_e4m3_blocks(x, block=64)


@pytest.mark.parametrize("x_scales", ["none", "token", "ue8m0_32", "block128"])
@pytest.mark.parametrize("tokens", [0, 1, 5])
def test_x_on_the_wire(tokens, x_scales):
    x = randn(tokens, 288).to(torch.bfloat16)
    values, scale = formats.quantise_x(x, x_scales=x_scales)
    restored = formats.dequantise_x(values, scale, x_scales=x_scales)
    assert restored.shape == x.shape and restored.dtype == torch.float32
    if x_scales == "none":
        assert values is x and scale is None
        return
    columns = 1 if x_scales == "token" else 3
    assert scale.shape == (tokens, columns)
    assert scale.dtype == (torch.int32 if x_scales == "ue8m0_32" else torch.float32)
    assert ((restored - x.float()).norm() <= 0.04 * x.float().norm()).item()


# --- rebasing to one scale per token -----------------------------------------------------------


def rebase_oracle(values: torch.Tensor, codes: list[int]) -> tuple[list[int], int, int]:
    """One row by rational arithmetic: (e4m3 codes, code of the token's scale, inexact)."""
    floats = values.float().tolist()
    holding = [codes[i // 32] for i, v in enumerate(floats) if v != 0]
    token = max(holding, default=127)
    grid = [Fraction(v) for v in E4M3_GRID]
    result, inexact = [], 0
    for i, v in enumerate(floats):
        if v != v:
            result.append(127)
            continue
        wanted = abs(Fraction(v)) * Fraction(2) ** min(codes[i // 32] - token, 0)
        best = min(range(127), key=lambda c: (abs(grid[c] - wanted), c % 2))
        inexact += grid[best] != wanted
        result.append(best | (128 if torch.tensor(v).signbit() else 0))
    return result, token, inexact


CODE_SETS = [
    [127, 127, 127],
    [127, 120, 110],
    [100, 113, 104],
    [1, 254, 127],
    [254, 1, 0],
    [0, 0, 0],
    [0, 1, 2],
    [130, 129, 90],
]


@pytest.mark.parametrize("codes", CODE_SETS)
@pytest.mark.parametrize("kind", ["random", "zero block", "all zero", "nan", "tiny"])
def test_rebase_against_rationals(codes, kind):
    values = formats.encode_e4m3(randn(96) * 60)
    if kind == "zero block":
        values[codes.index(max(codes)) * 32 :][:32] = torch.zeros(32).to(torch.float8_e4m3fn)
    if kind == "all zero":
        values = (values.float() * 0).to(torch.float8_e4m3fn)
    if kind == "nan":
        values = values.float()
        values[50] = NAN
        values = formats.encode_e4m3(values)
    if kind == "tiny":
        values = formats.encode_e4m3(torch.arange(96) * 2.0**-9)
    expected, token, inexact = rebase_oracle(values, codes)
    result = formats.rebase_x_to_token(values[None], torch.tensor([codes], dtype=torch.uint8))
    got = result.values.view(torch.uint8)[0]
    keeps = ~result.values[0].float().isnan()
    assert torch.equal(keeps, ~values.float().isnan())
    assert torch.equal(got[keeps], torch.tensor(expected, dtype=torch.uint8)[keeps])
    assert result.scale.item() == 2.0 ** (token - 127)
    assert result.inexact == inexact


def test_rebase_keeps_what_is_within_2_to_14_of_the_largest():
    x = torch.full((1, 64), 448.0)
    x[0, 32:] = 448.0 * 2.0**-14
    values, codes = formats.quantise_e4m3_blocks(x)
    result = formats.rebase_x_to_token(values, codes)
    assert result.inexact == 0
    assert torch.equal(result.values.float() * result.scale[:, None], x)


def test_rebase_tokens_are_independent():
    values, codes = formats.quantise_e4m3_blocks(randn(6, 128))
    codes[3, 1] = 255
    together = formats.rebase_x_to_token(values, codes)
    apart = [formats.rebase_x_to_token(values[i : i + 1], codes[i : i + 1]) for i in range(6)]
    assert torch.equal(
        together.values.view(torch.uint8),
        torch.cat([a.values for a in apart]).view(torch.uint8),
    )
    assert together.scale[3].isnan()
    assert together.scale.isfinite().sum() == 5
    assert together.inexact == sum(a.inexact for a in apart)


def test_rebase_ignores_the_scale_of_a_zero_block():
    values = torch.zeros(1, 64)
    values[0, 40] = 1.0
    codes = torch.tensor([[254, 1]], dtype=torch.uint8)
    result = formats.rebase_x_to_token(formats.encode_e4m3(values), codes)
    assert torch.equal(result.values.float(), values)
    assert result.scale.item() == 2.0**-126


def test_rebase_no_rows_and_short_blocks():
    assert formats.rebase_x_to_token(
        torch.zeros(0, 64).to(torch.float8_e4m3fn), torch.zeros(0, 2, dtype=torch.uint8)
    ).scale.shape == (0,)
    x = randn(2, 40)
    result = formats.rebase_x_to_token(*formats.quantise_e4m3_blocks(x))
    assert result.values.shape == (2, 40)


# --- e2m1 --------------------------------------------------------------------------------------


def test_e2m1_every_code():
    codes = torch.arange(16, dtype=torch.uint8)
    expected = torch.tensor(E2M1_GRID + [-v for v in E2M1_GRID])
    decoded = formats.decode_e2m1(codes)
    assert torch.equal(decoded, expected) and torch.equal(decoded.signbit(), codes >= 8)
    back = formats.encode_e2m1(decoded)
    assert torch.equal(back, torch.where(codes == 8, 0, codes))


def test_encode_e2m1_rounds_to_nearest_even():
    x = hard_values(E2M1_GRID)
    codes = formats.encode_e2m1(x)
    index = nearest_even(x, E2M1_GRID)
    assert torch.equal((codes & 7).long(), index)
    assert torch.equal(codes >= 8, x.signbit() & (index > 0))


def test_encode_e2m1_ties():
    x = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    assert formats.decode_e2m1(formats.encode_e2m1(x)).tolist() == [0, 1, 1, 2, 2, 4, 4]
    assert formats.decode_e2m1(formats.encode_e2m1(-x)).tolist() == [0, -1, -1, -2, -2, -4, -4]


def test_pack_e2m1_low_nibble_first():
    codes = torch.tensor([[1, 2, 15, 0]], dtype=torch.uint8)
    assert formats.pack_e2m1(codes).tolist() == [[0x21, 0x0F]]
    every = torch.arange(256, dtype=torch.uint8)
    assert torch.equal(formats.pack_e2m1(formats.unpack_e2m1(every)), every)


@pytest.mark.parametrize("columns", [2, 32, 128, 136, 2880])
def test_quantise_e2m1_error_and_shapes(columns):
    x = randn(4, columns) * torch.tensor([1e-20, 1.0, 1e20, 3.0])[:, None]
    packed, codes = formats.quantise_e2m1(x)
    assert packed.shape == (4, columns // 2) and packed.dtype == torch.uint8
    assert codes.shape == (4, -(-columns // 32)) and codes.dtype == torch.uint8
    restored = formats.dequantise_e2m1(packed, codes)
    scale = formats.decode_ue8m0(codes).repeat_interleave(32, 1)[:, :columns]
    assert ((restored - x).abs() <= scale).all()
    again = formats.quantise_e2m1(restored)
    assert torch.equal(formats.dequantise_e2m1(*again), restored)


def test_quantise_e2m1_is_exact_on_its_own_grid():
    for n in (-120, -1, 0, 5, 120):
        x = torch.tensor([E2M1_GRID * 4, [-v for v in E2M1_GRID] * 4]) * 2.0**n
        packed, codes = formats.quantise_e2m1(x)
        assert (codes == n + 127).all()
        assert torch.equal(formats.dequantise_e2m1(packed, codes), x)


def test_quantise_e2m1_zero_nan_inf():
    x = randn(4, 64)
    x[0] = 0
    x[1, 3], x[2, 40], x[3, 63] = NAN, INF, -INF
    packed, codes = formats.quantise_e2m1(x)
    assert codes[0].tolist() == [1, 1] and (packed[0] == 0).all()
    nan_blocks = codes == 255
    assert nan_blocks.nonzero().tolist() == [[1, 0], [2, 1], [3, 1]]
    restored = formats.dequantise_e2m1(packed, codes)
    assert torch.equal(restored.isnan(), nan_blocks.repeat_interleave(32, 1))


def test_quantise_e2m1_refuses_odd_columns():
    with pytest.raises(ValueError, match="must be even"):
        formats.quantise_e2m1(torch.zeros(2, 33))
