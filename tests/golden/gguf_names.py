"""Writes `gguf_names.json`: llama.cpp's names of the tensors of the models in `models.safetensors`.

    python tests/golden/gguf_names.py

Needs gguf and safetensors (made with gguf 0.19). The gguf package has the table by which llama.cpp's converter names tensors; experts,
which the converter joins, are left out.
"""

import json
import os

from gguf import MODEL_ARCH, get_tensor_name_map
from safetensors import safe_open

ARCHITECTURES = dict(
    llama=MODEL_ARCH.LLAMA,
    mistral=MODEL_ARCH.LLAMA,
    mixtral=MODEL_ARCH.LLAMA,
    qwen2=MODEL_ARCH.QWEN2,
    qwen3=MODEL_ARCH.QWEN3,
    qwen3_moe=MODEL_ARCH.QWEN3MOE,
    phi3=MODEL_ARCH.PHI3,
    bert=MODEL_ARCH.BERT,
)

folder = os.path.dirname(__file__)
result = {}
with safe_open(os.path.join(folder, "models.safetensors"), "np") as file:
    for family, architecture in ARCHITECTURES.items():
        table = get_tensor_name_map(architecture, 2)
        names = [name.removeprefix(f"{family}.") for name in file.keys() if name.startswith(f"{family}.")]
        names = [name for name in names if name not in ("ids", "output") and ".experts." not in name]
        pairs = {name: table.get_name(name, try_suffixes=(".weight", ".bias")) for name in sorted(names)}
        # The converter leaves the pooler out.
        result[family] = {name: target for name, target in pairs.items() if not name.startswith("pooler.")}
assert all(target for pairs in result.values() for target in pairs.values())
with open(os.path.join(folder, "gguf_names.json"), "w") as file:
    json.dump(result, file, indent=0)
    file.write("\n")
