"""Server around plain `transformers.generate` in static batches, a peer of bench_peers.

The requests that wait when a batch ends form the next batch, padded to its longest prompt. Each request gets its tokens
as they are computed. The batch runs until its longest output ends; finished rows are computed until then.

python tests/bench/generate_server.py MODEL [--dtype bfloat16] [--max-batch 32] [--port 8000]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import torch
import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import StreamingResponse
from transformers import AutoModelForCausalLM, AutoTokenizer, StoppingCriteria

#: Seconds for which the first request of a batch waits for others.
COLLECT_S = 0.02


@dataclass(eq=False)
class Job:
    """Request in a batch. `tokens` gets token ids, and None at the end."""

    prompt: list[int]
    max_tokens: int
    tokens: asyncio.Queue[int | None] = field(default_factory=asyncio.Queue)
    sent: int = 0


class Emit(StoppingCriteria):
    """Callback after each token: it passes new tokens on, and stops the batch when every job has all of its tokens."""

    def __init__(self, jobs: list[Job], loop: asyncio.AbstractEventLoop) -> None:
        self.jobs, self.loop = jobs, loop

    def __call__(self, input_ids: torch.LongTensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        done = []
        for job, token in zip(self.jobs, input_ids[:, -1].tolist(), strict=True):
            if job.sent < job.max_tokens:
                job.sent += 1
                self.loop.call_soon_threadsafe(job.tokens.put_nowait, token)
                if job.sent == job.max_tokens:
                    self.loop.call_soon_threadsafe(job.tokens.put_nowait, None)
            done.append(job.sent >= job.max_tokens)
        return torch.tensor([all(done)] * len(done))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--max-batch", type=int, default=32)
    parser.add_argument("--port", type=int, default=8000)
    options = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=getattr(torch, options.dtype)).eval()
    app, waiting = FastAPI(), asyncio.Queue[Job]()

    def generate(jobs: list[Job], loop: asyncio.AbstractEventLoop) -> None:
        width = max(len(job.prompt) for job in jobs)
        ids = torch.tensor([[0] * (width - len(job.prompt)) + job.prompt for job in jobs])
        mask = torch.tensor([[0] * (width - len(job.prompt)) + [1] * len(job.prompt) for job in jobs])
        longest = max(job.max_tokens for job in jobs)
        lengths = {"min_new_tokens": longest, "max_new_tokens": longest}
        with torch.inference_mode():
            emit = [Emit(jobs, loop)]
            model.generate(ids, attention_mask=mask, do_sample=False, pad_token_id=0, stopping_criteria=emit, **lengths)

    async def serve() -> None:
        loop = asyncio.get_running_loop()
        while True:
            jobs = [await waiting.get()]
            await asyncio.sleep(COLLECT_S)
            while len(jobs) < options.max_batch and not waiting.empty():
                jobs.append(waiting.get_nowait())
            await asyncio.to_thread(generate, jobs, loop)

    @app.get("/health")
    async def health() -> dict[str, str]:
        return {}

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [{"id": options.model, "object": "model"}]}

    @app.post("/v1/completions")
    async def completions(request: Request) -> StreamingResponse:
        body = await request.json()
        prompt = body["prompt"]
        job = Job(tokenizer(prompt).input_ids if isinstance(prompt, str) else list(prompt), body["max_tokens"])
        waiting.put_nowait(job)
        head = {"id": "cmpl-0", "object": "text_completion", "created": int(time.time()), "model": options.model}

        async def stream() -> AsyncIterator[str]:
            while (token := await job.tokens.get()) is not None:
                choice = {"index": 0, "text": tokenizer.decode([token]) or " ", "finish_reason": None}
                yield f"data: {json.dumps({**head, 'choices': [choice]})}\n\n"
            usage = {"prompt_tokens": len(job.prompt), "completion_tokens": job.sent}
            usage["total_tokens"] = sum(usage.values())
            last = {"index": 0, "text": "", "finish_reason": "length"}
            yield f"data: {json.dumps({**head, 'choices': [last], 'usage': usage})}\n\ndata: [DONE]\n\n"

        return StreamingResponse(stream(), media_type="text/event-stream")

    @app.on_event("startup")
    async def start() -> None:
        app.state.serving = asyncio.create_task(serve())

    uvicorn.run(app, host="127.0.0.1", port=options.port, log_level="warning")


if __name__ == "__main__":
    main()
