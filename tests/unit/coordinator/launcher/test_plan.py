import dataclasses
import sys

from common.config import EngineConfig, LinkConfig, ModelConfig, NodeConfig
from common.settings import load
from coordinator.launcher.plan import UpConfig, flags_of, make_plan

COORDINATOR = "tcp://127.0.0.1:5555"


def test_a_cluster_is_a_coordinator_a_gateway_and_its_nodes() -> None:
    plan = make_plan(UpConfig(prefill=1, decode=2), coordinator=COORDINATOR, num_cores=8, env={})
    assert [child.name for child in plan.children] == ["coordinator", "gateway", "prefill-0", "decode-0", "decode-1"]
    assert [child.command[3] for child in plan.children[:3]] == ["coordinator", "coordinator.gateway", "prefill_node"]
    assert all(child.command[:3] == (sys.executable, "-P", "-m") for child in plan.children)
    assert plan.nodes == ("prefill-0", "decode-0", "decode-1")
    assert plan.url == "http://127.0.0.1:8000"


def test_without_prefill_nodes_the_plan_is_colocated() -> None:
    plan = make_plan(UpConfig(prefill=0), coordinator=COORDINATOR, num_cores=2, env={})
    assert plan.nodes == ("decode-0",)


def test_every_process_finds_the_coordinator() -> None:
    plan = make_plan(UpConfig(), coordinator=COORDINATOR, num_cores=2, env={})
    assert "--listen" in plan.children[0].command
    for child in plan.children:
        assert COORDINATOR in child.command


def test_cores_are_divided_between_the_nodes_and_none_gets_less_than_one() -> None:
    for num_cores, threads in ((2, "1"), (7, "3"), (1, "1"), (16, "8")):
        node = make_plan(UpConfig(), coordinator=COORDINATOR, num_cores=num_cores, env={}).children[-1]
        assert node.env["OMP_NUM_THREADS"] == threads
        assert node.command[node.command.index("--threads") + 1] == threads


def test_threads_that_were_asked_for_are_used() -> None:
    config = UpConfig(model=ModelConfig(model="m", threads=3))
    node = make_plan(config, coordinator=COORDINATOR, num_cores=2, env={}).children[-1]
    assert node.env["OMP_NUM_THREADS"] == "3"


def test_flags_say_the_whole_config() -> None:
    config = NodeConfig(
        model=ModelConfig(model="a model", threads=2, batch_invariant=False, quantization="int4"),
        engine=EngineConfig(kv_cache_memory=123456, prefix_cache=False, max_step_s=0.25),
        coordinators=("tcp://127.0.0.1:1", "tcp://127.0.0.1:2"),
        transport="tcp",
    )
    flags = list(flags_of(config, {}))
    assert "--no-prefix-cache" in flags
    assert "--no-batch-invariant" in flags
    given = {
        "model.model": flags[flags.index("--model") + 1],
        "model.threads": flags[flags.index("--threads") + 1],
        "model.batch_invariant": False,
        "model.quantization": flags[flags.index("--quantization") + 1],
        "engine.kv_cache_memory": flags[flags.index("--kv-cache-memory") + 1],
        "engine.prefix_cache": False,
        "engine.max_step_s": flags[flags.index("--max-step-s") + 1],
        "coordinators": [flags[n + 1] for n, flag in enumerate(flags) if flag == "--coordinators"],
        "transport": flags[flags.index("--transport") + 1],
    }
    assert load(NodeConfig, env={}, flags=given) == config


def test_defaults_need_no_flags() -> None:
    assert list(flags_of(UpConfig(), {})) == []
    assert list(flags_of(dataclasses.replace(UpConfig(), decode=2), {})) == ["--decode", "2"]


def test_the_url_of_a_gateway_on_all_addresses_is_one_that_can_be_opened() -> None:
    for host, url in (("0.0.0.0", "http://127.0.0.1:9"), ("::1", "http://[::1]:9"), ("10.0.0.1", "http://10.0.0.1:9")):
        assert make_plan(UpConfig(host=host, port=9), coordinator=COORDINATOR, num_cores=2, env={}).url == url


def test_the_environment_of_the_children_cannot_overrule_what_was_planned() -> None:
    env = {"BATON_GATEWAY_PORT": "1", "BATON_ENGINE_BLOCK_SIZE": "32", "BATON_NODE_PARENT_PIPE": "7"}
    plan = make_plan(UpConfig(), coordinator=COORDINATOR, num_cores=2, env=env)
    gateway, node = plan.children[1].command, plan.children[-1].command
    assert gateway[gateway.index("--port") + 1] == "8000"
    assert node[node.index("--block-size") + 1] == "16"


def test_every_process_gets_the_same_links() -> None:
    config = UpConfig(links=LinkConfig(keys="a folder", beat_s=0.25))
    env = {"BATON_LINKS_KEYS": "another folder", "BATON_LINKS_LOST_AFTER_S": "9"}
    for child in make_plan(config, coordinator=COORDINATOR, num_cores=2, env=env).children:
        given = {flag: child.command[child.command.index(flag) + 1] for flag in ("--keys", "--beat-s")}
        assert given == {"--keys": "a folder", "--beat-s": "0.25"}
        assert child.command[child.command.index("--lost-after-s") + 1] == "4.0"


def test_what_only_the_environment_says_counts() -> None:
    env = {"BATON_GATEWAY_REQUEST_TIMEOUT_S": "5"}
    gateway = make_plan(UpConfig(), coordinator=COORDINATOR, num_cores=2, env=env).children[1].command
    assert gateway[gateway.index("--request-timeout-s") + 1] == "5.0"
