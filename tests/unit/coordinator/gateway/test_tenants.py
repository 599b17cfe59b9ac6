"""API keys: who is let in, as whom, and that nothing of it is the client's to say."""

import os
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from common.clock import ManualClock
from common.errors import ConfigError, UnauthorizedError
from common.messages import Origin, Priority
from coordinator.cli import app as baton
from coordinator.gateway import app as gateway_app
from coordinator.gateway.tenants import ApiKeys, add_key, read
from tests.raw_http import exchange, http
from tests.unit.coordinator.gateway.cluster import hangs, says
from tests.unit.coordinator.gateway.conftest import RunningGateway, StartGateway, chat_body


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "keys.toml"


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


# --- the file ------------------------------------------------------------------------------------------------


def test_the_command_makes_a_file_for_its_owner_alone_that_holds_no_key(file: Path) -> None:
    keys = []
    for tenant in ("acme", "acme", "other.org"):
        result = CliRunner().invoke(baton, ["api-key", str(file), "--tenant", tenant])
        assert result.exit_code == 0, result.output
        keys.append(result.stdout.strip())
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert len(set(keys)) == 3
    assert not any(key in file.read_text() for key in keys)
    assert os.listdir(file.parent) == [file.name]
    tenants = ApiKeys(str(file), ManualClock())
    first, second, other = (tenants.tenant_of(f"Bearer {key}") for key in keys)
    assert first == second
    assert (first.name, other.name) == ("acme", "other.org")
    assert len(first.salt) == len(other.salt) == 16
    assert first.salt != other.salt


def test_a_file_that_is_extended_stays_where_and_as_it_is(file: Path, tmp_path: Path) -> None:
    add_key(file, "acme", None)
    file.chmod(0o640)
    link = tmp_path / "link.toml"
    link.symlink_to(file)
    key = add_key(link, "acme", None)
    assert link.is_symlink()
    assert stat.S_IMODE(file.stat().st_mode) == 0o640
    assert ApiKeys(str(file), ManualClock()).tenant_of(f"Bearer {key}").name == "acme"


def test_keys_that_are_made_at_the_same_time_all_count(file: Path) -> None:
    with ThreadPoolExecutor(max_workers=8) as makers:
        keys = list(makers.map(lambda number: add_key(file, f"tenant-{number % 4}", None), range(64)))
    tenants = ApiKeys(str(file), ManualClock())
    assert [tenants.tenant_of(f"Bearer {key}").name for key in keys] == [f"tenant-{number % 4}" for number in range(64)]


def test_the_command_refuses_what_is_no_class(file: Path) -> None:
    result = CliRunner().invoke(baton, ["api-key", str(file), "--tenant", "acme", "--priority", "urgent"])
    assert result.exit_code == 2
    assert "high, normal, low" in result.output
    assert not file.exists()


def test_a_tenants_class_is_set_when_said_and_left_alone_otherwise(file: Path) -> None:
    for priority in (None, Priority.LOW, None):
        add_key(file, "acme", priority)
    assert read(file).tenants["acme"].priority is Priority.LOW
    add_key(file, "other", None)
    assert read(file).tenants["other"].priority is Priority.NORMAL


def test_a_salt_comes_from_the_files_secret_so_that_no_name_gives_it_away(file: Path, tmp_path: Path) -> None:
    salts = []
    for path in (file, tmp_path / "elsewhere.toml"):
        key = add_key(path, "acme", None)
        salts.append(ApiKeys(str(path), ManualClock()).tenant_of(f"Bearer {key}").salt)
    assert salts[0] != salts[1]


@pytest.mark.parametrize("name", ["", "a b", 'a"]', "x" * 65, "-a"])
def test_a_tenants_name_that_no_file_can_hold_is_refused_and_nothing_written(file: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="--tenant"):
        add_key(file, name, None)
    assert not file.exists()


@pytest.mark.parametrize(
    "text",
    ["", "secret = 1", 'secret = "ab"\n[tenants]', "[", "\ud800".encode("utf-8", "surrogatepass").decode("latin-1")],
)
def test_a_file_that_is_none_is_refused_by_name(file: Path, text: str) -> None:
    file.write_text(text)
    with pytest.raises(ConfigError, match=r"api_keys = .*no file of API keys"):
        ApiKeys(str(file), ManualClock())
    with pytest.raises(ConfigError, match="cannot be read"):
        ApiKeys(f"{file}.not.there", ManualClock())


def test_a_changed_file_counts_after_a_second_and_a_broken_one_never(file: Path) -> None:
    clock = ManualClock()
    first = add_key(file, "acme", None)
    tenants = ApiKeys(str(file), clock)
    second = add_key(file, "acme", None)
    os.utime(file, ns=(1, 1))
    with pytest.raises(UnauthorizedError):
        tenants.tenant_of(f"Bearer {second}")
    clock.advance(1.0)
    assert tenants.tenant_of(f"Bearer {second}").name == "acme"
    file.write_text("broken")
    clock.advance(1.0)
    assert tenants.tenant_of(f"Bearer {first}").name == "acme"
    file.unlink()
    clock.advance(1.0)
    assert tenants.tenant_of(f"Bearer {first}").name == "acme"


@pytest.mark.parametrize(
    ("most", "asked", "given"),
    [
        (Priority.HIGH, Priority.HIGH, Priority.HIGH),
        (Priority.NORMAL, Priority.HIGH, Priority.NORMAL),
        (Priority.NORMAL, Priority.LOW, Priority.LOW),
        (Priority.LOW, Priority.NORMAL, Priority.LOW),
    ],
)
def test_a_class_above_the_tenants_is_lowered_to_it(
    file: Path, most: Priority, asked: Priority, given: Priority
) -> None:
    key = add_key(file, "acme", most)
    assert ApiKeys(str(file), ManualClock()).tenant_of(f"Bearer {key}").origin(asked).priority is given


# --- at the door ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "headers", [{}, bearer("sk-baton-wrong"), {"Authorization": "Basic x"}, bearer(""), {"Authorization": "\xff"}]
)
async def test_without_a_known_key_nothing_of_the_api_answers_and_no_body_is_read(
    start_gateway: StartGateway, file: Path, headers: dict[str, str]
) -> None:
    add_key(file, "acme", None)
    gateway = await start_gateway(api_keys=str(file))
    for path in ("/v1/chat/completions", "/v1/completions", "/v1/nothing"):
        reply = await exchange(gateway.url, http(b"{no json", path, headers=headers))
        assert reply.status == 401
        assert reply.headers["www-authenticate"] == "Bearer"
        error = reply.document["error"]
        assert (error["type"], error["code"]) == ("invalid_request_error", "invalid_api_key")
    reply = await exchange(gateway.url, http(b"", "/v1/models", method="GET", headers=headers))
    assert reply.status == 401
    # Announced, never sent: the answer does not wait for it.
    reply = await exchange(gateway.url, http(b"", headers={**headers, "Content-Length": "1000"}), within_s=60.0)
    assert reply.status == 401
    assert gateway.cluster.generates == []
    for path in ("/health", "/ready", "/metrics", "/", "/cluster"):
        status, _ = await gateway.get(path)
        assert status == 200, path
    _, metrics = await gateway.get("/metrics")
    assert 'baton_refusals_total{reason="invalid_api_key"} 5.0' in metrics


async def test_a_known_key_gives_a_request_its_tenant_on_every_call_and_in_every_name(
    start_gateway: StartGateway, file: Path
) -> None:
    keys = [add_key(file, name, None) for name in ("acme", "acme", "other")]
    gateway = await start_gateway(api_keys=str(file))
    gateway.cluster.generate = says([5, 6])
    for key in keys:
        status, _, _ = await gateway.post("/v1/chat/completions", chat_body("Hi " * 20), headers=bearer(key))
        assert status == 200
    origins = [generate.origin for generate in gateway.cluster.generates]
    assert [route.origin for route in gateway.cluster.routes] == origins
    assert origins[0] == origins[1] == Origin(origins[0].tenant, Priority.NORMAL)
    assert len({origin.tenant for origin in origins}) == 2
    first, second, third = (route.prefix for route in gateway.cluster.routes)
    assert first == second != third, "the names of a prompt's blocks are the tenant's own"


async def test_without_a_file_of_keys_everybody_is_let_in_as_nobody(gateway: RunningGateway) -> None:
    gateway.cluster.generate = says([5])
    for headers in ({}, bearer("anything")):
        status, _, _ = await gateway.post("/v1/chat/completions", chat_body(), headers=headers)
        assert status == 200
    assert [generate.origin for generate in gateway.cluster.generates] == [Origin(), Origin()]


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1"])
async def test_a_gateway_without_keys_is_not_reachable_from_elsewhere(start_gateway: StartGateway, host: str) -> None:
    with pytest.raises(ConfigError, match=r"no API keys.*--api-keys FILE"):
        await start_gateway(host=host)


# --- what a request may ask for ------------------------------------------------------------------------------


async def test_a_request_may_say_how_urgent_it_is_and_how_long_it_waits(gateway: RunningGateway) -> None:
    gateway.cluster.generate = says([5])
    await gateway.chat(priority="high")
    headers = {"x-baton-priority": "low", "x-baton-first-token-s": "2.5"}
    await gateway.post("/v1/chat/completions", chat_body(), headers=headers)
    await gateway.post("/v1/chat/completions", chat_body(priority="normal"), headers=headers)
    await gateway.chat(priority=None)
    classes = [route.origin.priority for route in gateway.cluster.routes]
    assert classes == [Priority.HIGH, Priority.LOW, Priority.NORMAL, Priority.NORMAL], "the body's word counts"
    assert [generate.origin.priority for generate in gateway.cluster.generates] == classes
    assert [route.first_token_s for route in gateway.cluster.routes] == [None, 2.5, 2.5, None]


async def test_the_gateways_own_limit_for_the_first_token_is_for_those_that_name_none(
    start_gateway: StartGateway,
) -> None:
    gateway = await start_gateway(first_token_s=4.0)
    gateway.cluster.generate = says([5])
    await gateway.chat()
    await gateway.post("/v1/chat/completions", chat_body(), headers={"x-baton-first-token-s": "9"})
    assert [route.first_token_s for route in gateway.cluster.routes] == [4.0, 9.0]


@pytest.mark.parametrize(("config_s", "header_s"), [(600.0, "0.05"), (0.05, "600")])
async def test_a_header_shortens_the_deadline_and_never_lengthens_it(
    start_gateway: StartGateway, config_s: float, header_s: str
) -> None:
    gateway = await start_gateway(request_timeout_s=config_s)
    gateway.cluster.generate = hangs([])
    status, body, _ = await gateway.post("/v1/chat/completions", chat_body(), headers={"x-baton-timeout-s": header_s})
    assert (status, body["error"]["code"]) == (504, "deadline_exceeded")
    assert gateway.cluster.num_generating == 0


async def test_a_body_that_does_not_come_is_a_408_and_a_header_too_long_a_400(
    gateway: RunningGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gateway_app, "BODY_TIMEOUT_S", 0.05)
    reply = await exchange(gateway.url, http(b"{", headers={"Content-Length": "1000"}))
    assert reply.status == 408
    for headers in ({"X": "x" * 10_000}, {"x" * 10_000: "X"}):
        reply = await exchange(gateway.url, http(chat_body(), headers=headers))
        assert reply.status == 400
        assert "not a valid HTTP request" in reply.document["error"]["message"]
    assert gateway.cluster.generates == []


@pytest.mark.parametrize("value", ["urgent", 1, True, ["high"]])
async def test_a_priority_that_is_none_is_a_400_by_name(gateway: RunningGateway, value: Any) -> None:
    status, body, _ = await gateway.chat(priority=value)
    assert (status, body["error"]["param"]) == (400, "priority")
    assert "high, normal, low" in body["error"]["message"]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("x-baton-priority", "urgent"),
        *(("x-baton-first-token-s", value) for value in ("0", "-1", "nan", "inf", "x", "")),
        *(("x-baton-timeout-s", value) for value in ("0", "-1", "nan", "inf", "x", "")),
    ],
)
async def test_a_header_that_makes_no_sense_is_a_400_by_name(gateway: RunningGateway, name: str, value: str) -> None:
    status, body, _ = await gateway.post("/v1/chat/completions", chat_body(), headers={name: value})
    assert (status, body["error"]["param"]) == (400, name)
    assert gateway.cluster.generates == []
