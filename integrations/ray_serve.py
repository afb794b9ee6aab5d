"""A Ray Serve deployment: replicas with an engine and a store each; a conversation goes to the replica that has it.

pip install "ray[serve]"
python integrations/ray_serve.py

Ray Serve's consistent hashing sends all requests with one session id to one replica; over HTTP that is the header
`x-session-id`. What a replica keeps is in a folder of its own, named after its rank, so that one that is started again
goes on with it. Where Ray has to choose another replica, that one computes the history again: the answer is the same.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import urllib.request
from pathlib import Path
from typing import Any

import ray
import torch
from ray import serve
from ray.serve.config import RequestRouterConfig
from ray.serve.experimental.consistent_hash_router import ConsistentHashRouter
from starlette.responses import JSONResponse
from transformers import AutoModelForCausalLM, AutoTokenizer

import kvtier

PYLM = Path(__file__).resolve().parent.parent / "examples" / "pylm"
REPLICAS, NEW = 2, 24
#: For each conversation, what is added in each turn.
TURNS = {
    "ada": ["def area(radius):\n", "\n\ndef volume(radius):\n"],
    "bob": ["class Stack:\n", "\n    def push(self, item):\n"],
    "cy": ["import os\n", "\n\ndef main():\n"],
}

#: Of the body of a request over HTTP: the arguments of `answer`, and what they are.
FIELDS = {"ids": list, "conversation": str, "max_new_tokens": int}
#: Why there is no answer, and how the server of `kvtier serve` says it: a status of HTTP, a word for programs.
REFUSED: dict[type[Exception], tuple[int, str]] = {
    kvtier.ConfigError: (400, "invalid_value"),
    kvtier.BudgetError: (400, "budget_exceeded"),
    kvtier.QueueFullError: (429, "queue_full"),
    kvtier.ClosedError: (503, "shutting_down"),
}


def arguments_in(body: bytes) -> dict[str, Any]:
    """The arguments of `answer` in a body. Raises `ConfigError`, as the engine does of their values."""
    try:
        given = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise kvtier.ConfigError(f"The body is no JSON object: {error}.") from error
    if not isinstance(given, dict) or given.keys() != FIELDS.keys():
        raise kvtier.ConfigError(f"The body is a JSON object with {', '.join(FIELDS)}.")
    for name, kind in FIELDS.items():
        if type(given[name]) is not kind:
            raise kvtier.ConfigError(f"{name}={given[name]!r:.80}: give one of type {kind.__name__}.")
    return given


def refusal_of(error: Exception) -> JSONResponse:
    """How a client is told why it has no answer."""
    status, code = next(said for kind, said in REFUSED.items() if isinstance(error, kind))
    what = {429: "rate_limit_error", 503: "server_error"}.get(status, "invalid_request_error")
    body = {"error": {"message": str(error), "type": what, "param": None, "code": code}}
    return JSONResponse(body, status, {"Retry-After": "1"} if status in (429, 503) else None)


@serve.deployment(
    num_replicas=REPLICAS,
    max_ongoing_requests=64,
    ray_actor_options={"num_cpus": 0.5},
    request_router_config=RequestRouterConfig(request_router_class=ConsistentHashRouter),
)
class Chat:
    """A model, an engine, and a store of conversations.

    Args:
        model: a folder, or a name on the hub.
        directory: in which each replica has a folder.
        host_budget: of each replica.
    """

    def __init__(self, model: str, directory: str, host_budget: str = "256MiB") -> None:
        torch.set_num_threads(1)
        rank = serve.get_replica_context().rank
        self.replica = int(getattr(rank, "rank", rank))
        loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        folder = Path(directory) / f"replica-{self.replica}"
        self.store = kvtier.ConversationStore(loaded, host_budget=host_budget, directory=folder)
        self.engine = kvtier.Engine(loaded, store=self.store)
        self.engine.start()

    async def answer(self, ids: list[int], conversation: str, max_new_tokens: int) -> dict[str, Any]:
        """What follows a history, and how much of that was kept here."""
        loop, ended = asyncio.get_running_loop(), asyncio.Event()
        outputs: list[kvtier.RequestOutput] = []

        def heard(output: kvtier.RequestOutput) -> None:  # in the engine's thread
            if output.is_finished():
                outputs.append(output)
                loop.call_soon_threadsafe(ended.set)

        # No thread waits for an answer: Python has few for that, and a short answer would come behind long ones.
        name = self.engine.add_request(
            ids, conversation=conversation, max_new_tokens=max_new_tokens, do_sample=False, listener=heard
        )
        try:
            await ended.wait()
        except asyncio.CancelledError:  # the client has left
            self.engine.cancel(name)
            raise
        output = outputs[0]
        if output.error is not None:
            raise output.error
        if output.finish_reason == "cancelled":
            raise kvtier.ClosedError("This replica ends before the answer does. Ask again: another one has it.")
        return {"tokens": output.generated_tokens, "cached": output.cached_tokens, "replica": self.replica}

    async def __call__(self, request: Any) -> Any:
        """Over HTTP: a JSON object with the arguments of `answer`."""
        try:
            return await self.answer(**arguments_in(await request.body()))
        except tuple(REFUSED) as error:
            return refusal_of(error)

    def __del__(self) -> None:
        self.engine.close()
        self.store.close()


def by_generate(model: Any, ids: list[int]) -> list[int]:
    """The tokens of Transformers."""
    out = model.generate(torch.tensor([ids]), max_new_tokens=NEW, do_sample=False)
    return out[0, len(ids) :].tolist()


def main() -> int:
    """Returns 0 if the tokens are those of `generate`, and each conversation is kept, and stays at a replica."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(PYLM), help="a folder, or a name on the hub")
    args = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
    ray.init(num_cpus=2, include_dashboard=False, object_store_memory=100 * 2**20, log_to_driver=False)
    same, kept, replicas = True, 0, dict[str, set[int]]()
    with tempfile.TemporaryDirectory() as directory:
        try:
            handle = serve.run(Chat.bind(args.model, directory), name="kvtier", route_prefix="/chat")
            histories: dict[str, list[int]] = {name: [] for name in TURNS}
            for turn in range(2):
                asked = {}
                for name, texts in TURNS.items():
                    histories[name] += tokenizer(texts[turn]).input_ids
                    bound = handle.options(session_id=name)
                    asked[name] = bound.answer.remote(histories[name], name, NEW)
                for name, answer in asked.items():
                    found = answer.result(timeout_s=300)
                    same &= found["tokens"] == by_generate(model, histories[name])
                    replicas.setdefault(name, set()).add(found["replica"])
                    kept += bool(found["cached"])
                    histories[name] += found["tokens"]
            body = {"ids": histories["ada"], "conversation": "ada", "max_new_tokens": NEW}
            request = urllib.request.Request(
                "http://localhost:8000/chat", json.dumps(body).encode(), headers={"x-session-id": "ada"}
            )
            with urllib.request.urlopen(request, timeout=120) as response:
                found = json.load(response)
            same &= found["tokens"] == by_generate(model, histories["ada"])
            replicas["ada"].add(found["replica"])
        finally:
            serve.shutdown()
            ray.shutdown()
    stayed = all(len(some) == 1 for some in replicas.values())
    print(f"{kept} of {len(TURNS)} second turns began with what was kept; each at one replica: {stayed}")
    print(f"the same tokens: {'yes' if same else 'no'}")
    return 0 if same and stayed and kept == len(TURNS) else 1


if __name__ == "__main__":
    sys.exit(main())
