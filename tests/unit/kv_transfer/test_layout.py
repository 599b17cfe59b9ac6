import msgspec
import pytest

from common.messages import KVLayout, LayerKV
from kv_transfer.layout import mismatch

LAYOUT = KVLayout(block_size=16, dtype="float32", itemsize=4, layers=(LayerKV(3, 64, 64),) * 4)


def test_equal_layouts_fit() -> None:
    assert mismatch(LAYOUT, msgspec.msgpack.decode(msgspec.msgpack.encode(LAYOUT), type=KVLayout)) is None


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"block_size": 32}, "block_size 16 here, 32 there"),
        ({"dtype": "bfloat16", "itemsize": 2}, "KV dtype float32 (4 bytes) here, bfloat16 (2 bytes) there"),
        ({"dtype": "bfloat16", "itemsize": 2, "layers": ()}, "KV dtype float32 (4 bytes) here, bfloat16"),
        ({"layers": LAYOUT.layers[1:]}, "number of attention layers 4 here, 3 there"),
        ({"layers": (*LAYOUT.layers[1:], LayerKV(6, 64, 64))}, "KV heads of layer 3 3 here, 6 there"),
        ({"layers": (LayerKV(3, 32, 64), *LAYOUT.layers[1:])}, "K head_dim of layer 0 64 here, 32 there"),
        ({"layers": (LayerKV(3, 64, 32), *LAYOUT.layers[1:])}, "V head_dim of layer 0 64 here, 32 there"),
    ],
)
def test_the_reason_names_the_coarsest_difference(changes: dict[str, object], reason: str) -> None:
    found = mismatch(LAYOUT, msgspec.structs.replace(LAYOUT, **changes))
    assert found is not None
    assert found.startswith(reason)


def test_layers_of_equal_size_and_different_heads_do_not_fit() -> None:
    """As many bytes a block, and yet they mean something else."""
    other = msgspec.structs.replace(LAYOUT, layers=(LayerKV(6, 32, 32),) * 4)
    assert other.block_bytes == LAYOUT.block_bytes
    assert mismatch(LAYOUT, other) is not None
