"""Which blocks of keys the queries of a micro-batch attend to."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from skyrl_qwen38.qwen4_exp.documents import Documents


@dataclass(frozen=True)
class Selection:
    """The choice of one QSA layer, for the queries that have one.

    A query t (counted in its document) sees ``⌊(t+1)/ratio⌋`` complete blocks and the incomplete last one. Up to
    ``budget + ratio − 1`` tokens it keeps all of them; only queries from there on choose.

    Attributes:
        ratio: tokens of a block.
        first: the first query that chooses, ``budget + ratio − 1``.
        blocks: of each document int32 ``[max(0, length − first), budget / ratio]``, ascending: the complete blocks that
            the query keeps.
    """

    ratio: int
    first: int
    blocks: tuple[Tensor, ...]


@dataclass
class SelectionTape:
    """Selections by layer, recorded in a forward pass or given to one: to see them, or to take exact ties out of a
    comparison.

    Attributes:
        replay: the layers read the tape. Otherwise they write to it.
        layers: by layer number (from 1).
    """

    replay: bool = False
    layers: dict[int, Selection] = field(default_factory=dict)

    def read(self, layer: int, documents: Documents) -> Selection:
        """The layer's selection.

        Raises:
            ValueError: it is not on the tape, or is of other documents.
        """
        selection = self.layers.get(layer)
        if selection is None:
            raise ValueError(f"the selections to replay have none for layer {layer}: record them with this model")
        wanted = tuple(max(0, length - selection.first) for length in documents.lengths)
        if (found := tuple(map(len, selection.blocks))) != wanted:
            raise ValueError(
                f"the selections to replay are of documents with {found} choosing queries in layer {layer}, but this "
                f"micro-batch's have {wanted}: replay them with the micro-batch that they were recorded from"
            )
        return selection
