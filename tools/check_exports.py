#!/usr/bin/env python3
"""Opens checkpoints written by `fp8` with other libraries and compares every weight, bit by bit. Run it before a release:

    cargo build --release --bins --example calibrate
    tools/check_exports.py --all target/release

makes a Llama with a head and one that ties it, a BERT and a Qwen3-MoE, each with random weights, quantizes them in every scheme and
spelling, calibrates them under every recipe, and says for each file

- whether weights are code * scale, read by hand, and equal to what transformers dequantizes;
- how near logits (hidden states of BERT) are to those of transformers in f32, in dB of signal over difference, and how near
  transformers' own run in bf16 is to its run in f32. Where transformers casts no inputs (blocks of `fp8`, models with experts), ours
  stay in high precision too.

transformers stacks all experts of a layer into one tensor. It can do so with one scale per tensor or channel and with blocks of `fp8`;
other files with experts are only compared by hand.

With paths, it compares the weights of existing directories:

    fp8 quantize MODEL --scheme channel-token --out OUT
    fp8 dequantize OUT --dtype f32 --out PLAIN
    tools/check_exports.py OUT PLAIN [OUT PLAIN ..]

OUT is any spelling, PLAIN the same checkpoint as `fp8 dequantize` writes it, in f32. How OUT is opened:

| `quant_method` | by |
|---|---|
| compressed-tensors | compressed_tensors, through transformers' `from_pretrained` with `dequantize=True`, in f32 |
| fp8 with `weight_block_size` | transformers' `from_pretrained` with `dequantize=True`, in f32 (its own grids only: ragged weights are read wrongly) |
| all | torch and safetensors: code * scale as the family's documents say, whatever transformers does |

Needs torch, safetensors, transformers 5, compressed-tensors (which brings loguru), accelerate; run by hand, on a CPU. Exit code 1 if anything differs.
"""

import glob
import json
import os
import subprocess
import sys
import tempfile

os.environ["TQDM_DISABLE"] = "1"

import torch
from loguru import logger
from safetensors import safe_open
from safetensors.torch import load_file, save_file

def read(directory):
    """All tensors of a directory; if there is an index, only of the files that it names, and it must name every tensor."""
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


def configured(directory):
    """`quantization_config` of a directory."""
    with open(os.path.join(directory, "config.json")) as file:
        return json.load(file).get("quantization_config", {})


def open_model(directory, **how):
    """The model that transformers loads from a directory."""
    from transformers import AutoModel, AutoModelForCausalLM

    with open(os.path.join(directory, "config.json")) as file:
        architecture = json.load(file).get("architectures", ["CausalLM"])[0]
    kind = AutoModelForCausalLM if architecture.endswith("CausalLM") else AutoModel
    return kind.from_pretrained(directory, dtype=torch.float32, device_map="cpu", **how).eval()


def to_dequantize(config):
    """The argument with which transformers dequantizes a directory; None if it cannot."""
    if config["quant_method"] == "compressed-tensors":
        from transformers import CompressedTensorsConfig

        return CompressedTensorsConfig(dequantize=True)
    if config["quant_method"] == "fp8" and config.get("weight_block_size"):
        from transformers import FineGrainedFP8Config

        return FineGrainedFP8Config(dequantize=True)
    return None


def has_experts(directory):
    with open(os.path.join(directory, "config.json")) as file:
        return "moe" in json.load(file).get("model_type", "")


def fuses(directory, config):
    """Whether transformers can stack the experts into one tensor: with scales per tensor or channel in compressed-tensors files."""
    groups = (config.get("config_groups") or {}).values()
    strategies = {group["weights"]["strategy"] for group in groups if config["quant_method"] == "compressed-tensors"}
    return not has_experts(directory) or strategies <= {"tensor", "channel"}


def by_transformers(directory, config):
    """The state of the model that transformers loads from a directory; None if it cannot dequantize."""
    how = to_dequantize(config)
    if how is None or not fuses(directory, config):
        return None
    state = {}
    for name, tensor in open_model(directory, quantization_config=how).state_dict().items():
        if name.endswith("_scale"):
            continue
        # transformers has one tensor for all experts, files have one for each.
        path, _, own = name.rpartition(".")
        if not path.endswith(".experts"):
            state[name] = tensor
            continue
        for expert, weight in enumerate(tensor):
            parts = {own: weight}
            if own == "gate_up_proj":
                parts = dict(zip(["gate_proj", "up_proj"], weight.chunk(2)))
            for part, value in parts.items():
                state[f"{path}.{expert}.{part}.weight"] = value
    return state


def compare(what, got, expected):
    """Prints one line and returns the number of tensors that differ."""
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


def check_weights(directory, plain):
    """Compares the weights of a directory with those of its dequantized copy; returns the number that differ."""
    config = configured(directory)
    expected = read(plain)
    wrong = compare("torch, code * scale", by_hand(read(directory), config), expected)
    try:
        state = by_transformers(directory, config)
    except Exception as error:  # A library's refusal is a result; go on with the next directory.
        print(f"  transformers: {type(error).__name__}: {str(error).splitlines()[0]}")
        return wrong + 1
    if state is None:
        print("  transformers: cannot dequantize this family")
        return wrong
    # A tied head is a second name for the embedding.
    if "lm_head.weight" not in expected:
        state.pop("lm_head.weight", None)
    return wrong + compare("transformers", state, expected)


def outputs(model, ids):
    """Logits of a language model, hidden states of an encoder."""
    with torch.no_grad():
        try:
            out = model(ids)
        except RuntimeError:
            # compressed-tensors turns microscaled weights into bf16 in the first pass, which is exact, even in a model in f32.
            out = torch.nn.Module.float(model)(ids)
    return out.logits if hasattr(out, "logits") else out.last_hidden_state


def decibels(got, expected):
    """Signal over difference."""
    got, expected = got.double(), expected.double()
    difference = (got - expected).square().sum()
    return (10 * torch.log10(expected.square().sum() / difference)).item()


def check_logits(directory, ids, ours):
    """Compares what a directory computes here and in transformers; returns whether ours is as near as bf16. `ours` runs our model: it
    takes whether inputs are cast and returns a tensor."""
    config = configured(directory)
    dequantized = to_dequantize(config)
    if dequantized is None or not fuses(directory, config):
        return True
    # transformers casts inputs as compressed-tensors says, except those of experts.
    emulated = config["quant_method"] == "compressed-tensors" and not has_experts(directory)
    model = open_model(directory, **({} if emulated else {"quantization_config": dequantized}))
    f32 = outputs(model, ids)
    mine = ours(emulated)
    whole = decibels(mine, f32)
    # Another order of sums moves a value across the edge between two codes now and then, and later layers amplify that. It shows in
    # few tokens, while an error shows in all of them.
    token = torch.tensor([decibels(a, b) for a, b in zip(mine.flatten(0, 1), f32.flatten(0, 1))]).median().item()
    what = "" if emulated else ", inputs in high precision"
    bf16 = decibels(outputs(model.bfloat16(), ids), f32)
    print(f"  outputs: ours {whole:.1f} dB, the median token {token:.1f} dB; transformers in bf16 {bf16:.1f} dB{what}")
    return whole >= bf16 and token >= ENOUGH


# For the median token, in dB: FP8 codes alone differ from f32 by about 30.
ENOUGH = 60
SPELLINGS = {
    "static-tensor": ["compressed-tensors", "autofp8", "modelopt"],
    "dynamic-tensor": ["compressed-tensors"],
    "tensor-token": ["compressed-tensors", "autofp8", "modelopt"],
    "channel-token": ["compressed-tensors", "modelopt"],
    "block128": ["compressed-tensors", "fp8-blocks"],
    "mxfp8": ["compressed-tensors", "modelopt"],
    "weight-only": ["compressed-tensors"],
    "weight-only:tensorwise": ["compressed-tensors"],
    "weight-only:blockwise:128x128": ["compressed-tensors", "modelopt"],
    "weight-only:mx": ["compressed-tensors"],
}
RECIPES = {
    "delayed": ["compressed-tensors", "modelopt"],
    "tensorwise": ["compressed-tensors"],
    "current": ["compressed-tensors"],
    "rowwise": ["compressed-tensors", "modelopt"],
    "rowwise_with_gw_hp": ["compressed-tensors"],
    "blockwise": ["compressed-tensors", "fp8-blocks"],
    "mxfp8": ["compressed-tensors", "modelopt"],
}


def make_models(directory):
    """Small models with random weights, written by transformers; paths by name."""
    import transformers
    from transformers import BertConfig, BertModel, LlamaConfig, LlamaForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    logger.disable("compressed_tensors")
    torch.manual_seed(0)
    sizes = dict(vocab_size=512, hidden_size=256, intermediate_size=384, num_hidden_layers=2, num_attention_heads=4,
                 max_position_embeddings=128)
    decoder = dict(sizes, num_key_value_heads=2)
    experts = dict(decoder, head_dim=64, moe_intermediate_size=128, num_experts=4, num_experts_per_tok=2, norm_topk_prob=True)
    models = {
        "llama": LlamaForCausalLM(LlamaConfig(**decoder)),
        "llama-tied": LlamaForCausalLM(LlamaConfig(**decoder, tie_word_embeddings=True)),
        "bert": BertModel(BertConfig(**sizes)),
        "qwen3-moe": Qwen3MoeForCausalLM(Qwen3MoeConfig(**experts)),
    }
    paths = {}
    for name, model in models.items():
        paths[name] = os.path.join(directory, name)
        model.save_pretrained(paths[name])
    return paths


def check_all(programs, directory):
    """Checks every model in every scheme, spelling and recipe; returns the number of bad files."""
    fp8, calibrate = os.path.join(programs, "fp8"), os.path.join(programs, "examples", "calibrate")
    ids_file = os.path.join(directory, "ids.safetensors")
    ids = torch.randint(0, 512, (2, 8), generator=torch.Generator().manual_seed(1))
    save_file({"input_ids": ids}, ids_file)
    outputs_file, plain = os.path.join(directory, "outputs.safetensors"), os.path.join(directory, "plain")

    def run(*command):
        result = subprocess.run(command, capture_output=True, text=True)
        if result.returncode:
            sys.exit(f"{' '.join(command)}\n{result.stderr}")

    def check(out):
        print(os.path.relpath(out, directory))
        run(fp8, "dequantize", out, "--dtype", "f32", "--out", plain, "--overwrite")
        wrong = check_weights(out, plain)

        def ours(emulated):
            flags = [] if emulated else ["--weight-only"]
            run(calibrate, out, "--ids", ids_file, "--outputs", outputs_file, *flags)
            return load_file(outputs_file)["served"]

        try:
            near = check_logits(out, ids, ours)
        except Exception as error:
            print(f"  outputs: {type(error).__name__}: {str(error).splitlines()[0]}")
            near = False
        return int(wrong > 0 or not near)

    wrong = 0
    for name, model in make_models(directory).items():
        for recipe, spellings in RECIPES.items():
            for spelling in spellings:
                out = os.path.join(directory, f"{name} recipe {recipe} {spelling}")
                run(calibrate, model, "--ids", ids_file, "--recipe", recipe, "--to", spelling, "--out", out)
                wrong += check(out)
        # The amaxes of the inputs, from the static scales of a calibration.
        scales = read(os.path.join(directory, f"{name} recipe delayed compressed-tensors")).items()
        amaxes = {key.removesuffix(".input_scale"): 448 * scale.item() for key, scale in scales if key.endswith(".input_scale")}
        amaxes_file = os.path.join(directory, "amaxes.json")
        with open(amaxes_file, "w") as file:
            json.dump(amaxes, file)
        for scheme, spellings in SPELLINGS.items():
            for spelling in spellings:
                out = os.path.join(directory, f"{name} scheme {scheme} {spelling}")
                # Nothing runs the pooler of an encoder, so its inputs are unknown.
                static = scheme == "static-tensor"
                flags = ["--amaxes", amaxes_file, "--ignore", "pooler.dense"] if static else []
                run(fp8, "quantize", model, "--scheme", scheme, "--to", spelling, "--out", out, *flags)
                wrong += check(out)
    return wrong


def main(arguments):
    if arguments[:1] == ["--all"] and len(arguments) == 2:
        with tempfile.TemporaryDirectory() as directory:
            sys.exit(1 if check_all(arguments[1], directory) else 0)
    if not arguments or len(arguments) % 2:
        sys.exit(__doc__)
    wrong = 0
    for directory, plain in zip(arguments[::2], arguments[1::2]):
        print(f"{directory} ({configured(directory)['quant_method']})")
        wrong += check_weights(directory, plain)
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main(sys.argv[1:])
