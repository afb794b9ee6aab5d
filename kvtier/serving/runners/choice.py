"""Which runner a model is run by, found out by trying: packed against alone, on two short sequences.

A list of names would be wrong with the next model. What a trial of a few tokens cannot show is read from the config:
rotary embeddings that depend on the longest sequence of a forward.

What cannot be run with others is tried alone, two sequences in turns against `generate`: models that keep a state in
themselves would mix them. Those that no cache of ours serves are run without one, and what is not even right so is
refused.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping
from typing import Any, Literal

import torch

from kvtier.config import CacheOptions, format_size
from kvtier.errors import BudgetError, ConfigError, UnsupportedError
from kvtier.hf.attention.enable import Enabled, enable_for, settled, unchanged
from kvtier.hf.models import generation as of
from kvtier.hf.models import trials
from kvtier.hf.models.identity import dependence
from kvtier.hf.models.rotary import Stretched
from kvtier.memory.tiered import TieredMemory
from kvtier.serving.runners.packed import PackedRunner
from kvtier.serving.runners.processes import Processes
from kvtier.serving.runners.ragged import RaggedRunner
from kvtier.serving.runners.runner import Runner, Work
from kvtier.serving.runners.single import SingleRunner
from kvtier.serving.runners.sub_batches import why_not as why_no_turns

_LOG = logging.getLogger("kvtier.serving")

#: Prompts of the trial, and the tokens that each is given in the second step and in the third: one goes on in a chunk
#: while the other decodes.
_PROMPTS, _SECOND, _THIRD = (9, 21), (1, 5), (3, 1)
#: How far packed scores may be from those of a sequence alone: so many times what those differ by if they are computed
#: in parts or as a whole, and so many times a dtype's precision. And how far these two may be apart.
_TIMES, _TOLERANCE, _MOST_ROUNDING = 4.0, 8.0, 0.1

#: Tokens of each sequence that is tried alone. In so many times a dtype's precision: the most that is taken for
#: rounding, and how far scores of a sequence may be from those that it has when a second one takes turns with it.
_ALONE, _AT_MOST, _TURNS = 3, 512.0, 4.0

#: Tokens of each sequence in each step of the trial; and scores in parts and as a whole.
_Steps = tuple[tuple[int, int], ...]
_Scores = tuple[list[torch.Tensor], list[torch.Tensor]]

#: What says nothing of the model: others may have taken the room.
_NO_ROOM = (BudgetError, MemoryError, torch.OutOfMemoryError)

RUNNERS = ("auto", "packed", "ragged", "single")


def choose_runner(
    model: Any, memory: TieredMemory, options: CacheOptions, name: str = "auto"
) -> tuple[Runner, Enabled | None]:
    """A runner that gives the model's own scores, and what was done to the model for it.

    Args:
        model: of Transformers, a decoder.
        memory, options: as of a cache.
        name: "packed" or "ragged" (which of them the model says), "single", or "auto".

    Raises:
        ConfigError: no such name; or the model is divided over processes whose options or budgets differ.
        BudgetError: there is no room for the trial, of some forty tokens; names the smallest budget that has.
        MemoryError, torch.OutOfMemoryError: there is no room outside of the budgets.
        UnsupportedError: "packed" or "ragged" was asked for, and the model cannot be run so; or it cannot be run
            by an engine at all.
    """
    if name not in RUNNERS:
        raise ConfigError(f"runner={name!r}: give one of {', '.join(map(repr, RUNNERS))}.")
    adapter = of.computed_from_prompt(model)
    if adapter:
        raise UnsupportedError(
            f"{type(model).__name__} has {adapter}. An engine runs the model that the adapter is in, which knows "
            "nothing of it. Use its `generate`, or give the engine that model."
        )
    stretched = Stretched(of.inner(model))
    with settled, unchanged(), stretched.turn:  # engines of a model may be made and closed elsewhere
        try:
            stretched.begin()
            runner, enabled = _chosen(model, memory, options, name)
        except BudgetError as error:
            # The traceback of the trial goes through the model, and says nothing to whoever makes an engine.
            raise _too_small(model, memory, options, name, error) from None
        finally:
            stretched.give_back()
    with _undone(runner, enabled) as undo:
        runner.processes = Processes.of(model)
        if runner.processes is not None and not runner.processes.same((runner.name, runner.blocks(), options)):
            raise ConfigError(
                "The model is divided over processes, and their engines would not decide alike: give all of them the "
                "same options, and budgets in bytes ('auto' is what each of them finds)."
            )
        undo.pop_all()
    return runner, enabled


def _undone(runner: Runner | None = None, enabled: Enabled | None = None) -> contextlib.ExitStack:
    """What is undone where its `with` is left by whatever there is, an interrupt too, unless `pop_all` comes before."""
    undo = contextlib.ExitStack()
    if enabled is not None:
        undo.callback(enabled.disable)
    if runner is not None:
        undo.callback(runner.close)
    return undo


def allow_sub_batches(runner: Runner, model: Any, memory: TieredMemory, asked: bool | Literal["auto"]) -> None:
    """Let forwards of a runner take turns, or say why they do not.

    Args:
        asked: whether they may; "auto": where that can be, and was tested.

    Raises:
        UnsupportedError: they were asked to, and cannot.
    """
    if not asked:
        return
    if not isinstance(runner, PackedRunner):
        reason = f"the model is run {runner.name}"
    else:
        reason = why_no_turns(model, memory, runner.forward.options.host_attention)
    if not reason and asked == "auto" and any(device.kind != "cpu" for device in memory.devices):
        reason = "no accelerator was there to test that on yet; sub_batches=True asks for it"
    if reason and asked is True:
        raise UnsupportedError(f"sub_batches=True: {reason}.")
    if reason:
        _LOG.debug("Forwards do not take turns: %s.", reason)
    elif isinstance(runner, PackedRunner):
        runner.allow_sub_batches()


def _chosen(model: Any, memory: TieredMemory, options: CacheOptions, name: str) -> tuple[Runner, Enabled | None]:
    why = "it was asked for"
    if name != "single":
        runner, enabled, why = _together(model, memory, options)
        if runner is not None and name in ("auto", runner.name):
            return runner, enabled
        if runner is not None:
            why = f"it can be {runner.name}"
        _undone(runner, enabled).close()
        if name != "auto":
            raise UnsupportedError(f"{type(model).__name__} cannot be {name}: {why}.")
        _LOG.warning("%s is run one sequence at a time: %s.", type(model).__name__, why)
    return _alone(model, memory, options), None


def _too_small(model: Any, memory: TieredMemory, options: CacheOptions, name: str, error: BudgetError) -> BudgetError:
    """What to say of a trial that was refused. The refused step named what it needs, and the next may need more: the
    trial runs again, in a memory of its own, until it ends."""
    needed = {error.tier: error.needed}
    with memory.lock:
        alone = not memory.owners
    while alone:  # else what is needed depends on what others hold
        try:
            _try_with(model, memory, options, name, needed)
            break
        except BudgetError as more:
            needed[more.tier] = more.needed
    tokens = max(sum(x) for x in zip(_PROMPTS, _SECOND, _THIRD, strict=True))
    give = " and ".join(f"{tier}_budget={nbytes}" for tier, nbytes in sorted(needed.items()))
    return BudgetError(
        f"{error.tier}_budget is {error.budget} bytes ({format_size(error.budget)}). An engine tries its model on two "
        f"sequences of up to {tokens} tokens when it is made: give at least {give} "
        f"({', '.join(format_size(nbytes) for _, nbytes in sorted(needed.items()))}), and more for requests.",
        tier=error.tier,
        needed=needed[error.tier],
        budget=error.budget,
    )


def _try_with(model: Any, memory: TieredMemory, options: CacheOptions, name: str, budgets: Mapping[str, int]) -> None:
    """The trial, as in this memory, but for some budgets. Raises `BudgetError`."""
    with memory.alike(**{f"{tier}_budget": nbytes for tier, nbytes in budgets.items()}) as scratch:
        _undone(*_chosen(model, scratch, options, name)).close()


def _together(model: Any, memory: TieredMemory, options: CacheOptions) -> tuple[Runner | None, Enabled | None, str]:
    if of.length_of_constant_positions(of.inner(model).config) is not None:
        return None, None, "its rotary embedding depends on the longest sequence of a forward"
    if of.forgets_unmasked(of.inner(model)):
        return None, None, "its caches have windows, and its masks have none"
    enabled: Enabled | None = None
    with contextlib.ExitStack() as undo:
        try:
            ragged = of.keeps_recurrent_states(of.inner(model).config)
            if not ragged and not of.reads_positions(model):
                return None, None, "it takes no position ids"
            runner = (RaggedRunner if ragged else PackedRunner)(model, memory, options)
            undo.callback(runner.close)
            steps = (_PROMPTS, _SECOND, _THIRD) if runner.chunked else (_PROMPTS, (1, 1), (1, 1))
            wanted = _scores_alone(model, steps)  # before anything is done to the model
            if not of.generates_as_usual(of.inner(model)) and (problem := _generates_otherwise(model, wanted)):
                return None, None, problem
            if of.knows_length(of.inner(model).config):
                enabled = enable_for(of.inner(model), "an Engine")
                undo.callback(enabled.disable)
            problem = _differs(runner, wanted, steps, model)
        except _NO_ROOM:
            raise
        except Exception as error:  # whatever a model does with what it is handed
            problem = f"{type(error).__name__}: {error}"
        if problem:
            return None, None, problem
        undo.pop_all()
    return runner, enabled, ""


def _alone(model: Any, memory: TieredMemory, options: CacheOptions) -> SingleRunner:
    """A runner for one sequence at a time that gives the scores of `generate`.

    Raises:
        BudgetError, MemoryError, torch.OutOfMemoryError: there is no room for the trial.
        UnsupportedError: no way of running it does.
    """
    prompts = [ids[:length] for ids, length in zip(_tokens(model), _PROMPTS, strict=True)]
    try:
        wanted = [trials.generated_scores(model, ids, _ALONE) for ids in prompts]
        wholes = [
            [trials.next_scores(model, ids + tokens[:n], None)[0] for n in range(_ALONE)]
            for ids, (tokens, _) in zip(prompts, wanted, strict=True)
        ]
    except _NO_ROOM:
        raise
    except Exception as error:
        raise UnsupportedError(f"{type(model).__name__} cannot be tried: {type(error).__name__}: {error}") from error
    problems = list[str]()
    for cached in (True, False):
        with _undone(runner := SingleRunner(model, memory, options, cached=cached)) as undo:
            try:
                problem = _differs_alone(runner, prompts, wanted, wholes, model)
            except _NO_ROOM:
                raise
            except Exception as error:  # whatever a model does with a cache that it does not know
                problem = f"{type(error).__name__}: {error}"
            if not problem:
                if not cached:
                    _LOG.warning(
                        "%s is run without a cache, and each step computes all tokens: %s.",
                        *(type(model).__name__, problems[0]),
                    )
                undo.pop_all()
                return runner
        problems.append(problem)
    with_cache, without = problems
    raise UnsupportedError(
        f"{type(model).__name__} cannot be run by an engine. With a cache of its own for each sequence: {with_cache}. "
        f"Without one: {without}. Use its `generate`."
    )


def _differs_alone(
    runner: SingleRunner,
    prompts: list[list[int]],
    wanted: list[tuple[list[int], list[torch.Tensor]]],
    wholes: list[list[torch.Tensor]],
    model: Any,
) -> str:
    """Why scores of a sequence are not those of `generate`, or are others if a second one takes turns with it; "": they
    are."""
    eps = _precision(model)
    found = [scores for _, scores in wanted]
    rounding = max(
        _far(a, b) for row, whole in zip(found, wholes, strict=True) for a, b in zip(row, whole, strict=True)
    )
    limit = _TIMES * min(rounding, _AT_MOST * eps, _MOST_ROUNDING / 2) + _TOLERANCE * eps
    rows = [[ids + tokens[:n] for n in range(_ALONE)] for ids, (tokens, _) in zip(prompts, wanted, strict=True)]
    apart = [_in_turns(runner, [row])[0] for row in rows]
    for mine, right in zip(apart, found, strict=True):
        if not (far := max(map(_far, mine, right))) <= limit:
            return f"scores differ by {far:.1%} from those of `generate`"
    for mine, right in zip(_in_turns(runner, rows), apart, strict=True):
        if not (far := max(map(_far, mine, right))) <= _TURNS * eps:
            return f"scores of two sequences in turns differ by {far:.1%} from those of each alone"
    return ""


def _in_turns(runner: SingleRunner, rows: list[list[list[int]]]) -> list[list[torch.Tensor]]:
    """Of each sequence the scores behind its prompt and behind each token more, computed in turns."""
    sequences, found = [runner.add() for _ in rows], [list[torch.Tensor]() for _ in rows]
    for turn in zip(*rows, strict=True):
        for sequence, ids, scores in zip(sequences, turn, found, strict=True):
            done = runner.cached(sequence)
            scores += [x for x in runner.step([Work(sequence, ids, done, len(ids) - done, True)]) if x is not None]
    for sequence in sequences:
        runner.remove(sequence)
    return found


def _precision(model: Any) -> float:
    weights, cast = next(of.inner(model).parameters()).dtype, dependence.autocast_of(model)
    return max(torch.finfo(dtype).eps for dtype in (weights, cast) if dtype is not None)


def _tokens(model: Any) -> list[list[int]]:
    vocabulary = of.inner(model).config.get_text_config(decoder=True).vocab_size
    lengths = [sum(x) for x in zip(_PROMPTS, _SECOND, _THIRD, strict=True)]
    return [[(7 * i + 3 * n) % max(vocabulary - 1, 1) for i in range(length)] for n, length in enumerate(lengths)]


def _scores_alone(model: Any, steps: _Steps) -> list[_Scores]:
    """For each of the two sequences, scores behind each of its three parts: computed in these parts, with Transformers'
    own cache, and as a whole, without one. What these two differ by is rounding."""
    parts = zip(*steps, strict=True)
    return [trials.scores_in_parts(of.inner(model), ids, part) for ids, part in zip(_tokens(model), parts, strict=True)]


def _generates_otherwise(model: Any, wanted: list[_Scores]) -> str:
    """Why scores of a `generate` of the model's own are not those of its forwards; "": they are."""
    if dependence.depends(of.inner(model)).adapted:
        return "its own `generate` may switch its adapters"
    eps = _precision(model)
    for ids, length, (parts, wholes) in zip(_tokens(model), _PROMPTS, wanted, strict=True):
        try:
            _, (scores,) = trials.generated_scores(of.inner(model), ids[:length], 1)
        except _NO_ROOM:
            raise
        except Exception:  # it generates nothing from text alone, and its forwards are all there is
            return ""
        if not (far := _far(scores, parts[0])) <= _TIMES * _far(parts[0], wholes[0]) + _TOLERANCE * eps:
            return f"scores of its own `generate` differ by {far:.1%} from those of its forwards"
    return ""


def _far(a: torch.Tensor, b: torch.Tensor) -> float:
    """How far scores are from others, as a share of how much these differ among themselves."""
    right = b.float() - b.float().mean()
    return ((a.float() - a.float().mean() - right).norm() / right.norm().clamp(min=1e-12)).item()


def _differs(runner: Runner, wanted: list[_Scores], steps: _Steps, model: Any) -> str:
    """Why packed scores are not those of the sequences alone; "": they are."""
    those = _tokens(model)
    sequences = [runner.add() for _ in those]
    done = [0] * len(those)
    eps = _precision(model)
    rounding = max(_far(part, whole) for parts, wholes in wanted for part, whole in zip(parts, wholes, strict=True))
    if not rounding <= _MOST_ROUNDING:
        return f"its own scores differ by {rounding:.1%} if a prompt is computed in parts"
    limit = _TIMES * rounding + _TOLERANCE * eps
    try:
        for turn, counts in enumerate(steps):
            work = [
                Work(s, ids[: n + count], n, count, True)
                for s, ids, n, count in zip(sequences, those, done, counts, strict=True)
            ]
            done = [n + count for n, count in zip(done, counts, strict=True)]
            found: list[torch.Tensor | None] = [None] * len(work)
            for group in runner.forwards(work):
                for i, scores in zip(group, runner.step([work[i] for i in group]), strict=True):
                    found[i] = scores
            for scores, (parts, _) in zip(found, wanted, strict=True):
                assert scores is not None
                far = _far(scores, parts[turn])
                if not far <= limit:
                    return f"scores in one batch differ by {far:.1%} from those of a sequence alone"
    finally:
        for sequence in sequences:
            runner.remove(sequence)
    return ""
