"""Adapters that PEFT wrote for the models of models.safetensors: python adapters.py OUT. Made with peft 0.21.2, transformers 5.23.0 and
torch 2.15.0.

A folder for each adapter, as `save_pretrained` writes it (without the README); `expected.safetensors` has `<adapter>.output`, the logits
(the last hidden state of BERT) of base and adapter in f32 for the ids in models.safetensors. An adapter is named after its base, up to
the first dot.
"""

import json
import os
import sys
import tempfile

import torch
from peft import LoraConfig, get_peft_model
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModel, AutoModelForCausalLM

HERE = os.path.dirname(os.path.abspath(__file__))
ADAPTERS = {
    "llama.names": dict(
        r=4,
        lora_alpha=8,
        target_modules=["q_proj", "v_proj", "mlp.down_proj"],
        rank_pattern={"down_proj": 2},
        alpha_pattern={r"layers\.1\.self_attn\.q_proj": 32},
        lora_dropout=0.05,
    ),
    "llama.all": dict(r=8, lora_alpha=16, use_rslora=True, target_modules="all-linear"),
    "qwen2.regex": dict(r=2, lora_alpha=6, target_modules=r".*layers\.\d+\.(self_attn\.[qk]_proj|mlp\.\w+_proj)"),
    "qwen3.layers": dict(
        r=4, lora_alpha=4, target_modules=["o_proj", "up_proj"], exclude_modules=["layers.1.mlp.up_proj"], layers_to_transform=[1]
    ),
    "phi3.fused": dict(r=4, lora_alpha=8, target_modules=["qkv_proj", "gate_up_proj"]),
    "mixtral.attention": dict(r=4, lora_alpha=8, target_modules=["q_proj", "o_proj"]),
    "bert.all": dict(r=4, lora_alpha=8, target_modules="all-linear"),
}
# Dtypes of files; f32 where nothing is said.
DTYPES = {"llama.all": torch.bfloat16, "qwen2.regex": torch.float16}


def base(name, folder):
    """The model, in f32."""
    path = os.path.join(HERE, "models.safetensors")
    with safe_open(path, "pt") as file:
        config = json.loads(file.metadata()[name])
    tensors = {key.removeprefix(name + "."): value for key, value in load_file(path).items() if key.startswith(name + ".")}
    ids = tensors.pop("ids").long()
    output = tensors.pop("output")
    with open(os.path.join(folder, "config.json"), "w") as file:
        json.dump(config, file)
    save_file(tensors, os.path.join(folder, "model.safetensors"), {"format": "pt"})
    kind = AutoModel if name == "bert" else AutoModelForCausalLM
    model = kind.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        close = (result(model, ids) - output).abs().max()
    assert close < 1e-4, (name, close)
    return model, ids


def result(model, ids):
    got = model(ids)
    return got.logits if hasattr(got, "logits") else got.last_hidden_state


def main(out):
    expected = {}
    for name, settings in ADAPTERS.items():
        family = name.split(".")[0]
        with tempfile.TemporaryDirectory() as folder, torch.no_grad():
            model, ids = base(family, folder)
            task = "FEATURE_EXTRACTION" if family == "bert" else "CAUSAL_LM"
            tuned = get_peft_model(model, LoraConfig(task_type=task, **settings)).eval()
            tuned.peft_config["default"].base_model_name_or_path = f"tiny/{family}"
            torch.manual_seed(5)
            for path, value in tuned.named_parameters():
                if ".lora_" in path:
                    value.copy_((torch.randn_like(value) * 0.3).to(DTYPES.get(name, torch.float32)))
            expected[f"{name}.output"] = result(tuned, ids)
            if name in DTYPES:
                for path, value in tuned.named_parameters():
                    if ".lora_" in path:
                        value.data = value.data.to(DTYPES[name])
            target = os.path.join(out, name)
            tuned.save_pretrained(target, save_embedding_layers=False)
            os.remove(os.path.join(target, "README.md"))
    save_file({key: value.contiguous() for key, value in expected.items()}, os.path.join(out, "expected.safetensors"))


if __name__ == "__main__":
    main(sys.argv[1])
