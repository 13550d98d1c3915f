"""A pytest plugin: native kernels are loaded from the folder that SANITIZED names, where a test built them anew."""

from __future__ import annotations

import os
from pathlib import Path

from lamina.engine import native

native.__file__ = str(Path(os.environ["SANITIZED"]) / "__init__.py")
