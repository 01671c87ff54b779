"""The same products and attention in torch, for the figures beside ours: one line of JSON each, times are medians of events."""

import json
import statistics

import torch


def median_ms(run, rounds=30):
    for _ in range(5):
        run()
    times = []
    for _ in range(rounds):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        run()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times)


def report(name, ms, **more):
    print(json.dumps({"name": name, "ms": round(ms, 4), **more}), flush=True)


def main():
    torch.manual_seed(0)
    device = "cuda"
    n = 8192
    x, w = (torch.randn(n, n, device=device, dtype=torch.bfloat16) for _ in range(2))
    tflop = 2 * n**3 / 1e12
    ms = median_ms(lambda: x @ w.t())
    report("bf16 8192^3", ms, tflops=round(tflop / ms * 1e3, 1))
    one = torch.ones((), device=device)
    rows = torch.ones(n, 1, device=device)
    x8, w8 = x.to(torch.float8_e4m3fn), w.to(torch.float8_e4m3fn)
    for fast in (True, False):
        for name, scale_x, scale_w in (("tensorwise", one, one), ("rowwise", rows, rows.t())):
            def product():
                torch._scaled_mm(
                    x8, w8.t(), scale_a=scale_x, scale_b=scale_w, out_dtype=torch.bfloat16, use_fast_accum=fast
                )

            try:
                ms = median_ms(product)
            except RuntimeError as error:
                print(json.dumps({"name": f"_scaled_mm {name}", "error": str(error).splitlines()[0]}))
                continue
            report(f"_scaled_mm {name}, fast_accum={fast}", ms, tflops=round(tflop / ms * 1e3, 1))
    q, k, v = (
        torch.randn(4, 32, 2048, 128, device=device, dtype=torch.bfloat16, requires_grad=True) for _ in range(3)
    )
    attention = torch.nn.functional.scaled_dot_product_attention
    report("attention forward 4x32x2048x128", median_ms(lambda: attention(q, k, v, is_causal=True)))
    y = attention(q, k, v, is_causal=True)
    grad = torch.randn_like(y)
    inputs = (q, k, v)
    report(
        "attention backward 4x32x2048x128",
        median_ms(lambda: torch.autograd.grad(y, inputs, grad, retain_graph=True)),
    )
    source, copy = torch.randn(1 << 28, device=device), torch.empty(1 << 28, device=device)
    ms = median_ms(lambda: copy.copy_(source))
    report("copy of 1 GiB", ms, gigabytes_per_second=round(2 * (1 << 30) / ms / 1e6, 1))


main()
