"""An OpenAI request -> what is needed to run it on a Triton model: the message to send, and what awaits its answer.

Nothing is sent yet, so everything that a contract cannot express is refused here, by the parameter's name.
"""

import random
import time
from typing import Any

from gateway.chat_template import render_chat
from gateway.upstream.base import EngineRequest, Failure, UpstreamError
from gateway.upstream.triton.answer import Answer, TextCounter
from gateway.upstream.triton.choices import Choices, ManyChoices, OneChoice
from gateway.upstream.triton.contract import Contract
from gateway.upstream.triton.detokenizer import Detokenizer
from gateway.upstream.triton.parameters import read_chat, read_parameters, read_prompt_text
from gateway.upstream.triton.tensors import build_request
from gateway.upstream.triton.token_form import Ends, ends_of, retention_fields
from gateway.upstream.triton.tokens import TokenCodec, TokenizerError
from gateway.upstream.triton.wire import Wire
from router.errors import ApiError, invalid


async def prepare(
    request: EngineRequest,
    contract: Contract,
    attempt_id: str,
    codec: TokenCodec | None,
    *,
    engine_streams: bool = False,
) -> tuple[Any, Choices]:
    """The ModelInferRequest to send, and what makes an OpenAI answer of the engine's messages. `codec` is the pool's
    tokenizer, which a contract of token ids cannot do without; with `engine_streams` the engine is to stream even if
    the client is not. Raises a 400 ApiError for a body that is malformed or that the contract cannot express."""
    if request.api == "embeddings":
        raise invalid("This model makes no embeddings.", param="model", code="unsupported_api")
    chat = request.api == "chat.completions"
    spec = request.pool.spec
    template = spec.chat_template
    parameters = read_parameters(
        request.body, chat=chat, seed=random.getrandbits(63), pool_stop=tuple(template.stop) if template else ()
    )
    if parameters.n > 1 and not contract.has_choices:
        raise one_choice_only()
    text = _chat_prompt(request, keep_bos=contract.kind == "raw") if chat else read_prompt_text(request.body)
    stream = (request.stream or engine_streams) and contract.decoupled
    prompt: str | list[int] = text
    extra: dict[str, Any] = {}
    ends: Ends | None = None
    if contract.kind == "raw":
        if codec is None:
            raise UpstreamError(Failure.ENGINE, f"Pool {request.pool.name} has no tokenizer here.", 500, "tokenizer")
        try:
            ends = ends_of(codec, spec, parameters.stop)
        except TokenizerError as error:
            raise UpstreamError(Failure.ENGINE, f"Pool {request.pool.name}: {error}.", 500, "tokenizer") from None
        prompt = await codec.encode_prompt(text, add_special=not chat)
        if not prompt:
            raise invalid("The prompt holds no token.", param="messages" if chat else "prompt", code="empty_prompt")
        extra = ends.fields() | retention_fields(request.retention)
    usage = True  # for the gateway's own accounts, whoever else is interested
    counter: TextCounter | None = None
    if contract.kind == "llmapi":  # which counts nothing: the text would have to be encoded again
        usage = codec is not None and (request.include_usage or not request.stream)
        if usage and codec is not None:
            counter = TextCounter(codec, len(await codec.encode_prompt(text, add_special=True)))
    message = build_request(
        contract,
        prompt,
        parameters,
        request_id=attempt_id,
        stream=stream,
        usage=usage,
        extra=extra,
    )
    prompt_tokens = len(prompt)
    echoes = not stream and "exclude_prompt" not in contract.inputs
    echoed = prompt if echoes and not isinstance(prompt, str) else ()
    kv_block_tokens = request.endpoint.state.kv_block_tokens or spec.kv_block_tokens
    request_id, include_usage, created = request.request_id, request.include_usage, int(time.time())

    def answer() -> Answer:
        tokens: Detokenizer | None = None
        if ends is not None and codec is not None:
            tokens = Detokenizer(
                codec, ends.ids, prompt_tokens=prompt_tokens, logprobs=parameters.logprobs, prompt=echoed
            )
        return Answer(
            contract,
            max_tokens=parameters.max_tokens,
            stop=parameters.stop,
            kv_block_tokens=kv_block_tokens,
            tokens=tokens,
            counter=counter,
        )

    def wire(index: int) -> Wire:
        return Wire(
            chat=chat,
            request_id=request_id,
            created=created,
            model=spec.model,
            include_usage=include_usage,
            index=index,
        )

    if parameters.n > 1:
        return message, ManyChoices(parameters.n, answer, wire, stream=request.stream)
    return message, OneChoice(answer(), wire(0), stream=request.stream)


def one_choice_only() -> ApiError:
    """The refusal of a request for several answers."""
    return invalid(
        "This model makes one answer to a request. Leave 'n' out and send the request several times.",
        param="n",
        code="unsupported_parameter",
    )


def _chat_prompt(request: EngineRequest, *, keep_bos: bool) -> str:
    template = request.pool.spec.chat_template
    if template is None:
        raise invalid(
            "This model has no chat template: send a prompt to /v1/completions.",
            param="messages",
            code="no_chat_template",
        )
    chat = read_chat(request.body)
    try:
        return render_chat(
            template,
            chat.messages,
            add_generation_prompt=chat.add_generation_prompt,
            kwargs=chat.template_kwargs,
            keep_bos=keep_bos,
        )
    except ValueError as error:
        raise UpstreamError(Failure.ENGINE, f"Pool {request.pool.name}: {error}.", 500, "chat_template") from None
