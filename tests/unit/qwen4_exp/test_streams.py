"""Norms, hyper-connections and the PLE layer against scalar loops over their formulas, in float64, and by hand.

Tolerance 1e-6 relative to values of size one: the modules compute their norms in fp32.
"""

import math
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from skyrl_qwen38.qwen4_exp.documents import Documents, ForwardContext
from skyrl_qwen38.qwen4_exp.hyper_connection import HyperConnection, StreamMixer
from skyrl_qwen38.qwen4_exp.norms import RMSNorm, ZeroCenteredRMSNorm
from skyrl_qwen38.qwen4_exp.ple_layer import PLELayer

N, H, K, D = 2, 3, 4, 2
CONFIG = SimpleNamespace(
    hidden_size=H,
    hc_count=N,
    hc_lowrank=2,
    ngram_size=3,
    heads_per_ngram=K // 2,
    ple_embed_dim=K * D,
    ple_conv_kernel_size=4,
    layernorm_epsilon=1e-6,
    params_dtype=torch.float32,
    init_method=lambda weight: nn.init.normal_(weight, std=0.02),
)


def randomised[M: nn.Module](module: M, seed: int = 0) -> M:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.5)
    return module


@pytest.mark.parametrize(
    ("norm", "weight", "expected"),
    [
        (ZeroCenteredRMSNorm(CONFIG, 2, eps=0.0), [0.0, 1.0], [3 / math.sqrt(12.5), 8 / math.sqrt(12.5)]),
        (RMSNorm(CONFIG, 2, eps=0.0), [1.0, 2.0], [3 / math.sqrt(12.5), 8 / math.sqrt(12.5)]),
        (ZeroCenteredRMSNorm(CONFIG, 2, eps=0.0, group_size=1), [0.0, 1.0], [1.0, 2.0]),
    ],
    ids=["pitfall 9: 1 + w", "pitfall 9: w", "pitfall 10: by group"],
)
def test_norms_by_hand(norm, weight, expected):
    norm.weight.data = torch.tensor(weight)
    torch.testing.assert_close(norm(torch.tensor([3.0, 4.0])), torch.tensor(expected), rtol=1e-6, atol=0)


def test_norms_return_the_dtype_they_get_and_compute_in_fp32():
    x = torch.full((4,), 3e-3, dtype=torch.bfloat16)
    for norm in (ZeroCenteredRMSNorm(CONFIG, 4, eps=0.0), RMSNorm(CONFIG, 4, eps=0.0)):
        assert norm(x).dtype == torch.bfloat16
        assert norm(x).tolist() == [1.0] * 4


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def normed(x: list[float], weight: list[float]) -> list[float]:
    """(1 + w) norm of each stream of H."""
    out = []
    for start in range(0, len(x), H):
        rms = math.sqrt(sum(value * value for value in x[start : start + H]) / H + 1e-6)
        out += [x[i] / rms * (1 + weight[i]) for i in range(start, start + H)]
    return out


def times(weight: Tensor, x: list[float]) -> list[float]:
    return [sum(w * value for w, value in zip(row, x, strict=True)) for row in weight.tolist()]


def mixed(mixer: StreamMixer, x: list[float]) -> list[float]:
    x = normed(x, mixer.hc_norm.weight.tolist())
    low = [value / N for value in times(mixer.input_mix_weight_down.weight, x)]
    gates = [sigmoid(value) for value in times(mixer.input_mix_weight_up.weight, [v * sigmoid(v) for v in low])]
    return [sum(gates[j * H + h] * x[j * H + h] for j in range(N)) / N for h in range(H)]


def test_pitfall_11_mixes_normed_streams_and_writes_to_raw_ones():
    connection = randomised(HyperConnection(CONFIG, H))
    streams = torch.randn(5, 1, N * H, generator=torch.Generator().manual_seed(1))
    output = torch.randn(5, 1, H, generator=torch.Generator().manual_seed(2))
    block_input, injection = connection(streams)
    written = connection.write_back(streams, injection, output)
    for token in range(5):
        x = streams[token, 0].tolist()
        torch.testing.assert_close(block_input[token, 0], torch.tensor(mixed(connection, x)), rtol=1e-6, atol=1e-6)
        scores = times(connection.block_inject_weight.weight, normed(x, connection.hc_norm.weight.tolist()))
        iota = [2 * sigmoid(score / N) for score in scores]
        wanted = [x[j * H + h] + iota[j] * output[token, 0, h].item() for j in range(N) for h in range(H)]
        torch.testing.assert_close(written[token, 0], torch.tensor(wanted), rtol=1e-6, atol=1e-6)


def test_final_mixer_is_the_same_mix_without_injection():
    mixer = randomised(StreamMixer(CONFIG, H))
    streams = torch.randn(1, 1, N * H, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(
        mixer(streams)[0, 0], torch.tensor(mixed(mixer, streams[0, 0].tolist())), rtol=1e-6, atol=1e-6
    )
    assert not hasattr(mixer, "block_inject_weight")


@dataclass
class Rows:
    """A finished lookup."""

    rows: Tensor

    def wait(self) -> Tensor:
        return self.rows


def ple_reference(layer: PLELayer, streams: Tensor, rows: Tensor) -> list[list[float]]:
    """One document: streams [T, n*H], rows [T, K*D]."""
    gated, convolved_input = [], []
    for x, e in zip(streams.tolist(), rows.tolist(), strict=True):
        key = normed(times(layer.key_proj.weight, e), layer.norm_key.weight.tolist())
        query = normed(x, layer.norm_query.weight.tolist())
        value = times(layer.value_proj.weight, e)
        u = []
        for j in range(N):
            score = sum(key[j * H + h] * query[j * H + h] for h in range(H)) / math.sqrt(H)
            gate = sigmoid(math.copysign(math.sqrt(max(abs(score), 1e-6)), score)) if score else 0.5
            u += [gate * v for v in value]
        gated.append(u)
        convolved_input.append(normed(u, layer.norm_conv.weight.tolist()))
    out = []
    for t, u in enumerate(gated):
        row = []
        for c in range(N * H):
            y = sum(
                layer.conv1d.weight[c, 0, i].item() * convolved_input[t - 9 + 3 * i][c]
                for i in range(4)
                if t - 9 + 3 * i >= 0
            )
            row.append(u[c] + y * sigmoid(y))
        out.append(row)
    return out


def test_pitfalls_5_and_7_ple_of_a_packed_row_is_that_of_each_document():
    """Documents longer than the convolution's reach of 9 positions, and shorter."""
    lengths = [12, 1, 14]
    layer = randomised(PLELayer(CONFIG))
    generator = torch.Generator().manual_seed(3)
    streams = torch.randn(sum(lengths), 1, N * H, generator=generator)
    rows = torch.randn(1, sum(lengths), K, D, generator=generator)
    documents = Documents.from_cu_seqlens(torch.tensor([0, *lengths]).cumsum(0), sum(lengths))
    found = layer(streams, ForwardContext(documents, Rows(rows)))[:, 0]
    wanted = []
    for x, e in zip(streams[:, 0].split(lengths), rows[0].flatten(1).split(lengths), strict=True):
        wanted += ple_reference(layer, x, e)
    torch.testing.assert_close(found, torch.tensor(wanted), rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize(
    ("row", "gate"),
    [(0.0, 0.5), (1.0, sigmoid(math.sqrt(math.sqrt(H)))), (-1.0, sigmoid(-math.sqrt(math.sqrt(H))))],
    ids=["zero", "positive", "negative"],
)
def test_pitfall_8_gate_has_sign_and_square_root(row, gate):
    """Key and query of equal entries: normed to ones, so the score is ±√H, and 0 for a zero row."""
    layer = PLELayer(CONFIG)
    with torch.no_grad():
        layer.key_proj.weight.fill_(1.0)
        layer.value_proj.weight.zero_()
        layer.value_proj.weight[:, 0] = 1.0
    rows = torch.zeros(1, 1, K, D)
    rows[0, 0, 0, 0] = row
    context = ForwardContext(Documents.from_rows(1, 1, torch.device("cpu")), Rows(rows))
    found = layer(torch.ones(1, 1, N * H), context).flatten().tolist()
    assert found == pytest.approx([gate * row] * (N * H), abs=1e-5)


def test_pitfall_8_gate_has_a_floor():
    """A score of 2^-23 / √H = 7e-8 counts as 1e-6."""
    layer = randomised(PLELayer(CONFIG))
    with torch.no_grad():
        layer.norm_key.weight.fill_(-1.0)
        layer.norm_key.weight[::H] = -1.0 + 2.0**-23  # the score's only term
        layer.norm_query.weight.zero_()
        layer.key_proj.weight.fill_(1.0)
        layer.conv1d.weight.zero_()
    rows = torch.ones(1, 1, K, D)
    context = ForwardContext(Documents.from_rows(1, 1, torch.device("cpu")), Rows(rows))
    found = layer(torch.ones(1, 1, N * H), context).flatten()
    value = layer.value_proj.weight.sum(1).repeat(N)
    torch.testing.assert_close(found / value, torch.full((N * H,), sigmoid(1e-3)), rtol=1e-7, atol=1e-7)
