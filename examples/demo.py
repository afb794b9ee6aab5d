"""A context that does not fit the device budget: what `TieredKVCache` takes for it, next to the other ways.

    python examples/demo.py
    python examples/demo.py --plot demo.png
    python examples/demo.py --model NAME --context 8000 --budget 10%

The model reads the beginning of a long text and continues it greedily, in four ways:

- with `DynamicCache`, for which all keys and values have to fit the device;
- with `TieredKVCache`, which gets a part of that memory, while CPU threads attend to the rest in host memory;
- with the same budget, but fetching the rest at each token;
- without a cache, computing all again at each token.

On a machine without an accelerator the device tier is emulated in RAM, so that both tiers are equally fast.

Exit status: 0 if all ways gave the same tokens, 1 if not, 2 for an option or a budget that does not
work, 130 after Ctrl-C.
"""

from __future__ import annotations

import argparse
import importlib.util
import math
import platform
import statistics
import sys
import sysconfig
import time
import warnings
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache
from transformers.generation.streamers import BaseStreamer

from kvtier import CacheStats, ConfigError, KVTierError, TieredKVCache

# Transformers 5.24 calls it `cache`, and takes both names.
warnings.filterwarnings("ignore", ".past_key_values. is deprecated", FutureWarning)

EXAMPLE_MODEL = Path(__file__).resolve().parent / "pylm"
#: Modules of the standard library that make up the text, in this order, as many as the context needs.
MODULES = ("argparse", "tarfile", "inspect", "typing", "subprocess", "zipfile", "datetime", "shutil")
FEWEST_TOKENS = 16
#: The first one belongs to the prefill.
FEWEST_NEW_TOKENS = 2
#: Without a cache so many tokens are enough: each takes as long as the prefill.
TOKENS_WITHOUT_CACHE = 2
#: Of the prompt, so much is shown before the continuation; marks stand around what was generated.
PROMPT_TOKENS_SHOWN = 64
MARK = "\u25ae"

TERMINAL = sys.stdout.isatty()
MIB = 2**20


class UsageError(Exception):
    """Something that the user asked for cannot be done; the message says what."""


def bold(text: str) -> str:
    """`text` in bold where that shows."""
    return f"\033[1m{text}\033[0m" if TERMINAL else text


def dim(text: str) -> str:
    """`text` in grey where that shows."""
    return f"\033[2m{text}\033[0m" if TERMINAL else text


def say(text: str = "", *, end: str = "\n") -> None:
    """Print at once."""
    print(text, end=end, flush=True)


# ------------------------------------------------------------------------------------------ options


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    """Read the command line; ends the program with status 2 if it is wrong."""

    def count(text: str) -> int:
        value = int(text)
        if value < 1:
            raise argparse.ArgumentTypeError(f"{text} is not a positive number")
        return value

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a folder or the name of a hub model (default: the example model)")
    parser.add_argument("--context", type=count, default=4032, help="tokens of text to read (default: %(default)s)")
    parser.add_argument("--new-tokens", type=count, default=48, help="tokens to generate (default: %(default)s)")
    parser.add_argument(
        "--budget",
        default="25%",
        help="device memory for the tiered cache: a share of the KV ('25%%', 0.25) or a size ('4MiB'; default: 25%%)",
    )
    parser.add_argument("--block-size", type=count, default=64, help="tokens per block (default: %(default)s)")
    parser.add_argument("--text", type=Path, help="a text file to read (default: Python's own sources)")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw time and memory (needs matplotlib)")
    args = parser.parse_args(argv)
    if args.context < FEWEST_TOKENS:
        parser.error(f"argument --context: at least {FEWEST_TOKENS} tokens")
    if args.new_tokens < FEWEST_NEW_TOKENS:
        parser.error(f"argument --new-tokens: at least {FEWEST_NEW_TOKENS}")
    return args


def budget_for(text: str, kv_bytes: int) -> int | str:
    """`--budget` as kvtier takes it.

    Args:
        text: a share (`"25%"`, `"0.25"`), bytes (`"4000000"`) or a size (`"4MiB"`).
        kv_bytes: what a share is a share of.

    Raises:
        UsageError: a share outside (0, 1]. A size is left to kvtier, which says what is wrong with it.
    """
    try:
        number = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        return text
    if not (math.isfinite(number) or text.endswith("%")):
        return text
    if text.endswith("%") or "." in text or number == 1:
        if not 0 < number <= 1:
            raise UsageError(f"--budget {text}: a share is above 0 and at most 1 (100%).")
        return max(int(number * kv_bytes), 1)
    return int(number)


def read_text(file: Path | None) -> tuple[str, str]:
    """A long text and what to call it."""
    if file is not None:
        try:
            return file.read_text(encoding="utf-8"), file.name
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"--text {file}: {error}") from error
    library = Path(sysconfig.get_path("stdlib"))
    try:
        text = "".join((library / f"{name}.py").read_text(encoding="utf-8") for name in MODULES)
    except OSError as error:
        raise UsageError(f"This Python has no sources of its own to read ({error}): give --text FILE.") from error
    return text, f"sources of Python {platform.python_version()}, {MODULES[0]}.py first"


def load(name: str | None) -> tuple[transformers.PreTrainedModel, transformers.PreTrainedTokenizerBase]:
    """The model, on CUDA in its own dtype if there is one, else on the CPU in fp32; and its tokenizer."""
    if name is None and not (EXAMPLE_MODEL / "config.json").is_file():
        raise UsageError("The example model is not there (examples/pylm has no config.json): give --model NAME.")
    source = str(EXAMPLE_MODEL) if name is None else name
    cuda = torch.cuda.is_available()
    try:
        tokenizer = AutoTokenizer.from_pretrained(source)
        model = AutoModelForCausalLM.from_pretrained(source, dtype="auto" if cuda else torch.float32)
    except (OSError, ValueError) as error:
        raise UsageError(f"--model {source} cannot be loaded: {error}") from error
    return model.to("cuda" if cuda else "cpu").eval(), tokenizer


# ------------------------------------------------------------------------------------------- a run


class Progress(BaseStreamer):
    """Follows `generate`: shows that it works, and notes when each token came.

    Args:
        tokenizer: turns tokens into text.
        text: show the text as it comes; else a count.
        context: tokens of the prompt, for the display.
        total: tokens that will come.
    """

    def __init__(
        self, tokenizer: transformers.PreTrainedTokenizerBase, *, text: bool, context: int, total: int
    ) -> None:
        self.tokenizer = tokenizer
        self.text = text
        self.total = total
        self.tokens: list[int] = []
        self.times: list[float] = []
        self.shown = 0
        self.prompt_end = ""
        say(f"  prefill of {context:,} tokens ... ", end="")
        self.began = time.perf_counter()

    def put(self, value: torch.Tensor) -> None:
        """Take the prompt at the first call, a token at each that follows."""
        if value.dim() > 1:
            lines = self.tokenizer.decode(value[0, -PROMPT_TOKENS_SHOWN:], skip_special_tokens=True).splitlines()
            self.prompt_end = "\n".join(lines[1:] or lines)
            return
        self.times.append(time.perf_counter())
        self.tokens += value.tolist()
        if len(self.times) == 1:
            say(f"{self.prefill_seconds:.2f} s")
            say(f"  decode of {self.total} tokens ... ", end="")
            if self.text:
                say(f"\n\n{dim(self.prompt_end + MARK)}", end="")
        if self.text:
            self._show_text()
        elif TERMINAL:
            say(f"\r  decode of {self.total} tokens ... {len(self.tokens)}", end="")

    def _show_text(self, *, last: bool = False) -> None:
        text = self.tokenizer.decode(self.tokens, skip_special_tokens=True)
        if text.endswith("\N{REPLACEMENT CHARACTER}") and not last:
            return  # in the middle of a character
        say(text[self.shown :], end="")
        self.shown = len(text)

    def end(self) -> None:
        """Finish the display."""
        if self.text:
            self._show_text(last=True)
            say(dim(MARK) + "\n")
        else:
            start = f"\r  decode of {self.total} tokens ... " if TERMINAL else ""
            say(f"{start}{self.rate:.1f} tokens/s")

    @property
    def prefill_seconds(self) -> float:
        """Until the first token."""
        return self.times[0] - self.began

    @property
    def rate(self) -> float:
        """Tokens/s of decode: all but the first token, which belongs to the prefill."""
        seconds = self.times[-1] - self.times[0]
        return (len(self.times) - 1) / seconds if seconds > 0 else float("nan")


@dataclass(frozen=True)
class Task:
    """What both caches have to do."""

    model: transformers.PreTrainedModel
    tokenizer: transformers.PreTrainedTokenizerBase
    prompt: torch.Tensor
    new_tokens: int

    def run(self, cache: DynamicCache, *, text: bool) -> Progress:
        """Generate greedily with `cache`."""
        progress = Progress(self.tokenizer, text=text, context=self.prompt.shape[1], total=self.new_tokens)
        self.model.generate(
            self.prompt,
            attention_mask=torch.ones_like(self.prompt),
            past_key_values=cache,
            streamer=progress,
            do_sample=False,
            num_beams=1,
            max_new_tokens=self.new_tokens,
            min_new_tokens=self.new_tokens,
        )
        return progress

    def warm_up(self) -> float:
        """The first calls of any kernel are slow: let no way pay for them. Returns seconds of a step without a past."""
        prompt = self.prompt[:, :FEWEST_TOKENS]
        self.model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=8, do_sample=False)
        cache = DynamicCache(config=self.model.config)
        took = []
        for _ in range(9):
            began = time.perf_counter()
            self.model(prompt[:, :1], past_key_values=cache)
            took.append(time.perf_counter() - began)
        return statistics.median(took)

    def without_cache(self, expected: list[int]) -> Way:
        """Compute all again at each token."""
        say(f"  {TOKENS_WITHOUT_CACHE} tokens ... ", end="")
        tokens: list[int] = []
        began = time.perf_counter()
        for _ in range(min(TOKENS_WITHOUT_CACHE, self.new_tokens)):
            more = torch.tensor([tokens], dtype=self.prompt.dtype, device=self.prompt.device)
            ids = torch.cat([self.prompt, more], dim=1)
            logits = self.model(ids, use_cache=False, logits_to_keep=1).logits
            tokens.append(int(logits[0, -1].argmax()))
        seconds = (time.perf_counter() - began) / len(tokens)
        say(f"{1 / seconds:.1f} tokens/s")
        return Way("no cache (first tokens)", 0, seconds, tokens == expected[: len(tokens)])


@dataclass(frozen=True)
class Way:
    """What one way to decode took.

    Attributes:
        name: for the table.
        device_bytes: of keys and values on the device, at most.
        seconds: of a generated token.
        equal: whether the tokens are those of `DynamicCache`.
    """

    name: str
    device_bytes: int
    seconds: float
    equal: bool


def kv_bytes(cache: DynamicCache) -> int:
    """Bytes of the keys and values of the layers that see the whole context."""
    # Those of recurrent states do not say whether they slide.
    full = [x for x in cache.layers if not getattr(x, "is_sliding", True) and getattr(x, "keys", None) is not None]
    return sum(x.keys.nbytes + x.values.nbytes for x in full)


# ---------------------------------------------------------------------------------------- the report


def report(stats: CacheStats, ways: list[Way], empty_step: float, context: int) -> bool:
    """Print what each way took, and why. Returns whether all tokens are equal."""
    dynamic, tiered, fetching, computing = ways
    say(bold("What it took"))
    say(f"  {'':<32}{'on the device':>14}{'ms per token':>14}   tokens")
    for way in ways:
        equal = "equal" if way.equal else "DIFFERENT"
        say(f"  {way.name:<32}{way.device_bytes / MIB:>10.2f} MiB{way.seconds * 1000:>14.2f}   {equal}")
    say()
    saved = 1 - tiered.device_bytes / dynamic.device_bytes
    say(f"  Device memory: {saved:.0%} less than with DynamicCache; {stats.host.bytes / MIB:.2f} MiB in host memory.")
    fetched = f"{fetching.seconds / tiered.seconds:.1f} times as fast as fetching alone"
    say(f"  Time: {fetched}, {computing.seconds / tiered.seconds:,.0f} times as fast as computing all again,")
    say(f"  {dynamic.seconds / tiered.seconds:.2f} times as fast as DynamicCache with room for everything.")
    say(f"  Blocks read: {stats.block_hits:,} on the device, {stats.host_blocks:,} on the host.")
    if stats.dense_fallbacks:
        say(f"  {stats.dense_fallbacks} dense fallbacks: {stats.dense_fallback_ops}")
    if stats.resident_bytes:
        say(f"  {stats.resident_bytes / MIB:.2f} MiB more are in layers that keep no whole context and are not tiered.")
    if tiered.seconds > dynamic.seconds:
        step, own = dynamic.seconds * 1000, empty_step * 1000
        say(f"  It is slower than DynamicCache here: of {step:.1f} ms per token {own:.1f} ms are weights and Python,")
        say("  which no cache makes faster, and kvtier adds its bookkeeping to each layer. The keys and values of")
        say(f"  {context:,} tokens are too few to win that back: give a longer --context or a larger --model.")
    say()
    good = all(way.equal for way in ways)
    say(bold("All tokens equal those of DynamicCache." if good else "Tokens DIFFER from those of DynamicCache."))
    return good


def plot(file: Path, ways: list[Way], title: str) -> None:
    """Time of a token and device memory of each way, side by side."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, (time_axes, memory_axes) = pyplot.subplots(1, 2, figsize=(10, 3.2), sharey=True, layout="constrained")
    names, colours = [way.name for way in ways], ["#868e96", "#0b7285", "#868e96", "#868e96"]
    bars = time_axes.barh(names, [way.seconds * 1000 for way in ways], color=colours)
    time_axes.bar_label(bars, fmt="%.1f", padding=3)
    time_axes.set(xscale="log", xlabel="ms per token", title=title)
    bars = memory_axes.barh(names, [way.device_bytes / MIB for way in ways], color=colours)
    memory_axes.bar_label(bars, fmt="%.1f", padding=3)
    memory_axes.set(xlabel="keys and values on the device, MiB")
    time_axes.set_xlim(left=min(way.seconds for way in ways) * 1000 / 10)
    time_axes.invert_yaxis()
    for axes in (time_axes, memory_axes):
        axes.margins(x=0.2)
        axes.spines[["top", "right"]].set_visible(False)
    try:
        figure.savefig(file, dpi=150)
    except (OSError, ValueError) as error:
        raise UsageError(f"--plot {file}: {error}") from error
    say(f"  plot: {file}")


def demo(args: argparse.Namespace) -> bool:
    """The whole demo. Returns whether the tokens are equal."""
    if args.plot is not None:  # before minutes of computing
        if importlib.util.find_spec("matplotlib") is None:
            raise UsageError("--plot needs matplotlib: pip install 'kvtier[plot]'.")
        if args.plot.is_dir() or not args.plot.parent.is_dir():
            raise UsageError(f"--plot {args.plot}: name a file in a folder that is there.")
    say(bold("kvtier demo"))
    say("  loading ... ", end="")
    model, tokenizer = load(args.model)
    text, title = read_text(args.text)
    tokens = tokenizer(text, return_tensors="pt").input_ids
    say("done")
    if tokens.shape[1] < args.context:
        raise UsageError(f"--context {args.context}: the text has only {tokens.shape[1]} tokens.")
    task = Task(model, tokenizer, tokens[:, : args.context].to(model.device), args.new_tokens)
    config = model.config.get_text_config(decoder=True)
    name = Path(args.model or EXAMPLE_MODEL).name
    dtype = str(model.dtype).removeprefix("torch.")
    where = torch.cuda.get_device_name() if model.device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    say(f"  model    {name}, {config.num_hidden_layers} layers, {dtype}, on {where}")
    say(f"  text     {title}: {args.context:,} tokens")
    limit = getattr(config, "max_position_embeddings", None)
    if limit is not None and args.context + args.new_tokens > limit:
        say(f"  note     the model was made for {limit:,} tokens: the text may be poor, the comparison holds")
    say()
    with torch.inference_mode():
        empty_step = task.warm_up()
        say(bold("DynamicCache: all keys and values on the device"))
        cache = DynamicCache(config=model.config)
        expected = task.run(cache, text=False)
        kv = kv_bytes(cache)
        if not kv:
            raise UsageError(f"--model {args.model}: no layer of it keeps the whole context, so none is tiered.")
        del cache
        ways = [Way("DynamicCache", kv, 1 / expected.rate, True)]
        say()
        budget = budget_for(args.budget, kv)
        share = f", {budget / kv:.0%} of the {kv / MIB:.2f} MiB of keys and values" if isinstance(budget, int) else ""
        size = f"{budget / MIB:.2f} MiB" if isinstance(budget, int) else budget
        say(bold("TieredKVCache: the host attends to what does not fit"))
        emulated = "" if model.device.type == "cuda" else "; the device tier is emulated in RAM"
        say(f"  device budget {size}{share}{emulated}")
        with TieredKVCache(model.config, device_budget=budget, block_size=args.block_size) as tiered:
            got = task.run(tiered, text=True)
            stats = tiered.stats
        ways.append(Way("TieredKVCache", stats.device.peak_bytes, 1 / got.rate, got.tokens == expected.tokens))
        say(bold("The same budget, fetching alone"))
        with TieredKVCache(
            model.config, device_budget=budget, block_size=args.block_size, policy="all-fetch"
        ) as fetching:
            fetched = task.run(fetching, text=False)
            peak = fetching.stats.device.peak_bytes
            per_token = fetching.stats.bytes_up / max(len(fetched.tokens) - 1, 1)
            say(f"  {per_token / MIB:.2f} MiB fetched per token")
        ways.append(Way("fetching alone, same budget", peak, 1 / fetched.rate, fetched.tokens == expected.tokens))
        say()
        say(bold("No cache: all computed again at each token"))
        ways.append(task.without_cache(expected.tokens))
        say()
    equal = report(stats, ways, empty_step, args.context)
    if args.plot is not None:
        plot(args.plot, ways, f"{name}, {args.context:,} tokens, on {where}")
    return equal


def main(argv: list[str] | None = None) -> int:
    """Run the demo; returns the exit status."""
    args = parse_args(argv)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    try:
        return 0 if demo(args) else 1
    except KeyboardInterrupt:
        say("\n\nInterrupted; the cache is closed.")
        return 130
    except UsageError as error:
        say()
        print(f"demo: {error}", file=sys.stderr)
    except ConfigError as error:
        say()
        print(f"demo: {error}", file=sys.stderr)
    except KVTierError as error:
        say("\n")
        print(f"demo: {type(error).__name__}: {error}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
