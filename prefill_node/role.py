"""One Prefill call as the prefill node sees it. Pure: events in, commands out.

    COMPUTING --stopped--> HOLDING --Pulled--> ENDED
        |                     |
        +---- Cancelled, EngineFailed --------> ENDED

1. The engine computes the prompt in chunks and draws one token for each choice; each chunk's finished blocks
   are announced at once (`BlocksReady`), the tokens last (`PrefillDone`).
2. From then on the blocks are the reader's: they stay until it says Pulled or its call ends. Until then, and no
   longer, they can be read under the call's secret, which goes with every announcement.
3. Whatever ends the call, exactly one Release reaches the engine and exactly one End the caller.
"""

from dataclasses import dataclass
from enum import StrEnum
from math import inf

from common.engine.events import Admit, Failed, PullTook, Release
from common.engine.request import EngineRequest, Progress, sampling_of
from common.errors import InternalError, InvalidTransition, MovedError
from common.messages import BlocksReady, Incarnation, Prefill, PrefillDone, Pulled, RequestId, WireError


class State(StrEnum):
    COMPUTING = "computing"
    HOLDING = "holding"
    ENDED = "ended"


@dataclass(frozen=True, slots=True)
class Cancelled:
    """The call is over for its caller: cancelled, lost, or out of time."""


@dataclass(frozen=True, slots=True)
class Evicted:
    """The node is being drained and the time for that is over."""


@dataclass(frozen=True, slots=True)
class Emit:
    item: BlocksReady | PrefillDone


@dataclass(frozen=True, slots=True)
class EndCall:
    error: WireError | None = None


Event = Progress | Failed | Pulled | Evicted | Cancelled
Command = Admit | Release | PullTook | Emit | EndCall

_MOVES: dict[State, frozenset[State]] = {
    State.COMPUTING: frozenset({State.HOLDING, State.ENDED}),
    State.HOLDING: frozenset({State.ENDED}),
    State.ENDED: frozenset(),
}


class PrefillCall:
    """The life of one Prefill call; `history` is its account of time."""

    def __init__(
        self,
        body: Prefill,
        *,
        id: RequestId,
        incarnation: Incarnation,
        secret: bytes,
        now_s: float,
        deadline_s: float = inf,
    ) -> None:
        self._body = body
        self._id = id  # unique in this engine; the request's own id may come twice (another attempt)
        self._incarnation = incarnation
        self._secret = secret
        self._deadline_s = deadline_s
        self._num_last_tokens = 0  # in the blocks announced last
        self.state = State.COMPUTING
        self.history: list[tuple[State, float]] = [(State.COMPUTING, now_s)]

    def begin(self) -> list[Command]:
        body = self._body
        first, *others = (sampling_of(body.sampling, choice) for choice in body.choices)
        request = EngineRequest(
            id=self._id,
            tokens=list(body.tokens),
            num_prompt_tokens=body.num_prompt_tokens,
            sampling=first,
            also=tuple(others),
            stop_after_first=True,
            keep_blocks=True,
            origin=body.origin,
            deadline_s=self._deadline_s,
        )
        return [Admit(request)]

    def handle(self, event: Event, *, now_s: float) -> list[Command]:
        if self.state is State.ENDED:
            return []  # late news: the call has ended, everything it held is released
        match event:
            case Progress():
                return self._progressed(event, now_s)
            case Failed(message=message):
                return self._end(now_s, WireError.of(InternalError(message)))
            case Pulled() if self._num_last_tokens and self.state is State.HOLDING:
                took = PullTook(self._num_last_tokens, now_s - self.history[-1][1])
                return [took, *self._end(now_s)]
            case Pulled():
                return self._end(now_s)
            case Evicted():
                return self._end(now_s, WireError.of(MovedError("the prefill node is being drained")))
            case Cancelled():
                return self._end(now_s)

    def _progressed(self, event: Progress, now_s: float) -> list[Command]:
        commands: list[Command] = []
        if event.ready:
            self._num_last_tokens = event.num_computed - event.first_ready * self._body.layout.block_size
            ready = BlocksReady(owner=self._incarnation, first=event.first_ready, refs=event.ready, secret=self._secret)
            commands.append(Emit(ready))
        if event.stopped:
            assert event.token is not None, "a prefill request stops with its first token"
            self._move(State.HOLDING, now_s)
            commands.append(
                Emit(
                    PrefillDone(
                        token=event.token,
                        finish=event.finish,
                        cached_tokens=event.num_cached,
                        phases={"compute": now_s - self.history[0][1]},
                        others=event.others,
                        logprob=event.logprob,
                    )
                )
            )
        return commands

    def _end(self, now_s: float, error: WireError | None = None) -> list[Command]:
        self._move(State.ENDED, now_s)
        return [Release(self._id), EndCall(error)]

    def _move(self, to: State, now_s: float) -> None:
        if to not in _MOVES[self.state]:
            raise InvalidTransition(f"prefill call {self.state} -> {to}; history {self.history}")
        self.state = to
        self.history.append((to, now_s))
