"""Builds the native kernels where a C compiler is there; where none is, the install succeeds and the torch rules run.

In a source tree: python setup.py build_ext --inplace
"""

from __future__ import annotations

import runpy
from glob import glob

from setuptools import Extension, setup

FOLDER = "src/lamina/engine/native"
DIGEST = runpy.run_path(f"{FOLDER}/sources.py")["source_digest"]()
FLAGS = [
    "-std=gnu11",
    "-O3",
    "-fvisibility=hidden",
    "-ffp-contract=off",
    "-Wall",
    "-Wextra",
    "-fno-math-errno",
    "-fno-trapping-math",
]

setup(
    ext_modules=[
        Extension(
            "lamina.engine.native._native",
            sources=sorted(glob(f"{FOLDER}/*.c")),
            depends=sorted(glob(f"{FOLDER}/*.h")),
            define_macros=[("LAMINA_SOURCES", f'"{DIGEST}"')],
            extra_compile_args=FLAGS,
            libraries=["m"],
            optional=True,
            py_limited_api=True,
        )
    ],
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
)
