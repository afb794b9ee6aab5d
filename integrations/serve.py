"""`transformers serve` in this process: the model that it has loaded is tiered, and its answers are the same.

pip install "transformers[serving]"
python integrations/serve.py
"""

from __future__ import annotations

import argparse
import json
import socket
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

from transformers.cli.serve import Serve

import kvtier

PYLM = Path(__file__).resolve().parent.parent / "examples" / "pylm"
PROMPTS = ["def area(radius):\n", "class Stack:\n", "import os\n"]


def ask(port: int, model: str, prompt: str) -> str:
    """The server's answer. It may be starting yet."""
    body = json.dumps({"model": model, "prompt": prompt, "max_tokens": 30, "temperature": 0.0}).encode()
    request = urllib.request.Request(
        f"http://localhost:{port}/v1/completions", body, headers={"Content-Type": "application/json"}
    )
    for _ in range(100):
        try:
            with urllib.request.urlopen(request, timeout=120) as answer:
                return json.load(answer)["choices"][0]["text"]
        except urllib.error.HTTPError:
            raise
        except OSError:
            time.sleep(0.1)
    raise TimeoutError("the server does not answer")


def main() -> int:
    """Returns 0 if the answers are those without a tiered cache."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(PYLM), help="a folder, or a name on the hub")
    args = parser.parse_args()
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    server = Serve(force_model=args.model, dtype="float32", port=port, non_blocking=True)
    try:
        expected = [ask(port, args.model, prompt) for prompt in PROMPTS]
        # It loads models as they are asked for, and has no public name for them.
        (loaded,) = server._model_manager.loaded_models.values()
        used = kvtier.tier(loaded.model)
        found = [ask(port, args.model, prompt) for prompt in PROMPTS]
        kvtier.untier(loaded.model)
    finally:
        server.kill_server()
    print(used.stats.summary())
    print(f"{used.calls} calls of generate; the same answers: {'yes' if found == expected else 'no'}")
    return 0 if found == expected and used.calls == len(PROMPTS) else 1


if __name__ == "__main__":
    sys.exit(main())
