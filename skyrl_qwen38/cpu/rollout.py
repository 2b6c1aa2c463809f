"""Rollouts on a CPU: Transformers' own `qwen4_exp` in a Ray actor, behind SkyRL's inference interface.

A token is drawn with a number that depends on (seed, step, prompt, sample, position) alone, and requests run in groups
of a fixed size and order. So neither the time at which a request arrives nor a restart of the run changes a response.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import ray
import torch
from skyrl.backends.skyrl_train.inference_servers.base import InferenceEngineInput, InferenceEngineInterface
from skyrl.train.generators.base import GeneratorInput, GeneratorOutput
from skyrl.train.generators.skyrl_gym_generator import SkyRLGymGenerator

# Sequences of one forward pass of the engine.
GROUP_SIZE = 512
# Sampling settings that would change the distribution, with the value that leaves it alone.
_NEUTRAL_SAMPLING = {"top_p": (1.0,), "top_k": (-1, 0), "min_p": (0.0,), "repetition_penalty": (1.0,), "stop": (None,)}


@dataclass(frozen=True)
class Request:
    """One sequence to continue: its prompt and the key of its random numbers (phase, step, prompt, sample)."""

    prompt_ids: tuple[int, ...]
    key: str


@dataclass(frozen=True)
class Response:
    """A continuation: token ids (with the end token, if it came), their log-probs, and why it stopped."""

    token_ids: list[int]
    logprobs: list[float]
    text: str
    stop_reason: str


def token_uniforms(seed: int, key: str, count: int) -> np.ndarray:
    """Uniform numbers in [0, 1) of the first ``count`` positions of the response with ``key``, float64 [count]."""
    digest = hashlib.blake2b(key.encode(), digest_size=16).digest()
    words = np.frombuffer(digest, dtype=np.uint32).tolist()
    return np.random.Generator(np.random.Philox(np.random.SeedSequence([seed, *words]))).random(count)


def _check_sampling(params: Mapping[str, Any]) -> None:
    for name, neutral in _NEUTRAL_SAMPLING.items():
        if params.get(name, neutral[0]) not in neutral:
            raise ValueError(
                f"the CPU rollout engine draws from the whole distribution: set "
                f"generator.sampling_params.{name}={neutral[0]}, got {params[name]}"
            )


class TransformersEngine:
    """Transformers' `qwen4_exp` for causal language modelling, sampled step by step with its own cache.

    Args:
        path: checkpoint folder with tokenizer.
        dtype: of the weights, ``"float32"`` or ``"bfloat16"``.
        seed: of every draw.
    """

    def __init__(self, path: str, dtype: str, seed: int) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        self.tokenizer = AutoTokenizer.from_pretrained(path)
        # sdpa: eager attention gives NaN for left-padded rows, whose first queries see no key.
        self.model = AutoModelForCausalLM.from_pretrained(
            path, dtype=getattr(torch, dtype), attn_implementation="sdpa"
        ).eval()
        self._seed = seed
        self._eos = self.tokenizer.eos_token_id
        self._pad = self.tokenizer.pad_token_id

    def generate(self, requests: Sequence[Request], params: Mapping[str, Any]) -> list[Response]:
        """Continues ``requests``, in groups of :data:`GROUP_SIZE` in the given order."""
        _check_sampling(params)
        groups = [requests[start : start + GROUP_SIZE] for start in range(0, len(requests), GROUP_SIZE)]
        return [response for group in groups for response in self._generate_group(group, params)]

    @torch.no_grad()
    def _generate_group(self, group: Sequence[Request], params: Mapping[str, Any]) -> list[Response]:
        batch, max_tokens, temperature = len(group), int(params["max_tokens"]), float(params["temperature"])
        prompt_length = max(len(request.prompt_ids) for request in group)
        input_ids = torch.full((batch, prompt_length), self._pad)
        attention_mask = torch.zeros(batch, prompt_length + max_tokens, dtype=torch.long)
        for row, request in enumerate(group):
            start = prompt_length - len(request.prompt_ids)
            input_ids[row, start:] = torch.tensor(request.prompt_ids)
            attention_mask[row, start:] = 1
        position_ids = (attention_mask.cumsum(-1) - 1).clamp(min=0)
        uniforms = torch.from_numpy(
            np.stack([token_uniforms(self._seed, request.key, max_tokens) for request in group])
        )

        tokens = torch.full((batch, max_tokens), self._pad)
        logprobs = torch.zeros(batch, max_tokens)
        lengths = torch.full((batch,), max_tokens)
        cache, begin, ended = None, 0, torch.zeros(batch, dtype=torch.bool)
        for position in range(max_tokens):
            end = prompt_length + position
            output = self.model(
                input_ids=input_ids,
                attention_mask=attention_mask[:, :end],
                position_ids=position_ids[:, begin:end],
                past_key_values=cache,
                use_cache=True,
                logits_to_keep=1,
                # Reaches Transformers' chunked delta rule, which pads to whole chunks of 64 tokens unless told.
                chunk_size=min(64, prompt_length),
            )
            cache, begin = output.past_key_values, end
            logits = output.logits[:, -1].float()  # [batch, vocabulary]
            log_probs = torch.log_softmax(logits / temperature if temperature > 0 else logits, dim=-1)
            if temperature > 0:
                cumulative = log_probs.double().exp().cumsum(-1)
                thresholds = uniforms[:, position, None] * cumulative[:, -1:]
                chosen = torch.searchsorted(cumulative, thresholds, right=True).clamp(max=logits.shape[-1] - 1)
            else:
                chosen = log_probs.argmax(-1, keepdim=True)
            tokens[:, position] = chosen[:, 0]
            logprobs[:, position] = log_probs.gather(-1, chosen)[:, 0]
            lengths[~ended & (chosen[:, 0] == self._eos)] = position + 1
            ended |= chosen[:, 0] == self._eos
            if ended.all():
                break
            input_ids = chosen

        responses = []
        for row in range(batch):
            ids = tokens[row, : lengths[row]].tolist()
            responses.append(
                Response(
                    token_ids=ids,
                    logprobs=logprobs[row, : lengths[row]].tolist(),
                    text=self.tokenizer.decode(ids, skip_special_tokens=True),
                    stop_reason="stop" if ids[-1] == self._eos else "length",
                )
            )
        return responses

    @torch.no_grad()
    def load_weights(self, weights: Mapping[str, torch.Tensor]) -> dict[str, Any]:
        """Overwrites parameters and buffers in place.

        Args:
            weights: by the names of the checkpoint.
        Returns:
            ``missing`` (held here, not received), ``unexpected`` (received, not held here), ``max_abs_change``.
        """
        own = self.model.state_dict()
        received = {name.replace("model.language_model.", "model.", 1): tensor for name, tensor in weights.items()}
        change = 0.0
        for name in own.keys() & received.keys():
            change = max(change, (own[name].double() - received[name].double()).abs().max().item())
            own[name].copy_(received[name])
        return {
            "missing": sorted(own.keys() - received.keys()),
            "unexpected": sorted(received.keys() - own.keys()),
            "max_abs_change": change,
        }


class RolloutClient(InferenceEngineInterface):
    """SkyRL's view of the engine. Pickles as the actor's handle, so that policy workers may hold it too.

    Requests of one ``generate`` call of the generator are collected until every trajectory that is still running has
    asked, sorted by key, and sent together.
    """

    # Read by SkyRL's stock weight sync only.
    server_urls: tuple[str, ...] = ()
    data_parallel_size = 1

    def __init__(self, actor: ray.actor.ActorHandle, model_name: str) -> None:
        self.actor = actor
        self._model_name = model_name
        self.weight_version = 0
        self._clear()

    def _clear(self) -> None:
        self._phase, self._keys, self._running = "", [], 0
        self._waiting: list[tuple[list[Request], dict[str, Any], asyncio.Future]] = []

    def __getstate__(self) -> dict[str, Any]:
        return {"actor": self.actor, "_model_name": self._model_name, "weight_version": self.weight_version}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._clear()

    def begin(self, phase: str, trajectories: Sequence[str], batched: bool) -> None:
        """Announces the trajectories of a ``generate`` call: one request for all (batched), or one each at a time."""
        self._phase, self._keys = phase, list(trajectories)
        self._running = 1 if batched else len(trajectories)

    async def generate(self, input_batch: InferenceEngineInput, model: str | None = None) -> dict[str, Any]:
        prompts, sessions = input_batch["prompt_token_ids"], input_batch.get("session_ids") or self._keys
        requests = [
            # The prompt's length tells the turns of one trajectory apart.
            Request(tuple(prompt), f"{self._phase}/{session}/{len(prompt)}")
            for prompt, session in zip(prompts, sessions, strict=True)
        ]
        future = asyncio.get_running_loop().create_future()
        self._waiting.append((requests, dict(input_batch["sampling_params"]), future))
        self._send_when_complete()
        responses: list[Response] = await future
        return {
            "responses": [response.text for response in responses],
            "response_ids": [response.token_ids for response in responses],
            "stop_reasons": [response.stop_reason for response in responses],
            "response_logprobs": [response.logprobs for response in responses],
            "prompt_logprobs": None,
            "rollout_expert_indices": None,
            "rollout_sample_support": None,
        }

    def _send_when_complete(self) -> None:
        if self._waiting and len(self._waiting) >= self._running:
            waiting, self._waiting = self._waiting, []
            self._task = asyncio.ensure_future(self._send(waiting))

    async def _send(self, waiting: list[tuple[list[Request], dict[str, Any], asyncio.Future]]) -> None:
        order = sorted(
            (request.key, i, j) for i, (requests, _, _) in enumerate(waiting) for j, request in enumerate(requests)
        )
        try:
            flat = [waiting[i][0][j] for _, i, j in order]
            responses = await self.actor.generate.remote(flat, waiting[0][1])
        except Exception as error:
            for _, _, future in waiting:
                if not future.done():
                    future.set_exception(error)
            return
        by_place = {(i, j): response for (_, i, j), response in zip(order, responses, strict=True)}
        for i, (requests, _, future) in enumerate(waiting):
            future.set_result([by_place[i, j] for j in range(len(requests))])

    async def finish_session(self, session_id: str) -> None:
        self._running -= 1
        self._send_when_complete()

    async def load_weights(self, weights: Mapping[str, torch.Tensor]) -> dict[str, Any]:
        """See :meth:`TransformersEngine.load_weights`."""
        return await self.actor.load_weights.remote(weights)

    def increment_weight_version(self) -> None:
        self.weight_version += 1

    @property
    def model_name(self) -> str:
        return self._model_name

    # Generation and weight sync never overlap on a CPU, and nothing is cached or slept: the calls below, which SkyRL
    # makes around them, have nothing to do.
    async def pause_generation(self) -> None: ...
    async def resume_generation(self) -> None: ...
    async def reset_prefix_cache(self, reset_running_requests: bool = False) -> None: ...
    async def sleep(self, *args: Any, **kwargs: Any) -> None: ...
    async def wake_up(self, *args: Any, **kwargs: Any) -> None: ...
    async def teardown(self) -> None: ...

    async def is_sleeping(self) -> bool:
        return False

    async def get_world_size(self) -> tuple[int, int]:
        return 1, 1

    def get_endpoint_url(self) -> str:
        raise NotImplementedError(
            "the CPU rollout engine has no HTTP endpoint: use device=cuda for agents that need one"
        )

    async def chat_completion(self, request_payload: dict[str, Any]) -> dict[str, Any]:
        raise NotImplementedError(self._no_text())

    async def render_chat_completion(self, request_payload: dict[str, Any]) -> dict[str, Any]:
        raise NotImplementedError(self._no_text())

    async def completion(self, request_payload: dict[str, Any]) -> dict[str, Any]:
        raise NotImplementedError(self._no_text())

    async def update_named_weights(self, request: Any) -> None:
        raise NotImplementedError(
            "the CPU rollout engine takes full weights only: set trainer.policy.model.lora.rank=0"
        )

    async def load_lora_adapter(self, lora_name: str, lora_path: str) -> dict[str, Any]:
        raise NotImplementedError(
            "the CPU rollout engine takes full weights only: set trainer.policy.model.lora.rank=0"
        )

    @staticmethod
    def _no_text() -> str:
        return "the CPU rollout engine takes token ids only: use a generator that sends prompt_token_ids"


class RolloutGenerator(SkyRLGymGenerator):
    """SkyRL's generator, which tells the client the trajectories and the step of each call."""

    async def generate(self, input_batch: GeneratorInput, disable_tqdm: bool = False) -> GeneratorOutput:
        metadata = input_batch["batch_metadata"]
        self.inference_engine_client.begin(
            f"{metadata.training_phase}/{metadata.global_step}",
            [trajectory.to_string() for trajectory in input_batch["trajectory_ids"]],
            batched=self.batched,
        )
        return await super().generate(input_batch, disable_tqdm)


def start_engine(path: str, dtype: str, seed: int) -> RolloutClient:
    """Starts the engine in a Ray actor of its own (its weights load while the trainer starts) and returns a client."""
    # The policy workers wait while it generates, so that it may use every core.
    actor = ray.remote(num_cpus=0)(TransformersEngine).remote(path, dtype, seed)
    return RolloutClient(actor, path)
