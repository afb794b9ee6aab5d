"""The example of a policy runs, and says that tokens are those of DynamicCache."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_a_policy_in_one_file_is_compared_with_those_that_have_a_name() -> None:
    found = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "policy.py")],
        capture_output=True,
        text=True,
        timeout=300,
        env={"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PATH": "/usr/bin:/bin"},
        check=True,
    ).stdout
    rows = {line.split()[0]: line for line in found.splitlines() if "DynamicCache" in line or "DIFFER" in line}
    assert list(rows) == ["FirstLayersStay", "default", "all-fetch", "pie", "neo"]
    assert all("as DynamicCache" in line for line in rows.values())
    fetched, hosted = map(int, rows["FirstLayersStay"].split()[1:3])
    assert fetched > hosted > 0
