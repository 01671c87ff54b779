"""Small mixtures in FP8 as transformers 5 saves them: python moe.py FAMILIES. Made with transformers 5.23.0 and torch 2.15.0 on a CPU.

transformers keeps all experts of a layer in one tensor. Saved, the weights are apart again, under their old names, while the scales stay
together (qwen3_moe_hf5, mixtral_hf5, deepseek_v3_hf5); with save_original_format=False the weights stay together too (.._fused).
expected.safetensors: ids, and the logits of the model with weights code * scale in f32, inputs untouched.
"""

import os
import sys

import torch
from safetensors.torch import save_file
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    FineGrainedFP8Config,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)
from transformers.quantizers import quantizer_finegrained_fp8

BLOCK = 32
SIZES = dict(
    vocab_size=64,
    hidden_size=64,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=32,
    max_position_embeddings=128,
    num_experts_per_tok=2,
    rms_norm_eps=1e-5,
)

# It asks for a GPU before it quantizes, which it does not need.
quantizer_finegrained_fp8.FineGrainedFP8HfQuantizer.validate_environment = lambda self, *args, **kwargs: setattr(
    self, "pre_quantized", False
)


def random(model):
    with torch.no_grad():
        for name, value in model.named_parameters():
            value.copy_(torch.randn_like(value) * 0.2 + (1 if "norm" in name else 0))
        for name, value in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                value.copy_(torch.randn_like(value) * 0.2)
    return model.eval()


def dequantized(name, state):
    value = state[name]
    if value.dtype != torch.float8_e4m3fn:
        return value
    scale = state[name + "_scale_inv"].float()
    rows, cols = value.shape[-2:]
    scale = scale.repeat_interleave(BLOCK, -2)[..., :rows, :].repeat_interleave(BLOCK, -1)[..., :cols]
    return value.float() * scale


def main(out):
    qwen = Qwen3MoeConfig(num_experts=4, moe_intermediate_size=32, intermediate_size=96, norm_topk_prob=True, **SIZES)
    mixtral = MixtralConfig(num_local_experts=4, intermediate_size=32, **SIZES)
    sizes = {key: value for key, value in SIZES.items() if key not in ("head_dim", "num_key_value_heads")}
    deepseek = DeepseekV3Config(
        n_routed_experts=8, n_group=4, topk_group=2, n_shared_experts=1, moe_intermediate_size=32, intermediate_size=96,
        first_k_dense_replace=1, q_lora_rank=32, kv_lora_rank=32, qk_rope_head_dim=32, qk_nope_head_dim=32, v_head_dim=32,
        num_key_value_heads=2, num_nextn_predict_layers=0, **sizes,
    )
    folders = [
        ("qwen3_moe_hf5", Qwen3MoeForCausalLM, qwen, True),
        ("qwen3_moe_hf5_fused", Qwen3MoeForCausalLM, qwen, False),
        ("mixtral_hf5", MixtralForCausalLM, mixtral, True),
        ("mixtral_hf5_fused", MixtralForCausalLM, mixtral, False),
        ("deepseek_v3_hf5", DeepseekV3ForCausalLM, deepseek, True),
        ("deepseek_v3_hf5_fused", DeepseekV3ForCausalLM, deepseek, False),
    ]
    for name, kind, config, apart in folders:
        torch.manual_seed(5)
        folder = os.path.join(out, name)
        plain = random(kind(config))
        plain.save_pretrained(folder)
        settings = FineGrainedFP8Config(weight_block_size=(BLOCK, BLOCK))
        model = AutoModelForCausalLM.from_pretrained(folder, quantization_config=settings, device_map="cpu", dtype=torch.float32)
        model.save_pretrained(folder, save_original_format=apart)
        os.remove(os.path.join(folder, "generation_config.json"))
        state = model.state_dict()
        values = {name: dequantized(name, state) for name in state if not name.endswith("_scale_inv")}
        plain.load_state_dict(values)
        ids = torch.randint(0, 64, (2, 9))
        with torch.no_grad():
            logits = plain(ids).logits
        expected = {"input_ids": ids, "logits_weight_only": logits.contiguous()}
        save_file(expected, os.path.join(folder, "expected.safetensors"))


if __name__ == "__main__":
    main(sys.argv[1])
