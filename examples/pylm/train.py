"""Train `pylm`, a small Llama that writes Python, from nothing and on a CPU.

    python examples/pylm/train.py --minutes 60 --out examples/pylm

The data is the source text of the standard library of the Python that runs this script, so nothing
is downloaded. Tests and demos need a model that has really learned something: random weights give
nearly uniform attention, which hides mistakes that a trained model shows at once. The result is an
ordinary Transformers folder; a model from the hub can take its place anywhere.

On a machine that does other work too, set OMP_WAIT_POLICY=PASSIVE: else each thread burns its share
of the processor while it waits for the other (741 against 2,604 tokens/s in one measurement).
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import math
import platform
import random
import shlex
import signal
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
import transformers
from corpus import Corpus, build_corpus, is_heldout, read_library, train_tokenizer, windows
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

STORED_DTYPE = torch.bfloat16
MAX_WEIGHT_BYTES = 8_000_000  # the weights live in the repository, so they must stay small

SAMPLE_PROMPT = '''def read_lines(path, encoding="utf-8"):
    """Return the lines of the file'''


class Phase(NamedTuple):
    """A stretch of the training time during which all sequences have one length."""

    length: int
    until: float  # the fraction of the training time at which the phase ends


# Short sequences learn the most per second. The long ones at the end teach the later positions.
PHASES = [Phase(512, 0.75), Phase(2048, 0.85), Phase(4096, 1.0)]


@dataclasses.dataclass
class Progress:
    """What the training loop has done so far."""

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    interrupted: bool = False


def parse_phase(text: str) -> Phase:
    """Read `LENGTH:UNTIL`, for example `512:0.75`."""
    length, until = text.split(":")
    return Phase(int(length), float(until))


def build_parser() -> argparse.ArgumentParser:
    """Declare every setting of the run, so that none is hidden in the code."""
    parser = argparse.ArgumentParser(
        description="Train a small Llama on the Python standard library.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--out", type=Path, required=True, help="folder for the finished model")
    add("--minutes", type=float, default=60.0, help="training time")
    add("--vocab", type=int, default=2048, help="number of tokens, the two special ones included")
    add("--hidden", type=int, default=192, help="width of the residual stream")
    add("--layers", type=int, default=8, help="decoder layers")
    add("--heads", type=int, default=6, help="query heads")
    add("--kv-heads", type=int, default=2, help="key and value heads")
    add("--head-dim", type=int, default=32, help="size of one head")
    add("--mlp", type=int, default=512, help="width of the MLP")
    add("--phases", type=parse_phase, nargs="+", metavar="LENGTH:UNTIL", default=PHASES,
        help="sequence lengths, each up to a fraction of the time")  # fmt: skip
    add("--batch-tokens", type=int, default=2048, help="tokens in one step, at least one sequence")
    add("--lr", type=float, default=3e-3, help="peak learning rate")
    add("--warmup", type=float, default=0.02, help="fraction of the time spent warming up")
    add("--weight-decay", type=float, default=0.1, help="AdamW's decay of the weight matrices")
    add("--clip", type=float, default=1.0, help="largest norm of the gradient")
    add("--precision", choices=("bf16", "fp32"), default="bf16", help="bf16 means autocast")
    add("--heldout-one-in", type=int, default=33, help="one file in this many is held out")
    add("--threads", type=int, default=2, help="CPU threads")
    add("--seed", type=int, default=0, help="for the weights, the shuffling and the sample")
    add("--log-seconds", type=float, default=15.0, help="time between two lines of progress")
    add("--checkpoint-minutes", type=float, default=5.0, help="time between two checkpoints")
    add("--checkpoint", type=Path, default=Path(tempfile.gettempdir()) / "pylm-checkpoint",
        help="folder outside the repository for checkpoints, complete models")  # fmt: skip
    return parser


def build_model(args: argparse.Namespace, tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """Make an untrained model with tied embeddings and grouped-query attention."""
    special = {
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=args.hidden,
        intermediate_size=args.mlp,
        num_hidden_layers=args.layers,
        num_attention_heads=args.heads,
        num_key_value_heads=args.kv_heads,
        head_dim=args.head_dim,
        max_position_embeddings=tokenizer.model_max_length,
        tie_word_embeddings=True,
        **special,
    )
    model = LlamaForCausalLM(config)
    model.generation_config = GenerationConfig(**special)
    return model


def build_optimizer(model: LlamaForCausalLM, args: argparse.Namespace) -> torch.optim.AdamW:
    """AdamW that decays matrices but not the gains of the norms."""
    groups = [
        {"params": [p for p in model.parameters() if p.ndim >= 2]},
        {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=args.lr, betas=(0.9, 0.95), weight_decay=args.weight_decay, fused=True)


def learning_rate(done: float, args: argparse.Namespace) -> float:
    """Warm up linearly, then follow a cosine to zero; `done` is the fraction of time gone."""
    if done < args.warmup:
        return args.lr * max(done / args.warmup, 0.01)
    rest = min((done - args.warmup) / (1 - args.warmup), 1.0)
    return args.lr * 0.5 * (1 + math.cos(math.pi * rest))


@torch.no_grad()
def heldout_loss(model: LlamaForCausalLM, stream: Tensor, length: int) -> float:
    """Mean loss in nats per token when the stream is read in windows of `length` tokens."""
    total = 0.0
    for start in range(0, len(stream) - 1, length):
        window = stream[start : start + length + 1]  # one more: the last token needs a target
        logits = model(input_ids=window[None, :-1], use_cache=False).logits[0]
        total += F.cross_entropy(logits.float(), window[1:], reduction="sum").item()
    return total / (len(stream) - 1)


def bits_per_byte(loss: float, corpus: Corpus) -> float:
    """Turn nats per token into a figure that does not depend on the tokenizer."""
    return loss * (len(corpus.heldout) - 1) / corpus.heldout_bytes / math.log(2)


def stop_on_signal(progress: Progress) -> None:
    """Let the first Ctrl-C (or a polite kill) end the loop; a second one ends the program."""

    def handle(number: int, _frame: object) -> None:
        progress.interrupted = True
        signal.signal(number, signal.SIG_DFL)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, handle)


def save(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Write model and tokenizer as one Transformers folder, the weights in half the bytes."""
    stored = copy.deepcopy(model).to(STORED_DTYPE)  # training goes on with the fp32 original
    stored.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def train_step(model: LlamaForCausalLM, optimizer: torch.optim.AdamW, batch: Tensor, args: argparse.Namespace) -> float:
    """Take one step of the optimizer and return the loss."""
    with torch.autocast("cpu", torch.bfloat16, enabled=args.precision == "bf16"):
        loss = model(input_ids=batch, labels=batch, use_cache=False).loss
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), args.clip)
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def train(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    corpus: Corpus,
    args: argparse.Namespace,
) -> Progress:
    """Train until the time is up or a signal comes; return what was done."""
    progress, optimizer, rng = Progress(), build_optimizer(model, args), random.Random(args.seed)
    stop_on_signal(progress)
    sources = {phase.length: windows(corpus.train, phase.length, rng) for phase in args.phases}
    budget, begin = args.minutes * 60, time.monotonic()
    next_log, next_checkpoint = 0.0, args.checkpoint_minutes * 60
    losses: list[float] = []  # since the last line of progress
    logged = Progress()  # where that line was
    while progress.seconds < budget and not progress.interrupted:
        done = progress.seconds / budget
        length = next((p.length for p in args.phases if done < p.until), args.phases[-1].length)
        rows = max(args.batch_tokens // length, 1)
        batch = torch.stack([next(sources[length]) for _ in range(rows)])
        rate = learning_rate(done, args)
        for group in optimizer.param_groups:
            group["lr"] = rate
        losses.append(train_step(model, optimizer, batch, args))

        progress.step += 1
        progress.tokens += batch.numel()
        progress.seconds = time.monotonic() - begin
        if progress.seconds >= next_log:
            report(progress, logged, budget, f"length {length:4d}  lr {rate:.1e}", losses)
            losses, logged = [], dataclasses.replace(progress)
            next_log = progress.seconds + args.log_seconds
        if progress.seconds >= next_checkpoint:
            save(model, tokenizer, args.checkpoint)
            quick = heldout_loss(model, corpus.heldout[:16385], args.phases[0].length)
            print(f"checkpoint saved; held-out loss (first 16k tokens) {quick:.3f}", flush=True)
            next_checkpoint = progress.seconds + args.checkpoint_minutes * 60
    return progress


def report(
    now: Progress,
    before: Progress,
    budget: float,
    setting: str,
    losses: list[float],
) -> None:
    """Print one line of progress: the mean loss and the speed since the line before."""
    speed = (now.tokens - before.tokens) / (now.seconds - before.seconds)
    left = max(budget - now.seconds, 0) / 60
    print(
        f"step {now.step:6d}  {setting}  loss {sum(losses) / len(losses):.3f}"
        f"  {speed:6.0f} tokens/s  {left:5.1f} min left",
        flush=True,
    )


def sample(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, seed: int) -> str:
    """Continue the sample prompt."""
    torch.manual_seed(seed)
    inputs = tokenizer(SAMPLE_PROMPT, return_tensors="pt", return_token_type_ids=False)
    ids = model.generate(**inputs, max_new_tokens=160, do_sample=True, temperature=0.7, top_p=0.9)
    return tokenizer.decode(ids[0], skip_special_tokens=True)


def command_line(args: argparse.Namespace) -> str:
    """Rebuild the command without any folder name that belongs to one machine."""
    out = args.out.name if args.out.is_absolute() else args.out.as_posix()
    words = ["python", "examples/pylm/train.py", "--minutes", f"{args.minutes:g}", "--out", out]
    defaults = build_parser().parse_args(["--out", "."])
    for name, value in vars(args).items():
        if name in {"out", "minutes", "checkpoint"} or value == getattr(defaults, name):
            continue
        values = [f"{p.length}:{p.until}" for p in value] if name == "phases" else [str(value)]
        words += ["--" + name.replace("_", "-"), *values]
    return shlex.join(words)


def write_card(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    corpus: Corpus,
    progress: Progress,
    args: argparse.Namespace,
) -> None:
    """Measure the stored model and describe it in the folder's README.md."""
    losses = {p.length: heldout_loss(model, corpus.heldout, p.length) for p in args.phases}
    rows = [f"| {n:,} | {v:.3f} | {bits_per_byte(v, corpus):.3f} |" for n, v in losses.items()]
    train_tokens = sum(map(len, corpus.train))
    template = Path(__file__).with_name("card_template.md").read_text(encoding="utf-8")
    text = template.format(
        **{name: getattr(args, name) for name in ("layers", "hidden", "heads", "kv_heads")},
        **{name: getattr(args, name) for name in ("head_dim", "mlp", "threads")},
        parameters=model.num_parameters(),
        positions=tokenizer.model_max_length,
        vocab=len(tokenizer),
        dtype=str(STORED_DTYPE).removeprefix("torch."),
        python=platform.python_version(),
        train_files=len(corpus.train),
        train_tokens=train_tokens,
        command=command_line(args),
        minutes=progress.seconds / 60,
        cut_short=" (interrupted)" if progress.interrupted else "",
        steps=progress.step,
        tokens=progress.tokens,
        epochs=progress.tokens / train_tokens,
        precision="bf16 autocast" if args.precision == "bf16" else "fp32",
        phases=", ".join(f"{p.length} ({p.until:g})" for p in args.phases),
        torch=torch.__version__,
        transformers=transformers.__version__,
        heldout_files=len(corpus.heldout_names),
        heldout_bytes=corpus.heldout_bytes,
        heldout_tokens=len(corpus.heldout),
        heldout_names=", ".join(f"`{name}`" for name in corpus.heldout_names),
        table="\n".join(rows),
        sample=sample(model, tokenizer, args.seed),
    )
    (args.out / "README.md").write_text(text, encoding="utf-8")
    print("held-out loss", {n: round(v, 4) for n, v in losses.items()})


def main() -> None:
    """Prepare the data, train, save, measure what was saved, and write the card."""
    args = build_parser().parse_args()
    transformers.utils.logging.disable_progress_bar()
    torch.manual_seed(args.seed)
    torch.set_num_threads(args.threads)
    texts = read_library()
    known = [text for name, text in texts.items() if not is_heldout(name, args.heldout_one_in)]
    longest = max(phase.length for phase in args.phases)
    tokenizer = train_tokenizer(known, args.vocab, longest)
    corpus = build_corpus(texts, tokenizer, args.heldout_one_in)
    model = build_model(args, tokenizer)
    print(
        f"{model.num_parameters():,} parameters; {sum(map(len, corpus.train)):,} training tokens"
        f" in {len(corpus.train)} files; {len(corpus.heldout):,} held out",
        flush=True,
    )
    progress = train(model, tokenizer, corpus, args)
    save(model, tokenizer, args.out)
    size = (args.out / "model.safetensors").stat().st_size
    if size > MAX_WEIGHT_BYTES:
        raise SystemExit(f"the weights take {size:,} bytes, more than {MAX_WEIGHT_BYTES:,}")
    stored = AutoModelForCausalLM.from_pretrained(args.out, dtype=torch.float32)
    write_card(stored, tokenizer, corpus, progress, args)


if __name__ == "__main__":
    main()
