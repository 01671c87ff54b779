"""Writes `gguf_q8_0.safetensors`: f32 values and the Q8_0 blocks that the gguf package makes of them.

    python tests/golden/gguf_q8_0.py

Needs numpy, gguf and safetensors (made with gguf 0.19, whose rule is that of ggml's reference C code).
"""

import os

import numpy as np
from gguf import GGMLQuantizationType
from gguf.quants import dequantize, quantize
from safetensors.numpy import save_file

f32 = np.float32
blocks = [np.zeros(32, f32), np.full(32, -0.0, f32)]

# Every tie between two codes, and the numbers beside it, for scales that are powers of two: d = 2^e, x = d (k + 1/2).
for exponent in (-30, -24, -20, -14, -3, 0, 9):
    d = f32(2.0**exponent)
    ties = (np.arange(-127, 127, dtype=f32) + f32(0.5)) * d
    around = np.concatenate([ties, np.nextafter(ties, f32(np.inf)), np.nextafter(ties, f32(-np.inf))])
    around = np.concatenate([around, np.zeros(-len(around) % 31, f32)]).reshape(-1, 31)
    for row in around:
        blocks.append(np.concatenate([[f32(127) * d], row]).astype(f32))

# Scales that are subnormal or zero in f16, and at the ties of f16's rounding.
for half in range(0, 40):
    for step in (f32(0), f32(2.0**-26), f32(2.0**-25)):
        amax = (f32(half) * f32(2.0**-24) + step) * f32(127)
        blocks.append(np.linspace(-amax, amax, 32, dtype=f32))
for half in range(1024, 1024 + 24):
    amax = f32(half + 0.5) * f32(2.0**-10) * f32(127)
    blocks.append(np.linspace(amax, -amax / 3, 32, dtype=f32))

# The largest scale, and random values of many sizes.
blocks.append(np.linspace(-65504 * 127, 65504 * 126, 32, dtype=f32))
random = np.random.default_rng(29)
for exponent in range(-100, 20, 2):
    blocks.append((random.standard_normal(32) * 2.0**exponent).astype(f32))

values = np.stack(blocks).astype(f32)
assert np.isfinite(values).all()
codes = quantize(values, GGMLQuantizationType.Q8_0)
back = dequantize(codes, GGMLQuantizationType.Q8_0)
path = os.path.join(os.path.dirname(__file__), "gguf_q8_0.safetensors")
save_file({"values": values, "blocks": codes, "dequantized": back}, path)
print(values.shape, codes.shape)
