"""The tiny models of the tests of `hf`, and the transfers of those of `memory`."""

import sys
from pathlib import Path

for folder in ("hf", "memory"):
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent / folder))
