"""What the gateway shows of the cluster, and how it finds a coordinator."""

import asyncio

from common.messages import NodeState, Role, View
from tests.unit.coordinator.gateway.cluster import COORDINATOR, MODEL, node_view, says
from tests.unit.coordinator.gateway.conftest import RunningGateway, StartGateway


async def becomes(gateway: RunningGateway, path: str, status: int) -> object:
    async with asyncio.timeout(5.0):
        while True:
            found, body = await gateway.get(path)
            if found == status:
                return body


async def test_ready_means_that_a_decode_node_of_the_model_is(gateway: RunningGateway) -> None:
    assert await becomes(gateway, "/ready", 200) == {"ready": True}
    stalled = node_view("d1", state=NodeState.STALLED, reason="no step for 9 s")
    await gateway.cluster.change(view=View((node_view("p1", Role.PREFILL), stalled, node_view("d2", model="other"))))
    body = await becomes(gateway, "/ready", 503)
    assert body == {
        "ready": False,
        "reason": f"no decode node is ready for {MODEL}: d1 is stalled (no step for 9 s); d2 serves other",
    }
    await gateway.cluster.change(view=View((node_view("d3"),)))
    await becomes(gateway, "/ready", 200)


async def test_health_needs_no_cluster(gateway: RunningGateway) -> None:
    await gateway.cluster.change(away={COORDINATOR: True})
    body = await becomes(gateway, "/ready", 503)
    assert body == {"ready": False, "reason": f"no coordinator answers at {COORDINATOR}"}
    assert await gateway.get("/health") == (200, {"status": "ok"})


async def test_models_are_those_that_can_answer(gateway: RunningGateway) -> None:
    status, models = await gateway.get("/v1/models")
    assert status == 200
    assert [(m["id"], m["object"], m["max_model_len"]) for m in models["data"]] == [(MODEL, "model", 100)]
    assert (await gateway.get(f"/v1/models/{MODEL}"))[1] == models["data"][0]
    status, body = await gateway.get("/v1/models/some/other")
    assert (status, body["error"]["code"]) == (404, "model_not_found")
    await gateway.cluster.change(view=View())
    await becomes(gateway, f"/v1/models/{MODEL}", 404)
    assert (await gateway.get("/v1/models"))[1]["data"] == []


async def test_a_lost_coordinator_is_replaced_by_the_next_one(start_gateway: StartGateway) -> None:
    gateway = await start_gateway(coordinators=(COORDINATOR, "tcp://second"))
    await becomes(gateway, "/ready", 200)
    assert (await gateway.get("/cluster"))[1]["coordinator"] == COORDINATOR
    await gateway.cluster.change(away={COORDINATOR: True})
    await gateway.cluster.until(lambda: bool(gateway.cluster.open_calls))
    gateway.cluster.generate = says([1])
    status, _, _ = await gateway.chat()
    assert status == 200


async def test_a_request_waits_for_a_coordinator_that_comes_back(gateway: RunningGateway) -> None:
    gateway.cluster.generate = says([1])
    await gateway.cluster.change(away={COORDINATOR: True})
    await becomes(gateway, "/ready", 503)
    running = asyncio.create_task(gateway.chat())
    while "baton_gateway_requests_in_flight 1.0" not in (await gateway.get("/metrics"))[1]:
        pass
    await gateway.cluster.change(away={})
    status, _, _ = await running
    assert status == 200


async def test_the_page_needs_nothing_from_elsewhere(gateway: RunningGateway) -> None:
    async with gateway.http.get(f"{gateway.url}/") as response:
        page = await response.text()
        assert response.content_type == "text/html"
    assert "<title>Baton</title>" in page
    assert "http://" not in page
    assert "https://" not in page
    _, cluster = await gateway.get("/cluster")
    assert cluster["ready"] is True
    assert cluster["tokens_per_s"] == 12.5, "what prefill reads is no output"
    assert [(node["node"], node["role"], node["state"]) for node in cluster["nodes"]] == [
        ("p1", "prefill", "ready"),
        ("d1", "decode", "ready"),
    ]
    for field in ("blocks", "free_blocks", "leased_blocks", "tokens_per_s", "running", "waiting", "progress_age_s"):
        assert f".{field}" in page
        assert field in cluster["nodes"][0]


async def test_metrics_count_requests_tokens_and_phases(gateway: RunningGateway) -> None:
    tokens = gateway.tokenizer.encode("one two three")
    gateway.cluster.generate = says(tokens, cached_tokens=3)
    _, answer, _ = await gateway.chat()
    await gateway.chat(n=99)
    _, metrics = await gateway.get("/metrics")
    values = dict(line.rsplit(" ", 1) for line in metrics.splitlines() if not line.startswith("#"))
    chat = "/v1/chat/completions"
    assert values[f'baton_gateway_requests_total{{route="{chat}",status="200"}}'] == "1.0"
    assert values[f'baton_gateway_requests_total{{route="{chat}",status="400"}}'] == "1.0"
    assert values["baton_gateway_output_tokens_total"] == str(float(len(tokens)))
    assert values["baton_gateway_prompt_tokens_total"] == str(float(answer["usage"]["prompt_tokens"]))
    assert values["baton_gateway_cached_tokens_total"] == "3.0"
    assert values["baton_gateway_attempts_total"] == "1.0"
    assert values["baton_gateway_failovers_total"] == "0.0"
    assert values["baton_gateway_ttft_seconds_count"] == "1.0"
    assert values["baton_gateway_itl_seconds_count"] == str(float(len(tokens) - 1))
    assert values['baton_gateway_node_phase_seconds_total{phase="decode"}'] == "0.5"
    phases = sum(float(value) for name, value in values.items() if "gateway_phase_seconds_total" in name)
    assert abs(phases - float(values["baton_gateway_request_seconds_sum"])) < 1e-6
