"""Compares a GGUF file that this library wrote with the directory that it was written from: names, values and blocks by the gguf package,
tokens and logits by transformers.

    python tools/check_written_gguf.py DIR FILE.gguf

DIR holds the model in high precision (of an FP8 model: what `fp8 dequantize --dtype f32` writes). Needs torch, transformers, gguf and
safetensors (checked with transformers 5.23, gguf 0.19).
"""

import glob
import json
import os
import sys

import numpy as np
import torch
from check_gguf import TEXTS
from gguf import GGMLQuantizationType, GGUFReader, MODEL_ARCH_NAMES, get_tensor_name_map
from gguf.quants import dequantize, quantize
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

TYPES = {
    GGMLQuantizationType.F16: np.float16,
    GGMLQuantizationType.F32: np.float32,
}


def permuted(values, heads):
    """As in llama.cpp's converter."""
    return values.reshape(heads, 2, values.shape[0] // heads // 2, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)


def expected(directory, architecture, config):
    table = get_tensor_name_map({name: arch for arch, name in MODEL_ARCH_NAMES.items()}[architecture], config["num_hidden_layers"])
    heads = config["num_attention_heads"]
    tensors, experts = {}, {}
    for path in glob.glob(os.path.join(directory, "*.safetensors")):
        for name, value in load_file(path).items():
            value = value.float().numpy()
            if architecture == "llama" and ".q_proj." in name:
                value = permuted(value, heads)
            if architecture == "llama" and ".k_proj." in name:
                value = permuted(value, config.get("num_key_value_heads", heads))
            if ".experts." in name:
                module, rest = name.split(".experts.")
                number, part, kind = rest.split(".")
                part = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}.get(part, part)
                layer = module.split(".")[2]
                experts.setdefault(f"blk.{layer}.ffn_{part.removesuffix('_proj')}_exps.weight", {})[int(number)] = value
            elif not name.startswith("pooler."):
                tensors[table.get_name(name, try_suffixes=(".weight", ".bias"))] = value
    for name, parts in experts.items():
        tensors[name] = np.stack([parts[i] for i in range(len(parts))])
    return tensors


def main(directory, path):
    reader = GGUFReader(path)
    with open(os.path.join(directory, "config.json")) as file:
        config = json.load(file)
    architecture = reader.get_field("general.architecture").contents()
    tensors = expected(directory, architecture, config)
    names = {tensor.name for tensor in reader.tensors}
    extra = {"rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"}
    print(f"{architecture}: {len(names)} tensors; missing {set(tensors) - names}, unknown {names - set(tensors) - extra}")
    wrong, kinds = [], {}
    for tensor in reader.tensors:
        if tensor.name in extra:
            continue
        value, kind = tensors[tensor.name], tensor.tensor_type
        kinds[kind.name] = kinds.get(kind.name, 0) + 1
        if kind in TYPES:
            same = np.array_equal(tensor.data, value.astype(TYPES[kind]))
        else:
            same = np.array_equal(tensor.data, quantize(value, kind))
        if not same or dequantize(tensor.data, kind).shape != value.shape:
            wrong.append(tensor.name)
    print(f"stored as {kinds}; other values in {wrong}")

    folder, name = os.path.split(path)
    other = []
    if architecture != "bert":
        of_file = AutoTokenizer.from_pretrained(folder, gguf_file=name)
        of_directory = AutoTokenizer.from_pretrained(directory)
        other = [text for text in TEXTS if of_file(text)["input_ids"] != of_directory(text)["input_ids"]]
        print(f"{len(TEXTS)} texts: other tokens for {other}")
        ids = torch.tensor([of_directory(TEXTS[0])["input_ids"]])
        with torch.no_grad():
            theirs = AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype=torch.float32)(ids).logits
            ours = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)(ids).logits
        noise = (theirs - ours).square().sum()
        print("logits: ", "equal" if noise == 0 else f"{10 * torch.log10(ours.square().sum() / noise):.1f} dB")
    return 1 if wrong or other or set(tensors) - names else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:3]))
