"""`python -m kvtier.calibration` (`make calibrate`): measure this machine for common shapes, and store its profile."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from kvtier.calibration.run import calibrate
from kvtier.errors import KVTierError


def main(argv: Sequence[str] | None = None) -> int:
    """Calibrate and print the result. Returns 0; 1 if a measurement failed; 2 for an error; 130 after Ctrl-C."""
    parser = argparse.ArgumentParser(
        prog="python -m kvtier.calibration",
        description="Measure this machine for common shapes and store its profile; for the shapes of a model: "
        "kvtier.calibrate(model).",
    )
    parser.add_argument("--device", help="such as cuda:1 (default: the current CUDA device)")
    parser.add_argument("--block-size", type=int, help="tokens per block (default: the cache's)")
    args = parser.parse_args(argv)
    try:
        found = calibrate(device=args.device, block_size=args.block_size)
    except KVTierError as error:
        print(f"kvtier.calibration: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("Interrupted; what was measured before is stored.", file=sys.stderr)
        return 130
    if found.path is not None or found.failures:  # else what there is to say was said
        print(found)
    return 1 if found.failures else 0


if __name__ == "__main__":
    sys.exit(main())
