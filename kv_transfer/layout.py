"""Whether two pools may exchange blocks: they may if the bytes of a block mean the same in both."""

from common.messages import KVLayout, LayerKV


def mismatch(ours: KVLayout, theirs: KVLayout) -> str | None:
    """Why blocks cannot travel between two pools, in words for an operator; None if they can.

    Names the first difference only, the coarsest first: the finer ones usually follow from it.
    """
    if ours.block_size != theirs.block_size:
        return _differs("block_size", ours.block_size, theirs.block_size)
    if (ours.dtype, ours.itemsize) != (theirs.dtype, theirs.itemsize):
        return _differs("KV dtype", _dtype(ours), _dtype(theirs))
    if len(ours.layers) != len(theirs.layers):
        return _differs("number of attention layers", len(ours.layers), len(theirs.layers))
    for index, (mine, yours) in enumerate(zip(ours.layers, theirs.layers, strict=True)):
        if mine != yours:
            return _layer_differs(index, mine, yours)
    return None


def _layer_differs(index: int, ours: LayerKV, theirs: LayerKV) -> str:
    if ours.num_kv_heads != theirs.num_kv_heads:
        return _differs(f"KV heads of layer {index}", ours.num_kv_heads, theirs.num_kv_heads)
    if ours.k_head_dim != theirs.k_head_dim:
        return _differs(f"K head_dim of layer {index}", ours.k_head_dim, theirs.k_head_dim)
    return _differs(f"V head_dim of layer {index}", ours.v_head_dim, theirs.v_head_dim)


def _dtype(layout: KVLayout) -> str:
    return f"{layout.dtype} ({layout.itemsize} bytes)"


def _differs(what: str, ours: object, theirs: object) -> str:
    return f"{what} {ours} here, {theirs} there"
