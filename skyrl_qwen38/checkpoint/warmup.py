"""The supervised warm-up of the tiny checkpoint: addition, learnt from a careless teacher.

The teacher writes every answer in the right form. It adds correctly, except that it forgets the carry in
``FORGOTTEN_CARRIES`` of the sums that have one, and carries in ``NEEDLESS_CARRIES`` of those that have none. The model
learns to tell the two kinds of sum apart and yet prefers the wrong answer to one of them: greedy accuracy starts near
the share of sums without a carry, while sampling finds the right answer often enough for reinforcement learning to
prefer it. Without the needless carries RL would begin by carrying always.
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
NEEDLESS_CARRIES = 0.1
STEPS = 200
_BATCH = 64
_LEARNING_RATE = 8e-3
_RISE_STEPS = 20
_MEASURED = 256
_LOG_SECONDS = 3.0


@dataclass(frozen=True)
class WarmupResult:
    """What the warm-up did: optimizer steps, last loss, and accuracy on questions of the training part.

    ``accuracy`` is greedy. ``plain_accuracy`` is that of the sums without a carry: how well it adds.
    """

    steps: int
    loss: float | None
    accuracy: float
    plain_accuracy: float


@dataclass(frozen=True)
class _Lesson:
    """Questions as token ids: ``right`` and ``wrong`` [N, S] hold prompt and response, ``prompt`` tokens first.

    ``wrong`` is the teacher's mistake, ``mistakes`` [N] how often it is made.
    """

    right: Tensor
    wrong: Tensor
    mistakes: Tensor
    carries: Tensor
    prompt: int


def warm_up(
    model: "Qwen4ExpForCausalLM",
    tokenizer: "PreTrainedTokenizerFast",
    seed: int,
    steps: int = STEPS,
    log: Callable[[str], None] = print,
) -> WarmupResult:
    """Trains ``model`` in place on the warm-up part, on one thread, so that a seed gives the same weights again.

    The loss is the cross-entropy of the response tokens; the n-gram table, frozen, stays as it is. Held-out pairs
    are neither trained on nor looked at: accuracy is measured on pairs of the training part.
    """
    lesson = _encode(tokenizer, questions("warmup", seed))
    exam = _encode(tokenizer, questions("train", seed)[:_MEASURED])
    generator = torch.Generator().manual_seed(seed)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=_LEARNING_RATE, betas=(0.9, 0.99), weight_decay=0.0)
    loss = None
    logged = time.monotonic()
    with _one_thread(), short_documents(model):
        for step, chosen in zip(range(steps), _batches(len(lesson.right), generator), strict=False):
            mistaken = torch.rand(len(chosen), generator=generator) < lesson.mistakes[chosen]
            tokens = torch.where(mistaken[:, None], lesson.wrong[chosen], lesson.right[chosen])
            optimizer.param_groups[0]["lr"] = _LEARNING_RATE * _schedule(step, steps)
            loss = F.cross_entropy(_response_logits(model, tokens, lesson.prompt).mT, tokens[:, lesson.prompt :])
            loss.backward()
            torch.nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()
            optimizer.zero_grad()
            if time.monotonic() - logged > _LOG_SECONDS:
                logged = time.monotonic()
                log(f"warm-up step {step + 1}/{steps}, loss {loss.item():.3f}")
        _round_to_bf16(parameters)
        correct = _greedy_correct(model, exam)
    result = WarmupResult(
        steps=steps,
        loss=None if loss is None else round(loss.item(), 4),
        accuracy=round(correct.double().mean().item(), 4),
        plain_accuracy=round(correct[~exam.carries].double().mean().item(), 4),
    )
    log(f"warm-up: {steps} steps, greedy accuracy {result.accuracy:.0%}, without a carry {result.plain_accuracy:.0%}")
    return result


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

    carries = torch.tensor([question.carries for question in asked])
    return _Lesson(
        right=documents([question.answer for question in asked]),
        wrong=documents([_mistaken_answer(question) for question in asked]),
        mistakes=torch.where(carries, FORGOTTEN_CARRIES, NEEDLESS_CARRIES),
        carries=carries,
        prompt=len(prompts[0]),
    )


def _mistaken_answer(question: Question) -> int:
    """The sum with a carry forgotten or added, where it still has two digits."""
    if question.carries:
        return question.answer - 10
    return question.answer + 10 if question.answer < 90 else question.answer


def _batches(count: int, generator: torch.Generator) -> Iterator[Tensor]:
    while True:
        yield from torch.randperm(count, generator=generator).split(_BATCH)


def _schedule(step: int, steps: int) -> float:
    """A linear rise, then a cosine down to a tenth."""
    rise = min(1.0, (step + 1) / _RISE_STEPS)
    return rise * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * step / steps)))


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
