#!/usr/bin/env python3
"""Turns a preprocessed kernel source into one that a C++ compiler takes.

usage: kernel_source.py IN.ii SOURCE_DIR OUT.ii

COC_GLOBAL and COC_SHARED stand where the source says __global__ and __shared__. Static shared memory becomes
thread-local, dynamic shared memory a pointer. Every extern "C" kernel gets an entry in the object's table.
"""
import re
import sys

SHARED_DYNAMIC = re.compile(r"extern\s+COC_SHARED\s+([^;]*?)(\w+)\s*\[\s*\]\s*;")
KERNEL = re.compile(r'extern\s+"C"\s+(?:\w+\s+)*?COC_GLOBAL\s+(?:\w+\s+)*?(\w+)\s*\(')
BLOCK = re.compile(r'extern\s+"C"\s*\{')
ANY_KERNEL = re.compile(r"COC_GLOBAL\s+(?:\w+\s+)*?(\w+)\s*\(")
ALIGNAS = r"alignas\s*\((?:[^()]|\([^()]*\))*\)"
ATTRIBUTES = re.compile(rf"__attribute__\s*\(\(.*?\)\)|{ALIGNAS}")


def without_headers(text, source_dir):
    """The lines that come from the kernel sources themselves."""
    kept, keep = [], False
    for line in text.splitlines():
        marker = re.match(r'# \d+ "(.*?)"', line)
        if marker:
            keep = marker.group(1).startswith(source_dir)
        elif keep:
            kept.append(line)
    return "\n".join(kept)


def kernel_names(text):
    """extern "C" kernels, on their own or inside a block."""
    names = [m.group(1) for m in KERNEL.finditer(text)]
    for block in BLOCK.finditer(text):
        depth, end = 1, block.end()
        while depth and end < len(text):
            depth += {"{": 1, "}": -1}.get(text[end], 0)
            end += 1
        names += [m.group(1) for m in ANY_KERNEL.finditer(text[block.end() : end])]
    return list(dict.fromkeys(names))


def dynamic_shared(match):
    kind = re.sub(r"^#.*$", "", match.group(1), flags=re.M)  # line markers within the declaration
    kind = " ".join(ATTRIBUTES.sub("", kind).split())
    return f"{kind}* const {match.group(2)} = coc::dynamic_shared<{kind}>();"


def rewrite(text):
    text = SHARED_DYNAMIC.sub(dynamic_shared, text)
    text = re.sub(r"\bstatic\s+COC_SHARED\b", "COC_SHARED", text)
    text = re.sub(r"\bCOC_SHARED\s+static\b", "COC_SHARED", text)
    # g++ ignores alignas behind static.
    text = re.sub(rf"\bCOC_SHARED\s+({ALIGNAS})", r"\1 COC_SHARED", text)
    text = re.sub(r"\bCOC_SHARED\b", "static thread_local", text)
    return re.sub(r"\bCOC_GLOBAL\b", "", text)


TAIL = """
namespace {{
{trampolines}
const coc::Kernel kernel_list[] = {{
{entries}
}};
thread_local char touched;
void touch() {{ *static_cast<volatile char*>(&touched) = 0; }}
}}
extern "C" __attribute__((visibility("default"))) const coc::KernelTable coc_kernels = {{kernel_list, {count}, touch}};
"""


def main(preprocessed, source_dir, out):
    text = open(preprocessed).read()
    names = kernel_names(without_headers(text, source_dir))
    trampolines = "\n".join(f"using Call_{n} = coc::Call<decltype(&{n}), &{n}>;" for n in names)
    entries = "\n".join(f'  {{"{n}", Call_{n}::call, Call_{n}::count, Call_{n}::arguments}},' for n in names)
    with open(out, "w") as file:
        file.write(rewrite(text))
        file.write(TAIL.format(trampolines=trampolines, entries=entries, count=len(names)))


main(*sys.argv[1:])
