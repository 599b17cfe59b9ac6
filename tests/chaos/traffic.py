"""The clients: what they ask, what they got, and whether that was honest.

Each question is answered once before anything is hurt; that answer is what every later one must equal.
"""

import asyncio
import json
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import aiohttp

LIMIT_S = 180.0
"""A request that has not ended by then hangs."""
NUM_QUESTIONS = 36
"""More prompts than a small pool's cache can hold, so that most of them are computed and travel."""
REFUSALS = {429, 503, 504}
_WORDS = ("river", "stone", "lantern", "winter", "bridge", "market", "garden", "letter", "copper", "violin", "harbour")


class Outcome(StrEnum):
    EQUAL = "finished, equal to its oracle"
    WRONG = "finished, not equal"
    REFUSED = "refused with an honest status"
    BROKEN = "ended with an error event"
    LEFT = "the client hung up"
    CUT = "lost with its gateway"
    DISHONEST = "ended dishonestly"
    HUNG = "never ended"


FAILURES = (Outcome.WRONG, Outcome.DISHONEST, Outcome.HUNG)


@dataclass(frozen=True, slots=True)
class Question:
    """One request body, without `stream`."""

    name: str
    path: str
    body: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Text:
    """What an answer says: compared as a whole."""

    text: str
    finish: str
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Ended:
    outcome: Outcome
    detail: str = ""
    answer: Text | None = None
    num_events: int = 0


def questions(seed: int, *, longest: int) -> list[Question]:
    """Chats and completions, greedy and seeded, short and long prompts (about `longest` words), with stop strings."""
    chance = random.Random(seed)

    def story(words: int) -> str:
        return " ".join(chance.choice(_WORDS) for _ in range(words))

    found = []
    for number in range(NUM_QUESTIONS):
        words = (1, 6, 14, 40, longest // 3, longest)[number % 6]
        body: dict[str, Any] = {"max_tokens": (1, 8, 24, 60, 16, 96)[(number * 5 + number // 6) % 6]}
        if number % 3 == 2:
            body |= {"temperature": 0.8, "seed": number, "top_p": 0.95}
        else:
            body |= {"temperature": 0}
        if number % 8 == 5:
            body["stop"] = [" and", "\n\n"]
        if number % 2:
            body["messages"] = [{"role": "user", "content": f"Tell me about {story(words)}."}]
            found.append(Question(f"chat {number}", "/v1/chat/completions", body))
        else:
            body |= {"prompt": f"Once there was a {story(words)}", "ignore_eos": number % 4 == 0}
            found.append(Question(f"completion {number}", "/v1/completions", body))
    return found


@dataclass(slots=True)
class Client:
    """Asks one gateway. `gateway_was_away_since(s)` tells whether nobody listened at some time after that moment."""

    http: aiohttp.ClientSession
    url: str
    model: str
    gateway_was_away_since: Callable[[float], bool] = lambda moment: False

    async def ask(self, question: Question, *, stream: bool, leave_after: int | None = None) -> Ended:
        """`leave_after`: hang up after so many events (or at once, before any, with 0)."""
        began_s = time.monotonic()
        body = {**question.body, "model": self.model, "stream": stream}
        if stream:
            body["stream_options"] = {"include_usage": True}
        try:
            async with asyncio.timeout(LIMIT_S):
                return await self._ask(question.path, body, leave_after)
        except TimeoutError:
            return Ended(Outcome.HUNG, f"{question.name}: nothing ended it within {LIMIT_S:g} s")
        except (aiohttp.ClientError, ConnectionError) as error:
            if self.gateway_was_away_since(began_s):
                return Ended(Outcome.CUT)
            return Ended(Outcome.DISHONEST, f"{question.name}: connection lost, its gateway lives: {error!r}")

    async def _ask(self, path: str, body: dict[str, Any], leave_after: int | None) -> Ended:
        async with self.http.post(f"{self.url}{path}", json=body) as answer:
            if answer.status != 200:
                return refusal(answer.status, dict(answer.headers), await answer.text())
            if leave_after == 0:
                return Ended(Outcome.LEFT)
            if not body["stream"]:
                return whole(await answer.json())
            transcript = Transcript()
            async for line in answer.content:
                transcript.read(line.decode())
                if leave_after is not None and transcript.num_events >= leave_after:
                    return Ended(Outcome.LEFT)
            return transcript.ended()


def refusal(status: int, headers: dict[str, str], text: str) -> Ended:
    """Honest: a status that says "not now" (with Retry-After where that can help) and an error in OpenAI's shape."""
    try:
        message = json.loads(text)["error"]["message"]
    except (ValueError, KeyError, TypeError):
        return Ended(Outcome.DISHONEST, f"status {status} with a body that is no error: {text[:200]!r}")
    if status not in REFUSALS:
        return Ended(Outcome.DISHONEST, f"status {status}: {message}")
    if status in (429, 503) and not any(name.lower() == "retry-after" for name in headers):
        return Ended(Outcome.DISHONEST, f"status {status} without Retry-After: {message}")
    return Ended(Outcome.REFUSED, f"{status} {message}")


def whole(document: dict[str, Any]) -> Ended:
    [choice] = document["choices"]
    text = choice["message"]["content"] if "message" in choice else choice["text"]
    tokens = document["usage"]["completion_tokens"]
    return Ended(Outcome.EQUAL, answer=Text(text, choice["finish_reason"], tokens), num_events=1)


@dataclass(slots=True)
class Transcript:
    """One event stream, line by line."""

    text: str = ""
    finishes: list[str] = field(default_factory=list)
    usages: list[int] = field(default_factory=list)
    error: str | None = None
    num_done: int = 0
    num_events: int = 0
    after_end: int = 0

    def read(self, line: str) -> None:
        if not line.startswith("data: "):
            return  # a comment or an empty line
        self.num_events += 1
        self.after_end += bool(self.num_done or self.error)
        if line.strip() == "data: [DONE]":
            self.num_done += 1
            return
        event = json.loads(line.removeprefix("data: "))
        if "error" in event:
            self.error = event["error"]["message"]
            return
        if event.get("usage"):
            self.usages.append(event["usage"]["completion_tokens"])
        for choice in event["choices"]:
            self.text += choice.get("text") or choice.get("delta", {}).get("content") or ""
            if choice.get("finish_reason"):
                self.finishes.append(choice["finish_reason"])

    def ended(self) -> Ended:
        """Exactly one end: an error event, or one finish reason, one usage and one [DONE], and nothing after it."""
        if self.after_end:
            return Ended(Outcome.DISHONEST, f"{self.after_end} events after the end")
        if self.error is not None:
            if self.num_done or self.finishes:
                return Ended(Outcome.DISHONEST, f"an error and an end: {self.error}")
            return Ended(Outcome.BROKEN, self.error, num_events=self.num_events)
        if (self.num_done, len(self.finishes), len(self.usages)) != (1, 1, 1):
            counts = f"{self.num_done} [DONE], finish reasons {self.finishes}, {len(self.usages)} usages"
            return Ended(Outcome.DISHONEST, f"a stream with {counts}")
        answer = Text(self.text, self.finishes[0], self.usages[0])
        return Ended(Outcome.EQUAL, answer=answer, num_events=self.num_events)


def judged(ended: Ended, question: Question, oracle: Text) -> Ended:
    """An answer against its oracle; everything else as it is."""
    if ended.outcome is not Outcome.EQUAL or ended.answer == oracle:
        return ended
    return Ended(Outcome.WRONG, f"{question.name}: {ended.answer}, not {oracle}", ended.answer)
