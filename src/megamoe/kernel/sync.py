# ruff: noqa: E501 (the protocol is a table)
"""Every wait and signal between SMs and between GPUs.

The protocol.  `set` is the counter set of this call (epoch & 1); each launch clears the other set.

| flag | writer | reader | order, scope | cleared | why that is safe |
|---|---|---|---|---|---|
| control.counted | dispatch of each program, once it has counted and routed its share | the program that arrives last | acq_rel, sys | by that program | nobody touches it again before the next launch |
| counts_ready[src] | last program of rank src, after its counts | schedule and dispatch here | release / acquire, sys | never: holds src's epoch | epochs only grow; a peer is at most one call ahead, and counts exist twice |
| recv_counts[set][src] | last program of rank src | schedule and dispatch here | by counts_ready | overwritten two calls later | src can start that call only after every rank finished the one before it |
| routes[src] | dispatch of rank src | dispatch here | by counts_ready | overwritten one call later | src ends a call only when all its rows were pulled and came back |
| arrived[set][block] | dispatch here, a row at a time; an expert's last row adds its padding | load tokens; load weights, once a call | release / acquire, gpu, proxy fence on both sides | by the next launch | the launch that used it has ended, and the one that will use it has not begun |
| l1_done[set][block] | signal, after all math partitions have stored an L1 tile | load tokens | release / acquire, gpu, proxy fence on both sides | as arrived | as arrived |
| l2_done[set][block] | signal, after all math partitions have stored an L2 tile | the one that arrives last; dispatch before it reuses the ring slot | acq_rel, sys | as arrived | as arrived |
| token_arrivals[set][token] | signal, at the token's owner, for each of its rows whose L2 tiles are all stored | combine | release / acquire, sys | as arrived | a launch ends only when all its tokens have arrived, and a peer writes the other set only after this rank's next launch has published counts |
| unpacked[set][expert] | dispatch of each program, after its share of the expert | load weights | release / acquire, gpu, proxy fence on both sides | as arrived, whether that launch unpacks or not | as arrived |
| claimed[set][program] | communicate and math of this program, a claim of its tokens at a time | the same | relaxed | as arrived | what is claimed is ordered by token_arrivals |
| status[1] (abort) | a wait that expired | every wait that spins | release / relaxed, gpu | by setting the buffer up again | the buffer is poisoned until then |

A wait spins inside one block of PTX.  When its deadline passes it writes what it waited for to `status`, raises abort
and returns; from then on no wait blocks, so that every role drains and the launch ends.
"""

from megamoe.kernel.compat import cta_barrier, gl, gluon

# What a wait was for, as written to status[2]; the host turns it into words.
PHASE_COUNTS = gl.constexpr(1)
PHASE_ROWS = gl.constexpr(2)
PHASE_L1 = gl.constexpr(3)
PHASE_SLOT = gl.constexpr(4)
PHASE_PARTIALS = gl.constexpr(5)
PHASE_BAD_EXPERT = gl.constexpr(6)
PHASE_UNPACKED = gl.constexpr(7)

PHASE_NAMES = {
    1: "token counts of a rank",
    2: "rows of a block from dispatch",
    3: "L1 tiles of a block",
    4: "L2 tiles of the block that holds a ring slot",
    5: "partials of a token",
    6: "an expert id in range",
    7: "the unpacked weights of an expert",
}

# $1 flag, $2 wanted, $3 status, $4 phase, $5 index, $6 timeout in ns
_POLL = """
{
.reg .pred p;
.reg .b32 v, d, n, a;
.reg .b64 now, end;
mov.u64 now, %globaltimer;
add.u64 end, now, $6;
mov.b32 n, 0;
poll:
ld.acquire.SCOPE.global.b32 v, [$1];
sub.s32 d, v, $2;
setp.ge.s32 p, d, 0;
@p bra done;
add.u32 n, n, 1;
and.b32 a, n, 31;
setp.ne.u32 p, a, 0;
@p bra poll;
ld.relaxed.gpu.global.b32 a, [$3+4];
setp.ne.u32 p, a, 0;
@p bra done;
mov.u64 now, %globaltimer;
setp.lt.u64 p, now, end;
@p bra poll;
atom.relaxed.sys.global.cas.b32 a, [$3], 0, 1;
setp.ne.u32 p, a, 0;
@p bra done;
st.relaxed.sys.global.b32 [$3+8], $4;
st.relaxed.sys.global.b32 [$3+12], $5;
st.relaxed.sys.global.b32 [$3+16], $2;
st.relaxed.sys.global.b32 [$3+20], v;
st.release.sys.global.b32 [$3+24], 1;
st.release.sys.global.b32 [$3+4], 1;
done:
mov.b32 $0, v;
}
"""
POLL_GPU = gl.constexpr(_POLL.replace("SCOPE", "gpu"))
POLL_SYS = gl.constexpr(_POLL.replace("SCOPE", "sys"))

PEEK_SYS = gl.constexpr("ld.acquire.sys.global.b32 $0, [$1];")

_REPORT = """
{
.reg .pred p;
.reg .b32 a;
mov.b32 $0, 0;
setp.eq.s32 p, $5, 0;
@p bra done;
atom.relaxed.sys.global.cas.b32 a, [$1], 0, 1;
setp.ne.u32 p, a, 0;
@p bra done;
st.relaxed.sys.global.b32 [$1+8], $2;
st.relaxed.sys.global.b32 [$1+12], $3;
st.relaxed.sys.global.b32 [$1+16], 0;
st.relaxed.sys.global.b32 [$1+20], $4;
st.release.sys.global.b32 [$1+24], 1;
done:
}
"""
REPORT = gl.constexpr(_REPORT)
PROXY_FENCE = gl.constexpr("fence.proxy.async; mov.b32 $0, $1;")


@gluon.jit
def wait_gpu(flag, wanted, status, PHASE: gl.constexpr, index, TIMEOUT: gl.constexpr):
    """Spin until `*flag >= wanted` (wrapping), acquire at GPU scope.  Returns what was seen: less only after an abort."""
    phase = index * 0 + PHASE
    timeout = index.to(gl.int64) * 0 + TIMEOUT
    return gl.inline_asm_elementwise(
        POLL_GPU,
        "=r,l,r,l,r,r,l,~{memory}",
        [flag, wanted, status, phase, index, timeout],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def wait_sys(flag, wanted, status, PHASE: gl.constexpr, index, TIMEOUT: gl.constexpr):
    """As :func:`wait_gpu`, for flags that another GPU writes."""
    phase = index * 0 + PHASE
    timeout = index.to(gl.int64) * 0 + TIMEOUT
    return gl.inline_asm_elementwise(
        POLL_SYS,
        "=r,l,r,l,r,r,l,~{memory}",
        [flag, wanted, status, phase, index, timeout],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def peek_sys(flag):
    """What `*flag` is now, acquired at system scope."""
    return gl.inline_asm_elementwise(
        PEEK_SYS, "=r,l,~{memory}", [flag], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def report(status, PHASE: gl.constexpr, index, seen, failed):
    """Write an error of this rank's own input to `status` where `failed` is not 0.  No abort."""
    phase = index * 0 + PHASE
    gl.inline_asm_elementwise(
        REPORT,
        "=r,l,r,r,r,r,~{memory}",
        [status, phase, index, seen, failed],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def fence_async_proxy(x):
    """Order ordinary accesses with TMA accesses.  `x` (int32) only places the fence in every thread that holds it."""
    return gl.inline_asm_elementwise(
        PROXY_FENCE, "=r,r,~{memory}", [x], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def every_thread():
    """An int32 tensor of zeros, one for each thread of the partition."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    return gl.arange(0, 32 * gl.num_warps(), layout=layout) * 0


@gluon.jit
def signal_tile(flag):
    """Publish ordinary stores that this partition has seen or made to TMA readers on this GPU: one more tile is done."""
    fence_async_proxy(every_thread())
    cta_barrier()
    gl.atomic_add(flag, 1, sem="release", scope="gpu")


@gluon.jit
def signal_rows(flags, amounts, mask):
    """Publish ordinary stores of the whole partition to TMA readers on this GPU: rows of several blocks arrived."""
    fence_async_proxy(every_thread())
    cta_barrier()
    gl.atomic_add(flags, amounts, mask=mask, sem="release", scope="gpu")


@gluon.jit
def arrive_last(flag, last, SCOPE: gl.constexpr):
    """Arrive once for the partition, after stores to GPUs in SCOPE; true for the partition that completes the count."""
    cta_barrier()
    return gl.atomic_add(flag, 1, sem="acq_rel", scope=SCOPE) == last


@gluon.jit
def signal_peers(flags, mask):
    """Add 1 to flags of any GPU, after everything this partition has written or seen."""
    cta_barrier()
    gl.atomic_add(flags, mask.to(gl.int32), mask=mask, sem="release", scope="sys")


@gluon.jit
def set_peers(flags, value, mask):
    """Write a value to flags of any GPU, after everything this partition has written or seen."""
    cta_barrier()
    gl.atomic_xchg(flags, value, mask=mask, sem="release", scope="sys")
