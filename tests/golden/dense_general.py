"""flax's DenseGeneral, forward and backward, in f32 and with its FP8 dots: python dense_general.py OUT.

Made with flax 0.12.8, jax 0.10.2, numpy 2.4.6 and safetensors 0.8.0, on a CPU.

`OUT/dense_general.safetensors` has for each case `<case>.x`, `.kernel`, `.bias`, `.cotangent` (inputs; the cotangent is the gradient of the result)
and `.y`, `.grad_x`, `.grad_kernel`, `.grad_bias`. The metadata entry `cases` says, as JSON, which features, axes and batch axes each
has. FP8 cases run three steps at a history of two, each with its own variables; they have `<case>.<step>.x` and so on, and after each
step `<case>.<step>.state`: dequant_scale (that of this step) and history (two values) of input, kernel and gradient.
"""

import json
import sys

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax.linen import fp8_ops
from jax import lax
from safetensors.numpy import save_file

# name: shape of the input, features, axis, batch_dims, use_bias
CASES = {
    "published": ((2, 3, 6, 7), (4, 5), (1, -1), (), True),
    "last": ((5, 6), (4,), (-1,), (), True),
    "one_dimension": ((9,), (3, 2), (0,), (), True),
    "heads": ((2, 3, 8), (2, 4), (-1,), (), True),
    "back": ((2, 3, 2, 4), (8,), (-2, -1), (), True),
    "reversed": ((4, 3, 5), (6,), (-1, 0), (), True),
    "first": ((4, 3, 5), (2, 3), (0,), (), False),
    "all": ((3, 4), (5, 2), (0, 1), (), True),
    "batch": ((3, 4, 6), (5,), (-1,), (0,), True),
    "batch_two": ((2, 3, 4, 5), (2, 3), (3,), (0, 1), True),
    "batch_middle_contracted": ((2, 6, 4, 3), (5,), (1, 3), (0,), True),
    "batch_only": ((4, 6), (3,), (1,), (0,), False),
}
# Only lax's: flax asks for leading batch axes.
FREE = {"free_batch": ((3, 4, 2, 5), (6,), (3,), (2,)), "free_batch_two": ((2, 3, 4, 5), (3, 2), (1,), (3, 0))}
FP8 = ["published", "reversed", "batch", "batch_two"]


def values(rng, shape):
    return (rng.uniform(-1, 1, shape)).astype(np.float32)


def case(rng, shape, features, axis, batch_dims, use_bias, dot=None):
    layer = nn.DenseGeneral(features, axis=axis, batch_dims=batch_dims, use_bias=use_bias, dot_general_cls=dot)
    x = values(rng, shape)
    variables = layer.init(jax.random.key(0), x)
    params = {name: values(rng, value.shape) for name, value in variables["params"].items()}
    return layer, x, variables, params


def main(out):
    rng = np.random.default_rng(28)
    tensors, cases = {}, {}
    with jax.default_matmul_precision("highest"):
        for name, (shape, features, axis, batch_dims, use_bias) in CASES.items():
            layer, x, _, params = case(rng, shape, features, axis, batch_dims, use_bias)
            y, pull = jax.vjp(lambda params, x: layer.apply({"params": params}, x), params, x)
            cotangent = values(rng, y.shape)
            grads, grad_x = pull(cotangent)
            add(tensors, name, dict(x=x, cotangent=cotangent, y=y, grad_x=grad_x, **params), grads)
            cases[name] = dict(features=features, axis=axis, batch_axis=batch_dims, bias=use_bias, fp8=False)
        for name, (shape, features, axis, batch_dims) in FREE.items():
            axis, batch = sorted(axis), sorted(batch_dims)
            x = values(rng, shape)
            kernel = values(rng, [shape[i] for i in batch] + [shape[i] for i in axis] + list(features))
            inner = ((axis, [len(batch) + i for i in range(len(axis))]), (batch, list(range(len(batch)))))
            y, pull = jax.vjp(lambda kernel, x: lax.dot_general(x, kernel, inner), kernel, x)
            cotangent = values(rng, y.shape)
            grad_kernel, grad_x = pull(cotangent)
            add(tensors, name, dict(x=x, cotangent=cotangent, y=y, grad_x=grad_x, kernel=kernel), dict(kernel=grad_kernel))
            cases[name] = dict(features=features, axis=axis, batch_axis=batch_dims, bias=False, fp8=False)
        for name in FP8:
            shape, features, axis, batch_dims, use_bias = CASES[name]
            dot = lambda: fp8_ops.Fp8DirectDotGeneralOp(amax_history_length=2, name="dot")
            layer, x, variables, params = case(rng, shape, features, axis, batch_dims, use_bias, dot)
            state = variables["_overwrite_with_gradient"]
            for step in range(3):
                x = values(rng, shape) * np.float32(3**step)
                params = {name: values(rng, value.shape) * np.float32(2**step) for name, value in params.items()}
                call = lambda params, state, x: layer.apply({"params": params, "_overwrite_with_gradient": state}, x)
                y, pull = jax.vjp(call, params, state, x)
                cotangent = values(rng, y.shape) * np.float32(2**-step)
                grads, state, grad_x = pull(cotangent)
                add(tensors, f"fp8_{name}.{step}", dict(x=x, cotangent=cotangent, y=y, grad_x=grad_x, **params), grads)
                (rows,) = state.values()
                rows = [
                    [*rows[f"{role}_scale"], *rows[f"{role}_amax_history"]] for role in ("input", "kernel", "output_grad")
                ]
                tensors[f"fp8_{name}.{step}.state"] = np.asarray(rows, np.float32)
            cases[f"fp8_{name}"] = dict(features=features, axis=axis, batch_axis=batch_dims, bias=use_bias, fp8=True)
    tensors = {name: np.ascontiguousarray(value, np.float32) for name, value in tensors.items()}
    save_file(tensors, f"{out}/dense_general.safetensors", metadata={"cases": json.dumps(cases)})


def add(tensors, name, given, grads):
    for key, value in given.items():
        tensors[f"{name}.{key}"] = value
    for key, value in grads.items():
        tensors[f"{name}.grad_{key}"] = value


if __name__ == "__main__":
    main(sys.argv[1])
