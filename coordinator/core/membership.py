"""Who fits whom. Pairing is checked, never assumed.

1. Nodes that serve the same model name must agree on the model's digest, its quantization and the KV layout. The
   reference is what most of them have; of equally many, what was there first. So one wrong node that happens to
   register first after a coordinator's restart does not put the rest of the cluster out of service.
2. A node that differs from the reference is listed with the reason and never routed to.
3. A prefill and a decode node work together if their digests and layouts are equal, at least one transport
   reaches from the decode node to the prefill node's pool, and the prompt is not too long for either.
"""

from collections import Counter
from collections.abc import Sequence

from common.messages import NodeCard, NodeId
from kv_transfer.layout import mismatch

# Its reader maps the owner's memory, so it reaches no other host.
_SAME_HOST_ONLY = "shm"


def reference(cards: Sequence[NodeCard]) -> NodeCard:
    """The card that the others are compared with. `cards` serve one model name, in order of registration."""
    kinds = [(card.model_digest, card.quantization, card.layout) for card in cards]
    counts = Counter(kinds)
    most = max(counts.values())
    return next(card for card, kind in zip(cards, kinds, strict=True) if counts[kind] == most)


def misfits(cards: Sequence[NodeCard]) -> dict[NodeId, str]:
    """The nodes of one model name that differ from the reference, with the reason."""
    standard = reference(cards)
    reasons = {card.node: model_mismatch(card, standard) for card in cards}
    return {node: f"does not fit {standard.node}: {reason}" for node, reason in reasons.items() if reason is not None}


def model_mismatch(ours: NodeCard, theirs: NodeCard) -> str | None:
    """Why two nodes of one model name compute different things, or None."""
    if ours.quantization != theirs.quantization:  # it enters the digest, which says less
        return f"quantization {ours.quantization} here, {theirs.quantization} there"
    if ours.model_digest != theirs.model_digest:
        return f"model digest {ours.model_digest[:12]} here, {theirs.model_digest[:12]} there"
    return mismatch(ours.layout, theirs.layout)


def common_transports(prefill: NodeCard, decode: NodeCard) -> tuple[str, ...]:
    """The transports by which `decode` can pull from the pool of `prefill`, in the order they are offered."""
    spoken = {offer.transport for offer in decode.offers}
    return tuple(
        offer.transport
        for offer in prefill.offers
        if (not spoken or offer.transport in spoken)
        and (offer.transport != _SAME_HOST_ONLY or prefill.host == decode.host)
    )


def pair_mismatch(prefill: NodeCard, decode: NodeCard) -> str | None:
    """Why these two cannot work together on any prompt, or None."""
    if prefill.model != decode.model:
        return f"{prefill.node} serves {prefill.model}, {decode.node} serves {decode.model}"
    if reason := model_mismatch(prefill, decode):
        return reason
    if not common_transports(prefill, decode):
        offered = ", ".join(offer.transport for offer in prefill.offers) or "none"
        spoken = ", ".join(offer.transport for offer in decode.offers) or "any"
        return f"no transport in common: {prefill.node} offers {offered}, {decode.node} speaks {spoken}"
    return None


def longest_prompt(card: NodeCard) -> int:
    """The most prompt tokens this node takes: one token of its context is left for the answer."""
    return min(card.max_model_len - 1, card.num_blocks * card.layout.block_size)


def longest_shared_prompt(prefill: NodeCard, decode: NodeCard) -> int:
    """The most prompt tokens this pair takes.

    The prefill node draws the first token under its own limits. Where its context is the shorter one, a
    prompt that fills it would end there with "length" although the decode node could go on.
    """
    cut_short = prefill.max_model_len < decode.max_model_len
    return min(longest_prompt(decode), longest_prompt(prefill) - (1 if cut_short else 0))
