"""Lowers the number of threads of OpenBLAS, NumPy's library for linear algebra.

OpenBLAS reads the number of its threads from OMP_NUM_THREADS when it is loaded. The launcher loads
it with torch, perhaps before it knows how many ranks share the cores, and the ranks are copies. So
each of them would use all cores.
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

OWN_VARIABLES = ("OPENBLAS_NUM_THREADS", "GOTO_NUM_THREADS")
"""Variables by which the user sets the number for OpenBLAS alone."""
PREFIXES_AND_SUFFIXES = (
    ("scipy_", "64_"),  # in NumPy's wheels
    ("scipy_", ""),  # in SciPy's wheels
    ("", "64_"),  # in older wheels
    ("", ""),
)
"""What the names of OpenBLAS's functions begin and end with, depending on how it was built."""
FILE_OF_MAPPINGS = Path("/proc/self/maps")


def limit_openblas(num_threads: int) -> None:
    """Lowers the number of threads of each OpenBLAS that this process has loaded, if it is higher.

    Does nothing if the user has set the number for OpenBLAS, or on a system without /proc.
    """
    if any(name in os.environ for name in OWN_VARIABLES):
        return
    for path in _loaded_files():
        library = ctypes.CDLL(path)
        for prefix, suffix in PREFIXES_AND_SUFFIXES:
            get = getattr(library, f"{prefix}openblas_get_num_threads{suffix}", None)
            set_threads = getattr(library, f"{prefix}openblas_set_num_threads{suffix}", None)
            if get is not None and set_threads is not None and get() > num_threads:
                set_threads(num_threads)


def _loaded_files() -> set[str]:
    """Returns the paths of the OpenBLAS libraries that are loaded in this process."""
    try:
        lines = FILE_OF_MAPPINGS.read_text(errors="surrogateescape").splitlines()
    except OSError:  # another system than Linux
        return set()

    paths = set()
    for line in lines:
        # "7f2a4000-7f2a5000 r-xp 00000000 08:01 1234    /usr/lib/libopenblas.so.0"
        _, slash, rest = line.partition("/")
        path = slash + rest
        if "openblas" in os.path.basename(path) and os.path.exists(path):
            paths.add(path)
    return paths
