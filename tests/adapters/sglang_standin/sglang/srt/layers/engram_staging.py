"""Windows of a batch whose tokens are on the host."""

import numpy as np
import torch


class EngramRowStager:
    def _windows(self, batch):
        size = self.hasher.max_ngram_size
        tokens, positions = [], []
        for req, start, length in zip(batch.reqs, batch.prefix_lens, batch.extend_lens, strict=True):
            if start + length > len(req.full_untruncated_fill_ids):
                return None
            padded = np.array([0] * (size - 1) + list(req.full_untruncated_fill_ids), dtype=np.int64)
            view = np.lib.stride_tricks.sliding_window_view(padded[start : start + length + size - 1], size)
            tokens.append(view[:, ::-1])
            positions.append(np.arange(start, start + length))
        if not tokens:
            return None
        places = torch.from_numpy(np.concatenate(positions))
        return torch.from_numpy(np.concatenate(tokens)), places.unsqueeze(-1) < torch.arange(size)
