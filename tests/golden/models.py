"""Tiny models of every family that `fp8::models` opens, in bf16: python models.py OUT. Made with transformers 5.23.0 and torch 2.15.0.

One file: `<family>.<tensor>`, `<family>.ids`, `<family>.output`; the metadata of a family is its config.json. Outputs are those of the
model in f32: logits, or the last hidden state of BERT.
"""

import json
import os
import sys

import torch
from safetensors.torch import save_file
from transformers import AutoModel, AutoModelForCausalLM, BertConfig, DeepseekV2Config, DeepseekV3Config, LlamaConfig, Mistral4Config
from transformers import Mistral4ForCausalLM
from transformers import MistralConfig, MixtralConfig, Phi3Config, Qwen2Config, Qwen3Config, Qwen3MoeConfig

SIZES = dict(
    vocab_size=48,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
    pad_token_id=None,
)
LLAMA3 = dict(
    rope_type="llama3", rope_theta=1e4, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=32
)
EXPERTS = dict(num_experts_per_tok=2, **{"num_experts": 4, "moe_intermediate_size": 16})
LATENT = dict(
    {key: value for key, value in SIZES.items() if key != "num_key_value_heads"},
    num_key_value_heads=4, kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=12, moe_intermediate_size=16, num_experts_per_tok=3,
)
YARN = dict(
    rope_type="yarn", rope_theta=1e4, factor=4.0, original_max_position_embeddings=16, beta_fast=32.0, beta_slow=1.0, mscale=0.8,
    mscale_all_dim=1.2,
)
GROUPS = dict(n_routed_experts=8, n_group=4, topk_group=2, routed_scaling_factor=2.5)
CONFIGS = {
    "llama": LlamaConfig(rope_parameters=LLAMA3, tie_word_embeddings=True, **SIZES),
    "mistral": MistralConfig(sliding_window=5, head_dim=16, **SIZES),
    "qwen2": Qwen2Config(use_sliding_window=True, sliding_window=5, max_window_layers=1, **SIZES),
    "qwen3": Qwen3Config(head_dim=16, **SIZES),
    "phi3": Phi3Config(sliding_window=6, rms_norm_eps=1e-5, **SIZES),
    "mixtral": MixtralConfig(num_local_experts=4, num_experts_per_tok=2, **SIZES),
    "qwen3_moe": Qwen3MoeConfig(head_dim=16, norm_topk_prob=True, **EXPERTS, **SIZES),
    "deepseek_v2": DeepseekV2Config(
        q_lora_rank=None, v_head_dim=24, n_routed_experts=6, n_shared_experts=2, topk_method="greedy", first_k_dense_replace=1, **LATENT
    ),
    "deepseek_v2_groups": DeepseekV2Config(
        q_lora_rank=20, v_head_dim=8, n_shared_experts=1, topk_method="group_limited_greedy", rope_parameters=YARN, **GROUPS, **LATENT
    ),
    "deepseek_v3": DeepseekV3Config(
        q_lora_rank=20, v_head_dim=12, n_shared_experts=1, first_k_dense_replace=1, rope_parameters=YARN, attention_bias=True, **GROUPS,
        **LATENT
    ),
    "deepseek_v3_halves": DeepseekV3Config(
        q_lora_rank=None, v_head_dim=20, n_shared_experts=1, first_k_dense_replace=0, rope_interleave=False, norm_topk_prob=False, **GROUPS,
        **LATENT
    ),
    "mistral4": Mistral4Config(
        q_lora_rank=20, v_head_dim=12, n_routed_experts=6, n_shared_experts=1, rope_parameters=dict(
            {key: value for key, value in YARN.items() if "mscale" not in key}, attention_factor=1.0, original_max_position_embeddings=4,
            llama_4_scaling_beta=0.1, partial_rotary_factor=0.4,
        ), **LATENT
    ),
    "bert": BertConfig(**{key: value for key, value in SIZES.items() if key not in ("num_key_value_heads", "pad_token_id")}),
}


def main(out):
    tensors, metadata = {}, {}
    for name, config in CONFIGS.items():
        torch.manual_seed(3)
        if name == "mistral4":
            # Known as the language part of a larger model only.
            config._attn_implementation = "eager"
            model = Mistral4ForCausalLM(config).eval()
        else:
            model = (AutoModel if name == "bert" else AutoModelForCausalLM).from_config(config, attn_implementation="eager").eval()
        with torch.no_grad():
            for path, value in model.named_parameters():
                # Norms near 1, and weights large enough for attention to be far from uniform.
                around = 1 if "norm" in path.lower() and path.endswith("weight") else 0
                value.copy_((torch.randn_like(value) * 0.2 + around).bfloat16())
            for path, value in model.named_buffers():
                if path.endswith("e_score_correction_bias"):
                    value.copy_((torch.randn_like(value) * 0.2).bfloat16())
            ids = torch.randint(0, config.vocab_size, (2, 12))
            result = model(ids)
            tensors[f"{name}.output"] = result.last_hidden_state if name == "bert" else result.logits
        tensors[f"{name}.ids"] = ids.to(torch.uint32)
        # As saved: experts apart, tied weights once.
        folder = os.path.join(out, name)
        model.bfloat16().save_pretrained(folder)
        from safetensors.torch import load_file

        for path, value in load_file(os.path.join(folder, "model.safetensors")).items():
            tensors[f"{name}.{path}"] = value
        with open(os.path.join(folder, "config.json")) as file:
            metadata[name] = json.dumps(json.load(file))
    save_file({key: value.contiguous() for key, value in tensors.items()}, os.path.join(out, "models.safetensors"), metadata)


if __name__ == "__main__":
    main(sys.argv[1])
