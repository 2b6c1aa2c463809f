"""The indexer of Qwen sparse attention (QSA): the weights that choose which blocks of keys a query sees."""

from megatron.core.transformer.transformer_config import TransformerConfig
from torch import nn

from skyrl_qwen38.qwen4_exp.norms import ZeroCenteredRMSNorm


class Indexer(nn.Module):
    """Loaded, exported and frozen.

    Its choice is not differentiable, so no loss reaches these weights; an optimizer's weight decay would still move
    them. In the dense range (:func:`dense_limit`) every block is chosen and the weights are not read.
    """

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        heads, width, dtype = config.indexer_n_heads, config.indexer_head_dim, config.params_dtype
        self.index_qk_proj = nn.Linear(config.hidden_size, (heads + 1) * width, bias=False, dtype=dtype)
        self.q_layernorm = ZeroCenteredRMSNorm(config, width, config.layernorm_epsilon)
        self.k_layernorm = ZeroCenteredRMSNorm(config, width, config.layernorm_epsilon)
        self.requires_grad_(False)


def dense_limit(config: TransformerConfig) -> int:
    """The longest document all of whose queries see all keys before them: ``budget + ratio − 1`` tokens.

    A query keeps ``budget / ratio`` complete blocks of ``ratio`` keys and the incomplete last one.
    """
    return config.indexer_budget + config.indexer_compress_ratio - 1
