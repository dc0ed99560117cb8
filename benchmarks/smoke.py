"""First run on a GPU: fused against chain and reference, small shapes; then rough times."""
import sys, time, torch
sys.path.insert(0, "src")
from megamoe.config import MoEConfig
from megamoe.weights import pack_weights
try:
    from megamoe.checkpoint import CheckpointExperts, quantise_experts
except ImportError:
    from megamoe.weights import CheckpointExperts, quantise_experts
from megamoe.forward import MegaMoE
from megamoe.reference import moe_reference, compare

def case(recipe, ranks, tokens, shape=(512, 256, 16, 4), block_m=None, seed=0, calls=2, programs=None):
    h, i, e, k = shape
    g = torch.Generator().manual_seed(seed)
    rnd = lambda *s: torch.randn(*s, generator=g)
    config = MoEConfig(hidden=h, intermediate=i, experts=e, topk=k, ranks=ranks, capacity=max(max(tokens),1), recipe=recipe, block_m=block_m, timeout_s=2.0)
    ck = CheckpointExperts.from_per_expert(gate_proj=[(rnd(i,h)/h**.5).bfloat16() for _ in range(e)], up_proj=[(rnd(i,h)/h**.5).bfloat16() for _ in range(e)], down_proj=[(rnd(h,i)/i**.5).bfloat16() for _ in range(e)])
    if recipe != "bf16": ck = quantise_experts(ck, recipe)
    weights = [pack_weights(config, ck, rank=r) for r in range(ranks)]
    moe = MegaMoE(config=config, weights=weights, backend="gluon", programs=programs)
    for call in range(calls):
        x = [rnd(t, h).bfloat16() for t in tokens]
        idx = [torch.stack([torch.randperm(e, generator=g)[:k] for _ in range(t)]).to(torch.int32) if t else torch.zeros(0,k,dtype=torch.int32) for t in tokens]
        for a in idx: a[torch.rand(a.shape, generator=g) < .1] = -1
        w = [torch.rand(t, k, generator=g) for t in tokens]
        dev = lambda L: [a.cuda() for a in L]
        args = dict(x=dev(x), topk_idx=dev(idx), topk_weights=dev(w))
        t0=time.time()
        y = [a.clone() for a in moe(**args)]; torch.cuda.synchronize(); t1=time.time()
        try: moe.check()
        except Exception as ex: print("FUSED", recipe, ranks, tokens, block_m, ex, flush=True); return
        c = [a.clone() for a in moe.chain(**args)]; torch.cuda.synchronize()
        try: moe.check()
        except Exception as ex: print("CHAIN", recipe, ranks, tokens, block_m, ex, flush=True); return
        same = all(torch.equal(a, b) for a, b in zip(y, c))
        xs = torch.cat([moe.dequantised_x(a) for a in x]).double()
        ref = moe_reference(x=xs, topk_idx=torch.cat(idx), topk_weights=torch.cat(w), gate=lambda q: ck.dequantise(q)[0], up=lambda q: ck.dequantise(q)[1], down=lambda q: ck.dequantise(q)[2], l1_output="bf16" if recipe=="bf16" else "e4m3")
        res = compare(torch.cat(y).cpu().double(), ref)
        resc = compare(torch.cat(c).cpu().double(), ref)
        print(recipe, "ranks", ranks, tokens, "bm", block_m, "call", call, "equal", same, f"rel {res.relative_l2:.5f} chain {resc.relative_l2:.5f} {t1-t0:.2f}s", flush=True)

def bench(recipe, tokens, shape, block_m=None, trace=None):
    h, i, e, k = shape
    config = MoEConfig(hidden=h, intermediate=i, experts=e, topk=k, ranks=1, capacity=8192, recipe=recipe, block_m=block_m, timeout_s=2.0)
    from megamoe.weights import KernelWeights, _allocate
    w = _allocate(config, 0, "cuda")
    g = torch.Generator(device="cuda").manual_seed(1)
    for name, t in w.tensors.items():
        if "offset" in name: t.fill_(0x04050607)
        elif "scale" in name: t.fill_(2.0**-6)
        elif t.dtype == torch.uint8: t.copy_(torch.randint(0, 256, t.shape, generator=g, device="cuda", dtype=torch.uint8))
        else:
            for j in range(0, t.shape[0], 65536): t[j:j+65536] = (torch.randn(t[j:j+65536].shape, generator=g, device="cuda", dtype=torch.bfloat16) * .05).to(t.dtype)
    moe = MegaMoE(config=config, weights=w, backend="gluon", trace_events=256 if trace else 0)
    x = torch.randn(tokens, h, generator=g, device="cuda").bfloat16()
    idx = torch.stack([(torch.arange(k, device="cuda") * (e // k) + j) % e for j in range(tokens)]).to(torch.int32)
    wt = torch.rand(tokens, k, generator=g, device="cuda")
    args = dict(x=x, topk_idx=idx, topk_weights=wt)
    y = moe(**args).clone(); torch.cuda.synchronize(); moe.check()
    if trace:
        flush = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
        for _ in range(4): flush.zero_(); moe(**args)
        torch.cuda.synchronize()
        torch.save(moe._fused.buffers[0].view("trace").cpu(), trace); return
    c = moe.chain(**args).clone(); torch.cuda.synchronize(); moe.check()
    from megamoe.launch import FUSED, CHAIN
    out = []
    flush = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
    for be, L in ((moe._fused, FUSED), (moe._chain, CHAIN)):
        pol = [be.plan.policy(tokens)]
        ts = []
        for _ in range(12):
            flush.zero_(); torch.cuda._sleep(2_000_000)
            s, en = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            s.record(); be.run(L, pol, [tokens]); en.record(); torch.cuda.synchronize(); ts.append(s.elapsed_time(en)*1e3)
        out.append(sorted(ts)[len(ts)//2])
    moe.check()
    print(recipe, shape, tokens, pol[0].block_m, "equal", torch.equal(y, c), f"fused {out[0]:.0f} us chain {out[1]:.0f} us", flush=True)

if __name__ == "__main__":
    if "cases" in sys.argv:
        for recipe in ("bf16", "fp8", "fp8_block", "mxfp4"):
            for bm in (16, 128, 32, 64):
                try: case(recipe, 1, [37], block_m=bm)
                except Exception as ex: print("EXC", recipe, bm, repr(ex)[:600], flush=True)
            try:
                case(recipe, 2, [37, 5], block_m=16); case(recipe, 4, [300, 0, 5, 1])
            except Exception as ex: print("EXC", recipe, repr(ex)[:600], flush=True)
    if "two" in sys.argv:
        case("mxfp4", 4, [300, 0, 5, 1], calls=2); case("fp8", 2, [64, 1000], calls=2); case("fp8_block", 1, [300], block_m=128); case("fp8_block", 2, [64, 64], block_m=16)
    if "trace" in sys.argv:
        import os
        for recipe, t in (("mxfp4", 64), ("fp8", 64), ("fp8", 2048), ("mxfp4", 2048)):
            bench(recipe, t, (4096, 2048, 32, 6), trace=f"{os.environ['OUT']}/{recipe}_{t}.pt")
    if "bench" in sys.argv:
        for recipe in ("mxfp4", "fp8", "fp8_block", "bf16"):
            for t in {"mxfp4": (64, 256, 512, 2048), "fp8": (64, 512, 2048, 8192), "fp8_block": (2048,), "bf16": ()}[recipe]:
                try: bench(recipe, t, (4096, 2048, 32, 6))
                except Exception as ex: print("EXC", recipe, t, repr(ex)[:600], flush=True)
