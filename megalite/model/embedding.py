"""Word and learned position embeddings."""

import torch.nn.functional as F
from torch import Tensor, nn

from megalite.config.schema import ModelConfig
from megalite.kernels.embed import embed
from megalite.model.parameters import padded_vocabulary
from megalite.tensor_parallel.layers import TpContext, VocabParallelEmbedding


class Embedding(nn.Module):
    """Word, plus position where positions are learned. A stage that only ends the model holds it for its tied head."""

    def __init__(self, config: ModelConfig, place: TpContext, *, positions: bool) -> None:
        super().__init__()
        self.word = VocabParallelEmbedding(padded_vocabulary(config), config.hidden_size, place)
        self.sequence = place.sequence
        if positions:
            self.position = nn.ParameterDict({"weight": place.parameter(config.max_positions, config.hidden_size)})

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """tokens [b, s], positions [b or 1, s] -> [s, b, h], with sequence parallelism this rank's part [s/t, b, h]"""
        embedded: Tensor = self.word(tokens.t())
        if hasattr(self, "position"):
            # One row of positions for all samples is looked up once, and its gradient summed over them before.
            shared, mine = len(positions) < len(tokens), positions.t()
            if self.sequence is not None:  # after the sum over ranks, so that positions are added once
                mine = mine.tensor_split(self.sequence.size)[self.sequence.index]
            weight = self.position["weight"]  # shared rows are added once: any order will do
            embedded = embedded + (F.embedding(mine, weight) if shared else embed(mine, weight, None))
        return embedded
