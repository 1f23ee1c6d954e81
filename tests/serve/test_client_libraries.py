"""Libraries that applications call servers with: chats, tools, structured output and streams on a small real model."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel
from scripted import LiveServer
from tiny_models import build_model, build_tokenizer
from tool_templates import TOOL_TEMPLATES

from llmsched.engine.build import build_engine
from llmsched.engine.config import EngineConfig
from llmsched.engine.text.tokenizer import Tokenizer

MODEL = "tiny"
MESSAGES: Any = [{"role": "user", "content": "Paint the wall."}]
#: Keeps the model from filling its answer with white space.
_TOKENIZER = Tokenizer(build_tokenizer())
BLANKS = {str(i): -100 for i in range(300) if (text := _TOKENIZER.token_bytes(i)) and not text.strip()}


class Paint(BaseModel):
    """Paint a wall."""

    color: Literal["red", "blue"]
    coats: Literal[1, 2, 3]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    folder = tmp_path_factory.mktemp("model")
    build_model("llama").save_pretrained(folder)
    build_tokenizer(chat_template=TOOL_TEMPLATES["hermes"]).save_pretrained(folder)
    config = EngineConfig(model=str(folder), dtype="float32", device="cpu", num_gpu_blocks_override=256)
    server = LiveServer(build_engine(config), name=MODEL).start()
    yield server
    server.close()
    server.engine.check_integrity()


@pytest.fixture
def url(server: LiveServer) -> str:
    return f"{server.url}/v1"


# -- openai-python, asynchronous ----------------------------------------------------------------------------------


def test_openai_async_streams_side_by_side(url: str) -> None:
    async def stream(client: openai.AsyncOpenAI, seed: int) -> str:
        chunks = await client.chat.completions.create(
            model=MODEL, messages=MESSAGES, seed=seed, max_tokens=12, stream=True
        )
        return "".join([chunk.choices[0].delta.content or "" async for chunk in chunks])

    async def main() -> tuple[list[str], list[str | None]]:
        async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
            streamed = await asyncio.gather(*(stream(client, seed) for seed in range(8)))
            wholes = [
                await client.chat.completions.create(model=MODEL, messages=MESSAGES, seed=seed, max_tokens=12)
                for seed in range(8)
            ]
            return streamed, [whole.choices[0].message.content for whole in wholes]

    streamed, wholes = asyncio.run(main())
    assert streamed == wholes


def test_openai_cancellation_ends_the_request(url: str, server: LiveServer) -> None:
    fields: dict[str, Any] = {"model": MODEL, "prompt": "x", "max_tokens": 200, "extra_body": {"ignore_eos": True}}

    async def main() -> None:
        async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
            whole = asyncio.create_task(client.completions.create(**fields))
            stream = await client.completions.create(stream=True, **fields)
            async for _ in stream:
                break
            await stream.close()
            whole.cancel()
            with pytest.raises(asyncio.CancelledError):
                await whole
            while server.engine.has_work():
                await asyncio.sleep(0.01)

    before = server.engine.stats().generation_tokens
    asyncio.run(asyncio.wait_for(main(), 30))
    assert server.engine.stats().generation_tokens - before < 400
    assert server.engine.stats().blocks_used == 0


def test_openai_responses_with_a_schema(url: str) -> None:
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client:
        answer = client.responses.parse(model=MODEL, input="x", text_format=Paint, max_output_tokens=400)
    assert isinstance(answer.output_parsed, Paint)


# -- LangChain ------------------------------------------------------------------------------------------------------


@pytest.fixture
def langchain(url: str) -> Any:
    from langchain_openai import ChatOpenAI

    return ChatOpenAI(
        base_url=url, api_key="none", model=MODEL, seed=1, max_tokens=80, max_retries=0, logit_bias=BLANKS
    )


def test_langchain_bind_tools(langchain: Any) -> None:
    (call,) = langchain.bind_tools([Paint], tool_choice="required", parallel_tool_calls=False).invoke("x").tool_calls
    assert call["name"] == "Paint"
    assert Paint.model_validate(call["args"])


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_langchain_with_structured_output(langchain: Any, method: str) -> None:
    assert isinstance(langchain.with_structured_output(Paint, method=method).invoke("x"), Paint)


def test_langchain_streams(langchain: Any) -> None:
    chunks = list(langchain.stream("x", stream_usage=True))
    assert "".join(chunk.content for chunk in chunks) == langchain.invoke("x").content
    (usage,) = (chunk.usage_metadata for chunk in chunks if chunk.usage_metadata)
    assert usage["output_tokens"] > 0


# -- pydantic-ai ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("native", [False, True], ids=["tool output", "native output"])
def test_pydantic_ai_output_type(url: str, native: bool) -> None:
    from pydantic_ai import Agent, NativeOutput
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    model = OpenAIChatModel(MODEL, provider=OpenAIProvider(base_url=url, api_key="none"))
    settings: Any = {"max_tokens": 80, "seed": 1, "logit_bias": BLANKS, "parallel_tool_calls": False}
    agent: Any = Agent(model, output_type=NativeOutput(Paint) if native else Paint, model_settings=settings)
    assert isinstance(agent.run_sync("x").output, Paint)


# -- LiteLLM --------------------------------------------------------------------------------------------------------


@pytest.fixture
def litellm(url: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # it would ask a web site for prices
    import litellm

    fields = {"model": f"openai/{MODEL}", "api_base": url, "api_key": "none", "messages": MESSAGES, "num_retries": 0}
    return lambda **more: litellm.completion(**fields, max_tokens=80, seed=1, **more)


def test_litellm_chat_and_stream(litellm: Any) -> None:
    whole = litellm()
    text = "".join(chunk.choices[0].delta.content or "" for chunk in litellm(stream=True))
    assert text == (whole.choices[0].message.content or "")
    assert whole.usage.completion_tokens > 0


def test_litellm_tools_and_schema(litellm: Any) -> None:
    tools = [openai.pydantic_function_tool(Paint)]
    answer = litellm(tools=tools, tool_choice="required", parallel_tool_calls=False, logit_bias=BLANKS)
    (call,) = answer.choices[0].message.tool_calls
    assert Paint.model_validate_json(call.function.arguments)
    answer = litellm(response_format=Paint, logit_bias=BLANKS)
    assert Paint.model_validate_json(answer.choices[0].message.content)
