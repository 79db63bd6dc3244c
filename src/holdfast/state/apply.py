"""Loading of stored components into live objects: all checks first, generators last.

Only `Prepared.apply_values` changes live objects for good (tests/state/test_apply.py).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from holdfast.errors import HoldfastError, MismatchError, UsageError
from holdfast.state import modules, optimizers
from holdfast.state.attributes import Attributes
from holdfast.state.components import (
    RNG,
    ParameterNames,
    StoredComponent,
    check_state,
    kind_of,
    parameter_names,
)
from holdfast.state.planning.copying import Stored, UnreadTensor
from holdfast.state.planning.merge import Claims
from holdfast.state.planning.plans import (
    AttributesPlan,
    GeneratorPlan,
    LoadPlan,
    ObjectPlan,
    RngPlan,
    TreePlan,
)
from holdfast.state.resizing import ResizedTensor
from holdfast.state.selection import (
    NOT_LOADED,
    WHOLE,
    Problems,
    Selection,
    StateLoadOptions,
    Tolerated,
    Wishes,
)
from holdfast.state.shards import LocalShards
from holdfast.state.trees import decode_skeleton


class OpaqueLoadFailed(HoldfastError):
    """Error of a load that failed half-way in `component`, whose state is now neither."""

    def __init__(self, component: str, err: BaseException) -> None:
        self.component = component
        super().__init__(
            f"loading component {component!r} failed after other state was already replaced "
            f"({type(err).__name__}: {err}); the live state is now mixed: load again in full"
        )


class Prepared:
    """A load that has passed all checks; nothing live has changed yet."""

    def __init__(
        self,
        plans: Mapping[str, LoadPlan],
        protected: Sequence[Tensor],
        problems: Problems,
        tolerated: Tolerated,
        resized: Mapping[str, Mapping[str, ResizedTensor]],
    ) -> None:
        self.untaken = tuple(problems.untaken)
        """Stored leaves that are not loaded here; other ranks must load them."""
        self._tolerated = tolerated
        self._plans: Mapping[str, LoadPlan] | None = plans
        self._protected = protected
        self.needed: Mapping[str, tuple[str, ...]] = {
            name: plan.needed for name, plan in plans.items()
        }
        """Component -> keys of the tensors that `apply` needs."""
        self.shards: Mapping[str, Mapping[str, LocalShards]] = {
            name: {key: shards[key] for key in plan.needed if key in shards}
            for name, plan in plans.items()
            if (shards := plan.destinations.shards)
        }
        """Component -> key -> the live boxes, for those that go into DTensors: `apply` takes a
        tensor of the local shape for each, and all of every other one."""
        self.notes = (*problems.notes, *problems.lost)
        """Notes on what is left out or not restored exactly; complete after `ready`."""
        self.lost = tuple(problems.lost)
        """Notes on live values that are removed, and after `ready` on memory shared no more."""
        self.unrestored: list[str] = []
        """Components that a trial of `ready` may have changed, and why."""
        self._is_ready = False
        changed = [one for of in resized.values() for one in of.values() if not one.is_slot]
        self.resizes = tuple(one.change for one in changed)
        """A text for each resized tensor, except slots: path, old and new shape."""
        self.notes += self.resizes
        self.resized = resized
        """Component -> key -> the tensor that `ready` needs in the live shape."""

    def ready(self, tensors: Mapping[str, Mapping[str, Stored]]) -> None:
        """Make the new values and validate them; no live object changes. Call once.

        `tensors` holds CPU tensors of the true dtype and shape; for keys in `shards`, of the shape
        of the local tensor. The load takes ownership: those
        with memory of their own may become live tensors. Unread ones are read into the live
        tensors block by block.

        Raises:
            FormatError: a stored value is not valid.
            StoreError: an unread tensor that is needed now cannot be read.
            MismatchError: one live tensor would get two values.
            UsageError: a tensor for a DTensor has another shape than the local one.
        """
        for name, of_component in self.shards.items():
            for key, shards in of_component.items():
                _check_local(f"{name}.{key}", tensors[name][key], shards)
        claims, plans = Claims(self._protected), self._unapplied()
        try:
            for name, plan in plans.items():
                plan.prepare(tensors.get(name, {}), claims)
            claims.expect_agreement()
        except MismatchError as error:
            raise error.with_trials(_unrestored(plans)) from error.__cause__
        finally:
            self.unrestored = _unrestored(plans)
        self.notes += claims.notes
        self.lost += claims.warnings
        self._is_ready = True

    @property
    def tolerated(self) -> list[str]:
        """Notes on leaves that only one side has; with several ranks after `note_untaken`."""
        return self._tolerated.notes

    def note_untaken(self, paths: Sequence[str]) -> None:
        """Note the stored leaves that no rank loads; all others are not `untaken` any more."""
        self.untaken = tuple(paths)
        unexpected = (*self._tolerated.unexpected, *paths)
        self._tolerated = replace(self._tolerated, unexpected=unexpected)
        self.notes += tuple(f"{path}: {NOT_LOADED}" for path in paths)

    def apply_values(self, tensors: Mapping[str, Mapping[str, Stored]]) -> None:
        """Put the stored values, made `ready` first, into the live objects. Call once."""
        plans = self._unapplied()
        if not self._is_ready:
            self.ready(tensors)
        self._plans = None  # plans hold read buffers, which are freed once applied
        for name, plan in plans.items():
            with _failing_as(name):
                plan.apply()
        for name, plan in sorted(plans.items(), key=lambda item: item[1].finish_order):
            with _failing_as(name):
                plan.finish()

    def _unapplied(self) -> Mapping[str, LoadPlan]:
        if self._plans is None:
            raise UsageError("this load was already applied; prepare another one")
        return self._plans


def _unrestored(plans: Mapping[str, LoadPlan]) -> list[str]:
    return [plan.unrestored for plan in plans.values() if plan.unrestored]


def _check_local(path: str, stored: Stored, shards: LocalShards) -> None:
    """Check that a tensor is a rank's part: copying would stretch one of another shape."""
    shape = tuple((stored.spec if isinstance(stored, UnreadTensor) else stored).shape)
    if shape != shards.local_shape:
        expected = list(shards.local_shape)
        raise UsageError(f"{path}: the local tensor is {expected}, the one for it {list(shape)}")


@contextmanager
def _failing_as(component: str) -> Iterator[None]:
    """Raise any error of the block as an `OpaqueLoadFailed` of this component."""
    try:
        yield
    except Exception as err:
        raise OpaqueLoadFailed(component, err) from err


def prepare(
    state: Mapping[str, Any],
    stored: Mapping[str, StoredComponent],
    *,
    where: str,
    options: StateLoadOptions = StateLoadOptions(),
    unread: Collection[str] = (),
    unsaved: Collection[str] = (),
    one_sided: Collection[str] = (),
    divided: Collection[str] = (),
) -> Prepared:
    """Plan a load: match stored components with live ones and check them; changes nothing.

    Args:
        state: live components, as for `capture`.
        stored: components of the checkpoint, at least those that the options name.
        where: the checkpoint's name, for messages.
        options: which leaves are loaded, and how strictly.
        unread: components that the checkpoint has besides `stored`; none of them is loaded.
        unsaved: components that were not saved and stay as they are, with a note.
        one_sided: components that only the state or only the checkpoint may have; they are not
            loaded, even if the options name them.
        divided: components that ranks may have parts of. A stored leaf in them that no live one
            matches may be that of another rank: it is `untaken`, and no error.
    """
    check_state(state)
    wishes, problems = Wishes(options), Problems()
    selection, is_strict = wishes.selection, options.strict and not options.is_grown
    components = options.components
    if components and one_sided:
        components = [name for name in components if name not in one_sided]
    live = [*state, *([] if RNG in state else [RNG])]
    known = dict.fromkeys([*live, *stored, *unread])
    everything = tuple(name for name in known if name not in {*unsaved, *one_sided})
    wanted = _wanted(everything, components, selection, rng=options.rng)
    names = _on_both_sides(wanted, live, stored, problems)
    # Before any `state_dict` is called, as in a capture; only optimizers need the names.
    has_optimizer = any(name in state and kind_of(state[name]) == "optimizer" for name in names)
    parameters = parameter_names(
        (name, value)
        for name, value in state.items()
        if has_optimizer and isinstance(value, nn.Module)
    )
    plans: dict[str, LoadPlan] = {}
    for name in names:
        plan = _plan(name, state, stored[name], parameters, selection, problems)
        if plan is not None:
            skeleton = decode_skeleton(
                stored[name].tree, stored[name].tensors, what=f"{where}: tree of {name}"
            )
            before = len(problems.unexpected)
            plan.check(skeleton, wishes, problems)
            plans[name] = plan
            if name in divided:
                problems.untaken += problems.unexpected[before:]
                del problems.unexpected[before:]
    _report_selection(wishes, problems, wanted=wanted, everything=everything, planned=plans)
    problems.other += wishes.resizing.list_refused()
    for path, kept, now in wishes.resizing.list_unresized():
        problems.record_shape(path, kept, now)
    tolerated = Tolerated()
    if not is_strict:
        tolerated = problems.tolerate(lambda path: not options.strict or not path.endswith(WHOLE))
    problems.other += [
        f"{name}: the live state has none of its names, so nothing would be loaded"
        for name, plan in plans.items()
        if not is_strict
        and isinstance(plan, modules.ModulePlan)
        and stored[name].tensors
        and not plan.needed
        and not selection.is_partial(name)
        and _tensors_of(state[name])
    ]
    problems.raise_if_any(where)
    if components is not None or options.include or options.skip:
        # Generators alone are chosen by name only, and not what a `skip` happens to leave.
        is_named = components is not None or bool(options.include)
        chosen = {n: p for n, p in plans.items() if is_named or not isinstance(p, RngPlan)}
        _expect_a_choice(chosen, stored, selection, components, everything)
    problems.notes += [f"saved without {name}, which is unchanged" for name in unsaved]
    protected = [
        tensor
        for value in state.values()
        if isinstance(value, nn.Module)
        for tensor in _tensors_of(value)
    ]
    resized = wishes.resizing.made
    problems.lost += [one.lost for of in resized.values() for one in of.values() if one.lost]
    return Prepared(plans, protected, problems, tolerated, resized)


def _expect_a_choice(
    plans: Mapping[str, LoadPlan],
    stored: Mapping[str, StoredComponent],
    selection: Selection,
    components: Collection[str] | None,
    everything: Collection[str],
) -> None:
    """Refuse a choice of components and leaves that loads nothing."""
    for name, plan in plans.items():
        is_of_tensors = isinstance(plan, modules.ModulePlan | optimizers.OptimizerPlan)
        if plan.needed or not (is_of_tensors and stored[name].tensors):
            return
        if not selection.is_partial(name):
            return
    chosen = "" if components is None else f"components={[*components]}, "
    raise UsageError(
        f"nothing would be loaded: {chosen}{selection} leave nothing of the components "
        f"{', '.join(everything)}"
    )


def _tensors_of(module: nn.Module) -> tuple[Tensor, ...]:
    return (*module.parameters(), *module.buffers())


def _wanted(
    everything: Collection[str],
    components: Collection[str] | None,
    selection: Selection,
    *,
    rng: bool,
) -> list[str]:
    """List the components to load: live ones in their order, then those that are only stored."""
    asked = _checked_components(components, everything)
    omitted = {name for name in everything if selection.omits(name)}
    if not rng:
        omitted.add(RNG)
    return [name for name in everything if name in asked and name not in omitted]


def _on_both_sides(
    wanted: list[str], live: Collection[str], stored: Collection[str], problems: Problems
) -> list[str]:
    chosen = []
    for name in wanted:
        if name not in stored:
            problems.missing.append(name + WHOLE)
        elif name not in live:
            problems.unexpected.append(name + WHOLE)
        else:
            chosen.append(name)
    return chosen


def _report_selection(
    wishes: Wishes,
    problems: Problems,
    *,
    wanted: Collection[str],
    everything: Collection[str],
    planned: Collection[str],
) -> None:
    """Note the excluded components; raise for entries that match nothing, or note them."""
    unseen = set(everything) - set(planned)
    lost = [*wishes.selection.unmatched(unseen), *wishes.rename.unmatched()]
    lost += wishes.resizing.unmatched(unseen)
    problems.lost += wishes.resizing.list_idle(unseen)
    if lost and wishes.strict:
        raise UsageError("; ".join(lost))
    omitted = [name for name in everything if name not in wanted]
    if omitted:
        problems.notes.append(f"not selected: {', '.join(omitted)}")
    problems.notes += [*wishes.selection.list_excluded(planned), *lost]


def _checked_components(
    components: Collection[str] | None, everything: Collection[str]
) -> set[str]:
    if components is None:
        return set(everything)
    if isinstance(components, str):
        raise UsageError(f"components={components!r}: pass a collection of names")
    unknown = sorted(set(components) - set(everything))
    if unknown:
        raise UsageError(f"components: {unknown} are neither live nor stored")
    return set(components)


def _plan(
    name: str,
    state: Mapping[str, Any],
    stored: StoredComponent,
    parameters: ParameterNames,
    selection: Selection,
    problems: Problems,
) -> LoadPlan | None:
    kind = kind_of(state[name]) if name in state else RNG
    if stored.kind != kind:
        problems.other.append(f"{name}: stored as {stored.kind[:20]}, live as {kind}")
        return None
    if kind == RNG:
        return RngPlan(stored.tensors)
    live = state[name]
    if kind == "module":
        live_module = modules.inspect(live, modules.state_of(name, live))
        return modules.ModulePlan(name, live_module, stored.tensors)
    if kind == "optimizer":
        inspected = optimizers.inspect(live, parameters)
        return optimizers.OptimizerPlan(name, inspected, stored.tensors)
    if kind == "generator":
        return None if selection.is_excluded(name) else GeneratorPlan(name, live, stored.tensors)
    plan = ObjectPlan if kind == "object" else TreePlan
    return (AttributesPlan if isinstance(live, Attributes) else plan)(name, live, stored.tensors)
