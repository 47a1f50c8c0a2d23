"""Builds `microvm._native` with cffi, out of line, in API mode.

Promises one extension module from the C files beside this one and the declarations of
`shim.h`. Must not decide anything: no feature switches, no generated constants. Neighbour:
`pyproject.toml` names it in setuptools' `cffi_modules`; run by hand it builds in place.
"""

import sys
from pathlib import Path

from cffi import FFI

HERE = Path(__file__).resolve().parent

# setuptools wants the sources relative to the project's root, where it runs.
SOURCES = ["native/frame.c", "native/file.c", "native/clock.c", "native/jail.c"]

# The rules are for our C; the code that cffi generates leaves parameters unused.
PREAMBLE = """
#pragma GCC diagnostic ignored "-Wunused-parameter"
#pragma GCC diagnostic ignored "-Wmissing-field-initializers"
#include "shim.h"
"""

ffibuilder = FFI()
ffibuilder.cdef(
    "\n".join(line for line in (HERE / "shim.h").read_text("utf-8").splitlines() if not line.startswith("#"))
)
ffibuilder.set_source(
    "microvm._native",
    PREAMBLE,
    sources=SOURCES,
    depends=["native/shim.h"],
    include_dirs=[str(HERE)],
    extra_compile_args=["-std=gnu11", "-O2", "-Wall", "-Wextra", "-Werror", "-fvisibility=hidden"],
)

if __name__ == "__main__":
    ffibuilder.compile(tmpdir=sys.argv[1] if len(sys.argv) > 1 else ".", verbose=True)
