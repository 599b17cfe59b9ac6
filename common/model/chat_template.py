"""Chat templates: Jinja text that turns messages into the one prompt a model was trained on.

Templates come with the model, so they run sandboxed. What they may rely on (whitespace control, `tojson`,
`raise_exception`, `strftime_now`, loop controls, `{% generation %}`) is what model authors write against:
the environment described in https://huggingface.co/docs/transformers/chat_templating.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from jinja2 import TemplateError, TemplateSyntaxError
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from common.errors import ConfigError, RequestError


class ChatTemplate:
    """One compiled template. `special_tokens` are the names it may use, e.g. {"bos_token": "<s>"}."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """ConfigError if the template does not compile."""
        try:
            self._template = _environment().from_string(source)
        except TemplateSyntaxError as error:
            raise ConfigError(f"the model's chat template does not compile: line {error.lineno}: {error}") from error
        self._special_tokens = dict(special_tokens)
        self._knows_developer = "developer" in source

    def render(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """The prompt, up to where the assistant begins to speak. RequestError if the template refuses."""
        try:
            return self._template.render(
                messages=[self._message(message) for message in messages],
                tools=None,
                documents=None,
                add_generation_prompt=True,
                **self._special_tokens,
            )
        except TemplateError as error:
            raise RequestError(f"the model's chat template refuses these messages: {error}") from error
        except Exception as error:  # an edge: the template is foreign code, whatever it trips over is in the messages
            raise RequestError(f"the model's chat template cannot render these messages: {error!r}") from error

    def _message(self, message: Mapping[str, Any]) -> dict[str, Any]:
        known = dict(message)
        if known["role"] == "developer" and not self._knows_developer:
            known["role"] = "system"  # the newer name of the same thing
        return known


class _Generation(Extension):
    """`{% generation %}` marks assistant text for training; when serving it is its own body."""

    tags = {"generation"}  # noqa: RUF012  jinja2 declares it so

    def parse(self, parser: Parser) -> list[Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own tojson escapes <, >, & and ' for HTML, which no model was trained on.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)
