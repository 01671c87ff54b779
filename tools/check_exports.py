#!/usr/bin/env python3
"""Opens checkpoints that `fp8` wrote with other libraries and compares every weight, bit by bit.

    fp8 quantize MODEL --scheme channel-token --out OUT
    fp8 dequantize OUT --dtype f32 --out PLAIN
    tools/check_exports.py OUT PLAIN [OUT PLAIN ..]

OUT is any spelling, PLAIN the same checkpoint as `fp8 dequantize` writes it, in f32. How OUT is opened:

| `quant_method` | by |
|---|---|
| compressed-tensors | compressed_tensors, through transformers' `from_pretrained` with `run_compressed=False`, in f32 |
| fp8 with `weight_block_size` | transformers' `from_pretrained` with `dequantize=True`, in f32 (its own grids only: ragged weights are read wrongly) |
| all | torch and safetensors: code * scale as the family's documents say, whatever transformers does |

Needs torch, safetensors, transformers 5, compressed-tensors; run by hand, on a CPU. Exit code 1 if anything differs.
"""

import glob
import json
import os
import sys

import torch
from safetensors import safe_open


def read(directory):
    """All tensors of a directory; with an index only the files that it names, and it must name every tensor."""
    index = os.path.join(directory, "model.safetensors.index.json")
    if os.path.exists(index):
        with open(index) as file:
            index = json.load(file)
        files = sorted(set(index["weight_map"].values()))
        files = [os.path.join(directory, name) for name in files]
    else:
        index, files = None, sorted(glob.glob(os.path.join(directory, "*.safetensors")))
    tensors = {}
    for path in files:
        with safe_open(path, "pt") as file:
            assert file.metadata()["format"] == "pt", path
            for name in file.keys():
                assert name not in tensors, name
                tensors[name] = file.get_tensor(name)
                if index:
                    assert index["weight_map"][name] == os.path.basename(path), name
    if index:
        total = sum(t.numel() * t.element_size() for t in tensors.values())
        assert index["metadata"]["total_size"] == total, "total_size"
        assert set(index["weight_map"]) == set(tensors), "weight_map"
    return tensors


def by_hand(tensors, config):
    """Weights by code * scale, other tensors in f32; scales are dropped."""
    block = config.get("weight_block_size")
    for group in (config.get("config_groups") or {}).values():
        block = block or (group.get("weights") or {}).get("block_structure")
    if config.get("quant_algo") == "fp8_pb_wo":
        block = [128, 128]
    out = {}
    for name, tensor in tensors.items():
        if tensor.dtype != torch.float8_e4m3fn:
            if not name.endswith(("_scale", "_scale_inv", "kv_scale")):
                out[name] = tensor.float()
            continue
        n, k = tensor.shape
        scale = tensors.get(name + "_scale_inv", tensors.get(name + "_scale"))
        if scale.dtype == torch.uint8:
            scale = torch.exp2(scale.float() - 127).repeat_interleave(32, 1)[:, :k]
        elif scale.numel() == 1:
            scale = scale.float().reshape(1, 1)
        elif scale.numel() == n and scale.shape[0] == n and not (block and scale.dim() > 1 and scale.shape[1] > 1):
            scale = scale.float().reshape(n, 1)
        else:
            rows, cols = (n + block[0] - 1) // block[0], (k + block[1] - 1) // block[1]
            scale = scale.float().reshape(rows, cols)
            scale = scale.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)[:n, :k]
        out[name] = tensor.float() * scale
    return out


def by_transformers(directory, method, config):
    """The state of the model that transformers makes of a directory; None where it has no way to dequantize."""
    from transformers import AutoModelForCausalLM

    if method == "compressed-tensors":
        from transformers import CompressedTensorsConfig

        how = CompressedTensorsConfig(run_compressed=False)
    elif method == "fp8" and config.get("weight_block_size"):
        from transformers import FineGrainedFP8Config

        how = FineGrainedFP8Config(dequantize=True)
    else:
        return None
    model = AutoModelForCausalLM.from_pretrained(
        directory, quantization_config=how, dtype=torch.float32, device_map="cpu"
    )
    return {name: tensor for name, tensor in model.state_dict().items() if not name.endswith("_scale")}


def compare(what, got, expected):
    """Prints one line; the number of tensors that differ."""
    wrong = []
    for name, tensor in expected.items():
        other = got.get(name)
        if other is None:
            wrong.append(f"{name} is missing")
        elif other.dtype == torch.float8_e4m3fn:
            wrong.append(f"{name} is still FP8")
        elif not torch.equal(other.float(), tensor):
            far = (other.float() - tensor).abs().max().item()
            wrong.append(f"{name} differs by up to {far:.3e}")
    extra = sorted(set(got) - set(expected))
    print(f"  {what}: {len(expected) - len(wrong)} of {len(expected)} tensors equal to the bit"
          + (f"; beside them {', '.join(extra[:3])}" if extra else ""))
    for line in wrong[:5]:
        print(f"    {line}")
    return len(wrong)


def main(arguments):
    if not arguments or len(arguments) % 2:
        sys.exit(__doc__)
    wrong = 0
    for directory, plain in zip(arguments[::2], arguments[1::2]):
        with open(os.path.join(directory, "config.json")) as file:
            config = json.load(file)["quantization_config"]
        method = config["quant_method"]
        print(f"{directory} ({method})")
        expected = read(plain)
        wrong += compare("torch, code * scale", by_hand(read(directory), config), expected)
        try:
            state = by_transformers(directory, method, config)
        except Exception as error:  # A library's refusal is a result, and the next directory is still of interest.
            print(f"  transformers: {type(error).__name__}: {str(error).splitlines()[0]}")
            wrong += 1
            continue
        if state is None:
            print("  transformers: cannot dequantize this family")
            continue
        wrong += compare("transformers", state, expected)
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main(sys.argv[1:])
