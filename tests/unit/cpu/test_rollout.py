"""The CPU rollout engine: what it draws, what it reports, and that arrival changes neither."""

import asyncio
from collections.abc import Sequence

import pytest
import torch

from skyrl_qwen38.cpu.rollout import Request, RolloutClient, TransformersEngine, token_uniforms

PROMPTS = [[3, 20, 21, 30, 22, 23, 4], [3, 25, 4], [3, 20, 31, 22, 4], [3, 40, 41, 42, 43, 4]]
SAMPLED = {"max_tokens": 6, "temperature": 1.0}
GREEDY = {"max_tokens": 6, "temperature": 0.0}


@pytest.fixture(scope="module")
def engine(tiny_checkpoint) -> TransformersEngine:
    return TransformersEngine(str(tiny_checkpoint), "float32", seed=5)


def requests(keys: Sequence[str] = ("a", "b", "c", "d")) -> list[Request]:
    return [Request(tuple(prompt), key) for prompt, key in zip(PROMPTS, keys, strict=True)]


def test_a_draw_depends_on_seed_key_and_position_alone():
    assert token_uniforms(0, "train/1/7_0/5", 8)[:3].tolist() == token_uniforms(0, "train/1/7_0/5", 3).tolist()
    others = [token_uniforms(1, "train/1/7_0/5", 3), token_uniforms(0, "train/2/7_0/5", 3)]
    assert all((token_uniforms(0, "train/1/7_0/5", 3) != other).all() for other in others)


def test_draws_are_uniform():
    numbers = torch.tensor([token_uniforms(0, f"k{i}", 1)[0] for i in range(2000)])
    assert abs(numbers.mean() - 0.5) < 0.03
    assert abs((numbers < 0.1).double().mean() - 0.1) < 0.03


def test_greedy_is_transformers_generate(engine):
    for request, response in zip(requests(), engine.generate(requests(), GREEDY), strict=True):
        ids = torch.tensor([request.prompt_ids])
        eos = engine.tokenizer.eos_token_id
        expected = engine.model.generate(ids, max_new_tokens=6, do_sample=False, eos_token_id=eos, pad_token_id=0)
        assert response.token_ids == expected[0, ids.shape[1] :].tolist()


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_are_those_of_one_unpadded_forward_pass(engine, temperature):
    for request, response in zip(
        requests(), engine.generate(requests(), SAMPLED | {"temperature": temperature}), strict=True
    ):
        ids = torch.tensor([[*request.prompt_ids, *response.token_ids]])
        with torch.no_grad():
            scores = (engine.model(ids).logits[0] / temperature).log_softmax(-1)
        start = len(request.prompt_ids)
        expected = scores[start - 1 : -1].gather(1, ids[0, start:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(response.logprobs), expected, rtol=0, atol=1e-5)


def test_the_frequency_of_a_first_token_is_its_probability(engine):
    prompt = tuple(PROMPTS[1])
    many = [Request(prompt, f"{i}") for i in range(2000)]
    drawn = torch.tensor([r.token_ids[0] for r in engine.generate(many, {"max_tokens": 1, "temperature": 1.0})])
    with torch.no_grad():
        probabilities = engine.model(torch.tensor([prompt])).logits[0, -1].softmax(-1)
    halves = probabilities.cumsum(0) < 0.5  # about half of the mass, in token order
    assert abs(halves[drawn].double().mean() - probabilities[halves].sum()) < 0.04


def test_a_response_ends_with_the_end_token_or_at_the_limit(engine):
    many = [Request(tuple(PROMPTS[0]), f"{i}") for i in range(200)]
    eos = engine.tokenizer.eos_token_id
    reasons = set()
    for limit in (2, 12):
        for response in engine.generate(many, {"max_tokens": limit, "temperature": 1.0}):
            reasons.add(response.stop_reason)
            assert len(response.logprobs) == len(response.token_ids) <= limit
            assert (response.token_ids[-1] == eos) == (response.stop_reason == "stop")
            assert eos not in response.token_ids[:-1]
            assert len(response.token_ids) == limit or response.stop_reason == "stop"
    assert reasons == {"stop", "length"}


@pytest.mark.parametrize("setting", [{"top_p": 0.9}, {"top_k": 5}, {"min_p": 0.1}, {"stop": ["x"]}])
def test_settings_that_change_the_distribution_are_refused(engine, setting):
    with pytest.raises(ValueError, match=f"sampling_params.{next(iter(setting))}"):
        engine.generate(requests(), SAMPLED | setting)


class _Method:
    def __init__(self, function):
        self._function = function

    async def remote(self, *args):
        return self._function(*args)


class _InProcess:
    """The engine's methods as a Ray actor offers them, in this process."""

    def __init__(self, engine):
        self.calls = []
        self.generate = _Method(lambda flat, params: self.calls.append(flat) or engine.generate(flat, params))


async def _ask(engine, order: Sequence[int], batched: bool) -> tuple[list, list]:
    actor = _InProcess(engine)
    client = RolloutClient(actor, "tiny")
    sessions = [f"{i}_0" for i in range(len(PROMPTS))]
    client.begin("train/3", sessions, batched)
    if batched:
        output = await client.generate({"prompt_token_ids": PROMPTS, "sampling_params": SAMPLED})
        return list(zip(output["response_ids"], output["response_logprobs"], strict=True)), actor.calls

    async def one(i: int):
        await asyncio.sleep(0.002 * order.index(i))
        one_request = {"prompt_token_ids": [PROMPTS[i]], "session_ids": [sessions[i]], "sampling_params": SAMPLED}
        output = await client.generate(one_request)
        await client.finish_session(sessions[i])
        return output["response_ids"][0], output["response_logprobs"][0]

    return list(await asyncio.gather(*(one(i) for i in range(len(PROMPTS))))), actor.calls


@pytest.mark.parametrize("order", [[0, 1, 2, 3], [3, 1, 0, 2]])
def test_arrival_changes_no_bit_of_a_response(engine, order):
    at_once, _ = asyncio.run(_ask(engine, order, batched=True))
    one_by_one, calls = asyncio.run(_ask(engine, order, batched=False))
    assert one_by_one == at_once
    assert len(calls) == 1, "all running trajectories are sent together"


def test_a_trajectory_that_ended_is_not_waited_for(engine):
    async def two_turns():
        actor = _InProcess(engine)
        client = RolloutClient(actor, "tiny")
        client.begin("train/1", ["0_0", "1_0"], batched=False)

        async def turns(session: str, count: int):
            for turn in range(count):
                prompt = PROMPTS[0] + [20] * turn
                await client.generate(
                    {"prompt_token_ids": [prompt], "session_ids": [session], "sampling_params": SAMPLED}
                )
            await client.finish_session(session)

        await asyncio.wait_for(asyncio.gather(turns("0_0", 1), turns("1_0", 3)), timeout=60)
        return [len(call) for call in actor.calls]

    assert asyncio.run(two_turns()) == [2, 1, 1]


def test_an_error_of_the_engine_reaches_every_request(engine):
    async def ask():
        client = RolloutClient(_InProcess(engine), "tiny")
        client.begin("train/1", ["0_0"], batched=True)
        await client.generate({"prompt_token_ids": [PROMPTS[0]], "sampling_params": SAMPLED | {"top_p": 0.5}})

    with pytest.raises(ValueError, match="top_p"):
        asyncio.run(ask())


def test_weights_are_taken_in_place_and_accounted_for(tiny_checkpoint):
    engine = TransformersEngine(str(tiny_checkpoint), "float32", seed=5)
    name = "lm_head.weight"
    report = engine.load_weights(
        {name: engine.model.lm_head.weight + 0.25, "model.language_model.extra": torch.ones(1)}
    )
    assert report["max_abs_change"] == pytest.approx(0.25)
    assert report["unexpected"] == ["model.extra"]
    assert name not in report["missing"]
    assert "model.embed_tokens.weight" in report["missing"]


def test_the_client_pickles_as_its_actor(engine):
    client = RolloutClient(_InProcess(engine), "tiny")
    client.increment_weight_version()
    state = client.__getstate__()
    assert state == {"actor": client.actor, "_model_name": "tiny", "weight_version": 1}
