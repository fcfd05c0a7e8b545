"""Translates a CUDA source into C++ that runs on the emulated GPU: `translate.py kernel.cu kernel.cc`.

Two things of CUDA are no C++ even with device_code.h in front: launches, and arrays in dynamic shared memory.
"""
import pathlib
import re
import sys

LAUNCH = re.compile(r"<<<(.*?)>>>\(", re.S)
COMMENT = re.compile(r"//[^\n]*<<<[^\n]*")
DYNAMIC_SHARED = re.compile(r"extern __shared__ (?:__align__\(\d+\) )?unsigned char (\w+)\[\];")


def start_of_kernel(text, end):
    """Where the name, with its template arguments, starts that ends before `end`."""
    at = len(text[:end].rstrip())
    if text[at - 1] == ">":
        depth = 0
        while True:
            at -= 1
            depth += {">": 1, "<": -1}.get(text[at], 0)
            if depth == 0:
                break
    while re.match(r"[\w:]", text[at - 1]):
        at -= 1
    return at


def translate(text):
    text = DYNAMIC_SHARED.sub(r"unsigned char* const \1 = ::spillway::emulated::dynamic_shared();", text)
    text = COMMENT.sub("//", text)
    while launch := LAUNCH.search(text):
        start = start_of_kernel(text, launch.start())
        kernel = text[start:launch.start()].rstrip()
        text = f"{text[:start]}::spillway::emulated::Launch({kernel}, {launch[1]})({text[launch.end():]}"
    return text


if __name__ == "__main__":
    source, target = map(pathlib.Path, sys.argv[1:])
    target.write_text(f'#line 1 "{source}"\n{translate(source.read_text())}')
