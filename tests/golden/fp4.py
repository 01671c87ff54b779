"""Weights in FP4 with their values: python fp4.py OUT. Made with compressed-tensors 0.20.0, transformers 5.23.0, torch 2.15.0 on a CPU.

A folder for each family: config.json, model.safetensors, and expected.safetensors with the f32 value of each weight (`<path>.dequant`).

| folder | codes and scales from | values from |
|---|---|---|
| ct_mxfp4, ct_nvfp4 | compressed-tensors' compressors | its unpack_fp4_from_uint8 and dequantize, in f32 |
| modelopt_nvfp4 | the same numbers in ModelOpt's names: weight, weight_scale, and weight_scale_2, which multiplies | this script: code * (weight_scale * weight_scale_2) in f32; ModelOpt itself was not run |
| gpt_oss_mxfp4 | random bytes | transformers' convert_moe_packed_tensors, in f32 |
| deepseek_v4 | random bytes (experts), transformers' block scales | transformers' Fp8Dequantize |
| qwen3_moe_mxfp4 | compressed-tensors: the experts of a two-layer Qwen3-MoE | as ct_mxfp4; logits of transformers' model with these values |
"""

import json
import os
import sys

import torch
from compressed_tensors.compressors.mxfp4 import MXFP4PackedCompressor
from compressed_tensors.compressors.mx_utils import decompress_mx_scale
from compressed_tensors.compressors.nvfp4 import NVFP4PackedCompressor
from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
from compressed_tensors.quantization import QuantizationScheme
from compressed_tensors.quantization.lifecycle.forward import dequantize
from compressed_tensors.quantization.quant_scheme import MXFP4, MXFP4A16, NVFP4
from safetensors.torch import save_file
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.integrations.mxfp4 import convert_moe_packed_tensors


def write(out, name, config, tensors, expected):
    folder = os.path.join(out, name)
    os.makedirs(folder, exist_ok=True)
    with open(os.path.join(folder, "config.json"), "w") as file:
        json.dump(config, file, indent=1)
        file.write("\n")
    contiguous = {key: value.contiguous() for key, value in tensors.items()}
    save_file(contiguous, os.path.join(folder, "model.safetensors"), {"format": "pt"})
    expected = {key: value.contiguous() for key, value in expected.items()}
    save_file(expected, os.path.join(folder, "expected.safetensors"))


def args(preset):
    return {key: value.model_dump(mode="json", exclude_none=True) for key, value in preset.items()}


def quantization(preset, kind, targets, ignore):
    group = {"targets": targets, "weights": None, "input_activations": None, "output_activations": None, **args(preset)}
    return {
        "quant_method": "compressed-tensors",
        "format": kind,
        "quantization_status": "compressed",
        "config_groups": {"group_0": {**group, "format": kind}},
        "ignore": ignore,
        "kv_cache_scheme": None,
    }


def compress(kind, preset, weight):
    """The tensors of a layer, and its value by the library's own functions in f32."""
    scheme = QuantizationScheme(targets=["Linear"], **preset)
    group = scheme.weights.group_size
    amax = weight.unflatten(1, (-1, group)).abs().amax(-1)
    state = {"weight": weight}
    if kind is MXFP4PackedCompressor:
        state["weight_scale"] = 2.0 ** (torch.floor(torch.log2(amax)) - 2)
    else:
        state["weight_global_scale"] = torch.tensor([448.0 * 6.0]) / weight.abs().amax()
        state["weight_scale"] = (amax / 6.0 * state["weight_global_scale"]).to(torch.float8_e4m3fn).float()
    packed = kind.compress(state, scheme)
    scale = packed["weight_scale"]
    scale = decompress_mx_scale(scale).float() if scale.dtype == torch.uint8 else scale.float()
    codes = unpack_fp4_from_uint8(packed["weight_packed"], *weight.shape, dtype=torch.float32)
    value = dequantize(codes, scale, args=scheme.weights, dtype=torch.float32, global_scale=packed.get("weight_global_scale"))
    return packed, value


def layers(out):
    torch.manual_seed(7)
    shapes = {"model.layers.0.mlp.up_proj": (24, 96), "model.layers.0.mlp.down_proj": (32, 64)}
    weights = {path: torch.randn(shape) * 0.05 * torch.rand(shape[0], 1) for path, shape in shapes.items()}
    made = {}
    for name, kind, preset, form in [
        ("ct_mxfp4", MXFP4PackedCompressor, MXFP4, "mxfp4-pack-quantized"),
        ("ct_nvfp4", NVFP4PackedCompressor, NVFP4, "nvfp4-pack-quantized"),
    ]:
        tensors, expected = {"lm_head.weight": torch.randn(4, 32)}, {}
        for path, weight in weights.items():
            packed, value = compress(kind, preset, weight)
            made[name, path] = packed
            tensors.update({f"{path}.{key}": tensor for key, tensor in packed.items()})
            if name == "ct_nvfp4":
                tensors[f"{path}.input_global_scale"] = torch.tensor([300.0])
            expected[f"{path}.dequant"] = value
        config = {"model_type": "llama", "quantization_config": quantization(preset, form, ["Linear"], ["lm_head"])}
        write(out, name, config, tensors, expected)
    tensors, expected = {"lm_head.weight": torch.randn(4, 32)}, {}
    for path in weights:
        packed = made["ct_nvfp4", path]
        number = 1.0 / packed["weight_global_scale"][0]
        tensors[f"{path}.weight"] = packed["weight_packed"]
        tensors[f"{path}.weight_scale"] = packed["weight_scale"]
        tensors[f"{path}.weight_scale_2"] = number
        tensors[f"{path}.input_scale"] = torch.tensor(0.01)
        rows, columns = packed["weight_packed"].shape
        codes = unpack_fp4_from_uint8(packed["weight_packed"], rows, 2 * columns, dtype=torch.float32)
        scale = (packed["weight_scale"].float() * number).repeat_interleave(16, 1)
        expected[f"{path}.dequant"] = codes * scale
    algorithm = {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16, "ignore": ["lm_head"]}
    config = {"model_type": "llama", "quantization_config": {**algorithm, "producer": {"name": "modelopt", "version": "0.47.0"}}}
    write(out, "modelopt_nvfp4", config, tensors, expected)


def gpt_oss(out):
    torch.manual_seed(8)
    experts, hidden, inner = 2, 64, 32
    tensors, expected = {}, {}
    path = "model.layers.0.mlp.experts"
    for name, rows, columns in [("gate_up_proj", 2 * inner, hidden), ("down_proj", hidden, inner)]:
        blocks = torch.randint(0, 256, (experts, rows, columns // 32, 16), dtype=torch.uint8)
        scales = torch.randint(110, 130, (experts, rows, columns // 32), dtype=torch.uint8)
        bias = torch.randn(experts, rows).bfloat16()
        tensors.update({f"{path}.{name}_blocks": blocks, f"{path}.{name}_scales": scales, f"{path}.{name}_bias": bias})
        # [experts, columns, rows], as transformers multiplies.
        value = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32).transpose(1, 2)
        for expert in range(experts):
            parts = {"down_proj": (value[expert], bias[expert])}
            if name == "gate_up_proj":
                # The model takes gate_up[..., ::2] for the gate.
                parts = {part: (value[expert, at::2], bias[expert, at::2]) for at, part in enumerate(["gate_proj", "up_proj"])}
            for part, (weight, offset) in parts.items():
                expected[f"{path}.{expert}.{part}.dequant"] = weight
                expected[f"{path}.{expert}.{part}.bias"] = offset
    tensors["model.layers.0.mlp.router.weight"] = torch.randn(experts, hidden).bfloat16()
    skipped = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    config = {"model_type": "gpt_oss", "quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": skipped}}
    write(out, "gpt_oss_mxfp4", config, tensors, expected)


def deepseek_v4(out):
    torch.manual_seed(9)
    tensors, expected = {}, {}
    decoder = Fp8Dequantize(None)
    for path, shape in {"layers.0.ffn.experts.0.w1": (8, 64), "layers.0.ffn.experts.1.w2": (16, 32)}.items():
        codes = torch.randint(-128, 128, (shape[0], shape[1] // 2), dtype=torch.int8)
        scale = torch.randint(115, 125, (shape[0], shape[1] // 32), dtype=torch.uint8).view(torch.float8_e8m0fnu)
        tensors.update({f"{path}.weight": codes, f"{path}.scale": scale})
        expected[f"{path}.dequant"] = decoder._dequantize_one(codes, scale, torch.float32)
    path = "layers.0.ffn.shared_experts.w1"
    codes = (torch.randn(128, 128) * 60).clamp(-448, 448).to(torch.float8_e4m3fn)
    scale = torch.tensor([[119]], dtype=torch.uint8).view(torch.float8_e8m0fnu)
    tensors.update({f"{path}.weight": codes, f"{path}.scale": scale})
    expected[f"{path}.dequant"] = decoder._dequantize_one(codes, scale, torch.float32)
    settings = {"quant_method": "fp8", "fmt": "e4m3", "scale_fmt": "ue8m0", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
    config = {"model_type": "deepseek_v4", "expert_dtype": "fp4", "quantization_config": settings}
    write(out, "deepseek_v4", config, tensors, expected)


def mixture(out):
    torch.manual_seed(5)
    config = Qwen3MoeConfig(
        vocab_size=64, hidden_size=64, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, head_dim=32,
        max_position_embeddings=128, num_experts_per_tok=2, rms_norm_eps=1e-5, num_experts=4, moe_intermediate_size=32,
        intermediate_size=96, norm_topk_prob=True,
    )
    model = Qwen3MoeForCausalLM(config).eval()
    tensors = {}
    with torch.no_grad():
        for name, value in model.named_parameters():
            value.copy_((torch.randn_like(value) * 0.2 + (1 if "norm" in name else 0)).bfloat16())
            if ".experts." not in name:
                tensors[name] = value.bfloat16()
                continue
            path, own = name.rsplit(".", 1)
            for expert in range(len(value)):
                parts = {"down_proj": value[expert]}
                if own == "gate_up_proj":
                    parts = dict(zip(["gate_proj", "up_proj"], value[expert].chunk(2)))
                for part, weight in parts.items():
                    packed, decoded = compress(MXFP4PackedCompressor, MXFP4A16, weight.clone())
                    tensors.update({f"{path}.{expert}.{part}.{key}": tensor for key, tensor in packed.items()})
                    weight.copy_(decoded)
        ids = torch.randint(0, 64, (2, 9))
        logits = model(ids).logits
    settings = quantization(MXFP4A16, "mxfp4-pack-quantized", ["re:.*experts.*_proj"], ["lm_head"])
    written = {**config.to_dict(), "architectures": ["Qwen3MoeForCausalLM"], "quantization_config": settings}
    written = {key: value for key, value in written.items() if value is not None}
    write(out, "qwen3_moe_mxfp4", written, tensors, {"input_ids": ids, "logits_weight_only": logits})


if __name__ == "__main__":
    for make in (layers, gpt_oss, deepseek_v4, mixture):
        make(sys.argv[1])
