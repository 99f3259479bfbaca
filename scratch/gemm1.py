"""One GPU: the GEMM alone against cuBLAS."""
import sys, itertools, torch
from weaveopt import _native
torch.manual_seed(0)
def ours(a, w, out, tile, group):
    s = torch.cuda.current_stream().cuda_stream
    dt = _native.DType.bfloat16 if a.dtype is torch.bfloat16 else _native.DType.float16
    code = _native.gemm(a.data_ptr(), w.data_ptr(), out.data_ptr(), a.shape[0], w.shape[0], a.shape[1], a.stride(0), w.stride(0), out.stride(0), dt, tile, group, s)
    assert code == 0, _native.cuda_error_text(code)
def check(m, n, k, tile, group, dtype=torch.bfloat16):
    a = torch.randn(m, k, device="cuda", dtype=dtype); w = torch.randn(n, k, device="cuda", dtype=dtype) / k**.5
    out = torch.full((m, n), float("nan"), device="cuda", dtype=dtype)
    ours(a, w, out, tile, group); torch.cuda.synchronize()
    want = a.float() @ w.float().t()
    err = ((out.float() - want).norm() / want.norm()).item()
    print(f"check {m}x{n}x{k} tile {tile} group {group} {dtype}: {err:.2e}", "OK" if err < 6e-3 else "WRONG", flush=True)
    return err < 6e-3
for m, n, k, t, g in [(256,256,64,256,1),(256,256,256,256,1),(512,1024,512,256,2),(100,264,72,256,1),(333,1000,520,256,2),(1024,8192,4096,256,2),(4096,8192,2048,256,4),(129,136,8,128,1),(777,640,1000,128,3),(2048,2048,2048,128,4)]:
    if not check(m,n,k,t,g): sys.exit(1)
check(1000, 2048, 1024, 256, 2, torch.float16)
def timed(f, n):
    g = torch.cuda.CUDAGraph(); f(); torch.cuda.synchronize()
    with torch.cuda.graph(g):
        for _ in range(n): f()
    return g
torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
tot = {}
for m, n, k in itertools.product((1024,2048,4096,8192), (8192,), (2048,4096,7168,14336)):
    a = torch.randn(m, k, device="cuda", dtype=torch.bfloat16); w = torch.randn(n, k, device="cuda", dtype=torch.bfloat16)
    out = torch.empty(m, n, device="cuda", dtype=torch.bfloat16); wt = w.t()
    variants = {"cublas": lambda: torch.mm(a, wt, out=out)}
    for t, g in [(256,2),(256,4),(256,8),(256,64),(128,4)]:
        variants[f"{t}/{g}"] = lambda t=t, g=g: ours(a, w, out, t, g)
    est = 2*m*n*k/650e6
    count = max(2, int(2000/est))
    graphs = {name: timed(f, count) for name, f in variants.items()}
    times = {name: [] for name in graphs}
    for r in range(5):
        for name, gr in graphs.items():
            e0, e1 = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            e0.record(); gr.replay(); e1.record(); torch.cuda.synchronize()
            if r: times[name].append(e0.elapsed_time(e1)*1e3/count)
    med = {name: sorted(t)[len(t)//2] for name, t in times.items()}
    c = med["cublas"]
    print(f"{m:6}x{n}x{k:6} cublas {c:8.1f} us {2*m*n*k/c/1e6:6.0f} TF | " + "  ".join(f"{name} {c/v:.3f}" for name, v in med.items() if name != "cublas"), flush=True)
