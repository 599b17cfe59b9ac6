"""The official `openai` client against a real cluster: whatever it can ask of us, as its users see it."""

import asyncio
import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import pytest
import pytest_asyncio
from openai import AsyncOpenAI
from openai.types import CompletionUsage

from common.messages import Origin, Role, Routed, Sampling
from common.model.tokenizer import Tokenizer
from tests.caller import Caller
from tests.process.cluster import BatonUp
from tests.process.questions import addresses_of, caller_of, is_empty

pytestmark = [pytest.mark.process, pytest.mark.timeout(900), pytest.mark.asyncio(loop_scope="session")]

MODEL = "tiny-llama"
PROMPT = "a baton passes from hand to hand and"
CHAT = [{"role": "user", "content": PROMPT}]
ON = {"ignore_eos": True}
BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True)
class Said:
    """One answer, however it came. `pieces` are a stream's texts, chunk by chunk."""

    text: str
    finish: str
    usage: CompletionUsage | None
    pieces: tuple[str, ...] = ()

    @property
    def cached_tokens(self) -> int:
        assert self.usage is not None
        assert self.usage.prompt_tokens_details is not None
        return self.usage.prompt_tokens_details.cached_tokens or 0

    @property
    def num_tokens(self) -> int:
        assert self.usage is not None
        return self.usage.completion_tokens


class Asking:
    """The client with one way to ask for four kinds of answer: chat or completion, whole or streamed."""

    def __init__(self, url: str, client: AsyncOpenAI) -> None:
        self.url = url
        self.client = client

    async def ask(
        self,
        prompt: str | list[int] = PROMPT,
        *,
        chat: bool = False,
        stream: bool = False,
        usage: bool = True,
        **kw: Any,
    ) -> Said:
        fields: dict[str, Any] = {"model": MODEL, "temperature": 0, "extra_body": ON, **kw}
        if "max_completion_tokens" not in fields:
            fields.setdefault("max_tokens", 24)
        if chat:
            fields["messages"] = [{"role": "user", "content": prompt}]
            create: Any = self.client.chat.completions.create
        else:
            fields["prompt"] = prompt
            create = self.client.completions.create
        if not stream:
            return _whole(await create(**fields))
        options = {"stream_options": {"include_usage": True}} if usage else {}
        return _joined([chunk async for chunk in await create(stream=True, **options, **fields)], usage=usage)


def _whole(answer: Any) -> Said:
    (choice,) = answer.choices
    assert choice.index == 0
    text = choice.message.content if answer.object == "chat.completion" else choice.text
    assert answer.model == MODEL
    usage = answer.usage
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    return Said(text, choice.finish_reason, usage)


def _joined(chunks: list[Any], *, usage: bool) -> Said:
    """A stream's chunks as one answer, after what must hold of every stream."""
    assert len({(chunk.id, chunk.model, chunk.created) for chunk in chunks}) == 1
    reports = [chunk for chunk in chunks if chunk.usage is not None]
    assert reports == (chunks[-1:] if usage else []), "usage comes exactly once, last, and only if asked for"
    if usage:
        assert chunks.pop().choices == []
    finishes = [chunk.choices[0].finish_reason for chunk in chunks]
    assert [finish for finish in finishes if finish] == finishes[-1:], "the reason comes once, at the end"
    if chunks[0].object == "chat.completion.chunk":
        assert [chunk.choices[0].delta.role for chunk in chunks] == ["assistant"] + [None] * (len(chunks) - 1)
        pieces = [chunk.choices[0].delta.content or "" for chunk in chunks]
    else:
        pieces = [chunk.choices[0].text for chunk in chunks]
    return Said("".join(pieces), finishes[-1], reports[0].usage if usage else None, tuple(pieces))


@asynccontextmanager
async def asking(up: BatonUp) -> AsyncIterator[Asking]:
    """Leaving asserts that the cluster holds nothing any more."""
    async with AsyncOpenAI(base_url=f"{up.url}/v1", api_key="any", max_retries=0, timeout=120) as client:
        yield Asking(up.url, client)
    async with caller_of(up.coordinator) as caller:
        await is_empty(caller)


@pytest_asyncio.fixture(loop_scope="session")
async def api(standing_pair: BatonUp) -> AsyncIterator[Asking]:
    async with asking(standing_pair) as one:
        yield one


async def test_the_models_are_listed_and_found_by_name(api: Asking) -> None:
    listed = [model async for model in api.client.models.list()]
    assert [model.id for model in listed] == [MODEL]
    assert await api.client.models.retrieve(MODEL) == listed[0]


@pytest.mark.parametrize("chat", [True, False], ids=["chat", "completion"])
async def test_a_stream_says_what_the_whole_answer_says(api: Asking, chat: bool) -> None:
    whole = await api.ask(chat=chat)
    stream = await api.ask(chat=chat, stream=True)
    silent = await api.ask(chat=chat, stream=True, usage=False)
    assert whole.text == stream.text == silent.text != ""
    assert whole.finish == stream.finish == silent.finish == "length"
    assert whole.usage is not None and stream.usage is not None
    assert stream.usage.prompt_tokens == whole.usage.prompt_tokens
    assert stream.num_tokens == whole.num_tokens == 24


@pytest.mark.parametrize("chat", [True, False], ids=["chat", "completion"])
async def test_a_stream_comes_in_pieces(api: Asking, chat: bool) -> None:
    for _ in range(10):  # what came together shares a piece, and to a slow reader all of it may
        if len((await api.ask(chat=chat, stream=True, max_tokens=100)).pieces) > 4:
            return
    pytest.fail("it always comes at once")


@pytest.mark.parametrize("num_tokens", [BLOCK_SIZE - 1, BLOCK_SIZE, BLOCK_SIZE + 1, 10 * BLOCK_SIZE])
async def test_cached_tokens_are_whole_blocks_short_of_the_last_token_streamed_or_not(
    api: Asking, num_tokens: int
) -> None:
    prompt = [3 + (num_tokens * 7 + index * 11) % 300 for index in range(num_tokens)]
    first = await api.ask(prompt, max_tokens=4)
    assert first.cached_tokens == 0
    expected = (num_tokens - 1) // BLOCK_SIZE * BLOCK_SIZE
    for stream in (True, False, True):
        again = await api.ask(prompt, max_tokens=4, stream=stream)
        assert (again.text, again.cached_tokens) == (first.text, expected)


@pytest.mark.parametrize("chat", [True, False], ids=["chat", "completion"])
async def test_a_seed_fixes_the_text_and_another_seed_changes_it(api: Asking, chat: bool) -> None:
    drawn = [await api.ask(chat=chat, temperature=1, seed=seed, stream=bool(seed % 2)) for seed in (1, 2, 3)]
    again = await asyncio.gather(*[api.ask(chat=chat, temperature=1, seed=seed) for seed in (3, 2, 1)])
    assert [one.text for one in again] == [one.text for one in reversed(drawn)]
    assert len({one.text for one in drawn}) == 3


async def test_a_seed_fixes_the_text_whichever_nodes_compute_it(
    api: Asking, standing_pairs: BatonUp, tiny_model: Path
) -> None:
    """Another cluster says the same, and there every prefill node with every decode node."""
    prompt, num_tokens = [3 + (19 * position) % 300 for position in range(100)], 40
    said = await api.ask(prompt, temperature=1, seed=77, max_tokens=num_tokens)
    tokenizer = Tokenizer.from_folder(tiny_model)
    async with asking(standing_pairs) as there, caller_of(standing_pairs.coordinator) as caller:
        assert (await there.ask(prompt, temperature=1, seed=77, max_tokens=num_tokens)).text == said.text
        addresses = addresses_of(await caller.view())
        for prefill, decode in itertools.product(("prefill-0", "prefill-1"), ("decode-0", "decode-1")):
            answer = await caller.ask(
                prompt,
                num_tokens,
                sampling=Sampling(max_tokens=num_tokens, seed=77),
                routed=Routed(addresses[decode], addresses[prefill]),
                origin=Origin(tenant=f"{prefill} {decode}".encode()),  # whose cache is cold
            )
            assert answer.last is not None
            assert (answer.last.path, answer.last.cached_tokens) == ("prefill", 0)
            assert tokenizer.decode(answer.tokens) == said.text, f"{prefill} and {decode}"


@pytest.mark.parametrize("chat", [True, False], ids=["chat", "completion"])
async def test_several_answers_come_from_one_prefill_each_with_its_index_and_one_end(
    api: Asking, standing_pair: BatonUp, chat: bool
) -> None:
    prompt = f"{chat}: " + "over and over " * 160
    asked = {"messages": [{"role": "user", "content": prompt}]} if chat else {"prompt": prompt}
    fields = {"model": MODEL, "temperature": 1, "seed": 11, "max_tokens": 24, "n": 3, "extra_body": ON, **asked}
    kind: Any = api.client.chat.completions if chat else api.client.completions
    async with caller_of(standing_pair.coordinator) as caller:
        before = await _num_prefilled_tokens(caller)
        stream = await kind.create(stream=True, stream_options={"include_usage": True}, **fields)
        chunks = [chunk async for chunk in stream]
        usage = chunks.pop().usage
        assert (usage.completion_tokens, usage.prompt_tokens > 400) == (3 * 24, True)
        assert await _num_prefilled_tokens(caller) - before == usage.prompt_tokens, "the prompt is computed once"
    texts, ends = [""] * 3, [list[str]() for _ in range(3)]
    for choice in (choice for chunk in chunks for choice in chunk.choices):
        texts[choice.index] += (choice.delta.content if chat else choice.text) or ""
        ends[choice.index] += [choice.finish_reason] if choice.finish_reason else []
    assert ends == [["length"]] * 3
    assert len(set(texts)) == 3
    whole = await kind.create(**fields)
    assert [choice.index for choice in whole.choices] == [0, 1, 2]
    assert [choice.message.content if chat else choice.text for choice in whole.choices] == texts
    alone = await api.ask(prompt, chat=chat, temperature=1, seed=11)
    assert texts[0] == alone.text, "the first answer is the one that comes alone"


async def test_the_best_of_four_are_some_of_the_four_and_all_are_counted(api: Asking) -> None:
    fields: dict[str, Any] = {"model": MODEL, "prompt": PROMPT, "temperature": 1, "seed": 3, "max_tokens": 12}
    create: Any = api.client.completions.create
    four = await create(n=4, extra_body=ON, **fields)
    best = await create(n=2, best_of=4, extra_body=ON, **fields)
    assert [choice.index for choice in best.choices] == [0, 1]
    assert {choice.text for choice in best.choices} < {choice.text for choice in four.choices}
    assert best.usage == four.usage
    with pytest.raises(openai.BadRequestError, match="best_of"):
        await create(n=1, best_of=2, stream=True, **fields)


async def _num_prefilled_tokens(caller: Caller) -> int:
    """Since the nodes started, when nothing runs."""
    await is_empty(caller, fresh=True)
    nodes = (await caller.view()).nodes
    return sum(node.load.num_computed_prompt_tokens for node in nodes if node.card.role is Role.PREFILL)


@pytest.mark.parametrize("chat", [True, False], ids=["chat", "completion"])
async def test_a_stop_string_across_tokens_cuts_the_text_before_it(api: Asking, chat: bool) -> None:
    full = await api.ask(chat=chat, max_tokens=48)
    stop = await across_tokens(api, full.text, chat=chat)
    expected = full.text[: full.text.index(stop)]
    stops: list[str | list[str]] = [stop, ["never said", stop]]
    for wanted, stream in itertools.product(stops, (True, False)):
        cut = await api.ask(chat=chat, stream=stream, max_tokens=48, stop=wanted)
        assert (cut.text, cut.finish) == (expected, "stop")
        assert 0 < cut.num_tokens < 48


async def across_tokens(api: Asking, text: str, *, chat: bool) -> str:
    """The end of one token's text with the beginning of the next one's, where that is found in `text` first."""
    for num_tokens in range(5, 44):
        begun = (await api.ask(chat=chat, max_tokens=num_tokens)).text
        stop = text[len(begun) - 1 : len(begun) + 1]
        if text.startswith(begun) and len(stop) == 2 and "\ufffd" not in stop and text.index(stop) == len(begun) - 1:
            return stop
    raise AssertionError(f"no boundary to stop at in {text!r}")


async def test_both_names_of_the_token_limit_are_understood(api: Asking) -> None:
    assert (await api.ask(chat=True, max_tokens=5)).num_tokens == 5
    assert (await api.ask(chat=True, max_completion_tokens=7)).num_tokens == 7
    assert (await api.ask(chat=True, max_completion_tokens=7, max_tokens=5)).num_tokens == 7
    assert (await api.ask(max_tokens=1)).num_tokens == 1


async def test_ignore_eos_goes_on_where_an_answer_would_end(api: Asking) -> None:
    limit = 150

    async def drawn(seed: int, extra: dict[str, Any]) -> Said:
        return await api.ask(temperature=1, seed=seed, max_tokens=limit, extra_body=extra, stream=bool(seed % 2))

    answers = await asyncio.gather(*[drawn(seed, {}) for seed in range(16)])
    ended = {seed: said for seed, said in enumerate(answers) if said.finish == "stop" and said.num_tokens < limit}
    assert ended, "of 16 random answers one was meant to end by itself"
    for seed, said in itertools.islice(ended.items(), 2):
        longer = await drawn(seed, ON)
        assert (longer.num_tokens, longer.finish) == (limit, "length")
        assert longer.text.startswith(said.text.rstrip("\ufffd"))


async def test_requests_with_the_same_id_get_their_own_answers_and_the_id_back(api: Asking) -> None:
    prompts = ["the quick brown fox", "jumps over the lazy dog", "0123456789"]
    alone = [(await api.ask(prompt, stream=True)).text for prompt in prompts]
    label = {"X-Request-Id": "mine"}
    kinds = list(itertools.product(range(len(prompts)), (True, False)))
    together = await asyncio.gather(
        *[api.ask(prompts[index], stream=stream, extra_headers=label) for index, stream in kinds]
    )
    assert [said.text for said in together] == [alone[index] for index, _ in kinds]
    raw = await api.client.completions.with_raw_response.create(
        model=MODEL, prompt=PROMPT, max_tokens=2, extra_headers=label
    )
    assert raw.headers["x-request-id"] == "mine"


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
async def test_an_unknown_model_is_not_found(api: Asking, stream: bool) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        await api.ask(model="gpt-0", stream=stream)
    assert (caught.value.code, caught.value.param) == ("model_not_found", "model")
    with pytest.raises(openai.NotFoundError):
        await api.client.models.retrieve("gpt-0")


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
@pytest.mark.parametrize("chat", [True, False], ids=["chat", "completion"])
async def test_a_prompt_longer_than_the_context_is_refused_by_name(api: Asking, chat: bool, stream: bool) -> None:
    for prompt, max_tokens in (("z" * 3000, 8), ("hello", 5000)):
        with pytest.raises(openai.BadRequestError) as caught:
            await api.ask(prompt, chat=chat, stream=stream, max_tokens=max_tokens)
        assert caught.value.code == "context_length_exceeded"
        assert "2048" in caught.value.message
