"""The kernel's weight layout, packed from checkpoints.

Why the grid is enough: the layout is checked against loops written from its definition, on
identity-coded rows (each weight tells its own row and column) and on random bits; sizes are one
that needs no padding, one that pads both dimensions, and I = 136, whose last scale block and last
group of 128 rows are short. Packing is per expert and per row, so a few experts and two to four
ranks stand for all. Scales are driven through every case of rebasing: equal, far apart, blocks and
rows of zeros, both ends of UE8M0, NaN, and values that are not powers of two.
"""

import weakref

import pytest
import torch
from random_experts import checkpoint, config_for, fused, generator, random_experts, raw
from torch.utils._python_dispatch import TorchDispatchMode

from megamoe import formats
from megamoe.checkpoint import BLOCK, CheckpointExperts, WeightsError, quantise_experts
from megamoe.config import RECIPES
from megamoe.weights import pack_kernel_mxfp4, pack_weights, unpack_kernel_mxfp4

SIZES = [(256, 256), (288, 136), (32, 8), (512, 384)]


# --- kernel layout -----------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize(("hidden", "intermediate"), SIZES)
def test_bf16_rows_interleave_by_eight(hidden, intermediate, ranks):
    source = checkpoint(hidden, intermediate)
    config = config_for(source, "bf16", ranks)
    hp, ip = config.padded_hidden, config.padded_intermediate
    for rank in range(ranks):
        packed = pack_weights(config, source, rank=rank)
        er = 4 // ranks
        assert packed.w1.shape == (er * 2 * ip, hp) and packed.w2.shape == (er * hp, ip)
        assert packed.w1_scale is None and packed.inexact == 0
        for local in range(er):
            expert = source.expert(rank * er + local)
            w1 = torch.zeros(2 * ip, hp, dtype=torch.bfloat16)
            for row in range(intermediate):
                w1[16 * (row // 8) + row % 8, :hidden] = expert.gate[row]
                w1[16 * (row // 8) + 8 + row % 8, :hidden] = expert.up[row]
            w2 = torch.zeros(hp, ip, dtype=torch.bfloat16)
            w2[:hidden, :intermediate] = expert.down
            assert torch.equal(packed.w1[local * 2 * ip :][: 2 * ip], w1)
            assert torch.equal(packed.w2[local * hp :][:hp], w2)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize(("hidden", "intermediate"), SIZES)
def test_kernel_weights_are_the_checkpoints(hidden, intermediate, recipe):
    if hidden % 32:
        pytest.skip("not a legal shape of this recipe")
    source = quantise_experts(checkpoint(hidden, intermediate), recipe)
    config = config_for(source, recipe, ranks=2)
    for rank in range(2):
        packed = pack_weights(config, source, rank=rank)
        differences = 0
        for local in range(2):
            pairs = zip(packed.dequantise(local), source.dequantise(2 * rank + local), strict=True)
            for ours, theirs in pairs:
                assert ours.shape == theirs.shape
                differences += int((ours != theirs).sum())
        assert differences == packed.inexact
        assert packed.inexact < 50 if recipe == "fp8" else packed.inexact == 0
        assert packed.nbytes == sum(t.nbytes for t in packed.tensors.values())
        assert packed.nbytes * 8 >= packed.w1.shape[0] * config.padded_hidden * config.weight_bits


@pytest.mark.parametrize("recipe", RECIPES)
def test_padding_is_zero_with_scale_one(recipe):
    source = quantise_experts(checkpoint(288, 136), recipe)
    packed = pack_weights(config_for(source, recipe), source, rank=0)
    hp, ip = 512, 256
    w1 = raw(packed.w1).view(4, 2 * ip, -1)
    w2 = raw(packed.w2).view(4, hp, -1)
    assert (w1[:, 272:] == 0).all() and (w2[:, 288:] == 0).all()
    columns = {"mxfp4": (hp // 2, ip // 2)}.get(recipe, (hp, ip))
    assert (w1.shape[2], w2.shape[2]) == columns
    if recipe == "mxfp4":
        assert (unpack_kernel_mxfp4(w1)[..., 288:] == 0).all()
        assert (formats.unpack_ue8m0_int32(packed.w1_offset.mT)[..., 9:] == 0).all()
        assert (packed.w1_offset[..., 272:] == 0).all()
    else:
        assert (w1[..., 288:] == 0).all() and (w2[..., 136:] == 0).all()
    if recipe != "bf16":
        assert (packed.w1_scale[..., 272:] == 1).all() and (packed.w2_scale[..., 288:] == 1).all()


def test_fp8_block_layout():
    source = quantise_experts(checkpoint(288, 136), "fp8_block")
    packed = pack_weights(config_for(source, "fp8_block"), source, rank=0)
    assert packed.w1_scale.shape == (4, 4, 512) and packed.w2_scale.shape == (4, 2, 512)
    for e in range(4):
        expert = source.expert(e)
        assert torch.equal(raw(packed.w2).view(4, 512, 256)[e, :288, :136], raw(expert.down))
        for row in range(136):
            for half, scale in ((0, expert.gate_scale), (8, expert.up_scale)):
                got = packed.w1_scale[e, :3, 16 * (row // 8) + half + row % 8]
                assert torch.equal(got, scale[row // 128])
        for row in range(288):
            assert torch.equal(packed.w2_scale[e, :2, row], expert.down_scale[row // 128])


# --- fp8: one scale per row --------------------------------------------------------------------


def fp8_checkpoint(down: torch.Tensor, down_scale: torch.Tensor) -> CheckpointExperts:
    hidden, intermediate = down.shape
    blocks = (-(-intermediate // 128), -(-hidden // 128))
    zeros = torch.zeros(1, intermediate, hidden).to(torch.float8_e4m3fn)
    return CheckpointExperts.from_per_expert(
        gate_proj=zeros,
        up_proj=zeros,
        down_proj=down[None],
        gate_scale=torch.ones(1, *blocks),
        up_scale=torch.ones(1, *blocks),
        down_scale=down_scale[None],
    )


def test_fp8_rows_take_the_largest_scale_of_their_nonzero_blocks():
    down = torch.ones(256, 384)
    down[0, 256:] = 0  # its largest block scale does not count
    down[1] = 0
    down[2, :256] = 0
    down[3, 256:] = -448.0
    scale = torch.tensor([[2.0**-3, 2.0**-5, 2.0**4], [1.0, 1.0, 2.0**-20]])
    source = fp8_checkpoint(down.to(torch.float8_e4m3fn), scale)
    packed = pack_weights(config_for(source, "fp8"), source, rank=0)
    expected = torch.full((256,), 2.0**4)
    expected[0], expected[1], expected[128:] = 2.0**-3, 1.0, 1.0
    assert torch.equal(packed.w2_scale[0, :256], expected)
    values = packed.w2[:256, :384].float()
    assert (values[0, :128] == 1).all() and (values[0, 128:256] == 0.25).all()
    # 2^-5 / 2^4 = 2^-9 is e4m3's smallest; 2^-20 is below half of it.
    assert (values[4, 128:256] == 2.0**-9).all() and (values[130, 256:] == 0).all()
    assert (values[3, 256:] == -448).all() and (values[2, 256:] == 1).all()
    assert packed.inexact == 128 * 128
    assert (packed.w2_scale[0, 256:] == 1).all() and (packed.w1_scale == 1).all()


@pytest.mark.parametrize("bad", [3.0, 0.7, 0.0, -1.0, float("inf"), float("nan"), 2.0**-130])
def test_fp8_refuses_scales_that_are_not_powers_of_two(bad):
    scale = torch.ones(2, 3)
    scale[1, 2] = bad
    down = torch.ones(256, 384)
    source = fp8_checkpoint(down.to(torch.float8_e4m3fn), scale)
    with pytest.raises(WeightsError, match=r"down scale of expert 0, block \[1, 2\].*fp8_block"):
        pack_weights(config_for(source, "fp8"), source, rank=0)
    pack_weights(config_for(source, "fp8_block"), source, rank=0)
    # The scale of a block of zeros means nothing, whatever it is.
    down[128:, 256:] = 0
    source = fp8_checkpoint(down.to(torch.float8_e4m3fn), scale)
    packed = pack_weights(config_for(source, "fp8"), source, rank=0)
    assert torch.equal(packed.dequantise(0)[2], down)


def test_fp8_nan_weights_stay_in_their_row():
    down = torch.ones(256, 384)
    down[7, 5] = float("nan")
    source = fp8_checkpoint(formats.encode_e4m3(down), torch.ones(2, 3))
    packed = pack_weights(config_for(source, "fp8"), source, rank=0)
    assert packed.dequantise(0)[2].isnan().nonzero().tolist() == [[7, 5]]
    assert packed.inexact == 0


# --- mxfp4 -------------------------------------------------------------------------------------


def random_codes(*shape: int) -> torch.Tensor:
    return torch.randint(0, 16, shape, generator=generator(), dtype=torch.uint8)


def test_kernel_code_packing_by_its_definition():
    codes = random_codes(3, 256)
    packed = pack_kernel_mxfp4(codes)
    assert packed.shape == (3, 128) and packed.dtype == torch.uint8
    for row in range(3):
        stream = bytes(packed[row].tolist())
        for j in range(4):
            for c in range(8):
                word = int.from_bytes(stream[32 * j + 4 * c :][:4], "little")
                for i in range(4):
                    low = int(codes[row, 64 * j + 4 * c + i])
                    high = int(codes[row, 64 * j + 32 + 4 * c + i])
                    assert word >> (4 * i) & 7 == low & 7
                    assert word >> (8 * i + 7) & 1 == low >> 3
                    assert word >> (16 + 4 * i) & 7 == high & 7
                    assert word >> (8 * i + 3) & 1 == high >> 3
    assert torch.equal(unpack_kernel_mxfp4(packed), codes)


def test_kernel_code_packing_keeps_any_bytes():
    every = torch.arange(256, dtype=torch.uint8).repeat(2)[:480].view(3, 160)
    assert torch.equal(pack_kernel_mxfp4(unpack_kernel_mxfp4(every)), every)


def offsets_of(words: torch.Tensor) -> torch.Tensor:
    """int32 [K/128, rows] as the kernel reads them -> uint8 [rows, K/32], by the definition."""
    bytes_of = [
        [int(words[b, row]).to_bytes(4, "little", signed=True) for b in range(words.shape[0])]
        for row in range(words.shape[1])
    ]
    return torch.tensor([list(b"".join(row)) for row in bytes_of], dtype=torch.uint8)


@pytest.mark.parametrize(("hidden", "intermediate"), [(64, 256), (288, 136), (512, 640)])
def test_offsets_lie_in_the_order_of_k(hidden, intermediate):
    """Byte j of word b of a row is that of k = 128 b + 32 j .. + 31, in both matrices."""
    source = quantise_experts(checkpoint(hidden, intermediate, experts=2), "mxfp4")
    # a scale code of its own for every (row, 32 of K), not further apart than offsets reach
    expert = source.expert(1)
    scales = {}
    for name, (_, scale) in expert.projections().items():
        count = torch.arange(scale.numel()).view(scale.shape)
        scales[name] = (120 + count * 7 % 11).to(torch.uint8)
    changed = expert._replace(**{f"{name}_scale": scale for name, scale in scales.items()})
    source = CheckpointExperts(**(vars(source) | {"load": lambda _: changed}))
    config = config_for(source, "mxfp4")
    packed = pack_weights(config, source, rank=0)
    hp, ip = config.padded_hidden, config.padded_intermediate
    assert packed.w1_offset.shape == (2, hp // 128, 2 * ip)
    assert packed.w2_offset.shape == (2, ip // 128, hp)
    assert packed.w1_offset.dtype == packed.w2_offset.dtype == torch.int32
    both = offsets_of(packed.w1_offset[1])
    places = 16 * (torch.arange(intermediate) // 8) + torch.arange(intermediate) % 8
    found = {"gate": both[places], "up": both[places + 8], "down": offsets_of(packed.w2_offset[1])}
    for name, scale in scales.items():
        codes = formats.unpack_e2m1(getattr(expert, name))
        rows, blocks = scale.shape
        assert all((codes[:, 32 * b :][:, :32] & 7).any(-1).all() for b in range(blocks))
        top = scale.amax(1, keepdim=True)
        assert torch.equal(found[name][:rows, :blocks], 10 - (top - scale))
        assert (found[name][:, blocks:] == 0).all() and packed.inexact == 0


def mxfp4_checkpoint(codes: torch.Tensor, scale: torch.Tensor) -> CheckpointExperts:
    """One expert whose down matrix is given; gate and up are zero."""
    hidden, intermediate = codes.shape
    zeros = torch.zeros(1, intermediate, hidden // 2, dtype=torch.uint8)
    ones = torch.full((1, intermediate, hidden // 32), 127, dtype=torch.uint8)
    return CheckpointExperts.from_per_expert(
        gate_proj=zeros,
        up_proj=zeros,
        down_proj=formats.pack_e2m1(codes)[None],
        gate_scale=ones,
        up_scale=ones,
        down_scale=scale[None],
    )


def test_mxfp4_row_scale_and_offsets_by_their_definition():
    codes = random_codes(64, 256)
    scale = torch.randint(120, 131, (64, 8), generator=generator(), dtype=torch.uint8)
    codes[3] = 0
    codes[4, 32:64] = 8  # -0 is zero too
    scale[4, 1] = 254
    source = mxfp4_checkpoint(codes, scale)
    packed = pack_weights(config_for(source, "mxfp4"), source, rank=0)
    assert packed.w2_offset.shape == (1, 2, 256) and packed.inexact == 0
    offsets = offsets_of(packed.w2_offset[0])[:64]
    for row in range(64):
        blocks = codes[row].view(8, 32)
        holding = [b for b in range(8) if (blocks[b] & 7).any()]
        if not holding:
            assert packed.w2_scale[0, row] == 1 and (offsets[row] == 0).all()
            continue
        top = max(int(scale[row, b]) - 127 for b in holding)
        assert packed.w2_scale[0, row] == 2.0 ** (top - 6)
        for b in holding:
            assert offsets[row, b] == 10 - (top - (int(scale[row, b]) - 127))
    expected = formats.dequantise_e2m1(formats.pack_e2m1(codes), scale.masked_fill(scale > 200, 0))
    assert torch.equal(packed.dequantise(0)[2], expected)


@pytest.mark.parametrize("distance", range(16))
def test_mxfp4_blocks_far_below_their_row_are_requantised(distance):
    codes = random_codes(32, 256)
    codes[:, 0] = 7
    scale = torch.full((32, 8), 140, dtype=torch.uint8)
    scale[:, 4:] = 140 - distance
    source = mxfp4_checkpoint(codes, scale)
    packed = pack_weights(config_for(source, "mxfp4"), source, rank=0)
    exact = formats.dequantise_e2m1(formats.pack_e2m1(codes), scale)
    got = packed.dequantise(0)[2]
    offsets = offsets_of(packed.w2_offset[0])[:32]
    assert (offsets[:, :4] == 10).all() and (offsets[:, 4:] == max(10 - distance, 0)).all()
    assert torch.equal(got[:, :128], exact[:, :128])
    assert packed.inexact == int((got != exact).sum())
    if distance <= 10:
        assert packed.inexact == 0
        return
    assert packed.inexact > 0
    unit = 2.0 ** (140 - 127 - 10)
    low = exact[:, 128:] / unit
    assert torch.equal(got[:, 128:] / unit, formats.decode_e2m1(formats.encode_e2m1(low)))
    assert (got[:, 128:] == 0).all() == (distance >= 15)


@pytest.mark.parametrize("code", [0, 1, 5, 6, 7, 127, 253, 254])
def test_mxfp4_scales_at_both_ends(code):
    codes = random_codes(32, 256)
    scale = torch.full((32, 8), code, dtype=torch.uint8)
    source = mxfp4_checkpoint(codes, scale)
    packed = pack_weights(config_for(source, "mxfp4"), source, rank=0)
    assert packed.inexact == 0
    assert (packed.w2_scale >= 2.0**-126).all() and packed.w2_scale.isfinite().all()
    values = formats.decode_e2m1(codes).double() * 2.0 ** (code - 127)
    exponents = offsets_of(packed.w2_offset[0])[:32].repeat_interleave(32, 1).double() - 4
    unpacked = formats.decode_e2m1(unpack_kernel_mxfp4(packed.w2))[:32].double()
    assert torch.equal(unpacked * 2.0**exponents * packed.w2_scale[0, :32, None].double(), values)


def test_mxfp4_refuses_nan_scales():
    scale = torch.full((256, 8), 127, dtype=torch.uint8)
    scale[200, 5] = 255
    source = mxfp4_checkpoint(random_codes(256, 256), scale)
    with pytest.raises(WeightsError, match="down scale of expert 0, row 200, block 5 is NaN"):
        pack_weights(config_for(source, "mxfp4"), source, rank=0)


def test_gate_and_up_keep_their_own_scales():
    w = random_experts(256, 256)
    source = CheckpointExperts.from_per_expert(
        gate_proj=w.gate, up_proj=w.up * 1024, down_proj=w.down
    )
    for recipe in ("fp8", "fp8_block", "mxfp4"):
        quantised = quantise_experts(source, recipe)
        gate, up, _ = pack_weights(config_for(source, recipe), quantised, rank=0).dequantise(1)
        for ours, theirs in ((gate, w.gate[1].float()), (up / 1024, w.up[1].float())):
            assert (ours - theirs).norm() < 0.13 * theirs.norm()


def test_zero_experts_stay_zero():
    zero = torch.zeros(1, 256, 256, dtype=torch.bfloat16)
    source = CheckpointExperts.from_per_expert(gate_proj=zero, up_proj=zero, down_proj=zero)
    for recipe in RECIPES:
        quantised = quantise_experts(source, recipe)
        packed = pack_weights(config_for(source, recipe), quantised, rank=0)
        assert all((matrix == 0).all() for matrix in packed.dequantise(0))


def test_pack_names_what_does_not_fit():
    source = checkpoint(256, 128)
    config = config_for(source, "mxfp4", ranks=2)
    with pytest.raises(WeightsError, match=r"kind mxfp4, got bf16: use quantise_experts"):
        pack_weights(config, source, rank=0)
    quantised = quantise_experts(source, "mxfp4")
    for rank in (-1, 2):
        with pytest.raises(WeightsError, match=rf"rank {rank} is not within 0\.\.1"):
            pack_weights(config, quantised, rank=rank)
    for other in (checkpoint(256, 136), checkpoint(288, 128), checkpoint(256, 128, experts=2)):
        with pytest.raises(WeightsError, match="the checkpoint has"):
            pack_weights(config, quantise_experts(other, "mxfp4"), rank=0)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("layout", ["halves", "interleaved"])
def test_fused_layouts_give_the_same_kernel_weights(layout, recipe):
    w = random_experts(256, 128)
    expected = checkpoint(256, 128)
    source = CheckpointExperts.from_fused(gate_up=fused(w, layout), down=w.down, layout=layout)
    turned = CheckpointExperts.from_fused(
        gate_up=fused(w, layout).mT.contiguous(),
        down=w.down.mT.contiguous(),
        layout=layout,
        transposed=True,
    )
    config = config_for(expected, recipe)
    right = pack_weights(config, quantise_experts(expected, recipe), rank=0)
    for candidate in (source, turned):
        got = pack_weights(config, quantise_experts(candidate, recipe), rank=0)
        for name, tensor in right.tensors.items():
            assert torch.equal(raw(tensor), raw(got.tensors[name]))


def test_short_last_group_of_rows():
    # 136 rows are one full group of 128 and one of 8: both go where they belong.
    assert 136 % BLOCK == 8
    source = checkpoint(256, 136)
    gate, up, down = pack_weights(config_for(source, "bf16"), source, rank=0).dequantise(3)
    expert = source.expert(3)
    assert torch.equal(gate, expert.gate.float()) and torch.equal(up, expert.up.float())
    assert torch.equal(down, expert.down.float())


# --- one rank at a time, one expert at a time --------------------------------------------------


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("ranks", [2, 16])
def test_ranks_hold_slices_and_load_only_their_own(ranks, recipe):
    source = quantise_experts(checkpoint(256, 64, experts=16), recipe)
    loaded = []
    watched = CheckpointExperts(
        **(vars(source) | {"load": lambda e: loaded.append(e) or source.load(e)})
    )
    whole = pack_weights(config_for(source, recipe), source, rank=0)
    for rank in range(ranks):
        loaded.clear()
        part = pack_weights(config_for(source, recipe, ranks), watched, rank=rank)
        er = 16 // ranks
        assert loaded == list(range(rank * er, rank * er + er))
        for name, tensor in part.tensors.items():
            full = whole.tensors[name]
            rows = len(full) // ranks
            assert torch.equal(raw(tensor), raw(full[rank * rows :][:rows]))


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of tensor storages made while it is active, and their peak."""

    def __init__(self, existing: list[torch.Tensor]) -> None:
        super().__init__()
        self.existing = {tensor.untyped_storage()._cdata for tensor in existing}
        self.users: dict[int, int] = {}
        self.sizes: dict[int, int] = {}
        self.peak = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(tensor, torch.Tensor):
                self._track(tensor)
        return result

    def _track(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self.existing:
            return
        self.users[key] = self.users.get(key, 0) + 1
        self.sizes[key] = storage.nbytes()
        weakref.finalize(tensor, self._release, key)
        self.peak = max(self.peak, sum(self.sizes.values()))

    def _release(self, key: int) -> None:
        self.users[key] -= 1
        if self.users[key] == 0:
            del self.users[key], self.sizes[key]


@pytest.mark.parametrize("recipe", RECIPES)
def test_peak_memory_beside_the_result_is_about_one_expert(recipe):
    hidden, intermediate = 2048, 1536
    source = quantise_experts(checkpoint(hidden, intermediate, experts=4), recipe)
    held = [source.expert(e) for e in range(4)]
    source = CheckpointExperts(**(vars(source) | {"load": lambda e: held[e]}))
    tensors = [
        [t for pair in e.projections().values() for t in pair if t is not None] for e in held
    ]
    one_expert = sum(tensor.nbytes for tensor in tensors[0])
    with LiveBytes(existing=sum(tensors, [])) as live:
        packed = pack_weights(config_for(source, recipe), source, rank=0)
    # What a checkpoint on disk loads is one expert; the rest must stay well below another.
    assert packed.nbytes <= live.peak <= packed.nbytes + one_expert // 2


def test_the_byte_counter_sees_temporaries():
    x = torch.zeros(1000)
    with LiveBytes(existing=[x]) as live:
        y = (x + 1) * 2
        del y
        z = x[10:] + 1
    assert live.peak == 2 * 4000 and z.nbytes == 3960
    assert sum(live.sizes.values()) == 3960
