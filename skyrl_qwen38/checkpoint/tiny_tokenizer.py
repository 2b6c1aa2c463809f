"""The tokenizer of the tiny checkpoint: byte-level BPE, one token a digit, every id decodable."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

END_OF_TEXT = "<|endoftext|>"
END_OF_TURN = "<|im_end|>"
SPECIAL_TOKENS = (
    END_OF_TEXT,
    END_OF_TURN,
    "<|system|>",
    "<|user|>",
    "<|assistant|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
VOCAB_SIZE = 320
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ '<|im_end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
# Merges are learnt from these words alone: they are what the arithmetic task says often.
_CORPUS = ("#### 0 + 0 = 0",)


def build_tokenizer() -> "PreTrainedTokenizerFast":
    """A fast tokenizer of ``VOCAB_SIZE`` tokens, the same one on every call.

    All 256 bytes are tokens, so any text can be encoded. Ids that merges leave free are reserved special tokens: a
    model that samples one still decodes. ``#### `` is one token and digits are never merged, so ``#### 12`` decodes
    from ``#### ``, ``1``, ``2`` without a space between the digits. Padding is ``<|endoftext|>``, the separator of
    the n-gram hash, as in the released tokenizer.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_CORPUS, trainer)
    free = VOCAB_SIZE - tokenizer.get_vocab_size()
    tokenizer.add_special_tokens([f"<|reserved_{index}|>" for index in range(free)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END_OF_TURN,
        pad_token=END_OF_TEXT,
        unk_token=END_OF_TEXT,
        chat_template=CHAT_TEMPLATE,
        model_max_length=4096,
        clean_up_tokenization_spaces=False,
    )
