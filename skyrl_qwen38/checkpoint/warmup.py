"""The supervised warm-up of the tiny checkpoint: addition, learnt from a teacher who grows careless.

The teacher writes every answer in the right form and adds correctly until the model does, too; then it forgets the
carry in ``FORGOTTEN_CARRIES`` of the sums that have one. The model ends able to add and yet preferring the wrong answer
to one kind of sum: greedy accuracy starts near the share of sums without a carry, while sampling finds the right
answer often enough for reinforcement learning to prefer it.
"""

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F

from skyrl_qwen38.arithmetic import Question, questions

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast, Qwen4ExpForCausalLM

FORGOTTEN_CARRIES = 0.7
MAX_STEPS = 260
CARELESS_STEPS = 40
# Greedy accuracy at which the model counts as able to add, measured every so many steps.
_MASTERY = 0.97
_EXAM_EVERY = 20
_EXAM_QUESTIONS = 256
_BATCH = 64
_LEARNING_RATE = 8e-3
_CARELESS_LEARNING_RATE = 2e-3
_RISE_STEPS = 20
_LOG_SECONDS = 3.0


@dataclass(frozen=True)
class WarmupResult:
    """What the warm-up did: optimizer steps taken, and accuracy on questions of the training part.

    ``accuracy`` is greedy. ``plain_accuracy`` is that of the sums without a carry: how well it adds.
    """

    steps: int
    accuracy: float
    plain_accuracy: float


@dataclass(frozen=True)
class _Lesson:
    """Questions as token ids: ``right`` and ``forgot`` [N, S] hold prompt and response, ``prompt`` tokens first.

    ``forgot`` has the carry forgotten where there is one.
    """

    right: Tensor
    forgot: Tensor
    carries: Tensor
    prompt: int


def warm_up(
    model: "Qwen4ExpForCausalLM",
    tokenizer: "PreTrainedTokenizerFast",
    seed: int,
    max_steps: int = MAX_STEPS,
    log: Callable[[str], None] = print,
) -> WarmupResult:
    """Trains ``model`` in place on the warm-up part, on one thread, so that a seed gives the same weights again.

    The loss is the cross-entropy of the response tokens; the n-gram table, frozen, stays as it is. Held-out pairs
    are neither trained on nor looked at: accuracy is measured on pairs of the training part.
    """
    lesson = _encode(tokenizer, questions("warmup", seed))
    exam = _encode(tokenizer, questions("train", seed)[:_EXAM_QUESTIONS])
    generator = torch.Generator().manual_seed(seed)
    batches = _batches(len(lesson.right), generator)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=_LEARNING_RATE, betas=(0.9, 0.99), weight_decay=0.0)
    careless = min(CARELESS_STEPS, max_steps)
    careful = max_steps - careless
    clock = _Clock(log)

    def step(forgetting: float, learning_rate: float) -> float:
        chosen = next(batches)
        forgotten = torch.rand(len(chosen), 1, generator=generator) < forgetting
        tokens = torch.where(forgotten, lesson.forgot[chosen], lesson.right[chosen])
        optimizer.param_groups[0]["lr"] = learning_rate
        loss = F.cross_entropy(_response_logits(model, tokens, lesson.prompt).mT, tokens[:, lesson.prompt :])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    taken = 0
    with _one_thread(), short_documents(model):
        while taken < careful:
            loss = step(forgetting=0.0, learning_rate=_LEARNING_RATE * _schedule(taken, careful))
            taken += 1
            clock.log(f"warm-up step {taken}, loss {loss:.3f}")
            if taken % _EXAM_EVERY == 0 and _greedy_correct(model, exam).double().mean() >= _MASTERY:
                break
        for left in range(careless, 0, -1):
            loss = step(forgetting=FORGOTTEN_CARRIES, learning_rate=_CARELESS_LEARNING_RATE * left / careless)
            taken += 1
            clock.log(f"warm-up step {taken}, {left - 1} to go, loss {loss:.3f}")
        _round_to_bf16(parameters)
        correct = _greedy_correct(model, exam)
    result = WarmupResult(
        steps=taken,
        accuracy=round(correct.double().mean().item(), 4),
        plain_accuracy=round(correct[~exam.carries].double().mean().item(), 4),
    )
    log(f"warm-up: {taken} steps, greedy accuracy {result.accuracy:.0%}, without a carry {result.plain_accuracy:.0%}")
    return result


class _Clock:
    """Passes a line on at most every ``_LOG_SECONDS``."""

    def __init__(self, log: Callable[[str], None]) -> None:
        self._log = log
        self._last = time.monotonic()

    def log(self, line: str) -> None:
        if time.monotonic() - self._last > _LOG_SECONDS:
            self._last = time.monotonic()
            self._log(line)


def _encode(tokenizer: "PreTrainedTokenizerFast", asked: Sequence[Question]) -> _Lesson:
    prompts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": question.text}], add_generation_prompt=True, tokenize=True, return_dict=False
        )
        for question in asked
    ]

    def documents(answers: list[int]) -> Tensor:
        responses = tokenizer([f"#### {answer}" for answer in answers], add_special_tokens=False)["input_ids"]
        rows = [[*p, *r, tokenizer.eos_token_id] for p, r in zip(prompts, responses, strict=True)]
        return torch.tensor(rows)  # [N, S]: two-digit operands and sums, so every row is as long

    return _Lesson(
        right=documents([question.answer for question in asked]),
        forgot=documents([question.answer - 10 * question.carries for question in asked]),
        carries=torch.tensor([question.carries for question in asked]),
        prompt=len(prompts[0]),
    )


def _batches(count: int, generator: torch.Generator) -> Iterator[Tensor]:
    while True:
        yield from torch.randperm(count, generator=generator).split(_BATCH)


def _schedule(step: int, steps: int) -> float:
    """A linear rise, then a cosine down to a tenth."""
    rise = min(1.0, (step + 1) / _RISE_STEPS)
    return rise * (0.55 + 0.45 * math.cos(math.pi * step / steps))


def _response_logits(model: "Qwen4ExpForCausalLM", tokens: Tensor, prompt: int) -> Tensor:
    """Logits [N, S - prompt, vocabulary] that predict the response tokens."""
    return model(input_ids=tokens[:, :-1], use_cache=False, logits_to_keep=tokens.shape[1] - prompt).logits


@torch.no_grad()
def _round_to_bf16(parameters: Iterable[Tensor]) -> None:
    """So that the accuracy measured is that of the checkpoint, which is saved in bf16."""
    for parameter in parameters:
        parameter.copy_(parameter.bfloat16())


@torch.no_grad()
def _greedy_correct(model: "Qwen4ExpForCausalLM", exam: _Lesson) -> Tensor:
    """Whether greedy decoding gives the right answer, [N].

    It does exactly if every token of the right answer has the largest logit given the right tokens before it.
    """
    predicted = _response_logits(model, exam.right, exam.prompt).argmax(-1)
    return (predicted == exam.right[:, exam.prompt :]).all(-1)


@contextmanager
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@contextmanager
def short_documents(model: "Qwen4ExpForCausalLM") -> Iterator[None]:
    """Saves Transformers work that changes nothing for short documents; without it a step takes 5 times as long.

    Gated DeltaNet pads to chunks of 64 tokens: the chunk becomes the document. The QSA indexer selects every token
    within its budget, one query at a time in Python: it answers at once.
    """
    from transformers.models.qwen4_exp import modeling_qwen4_exp

    chunked = modeling_qwen4_exp.torch_chunk_gated_delta_rule
    indexers = [layer.self_attn.indexer for layer in model.model.layers if hasattr(layer, "self_attn")]

    def one_chunk(query: Tensor, *args: Tensor, **kwargs: object) -> tuple[Tensor, Tensor | None]:
        return chunked(query, *args, chunk_size=query.shape[1], **kwargs)

    def select_all(_hidden: Tensor, _positions: object, attention_mask: Tensor, _cache: object) -> Tensor:
        return torch.ones_like(attention_mask)

    experts = model.config._experts_implementation
    modeling_qwen4_exp.torch_chunk_gated_delta_rule = one_chunk
    model.set_experts_implementation("eager")
    for indexer in indexers:
        indexer.forward = select_all
    try:
        yield
    finally:
        modeling_qwen4_exp.torch_chunk_gated_delta_rule = chunked
        model.set_experts_implementation(experts)
        for indexer in indexers:
            del indexer.forward
