"""What the audit costs in decoding: tokens/s with all of it, with the usual sample, and without.

host   all keys and values in host memory, where attention reads them: a block of one call in 64 is compared
fetch  half of them are fetched to a device in each step: one block in 64 is compared

Of a full audit it is shown what it costs; there is no limit to that.
"""

from __future__ import annotations

import torch

from benchmarks.cores import words
from benchmarks.harness import Bench
from benchmarks.models import label
from benchmarks.sessions import WARM_UP_TOKENS
from benchmarks.targets import Target, table_of

SUMMARY = "what comparing blocks with their checksums costs in decoding"
CONTEXTS = (1024, 8192)
CASES = {"host": "kvtier", "fetch": "fetch@50%"}
AUDITS = ("off", "sampled", "full")
#: Of the tokens/s without an audit.
LIMIT = 0.99


def run(bench: Bench) -> None:
    """Run the scenario."""
    # Turns are short and many: the figure that is asked for is smaller than what a machine drifts in a second.
    tokens, rounds = bench.tokens(8), bench.rounds(60)
    for part, name in CASES.items():
        if not bench.selected(part):
            continue
        for model in bench.model_names("pylm"):
            for case in bench.cases("audit", model, CONTEXTS, WARM_UP_TOKENS + rounds * tokens):
                names = [f"{name}:{audit}" for audit in AUDITS]
                starts = bench.starts("loop", model, case, tokens, *names)
                outcomes = bench.compare(
                    "audit",
                    model,
                    case,
                    starts,
                    unit="tokens/s",
                    rounds=rounds,
                    base=names[0],
                    detail=f"{part}, {words(torch.get_num_threads())}",
                    part=part,
                    tokens_per_turn=tokens,
                )
                ratio = outcomes[names[1]].ratio(outcomes[names[0]]) if set(names) <= outcomes.keys() else None
                figure = None if ratio is None else ratio.median
                target = Target(f"{part}, {case.context:,} tokens: sampled / off, tokens/s", figure, ">=", LIMIT)
                print(table_of([target]) + "\n", flush=True)
                workload = {"model": label(model), "context": case.context, "part": part}
                bench.record("audit", workload=workload, **target.fields())
