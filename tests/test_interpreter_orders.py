"""The order that atomics, flags, fences and launches give, and waits that never end.

Every way to release (seven, two of them wrong) meets every way to acquire (four, one wrong); orders
pass through third tasks and relaxed updates; scopes that do not reach another rank are found.
Each on a few seeds, because the detector follows happens-before and not the accident of a schedule.
"""

import numpy as np
import pytest
from test_interpreter_faults import SEEDS, run_one

from megamoe.interpreter import DataRace, Deadlock, Livelock, Machine
from megamoe.kernel.compat import cta_barrier, gl, gluon


@gluon.jit
def all_programs_write(target, ATOMIC: gl.constexpr, SCOPE: gl.constexpr):
    if ATOMIC:
        gl.atomic_add(target, 1, sem="relaxed", scope=SCOPE)
    else:
        gl.store(target, 1)


def test_two_programs_write_one_word():
    a = np.zeros(1, np.int32)
    for seed in SEEDS:
        with pytest.raises(DataRace, match="array0"):
            run_one(all_programs_write, [a], grid=2, seed=seed, ATOMIC=0, SCOPE="gpu")
    run_one(all_programs_write, [a], grid=8, ATOMIC=1, SCOPE="gpu")
    assert a[0] == 9 or a[0] == 10


@pytest.mark.parametrize("scope", ["gpu", "sys"])
def test_atomics_of_two_ranks_need_sys_scope(scope):
    m = Machine(ranks=2)
    a = np.zeros(1, np.int32)
    p = m.pointer(m.register(0, a), "int32")
    for rank in range(2):
        m.enqueue(rank, all_programs_write, grid=1, args=[p], kwargs={"ATOMIC": 1, "SCOPE": scope})
    if scope == "sys":
        m.run()
        assert a[0] == 2
    else:
        with pytest.raises(DataRace, match="both need scope sys"):
            m.run()


@gluon.jit
def clears_while_polled(flag, out, HOW: gl.constexpr):
    if gl.program_id(0) == 0:
        while gl.atomic_add(flag, 0, sem="acquire", scope="gpu") < 1:
            pass
    else:
        gl.atomic_add(flag, 1, sem="release", scope="gpu")
        if HOW == "plain":
            gl.store(flag + 1 - 1, 1)


def test_plain_store_over_a_polled_flag():
    for seed in SEEDS:
        run_one(
            clears_while_polled,
            [np.zeros(1, np.int32), np.zeros(1, np.int32)],
            grid=2,
            seed=seed,
            HOW="atomic",
        )
    found = 0
    for seed in range(20):
        try:
            run_one(
                clears_while_polled,
                [np.zeros(1, np.int32), np.zeros(1, np.int32)],
                grid=2,
                seed=seed,
                HOW="plain",
            )
        except DataRace as e:
            assert "array0" in str(e)
            found += 1
    assert found == 20


@gluon.jit
def fences(data, flag, out, WRITE: gl.constexpr, READ: gl.constexpr):
    """A relaxed flag is enough if fences stand beside it."""
    zero = gl.arange(0, 32) * 0
    if gl.program_id(0) == 0:
        gl.store(data, 7)
        gl.inline_asm_elementwise(
            WRITE, "=r,l,r", [flag + zero, zero + 1], dtype=gl.int32, is_pure=False, pack=1
        )
    else:
        gl.inline_asm_elementwise(
            READ, "=r,l", [flag + zero], dtype=gl.int32, is_pure=False, pack=1
        )
        gl.store(out, gl.load(data))


WRITES = {
    "fence": "fence.acq_rel.gpu; st.relaxed.gpu.global.b32 [$1], $2; mov.b32 $0, $2;",
    "membar": "membar.gl; st.volatile.global.b32 [$1], $2; mov.b32 $0, $2;",
    "release": "st.release.gpu.global.b32 [$1], $2; mov.b32 $0, $2;",
    "red": "red.release.gpu.global.or.b32 [$1], $2; mov.b32 $0, $2;",
    "atom": "atom.exch.release.gpu.global.b32 $0, [$1], $2;",
    "plain": "st.relaxed.gpu.global.b32 [$1], $2; mov.b32 $0, $2;",
    "late": "st.relaxed.gpu.global.b32 [$1], $2; fence.acq_rel.gpu; mov.b32 $0, $2;",
}
POLL = "{ .reg .pred p; l: %s setp.eq.s32 p, $0, 0; @p bra l; %s }"
READS = {
    "fence": POLL % ("ld.relaxed.gpu.global.b32 $0, [$1];", "fence.acq_rel.gpu;"),
    "acquire": POLL % ("ld.acquire.gpu.global.b32 $0, [$1];", ""),
    "atom": POLL % ("atom.or.acquire.gpu.global.b32 $0, [$1], 0;", ""),
    "plain": POLL % ("ld.relaxed.gpu.global.b32 $0, [$1];", ""),
}


@pytest.mark.parametrize("read", READS)
@pytest.mark.parametrize("write", WRITES)
def test_orders_of_inline_ptx(write, read):
    good = write not in ("plain", "late") and read != "plain"
    for seed in SEEDS:
        out = np.zeros(1, np.int32)
        arrays = [np.zeros(1, np.int32), np.zeros(1, np.int32), out]
        constants = {"WRITE": WRITES[write], "READ": READS[read]}
        if good:
            run_one(fences, arrays, grid=2, seed=seed, **constants)
            assert out[0] == 7
        else:
            with pytest.raises(DataRace, match="array0"):
                run_one(fences, arrays, grid=2, seed=seed, **constants)


@gluon.jit
def hands_over(data, flag, FIRST: gl.constexpr, BARRIER: gl.constexpr):
    """One thread releases what all threads of program 0 have stored, or have finished reading."""
    i = gl.arange(0, 128)
    if gl.program_id(0) == 0:
        if FIRST == "store":
            gl.store(data + i, i)
        else:
            gl.load(data + i)
        if BARRIER:
            cta_barrier()
        gl.atomic_add(flag, 1, sem="release", scope="gpu")
    else:
        while gl.atomic_add(flag, 0, sem="acquire", scope="gpu") == 0:
            pass
        gl.store(data + i, i + 1)


@pytest.mark.parametrize("first", ["store", "load"])
def test_one_thread_releases_for_all_only_after_a_barrier(first):
    for seed in SEEDS:
        arrays = [np.zeros(128, np.int32), np.zeros(1, np.int32)]
        run_one(hands_over, arrays, grid=2, seed=seed, FIRST=first, BARRIER=1)
        np.testing.assert_array_equal(arrays[0], np.arange(128) + 1)
        with pytest.raises(DataRace, match="hands_over"):
            run_one(hands_over, arrays, grid=2, seed=seed, FIRST=first, BARRIER=0)
        m = Machine(seed=seed)
        pointers = [m.pointer(m.register(0, a), "int32") for a in arrays]
        m.enqueue(
            0, hands_over, grid=2, args=pointers, num_warps=1, kwargs={"FIRST": first, "BARRIER": 0}
        )
        arrays[1][:] = 0
        m.run()  # one warp needs none


@gluon.jit
def passes_on(data, flags, out):
    """Program p waits for flag p and raises flag p + 1: order is transitive."""
    p = gl.program_id(0)
    last = gl.num_programs(0) - 1
    if p == 0:
        gl.store(data, 5)
    else:
        while gl.atomic_add(flags + p, 0, sem="acquire", scope="gpu") == 0:
            pass
    if p == last:
        gl.store(out, gl.load(data))
    else:
        gl.atomic_xchg(flags + p + 1, 1, sem="release", scope="gpu")


def test_order_is_transitive():
    for seed in range(10):
        out = np.zeros(1, np.int32)
        run_one(passes_on, [np.zeros(1, np.int32), np.zeros(8, np.int32), out], grid=5, seed=seed)
        assert out[0] == 5


@gluon.jit
def release_sequence(data, flag, out):
    """A relaxed atomic between the release and the acquire does not break the order."""
    p = gl.program_id(0)
    if p == 0:
        gl.store(data, 9)
        gl.atomic_add(flag, 1, sem="release", scope="gpu")
    if p == 1:
        while gl.atomic_add(flag, 0, sem="relaxed", scope="gpu") == 0:
            pass
        gl.atomic_add(flag, 1, sem="relaxed", scope="gpu")
    if p == 2:
        while gl.atomic_add(flag, 0, sem="acquire", scope="gpu") < 2:
            pass
        gl.store(out, gl.load(data))


def test_updates_continue_a_release_sequence():
    for seed in range(10):
        out = np.zeros(1, np.int32)
        run_one(
            release_sequence, [np.zeros(1, np.int32), np.zeros(1, np.int32), out], grid=3, seed=seed
        )
        assert out[0] == 9


@gluon.jit
def spins_on_two_flags(flags):
    while (gl.atomic_add(flags, 0, sem="acquire") == 0) | (
        gl.atomic_add(flags + 1, 0, sem="acquire") == 0
    ):
        pass


def test_python_spin_is_a_deadlock_that_names_its_flags():
    m = Machine(max_steps=50_000)
    flags = m.register(0, np.zeros(2, np.int32), name="flags")
    m.label(flags, 0, 8, "ready", 4)
    m.enqueue(0, spins_on_two_flags, grid=1, args=[m.pointer(flags, "int32")])
    with pytest.raises(Deadlock) as caught:
        m.run()
    assert "ready[0] of rank 0 (is 0)" in str(caught.value)
    assert "ready[1] of rank 0 (is 0)" in str(caught.value)
    assert m.steps < 1000


@gluon.jit
def never_ends(counter):
    while gl.atomic_add(counter, 1, sem="relaxed") >= 0:
        pass


def test_livelock_is_bounded():
    with pytest.raises(Livelock, match="never_ends"):
        run_one(never_ends, [np.zeros(1, np.int32)])


DEADLINE = """
{
.reg .pred p, q;
.reg .b32 v;
.reg .b64 now, end;
mov.u64 end, %globaltimer;
add.u64 end, end, 1000000;
again:
ld.acquire.sys.global.b32 v, [$1];
setp.ge.s32 p, v, $2;
@p bra done;
mov.u64 now, %globaltimer;
setp.lt.u64 q, now, end;
@q bra again;
mov.b32 v, -1;
done:
mov.b32 $0, v;
}
"""


@gluon.jit
def waits_with_a_deadline(flag, out, ASM: gl.constexpr):
    if gl.program_id(0) == 0:
        zero = gl.arange(0, 32) * 0
        got = gl.inline_asm_elementwise(
            ASM, "=r,l,r", [flag + zero, zero + 3], dtype=gl.int32, is_pure=False, pack=1
        )
        gl.store(out, gl.max(got, 0))


def test_deadline_expires_only_when_asked():
    out = np.zeros(1, np.int32)
    m = Machine(expire_deadlines=True)
    run_one(waits_with_a_deadline, [np.zeros(1, np.int32), out], machine=m, ASM=DEADLINE)
    assert out[0] == -1
    with pytest.raises(Deadlock, match=r"array0\+0x0 of rank 0: it is 0; goes on when it is >= 3"):
        run_one(waits_with_a_deadline, [np.zeros(1, np.int32), out], ASM=DEADLINE)
    run_one(waits_with_a_deadline, [np.full(1, 4, np.int32), out], ASM=DEADLINE)
    assert out[0] == 4


def test_machine_is_usable_after_a_fault():
    m = Machine()
    a = np.zeros(1, np.int32)
    p = m.pointer(m.register(0, a), "int32")
    m.enqueue(0, all_programs_write, grid=2, args=[p], kwargs={"ATOMIC": 0, "SCOPE": "gpu"})
    with pytest.raises(DataRace):
        m.run()
    m.enqueue(0, all_programs_write, grid=1, args=[p], kwargs={"ATOMIC": 0, "SCOPE": "gpu"})
    m.run()
    assert a[0] == 1
