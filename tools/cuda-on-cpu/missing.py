#!/usr/bin/env python3
"""Writes C source for the functions that cudarc declares and no stand-in has: they say "not supported".

usage: missing.py CUDARC_DIR OUT.c LIBRARY...

A program links every function that cudarc declares, whether it calls them or not.
"""
import re
import subprocess
import sys
from pathlib import Path

# Module of cudarc: the status "not supported", or the nearest that the library has.
MODULES = {"driver": 801, "cublas": 15, "cublaslt": 15, "curand": 102, "nvrtc": 11, "nccl": 5}
FUNCTION = re.compile(r"^\s+fn (\w+)\([^;{]*?\)( -> [^;{]+)?;", re.M)


def main(cudarc, out, *libraries):
    listed = subprocess.run(["nm", "-D", "--defined-only", *libraries], check=True, capture_output=True, text=True)
    present = {line.split()[-1].split("@")[0] for line in listed.stdout.splitlines() if " " in line}
    lines = []
    for module, status in MODULES.items():
        declared = FUNCTION.findall((Path(cudarc) / "src" / module / "sys" / "mod.rs").read_text())
        for name, result in sorted(set(declared)):
            if name in present:
                continue
            present.add(name)
            text = "c_char" in result
            body = f'const char *{name}(void) {{ return "not supported"; }}' if text else f"long {name}(void) {{ return {status}; }}"
            lines.append(body)
    Path(out).write_text("\n".join(lines) + "\n")


main(*sys.argv[1:])
