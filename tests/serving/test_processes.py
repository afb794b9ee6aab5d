"""A model that is divided over processes: their engines compute the same steps, or say that they do not."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed
from families import build_model

HERE = Path(__file__).resolve().parent


@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch has no processes here")
def test_engines_of_a_divided_model_give_the_tokens_of_generate_in_every_process(tmp_path: Path) -> None:
    build_model("llama", "sdpa").save_pretrained(tmp_path)
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(HERE.parents[1])}
    run = subprocess.run(
        [*launch, str(HERE / "divided.py"), str(tmp_path)], env=environment, capture_output=True, text=True, timeout=400
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert run.stdout.count("all tokens right") == 2
