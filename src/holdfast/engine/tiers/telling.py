"""Events of the remote tier: they say so, and come to the same sinks."""

from __future__ import annotations

from holdfast.events import Emitter, Event


def remote_emitter(emit: Emitter, url: str, *, only_first: bool = False) -> Emitter:
    """Hands events on with the field `tier="remote"` and the place in the message.

    With `only_first` the first one alone: a network that is away is away for long.
    """
    told: list[Event] = []

    def hand_on(event: Event) -> None:
        if only_first and told:
            return
        told[:] = [event]
        fields = {**event.fields, "tier": "remote"}
        emit(event.kind, f"{url}: {event.message}", step=event.step, **fields)

    return Emitter((hand_on,))
