#!/usr/bin/env python3
"""Times training steps of examples/train_gpt's model in torch: the same layers, batch, AdamW and clipping, random tokens.

Compare the fastest mode with `train_gpt --recipe delayed` of the same sizes, alone on the machine, with its median ms per step.
Which mode is fastest depends on the processor, so all of them run and take turns step by step: `f32`, `bf16` (autocast), and
`medium` (f32 whose matrix products may be computed in bf16). `--kept` also prints the bytes that the first block keeps for the backward pass, parameters aside: what
`cargo bench --bench cpu -- --filter "kept for backward"` counts by formula.

    pip install torch
    python3 tools/torch_gpt.py
    python3 tools/torch_gpt.py --hidden 768 --layers 12 --heads 12 --context 256
"""

import argparse
import statistics
import time

import torch
import torch.nn.functional as F
from torch import nn


class Block(nn.Module):
    def __init__(self, hidden, heads):
        super().__init__()
        self.heads = heads
        self.norm_attention = nn.LayerNorm(hidden)
        self.query, self.key, self.value, self.proj = (nn.Linear(hidden, hidden) for _ in range(4))
        self.norm_mlp = nn.LayerNorm(hidden)
        self.up = nn.Linear(hidden, 4 * hidden)
        self.down = nn.Linear(4 * hidden, hidden)

    def forward(self, x, cos, sin):
        batch, tokens, hidden = x.shape
        normed = self.norm_attention(x)

        def heads(linear):
            return linear(normed).view(batch, tokens, self.heads, hidden // self.heads).transpose(1, 2)

        def rope(y):
            a, b = y.chunk(2, -1)
            return torch.cat([a * cos - b * sin, a * sin + b * cos], -1).to(y.dtype)

        q, k, v = rope(heads(self.query)), rope(heads(self.key)), heads(self.value)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).reshape(batch, tokens, hidden))
        return x + self.down(F.gelu(self.up(self.norm_mlp(x)), approximate="tanh"))


class Gpt(nn.Module):
    def __init__(self, args):
        super().__init__()
        self.embed = nn.Embedding(args.vocab, args.hidden)
        self.blocks = nn.ModuleList(Block(args.hidden, args.heads) for _ in range(args.layers))
        self.norm = nn.LayerNorm(args.hidden)
        self.lm_head = nn.Linear(args.hidden, args.vocab, bias=False)
        half = args.hidden // args.heads // 2
        angles = torch.arange(args.context)[:, None] * 10000.0 ** (-torch.arange(half) / half)[None]
        self.cos, self.sin = angles.cos(), angles.sin()

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        return self.lm_head(self.norm(x))


MODES = ("f32", "bf16", "medium")


def autocast(mode):
    torch.set_float32_matmul_precision("medium" if mode == "medium" else "highest")
    return torch.autocast("cpu", torch.bfloat16, enabled=mode == "bf16")


def kept(model, args, mode):
    """Bytes that the first block saves for its backward pass: those that grow with the batch, and the others, which are copies of
    parameters made by autocast."""
    fixed = {t.untyped_storage().data_ptr() for t in (*model.parameters(), model.cos, model.sin)}

    def of(batch):
        found = {}

        def pack(tensor):
            # Kept until all are counted, so that no address is reused.
            found.setdefault(tensor.untyped_storage().data_ptr(), tensor)
            return tensor

        x = torch.randn(batch, args.context, args.hidden, requires_grad=True)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), autocast(mode):
            y = model.blocks[0](x, model.cos, model.sin)
        total = sum(t.untyped_storage().nbytes() for at, t in found.items() if at not in fixed)
        del y
        return total

    one = of(args.batch)
    grows = of(2 * args.batch) - one
    return grows, one - grows


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    sizes = {"batch": 8, "hidden": 256, "layers": 4, "heads": 4, "context": 128, "vocab": 256, "steps": 20}
    sizes["threads"] = torch.get_num_threads()
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=default, help=f"[default: {default}]")
    known = ",".join(MODES)
    parser.add_argument("--modes", default=known, help=f"the modes to time [default: {known}]")
    parser.add_argument("--kept", action="store_true", help="also print the bytes that a block keeps for the backward pass")
    args = parser.parse_args()
    if args.hidden % (2 * args.heads):
        parser.error(f"--hidden {args.hidden} is no multiple of twice --heads {args.heads}")
    modes = args.modes.split(",")
    if unknown := set(modes) - set(MODES):
        parser.error(f"--modes {','.join(sorted(unknown))}: {known} are known")
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    model = Gpt(args)
    count = sum(p.numel() for p in model.parameters())
    print(f"torch {torch.__version__}, {args.threads} threads, {count / 1e6:.2f} million parameters")
    if args.kept:
        for mode in modes:
            data, weights = kept(model, args, mode)
            print(f"{mode:<6} a block keeps {data} bytes for the backward pass, and {weights} of weights it has cast")

    adamw = {"lr": 1e-4, "weight_decay": 0.1, "betas": (0.9, 0.95), "fused": True}
    optimizers = {mode: torch.optim.AdamW(model.parameters(), **adamw) for mode in modes}
    times = {mode: [] for mode in modes}
    for _ in range(args.steps):
        for mode, optimizer in optimizers.items():
            tokens = torch.randint(0, args.vocab, (args.batch, args.context + 1))
            began = time.perf_counter()
            with autocast(mode):
                logits = model(tokens[:, :-1])
                loss = F.cross_entropy(logits.float().reshape(-1, args.vocab), tokens[:, 1:].reshape(-1))
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            times[mode].append(time.perf_counter() - began)
    # The first steps fill caches.
    medians = {mode: 1e3 * statistics.median(seconds[2:] or seconds) for mode, seconds in times.items()}
    for mode, seconds in times.items():
        print(f"{mode:<6} median {medians[mode]:.1f} ms, least {1e3 * min(seconds):.1f} ms")
    fastest = min(medians, key=medians.get)
    print(f"fastest: {fastest}, {medians[fastest]:.1f} ms")


if __name__ == "__main__":
    main()
