"""Types of the public names, for a type checker. mypy reads this file with all others; nothing runs it.

`assert_type` fails if a declared type changes. A `type: ignore` fails if the mistake beside it is no longer found,
because mypy reports ignores that nothing needs.
"""

from collections.abc import AsyncGenerator, Sequence
from typing import Literal, assert_type

from vllm_lite import (
    LLM,
    AsyncClient,
    BeamSearchOutput,
    BeamSearchParams,
    CompletionOutput,
    EngineConfig,
    Logprob,
    RequestOutput,
    RequestOutputKind,
    SamplingParams,
    TextPrompt,
    TokensPrompt,
)
from vllm_lite.config import ResolvedConfig


def offline(llm: LLM, text: TextPrompt, tokens: TokensPrompt) -> None:
    params = SamplingParams(temperature=0.5, stop=["\n"])
    assert_type(llm.generate("a text", params), list[RequestOutput])
    assert_type(llm.generate(["a text", "another"], [params, params], use_tqdm=False), list[RequestOutput])
    assert_type(llm.generate([text, text]), list[RequestOutput])
    assert_type(llm.generate([tokens, tokens]), list[RequestOutput])
    assert_type(llm.generate(prompt_token_ids=[[1, 2], [3]]), list[RequestOutput])
    assert_type(llm.chat([{"role": "user", "content": "hello"}]), list[RequestOutput])
    assert_type(llm.beam_search("a text", BeamSearchParams(beam_width=2, max_tokens=3)), list[BeamSearchOutput])
    assert_type(llm.get_default_sampling_params(), SamplingParams)
    assert_type(llm.config, ResolvedConfig)
    llm.generate(5)  # type: ignore[arg-type]
    llm.generate("a text", {"temperature": 0.5})  # type: ignore[arg-type]


async def online(client: AsyncClient) -> None:
    assert_type(await AsyncClient.connect("ipc:///engine"), AsyncClient)
    stream = client.generate("a text", SamplingParams(n=2), request_id="r")
    assert_type(stream, AsyncGenerator[RequestOutput, None])
    async for output in stream:
        assert_type(output, RequestOutput)
    assert_type(await client.fork("r", 3), list[AsyncGenerator[RequestOutput, None]])
    await client.abort("r", samples=[1])
    await client.generate("a text")  # type: ignore[misc]


def outputs(output: RequestOutput) -> None:
    assert_type(output.prompt, str | None)
    assert_type(output.outputs, list[CompletionOutput])
    assert_type(output.outputs[0].token_ids, list[int])
    assert_type(output.outputs[0].logprobs, list[dict[int, Logprob]] | None)
    assert_type(output.outputs[0].finish_reason, Literal["stop", "length", "abort", "error"] | None)
    assert_type(output.prompt_logprobs, list[dict[int, Logprob] | None] | None)


def parameters(params: SamplingParams) -> None:
    assert_type(params.n, int)
    assert_type(params.temperature, float)
    assert_type(params.seed, int | None)
    assert_type(params.max_tokens, int | None)
    assert_type(params.stop, Sequence[str])
    assert_type(params.logit_bias, dict[int, float] | None)
    assert_type(params.output_kind, RequestOutputKind)
    assert_type(params.clone(n=2), SamplingParams)
    assert_type(SamplingParams.from_optional(n=None), SamplingParams)
    params.n = 2  # type: ignore[misc]
    SamplingParams(temperature="hot")  # type: ignore[arg-type]
    SamplingParams(temprature=0.5)  # type: ignore[call-arg]


def configuration() -> None:
    config = EngineConfig.load({"model": "demo"})
    assert_type(config, EngineConfig)
    assert_type(config.max_num_seqs, int | None)
    assert_type(config.served_model_name, str | None)
    assert_type(config.block_size, int)
    resolved = config.resolve(max_position_embeddings=2048, dtype="float32", model_path="/model")
    assert_type(resolved, ResolvedConfig)
    assert_type(resolved.served_model_name, str)
    assert_type(resolved.tokenizer, str)
    assert_type(resolved.device, Literal["cpu", "cuda"])
    assert_type((resolved.max_model_len, resolved.max_num_seqs, resolved.max_num_batched_tokens), tuple[int, int, int])
    assert_type((resolved.swap_space, resolved.cpu_kvcache_space), tuple[float, float])
    EngineConfig(max_num_seqs="4")  # type: ignore[arg-type]
    config.block_size = 8  # type: ignore[misc]
    ResolvedConfig(model="/model")  # type: ignore[call-arg]
