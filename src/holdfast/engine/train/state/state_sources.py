"""Gets states and reduced steps from checkpoints, the nodes' memory, members and feeds."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from holdfast.engine.core.errors import Aborted, Damaged, UserError, WorldError
from holdfast.engine.core.ground import effects as ef
from holdfast.engine.core.ground import events as ev
from holdfast.engine.core.ground.ends import SourceKind
from holdfast.engine.core.invalidations import Invalidations
from holdfast.engine.core.types import WorkerId
from holdfast.engine.state.store.storage import Missing
from holdfast.engine.train.checkpoint.restorer import Restorer
from holdfast.engine.train.checkpoint.saver import say
from holdfast.engine.train.feeding.fed_receiver import FedReceiver
from holdfast.engine.train.protection.recalling import Recalling
from holdfast.engine.train.step.missed_steps import MissedSteps
from holdfast.engine.train.step.mover import Events, ViewConnections

STORE_PAUSE_S = 1.0  # before a store that does not answer is asked again


class PlainSource:
    """Refuses states and steps; a source overrides the methods for those it gives."""

    def load_state(self, order: ef.ObtainState, at: ViewConnections | None) -> Events:
        """Refuse a state, since this source gives none."""
        raise AssertionError(f"no state comes from {order.source}")

    def take_step(self, order: ef.ObtainStep, at: ViewConnections | None) -> Events:
        """Refuse a step, since this source gives none."""
        raise AssertionError(f"no step comes from {order.source}")


class StoreSource(PlainSource):
    """Reads checkpoints, together with all members of a view; `restorer` is None without a store.

    `loading` is called just before anything is overwritten, `loaded` with the step afterwards.
    """

    def __init__(
        self,
        restorer: Restorer | None,
        loading: Callable[[], None],
        loaded: Callable[[int], None] = lambda step: None,
    ) -> None:
        self._restorer = restorer
        self._loading = loading
        self._loaded = loaded

    def load_state(self, order: ef.ObtainState, at: ViewConnections | None) -> Events:
        """Read the checkpoint of a step: no member holds the state. UserError without a store."""
        restorer, step, number = self._restorer, order.step, order.view
        if restorer is None:
            raise UserError(f"the job is to begin at step {step}, and has no --store")
        assert at is not None, "a checkpoint is read in a view"
        try:
            try:
                restorer.restore(step, at.transport, at.layout, self._loading)
                self._loaded(step)
                return (ev.StateObtained(SourceKind.STORE, number),)
            except (Damaged, Missing) as error:
                text = f"the checkpoint of step {step} is not used: {error}"
                other = restorer.find_replacement(step, at.view.invalidations)
                return (ev.ObtainFailed(SourceKind.STORE, number, text, step, other),)
        except Aborted:
            raise
        except WorldError as error:  # it may answer again: the next view tries
            text = f"the checkpoint of step {step} cannot be read just now: {error}"
            say(text)
            time.sleep(STORE_PAUSE_S)
            return (ev.ObtainFailed(SourceKind.STORE, number, text),)

    def withdraw(self, invalidations: Invalidations) -> None:
        """Remove invalidated checkpoints from the store beside the work, whenever it answers."""
        restorer = self._restorer
        if restorer is None:
            return

        def withdraw() -> None:
            while True:
                try:
                    restorer.withdraw(invalidations)
                    break
                except WorldError as error:
                    say(f"invalidated checkpoints cannot be removed just now: {error}")
                    time.sleep(STORE_PAUSE_S)

        threading.Thread(target=withdraw, name="holdfast-withdraw", daemon=True).start()


class MemorySource(PlainSource):
    """Puts states and steps together from pieces in the nodes' memory; `tell` posts an event."""

    def __init__(
        self,
        recalling: Recalling,
        me: WorkerId,
        loading: Callable[[], None],
        tell: Callable[[ev.WorkerEvent], None],
    ) -> None:
        self._recalling = recalling
        self._me = me
        self._loading = loading
        self._tell = tell

    def load_state(self, order: ef.ObtainState, at: ViewConnections | None) -> Events:
        """Load the state from which a view begins."""
        assert at is not None, "a state is recalled in a view"
        return self._describe_recall(at, self._recalling.state(at.view, self._loading))

    def take_step(self, order: ef.ObtainStep, at: ViewConnections | None) -> Events:
        """Put the gradient of a step where the script finds it."""
        assert at is not None, "a step is recalled in a view"
        return self._describe_recall(at, self._recalling.step(at.view, order.step))

    def _describe_recall(self, at: ViewConnections, event: ev.WorkerEvent) -> Events:
        """Have the leader describe the recall, once it is complete."""
        news = self._recalling.news
        if news and self._me == at.view.leader:
            self._tell(ev.EventNoted("memory", news))
        return (event,)


class MembersSource(PlainSource):
    """Receives steps that members of the view have kept for this worker."""

    def __init__(self, missed: MissedSteps) -> None:
        self._missed = missed

    def take_step(self, order: ef.ObtainStep, at: ViewConnections | None) -> Events:
        """Receive one step, into the place of its result."""
        assert at is not None, "members give steps in a view"
        self._missed.receive(at.transport, at.donors)
        return (ev.StepObtained(SourceKind.MEMBERS, order.view, order.step),)


class FeedSource(PlainSource):
    """Loads and applies what members feed this worker."""

    def __init__(self, receiver: FedReceiver) -> None:
        self._receiver = receiver

    def load_state(self, order: ef.ObtainState, at: ViewConnections | None) -> Events:
        """Begin to load the state that was fed; that it is loaded is told later."""
        self._receiver.load(order.order)
        return ()

    def take_step(self, order: ef.ObtainStep, at: ViewConnections | None) -> Events:
        """Put the gradient of a step where the script finds it."""
        return self._receiver.take(order.view, order.step)
