"""The choice among many scores, by many programs, against the operator it computes."""

from __future__ import annotations

import pytest
import torch

from deskfleet.engine.cuda import topk
from deskfleet.engine.ops import reference

pytestmark = [pytest.mark.triton, pytest.mark.filterwarnings("ignore")]


@pytest.mark.parametrize(("ratio", "unit"), [(1, 1), (2, 1), (1, 8)])
def test_the_best_of_several_chunks(device: torch.device, ratio: int, unit: int) -> None:
    """Rows that see less than they may pick, a part of one chunk, whole chunks, and a last one in part; many ties."""
    num_picks, per_block, max_entries = 64, 32 // ratio, 3 * topk.CHUNK - 100
    visible = [40, 65, topk.CHUNK, 2 * topk.CHUNK + 1, max_entries]
    torch.manual_seed(5)
    positions = torch.tensor([count * ratio * unit - 1 for count in visible], dtype=torch.int32)
    slots = torch.tensor([1, 0, 2, 1, 0], dtype=torch.int32)
    table = torch.randperm(3 * (max_entries // per_block + 1)).view(3, -1).to(torch.int32)
    scores = torch.randn(len(visible), max_entries).to(torch.bfloat16)
    scores[:, ::3] = (scores[:, ::3] * 4).round() / 4  # the threshold lies among equal scores
    scores[3, 100:9000] = -torch.inf  # what candidate blocks leave out
    buffers = topk.TopkBuffers(len(visible), max_entries, device)
    shape = (len(visible), num_picks)
    picks, records = (torch.full(shape, -9, dtype=torch.int32, device=device) for _ in range(2))
    for _ in range(2):  # what a step leaves in the workspace is not the next one's
        topk.select(
            scores.to(device), (slots.to(device), positions.to(device), table.to(device)), picks, buffers, records,
            ratio=ratio, unit=unit, block_size=32,
        )  # fmt: skip
    for row, count in enumerate(visible):
        best = torch.full((num_picks,), -1)
        found = reference.top_positions(scores[row : row + 1, :count], num_picks)[0]
        best[: len(found)] = found
        assert torch.equal(picks[row].cpu().long(), best)
        page = table[slots[row].long(), best.clamp(min=0) // per_block].long()
        lies = torch.where(best < 0, -1, page * per_block + best.clamp(min=0) % per_block)
        assert torch.equal(records[row].cpu().long(), lies)
