"""HTTP server with a scripted model. A test sets the model's outputs, and when it waits or fails."""

from __future__ import annotations

import asyncio
import json
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from attacks import ask
from configs import resolved
from tiny_models import CHAT_TEMPLATE, VOCAB_SIZE, build_tokenizer
from tokenizers import AddedToken

from llmsched.cli.serve import lifecycle
from llmsched.cli.serve.access import Access
from llmsched.cli.serve.app import build_app
from llmsched.cli.serve.http_limits import HttpLimits
from llmsched.cli.serve.request_log import RequestObserver
from llmsched.engine.async_engine import AsyncEngine
from llmsched.engine.core import Engine
from llmsched.engine.executor.base import RowResult, ScheduledRow, StepPlan, StepResult, SynchronousExecutor
from llmsched.engine.kv.manager import make_kv
from llmsched.engine.model.loader import ModelInfo
from llmsched.engine.request import Sequence, TokenLogprob
from llmsched.engine.text.tokenizer import Tokenizer

EOS = 2
MODEL = "scripted"


def logprob_of(token_id: int) -> float:
    """Return the log-probability that the scripted model gives a token at any position."""
    return -1.0 - token_id / 64


@dataclass
class Script:
    """Behaviour of the scripted model. By default, each output is the token ids of `alphabet`, over and over.

    `outputs` maps the ids of a prompt to the ids of its output. No step begins while `gate` is cleared. A step takes
    `step_s` seconds. The executor raises `failure` after `fail_at_step` steps. `row_error` is the error of the next row
    that samples.
    """

    alphabet: list[int]
    outputs: dict[tuple[int, ...], list[int]] = field(default_factory=dict)
    gate: threading.Event = field(default_factory=threading.Event)
    fail_at_step: int | None = None
    failure: BaseException = field(default_factory=lambda: RuntimeError("scripted failure"))
    row_error: str | None = None
    step_s: float = 0.0

    def __post_init__(self) -> None:
        self.gate.set()

    def next_token(self, sequence: Sequence) -> int:
        position = sequence.num_output_tokens
        forced = self.outputs.get(tuple(sequence.token_ids[: sequence.num_prompt_tokens]))
        if forced is not None:
            return forced[position] if position < len(forced) else EOS
        return self.alphabet[position % len(self.alphabet)]


class ScriptedExecutor(SynchronousExecutor):
    """Executor that follows the script and computes nothing."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.steps = 0
        self._pause = threading.Event()

    def execute(self, plan: StepPlan) -> StepResult:
        self.script.gate.wait()
        if self.script.step_s:
            self._pause.wait(self.script.step_s)
        self.steps += 1
        if self.script.fail_at_step is not None and self.steps > self.script.fail_at_step:
            raise self.script.failure
        return StepResult([self._row(row) for row in plan.rows], elapsed=0.0)

    def _row(self, row: ScheduledRow) -> RowResult:
        sequence, result = row.sequence, RowResult()
        if sequence.sampling.prompt_logprobs is not None:
            end = min(row.start + row.num_tokens + 1, sequence.num_prompt_tokens)
            ids = sequence.token_ids[row.start + 1 : end]
            result.prompt_logprobs = [self._logprob(i, sequence.sampling.prompt_logprobs) for i in ids]
        if not row.sample:
            return result
        if self.script.row_error is not None:
            result.error, self.script.row_error = self.script.row_error, None
            return result
        result.token_id = self.script.next_token(sequence)
        if sequence.sampling.logprobs is not None:
            result.logprob = self._logprob(result.token_id, sequence.sampling.logprobs)
        return result

    @staticmethod
    def _logprob(token_id: int, count: int) -> TokenLogprob:
        others = ((i, logprob_of(i) - 10) for i in range(40, 40 + count) if i != token_id)
        best = ((token_id, logprob_of(token_id)), *others)
        return TokenLogprob(token_id, logprob_of(token_id), best[:count])


class LiveServer:
    """Engine behind the complete HTTP server on a real socket, in a thread of this process."""

    def __init__(
        self,
        engine: Engine,
        *,
        name: str = MODEL,
        access: Access | None = None,
        grace_s: float = 5.0,
        http: HttpLimits | None = None,
        step_timeout_s: float = 0.0,
        observers: Collection[RequestObserver] = (),
        ui: bool = True,
    ) -> None:
        self.engine = engine
        self._observers = observers
        self._ui = ui
        self._step_timeout_s = step_timeout_s
        self.tokenizer = engine.tokenizer
        self.listeners = lifecycle.listen("127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self.listeners[0].getsockname()[1]}"
        self.exit_code: int | None = None
        self._name, self._access, self._grace_s = name, access, grace_s
        self._limits = http
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self.run()), daemon=True)

    def ids(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False)

    def start(self) -> Self:
        self._thread.start()
        assert self._ready.wait(20)
        return self

    def drain(self) -> None:
        """Start to drain, as the first SIGTERM does."""
        self._server.handle_exit(signal.SIGTERM, None)

    def join(self, timeout: float = 20) -> int | None:
        """Wait at most `timeout` seconds for the end of the server, and return its exit code."""
        self._thread.join(timeout)
        assert not self._thread.is_alive(), "the server does not end"
        return self.exit_code

    def close(self) -> None:
        if self._thread.is_alive():
            self.drain()
            self.join()

    async def run(self) -> None:
        self.service = AsyncEngine(self.engine, step_timeout_s=self._step_timeout_s)
        self.service.start()
        self.app = build_app(
            self.service, self._name, self._access, self._limits, observers=self._observers, ui=self._ui
        )
        self._server = lifecycle.Server(
            self.app, self.service, self._limits, grace_s=self._grace_s, on_ready=self._ready.set
        )
        await self._server.serve(self.listeners)
        self.exit_code = self._server.exit_code


class ScriptedServer(LiveServer):
    """Live server whose engine has a scripted executor."""

    def __init__(
        self,
        *,
        bos: bool = False,
        chat_template: str | None = CHAT_TEMPLATE,
        special_tokens: tuple[str, ...] = (),
        sampling_defaults: dict[str, float | int] | None = None,
        num_blocks: int = 64,
        access: Access | None = None,
        grace_s: float = 5.0,
        step_timeout_s: float = 0.0,
        http: HttpLimits | None = None,
        observers: Collection[RequestObserver] = (),
        ui: bool = True,
        **config: Any,
    ) -> None:
        fast = build_tokenizer(bos=bos, chat_template=chat_template)
        fast.backend_tokenizer.add_special_tokens([AddedToken(text) for text in special_tokens])
        tokenizer = Tokenizer(fast)
        self.script = Script([tokenizer.encode(chr(ord("a") + i), add_special_tokens=False)[0] for i in range(26)])
        self.executor = ScriptedExecutor(self.script)
        settings = {"max_model_len": 512, "max_num_batched_tokens": 64, "max_num_seqs": 8} | config
        info = ModelInfo(MODEL, "llama", VOCAB_SIZE, 512, frozenset({EOS}), sampling_defaults or {})
        resolved_config = resolved(**settings)
        engine = Engine(resolved_config, info, tokenizer, self.executor, make_kv(resolved_config, num_blocks))
        shared = {"access": access, "grace_s": grace_s, "http": http, "observers": observers, "ui": ui}
        super().__init__(engine, step_timeout_s=step_timeout_s, **shared)

    def force(self, prompt: str | list[int], output: str | list[int]) -> None:
        """Make the model answer `prompt` with exactly `output`, then end-of-sequence."""
        ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
        self.script.outputs[tuple(ids)] = self.ids(output) if isinstance(output, str) else output

    def close(self) -> None:
        self.script.gate.set()
        super().close()


@contextmanager
def scripted_process(
    step_s: float = 0.0, log: Path | None = None, **settings: Any
) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Run `main` with these settings in a new process. Once the server answers, yield the process and the URL."""
    child = subprocess.Popen(
        [sys.executable, __file__, str(step_s), json.dumps(settings)],
        stdout=subprocess.PIPE,
        stderr=None if log is None else log.open("w"),
        text=True,
    )
    try:
        assert child.stdout is not None
        url = child.stdout.readline().strip()
        assert ask(url, "/health")[0] == 200
        yield child, url
    finally:
        child.kill()
        child.wait()


def main() -> None:
    """Run a scripted server in this process and print its URL, for tests that send signals to a process.

    Usage: python scripted.py STEP_SECONDS [JSON], where JSON has arguments of ScriptedServer and `nofile`, the limit
    of open files.
    """
    given = json.loads(sys.argv[2]) if len(sys.argv) > 2 else {}
    if nofile := given.pop("nofile", None):
        resource.setrlimit(resource.RLIMIT_NOFILE, (nofile, nofile))
    for name, kind in (("http", HttpLimits), ("access", Access)):
        if name in given:
            given[name] = kind(**given[name])
    server = ScriptedServer(**{"grace_s": 1.0} | given)
    server.script.step_s = float(sys.argv[1])
    print(server.url, flush=True)
    asyncio.run(server.run())
    sys.exit(server.exit_code)


if __name__ == "__main__":
    main()
