"""What quantisation costs in quality: the demo model's next tokens beside those of its fp32 weights.

Perplexity and agreement (of the likeliest next token) over a fixed text of passages, each a sequence of its own, the
true text given up to each position. Answers: fp32's own greedy answers to 20 questions, 64 tokens each, given in
the same way; `equal` is how many tokens come before the first other one, which is where free-running answers would
part, and `whole` how many answers never part.

Weights: `none` are fp32, `auto` the checkpoint's own width. Activations: as they are, or rounded before each linear
layer as the kernels round them before quantised ones. The rows of the engine come from `Runner.logits` itself, many
sequences a step; all others are simulated with transformers.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt
import torch
from transformers import AutoModelForCausalLM

from common.config import EngineConfig, ModelConfig
from common.engine.request import Chunk, EngineRequest, StepPlan
from common.messages import BlockId, Incarnation, RequestId, Sampling
from common.model.base import ModelRunner
from common.model.quantised_weights import round_weights
from common.model.quantization import resolve_quantization
from common.model.quantize import fake_quantise_rows
from common.model.runner import load_runner
from common.model.store import DEMO, Progress, resolve
from common.model.tokenizer import Tokenizer
from tests.benchmarks.report import grid, number, run_part

TEXT = Path(__file__).with_name("quality_text.txt")
ANSWER_TOKENS = 64
QUESTIONS = (
    "What is the capital of France?",
    "Explain photosynthesis in two sentences.",
    "Write a short poem about the sea.",
    "How do I boil an egg?",
    "What is 12 times 12?",
    "Name three planets and one fact about each.",
    "Write a Python function that reverses a string.",
    "Why is the sky blue?",
    "Give me a recipe for pancakes.",
    "Who wrote Romeo and Juliet?",
    "What should I pack for a week in the mountains?",
    "Summarise the story of Cinderella.",
    "How does a bicycle stay upright?",
    "Write an email that asks for a day off.",
    "What is the difference between weather and climate?",
    "List five animals that live in Africa.",
    "Explain what a database index is.",
    "Tell me a joke about cats.",
    "How can I sleep better?",
    "What happened in the year 1969?",
)
POOL_BYTES = 256 << 20
Weights = Literal["none", "auto", "int8", "int4"]
WEIGHTS: tuple[Weights, ...] = ("none", "auto", "int8", "int4")
Logits = npt.NDArray[np.float32]
Sequences = Sequence[Sequence[int]]


class Scored(Protocol):
    """A way to compute what follows each token of some sequences."""

    def pieces(self, sequences: Sequences) -> Iterator[tuple[int, int, Logits]]:
        """Number of a sequence, a position in it, logits [tokens from there on, vocab]; in any order of sequences."""
        ...


@dataclass(frozen=True, slots=True)
class Next:
    """After each token of some sequences: the likeliest next one, and the log likelihood of the true one (nan for
    the last, which has none)."""

    best: tuple[npt.NDArray[np.int64], ...]
    log_likelihoods: tuple[npt.NDArray[np.float64], ...]

    @classmethod
    def of(cls, scored: Scored, sequences: Sequences) -> "Next":
        best = tuple(np.zeros(len(tokens), np.int64) for tokens in sequences)
        likelihoods = tuple(np.full(len(tokens), np.nan) for tokens in sequences)
        for number_, start, logits in scored.pieces(sequences):
            best[number_][start : start + len(logits)] = logits.argmax(-1)
            true = np.array(sequences[number_][start + 1 : start + 1 + len(logits)], np.int64)
            rows = logits[: len(true)].astype(np.float64)
            largest = rows.max(-1, initial=-np.inf)
            log_sums = np.log(np.exp(rows - largest[:, None]).sum(-1)) + largest
            likelihoods[number_][start : start + len(true)] = rows[np.arange(len(true)), true] - log_sums
        return cls(best, likelihoods)


@dataclass(frozen=True, slots=True)
class Row:
    """`agreement` is over the text, `answer_agreement` over the answers; both shares of positions."""

    computed_by: str
    weights: str
    activations: str
    perplexity: float
    agreement: float
    answer_agreement: float
    equal_tokens: float
    whole_answers: int


@dataclass(frozen=True, slots=True)
class Result:
    model: str
    num_positions: int
    num_answer_positions: int
    rows: tuple[Row, ...]


@dataclass(frozen=True, slots=True)
class Task:
    """What every way is asked: passages and, prompt and answer in one, fp32's answers. `reference` is fp32 on the
    passages."""

    passages: Sequences
    dialogues: Sequences
    reference: Next

    def row(self, scored: Scored, computed_by: str, weights: str, activations: str) -> Row:
        text, answers = Next.of(scored, self.passages), Next.of(scored, self.dialogues)
        same = [
            best[-ANSWER_TOKENS - 1 : -1] == np.array(dialogue[-ANSWER_TOKENS:])
            for best, dialogue in zip(answers.best, self.dialogues, strict=True)
        ]
        equal = [ANSWER_TOKENS if flags.all() else int(flags.argmin()) for flags in same]
        return Row(
            computed_by=computed_by,
            weights=weights,
            activations=activations,
            perplexity=float(np.exp(-np.nanmean(np.concatenate(text.log_likelihoods)))),
            agreement=float(np.mean(np.concatenate(text.best) == np.concatenate(self.reference.best))),
            answer_agreement=float(np.mean(np.concatenate(same))),
            equal_tokens=float(np.mean(equal)),
            whole_answers=sum(count == ANSWER_TOKENS for count in equal),
        )


def _no(layer: str) -> bool:
    return False


def _every(layer: str) -> bool:
    return True


class Simulated:
    """transformers with rounded weights, and before the linear layers that `rounds` names with rounded activations."""

    def __init__(self, folder: Path, weights: Weights, rounds: Callable[[str], bool] = _no) -> None:
        auto: Any = AutoModelForCausalLM
        self._model: Any = auto.from_pretrained(folder, dtype=torch.float32, local_files_only=True).eval()
        round_weights(self._model, folder, resolve_quantization(weights, folder))
        for name, layer in self._model.named_modules():
            if isinstance(layer, torch.nn.Linear) and rounds(name):
                layer.register_forward_pre_hook(lambda _, inputs: (fake_quantise_rows(inputs[0]),))

    def pieces(self, sequences: Sequences) -> Iterator[tuple[int, int, Logits]]:
        """See `Scored`."""
        for number_, tokens in enumerate(sequences):
            with torch.inference_mode():
                logits = self._model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0]
            yield number_, 0, logits.numpy()


class Engine:
    """A runner, one token of every sequence a step: `Runner.logits` as decoding uses it."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner

    def pieces(self, sequences: Sequences) -> Iterator[tuple[int, int, Logits]]:
        """See `Scored`."""
        requests = [self._request(number_, tokens, len(sequences)) for number_, tokens in enumerate(sequences)]
        for position in range(max(map(len, sequences))):
            going = [number_ for number_, tokens in enumerate(sequences) if position < len(tokens)]
            logits = self._runner.logits(StepPlan(tuple(Chunk(requests[n], position, 1, True) for n in going)))
            for row, number_ in enumerate(going):
                yield number_, position, logits[row : row + 1]

    def answers(self, prompts: Sequences) -> list[list[int]]:
        """The prompts with greedy answers of `ANSWER_TOKENS`, end tokens ignored."""
        dialogues = [list(prompt) for prompt in prompts]
        requests = [self._request(n, tokens, len(dialogues), ANSWER_TOKENS) for n, tokens in enumerate(dialogues)]
        plan = StepPlan(tuple(Chunk(one, 0, one.num_prompt_tokens, True) for one in requests))
        for _ in range(ANSWER_TOKENS):
            for request, token in zip(requests, self._runner.execute(plan), strict=True):
                request.tokens.append(token)
            plan = StepPlan(tuple(Chunk(one, len(one.tokens) - 1, 1, True) for one in requests))
        return [request.tokens for request in requests]

    def _request(self, number_: int, tokens: Sequence[int], num_sequences: int, more: int = 0) -> EngineRequest:
        """Its blocks are every so many-th of the pool, so that no two sequences share one."""
        num_blocks = -(-(len(tokens) + more) // self._runner.layout.block_size)
        request = EngineRequest(
            id=RequestId(f"{number_}"),
            tokens=list(tokens),
            num_prompt_tokens=len(tokens),
            sampling=Sampling(max_tokens=ANSWER_TOKENS, seed=0, temperature=0.0),
        )
        request.blocks = [BlockId(number_ + num_sequences * block) for block in range(num_blocks)]
        return request


def measure(quick: bool, progress: Progress) -> Result:
    torch.set_num_threads(1)
    folder = resolve(DEMO)
    progress("quality: fp32's own answers", None, None)
    engine = load_engine(folder, "none")
    task = make_task(folder, engine)
    simulated = [(weights, rounded) for weights in WEIGHTS for rounded in (False, True)]
    if quick:
        simulated = [("auto", False), ("auto", True)]
    rows = []
    for done, (weights, rounded) in enumerate(simulated):
        progress("quality: simulated", done, len(simulated))
        way = Simulated(folder, weights, _every if rounded else _no)
        rows.append(task.row(way, "transformers", weights, "rounded" if rounded else "fp32"))
    for done, weights in enumerate(WEIGHTS):
        progress("quality: the engine", done, len(WEIGHTS))
        engine = engine if weights == "none" else load_engine(folder, weights)
        rows.append(task.row(engine, "engine", weights, "its own"))
    return Result(
        model=folder.name,
        num_positions=sum(map(len, task.passages)),
        num_answer_positions=ANSWER_TOKENS * len(task.dialogues),
        rows=tuple(rows),
    )


def load_engine(folder: Path, weights: Weights) -> Engine:
    model = ModelConfig(model=str(folder), threads=1, quantization=weights)
    runner, _ = load_runner(model, EngineConfig(kv_cache_memory=POOL_BYTES), Incarnation("0" * 32))
    return Engine(runner)


def make_task(folder: Path, engine: Engine) -> Task:
    """`engine` computes in fp32: its answers are those of transformers."""
    tokenizer = Tokenizer.from_folder(folder)
    passages = [tokenizer.encode(passage) for passage in TEXT.read_text().strip().split("\n\n")]
    prompts = [tokenizer.encode_chat([{"role": "user", "content": question}]) for question in QUESTIONS]
    return Task(passages, engine.answers(prompts), Next.of(Simulated(folder, "none"), passages))


def tables(result: Result) -> str:
    return "\n".join(
        [
            f"{result.model}: {result.num_positions:,} positions of text, "
            f"{len(QUESTIONS)} answers of {ANSWER_TOKENS} tokens",
            grid(
                ("computed by", "weights", "activations", "perplexity", "agreement", "in answers", "equal", "whole"),
                [
                    (
                        row.computed_by,
                        row.weights,
                        row.activations,
                        number(row.perplexity, 3),
                        f"{row.agreement:.2%}",
                        f"{row.answer_agreement:.2%}",
                        number(row.equal_tokens),
                        str(row.whole_answers),
                    )
                    for row in result.rows
                ],
                left=3,
            ),
        ]
    )


if __name__ == "__main__":
    run_part(__doc__, measure, tables)
