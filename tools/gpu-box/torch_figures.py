"""The same products and attention in torch, for the figures beside ours: one line of JSON each, times are medians of events,
of contestants that take turns as in our bench."""

import json
import statistics

import torch


def race(contestants, rounds=20, sample_ms=2.0):
    """Median milliseconds of a call of each, as our bench times them: in turns, several calls to a sample, without a wait between
    samples, so that the chip is as warm and its clock as low as under load. A contestant gets a number that goes up with each call."""
    turns, calls = [0] * len(contestants), []

    def call(i):
        contestants[i](turns[i])
        turns[i] += 1

    for i in range(len(contestants)):
        for _ in range(3):
            call(i)
        torch.cuda.synchronize()
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        call(i)
        end.record()
        end.synchronize()
        calls.append(min(32, max(1, round(sample_ms / begin.elapsed_time(end)))))
    marks = [[] for _ in contestants]
    for _ in range(rounds + 1):
        for i in range(len(contestants)):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            for _ in range(calls[i]):
                call(i)
            end.record()
            marks[i].append((begin, end))
    torch.cuda.synchronize()
    return [
        statistics.median(begin.elapsed_time(end) for begin, end in pairs[1:]) / count
        for pairs, count in zip(marks, calls)
    ]


def report(name, ms, **more):
    print(json.dumps({"name": name, "ms": round(ms, 4), **more}), flush=True)


def main():
    torch.manual_seed(0)
    device = "cuda"
    n = 8192
    tflop = 2 * n**3 / 1e12
    normal = lambda: torch.randn(n, n, device=device, dtype=torch.bfloat16)
    sets = [(normal(), normal()) for _ in range(2)]
    codes = [tuple(x.to(torch.float8_e4m3fn) for x in pair) for pair in sets]
    one = torch.ones((), device=device)
    rows = torch.ones(n, 1, device=device)
    names, contestants = ["bf16 8192^3"], [lambda turn: sets[turn % 2][0] @ sets[turn % 2][1].t()]
    for fast in (True, False):
        for name, scale_x, scale_w in (("tensorwise", one, one), ("rowwise", rows, rows.t())):

            def product(turn, fast=fast, scale_x=scale_x, scale_w=scale_w):
                x, w = codes[turn % 2]
                torch._scaled_mm(x, w.t(), scale_a=scale_x, scale_b=scale_w, out_dtype=torch.bfloat16, use_fast_accum=fast)

            try:
                product(0)
            except RuntimeError as error:
                print(json.dumps({"name": f"_scaled_mm {name}", "error": str(error).splitlines()[0]}))
                continue
            names.append(f"_scaled_mm {name}, fast_accum={fast}")
            contestants.append(product)
    times = race(contestants)
    for name, ms in zip(names, times):
        report(name, ms, tflops=round(tflop / ms * 1e3, 1), ratio_bf16=round(times[0] / ms, 3))
    attention = torch.nn.functional.scaled_dot_product_attention
    for features in (128, 64):
        for causal in (False, True):
            q, k, v = (
                torch.randn(4, 32, 2048, features, device=device, dtype=torch.bfloat16, requires_grad=True)
                for _ in range(3)
            )
            y = attention(q, k, v, is_causal=causal)
            grad, inputs = torch.randn_like(y), (q, k, v)
            times = race([
                lambda _: attention(q, k, v, is_causal=causal),
                lambda _: torch.autograd.grad(y, inputs, grad, retain_graph=True),
            ])
            for part, ms in zip(("forward", "backward"), times):
                report(f"{'causal ' if causal else ''}attention 4x32x2048x{features} {part}", ms)
    source, copy = torch.randn(1 << 28, device=device), torch.empty(1 << 28, device=device)
    (ms,) = race([lambda _: copy.copy_(source)])
    report("copy of 1 GiB", ms, gigabytes_per_second=round(2 * (1 << 30) / ms / 1e6, 1))


main()
