"""`baton chat`: a conversation in the terminal, over the gateway's HTTP API.

The temperature is low unless it is given: at the API's own 1, small models talk nonsense.

Ctrl-C stops the answer (its connection is closed, so the cluster stops working on it) and what was said so
far stays in the conversation; at the prompt it clears the line. Ctrl-D leaves.
"""

import contextlib
import sys
from typing import Annotated, Any

import typer

from coordinator.cli.openai_client import DEFAULT_URL, ApiError, ChatApi

_BOLD, _DIM, _RESET = "\x1b[1m", "\x1b[2m", "\x1b[0m"


def main(
    url: Annotated[str, typer.Option(metavar="URL", envvar="BATON_URL", help="The gateway.")] = DEFAULT_URL,
    api_key: Annotated[
        str, typer.Option(metavar="KEY", envvar="BATON_API_KEY", help="Where the gateway wants one.")
    ] = "",
    model: Annotated[str, typer.Option(help="The model's name. [default: the first one served]")] = "",
    message: Annotated[str, typer.Option("--message", "-m", help="Ask this, print the answer and leave.")] = "",
    system: Annotated[str, typer.Option(help="A system prompt.")] = "",
    max_tokens: Annotated[str, typer.Option(metavar="INTEGER", help="Longest answer.")] = "",
    temperature: Annotated[
        str, typer.Option(metavar="NUMBER", help="0 always takes the likeliest token, 1 draws as the model says.")
    ] = "0.2",
    seed: Annotated[str, typer.Option(metavar="INTEGER", help="The same seed gives the same answer.")] = "",
) -> None:
    """Talk to the model in the terminal."""
    options = {
        "max_tokens": _number(max_tokens, int, "--max-tokens"),
        "temperature": _number(temperature, float, "--temperature"),
        "seed": _number(seed, int, "--seed"),
    }
    api = ChatApi(url, api_key)
    messages = [{"role": "system", "content": system}] if system else []
    try:
        chat = Conversation(api, model or api.first_model(), messages, options)
        if message:
            chat.ask(message)
        else:
            chat.converse()
    except ApiError as error:
        print(f"baton: {error}", file=sys.stderr)
        raise SystemExit(1) from error
    except KeyboardInterrupt:
        raise SystemExit(130) from None


class Conversation:
    def __init__(self, api: ChatApi, model: str, messages: list[dict[str, str]], options: dict[str, Any]) -> None:
        self.messages = messages
        self._api = api
        self._model = model
        self._options = {name: value for name, value in options.items() if value is not None}

    def converse(self) -> None:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  line editing and history for input()
        print(f"{self._model}  (Ctrl-C stops an answer, Ctrl-D leaves)")
        while True:
            try:
                question = input("\n> ").strip()
            except KeyboardInterrupt:
                print()
                continue
            except EOFError:
                print()
                return
            if question:
                self._take_turn(question)

    def _take_turn(self, question: str) -> None:
        try:
            self.ask(question)
        except KeyboardInterrupt:
            print("\n(stopped)")
        except ApiError as error:
            print(f"\nbaton: {error}", file=sys.stderr)
            if self.messages[-1]["role"] == "user":
                self.messages.pop()  # it may be the reason for the error: the next question starts without it

    def ask(self, question: str) -> None:
        """Print the answer as it comes. Whatever of it came is part of the conversation."""
        self.messages.append({"role": "user", "content": question})
        answer: list[str] = []
        try:
            for text in self._api.stream(self._model, self.messages, self._options):
                answer.append(text)
                print(text, end="", flush=True)
            print()
        finally:
            if answer:
                self.messages.append({"role": "assistant", "content": "".join(answer)})


def _number(text: str, kind: type[int] | type[float], flag: str) -> int | float | None:
    if not text:
        return None
    try:
        return kind(text)
    except ValueError:
        wanted = "a whole number" if kind is int else "a number"
        raise typer.BadParameter(f"{text!r} is not {wanted}", param_hint=flag) from None
