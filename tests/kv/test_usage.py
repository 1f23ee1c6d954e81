"""Use of KV memory: held, empty and cached tokens, by scheduling policy."""

from __future__ import annotations

from fakes import Harness, make_request, tokens

from llmsched.engine.kv.layout import KVLayout
from llmsched.engine.kv.pool import KVUsage


def use(harness: Harness) -> KVUsage:
    return harness.scheduler.kv.usage(harness.scheduler.running)


def test_continuous_batching_holds_what_the_tokens_need() -> None:
    """A prompt of 20 tokens holds two blocks of 16 with 12 places empty; each further token fills one."""
    harness = Harness(40, budget=256)
    harness.add(make_request("a", tokens(20), 3))
    assert use(harness) == KVUsage(0, 0, 0, 640)
    harness.step()
    assert use(harness) == KVUsage(32, 12, 0, 640)
    harness.step()
    assert use(harness) == KVUsage(32, 11, 0, 640)
    harness.step()
    assert use(harness) == KVUsage(0, 0, 16, 640), "its first block can be found again"


def test_a_shared_block_counts_once_and_is_full() -> None:
    harness = Harness(40, budget=256)
    harness.add(make_request("a", tokens(40), 9))
    harness.step()
    harness.add(make_request("b", [*tokens(32), *tokens(4, seed=1)], 9, arrival=1.0))
    harness.step()
    assert use(harness).held == 4 * 16, "two shared, and one each of its own"
    assert use(harness).empty == (48 - 41) + (48 - 36)


def test_blocks_outside_a_window_are_cached() -> None:
    """Two groups with a window of 40 keep the last 4 of the 7 blocks of 100 tokens."""
    harness = Harness(64, budget=256, layout=KVLayout(16, 1, 2, 40))
    harness.add(make_request("a", tokens(100), 9))
    harness.step()
    assert use(harness) == KVUsage((7 + 2 * 4) * 16, 3 * 12, 2 * 3 * 16, 64 * 16)


def test_a_static_batch_reserves_the_maximum_length_until_its_last_request_ends() -> None:
    harness = Harness(40, budget=256, max_num_seqs=4, scheduling_policy="static", max_model_len=160)
    harness.add(make_request("short", tokens(10), 2, arrival=0.0))
    harness.add(make_request("long", tokens(10, seed=1), 30, arrival=1.0))
    harness.step()
    assert use(harness) == KVUsage(320, 320 - 20, 0, 640)
    harness.step()
    harness.step()
    assert use(harness) == KVUsage(320, (160 - 11) + (160 - 12), 0, 640), "the short one has ended with 11 computed"
    harness.run()
    assert use(harness).held == 0
    assert use(harness).empty == 0
