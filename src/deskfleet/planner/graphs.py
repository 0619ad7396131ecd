"""Which batch sizes a decode graph is captured for. Owns the rule; knows no engine's flags and no memory."""

from __future__ import annotations

from deskfleet.planner.checks import at_least


def capture_sizes(max_num_seqs: int, num_drafts: int) -> tuple[int, ...]:
    """Rows of every decode batch that can occur: k * n and (k + 1) * n for n requests of k drafts, ascending.

    Exact, because a kernel that may hang on a padded batch must never be given one: k * n is what drafting runs, k + 1
    rows a request what verification runs. Without drafts 1 to `max_num_seqs`. Published (S1-47) for k = 5 and 8
    requests: 5, 6, 10, 12, 15, ... 42, 48, without 45. Raises ConfigError.
    """
    at_least(1, max_num_seqs=max_num_seqs)
    at_least(0, num_drafts=num_drafts)
    rows = {num_drafts, num_drafts + 1} - {0}
    return tuple(sorted({row * n for row in rows for n in range(1, max_num_seqs + 1)}))


def max_capture_size(max_num_seqs: int, num_drafts: int) -> int:
    """Rows of the largest decode batch: `max_num_seqs` * (`num_drafts` + 1). Published (S4-17): 6 * 4 = 24."""
    return capture_sizes(max_num_seqs, num_drafts)[-1]


__all__ = ["capture_sizes", "max_capture_size"]
