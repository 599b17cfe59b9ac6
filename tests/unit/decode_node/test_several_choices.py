"""A Generate call of several choices: what is asked for once, what is each choice's own."""

from msgspec.structs import replace

from common.engine.events import Admit, Release, Reserve
from common.engine.request import Progress, sampling_of
from common.messages import (
    Branch,
    Drawn,
    FinishReason,
    Generate,
    HandedOver,
    PrefillDone,
    RequestId,
    StopChoice,
    Tokens,
)
from decode_node.role import AskPrefill, Command, Emit, EndCall, GenerateCall, PullEnded
from tests.unit.decode_node.test_role import ID, PREFILL, a_call, feed, generate, kinds, ready, reserved, the_admit

ONE, TWO = RequestId(f"{ID}/1"), RequestId(f"{ID}/2")
DONE = PrefillDone(token=90, others=(Drawn(91), Drawn(92)))


def three(*tails: list[int]) -> Generate:
    branches = tuple(Branch(choice, tail) for choice, tail in enumerate(tails or ([], [], [])))
    return replace(generate(), branches=branches)


def told(commands: list[Command]) -> list[tuple[int, list[int]]]:
    items = [command.item for command in commands if isinstance(command, Emit)]
    return [(item.choice, item.tokens) for item in items if isinstance(item, Tokens)]


def decoding(body: Generate | None = None) -> tuple[GenerateCall, Admit]:
    call, _ = a_call(body or three())
    feed(call, reserved(), ready(0, 3), DONE)
    return call, the_admit(feed(call, PullEnded(0, 3)))


def test_one_reservation_and_one_prefill_serve_all_and_each_gets_its_own_first_token() -> None:
    call, [reserve] = a_call(three())
    assert reserve == Reserve(ID, list(range(40)), num_forks=2)
    [ask] = feed(call, reserved())
    assert isinstance(ask, AskPrefill)
    assert ask.body.choices == (0, 1, 2)
    feed(call, ready(0, 3))
    assert told(feed(call, DONE)) == [(0, [90]), (1, [91]), (2, [92])]
    admit = the_admit(feed(call, PullEnded(0, 3)))
    assert [one.id for one in (admit.request, *admit.forks)] == [ID, ONE, TWO]
    assert [one.tokens[40:] for one in (admit.request, *admit.forks)] == [[90], [91], [92]]
    assert admit.forks[1].sampling == sampling_of(admit.request.sampling, 2)
    assert (admit.request.num_computed, admit.num_shared) == (40, 40)


def test_a_choice_that_had_tokens_keeps_its_first_and_the_drawn_one_is_dropped() -> None:
    call, admit = decoding(three([70, 71], [], [72]))
    assert [one.tokens[40:] for one in (admit.request, *admit.forks)] == [[70, 71], [91], [72]]
    [emit] = feed(call, Progress(ID, 42, 77))
    assert isinstance(emit, Emit)
    assert emit.item == Tokens([77], path="prefill", start=42)


def test_a_first_token_that_ends_the_first_choice_makes_the_next_one_the_parent() -> None:
    call, _ = a_call(three())
    feed(call, reserved(), ready(0, 3))
    feed(call, PrefillDone(token=90, finish=FinishReason.STOP, others=DONE.others))
    admit = the_admit(feed(call, PullEnded(0, 3)))
    assert (admit.request.id, admit.request.tokens[40:]) == (ID, [91])
    assert [(one.id, one.tokens[40:]) for one in admit.forks] == [(ONE, [92])]


def test_each_choice_finishes_alone_and_the_call_ends_with_the_last() -> None:
    call, _ = decoding()
    assert kinds(feed(call, Progress(ONE, 41, 5, FinishReason.STOP))) == ["Emit"]
    assert kinds(feed(call, Progress(ID, 41, 6, FinishReason.LENGTH))) == ["Emit"]
    emit, *rest = feed(call, Progress(TWO, 41, 7, FinishReason.LENGTH))
    assert isinstance(emit, Emit)
    assert isinstance(emit.item, Tokens)
    assert emit.item.phases, "the account comes with the last word"
    assert rest == [Release(ID), Release(ONE), Release(TWO), EndCall(None)]


def test_a_choice_nobody_wants_is_released_as_soon_as_it_runs_by_itself() -> None:
    call, _ = decoding()
    assert feed(call, StopChoice(0), StopChoice(1)) == [], "the engine knows the forks as part of the first one yet"
    assert feed(call, Progress(ID, 41, 5)) == [Release(ID)]
    assert feed(call, Progress(ONE, 41, 5)) == [Release(ONE)]
    assert told(feed(call, Progress(TWO, 41, 5))) == [(2, [5])]
    assert feed(call, StopChoice(1)) == [], "it has gone already"
    assert kinds(feed(call, StopChoice(2)))[-1] == "EndCall"


def test_choices_that_are_stopped_before_the_blocks_are_here_never_reach_the_engine() -> None:
    call, _ = a_call(three())
    feed(call, reserved(), ready(0, 3), DONE)
    feed(call, StopChoice(0))
    admit = the_admit(feed(call, PullEnded(0, 3)))
    assert [one.tokens[40:] for one in (admit.request, *admit.forks)] == [[91], [92]]
    again, _ = a_call(three())
    feed(again, reserved(), StopChoice(0), StopChoice(1))
    assert kinds(feed(again, StopChoice(2))) == ["ClosePrefill", "Release", "Release", "Release", "EndCall"]


def test_a_prefill_node_that_draws_for_others_than_asked_is_made_up_for_at_home() -> None:
    call, _ = a_call(three())
    feed(call, reserved())
    commands = feed(call, PrefillDone(token=90))
    assert kinds(commands) == ["ClosePrefill", "Admit"]
    assert len(the_admit(commands).forks) == 2


def test_what_is_handed_over_is_what_all_share_and_each_unfinished_choice() -> None:
    call, _ = decoding()
    feed(call, Progress(ID, 41, 5), Progress(ONE, 41, 6, FinishReason.STOP))
    handed_over = call.handed_over()
    assert handed_over == HandedOver(list(range(40)), (Branch(0, [90, 5]), Branch(2, [92])))
    taking, _ = a_call(replace(three([90], [91], [92]), source=PREFILL, prefill=None))
    feed(taking, reserved(), ready(0, 2), StopChoice(2), PullEnded(0, 2))
    admit = the_admit(feed(taking, handed_over))
    assert (admit.request.tokens[40:], admit.request.num_computed, admit.forks) == ([90, 5], 32, ())
