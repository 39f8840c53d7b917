"""The three ways in which agents talk to models, as far as this server needs them: real JSON and
real server-sent events, with few fields."""

from __future__ import annotations

import dataclasses
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any, ClassVar

import orjson

Json = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Asked:
    """What the server wants to know of a request."""

    model: str
    stream: bool
    turns: int


class WrongRequestError(ValueError):
    """A body is no request of the protocol; the text says why."""


def event(data: Json, name: str | None = None) -> bytes:
    """Return one server-sent event."""
    head = b"" if name is None else b"event: %b\n" % name.encode()
    return b"%bdata: %b\n\n" % (head, orjson.dumps(data))


def events(stream: bytes) -> Iterator[Json]:
    """Read what ``event`` wrote; the ``[DONE]`` of chat completions is left out."""
    for block in stream.split(b"\n\n"):
        for line in block.split(b"\n"):
            if line.startswith(b"data: ") and line != b"data: [DONE]":
                yield orjson.loads(line[6:])


class Protocol(ABC):
    """One protocol: requests, answers, streams, and how an agent reads them."""

    name: ClassVar[str]
    path: ClassVar[str]
    history: ClassVar[str] = "messages"
    more: ClassVar[Json] = {}

    def head(self, model: str) -> bytes:
        """Return what stands before the first turn of a request's body."""
        return orjson.dumps({"model": model, **self.more})[:-1] + b',"%b":[' % (
            self.history.encode()
        )

    def tail(self, stream: bool) -> bytes:
        """Return what stands after the last turn of a request's body."""
        return b'],"stream":%b}' % (b"true" if stream else b"false")

    @abstractmethod
    def user(self, text: str, screenshot: str) -> Json:
        """Return a turn of the user, with a picture in base64."""

    @abstractmethod
    def assistant(self, text: str) -> Json:
        """Return a turn of the model's."""

    def asked(self, parsed: Any) -> Asked:
        """Return what a parsed body asks for."""
        if not isinstance(parsed, dict):
            raise WrongRequestError("the body is a JSON object, and this is not")
        model, turns = parsed.get("model"), parsed.get(self.history)
        stream = parsed.get("stream", False)
        if not isinstance(model, str):
            raise WrongRequestError('"model" is a string')
        if not isinstance(turns, list) or not turns:
            raise WrongRequestError(f'"{self.history}" is a list of at least one turn')
        if not isinstance(stream, bool):
            raise WrongRequestError('"stream" is true or false')
        return Asked(model, stream, len(turns))

    def glimpsed(self, body: memoryview) -> Asked:
        """Return the same of an agent's body by its two ends, without parsing it."""
        model = re.search(rb'"model":"([^"]*)"', bytes(body[:200]))
        if model is None:
            raise WrongRequestError('"model" is not where agents put it')
        return Asked(model[1].decode(), bytes(body[-5:]) == b"true}", 1)

    @abstractmethod
    def answer(self, key: int, model: str, text: str, usage: Json) -> Json:
        """Return a whole answer."""

    @abstractmethod
    def text(self, answer: Json) -> str:
        """Return the model's text of an answer."""

    @abstractmethod
    def begin(self, key: int, model: str) -> bytes:
        """Return the events that begin a stream."""

    @abstractmethod
    def piece(self, key: int, model: str, text: str) -> bytes:
        """Return the event of one piece of text."""

    @abstractmethod
    def end(self, key: int, model: str, text: str, usage: Json) -> bytes:
        """Return the events that end a stream."""

    @abstractmethod
    def failure(self, message: str) -> bytes:
        """Return the event that says that no more will come."""

    @abstractmethod
    def streamed(self, stream: bytes) -> str | None:
        """Return the model's text of a stream, None when it does not end as it should."""


class Chat(Protocol):
    """OpenAI's chat completions."""

    name, path = "chat", "/v1/chat/completions"

    def user(self, text: str, screenshot: str) -> Json:
        url = {"url": f"data:image/png;base64,{screenshot}", "detail": "high"}
        content = [{"type": "text", "text": text}, {"type": "image_url", "image_url": url}]
        return {"role": "user", "content": content}

    def assistant(self, text: str) -> Json:
        return {"role": "assistant", "content": text}

    def answer(self, key: int, model: str, text: str, usage: Json) -> Json:
        message = {"role": "assistant", "content": text}
        return {
            "id": f"chatcmpl-{key}",
            "object": "chat.completion",
            "model": model,
            "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
            "usage": {"prompt_tokens": usage["input"], "completion_tokens": usage["output"]},
        }

    def text(self, answer: Json) -> str:
        return str(answer["choices"][0]["message"]["content"])

    def _chunk(self, key: int, model: str, delta: Json, reason: str | None = None) -> bytes:
        choice = {"index": 0, "delta": delta, "finish_reason": reason}
        kind = "chat.completion.chunk"
        return event({"id": f"chatcmpl-{key}", "object": kind, "model": model, "choices": [choice]})

    def begin(self, key: int, model: str) -> bytes:
        return self._chunk(key, model, {"role": "assistant", "content": ""})

    def piece(self, key: int, model: str, text: str) -> bytes:
        return self._chunk(key, model, {"content": text})

    def end(self, key: int, model: str, text: str, usage: Json) -> bytes:
        return self._chunk(key, model, {}, "stop") + b"data: [DONE]\n\n"

    def failure(self, message: str) -> bytes:
        return event({"error": {"message": message, "type": "server_error"}})

    def streamed(self, stream: bytes) -> str | None:
        if not stream.endswith(b"data: [DONE]\n\n"):
            return None
        return "".join(one["choices"][0]["delta"].get("content", "") for one in events(stream))


class Responses(Protocol):
    """OpenAI's responses."""

    name, path, history = "responses", "/v1/responses", "input"

    def user(self, text: str, screenshot: str) -> Json:
        picture = {"type": "input_image", "image_url": f"data:image/png;base64,{screenshot}"}
        return {"role": "user", "content": [{"type": "input_text", "text": text}, picture]}

    def assistant(self, text: str) -> Json:
        return {"role": "assistant", "content": [{"type": "output_text", "text": text}]}

    def answer(self, key: int, model: str, text: str, usage: Json) -> Json:
        content = [{"type": "output_text", "text": text}]
        return {
            "id": f"resp_{key}",
            "object": "response",
            "status": "completed",
            "model": model,
            "output": [{"type": "message", "role": "assistant", "content": content}],
            "usage": {"input_tokens": usage["input"], "output_tokens": usage["output"]},
        }

    def text(self, answer: Json) -> str:
        return str(answer["output"][0]["content"][0]["text"])

    def _event(self, kind: str, more: Json) -> bytes:
        return event({"type": kind, **more}, kind)

    def begin(self, key: int, model: str) -> bytes:
        begun = {"id": f"resp_{key}", "object": "response", "status": "in_progress", "model": model}
        return self._event("response.created", {"response": begun})

    def piece(self, key: int, model: str, text: str) -> bytes:
        return self._event("response.output_text.delta", {"output_index": 0, "delta": text})

    def end(self, key: int, model: str, text: str, usage: Json) -> bytes:
        done = {"response": self.answer(key, model, text, usage)}
        return self._event("response.completed", done)

    def failure(self, message: str) -> bytes:
        return self._event("error", {"code": "server_error", "message": message})

    def streamed(self, stream: bytes) -> str | None:
        *_, last = [{}, *events(stream)]
        if last.get("type") != "response.completed":
            return None
        return "".join(one.get("delta", "") for one in events(stream))


class Messages(Protocol):
    """Anthropic's messages."""

    name, path, more = "messages", "/v1/messages", {"max_tokens": 1024}

    def user(self, text: str, screenshot: str) -> Json:
        source = {"type": "base64", "media_type": "image/png", "data": screenshot}
        picture = {"type": "image", "source": source}
        return {"role": "user", "content": [{"type": "text", "text": text}, picture]}

    def assistant(self, text: str) -> Json:
        return {"role": "assistant", "content": [{"type": "text", "text": text}]}

    def answer(self, key: int, model: str, text: str, usage: Json) -> Json:
        return {
            "id": f"msg_{key}",
            "type": "message",
            "role": "assistant",
            "model": model,
            "content": [{"type": "text", "text": text}],
            "stop_reason": "end_turn",
            "usage": {"input_tokens": usage["input"], "output_tokens": usage["output"]},
        }

    def text(self, answer: Json) -> str:
        return str(answer["content"][0]["text"])

    def _event(self, kind: str, more: Json) -> bytes:
        return event({"type": kind, **more}, kind)

    def begin(self, key: int, model: str) -> bytes:
        begun = {"id": f"msg_{key}", "type": "message", "role": "assistant", "model": model}
        block = {"index": 0, "content_block": {"type": "text", "text": ""}}
        return self._event("message_start", {"message": begun}) + self._event(
            "content_block_start", block
        )

    def piece(self, key: int, model: str, text: str) -> bytes:
        delta = {"index": 0, "delta": {"type": "text_delta", "text": text}}
        return self._event("content_block_delta", delta)

    def end(self, key: int, model: str, text: str, usage: Json) -> bytes:
        stop = {"delta": {"stop_reason": "end_turn"}, "usage": {"output_tokens": usage["output"]}}
        return (
            self._event("content_block_stop", {"index": 0})
            + self._event("message_delta", stop)
            + self._event("message_stop", {})
        )

    def failure(self, message: str) -> bytes:
        return self._event("error", {"error": {"type": "api_error", "message": message}})

    def streamed(self, stream: bytes) -> str | None:
        *_, last = [{}, *events(stream)]
        if last.get("type") != "message_stop":
            return None
        deltas = (one for one in events(stream) if one["type"] == "content_block_delta")
        return "".join(one["delta"]["text"] for one in deltas)


PROTOCOLS: dict[str, Protocol] = {one.name: one for one in (Chat(), Responses(), Messages())}
