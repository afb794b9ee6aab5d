"""The tiny models of the tests of `hf`, the transfers of those of `memory`, and what these tests have of each other."""

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
OTHERS = ("hf", "hf/cache", "memory", "memory/blocks", "tables")
for folder in (*(HERE.parent / x for x in OTHERS), *(HERE / x for x in ("calls", "disk", "kept", "saved"))):
    sys.path.insert(0, str(folder))
