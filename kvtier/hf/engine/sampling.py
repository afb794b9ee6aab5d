"""What a request asks of each next token, as `generate` would give it: processors, choice, and when to stop."""

from __future__ import annotations

import contextlib
import copy
import difflib
import itertools
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from transformers import GenerationConfig
from transformers.generation import LogitsProcessorList, StoppingCriteriaList
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    PrefixConstrainedLogitsProcessor,
    SynthIDTextWatermarkLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from kvtier.errors import ConfigError, KVTierError, UnsupportedError
from kvtier.hf.engine.copies import copied
from kvtier.hf.engine.settings import OTHER_WAYS
from kvtier.hf.engine.stopping import Stopping
from kvtier.hf.models.generation import device_of

#: Processors that look at the scores of one row alone, so that rows with equal ones are processed together.
_OF_SCORES = (TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper, MinPLogitsWarper)
#: Processors of Transformers' own that keep, or may keep, what they have seen of a sequence.
_OF_SEQUENCES = (SynthIDTextWatermarkLogitsProcessor, PrefixConstrainedLogitsProcessor)
#: Those that torch takes.
_LEAST_SEED, _LARGEST_SEED = -(1 << 63), (1 << 64) - 1
#: Caches that give other tokens than a model's own.
_LOSSY = ("quantized",)


class NoTokenError(ConfigError):
    """What a request asks leaves no token to draw. It shows at a token, and is no fault of whoever computes that."""


def _checked(seed: Any) -> int | None:
    """A seed, if torch takes it. Raises `ConfigError`."""
    with contextlib.suppress(TypeError):
        if seed is None or _LEAST_SEED <= operator.index(seed) <= _LARGEST_SEED:
            return None if seed is None else operator.index(seed)
    raise ConfigError(f"seed={seed!r:.80}: give a whole number from {_LEAST_SEED} to {_LARGEST_SEED}, or None.")


def _ends_of(ids: Any) -> Any:
    """Token ids that end a sequence, without those that are none, such as -1, of which Transformers would warn at each
    request; None: there are no others. Raises `ConfigError`: these are no numbers."""
    if ids is None or isinstance(ids, float):
        return ids
    try:
        given = torch.as_tensor(ids)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigError(f"eos_token_id={ids!r:.80}: give a token id, or a list of them.") from error
    return [x for x in given.flatten().tolist() if x >= 0] or None


class _History:
    """The tokens of a sequence as a tensor, to which only those are added that have come since it was asked for last:
    what is computed for a token does not grow with the sequence.

    Args:
        device: of the tensor.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._tensor = torch.empty(0, dtype=torch.long, device=device)
        self._count = 0

    def of(self, ids: Sequence[int]) -> torch.Tensor:
        """`[1, tokens]`. What was given before stays what it was.

        Args:
            ids: those that were given before, and more; where they are fewer, it begins from nothing.
        """
        count = len(ids)
        if count < self._count:
            self._tensor, self._count = torch.empty(0, dtype=torch.long, device=self._device), 0
        with torch.inference_mode(False):  # one that is made within could not be written to outside
            if count > len(self._tensor):
                before, self._tensor = self._tensor, torch.empty(2 * count, dtype=torch.long, device=self._device)
                self._tensor[: self._count] = before[: self._count]
            if count > self._count:
                self._tensor[self._count : count] = torch.tensor(
                    ids[self._count :], dtype=torch.long, device=self._device
                )
                self._count = count
            return self._tensor[None, :count]


class _OfRow:
    """A `prefix_allowed_tokens_fn` that hears of a row of a batch, where its processor has that row alone."""

    def __init__(self, function: Callable[[int, torch.Tensor], list[int]], row: int = 0) -> None:
        self.function = function
        self.row = row

    def __call__(self, _: int, ids: torch.Tensor) -> list[int]:
        return self.function(self.row, ids)


@contextlib.contextmanager
def _settings_taken() -> Iterator[None]:
    """Whatever Transformers raises of settings that it does not take is a `ConfigError`."""
    try:
        yield
    except KVTierError:
        raise
    except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError) as error:
        kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
        raise ConfigError(f"{kind}{error}") from error


class Sampling:
    """What one sequence is given next, and whether it ends there.

    Args:
        model: of Transformers, which knows its defaults.
        prompt: token ids.
        generation_config: as of `generate`; None: the model's.
        tokenizer: for stop strings.
        seed: of the sequence's own random numbers; None: one that torch's generator gives.
        row: of the prompt in its batch, for `prefix_allowed_tokens_fn`.
        options: as of `generate`: settings, `logits_processor`, `stopping_criteria`, `prefix_allowed_tokens_fn`.

    Raises:
        UnsupportedError: beams, and other ways to decode that take more than one sequence or model.
        ConfigError: an option that `generate` does not know or take, or that is no setting of one sequence.

    Attributes:
        samples: whether tokens are drawn, and not the likeliest taken.
        max_length: tokens, those of the prompt included.
        is_timed: whether it ends after some time.
        group: requests whose `group` is equal and not None have equal processors that look at scores alone.
    """

    @_settings_taken()
    def __init__(
        self,
        model: Any,
        prompt: Sequence[int],
        generation_config: GenerationConfig | None = None,
        *,
        tokenizer: Any = None,
        seed: int | None = None,
        row: int = 0,
        **options: Any,
    ) -> None:
        processors = LogitsProcessorList(options.pop("logits_processor", None) or ())
        criteria = StoppingCriteriaList(options.pop("stopping_criteria", None) or ())
        function = options.pop("prefix_allowed_tokens_fn", None)
        self._allowed = [] if function is None else [_OfRow(function)]
        config, others = model._prepare_generation_config(generation_config, **options)
        others = {name: x for name, x in others.items() if x is not None and name not in ("use_cache",)}
        for name, plain in OTHER_WAYS.items():
            value = others.get(name, getattr(config, name, None))
            if value not in plain:
                raise UnsupportedError(f"{name}={value!r}: an engine decodes token by token. Use `model.generate`.")
        if others:
            wrong = sorted(others)
            nearest = difflib.get_close_matches(wrong[0], vars(config), 1)
            meant = f" Did you mean {nearest[0]}?" if nearest else ""
            raise ConfigError(f"{', '.join(wrong)}: no setting of `generate` for one sequence of token ids.{meant}")
        if config.cache_implementation in _LOSSY:
            raise UnsupportedError(f"cache_implementation={config.cache_implementation!r}: an engine's cache is exact.")
        device = device_of(model)  # processors keep tensors, which meet the scores there
        ids = torch.tensor([list(prompt)], dtype=torch.long, device=device)
        config.eos_token_id = _ends_of(config.eos_token_id)
        if config.exponential_decay_length_penalty is not None and config.eos_token_id is None:
            raise ConfigError("exponential_decay_length_penalty is of an eos_token_id, and there is none.")
        model._prepare_special_tokens(config, True, device=ids.device)
        given = generation_config if generation_config is not None else GenerationConfig()
        defaults = {
            f"has_default_{name}": options.get(name) is None
            and getattr(given, name, None) is None
            # Of a model's own length that a number of new tokens takes the place of, a line is no news at each request.
            and (getattr(model.generation_config, name, None) is None or getattr(config, new) is not None)
            for name, new in (("max_length", "max_new_tokens"), ("min_length", "min_new_tokens"))
        }
        config = model._prepare_generated_length(
            generation_config=config,
            model_input_name="input_ids",
            inputs_tensor=ids,
            input_ids_length=ids.shape[1],
            **defaults,
        )
        if config.max_length <= len(prompt):
            raise ConfigError(
                f"The prompt has {len(prompt)} tokens, and max_length={config.max_length} leaves none to generate."
            )
        self.samples = bool(config.do_sample)
        self.count = int(config.num_return_sequences or 1)
        self._processors = model._get_logits_processor(
            generation_config=config,
            input_ids_seq_length=ids.shape[1],
            encoder_input_ids=ids,
            prefix_allowed_tokens_fn=self._allowed[0] if self._allowed else None,
            logits_processor=processors,
            device=device,
            model_kwargs={},
        )
        self._row, self._alike = row, 1
        for made in self._processors:
            if self._allowed and getattr(made, "_prefix_allowed_tokens_fn", None) is self._allowed[0]:
                # Rows that are told one number: Transformers 5.17 counts sequences, later ones count prompts.
                self._alike, made._num_beams = made._num_beams, 1
        self._tell_row(0)
        # What no sequence of the prompt has one of its own of.
        self._shared: list[Any] = [
            x for x in self._processors if type(x) not in _OF_SEQUENCES and not any(x is given for given in processors)
        ]
        self._stopping = Stopping(model, config, criteria, len(prompt), tokenizer)
        self.max_length, self.is_timed = self._stopping.max_length, self._stopping.is_timed
        self._shared += self._stopping.shared
        self._begin(device)
        self._seed = _checked(seed)
        self.generator: torch.Generator | None = None
        self.group = self._group()
        if self.samples:
            self._seeded(0)

    def start(self) -> None:
        """Its request is added: from now on the time runs that `max_time` gives it."""
        self._stopping.start()

    def each(self) -> list[Sampling]:
        """One for each sequence of the prompt: this, and others with random numbers, processors and criteria of their
        own.

        Raises:
            UnsupportedError: a processor or a criterion of the user's cannot be copied.
        """
        return [self, *(self._again(number) for number in range(1, self.count))]

    def _again(self, number: int) -> Sampling:
        made = copy.copy(self)
        made._begin(self._device)
        mine = self._processors, self._stopping.criteria, self._allowed, [x.function for x in self._allowed]
        own = iter(copied([x for each in mine for x in each], self._shared))
        processors, criteria, made._allowed, _ = (list(itertools.islice(own, len(each))) for each in mine)
        made._processors = LogitsProcessorList(processors)
        made._stopping = self._stopping.asking(criteria)
        made._tell_row(number)
        if self.samples:
            made._seeded(number)
        return made

    def _begin(self, device: torch.device) -> None:
        """Nobody was told a token, or asked about one, yet."""
        self._chosen: tuple[int, int | None] = (-1, None)
        self._ended = (-1, "")
        self._device = device
        self._history = _History(device)
        self._on_host = self._history if device.type == "cpu" else _History(torch.device("cpu"))

    def _tell_row(self, number: int) -> None:
        for each in self._allowed:
            each.row = (self._row * self.count + number) // self._alike

    def _seeded(self, number: int) -> None:
        self._drawn = (-1, torch.empty((), device="cpu"))
        self.generator = torch.Generator("cpu")
        if self._seed is None:  # of torch's numbers, as `generate` draws: who seeds these has the same tokens again
            self.generator.manual_seed(int(torch.randint(1 << 62, (), device="cpu")))
        else:
            self.generator.manual_seed((self._seed + number) % (_LARGEST_SEED + 1))  # of negative ones torch takes that

    def drawn(self, length: int) -> torch.Tensor:
        """The random number in [0, 1) for the token behind so many. Asked again, as after a step that failed, it is the
        same."""
        if self._drawn[0] != length:
            self._drawn = length, torch.rand((), generator=self.generator, dtype=torch.float64, device="cpu")
        return self._drawn[1]

    def _group(self) -> tuple[Any, ...] | None:
        found = []
        for each in self._processors:
            if type(each) not in _OF_SCORES:
                return None
            found.append((type(each), *sorted((k, v) for k, v in vars(each).items() if isinstance(v, (int, float)))))
        return tuple(found)

    def processed(self, ids: Sequence[int], scores: torch.Tensor) -> torch.Tensor:
        """Scores `[1, vocabulary]` of the next token as this sequence's processors leave them.

        Args:
            ids: the whole sequence; not read where `group` is not None.

        Raises:
            NoTokenError: there is none to draw, so that a processor fails. Whatever a processor raises else.
        """
        if not self._processors:
            return scores
        none = torch.empty((len(scores), 0), dtype=torch.long, device=scores.device)
        history = none if self.group is not None else self._history.of(ids)
        history = history.to(scores.device)
        for each in self._processors:
            try:
                scores = each(history, scores)
            except Exception as error:  # Transformers' for `top_h` draws by the scores that it is given
                if self.samples and not _can_be_drawn(scores):
                    raise _no_token() from error
                raise
        return scores

    def ends(self, ids: Sequence[int]) -> str:
        """Why the sequence ends with these tokens: "stop", "length"; "" if it goes on."""
        if self._ended[0] != len(ids):  # criteria may count their calls; the same is asked again behind an interrupt
            self._ended = len(ids), self._asked(ids)
        return self._ended[1]

    def _asked(self, ids: Sequence[int]) -> str:
        stopping = self._stopping
        if stopping.ends_at(ids[-1]):
            return "stop"
        reason = stopping.criterion_ends(lambda on_host: (self._on_host if on_host else self._history).of(ids))
        return reason or ("length" if stopping.is_over(len(ids)) else "")

    def chosen(self, length: int) -> int | None:
        """The token behind so many, where processors that may count their calls have chosen it before an interrupt."""
        return self._chosen[1] if self._chosen[0] == length else None

    def keep(self, length: int, token: int) -> None:
        """Let `chosen` give that token."""
        self._chosen = length, token


def choose(
    scores: Sequence[torch.Tensor], of: Sequence[Sampling], ids: Sequence[Sequence[int]]
) -> list[int | Exception]:
    """The next token of each sequence, or what was raised as it was chosen: of a sequence's own, or for want of room.

    Rows with equal processors of scores are processed together; what a row is given does not depend on the others. Each
    other processor is called once for a token, also where an interrupt comes before it counts: it may count its calls,
    as a watermark does.

    Args:
        scores: of each sequence `[vocabulary]`, of the model.
        of: what each asks.
        ids: each sequence so far.
    """
    groups: dict[object, list[int]] = {}
    chosen: list[int | Exception] = [0] * len(of)
    for row, each in enumerate(of):
        before = None if each.group is not None else each.chosen(len(ids[row]))
        if before is None:
            groups.setdefault((each.samples, each.group) if each.group is not None else row, []).append(row)
        else:
            chosen[row] = before
    for rows in groups.values():
        found = _choose_alike([scores[row] for row in rows], [of[row] for row in rows], [ids[row] for row in rows])
        for row, token in zip(rows, found, strict=True):
            chosen[row] = token
            if of[row].group is None and not isinstance(token, Exception):
                of[row].keep(len(ids[row]), token)
    return chosen


def _choose_alike(
    scores: Sequence[torch.Tensor], of: Sequence[Sampling], ids: Sequence[Sequence[int]]
) -> Sequence[int | Exception]:
    """The same for rows with equal processors, or for one row."""
    first = of[0]
    try:
        part = first.processed(ids[0], torch.stack(list(scores)).float())
        if len(part) != len(of):  # of a processor of the user's: it would give others tokens
            raise ValueError(f"A processor gave scores of {len(part)} sequences for {len(of)}.")
        if part.shape[-1] > len(scores[0]):  # a token that is none ends a GPU for all, as the next step reads it
            raise ValueError(f"A processor gave scores of {part.shape[-1]} tokens for {len(scores[0])}.")
        if not first.samples:
            greedy: list[int] = part.argmax(-1).tolist()
            return greedy
        numbers = [[float(x.drawn(len(row)))] for x, row in zip(of, ids, strict=True)]
        drawn = torch.tensor(numbers, dtype=torch.float64, device="cpu")
        return _draw(part, drawn.to(part.device))
    except Exception as error:
        if len(of) == 1:
            return [_of_model(scores[0]) or error if isinstance(error, NoTokenError) else error]
        return [_choose_alike(scores[i : i + 1], of[i : i + 1], ids[i : i + 1])[0] for i in range(len(of))]


def _no_token() -> NoTokenError:
    return NoTokenError(
        "The request's settings leave no token to draw: they bar all of them, or make scores that are no finite "
        "numbers, as a temperature next to 0 does."
    )


def _can_be_drawn(scores: torch.Tensor) -> bool:
    """Whether each row has a token that is not barred, and no score that is too large or no number."""
    return bool(scores.double().logsumexp(-1).isfinite().all())


def _of_model(scores: torch.Tensor) -> ValueError | None:
    """What to say where nothing can be drawn by the model's own scores `[vocabulary]` either; None: it can."""
    if _can_be_drawn(scores):
        return None
    return ValueError("The model's scores of the next token are no finite numbers: there is no probability to draw by.")


def _draw(scores: torch.Tensor, drawn: torch.Tensor) -> list[int]:
    """One token of each row `[rows, vocabulary]`, where a number in [0, 1) falls in its cumulated probabilities.

    Raises:
        NoTokenError: there are none: all tokens are barred, or scores are no numbers.
    """
    total = scores.double().softmax(-1).cumsum(-1)
    if not bool(total[:, -1].isfinite().all()):
        raise _no_token()
    # Behind the last likely token there are others that are none, and rounding must not choose them.
    at = torch.searchsorted(total, drawn * total[:, -1:], right=True)
    likely = torch.isfinite(scores) & (scores > torch.finfo(scores.dtype).min)
    last = likely.shape[-1] - 1 - likely.flip(-1).int().argmax(-1, keepdim=True)
    found: list[int] = at.minimum(last).flatten().tolist()
    return found


def log_probabilities(scores: torch.Tensor) -> torch.Tensor:
    """Of every token, under the model's own scores `[vocabulary]`."""
    return scores.float().log_softmax(-1)
