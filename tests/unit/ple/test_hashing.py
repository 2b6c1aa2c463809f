"""The n-gram hash against literal numbers, against Transformers, and document by document."""

from types import SimpleNamespace

import pytest
import torch

from skyrl_qwen38.ple import NgramHasher

RELEASED = {"vocab_size": 248320, "eos_token_id": 248044}
MULTIPLIERS = [23703573157769, 20109073645365, 8052911324071]
# The 16 primes from 20,000,000 on, as differences to it.
PRIMES = [20_000_000 + d for d in (3, 23, 33, 47, 59, 63, 69, 77, 81, 93, 107, 147, 153, 159, 161, 171)]
# Rows of the document [5, 7, 248044, 9, 11] in the released model, heads 0, 7, 8 and 15.
RELEASED_ROWS = [
    [15389869, 155458159, 179763390, 315720898],
    [12441580, 156012011, 169119442, 314484167],
    [10204458, 158727320, 176298516, 319927855],  # the end-of-sequence token itself sees what came before it
    [18043673, 144330141, 176817901, 307951937],
    [10041117, 150044571, 163654473, 303242927],
]


@pytest.fixture(scope="module")
def released() -> NgramHasher:
    return NgramHasher(**RELEASED)


def test_released_multipliers_primes_offsets_and_rows(released):
    assert released.multipliers.tolist() == MULTIPLIERS
    assert released.head_sizes.tolist() == PRIMES
    assert released.head_offsets.tolist() == [sum(PRIMES[:k]) for k in range(16)]
    assert released.head_offsets[-1] == 300001275
    assert released.num_rows == 320_001_536
    assert all(t.dtype == torch.int64 for t in (released.multipliers, released.head_sizes, released.head_offsets))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_released_rows(released, dtype):
    rows = released.row_ids(torch.tensor([5, 7, 248044, 9, 11], dtype=dtype))
    assert rows.shape == (5, 16)
    assert rows[:, [0, 7, 8, 15]].tolist() == RELEASED_ROWS


def test_the_newest_token_takes_the_first_multiplier():
    """Literal numbers: a second implementation with the lags reversed would agree with itself, and be wrong."""
    hasher = NgramHasher(vocab_size=128, eos_token_id=99, heads_per_ngram=1, ngram_vocab_size_base=101)
    assert hasher.head_sizes.tolist() == [101, 103]
    assert hasher.head_offsets.tolist() == [0, 101]
    hasher.__dict__["multipliers"] = torch.tensor([3, 5, 7])
    assert hasher.row_ids(torch.tensor([7, 9, 11])).tolist() == [[1, 124], [56, 136], [12, 162]]


def test_ids_at_the_end_of_the_vocabulary_stay_in_int64(released):
    """The largest products reach 5.9e18; an int32 step anywhere would wrap them."""
    rows = released.row_ids(torch.full((4,), 248319, dtype=torch.int32))
    hashes = [248319 * m for m in MULTIPLIERS]
    bigram, trigram = hashes[0] ^ hashes[1], hashes[0] ^ hashes[1] ^ hashes[2]
    expected = [(bigram if k < 8 else trigram) % PRIMES[k] + sum(PRIMES[:k]) for k in range(16)]
    assert rows[3].tolist() == expected


def test_a_second_ple_layer_takes_the_next_primes_and_multipliers(tiny_hasher):
    second = NgramHasher(vocab_size=512, eos_token_id=2, ngram_vocab_size_base=101, ple_index=1)
    both = NgramHasher(vocab_size=512, eos_token_id=2, ngram_vocab_size_base=101, heads_per_ngram=16)
    assert second.head_sizes.tolist() == both.head_sizes[16:].tolist()
    assert second.multipliers.tolist() != tiny_hasher.multipliers.tolist()


# ---- documents, padding, carried context ----


def rows_of_each(hasher: NgramHasher, documents: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat([hasher.row_ids(document) for document in documents])


def random_documents(lengths: list[int]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(0, 9, (length,), generator=generator) for length in lengths]  # eos (2) is frequent


@pytest.mark.parametrize("lengths", [[3, 2], [1, 1, 1], [2, 0, 3], [0, 5], [5, 0], [7, 1, 12, 2]])
@pytest.mark.parametrize("batch_axis", [False, True], ids=["[T]", "[1, T]"])
def test_packed_documents_hash_as_they_do_alone(tiny_hasher, lengths, batch_axis):
    documents = random_documents(lengths)
    packed = torch.cat(documents)
    cu_seqlens = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    rows = tiny_hasher.row_ids(packed[None] if batch_axis else packed, cu_seqlens)
    assert rows.shape == ((1,) if batch_axis else ()) + (sum(lengths), 16)
    assert torch.equal(rows.view(-1, 16), rows_of_each(tiny_hasher, documents))


def test_without_cu_seqlens_the_second_document_would_see_the_first(tiny_hasher):
    documents = [torch.tensor([5, 6, 7]), torch.tensor([8, 9, 10])]
    uncut = tiny_hasher.row_ids(torch.cat(documents))
    differs = (uncut != rows_of_each(tiny_hasher, documents)).any(-1)
    assert differs.tolist() == [False, False, False, True, True, False]


def test_rows_of_a_batch_are_documents(tiny_hasher):
    batch = torch.stack(random_documents([6, 6, 6]))
    assert torch.equal(tiny_hasher.row_ids(batch).view(-1, 16), rows_of_each(tiny_hasher, list(batch)))


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_changes_no_token(tiny_hasher, side):
    document = torch.tensor([5, 6, 7, 8])
    pads = torch.tensor([-100, 511, 0])  # masked, so not even a valid id is asked of them
    parts = [pads, document] if side == "left" else [document, pads]
    ids = torch.cat(parts)[None]
    mask = torch.cat([torch.zeros(3) if part is pads else torch.ones(4) for part in parts])[None]
    rows = tiny_hasher.row_ids(ids, attention_mask=mask)[0][mask[0].bool()]
    assert torch.equal(rows, tiny_hasher.row_ids(document))


@pytest.mark.parametrize("cut", range(8))
def test_a_carried_context_continues_the_document(tiny_hasher, cut):
    document = torch.tensor([5, 6, 2, 7, 8, 2, 2, 9])
    before = torch.cat([torch.tensor([2, 2]), document])[cut : cut + 2]
    rest = tiny_hasher.row_ids(document[cut:], context=before)
    assert torch.equal(rest, tiny_hasher.row_ids(document)[cut:])


def test_carried_contexts_belong_to_their_documents(tiny_hasher):
    packed, cu_seqlens = torch.tensor([5, 6, 7, 8]), torch.tensor([0, 1, 4])
    contexts = torch.tensor([[10, 11], [12, 2]])
    rows = tiny_hasher.row_ids(packed, cu_seqlens, context=contexts)
    alone = [tiny_hasher.row_ids(d, context=c) for d, c in zip(packed.split([1, 3]), contexts, strict=True)]
    assert torch.equal(rows, torch.cat(alone))


@pytest.mark.parametrize("shape", [(0,), (1, 0), (3, 0), (0, 4)])
def test_no_token_asks_for_no_row(tiny_hasher, shape):
    assert tiny_hasher.row_ids(torch.empty(shape, dtype=torch.int64)).shape == (*shape, 16)


# ---- against Transformers ----


@pytest.fixture(scope="module")
def transformers_embedding():
    configuration = pytest.importorskip("transformers.models.qwen4_exp.configuration_qwen4_exp")
    modeling = pytest.importorskip("transformers.models.qwen4_exp.modeling_qwen4_exp")
    config = configuration.Qwen4ExpTextConfig(
        vocab_size=512,
        hidden_size=64,
        num_hidden_layers=2,
        layer_types=["linear_attention", "linear_attention"],
        ple_layer_ids=[2],
        ple_embed_dim=64,
        ngram_vocab_size_base=101,
        make_ngram_vocab_size_divisible_by=128,
        eos_token_id=[2, 7],
    )
    return config, modeling.Qwen4ExpTextNGramEmbedding(config, embedding_dim=64, layer_idx=1)


def transformers_rows(embedding, ids: torch.Tensor) -> torch.Tensor:
    """The row ids that Transformers looks up, seen at its embedding."""
    seen = []
    hook = embedding.ngram_embedding.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    embedding(ids, None)
    hook.remove()
    return seen[0]


def test_buffers_and_rows_equal_transformers(transformers_embedding):
    config, embedding = transformers_embedding
    hasher = NgramHasher.from_config(config)
    hasher.check_buffers(embedding.layer_multipliers, embedding.ngram_heads_vocab_sizes, embedding.ngram_heads_offsets)
    assert hasher.num_rows == embedding.ngram_embedding.num_embeddings
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        ids = torch.randint(0, 512, (3, 17), generator=generator)
        ids[torch.rand(ids.shape, generator=generator) < 0.3] = 2  # runs of end-of-sequence
        assert torch.equal(hasher.row_ids(ids), transformers_rows(embedding, ids))


def test_padded_batches_equal_transformers(transformers_embedding):
    config, embedding = transformers_embedding
    ids = torch.randint(3, 512, (4, 9), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[0, :4] = 0  # left
    mask[1, 5:] = 0  # right
    mask[2, [0, 8]] = 0
    # Its text model replaces masked ids by the end-of-sequence id before the hash.
    expected = transformers_rows(embedding, ids.masked_fill(mask == 0, 2))
    assert torch.equal(NgramHasher.from_config(config).row_ids(ids, attention_mask=mask), expected)


def test_continued_sequences_equal_transformers_with_its_cache(transformers_embedding):
    """A prompt in chunks and then token by token: its cache carries the context, ours is handed over."""
    from transformers import DynamicCache

    config, embedding = transformers_embedding
    hasher = NgramHasher.from_config(config)
    ids = torch.randint(0, 512, (3, 24), generator=torch.Generator().manual_seed(3))
    ids[0, 5:8], ids[1, 11], ids[2, 0] = 2, 2, 2
    cache, seen = DynamicCache(config=config), []
    hook = embedding.ngram_embedding.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    begin = 0
    for length in (1, 1, 7, 4, *[1] * 11):
        chunk = ids[:, begin : begin + length]
        embedding(chunk, cache)
        before = torch.cat([torch.full((3, 2), 2), ids[:, :begin]], dim=1)[:, -2:]
        assert torch.equal(hasher.row_ids(chunk, context=before), seen[-1])
        begin += length
    hook.remove()
    assert begin == 24
    assert torch.equal(hasher.row_ids(ids), torch.cat(seen, dim=1))


def test_int32_row_ids_where_they_fit(released, tiny_hasher):
    ids = torch.tensor([5, 7, 248044, 9, 11])
    narrow = released.row_ids(ids, dtype=torch.int32)
    assert narrow.dtype == torch.int32
    assert torch.equal(narrow.long(), released.row_ids(ids))
    wide = NgramHasher(vocab_size=512, eos_token_id=2, ngram_vocab_size_base=200_000_000)
    assert wide.num_rows > 1 << 31
    with pytest.raises(ValueError, match=r"do not fit torch.int32: ask for torch.int64"):
        wide.row_ids(torch.tensor([1]), dtype=torch.int32)
    with pytest.raises(ValueError, match=r"do not fit torch.int16"):
        tiny_hasher.row_ids(torch.tensor([1]), dtype=torch.int16)


# ---- configurations ----


def test_from_config_reads_a_mapping_and_an_object():
    values = RELEASED | {"make_ngram_vocab_size_divisible_by": 64, "ngram_size": 4, "seed": None}
    expected = NgramHasher(**RELEASED, divisible_by=64, ngram_size=4)
    assert NgramHasher.from_config(values) == expected
    assert NgramHasher.from_config(SimpleNamespace(**values)) == expected
    assert NgramHasher.from_config(values | {"eos_token_id": [248044, 1]}) == expected


@pytest.mark.parametrize("missing", ["vocab_size", "eos_token_id"])
def test_from_config_names_what_is_missing(missing):
    with pytest.raises(ValueError, match=f"has no {missing}"):
        NgramHasher.from_config({**RELEASED, missing: None})


@pytest.mark.parametrize(
    ("changed", "value", "buffer"),
    [
        ("vocab_size", 248832, "layer_multipliers"),  # padded for tensor parallelism
        ("seed", 1, "layer_multipliers"),
        ("ngram_vocab_size_base", 20_000_010, "ngram_heads_vocab_sizes"),
    ],
)
def test_buffers_of_another_configuration_are_refused_with_both_values(released, changed, value, buffer):
    other = NgramHasher(**RELEASED | {changed: value})
    with pytest.raises(ValueError, match=buffer) as error:
        other.check_buffers(released.multipliers, released.head_sizes, released.head_offsets)
    shown = {"layer_multipliers": "multipliers", "ngram_heads_vocab_sizes": "head_sizes"}[buffer]
    assert str(getattr(released, shown).tolist()) in str(error.value)
    assert str(getattr(other, shown).tolist()) in str(error.value)


def test_offsets_that_differ_alone_are_refused(released):
    with pytest.raises(ValueError, match="ngram_heads_offsets"):
        released.check_buffers(released.multipliers, released.head_sizes, released.head_offsets + 1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"input_ids": torch.tensor([1, 512])}, "token id 512, outside the vocabulary of 512"),
        ({"input_ids": torch.tensor([[1], [-1]])}, "token id -1"),
        ({"input_ids": torch.tensor([1.0])}, "must be integers"),
        ({"input_ids": torch.tensor(1)}, r"shape \[T\] or \[B, S\]"),
        ({"input_ids": torch.zeros(1, 1, 1, dtype=torch.int64)}, r"shape \[T\] or \[B, S\]"),
        ({"input_ids": torch.ones(2, 3).long(), "cu_seqlens": torch.tensor([0, 6])}, "one packed row"),
        ({"input_ids": torch.ones(3).long(), "cu_seqlens": torch.tensor([0, 2])}, "rise from 0 to the row's 3 tokens"),
        ({"input_ids": torch.ones(3).long(), "cu_seqlens": torch.tensor([1, 3])}, "rise from 0"),
        ({"input_ids": torch.ones(3).long(), "cu_seqlens": torch.tensor([0, 2, 1, 3])}, "rise from 0"),
        ({"input_ids": torch.ones(3).long(), "cu_seqlens": torch.tensor([3])}, "rise from 0"),
        ({"input_ids": torch.ones(3).long(), "attention_mask": torch.ones(1, 3)}, "must be equal"),
        ({"input_ids": torch.ones(3).long(), "context": torch.ones(2, 2).long()}, r"1 documents need \[1, 2\]"),
        ({"input_ids": torch.ones(3).long(), "context": torch.ones(1, 3).long()}, r"1 documents need \[1, 2\]"),
        ({"input_ids": torch.ones(3).long(), "context": torch.tensor([[1, 600]])}, "context holds the token id 600"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(tiny_hasher, arguments, message):
    with pytest.raises(ValueError, match=message):
        tiny_hasher.row_ids(**arguments)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"ngram_size": 1}, "ngram_size >= 2"),
        ({"vocab_size": 0}, "vocab_size >= 1"),
        ({"heads_per_ngram": 0}, "heads_per_ngram >= 1"),
        ({"eos_token_id": 248320}, "eos_token_id below its vocab_size 248320, got 248320"),
    ],
)
def test_parameters_out_of_range_are_refused(changed, message):
    with pytest.raises(ValueError, match=message):
        NgramHasher(**RELEASED | changed)
