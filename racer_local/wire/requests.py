"""What a request may hold: OpenAI's fields and our own, checked at the door. What is not known is an error."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from racer_local.config import DRAFTERS, SamplingConfig

MOST_STOPS = 16
MOST_TOP_LOGPROBS = 20
Text = Annotated[str, Field(max_length=1 << 22)]
Tokens = Annotated[list[Annotated[int, Field(ge=0, le=1 << 24)]], Field(min_length=1)]
Finite = Annotated[float, Field(allow_inf_nan=False)]


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, protected_namespaces=())


class RacerOptions(Strict):
    """What is drafted for this answer; `false` in its place is plain decoding."""

    draft: Literal[tuple(DRAFTERS)] | None = Field(None, description="the drafter")  # type: ignore[valid-type]
    max_nodes: int | None = Field(None, ge=1, le=255, description="nodes of a draft tree, root counted")
    exact: bool | None = Field(None, description="plain decoding's token ids, to the bit")
    corpora: list[str] | None = Field(None, max_length=16, description="ids from /v1/corpora to draft from")
    sources: bool = Field(False, description="tell for each token's text which source drafted it")


class StreamOptions(Strict):
    include_usage: bool = False
    include_obfuscation: bool | None = None


class Sampling(Strict):
    """Fields that the two kinds of completion share."""

    model: str | None = Field(None, description="a name from /v1/models; default: the first one")
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    n: int | None = Field(1, ge=1)
    max_tokens: int | None = Field(None, ge=0)
    stop: str | Annotated[list[str], Field(max_length=MOST_STOPS)] | None = None
    temperature: Finite | None = Field(None, ge=0, le=100)
    top_p: Finite | None = Field(None, ge=0, le=1)
    top_k: int | None = Field(None, ge=0, le=1 << 30)
    min_p: Finite | None = Field(None, ge=0, le=1)
    repeat_penalty: Finite | None = Field(None, ge=0.01, le=100)
    frequency_penalty: Finite | None = Field(None, ge=-2, le=2)
    presence_penalty: Finite | None = Field(None, ge=-2, le=2)
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = None
    seed: int | None = None
    racer: RacerOptions | bool | None = None
    user: str | None = Field(None, description="taken and not used, like metadata and the rest below")
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    reasoning_effort: str | None = None
    verbosity: str | None = None
    modalities: list[Literal["text"]] | None = None
    prediction: dict[str, Any] | None = None
    cache_prompt: bool | None = None
    keep_alive: str | int | None = None
    id: str | None = None
    chat_id: str | None = None
    session_id: str | None = None
    audio: None = None
    functions: None = None
    function_call: None = None
    web_search_options: None = None

    @field_validator("logit_bias")
    @classmethod
    def _ids(cls, value: dict[str, float] | None) -> dict[str, float] | None:
        for token in value or {}:
            if not (token.isascii() and token.isdecimal() and len(token) < 9):
                raise ValueError(f"{token!r} is no token id")
        return value

    @model_validator(mode="after")
    def _stream_options(self) -> Sampling:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options needs stream: true")
        return self

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else list(self.stop or [])

    def sampling(self, default: SamplingConfig, number: int, grammar: str | None) -> SamplingConfig:
        """The sampler of the answer of this number: each has a seed of its own."""
        names = ("temperature", "top_p", "top_k", "min_p", "repeat_penalty", "frequency_penalty", "presence_penalty")
        given = {name: value for name in names if (value := getattr(self, name)) is not None}
        seed = default.seed if self.seed is None else self.seed
        if seed is not None:
            seed = -1 if seed == -1 else (seed + number) % 0xFFFFFFFF
        bias = {int(token): value for token, value in (self.logit_bias or {}).items()}
        own = {**vars(default), **given, "seed": seed, "logit_bias": bias, "grammar": grammar}
        return SamplingConfig(**own)


class TextPart(Strict):
    type: Literal["text"]
    text: Text


class FunctionCall(Strict):
    name: str
    arguments: str


class ToolCall(Strict):
    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCall
    index: int | None = None


class Message(Strict):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Text | list[TextPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    refusal: str | None = None
    annotations: list[Any] | None = Field(None, description="taken as an answer had them, and not used")
    audio: None = None
    function_call: None = None

    @model_validator(mode="after")
    def _has_text(self) -> Message:
        if self.content is None and not self.tool_calls:
            raise ValueError("a message needs text as its content")
        if self.tool_calls and self.role != "assistant":
            raise ValueError("only an assistant's message has tool_calls")
        return self

    def plain(self) -> dict[str, Any]:
        """As a chat template takes it."""
        told = self.model_dump(exclude_none=True, exclude={"annotations", "refusal"})
        told["role"] = "system" if self.role == "developer" else self.role
        if isinstance(self.content, list):
            told["content"] = "".join(part.text for part in self.content)
        return told


class Function(Strict):
    name: str = Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Strict):
    type: Literal["function"]
    function: Function


class FunctionName(Strict):
    name: str


class ToolChoice(Strict):
    type: Literal["function"]
    function: FunctionName


class JsonSchema(Strict):
    name: str = "schema"
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Strict):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _has_schema(self) -> ResponseFormat:
        if self.type == "json_schema" and self.json_schema is None:
            raise ValueError("the type json_schema needs a json_schema")
        return self


class ChatRequest(Sampling):
    """POST /v1/chat/completions"""

    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=0)
    tools: list[Tool] | None = Field(None, max_length=128)
    tool_choice: Literal["none", "auto", "required"] | ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    response_format: ResponseFormat | None = None
    logprobs: bool | None = False
    top_logprobs: int | None = Field(None, ge=0, le=MOST_TOP_LOGPROBS)

    @model_validator(mode="after")
    def _consistent(self) -> ChatRequest:
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs: true")
        if self.tool_choice not in (None, "none", "auto") and not self.tools:
            raise ValueError("tool_choice needs tools")
        names = [tool.function.name for tool in self.tools or []]
        if len(set(names)) < len(names):
            raise ValueError("each tool needs a name of its own")
        if isinstance(self.tool_choice, ToolChoice) and self.tool_choice.function.name not in names:
            raise ValueError(f"tool_choice names {self.tool_choice.function.name!r}, which is none of the tools")
        return self

    @property
    def most(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens


class CompletionRequest(Sampling):
    """POST /v1/completions"""

    prompt: Text | Tokens | Annotated[list[Text], Field(min_length=1)] | Annotated[list[Tokens], Field(min_length=1)]
    suffix: Text | None = None
    echo: bool | None = False
    logprobs: int | None = Field(None, ge=0, le=MOST_TOP_LOGPROBS)
    best_of: Literal[1] | None = None
    parse_special: bool = Field(
        False, description="let the spelling of a control token in the prompt become that token"
    )

    @model_validator(mode="after")
    def _consistent(self) -> CompletionRequest:
        if self.echo and self.logprobs is not None:
            raise ValueError("logprobs of an echoed prompt are not given; leave out echo or logprobs")
        if self.suffix is not None and not isinstance(self.prompt, str):
            raise ValueError("suffix needs a prompt that is one text")
        return self

    @property
    def most(self) -> int | None:
        return 16 if self.max_tokens is None else self.max_tokens  # OpenAI's default


class EmbeddingRequest(Strict):
    """POST /v1/embeddings"""

    model: str | None = None
    input: Text | Annotated[list[Text], Field(min_length=1, max_length=2048)]
    encoding_format: Literal["float", "base64"] | None = "float"
    user: str | None = None


class TokenizeRequest(Strict):
    """POST /tokenize"""

    content: Text
    model: str | None = None
    add_special: bool = False
    parse_special: bool = False


class DetokenizeRequest(Strict):
    """POST /detokenize"""

    tokens: list[Annotated[int, Field(ge=0, le=1 << 24)]]
    model: str | None = None


class CorpusRequest(Strict):
    """POST /v1/corpora"""

    id: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$", description="its name from now on")
    path: str = Field(min_length=1, max_length=4096, description="a file or folder within a --folder")
    chat: bool = Field(False, description="read .jsonl files as chat logs")
    model: str | None = None
