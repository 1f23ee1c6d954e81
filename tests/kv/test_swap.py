"""KV of preempted requests in host memory: it is restored unchanged, and no host block is lost."""

from __future__ import annotations

import pytest
from fakes import reference, tokens
from kv_driver import KVDriver

from llmsched.engine.errors import ConfigError
from llmsched.engine.kv.swap import SwapSpace, plan_swap
from llmsched.engine.request import Request


def generated(driver: KVDriver, request: Request, steps: int) -> None:
    """Decode some tokens; the fake executor checks the KV of all earlier tokens."""
    for _ in range(steps):
        driver.step({request: 1})
    output = request.token_ids[request.num_prompt_tokens :]
    assert output == reference(request.token_ids[: request.num_prompt_tokens], len(output))


def started(driver: KVDriver, prompt: list[int], steps: int = 5) -> Request:
    request = driver.come(prompt)
    driver.step({request: len(prompt)})
    generated(driver, request, steps)
    return request


def use_up(driver: KVDriver) -> None:
    """Overwrite every available block, and drop the prefix cache."""
    driver.serve(tokens(driver.kv.pool.num_available * 16, seed=50))
    driver.kv.pool.drop_cached()


def test_kv_is_restored_after_its_blocks_were_overwritten() -> None:
    driver = KVDriver(8, num_host_blocks=8)
    request = started(driver, tokens(40))
    computed = request.num_computed_tokens
    assert driver.kv.num_swapped(request) == 3
    driver.swap_out(request)
    assert (request.block_table, request.num_computed_tokens) == (None, 0)
    assert driver.kv.pool.num_used == 0
    use_up(driver)
    assert driver.admit(request).num_tokens == 0
    assert request.num_computed_tokens == computed
    generated(driver, request, 20)
    assert driver.kv.swap.num_free == 8


def test_blocks_in_the_cache_are_taken_from_there() -> None:
    driver = KVDriver(8, num_host_blocks=8)
    request = started(driver, tokens(40))
    driver.swap_out(request)
    driver.step({})
    hit = driver.admit(request)
    assert hit.num_tokens == 32
    assert driver.kv.swap.take()[1] == [(2, int(request.block_table.ids[0, 2]))]  # type: ignore[union-attr]


def test_blocks_that_others_hold_are_not_copied() -> None:
    driver = KVDriver(12, num_host_blocks=8)
    other = started(driver, tokens(40))
    request = started(driver, [*tokens(32), *tokens(20, seed=1)])
    assert driver.kv.num_swapped(request) == 2
    driver.swap_out(request)
    use_up(driver)
    assert driver.admit(request).num_tokens == 32
    generated(driver, request, 20)
    generated(driver, other, 3)


def test_if_shared_blocks_were_evicted_all_is_computed_again() -> None:
    driver = KVDriver(12, num_host_blocks=8)
    other = started(driver, tokens(40))
    request = started(driver, [*tokens(32), *tokens(20, seed=1)])
    driver.swap_out(request)
    driver.leave(other)
    use_up(driver)
    driver.admit(request)
    assert request.num_computed_tokens == 0
    assert request.swapped is None
    assert driver.kv.swap.num_free == 8
    driver.step({request: 100})
    generated(driver, request, 5)


def test_host_blocks_are_freed_if_the_cache_has_all() -> None:
    driver = KVDriver(12, num_host_blocks=8)
    request = driver.come(tokens(64))
    driver.step({request: 32})
    driver.swap_out(request)
    driver.serve(tokens(64))
    assert driver.admit(request).num_tokens == 63
    assert driver.kv.swap.num_free == 8
    driver.step({request: 1})
    generated(driver, request, 5)


def test_host_blocks_of_aborted_requests_are_free_at_once() -> None:
    driver = KVDriver(8, num_host_blocks=4)
    request = started(driver, tokens(40))
    driver.swap_out(request)
    assert driver.kv.swap.num_free == 1
    driver.kv.swap.discard(request)
    driver.swapped.clear()
    assert driver.kv.swap.num_free == 4
    assert driver.kv.swap.take() == ([], []), "what was given up is not copied either"
    driver.check()


def test_a_host_block_that_is_read_in_a_step_is_not_written_in_it() -> None:
    driver = KVDriver(12, num_host_blocks=3)
    first = started(driver, tokens(40))
    second = started(driver, tokens(40, seed=1))
    driver.swap_out(first)
    driver.step({second: 1})
    use_up(driver)
    driver.admit(first)
    assert driver.kv.swap.num_free == 0
    assert not driver.may_swap(second)
    driver.step({first: 1})
    assert driver.may_swap(second)
    generated(driver, first, 3)


def test_a_block_reallocated_before_its_restore() -> None:
    """The last copy to a block wins: a block copy noted after a restore replaces it."""
    driver = KVDriver(6, num_host_blocks=6)
    source = started(driver, tokens(24), 1)
    request = started(driver, tokens(24, seed=1), 1)
    driver.swap_out(request)
    driver.serve(tokens(64, seed=2))
    driver.kv.pool.drop_cached()
    driver.admit(request)
    restored = set(request.block_table.held_blocks())  # type: ignore[union-attr]
    driver.leave(request)
    heir = driver.come(tokens(30), name="heir")
    assert {destination for _, destination in driver.next_copies()} & restored
    driver.step({heir: 30, source: 1})
    generated(driver, heir, 3)


def test_unwritten_blocks_are_not_saved() -> None:
    driver = KVDriver(8, num_host_blocks=8)
    request = driver.come(tokens(40))
    assert not driver.may_swap(request)
    with pytest.raises(AssertionError, match="has not been in a step yet"):
        driver.swap_out(request)


def test_a_lost_host_block_is_detected() -> None:
    driver = KVDriver(8, num_host_blocks=4)
    request = started(driver, tokens(40))
    driver.swap_out(request)
    driver.swapped.clear()
    with pytest.raises(AssertionError, match="a place in host memory is lost"):
        driver.check()


def test_num_kept_is_what_the_cache_still_holds() -> None:
    driver = KVDriver(10, num_host_blocks=8)
    request = started(driver, tokens(80))
    assert driver.kv.num_kept(request, None) == 0, "nobody else holds anything of it"
    assert driver.kv.pool.num_available == 4
    assert [driver.kv.num_kept(request, demand) for demand in (0, 4, 5, 8, 9, 20)] == [5, 5, 4, 1, 0, 0]
    other = started(driver, [*tokens(48), 5])
    assert driver.kv.num_kept(request, None) == 3
    assert driver.kv.num_kept(request, 20) == 3
    assert driver.kv.num_kept(other, None) == 3


def test_swap_space_is_whole_blocks_of_memory_that_is_there() -> None:
    assert plan_swap(10_000, 3_000, 1 << 30).num_blocks == 3
    assert plan_swap(0, 3_000, -5).num_blocks == 0
    with pytest.raises(ConfigError, match=r"1000 B is less than a KV block \(2.93 KiB\)"):
        plan_swap(1000, 3_000, 1 << 30)
    with pytest.raises(ConfigError, match=r"2.00 GiB is more than the 1.00 GiB of host memory that remain"):
        plan_swap(2 << 30, 3_000, 1 << 30)
    assert SwapSpace().num_free == 0
