"""Makes blocks.safetensors: the casts of microscaling (torchao) and of DeepSeek's blocks, on a CPU.

pip install torch==2.15.0 torchao==0.18.0 safetensors; python blocks.py blocks.safetensors

torchao's own function makes the microscaling cast. The block casts are DeepSeek's formulas (DeepGEMM's per-token and
per-block casts) in plain torch, because their kernels need a GPU.
"""

import sys

import torch
from safetensors.torch import save_file
from torchao.prototype.mx_formats.mx_tensor import ScaleCalculationMode, to_mx

E4M3 = torch.float8_e4m3fn
ROWS, COLS, BLOCK = 256, 384, 128


def inputs():
    torch.manual_seed(0)
    x = torch.randn(ROWS, COLS)
    # Rows and columns of very different sizes, powers of two, ties, a block of zeros.
    x *= 2.0 ** torch.randint(-20, 20, (ROWS, 1))
    x[:, 64:96] *= 1e-3
    x[8:16] = 2.0 ** torch.randint(-8, 9, (8, COLS))
    x[16:24] = torch.randint(-448, 449, (8, COLS)).float()
    x[24, :] = torch.nextafter(torch.full((COLS,), 448.0), torch.tensor(torch.inf))
    x[25, :] = torch.nextafter(torch.full((COLS,), 448.0), torch.tensor(0.0))
    x[0:4] = 0
    return x


def power_of_two_at_least(s):
    return torch.pow(2.0, torch.ceil(torch.log2(s.abs())))


def per_token(x, ue8m0):
    """DeepGEMM's per_token_cast_to_fp8: groups of 1 x 128."""
    groups = x.view(ROWS, -1, BLOCK)
    amax = groups.abs().amax(dim=2).clamp(1e-4)
    s = amax / 448.0
    if ue8m0:
        s = power_of_two_at_least(s)
    codes = (groups * (1.0 / s.unsqueeze(2))).to(E4M3)
    return codes.view(ROWS, COLS), s


def per_block(x, ue8m0):
    """DeepGEMM's per_block_cast_to_fp8: blocks of 128 x 128."""
    blocks = x.view(ROWS // BLOCK, BLOCK, COLS // BLOCK, BLOCK)
    amax = blocks.abs().amax(dim=(1, 3), keepdim=True).clamp(1e-4)
    s = amax / 448.0
    if ue8m0:
        s = power_of_two_at_least(s)
    codes = (blocks * (1.0 / s)).to(E4M3)
    return codes.view(ROWS, COLS), s.view(ROWS // BLOCK, COLS // BLOCK)


def main(path):
    x = inputs()
    out = {"x": x}
    for name, values in [("f32", x), ("bf16", x.bfloat16())]:
        scale, codes = to_mx(
            values, E4M3, 32, scaling_mode=ScaleCalculationMode.RCEIL
        )
        out[f"mx_{name}.codes"] = codes.view(torch.uint8).reshape(ROWS, COLS)
        out[f"mx_{name}.scale"] = scale.view(torch.uint8).reshape(ROWS, COLS // 32)
    for name, cast in [("token", per_token), ("block", per_block)]:
        codes, s = cast(x, ue8m0=True)
        out[f"{name}_ue8m0.codes"] = codes.view(torch.uint8)
        out[f"{name}_ue8m0.scale"] = s
    save_file({k: v.contiguous() for k, v in out.items()}, path)


if __name__ == "__main__":
    main(sys.argv[1])
