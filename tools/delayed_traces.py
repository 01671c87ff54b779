#!/usr/bin/env python3
"""Writes tests/golden/delayed_presets.json: what flax, fp8layers and IPEX remember after each step of delayed scaling.

The rules of the three are stated here in f32 arithmetic of numpy, from what their sources do, apart from any code of this
project. With jax and flax installed, flax's rows are also computed by flax itself (`flax.linen.fp8_ops`) and must be equal.

    python3 tools/delayed_traces.py tests/golden/delayed_presets.json
"""

import json
import sys

import numpy as np

f32 = np.float32
MAX = {"e4m3": f32(448), "e5m2": f32(57344)}


def exact(amax, quant_scale, limit):
    """flax: the limit of the format divided by the amax."""
    return f32(limit / amax) if amax > 0 and np.isfinite(amax) else quant_scale


def by_exponent(amax, quant_scale, limit):
    """fp8layers and IPEX: two to the floor of the binary logarithm of that quotient."""
    if not (amax > 0 and np.isfinite(amax)):
        return quant_scale
    return f32(2.0) ** np.floor(np.log2(f32(limit / amax)))


def flax(amaxes, length, limit):
    """Before a cast: a scale from the history. Then the amax goes into slot 0 of a ring turned to the left."""
    history, dequant_scale = np.zeros(length, f32), f32(1)
    for amax in amaxes:
        quant_scale = exact(history.max(), f32(1) / dequant_scale, limit)
        dequant_scale = f32(1) / quant_scale
        history = np.roll(history, -1)
        history[0] = amax
        yield dequant_scale, history


def fp8layers(amaxes, length, limit):
    """After a cast: the amax goes into slot 0 of a ring turned to the left, then a scale from the history."""
    history, quant_scale = np.zeros(length, f32), f32(1)
    for amax in amaxes:
        history = np.roll(history, -1)
        history[0] = amax
        quant_scale = by_exponent(history.max(), quant_scale, limit)
        yield f32(1) / quant_scale, history


def ipex(amaxes, length, limit):
    """After a cast slot 0 holds the amax. Before the next one: a scale from the history, which then turns to the left and
    has its slot 0 emptied. The row is what the next step begins with."""
    history, quant_scale = np.zeros(length, f32), f32(1)
    for amax in amaxes:
        history[0] = amax
        quant_scale = by_exponent(history.max(), quant_scale, limit)
        history = np.roll(history, -1) if length > 1 else history
        history[0] = 0
        yield f32(1) / quant_scale, history.copy()


def amaxes_of(steps, rng):
    """Magnitudes over forty octaves, some of them powers of two and multiples of the limits, with a plateau that falls."""
    amaxes = np.exp2(rng.uniform(-20, 20, steps)).astype(f32)
    amaxes[::7] = np.exp2(rng.integers(-12, 12, amaxes[::7].size)).astype(f32)
    amaxes[3::11] = (448 * np.exp2(rng.integers(-8, 8, amaxes[3::11].size))).astype(f32)
    falling = np.exp2(np.linspace(6, -10, steps // 3)).astype(f32)
    amaxes[-falling.size :] = falling
    # The logarithm of a quotient that lies an ulp or two below a power of two rounds up; where depends on the library.
    for limit in MAX.values():
        quotient = (limit / amaxes).astype(f32)
        mantissa = quotient.view(np.uint32) & 0x7FFFFF
        assert (mantissa < 0x7FFFF0).all()
    return amaxes


def checked_by_flax(amaxes, length, name):
    try:
        import jax.numpy as jnp
        from flax.linen import fp8_ops
    except ImportError:
        return False
    dtype = {"e4m3": jnp.float8_e4m3fn, "e5m2": jnp.float8_e5m2}[name]
    scale, history = jnp.ones(1, jnp.float32), jnp.zeros(length, jnp.float32)
    for amax, row in zip(amaxes, flax(amaxes, length, MAX[name])):
        scale, history = fp8_ops.update_fp8_meta(jnp.array([amax, -amax / 2]), dtype, scale, history)
        assert np.asarray(scale)[0] == row[0] and (np.asarray(history) == row[1]).all(), (amax, scale, row)
    return True


def main():
    rng, traces, checked = np.random.default_rng(8), [], 0
    short, long = amaxes_of(60, rng), amaxes_of(1060, rng)
    for peer, lengths in [(flax, (1, 4, 1024)), (fp8layers, (16,)), (ipex, (1, 4, 1024))]:
        for length in lengths:
            for name, limit in MAX.items():
                amaxes = long if length == 1024 else short
                rows = list(peer(amaxes, length, limit))
                if peer is flax:
                    checked += checked_by_flax(short if length == 1024 else amaxes, length, name)
                traces.append({
                    "peer": peer.__name__,
                    "length": length,
                    "format": name,
                    "amaxes": "long" if length == 1024 else "short",
                    "dequant_scales": [float(scale) for scale, _ in rows],
                    # Of a long history the last state only.
                    "histories": [[float(amax) for amax in history] for _, history in rows[-1 if length == 1024 else 0 :]],
                })
    amaxes = {"short": [float(amax) for amax in short], "long": [float(amax) for amax in long]}
    with open(sys.argv[1], "w", encoding="utf8") as file:
        json.dump({"amaxes": amaxes, "traces": traces}, file, separators=(",", ":"))
        file.write("\n")
    print(f"{len(traces)} traces, {checked} of flax checked by flax itself")


main()
