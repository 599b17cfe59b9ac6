"""How many prompt tokens a step takes in, and where a prompt is cut. Pure: seconds are handed in.

    seconds of a step = start + decode x sequences that decode + token x prompt tokens          (learned, `fit`)
    seconds of a pull = start + token x tokens announced last                                   (learned, `fit`)
    seconds of copies = block x blocks that go to the host tier or come from it                 (learned, `fit`)

1. A step that computes prompts aims to end within `max_step_s`.
2. With decodes in it, or where one may join any moment and would wait for its end, it aims to end within
   `itl_target_s`; where the decodes alone take more than two thirds of that, within half as long again as they take.
   So a stream is slowed to the target or by half, never a prompt to nothing: a block goes in whatever the clock says.
3. A prompt that is computed for a reader, which pulls one chunk while the next is computed, is cut where the reader
   has all of it soonest: each time as if all that is left were cut evenly. So chunks are as large as the step allows
   where the wire is much quicker than the model; where it is not they shrink towards the prompt's end, for nothing
   is computed during the last pull; and where the wire is what all wait for the first one is small.
4. What leaves the pool goes to the host tier if that and the way back cost less than computing it anew.
"""

from common.engine.fit import Fit

_DECODES_MOST = 1.5
"""Times what the decodes of a step take alone: its end, where the target is out of reach (rule 2)."""


class Pace:
    def __init__(self, *, first_tokens: int, max_step_s: float, itl_target_s: float, block_size: int) -> None:
        """`first_tokens`: a modest step to learn from, while nothing has been observed. `itl_target_s` 0: none."""
        self._first_tokens = first_tokens
        self._max_step_s = max_step_s
        self._itl_target_s = itl_target_s
        self._block_size = block_size
        # A step's start costs about as much as 64 prompt tokens or a few decodes, whatever the machine.
        self._steps = Fit((64.0, 1.0, 8.0))  # prompt tokens, the step, decodes
        self._pulls = Fit((1.0, 64.0))  # the pull, tokens
        self._copies = Fit((1.0,))  # blocks
        self._knows_prompts = False
        self.planned = 0, 0
        """Decodes and prompt tokens of the step that was planned last."""
        self._asked = 0, first_tokens  # decodes and the most prompt tokens of the last step that was asked for

    # --- what was seen -------------------------------------------------------------------------------------

    def observe(self, seconds: float) -> None:
        """The step that was `planned` took so long."""
        self.observe_step(*self.planned, seconds)

    def observe_step(self, num_decodes: int, num_prompt_tokens: int, seconds: float) -> None:
        self._steps.observe((num_prompt_tokens, 1.0, num_decodes), seconds, kind=num_prompt_tokens > 0)
        self._knows_prompts = self._knows_prompts or num_prompt_tokens > 0

    def observe_pull(self, num_tokens: int, seconds: float) -> None:
        """A reader had the last so many tokens so long after they were computed."""
        self._pulls.observe((1.0, num_tokens), seconds)

    def observe_copies(self, num_blocks: int, seconds: float) -> None:
        """So many blocks went to the host tier or came from it."""
        self._copies.observe((num_blocks,), seconds)

    # --- what follows --------------------------------------------------------------------------------------

    def prompt_tokens(self, num_decodes: int, *, most: int, joining: bool = False) -> int:
        """Prompt tokens for a step beside so many decodes: rules 1 and 2. At least a block, at most `most`.

        `joining`: sequences with a computed prompt are on their way here.
        """
        self._asked = num_decodes, most
        if not self._knows_prompts:
            return min(self._first_tokens, most)
        token_s, start_s, decode_s = self._steps.costs()
        decodes_s = start_s + decode_s * num_decodes
        left_s = self._limit_s(decodes_s, others=num_decodes > 0 or joining) - decodes_s
        if left_s >= token_s * most:
            return most
        return min(max(int(left_s / token_s) if token_s and left_s > 0.0 else 0, self._block_size), most)

    @property
    def prompt_tokens_per_s(self) -> float:
        """What steps like the one that was asked for last can make of prompts; 0 while nothing is known of them."""
        if not self._knows_prompts:
            return 0.0
        num_decodes, most = self._asked
        num_tokens = self.prompt_tokens(num_decodes, most=most)
        token_s, start_s, decode_s = self._steps.costs()
        step_s = start_s + decode_s * num_decodes + token_s * num_tokens
        return num_tokens / step_s if step_s > 0.0 else 0.0

    def _limit_s(self, decodes_s: float, *, others: bool) -> float:
        """The step's end; `others` wait for it."""
        if not others or not self._itl_target_s:
            return self._max_step_s
        return min(self._max_step_s, max(self._itl_target_s, _DECODES_MOST * decodes_s))

    def chunk_tokens(self, num_uncomputed: int, pull_left_s: float, *, most: int) -> int:
        """Of a prompt that is computed for a reader, the tokens to compute now: rule 3. At most `most`.

        `pull_left_s`: what the reader still needs for what it was told of.
        """
        if not self._knows_prompts or self._pulls.is_empty:
            return most
        token_s, start_s, _ = self._steps.costs()
        _, pull_s = self._pulls.costs()

        def end_s(size: int, /) -> float:
            """When the last of even chunks has been pulled. The wire idles, if ever, before the first or the last."""
            count = -(-num_uncomputed // size)
            first, last = min(size, num_uncomputed), num_uncomputed - (count - 1) * size
            before_last_s = (count - 1) * (start_s + token_s * size)
            return max(
                max(pull_left_s, start_s + token_s * first) + pull_s * num_uncomputed,
                before_last_s + pull_s * (last + size) if count > 1 else 0.0,
                before_last_s + start_s + (token_s + pull_s) * last,
            )

        sizes: list[int] = [most, *range(most - most % self._block_size, 0, -self._block_size)]
        return min(sizes, key=end_s)

    def pull_left_s(self, before_s: float, num_tokens: int) -> float:
        """What a reader still needs after a chunk of so many tokens, by estimate."""
        token_s, start_s, _ = self._steps.costs()
        _, pull_s = self._pulls.costs()
        return max(0.0, before_s - start_s - token_s * num_tokens) + pull_s * num_tokens

    @property
    def copying_pays(self) -> bool:
        """Whether copying a block out and in again is quicker than computing its tokens anew (rule 4)."""
        if not self._knows_prompts:
            return True
        token_s, _, _ = self._steps.costs()
        [copy_s] = self._copies.costs()
        return 2 * copy_s <= token_s * self._block_size
