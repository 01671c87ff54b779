#!/usr/bin/env python3
"""Opens what `fp8 train` writes with transformers and PEFT, and compares logits. Run it before a release:

    cargo build --release --bin fp8
    tools/check_trained.py target/release/fp8

makes a Llama, a Qwen2 that ties its head, and a BERT with random weights and a tokenizer, and trains each for a few steps: in full under two
recipes, and by adapters beside the base in high precision and in FP8; BERT as a classifier and for queries. For each result it prints how near
our logits are to those of transformers, in dB of signal over difference:

- the folder in high precision, and the same in FP8 by two schemes, which transformers dequantizes itself (`--weight-only` here, as inputs
  stay in high precision there);
- the adapter, which PEFT loads beside the same base; and the folder that `fp8 merge` makes of both.

    tools/check_trained.py FP8 --models DIR..

does the first for folders that `fp8 train` has written. Needs torch, safetensors, tokenizers, transformers 5, peft, compressed-tensors; runs on a
CPU. Exit code 1 if a result is below 110 dB, or a tensor was missing or unexpected.
"""

import json
import os
import subprocess
import sys
import tempfile

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

import torch
from check_exports import configured, decibels, to_dequantize
from safetensors.torch import load_file, save_file

ENOUGH = 110
# Of the quantized folders.
SCHEMES = [("channel-token", "compressed-tensors"), ("block128", "fp8-blocks")]
failures = []


def run(*command, excused=None):
    """Runs a command; returns whether it succeeded, and ends if not, unless it says what is `excused`."""
    result = subprocess.run([str(part) for part in command], capture_output=True, text=True)
    if result.returncode and excused and excused in result.stderr:
        return False
    if result.returncode:
        sys.exit(f"{' '.join(map(str, command))}\n{result.stderr}")
    return True


def tokenizer(folder):
    """A tokenizer of words, which begins a text by `[CLS]`."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers

    words = Tokenizer(models.WordLevel(unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    special = ["[UNK]", "[CLS]", "[SEP]", "[PAD]"]
    words.train_from_iterator(texts(), trainers.WordLevelTrainer(vocab_size=500, special_tokens=special))
    around = [(token, words.token_to_id(token)) for token in ("[CLS]", "[SEP]")]
    words.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=around)
    words.save(os.path.join(folder, "tokenizer.json"))
    with open(os.path.join(folder, "tokenizer_config.json"), "w") as file:
        json.dump({"eos_token": "[SEP]"}, file)


def texts():
    path = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "README.md")
    with open(path) as file:
        return [line.strip() for line in file if len(line.split()) > 6]


def write_data(folder):
    """A text, labelled texts and queries, by kind."""
    lines = texts()
    data = {
        "text": ("text.txt", lines),
        "labels": ("labels.jsonl", [json.dumps({"text": t, "label": "long" if len(t) > 110 else ["even", "odd"][len(t) % 2]}) for t in lines]),
        "queries": ("queries.jsonl", [json.dumps({"query": t[: len(t) // 2], "positive": t[len(t) // 2 :]}) for t in lines]),
    }
    paths = {}
    for kind, (name, content) in data.items():
        paths[kind] = os.path.join(folder, name)
        with open(paths[kind], "w") as file:
            file.write("\n".join(content) + "\n")
    return paths


def make_models(folder):
    import transformers
    from transformers import BertConfig, BertModel, LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

    transformers.logging.disable_progress_bar()
    torch.manual_seed(0)
    sizes = dict(vocab_size=512, hidden_size=256, intermediate_size=384, num_hidden_layers=2, num_attention_heads=4, max_position_embeddings=128)
    models = {
        "llama": LlamaForCausalLM(LlamaConfig(**sizes, num_key_value_heads=2)),
        "qwen2": Qwen2ForCausalLM(Qwen2Config(**sizes, num_key_value_heads=2, tie_word_embeddings=True)),
        "bert": BertModel(BertConfig(**sizes)),
    }
    paths = {}
    for name, model in models.items():
        paths[name] = os.path.join(folder, name)
        model.save_pretrained(paths[name])
        tokenizer(paths[name])
    return paths


def opened(directory, labels=None, **how):
    """The model that transformers makes of a folder, in the class that its configuration names."""
    import transformers

    if labels is None:
        with open(os.path.join(directory, "config.json")) as file:
            kind = getattr(transformers, json.load(file)["architectures"][0])
    else:
        kind, how = transformers.AutoModelForSequenceClassification, dict(how, num_labels=labels)
    model, info = kind.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager", output_loading_info=True, **how)
    new = {"classifier.weight", "classifier.bias"} if labels else set()
    odd = [name for key in ("missing_keys", "unexpected_keys", "mismatched_keys") for name in info[key] if name not in new]
    if odd:
        failures.append(f"{directory}: {odd[:4]}")
        print(f"    missing or unexpected: {odd[:4]}")
    return model.eval()


def outputs(model, inputs):
    with torch.no_grad():
        out = model(**inputs)
    return out.logits if hasattr(out, "logits") else out.last_hidden_state


class Checks:
    def __init__(self, fp8, folder):
        self.fp8, self.folder = fp8, folder
        ids = torch.randint(4, 300, (3, 12), generator=torch.Generator().manual_seed(1))
        self.inputs = {"input_ids": ids}
        # The first text is shorter.
        self.mask = torch.ones_like(ids)
        self.mask[0, 8:] = 0
        self.file = os.path.join(folder, "ids.safetensors")

    def ours(self, directory, *flags):
        out = os.path.join(self.folder, "out.safetensors")
        save_file(self.inputs, self.file)
        run(self.fp8, "logits", directory, "--ids", self.file, "--out", out, *flags)
        return next(iter(load_file(out).values()))

    def near(self, what, got, expected):
        close = decibels(got, expected)
        print(f"  {what}: {close:.1f} dB", flush=True)
        if not close >= ENOUGH:
            failures.append(what)

    def model(self, what, directory, quantized=True):
        """A folder in high precision, and what `fp8 quantize` makes of it."""
        self.near(what, self.ours(directory), outputs(opened(directory), self.inputs))
        for scheme, spelling in SCHEMES if quantized else []:
            out = os.path.join(self.folder, "fp8")
            ragged = "no multiple of groups"
            if not run(self.fp8, "quantize", directory, "--scheme", scheme, "--to", spelling, "--out", out, "--overwrite", excused=ragged):
                print(f"  {what}, {scheme}: its layers do not divide into groups")
                continue
            model = opened(out, quantization_config=to_dequantize(configured(out)))
            self.near(f"{what}, {scheme}", self.ours(out, "--weight-only"), outputs(model.float(), self.inputs))

    def train(self, base, data, *flags):
        out = os.path.join(self.folder, "run")
        run(self.fp8, "train", base, "--data", data, "--out", out, "--overwrite", "--steps", 4, "--batch", 4, "--context", 32, "--lr", "2e-3", *flags)
        return out

    def adapter(self, what, base, data, labels=None, served=None):
        """An adapter beside `base` in high precision; `served` is the base that it was trained on, if that is another one."""
        from peft import PeftModel

        run_folder = self.train(served or base, data, "--lora", 4)
        adapter = os.path.join(run_folder, "adapter")
        tuned = PeftModel.from_pretrained(opened(base, labels), adapter).eval()
        flags = ["--weight-only"] if served else []
        self.near(f"{what} in peft", self.ours(served or base, "--adapter", adapter, *flags), outputs(tuned, self.inputs))
        merged = os.path.join(self.folder, "merged")
        run(self.fp8, "merge", served or base, adapter, "--dtype", "f32", "--out", merged, "--overwrite")
        self.near(f"{what} merged", outputs(opened(merged), self.inputs), outputs(tuned, self.inputs))


def check_all(fp8, folder):
    data = write_data(folder)
    checks = Checks(fp8, folder)
    for name, base in make_models(folder).items():
        print(name)
        checks.inputs.pop("attention_mask", None)
        if name == "bert":
            checks.inputs["attention_mask"] = checks.mask
        quantized, plain = os.path.join(folder, f"{name}-fp8"), os.path.join(folder, f"{name}-plain")
        run(fp8, "quantize", base, "--out", quantized)
        run(fp8, "dequantize", quantized, "--dtype", "f32", "--out", plain)
        kinds = {"": "text"} if name != "bert" else {" classifier": "labels", " queries": "queries"}
        for kind, own in kinds.items():
            for recipe in ("f32", "delayed"):
                trained = checks.train(base, data[own], "--recipe", recipe)
                checks.model(f"{name}{kind}, {recipe}", os.path.join(trained, "model"))
            labels = 3 if own == "labels" else None
            checks.adapter(f"{name}{kind}, adapter", base, data[own], labels)
            checks.adapter(f"{name}{kind}, adapter on FP8", plain, data[own], labels, served=quantized)


def main(arguments):
    if not arguments:
        sys.exit(__doc__)
    with tempfile.TemporaryDirectory() as folder:
        if arguments[1:2] == ["--models"]:
            for directory in arguments[2:]:
                print(directory)
                Checks(arguments[0], folder).model(os.path.basename(directory), directory)
        else:
            check_all(arguments[0], folder)
    for failure in failures:
        print(f"failed: {failure}")
    sys.exit(1 if failures else 0)


if __name__ == "__main__":
    main(sys.argv[1:])
