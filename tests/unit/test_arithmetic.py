"""The arithmetic task: parts that share no operand pair, rows that SkyRL reads, answers that skyrl-gym scores."""

import itertools
import json

import pytest

from skyrl_qwen38.arithmetic import CARRY_SHARE, PARTS, Question, main, questions, write_dataset, write_jsonl


def pairs(part: str, seed: int = 0) -> set[tuple[int, int]]:
    return {tuple(sorted((question.left, question.right))) for question in questions(part, seed)}


@pytest.mark.parametrize(("one", "other"), list(itertools.combinations(PARTS, 2)))
@pytest.mark.parametrize("seeds", [(0, 0), (0, 1), (7, 3)])
def test_no_operand_pair_is_in_two_parts_whatever_the_seeds(one, other, seeds):
    assert pairs(one, seeds[0]).isdisjoint(pairs(other, seeds[1]))


def test_enough_held_out_questions_each_pair_once():
    heldout = questions("heldout")
    assert len(heldout) >= 256
    assert len(heldout) == len(pairs("heldout"))


@pytest.mark.parametrize("part", PARTS)
def test_questions_depend_on_the_seed_alone(part):
    assert questions(part, 5) == questions(part, 5)
    assert questions(part, 5) != questions(part, 6)
    assert pairs(part, 5) == pairs(part, 6)


@pytest.mark.parametrize("part", PARTS)
def test_operands_and_sums_have_two_digits_and_carries_their_share(part):
    asked = questions(part)
    assert all(10 <= number <= 99 for q in asked for number in (q.left, q.right, q.answer))
    assert sum(q.carries for q in asked) / len(asked) == pytest.approx(CARRY_SHARE, abs=0.01)


@pytest.mark.parametrize(
    ("left", "right", "answer", "carries"), [(47, 38, 85, True), (40, 38, 78, False), (45, 45, 90, True)]
)
def test_question(left, right, answer, carries):
    question = Question(left, right)
    assert (question.answer, question.carries) == (answer, carries)


def test_an_unknown_part_is_refused():
    with pytest.raises(ValueError, match="no part 'test'; use one of warmup, train, heldout"):
        questions("test")


def test_rows_load_as_a_skyrl_prompt_dataset(tmp_path):
    pytest.importorskip("skyrl", reason="the cpu extra is not installed")
    from skyrl.train.dataset import PromptDataset

    from skyrl_qwen38.checkpoint.tiny_tokenizer import build_tokenizer

    paths = write_dataset(tmp_path, seed=3)
    dataset = PromptDataset(str(paths["heldout"]), build_tokenizer(), max_prompt_length=7, num_workers=0)
    assert len(dataset) == len(questions("heldout", 3))
    messages, env_class, extras, _ = dataset[4]
    question = questions("heldout", 3)[4]
    assert messages == [{"role": "user", "content": f"{question.left} + {question.right}"}]
    assert env_class == "gsm8k"
    assert extras["reward_spec"] == {"method": "rule", "ground_truth": str(question.left + question.right)}


@pytest.mark.parametrize(
    ("response", "reward"),
    [("#### 85", 1.0), ("#### 75", 0.0), ("####85", 0.0), ("85", 0.0), ("#### 8", 0.0), ("47 + 38\n#### 85", 1.0)],
)
def test_gsm8k_environment_scores_what_the_tokenizer_decodes(response, reward):
    pytest.importorskip("skyrl_gym", reason="the cpu extra is not installed")
    import skyrl_gym

    from skyrl_qwen38.checkpoint.tiny_tokenizer import build_tokenizer

    tokenizer = build_tokenizer()
    ids = [*tokenizer.encode(response, add_special_tokens=False), tokenizer.eos_token_id]
    environment = skyrl_gym.make("gsm8k", extras={"reward_spec": {"method": "rule", "ground_truth": "85"}})
    assert environment.step(tokenizer.decode(ids, skip_special_tokens=True))["reward"] == reward


def test_a_failed_write_leaves_the_old_file(tmp_path):
    path = tmp_path / "train.jsonl"
    write_jsonl([{"a": 1}], path)
    with pytest.raises(TypeError):
        write_jsonl([{"a": 2}, {"a": object()}], path)
    assert [json.loads(line) for line in path.read_text().splitlines()] == [{"a": 1}]
    assert [file.name for file in tmp_path.iterdir()] == ["train.jsonl"]


def test_the_command_writes_both_datasets(tmp_path, capsys):
    main([str(tmp_path), "--seed", "4"])
    rows = [json.loads(line) for line in (tmp_path / "heldout.jsonl").read_text().splitlines()]
    assert [row["prompt"][0]["content"] for row in rows] == [question.text for question in questions("heldout", 4)]
    assert (tmp_path / "train.jsonl").exists()
    assert f"{len(rows)} questions" in capsys.readouterr().out
