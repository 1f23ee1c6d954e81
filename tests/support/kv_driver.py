"""Driver of a KV manager. Its fake executor checks the contents of blocks."""

from __future__ import annotations

from fakes import FakeExecutor, make_request

from llmsched.engine.executor.base import ScheduledRow, StepPlan
from llmsched.engine.kv.layout import KVLayout
from llmsched.engine.kv.manager import KVManager
from llmsched.engine.kv.prefix_tree import PrefixHit, PrefixNode, encode
from llmsched.engine.kv.swap import SwapSpace
from llmsched.engine.request import Request

#: Most running requests of a model with recurrent layers.
MAX_RUNNING = 4


class KVDriver:
    """Driver that admits, computes and releases requests at a test's command, with the calls that a scheduler makes."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int = 16,
        max_pinned_blocks: int = 0,
        num_host_blocks: int = 0,
        layout: KVLayout | None = None,
    ) -> None:
        self.kv = KVManager(
            num_blocks,
            layout or KVLayout(block_size),
            max_pinned_blocks=max_pinned_blocks,
            swap=SwapSpace(num_host_blocks, num_states=num_host_blocks and 2),
            num_states=MAX_RUNNING + 3,
            max_pinned_states=2,
            max_running=MAX_RUNNING,
        )
        self.executor = FakeExecutor(num_blocks, block_size, num_host_blocks, layout)
        self.running: list[Request] = []
        self.swapped: list[Request] = []

    @property
    def is_full(self) -> bool:
        return self.kv.states is not None and len(self.running) == MAX_RUNNING

    def come(self, prompt: list[int], max_tokens: int = 100, salt: str = "", name: str | None = None) -> Request:
        """Admit a new request with this prompt, and return the request."""
        request = make_request(name or f"r{id(prompt)}-{len(self.running)}", prompt, max_tokens, cache_salt=salt)
        self.admit(request)
        return request

    def find(self, prompt: list[int], salt: str = "") -> int:
        """Return the number of tokens that a new request would find in the cache."""
        return self.kv.prefix_cache.find(make_request("probe", prompt, cache_salt=salt)).num_tokens

    def admit(self, request: Request) -> PrefixHit:
        hit = self.kv.prefix_cache.find(request)
        missing = self.kv.num_missing(request, hit)
        assert missing <= self.kv.pool.num_available
        before = self.kv.pool.num_available
        num_saved = request.swapped.num_tokens if request.swapped is not None else 0
        num_restored = self.kv.admit(request, hit)
        assert request.num_computed_tokens == (num_saved if num_restored else hit.num_tokens)
        if request in self.swapped:
            self.swapped.remove(request)
        assert before - self.kv.pool.num_available == missing
        self.running.append(request)
        return hit

    def step(self, chunks: dict[Request, int]) -> None:
        """Compute the next `chunks[request]` tokens of each request, or fewer if fewer are left.

        A request whose tokens have all been computed gets a new token.
        """
        rows = []
        for request, chunk in chunks.items():
            self.kv.blocks.grow(request)
            start = request.num_computed_tokens
            count = self.kv.blocks.reach(request, start + min(chunk, request.num_tokens - start)) - start
            assert count > 0
            sample, state = start + count == request.num_tokens, self.kv.row_state(request, count)
            rows.append(ScheduledRow(request, start, count, request.table.ids, sample, state=state))
        moves = self.kv.take_state_moves()
        results = self.executor.execute(
            StepPlan(rows, (), self.kv.copies.take(), *self.kv.swap.take(), state_moves=moves)
        ).rows
        for row, result in zip(rows, results, strict=True):
            request = row.sequence
            assert isinstance(request, Request)
            request.num_computed_tokens += row.num_tokens
            self.kv.commit(request)
            if result.token_id is not None:
                request.token_ids.append(result.token_id)
        self.check()

    def next_copies(self) -> list[tuple[int, int]]:
        """Return the block copies of the next step as (source, destination)."""
        return self.kv.copies.pending()

    def leave(self, request: Request) -> None:
        self.running.remove(request)
        self.kv.release(request)

    def swap_out(self, request: Request) -> None:
        self.running.remove(request)
        self.kv.swap_out(request)
        self.swapped.append(request)

    def may_swap(self, request: Request) -> bool:
        """Return True if a step has computed tokens of the request since its admission and host memory has room."""
        written = request.num_computed_tokens > request.table.num_initial
        return written and self.kv.may_swap(request, self.kv.num_swapped(request))

    def serve(self, prompt: list[int], salt: str = "") -> Request:
        """Admit a new request, compute its prompt in one step, release it, and return it."""
        request = self.come(prompt, salt=salt)
        self.step({request: len(prompt)})
        self.leave(request)
        return request

    def check(self) -> None:
        """Check the manager's integrity, and that each node of the prefix tree has the KV and state of its tokens."""
        self.kv.check_integrity(self.running, self.swapped)
        for root in self.kv.prefix_cache.tree._roots.values():
            self._check_below(root, b"")

    def _check_below(self, node: PrefixNode, prefix: bytes) -> None:
        for child in node.children.values():
            tokens = prefix + child.key
            if child.state is not None:
                assert encode(self.executor.states[child.state]) == tokens, f"state {child.state}"
            for block in child.blocks + child.window_blocks:
                assert self.executor.kv[block].astype("int32").tobytes() == child.key, f"block {block}"
            self._check_below(child, tokens)
