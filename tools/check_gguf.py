"""Compares the directory that `rewrite::dequantize` writes for a GGUF file with what transformers reads from it: tensors, tokens, logits.

    python tools/check_gguf.py FILE.gguf DIR

DIR is what this library wrote in f32. Needs torch, transformers, gguf and safetensors (checked with transformers 5.23, gguf 0.19).
"""

import os
import sys

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

TEXTS = [
    "In the beginning God created the heaven and the earth.",
    "  leading, 12345 and\n\n\ttabs  ",
    "naïve 你好 😀 don't I'LL",
    "<|im_start|>user\nHi<|im_end|>\n",
    "def f(x):\n    return x**2 # 3.14159",
    "",
    " ",
    "a" * 50,
]


def main(file, directory):
    folder, name = os.path.split(file)
    theirs = AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype=torch.float32)
    state, ours = theirs.state_dict(), load_file(os.path.join(directory, "model.safetensors"))
    differing = [key for key in ours if key not in state or not torch.equal(state[key], ours[key])]
    missing = [key for key in state if key not in ours and key != "lm_head.weight"]
    print(f"{len(ours)} tensors: differing {differing}, missing {missing}")

    of_file = AutoTokenizer.from_pretrained(folder, gguf_file=name)
    of_directory = AutoTokenizer.from_pretrained(directory)
    wrong = [text for text in TEXTS if of_file(text)["input_ids"] != of_directory(text)["input_ids"]]
    print(f"{len(TEXTS)} texts: other tokens for {wrong}")

    again = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    ids = torch.tensor([of_directory(TEXTS[0])["input_ids"]])
    with torch.no_grad():
        same = torch.equal(theirs(ids).logits, again(ids).logits)
    print("logits are", "equal" if same else "different")
    return 1 if differing or missing or wrong or not same else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:3]))
